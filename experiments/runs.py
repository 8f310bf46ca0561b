"""A run is a folder: config.json, log.jsonl, metrics.json, checkpoints, figures. It is resumed or refused, not lost."""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sgm_ppl.files import jsonable, make_folder, write_json

__all__ = ["Run", "config_to_json", "load_config", "read_json"]

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of one run. Made by `Run.open`, which sees to it that the folder and the configuration agree.

    `fit(..., out=run.folder, label=stage)` puts its log and the checkpoints of each stage in there.
    """

    folder: Path

    @classmethod
    def open(cls, out: Path | str, config: Any) -> "Run":
        """Start a run in `out`, or resume the run that is there if it has the same configuration.

        Fields declared with `dataclasses.field(compare=False)` (how much to print, where to) are no part of it.
        """
        folder = Path(out)
        path = folder / "config.json"
        ours = config_to_json(config)
        if path.is_file():
            if differing := _differences(read_json(path), ours):
                listed = "".join(f"\n  {line}" for line in differing)
                raise FileExistsError(
                    f"{folder} holds a run with another configuration:{listed}\n"
                    "Choose another --out, use the same configuration to resume it, or delete the folder."
                )
        elif folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder} is a file, not the folder of a run. Choose another --out.")
        elif folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise FileExistsError(
                f"{folder} is not empty and has no config.json, so it is not a run. Choose another --out, or empty it."
            )
        else:
            write_json(make_folder(folder) / "config.json", ours)
        return cls(folder)

    @property
    def metrics(self) -> dict[str, Any]:
        """What `save_metrics` wrote; nothing before that."""
        path = self.folder / "metrics.json"
        return read_json(path) if path.is_file() else {}

    @property
    def finished(self) -> bool:
        """Whether the metrics, the last thing that a run writes, are there."""
        return (self.folder / "metrics.json").is_file()

    def save_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write metrics.json: nested dictionaries of numbers, arrays and strings. It marks the run as finished."""
        write_json(self.folder / "metrics.json", metrics)

    def figure(self, name: str) -> Path:
        """Where to save a figure: `figures/<name>.png`, or with the suffix of `name`; the folder is there."""
        path = make_folder(self.folder / "figures") / name
        return path if path.suffix else path.with_suffix(".png")


def config_to_json(config: Any) -> Any:
    """A frozen dataclass as plain JSON: "class" is its name, enums are names, tuples are lists, and so on inside."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: config_to_json(getattr(config, f.name)) for f in dataclasses.fields(config) if f.compare}
        return {"class": type(config).__name__, **fields}
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, list | tuple):
        return [config_to_json(entry) for entry in config]
    if isinstance(config, Mapping):
        return {name: config_to_json(entry) for name, entry in config.items()}
    return jsonable(config)


def load_config(path: Path | str, cls: type[Config]) -> Config:
    """The configuration in a config.json, or in the run folder `path`, as an instance of the dataclass `cls`."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        return _decode(read_json(path), cls, "")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, so this is not the folder of a run.") from None
    except ValueError as error:
        raise ValueError(f"{path} does not fit {cls.__name__}: {error}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file of a run."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Mend it, or delete the run.") from error


def _differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        inside = f"{name}." if name else ""
        return [
            line
            for key in theirs | ours
            for line in _differences(theirs.get(key, "nothing"), ours.get(key, "nothing"), f"{inside}{key}")
        ]
    return [] if theirs == ours else [f"{name}: {theirs} there, {ours} now"]


def _decode(value: Any, hint: Any, name: str) -> Any:
    """`value`, read from JSON, as the annotation `hint` wants it: the inverse of `config_to_json`."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(value, options, name)
    if origin is typing.Literal and any(value == option and type(value) is type(option) for option in options):
        return value
    if (origin or hint) in (tuple, list) and isinstance(value, list):
        return _decode_sequence(value, origin or hint, options, name)
    if (origin or hint) is dict and isinstance(value, dict):
        of = options[1] if options else Any
        return {key: _decode(entry, of, f"{name}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_dataclass(value, hint, name)
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and value in list(hint.__members__):
        return hint[value]
    if hint is float and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any or type(value) is hint:
        return value
    raise ValueError(f"`{name}` must be {getattr(hint, '__name__', hint)}; got {value!r}.")


def _decode_union(value: Any, options: tuple, name: str) -> Any:
    fallback, reasons = None, []
    for option in options:
        try:
            decoded = _decode(value, option, name)
        except ValueError as error:
            reasons.append(str(error))
            continue
        encoded = config_to_json(decoded)
        if encoded == value and type(encoded) is type(value):
            return decoded
        fallback = fallback or (decoded,)
    if fallback is None:
        raise ValueError(" Or: ".join(reasons))
    return fallback[0]


def _decode_sequence(value: list, kind: type, options: tuple, name: str) -> Any:
    if not options:
        of = [Any] * len(value)
    elif kind is list or options[-1] is Ellipsis:
        of = [options[0]] * len(value)
    else:
        of = list(options)
    if len(of) != len(value):
        raise ValueError(f"`{name}` must have {len(of)} entries; got {value!r}.")
    return kind(_decode(entry, hint, f"{name}[{i}]") for i, (entry, hint) in enumerate(zip(value, of, strict=True)))


def _decode_dataclass(value: dict, cls: Any, name: str) -> Any:
    inside = f"{name}." if name else ""
    if (written := value.get("class", cls.__name__)) != cls.__name__:
        raise ValueError(f"{f'`{name}`' if name else 'it'} must be a {cls.__name__}; got a {written}.")
    hints = typing.get_type_hints(cls)
    expected = [field.name for field in dataclasses.fields(cls) if field.compare]
    given = [key for key in value if key != "class"]
    if unknown := [f"`{inside}{key}`" for key in given if key not in expected]:
        raise ValueError(f"unknown {', '.join(unknown)}; {cls.__name__} has {', '.join(expected)}.")
    if missing := [f"`{inside}{key}`" for key in expected if key not in given]:
        raise ValueError(f"missing {', '.join(missing)}.")
    return cls(**{key: _decode(value[key], hints[key], f"{inside}{key}") for key in given})
