"""Files: whole or not there, with the permissions of any other file; JSON; the cache."""

import errno
import json
import os
import stat

import numpy as np
import pytest

from sgm_ppl.files import atomic_file, cache_folder, cached, jsonable, write_json


def test_json_of_arrays_and_infinities(tmp_path):
    value = {
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": (np.nan, -np.inf),
        "d": np.bool_(True),
        "e": tmp_path,
        "f": None,
    }
    assert jsonable(value) == {"a": 0.5, "b": [0, 1], "c": ["nan", "-inf"], "d": True, "e": str(tmp_path), "f": None}
    with pytest.raises(TypeError, match="JSON holds numbers, strings"):
        jsonable({"a": object()})


@pytest.mark.parametrize("failing", ["os.replace", "os.fsync"])
def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch, failing):
    write_json(tmp_path / "metrics.json", {"old": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(failing, full)
        with pytest.raises(OSError, match=r"Cannot write .*metrics.json: No space left on device"):
            write_json(tmp_path / "metrics.json", {"new": 2})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "metrics.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "metrics.json").stat().st_mode) == mode


def test_a_writer_that_fails_halfway_leaves_nothing(tmp_path):
    with pytest.raises(TypeError), atomic_file(tmp_path / "sheet.png") as file:
        file.writelines([b"half", "not bytes"])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_there_before_it_is_whole_and_two_may_write_it(tmp_path):
    with atomic_file(tmp_path / "x") as first, atomic_file(tmp_path / "x") as second:
        first.write(b"first")
        second.write(b"second")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_bytes() == b"first"  # the last one to finish
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("SGM_PPL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "sgm-ppl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "sgm-ppl"
    monkeypatch.setenv("SGM_PPL_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_the_cache_follows_its_source_and_survives_damage(tmp_path, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "cache"
    source.write_text("one")
    monkeypatch.setenv("SGM_PPL_CACHE", str(folder))
    calls = []

    def make():
        calls.append(1)
        return {"a": np.arange(3)}

    for _ in range(2):
        assert cached("x", [source], make)["a"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    (stored,) = folder.iterdir()
    stored.write_bytes(stored.read_bytes()[:20])  # truncated
    assert cached("x", [source], make)["a"].tolist() == [0, 1, 2]
    assert len(calls) == 2
    source.write_text("another")
    cached("x", [source], make)
    assert len(calls) == 3


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("SGM_PPL_CACHE", str(blocked / "below"))
    assert cached("x", [blocked], lambda: {"a": np.zeros(2)})["a"].tolist() == [0, 0]
