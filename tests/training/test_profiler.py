"""A trace shows the steps that it says, and a run that is too short for one says so."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.profiler import FIRST_STEP, LAST_STEP, StepProfiler
from training.run_folder import RunFolder


def run_steps(folder: Path, steps: int, is_wanted: bool = True) -> list[str]:
    """Profile that many steps of one matrix product; the lines that were said."""
    said: list[str] = []
    job: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(profile=is_wanted)),
        folder=RunFolder(str(folder), keep_checkpoints=1),
        world=SimpleNamespace(rank=3, device=torch.device("cpu")),
        say=said.append,
    )
    profiler = StepProfiler(job)
    for _ in range(steps):
        profiler.begin_step()
        torch.ones(2, 2) @ torch.ones(2, 2)
        profiler.end_step()
    profiler.close()
    return said


def test_the_trace_of_three_steps_can_be_read_and_its_place_is_said(tmp_path):
    said = run_steps(tmp_path, LAST_STEP + 5)
    trace, table = (tmp_path / "profile" / name for name in ("rank3.json.gz", "rank3.txt"))
    assert len(said) == 1
    assert str(trace) in said[0]
    assert str(table) in said[0]
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == LAST_STEP - FIRST_STEP + 1
    assert "aten::mm" in table.read_text()


@pytest.mark.parametrize("steps", [0, FIRST_STEP - 1, LAST_STEP - 1])
def test_a_run_that_is_too_short_for_a_trace_says_so(tmp_path, steps):
    (said,) = run_steps(tmp_path, steps)
    assert f"this one had {steps}: nothing is written" in said
    assert not (tmp_path / "profile").exists()


def test_without_the_option_nothing_is_traced(tmp_path):
    assert run_steps(tmp_path, LAST_STEP, is_wanted=False) == []
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run_and_its_rank_says_so(tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    assert run_steps(tmp_path, LAST_STEP) == []
    assert "rank 3: the profile is not written" in capsys.readouterr().out


def test_a_new_run_in_the_folder_deletes_the_old_ones_trace_and_nothing_else(tmp_path):
    run_steps(tmp_path, LAST_STEP)
    mine = tmp_path / "profile" / "mine.txt"
    mine.write_text("mine")
    RunFolder(str(tmp_path), keep_checkpoints=1).claim(None, 0, overwrite=True)
    assert list((tmp_path / "profile").iterdir()) == [mine]
