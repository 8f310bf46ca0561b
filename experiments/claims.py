"""Several processes share the work in one folder: each claims a piece by a lock file, and outlived locks are taken over."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sgm_ppl.files import explain_write_errors, make_folder

__all__ = ["LEASE", "claimed"]

LOCK = ".lock"
LEASE = 600.0  # seconds without a sign of life after which a lock is nobody's; clocks of several machines may differ


@contextmanager
def claimed(folder: Path, *, lease: float = LEASE) -> Iterator[bool]:
    """Whether this process may work in `folder`, which is made where it is missing; no other may, until it leaves.

    A claim is the file `.lock`, which only one process can create. Its holder touches it several times within the lease.
    It is outlived, and taken over, after a lease without that, or at once where the holder ran on this machine and is
    gone. Taking over needs a second such file for a moment, so that of several processes one does it.
    """
    lock = make_folder(Path(folder)) / LOCK
    token = secrets.token_hex(8)
    if not (_create(lock, token) or _take_over(lock, token, lease)):
        yield False
        return
    left = threading.Event()
    alive = threading.Thread(target=_touch_until, args=(left, lock, token, lease / 6), daemon=True)
    alive.start()
    try:
        yield True
    finally:
        left.set()
        alive.join()
        if _read(lock).get("token") == token:
            lock.unlink(missing_ok=True)


def _create(lock: Path, token: str) -> bool:
    """Make the file, unless it is there: the one step that only one process can succeed in."""
    try:
        with explain_write_errors(lock), open(lock, "x") as file:
            json.dump({"token": token, "machine": _machine(), "process": os.getpid()}, file)
    except FileExistsError:
        return False
    return True


def _take_over(lock: Path, token: str, lease: float) -> bool:
    if not _outlived(lock, lease):
        return False
    turn = lock.with_name(f"{LOCK}.turn")
    if not _create(turn, token):
        if _age(turn) > lease:  # whoever took it died within the few milliseconds that it is held
            turn.unlink(missing_ok=True)
        return False
    try:
        if not _outlived(lock, lease):  # looked at again: somebody may have had a turn in between
            return False
        lock.unlink(missing_ok=True)
        return _create(lock, token)
    finally:
        turn.unlink(missing_ok=True)


def _outlived(lock: Path, lease: float) -> bool:
    """Whether the holder has given no sign of life for a lease, or is known to be gone."""
    if _age(lock) > lease:
        return True
    holder = _read(lock)
    if os.name != "posix" or holder.get("machine") != _machine():
        return False
    try:
        os.kill(int(holder["process"]), 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError):
        pass
    return False


def _touch_until(left: threading.Event, lock: Path, token: str, every: float) -> None:
    while not left.wait(every):
        if _read(lock).get("token") == token:
            with suppress(OSError):
                os.utime(lock)


def _read(lock: Path) -> dict[str, Any]:
    """What a lock says; nothing while it is being written, or after it is gone."""
    try:
        said = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _age(lock: Path) -> float:
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:
        return 0.0


def _machine() -> str:
    """This machine, and where there are several spaces of process numbers on it, this one."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
