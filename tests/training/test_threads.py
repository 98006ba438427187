"""Processes share the cores that they may use, unless the user has said how many threads."""

import os
import subprocess
import sys

import pytest

from tests.harness import start_command
from training.threads import is_set_by_user, number_of_cores, usable_cpus

TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def launcher_started_with(monkeypatch):
    """Give this process a parent that was started with these variables."""
    children = []

    def start(**variables: str) -> None:
        child = subprocess.Popen(
            ["sh", "-c", "echo up; read _"],
            env={"PATH": os.environ["PATH"], **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # the kernel shows its variables a moment after it was started
        monkeypatch.setattr(os, "getppid", lambda: child.pid)

    yield start
    for child in children:
        child.communicate()


@pytest.fixture
def variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def put(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_one_thread_that_torchrun_set_is_not_the_users(variables, launcher_started_with):
    variables(TORCHRUN)
    launcher_started_with()
    assert not is_set_by_user()


@pytest.mark.parametrize("value", ["1", "3"])
def test_a_number_that_torchrun_was_started_with_is_the_users(
    variables, launcher_started_with, value
):
    variables({**TORCHRUN, "OMP_NUM_THREADS": value})
    launcher_started_with(OMP_NUM_THREADS=value)
    assert is_set_by_user()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": ""}, False),
        ({"MKL_NUM_THREADS": "2"}, True),
        ({**TORCHRUN, "MKL_NUM_THREADS": "2"}, True),
        # torchrun sets nothing for a single process.
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, True),
    ],
)
def test_what_is_set_otherwise_is_the_users(variables, launcher_started_with, values, expected):
    variables(values)
    launcher_started_with()
    assert is_set_by_user() == expected


def test_threads_of_one_core_count_once_and_a_quota_limits_the_cores(tmp_path):
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    groups = tmp_path / "groups"
    groups.mkdir()
    assert number_of_cores(list(range(8)), tmp_path, groups) == 4
    assert number_of_cores([0, 4, 1], tmp_path, groups) == 2
    for quota, cores in (("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        (groups / "cpu.max").write_text(f"{quota}\n")
        assert number_of_cores(list(range(8)), tmp_path, groups) == cores
    (groups / "cpu.max").unlink()
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 4), ("300000", 3)):
        (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert number_of_cores(list(range(8)), tmp_path, groups) == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_only_processors_that_the_process_may_use_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cpus() == [max(before)]
    finally:
        os.sched_setaffinity(0, before)


SCRIPT = """
import torch
from dist.process_group import init_process_group, shut_down
from training import threads

threads.number_of_cores = lambda cpus: 6
world = init_process_group("gloo", "cpu", 30.0)
threads.share_cores()
print(f"rank {world.rank}: {torch.get_num_threads()}", flush=True)
shut_down(world)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what torchrun started with")
def test_processes_of_a_torchrun_without_a_word_from_the_user_share_all_cores(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    without = ["env", "-u", "OMP_NUM_THREADS", "-u", "MKL_NUM_THREADS", sys.executable]
    with start_command([*without, *torchrun, tmp_path / "script.py"]) as job:
        ended = job.wait(60)
    assert sorted(ended.stdout.split("\n"))[-2:] == ["rank 0: 3", "rank 1: 3"], ended
