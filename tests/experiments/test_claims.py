"""Claims: one process at a time, whatever happens to the one before."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from sgm_ppl.experiments.claims import LOCK, claimed


def leave_lock(folder, **said):
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps({"token": "other", **said}))
    return folder / LOCK


def test_one_claim_at_a_time(tmp_path):
    with claimed(tmp_path / "cell") as first:
        assert first
        with claimed(tmp_path / "cell") as second:
            assert not second
        assert (tmp_path / "cell" / LOCK).exists()  # who was refused does not release
        with claimed(tmp_path / "another") as other:
            assert other
    assert not (tmp_path / "cell" / LOCK).exists()
    with claimed(tmp_path / "cell") as again:
        assert again


def test_an_error_releases_the_claim(tmp_path):
    with pytest.raises(RuntimeError, match="broken"), claimed(tmp_path):
        raise RuntimeError("broken")
    with claimed(tmp_path) as free:
        assert free


def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path):
    program = f"""
        import os
        from pathlib import Path
        from sgm_ppl.experiments.claims import claimed
        with claimed(Path({str(tmp_path)!r})) as mine:
            assert mine
            os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    assert (tmp_path / LOCK).exists()
    with claimed(tmp_path) as mine:
        assert mine
    assert not list(tmp_path.iterdir())


def test_a_lock_from_elsewhere_holds_for_a_lease(tmp_path):
    lock = leave_lock(tmp_path, machine="elsewhere", process=1)
    with claimed(tmp_path, lease=60) as mine:
        assert not mine
    os.utime(lock, (time.time() - 100,) * 2)
    with claimed(tmp_path, lease=60) as mine:
        assert mine


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"machine": 3}'])
def test_a_lock_that_cannot_be_read_holds_for_a_lease(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with claimed(tmp_path, lease=60) as mine:
        assert not mine
    os.utime(tmp_path / LOCK, (0, 0))
    with claimed(tmp_path, lease=60) as mine:
        assert mine


def test_the_holder_keeps_its_lock_young(tmp_path):
    with claimed(tmp_path, lease=0.3) as mine:
        assert mine
        time.sleep(0.7)
        with claimed(tmp_path, lease=0.3) as other:
            assert not other


def test_whoever_lost_a_claim_leaves_the_new_one_alone(tmp_path):
    with claimed(tmp_path):
        lock = leave_lock(tmp_path, machine="elsewhere", process=1)
    assert json.loads(lock.read_text())["token"] == "other"


def test_of_many_that_find_an_outlived_lock_one_gets_it(tmp_path):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        os.utime(leave_lock(folder, machine="elsewhere", process=1), (0, 0))
        start, done = threading.Barrier(8), threading.Barrier(8)
        winners: list[bool] = []

        def compete(folder=folder, start=start, done=done, winners=winners):
            start.wait()
            with claimed(folder) as mine:
                winners.append(mine)
                done.wait()

        threads = [threading.Thread(target=compete) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(winners) == 1
        with claimed(folder) as mine:
            assert mine


def test_a_turn_that_was_never_finished_does_not_last(tmp_path):
    os.utime(leave_lock(tmp_path, machine="elsewhere", process=1), (0, 0))
    turn = tmp_path / f"{LOCK}.turn"
    turn.write_text("{}")
    with claimed(tmp_path) as mine:
        assert not mine
    os.utime(turn, (0, 0))
    results = []
    for _ in range(2):
        with claimed(tmp_path) as mine:
            results.append(mine)
    assert results == [False, True]
