"""What a run writes of itself reads back complete, each step once."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import metrics as metrics_module
from training.metrics import STEPS_WORTH_A_MEASUREMENT, Metrics, duration, keep_until
from training.run_folder import RunFolder


def folder_of(path) -> RunFolder:
    return RunFolder(str(path), keep_checkpoints=1)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(tmp_path, done: int, steps: range, offset: float) -> None:
    metrics = Metrics(folder_of(tmp_path), done, is_active=True)
    for step in steps:
        metrics.log(step, loss_train=step + offset)
    metrics.close()


def test_a_resumed_run_continues_both_files_without_a_double_or_a_gap(tmp_path):
    write_steps(tmp_path, 0, range(1, 18), offset=0.0)  # killed at 17, last checkpoint at 10
    write_steps(tmp_path, 10, range(11, 21), offset=0.5)
    expected = [step if step <= 10 else step + 0.5 for step in range(1, 21)]

    entries = lines_of(tmp_path / "metrics.jsonl")
    assert [entry["iteration"] for entry in entries] == list(range(1, 21))
    assert [entry["loss_train"] for entry in entries] == expected

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = board.Scalars("loss_train")
    assert [event.step for event in events] == list(range(1, 21))
    assert [event.value for event in events] == expected


def test_a_line_that_is_no_entry_or_was_left_unfinished_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n[1]\n{"other": 1}\n{"iteration": 2}\n{"itera')
    keep_until(path, 5)
    assert lines_of(path) == [{"iteration": 1}, {"iteration": 2}]


@pytest.mark.parametrize("damage", [b'{"iteration": \xff}', b"\x80\x00", b"[" * 100_000])
def test_a_damaged_line_is_dropped_and_the_others_stay(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + damage + b'\n{"iteration": 2}\n')
    keep_until(path, 5)
    assert lines_of(path) == [{"iteration": 1}, {"iteration": 2}]


def test_a_loss_that_is_not_finite_is_written_as_json_that_others_can_read(tmp_path):
    metrics = Metrics(folder_of(tmp_path), 0, is_active=True)
    metrics.log(1, loss_train=math.nan, grad_norm=math.inf)
    metrics.close()
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "loss_train": "nan", "grad_norm": "inf"}
    ]


def test_ranks_that_do_not_write_leave_nothing(tmp_path):
    metrics = Metrics(folder_of(tmp_path), 0, is_active=False)
    metrics.log(1, loss_train=1.0)
    metrics.flush()
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_durations_read_as_clock_times():
    assert [duration(s) for s in (5, 65, 7384)] == ["0:05", "1:05", "2:03:04"]


def test_a_full_disk_stops_the_measurements_and_not_the_training(tmp_path, capsys):
    metrics = Metrics(folder_of(tmp_path), 0, is_active=True)
    metrics._file = open("/dev/full", "w")  # noqa: SIM115
    for step in (1, 2):
        metrics.log(step, loss_train=1.0)
        metrics.flush()
    said = capsys.readouterr().out
    assert said.count("measurements are not written") == 1
    assert "No space left on device" in said


def test_a_disk_that_is_full_at_the_start_stops_the_measurements_and_not_the_run(
    tmp_path, monkeypatch, capsys
):
    write_steps(tmp_path, 0, range(1, 4), offset=0.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.metrics.keep_until", full)
    write_steps(tmp_path, 2, range(3, 5), offset=0.5)
    assert "measurements are not written" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("iterations", "iteration", "is_measured"),
    [
        (STEPS_WORTH_A_MEASUREMENT, 100, True),
        (STEPS_WORTH_A_MEASUREMENT, 1, False),
        (STEPS_WORTH_A_MEASUREMENT - 1, 100, False),
    ],
)
def test_a_cpus_peak_is_measured_in_long_runs_alone_and_not_while_they_start(
    monkeypatch, iterations, iteration, is_measured
):
    monkeypatch.setattr(metrics_module, "measured_peak_flops", lambda dtype: 5e9)
    job: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")),
        dtype=torch.float32,
        iteration=iteration,
        config=SimpleNamespace(schedule=SimpleNamespace(iterations=iterations)),
    )
    assert metrics_module._peak_flops(job) == (5e9 if is_measured else None)
