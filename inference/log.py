"""The JSON-lines log of a run: one line an entry, several stages in one file."""

import json
from pathlib import Path
from typing import Any

from sgm_ppl.files import explain_write_errors, jsonable, write_atomically

__all__ = ["Log", "read_log"]

Entry = dict[str, Any]


def read_log(path: Path | str, stage: str | None = None) -> list[Entry]:
    """The entries of a log, or those of one stage. A last line that was cut off by a crash does not count."""
    entries = []
    text = Path(path).read_text()
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            entry = json.loads(line)
            if stage is None or entry["stage"] == stage:
                entries.append({name: _number(name, value) for name, value in entry.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {path} is not a log entry: {line!r}. Mend or delete that file."
            ) from error
    return entries


class Log:
    """The entries of one stage, in memory and, given a path, appended to that file as they come.

    Opened after `step` steps, it keeps what was logged up to there and drops what an earlier process logged after it.
    """

    def __init__(self, path: Path | None, stage: str, step: int) -> None:
        self.path = path
        self.stage = stage
        self.entries: list[Entry] = []
        if path is not None and path.exists():
            kept = [entry for entry in read_log(path) if entry["stage"] != stage or entry["step"] <= step]
            write_atomically(path, "".join(map(_line, kept)).encode())
            self.entries = [entry for entry in kept if entry["stage"] == stage]

    def add(self, step: int, values: Entry) -> None:
        """Append an entry."""
        entry = {"stage": self.stage, "step": step, **values}
        self.entries.append(entry)
        if self.path is not None:
            with explain_write_errors(self.path), open(self.path, "a") as file:
                file.write(_line(entry))


def _line(entry: Entry) -> str:
    return json.dumps(jsonable(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _number(name: str, value: Any) -> Any:
    return float(value) if isinstance(value, str) and name != "stage" else value
