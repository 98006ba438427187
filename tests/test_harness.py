"""The harness keeps its word: results and errors come back by rank, and no process stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dist.collectives import all_reduce_sum, rank, world_size
from tests.harness import (
    DistributedError,
    current_world,
    is_alive,
    run_distributed,
    run_python,
    run_torchrun,
    start_command,
    start_distributed,
    start_torchrun,
)


def rank_and_sum(number):
    return rank(), world_size(), all_reduce_sum(torch.tensor(number + rank())).item()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(size):
    total = 10 * size + sum(range(size))
    assert run_distributed(rank_and_sum, size, 10) == [(r, size, total) for r in range(size)]


def environment():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    return [os.environ[name] for name in names], torch.get_num_threads(), current_world().rank


def test_workers_see_what_torchrun_sets_and_use_one_thread():
    assert run_distributed(environment, 2) == [
        (["0", "0", "2", "2", "1"], 1, 0),
        (["1", "1", "2", "2", "1"], 1, 1),
    ]


def leave_something_behind():
    before = os.environ.get("LEFT_BEHIND"), torch.get_default_dtype()
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    return before, os.getpid()


def test_nothing_is_left_over_from_the_run_before():
    first = run_distributed(leave_something_behind, 1)
    second = run_distributed(leave_something_behind, 1)
    assert first[0][0] == second[0][0] == (None, torch.float32)
    assert not is_alive(first[0][1])


def rank_one_raises():
    if rank() == 1:
        raise ValueError("out of cheese")
    all_reduce_sum(torch.ones(1))


def test_an_exception_comes_back_with_its_rank_and_traceback_before_those_it_caused():
    with pytest.raises(DistributedError, match="out of cheese") as caught:
        run_distributed(rank_one_raises, 3)
    failure = caught.value.failures[1]
    assert (failure.kind, failure.message) == ("ValueError", "out of cheese")
    assert "in rank_one_raises" in failure.details
    assert str(caught.value).startswith("rank 1 of 3")


def rank_zero_hangs(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
    if os.environ["RANK"] == "0":
        time.sleep(600)
    child.kill()
    child.wait()


def test_what_hangs_is_killed_in_time_with_its_children_and_says_where_it_stood(tmp_path):
    start = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        run_distributed(rank_zero_hangs, 2, str(tmp_path), timeout=2, process_group=False)
    assert time.monotonic() - start < 10
    assert caught.value.failures[0].kind == "hang"
    assert "rank_zero_hangs" in caught.value.failures[0].details
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    time.sleep(0.1)
    assert len(pids) == 4
    assert not [pid for pid in pids if is_alive(pid)]


def rank_one_kills_itself():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(DistributedError) as caught:
        run_distributed(rank_one_kills_itself, 2, process_group=False)
    assert caught.value.failures[1].kind == "killed by signal 9"
    assert caught.value.results == {0: "fine"}


def rank_one_leaves_first(folder):
    rank = int(os.environ["RANK"])
    if rank == 0:
        time.sleep(600)
    Path(folder, "gone").touch()
    sys.exit(7)


def test_ranks_are_signalled_one_by_one_and_tell_how_they_ended(tmp_path):
    with start_distributed(rank_one_leaves_first, 2, str(tmp_path)) as ranks:
        assert ranks.are_running
        while not (tmp_path / "gone").exists():
            time.sleep(0.01)
        with pytest.raises(AssertionError, match=r"rank 0:\n(.|\n)*rank_one_leaves_first"):
            ranks.statuses(timeout=0.5)
        assert not ranks.are_running
        ranks.send(signal.SIGKILL, 1)  # it is gone: nothing to do, and nothing to complain of
        ranks.send(signal.SIGTERM, 0)
        assert ranks.statuses(timeout=10) == [-signal.SIGTERM, 1]


def test_ranks_that_still_run_end_with_their_block(tmp_path):
    pids = []
    with (
        contextlib.suppress(ZeroDivisionError),
        start_distributed(rank_zero_hangs, 2, str(tmp_path)) as ranks,
    ):
        while len(files := [file.read_text() for file in tmp_path.iterdir()]) < 2 or "" in files:
            time.sleep(0.01)
        pids = [int(pid) for file in files for pid in file.split()]
        raise ZeroDivisionError
    assert ranks.statuses(timeout=0)[0] == -signal.SIGKILL
    time.sleep(0.1)
    assert len(pids) == 4
    assert not [pid for pid in pids if is_alive(pid)]


SCRIPT = """
import os, subprocess, sys, time
import dist.process_group
words = ["rank", os.environ.get("RANK"), "of", os.environ.get("WORLD_SIZE"), *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: print would let ranks mix
print(os.environ.get("COLOUR"), file=sys.stderr)
if "sleep" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("asleep", flush=True)
    time.sleep(600 if "all" in sys.argv else 0)
if "fail" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_torchrun_gives_status_and_output(script):
    result = run_torchrun(script, 2, "a", 1, env={"COLOUR": "octarine"})
    assert result.returncode == 0
    assert sorted(result.stdout.split("\n")) == ["", "rank 0 of 2 a 1", "rank 1 of 2 a 1"]
    assert result.stderr.count("octarine") == 2


def test_a_plain_command_gives_status_and_output(script):
    result = run_python(script, "fail")
    assert result.returncode == 7
    assert result.stdout == "rank None of None fail\n"


def test_a_command_that_does_not_end_is_killed_with_all_its_processes(script):
    with start_torchrun(script, 2, "sleep", "all") as job:
        while job.stdout.count("asleep") < 2:
            time.sleep(0.05)
        pids = job.processes()
        assert len(pids) >= 5  # torchrun, two ranks, the child of each
        assert sorted(job.rank_pids()) == [0, 1]
        with pytest.raises(AssertionError, match=r"did not end within 0.1 s\nstdout:\n(.|\n)*asl"):
            job.wait(0.1)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_command_that_leaves_processes_behind_is_found_out(script, monkeypatch):
    monkeypatch.setattr("tests.harness.SECONDS_AFTER_A_COMMAND", 0.2)
    with pytest.raises(AssertionError, match="left processes"):
        run_python(script, "sleep")


def test_a_job_ends_with_its_block_even_when_the_test_raises(script):
    command = [sys.executable, script, "sleep", "all"]
    with contextlib.suppress(ZeroDivisionError), start_command(command) as job:
        while "asleep" not in job.stdout:
            time.sleep(0.05)
        raise ZeroDivisionError
    assert not job.processes()


def test_a_command_whose_environment_cannot_be_read_yet_ends_with_its_block(monkeypatch):
    with start_command([sys.executable, "-c", "import time; time.sleep(60)"]) as job:
        monkeypatch.setattr(job, "_environments", lambda: iter(()))
        assert job.processes() == [job.pid]
    assert not is_alive(job.pid)
