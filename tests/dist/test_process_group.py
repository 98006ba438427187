"""Ranks meet with the right settings or with one clear error, agree, and leave together."""

import os
import random
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import dist.process_group
from dist.collectives import all_gather_objects
from dist.process_group import (
    ProcessGroupError,
    RankZeroError,
    init_process_group,
    set_random_seed,
    shut_down,
)
from tests.harness import DistributedError, current_world, run_distributed

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def environment(monkeypatch):
    """Set variables as torchrun would, with some changed or (None) missing."""

    def set_variables(**changes):
        for name, value in {**TORCHRUN, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_without_torchrun_a_process_is_a_world_of_its_own(environment, gpus):
    gpus(0)
    environment(RANK=None, LOCAL_RANK=None, WORLD_SIZE=None, LOCAL_WORLD_SIZE=None)
    world = init_process_group()
    assert (world.rank, world.local_rank, world.world_size) == (0, 0, 1)
    assert world.device == torch.device("cpu")
    assert not torch_dist.is_initialized()
    shut_down(world)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_half_set_environment_names_the_missing_variable(environment, missing):
    environment(**{missing: None})
    with pytest.raises(ProcessGroupError, match=f"{missing} is ''.*torchrun sets them"):
        init_process_group(device="cpu")


@pytest.mark.parametrize("value", ["two", "-1", "1.0", " "])
def test_a_rank_that_is_no_number_is_quoted(environment, value):
    environment(RANK=value)
    with pytest.raises(ProcessGroupError, match=f"RANK is '{value}'"):
        init_process_group(device="cpu")


def test_a_rank_beyond_the_world_is_refused(environment):
    environment(RANK="2")
    with pytest.raises(ProcessGroupError, match="RANK is 2, but WORLD_SIZE is 2"):
        init_process_group(device="cpu")


@pytest.mark.parametrize("address", [None, ""])
def test_a_missing_address_names_both_variables(environment, address):
    environment(MASTER_ADDR=address, MASTER_PORT="29500")
    with pytest.raises(ProcessGroupError, match=r"MASTER_ADDR:MASTER_PORT is :29500.*set both"):
        init_process_group(device="cpu")


@pytest.mark.parametrize("port", [None, "", "http"])
def test_a_missing_port_names_both_variables(environment, port):
    environment(MASTER_ADDR="localhost", MASTER_PORT=port)
    with pytest.raises(ProcessGroupError, match="MASTER_ADDR:MASTER_PORT is localhost"):
        init_process_group(device="cpu")


def test_cuda_without_a_gpu_is_refused(environment, gpus):
    gpus(0)
    environment()
    with pytest.raises(ProcessGroupError, match=r"device is cuda.*no GPU here: use device cpu"):
        init_process_group(device="cuda")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_nccl_without_a_gpu_is_refused(environment, gpus, device):
    gpus(0)
    environment()
    with pytest.raises(ProcessGroupError, match="nccl needs GPUs: use backend gloo"):
        init_process_group(backend="nccl", device=device)


def test_more_processes_than_gpus_are_refused_with_both_numbers(environment, gpus):
    gpus(1)
    environment()
    with pytest.raises(ProcessGroupError, match=r"2 processes on this machine, but 1 GPUs"):
        init_process_group()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_positive_number_is_refused(environment, seconds):
    environment()
    with pytest.raises(ProcessGroupError, match=f"timeout_seconds is {seconds}"):
        init_process_group(device="cpu", timeout_seconds=seconds)


def meet_at(port, timeout_seconds):
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 holds the store, as without torchrun
    os.environ["MASTER_PORT"] = str(port)
    return init_process_group("gloo", "cpu", timeout_seconds)


def error_of_rank_zero_alone(port):
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ProcessGroupError) as caught:
        meet_at(port, 1.0)
    return str(caught.value)


@pytest.mark.parametrize("in_use", [True, False], ids=["port in use", "rank missing"])
def test_a_meeting_that_cannot_be_names_its_address(in_use):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if not in_use:
            taken.close()
        (error,) = run_distributed(error_of_rank_zero_alone, 1, port, process_group=False)
    assert f"cannot meet at 127.0.0.1:{port}" in error
    assert "is the port in use, or a rank missing? Choose another MASTER_PORT" in error


def rank_zero_dies_at_work(port):
    world = meet_at(port, 60.0)
    torch_dist.barrier()  # a rank may have met all others while two of them are still about to

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    world.on_rank_zero(die)


def test_ranks_that_wait_for_rank_zero_end_when_it_dies_with_the_store():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DistributedError) as caught:
        run_distributed(rank_zero_dies_at_work, 3, port, process_group=False)
    kinds = [caught.value.failures[rank].kind for rank in range(3)]
    assert kinds[0] == "killed by signal 9"
    assert "hang" not in kinds


def agree_twice():
    world = current_world()
    calls = []

    def work():
        calls.append(world.rank)
        return {"rank": world.rank, "shape": (1, 2), "none": None}

    return world.on_rank_zero(work), world.on_rank_zero(lambda: world.rank + 7), calls


@pytest.mark.parametrize("size", [1, 3])
def test_on_rank_zero_works_once_and_gives_every_rank_the_same_result(size):
    results = run_distributed(agree_twice, size)
    for first, second, _ in results:
        assert first == {"rank": 0, "shape": [1, 2], "none": None}
        assert second == 7
    assert [calls for _, _, calls in results] == [[0]] + [[]] * (size - 1)


def fail_on_rank_zero(result):
    world = current_world()

    def work():
        if result is None:
            raise FileNotFoundError("no such file: corpus.txt")
        return result

    try:
        world.on_rank_zero(work)
    except Exception as error:
        outcome = type(error).__name__, str(error)
    else:
        outcome = "nothing was raised", ""
    # An error leaves the next meeting as it was.
    return outcome, world.on_rank_zero(lambda: "next")


def test_on_rank_zero_carries_its_error_to_the_others():
    outcomes = run_distributed(fail_on_rank_zero, 3, None)
    message = "no such file: corpus.txt"
    assert outcomes[0] == (("FileNotFoundError", message), "next")
    assert outcomes[1:] == [(("RankZeroError", message), "next")] * 2
    assert issubclass(RankZeroError, RuntimeError)


@pytest.mark.parametrize("size", [1, 2])
def test_a_result_that_json_cannot_carry_is_an_error_on_every_rank(size):
    outcomes = run_distributed(fail_on_rank_zero, size, {1, 2}, timeout=20)
    kinds = [outcome[0] for outcome, _ in outcomes]
    assert kinds == ["TypeError", "RankZeroError"][:size]
    assert all("set" in message for (_, message), _ in outcomes)


def wait_longer_than_the_timeout():
    dist.process_group.STORE_WAIT = timedelta(seconds=1)
    world = init_process_group("gloo", "cpu", timeout_seconds=2)

    def work():
        time.sleep(4)
        return "done"

    result = world.on_rank_zero(work)
    torch_dist.barrier()
    shut_down(world)
    return result


def test_work_on_rank_zero_outlasts_the_timeout_of_the_process_group():
    assert run_distributed(wait_longer_than_the_timeout, 2, process_group=False) == ["done"] * 2


def meet_again():
    """As torchrun's restarted ranks do: anew, at the store where others met before."""
    answers = []
    for round_number in range(3):
        world = init_process_group("gloo", "cpu", 20.0)
        if world.rank == 0:
            time.sleep(0.3)  # an answer of the round before would be there at once
        answers.append(world.on_rank_zero(partial(str, round_number)))
        assert sum(all_gather_objects(world.rank)) == 3
        torch_dist.barrier()
        torch_dist.destroy_process_group()
    return answers


def test_ranks_that_are_started_anew_hear_nothing_of_those_before():
    answers = run_distributed(meet_again, 3, process_group=False)
    assert answers == [["0", "1", "2"]] * 3


def meet_without_rank_two():
    rank = int(os.environ["RANK"])
    if rank == 2:
        time.sleep(6)
        return ""
    with pytest.raises(ProcessGroupError) as caught:
        init_process_group("gloo", "cpu", 2.0)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    rank_zero, rank_one, _ = run_distributed(meet_without_rank_two, 3, process_group=False)
    assert rank_zero == "of 3 ranks 2 did not come within 2 s"
    assert rank_one == "of 3 ranks some did not come within 2 s"


def come_late(folder):
    world = init_process_group("gloo", "cpu", timeout_seconds=30)
    if world.rank == 1:
        time.sleep(1)
        Path(folder, "rank 1 is here").touch()
    shut_down(world)
    return os.listdir(folder), torch_dist.is_initialized()


def test_shut_down_waits_for_a_late_rank(tmp_path):
    results = run_distributed(come_late, 3, str(tmp_path), process_group=False)
    assert results == [(["rank 1 is here"], False)] * 3


def draws(seed, rank):
    set_random_seed(seed, rank)
    dropout = torch.nn.functional.dropout(torch.ones(64), 0.5)
    return torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random(), dropout.tolist()


def test_the_same_seed_gives_the_same_stream_and_another_rank_another():
    first, again, other_rank, other_seed = draws(5, 0), draws(5, 0), draws(5, 1), draws(6, 0)
    assert first == again
    for ours, theirs in zip(first, other_rank, strict=True):
        assert ours != theirs
    for ours, theirs in zip(first, other_seed, strict=True):
        assert ours != theirs


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_any_seed_serves_every_generator(seed):
    assert draws(seed, 0) == draws(seed, 0)
