"""A run that goes on is the run that was never stopped: its text, learning rate and random numbers,
at any number of ranks."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.resuming import (
    Leg,
    Window,
    assert_same_bits,
    path_of,
    prepared,
    refusal,
    run_leg,
    samples_of,
    saved_at,
    start,
)
from tests.tiny import curve, metrics_of, run_main
from training.checkpoint_file import load_checkpoint

CONTEXT = 64  # of the preset that TINY names


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("resume"))


def assert_one_curve(entries: Any, reference: Any, relative: float = 0.0) -> None:
    """Each step once, with the same figures; to the bit if nothing is said."""
    steps = [entry["iteration"] for entry in entries if "loss_train" in entry]
    assert steps == list(range(1, len(steps) + 1))
    assert curve(entries, "lr") == curve(reference, "lr")
    for name, tolerance in (("loss_train", relative), ("grad_norm", 10 * relative)):
        expected = pytest.approx(curve(reference, name), rel=tolerance, abs=0)
        assert curve(entries, name) == expected, name


# The text of each step.

# 9.2 steps an epoch: all of these steps are within one, and its borders within a batch.
EPOCHS: dict[str, Any] = {"epochs": 2.5, "batch_size": 48, "val_interval": 0}
STOPS, STEPS = (7, 13, 20), 23


def assert_every_window_once_an_epoch(legs: list[Leg], data_dir: Path) -> None:
    tokens = np.load(data_dir / "train.npy").tolist()
    starts = range(0, len(tokens) - CONTEXT, CONTEXT)
    windows = {tuple(tokens[start : start + CONTEXT + 1]) for start in starts}
    assert len(windows) == len(starts)
    samples = samples_of(legs)
    assert sorted(samples) == list(range(STEPS * EPOCHS["batch_size"]))
    epochs: dict[int, list[Window]] = {}
    for sample, (step, window) in samples.items():
        assert step == sample // EPOCHS["batch_size"] + 1
        epochs.setdefault(sample // len(windows), []).append(window)
    assert [set(epochs[number]) for number in (0, 1)] == [windows, windows]
    assert [len(epochs[number]) for number in (0, 1)] == [len(windows)] * 2
    assert len(set(epochs[2])) == len(epochs[2]) > len(windows) / 2


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_epochs_left_in_their_middle_go_on_with_the_windows_that_are_left(
    tmp_path, data_dir, micro_steps
):
    options = {**EPOCHS, "gradient_accumulation_steps": micro_steps}
    straight = start(run_leg, 2, data_dir, tmp_path / "straight", **options)
    legs = [
        leg
        for stop in (*STOPS, None)
        for leg in start(run_leg, 2, data_dir, tmp_path / "run", stop, resume="auto", **options)
    ]
    assert samples_of(legs) == samples_of(straight)
    assert_every_window_once_an_epoch(legs, data_dir)
    assert_one_curve(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "straight"))
    assert_same_bits(saved_at(tmp_path / "run", STEPS), saved_at(tmp_path / "straight", STEPS))


def test_an_epoch_that_other_numbers_of_ranks_go_on_with_has_each_window_once(tmp_path, data_dir):
    """Its schedule, too, is the same: a number of ranks is no length."""
    start(run_leg, 2, data_dir, tmp_path / "straight", **EPOCHS)
    options = {**EPOCHS, "gradient_accumulation_steps": 2, "resume": "auto"}
    legs = []
    for world_size, stop in ((4, 7), (2, 13), (1, 20), (4, None)):
        by_rank = start(run_leg, world_size, data_dir, tmp_path / "run", stop, **options)
        assert "the schedule has changed" not in by_rank[0].said
        legs += by_rank
    assert_every_window_once_an_epoch(legs, data_dir)
    assert_one_curve(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "straight"), 2e-5)


def test_a_changed_batch_goes_on_at_the_sample_where_the_other_ended(tmp_path, data_dir):
    before = start(run_leg, 2, data_dir, tmp_path / "run", 5)  # 5 steps of 8
    options = {"resume": "auto", "batch_size": 4, "iterations": 10}
    message = refusal(run_main, 2, data_dir, tmp_path / "run", **options)
    assert "batch_size 8 -> 4: this would change which text" in message
    after = start(run_leg, 2, data_dir, tmp_path / "run", allow_changed="batch_size", **options)
    assert "changed since: batch_size: 8 -> 4" in after[0].said
    assert sorted(samples_of(before)) == list(range(40))
    samples = samples_of(after)
    assert sorted(samples) == list(range(40, 60))
    assert all(step == 6 + (sample - 40) // 4 for sample, (step, _) in samples.items())
    assert saved_at(tmp_path / "run", 10)["samples"] == 60


# The learning rate.


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_learning_rate_of_every_step_is_that_of_the_run_that_was_never_stopped(
    tmp_path, data_dir, schedule
):
    """Stopped within the warm-up, at its last step, behind it, and before the last step."""
    options = {"schedule": schedule, "warmup_iters": 5, "iterations": 30, "val_interval": 0}
    start(run_main, 1, data_dir, tmp_path / "straight", **options)
    for stop in (3, 5, 6, 29, None):
        start(run_leg, 1, data_dir, tmp_path / "run", stop, resume="auto", **options)
        if stop is not None:
            assert saved_at(tmp_path / "run", stop)["iteration"] == stop
    straight = metrics_of(tmp_path / "straight")
    assert_one_curve(metrics_of(tmp_path / "run"), straight)
    rates = curve(straight, "lr")
    assert rates[:5] == [pytest.approx(4e-3 * step / 5) for step in range(1, 6)]
    assert len(set(rates)) > 15
    assert rates[-1] == pytest.approx(4e-4)


@pytest.mark.parametrize(("before", "now"), [(20, 40), (40, 25)])
def test_a_changed_length_follows_the_present_options_and_is_said_in_figures(
    tmp_path, data_dir, before, now
):
    """Stopped at step 20, at the old one's end or in the middle."""
    options = {"val_interval": 0, "checkpoint_interval": 0}
    start(run_leg, 1, data_dir, tmp_path / "run", 20, iterations=before, **options)
    done = curve(metrics_of(tmp_path / "run"), "lr")
    (leg,) = start(run_leg, 1, data_dir, tmp_path / "run", iterations=now, resume="auto", **options)
    rates = curve(metrics_of(tmp_path / "run"), "lr")
    assert rates[:20] == done
    lr_max, lr_min, warmup = 4e-3, 4e-4, 4

    def cosine(step: int, iterations: int) -> float:
        share = min(1.0, (step - warmup) / (iterations - warmup))
        return lr_min + (lr_max - lr_min) * (1 + math.cos(math.pi * share)) / 2

    assert rates[20:] == pytest.approx([cosine(step, now) for step in range(21, now + 1)])
    assert 0 < min(rates) <= max(rates) <= lr_max
    figures = f"would have been {cosine(21, before):.2e} and is {cosine(21, now):.2e}"
    assert f"the schedule has changed: the learning rate of step 21 {figures}" in leg.said
    assert ("the learning rate rises" in leg.said) == (now > before)


# The number of ranks, and where the optimizer's state lies.


def run_and_save_at_once(argv: list[str]) -> None:
    """The job, which saves what it has loaded before it makes a step."""
    import train_ddp

    train = train_ddp.train

    def save_first(job: Any, schedule: Any) -> None:
        train_ddp.save_checkpoint(job, None, is_due=True)
        train(job, schedule)

    with mock.patch.object(train_ddp, "train", save_first):
        run_main(argv)


ANYWHERE: dict[str, Any] = {"batch_size": 12, "cos_cycle_iters": 20, "val_interval": 0}
WAYS = [(1, "false"), (2, "true"), (2, "false"), (3, "true"), (4, "true")]


@pytest.fixture(scope="module")
def straight_loss(tmp_path_factory, data_dir) -> list[float]:
    out_dir = tmp_path_factory.mktemp("anywhere")
    start(run_main, 1, data_dir, out_dir, **ANYWHERE, iterations=6)
    return curve(metrics_of(out_dir))


@pytest.mark.parametrize(
    ("saved_by", "shard"), [(4, "true"), (3, "true"), (2, "false"), (1, "false")]
)
def test_what_some_ranks_saved_is_loaded_to_the_bit_by_any_number_sharded_or_not(
    tmp_path, data_dir, straight_loss, saved_by, shard
):
    layout = {**ANYWHERE, "keep_checkpoints": 2}
    start(
        run_main,
        saved_by,
        data_dir,
        tmp_path / "run",
        **layout,
        shard_optimizer=shard,
        iterations=5,
    )
    source = path_of(tmp_path / "run", 5)
    for world_size, shard_now in WAYS:
        out_dir = tmp_path / f"{world_size}_{shard_now}"
        options = {**layout, "resume": source, "iterations": 6, "shard_optimizer": shard_now}
        start(run_and_save_at_once, world_size, data_dir, out_dir, **options)
        again, first = saved_at(out_dir, 5), load_checkpoint(source)
        assert len(again["rng"]) == world_size
        assert_same_bits({**again, "rng": 0}, {**first, "rng": 0})
        assert curve(metrics_of(out_dir)) == pytest.approx(straight_loss[5:], rel=1e-5)


# Random numbers.


def test_every_generator_of_every_rank_goes_on_where_it_was(tmp_path, data_dir):
    options = {"dropout": 0.2, "val_interval": 5}
    straight = start(run_leg, 2, data_dir, tmp_path / "straight", None, True, **options)
    legs = [
        start(run_leg, 2, data_dir, tmp_path / "run", stop, True, resume="auto", **options)
        for stop in (10, None)
    ]
    for rank in (0, 1):
        assert [draw for leg in legs for draw in leg[rank].draws] == straight[rank].draws
        assert len(set(straight[rank].draws)) == 20
    for generator in range(3):
        mine, theirs = ({draw[generator] for draw in leg.draws} for leg in straight)
        assert not mine & theirs
    assert_one_curve(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "straight"))
    assert_same_bits(saved_at(tmp_path / "run", 20), saved_at(tmp_path / "straight", 20))
