"""Training in float16: on the curve of float32, with a scale that all ranks lower and raise alike,
and that a resumed run goes on with."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist.grad_scaler import GradScaler
from tests.harness import DistributedError
from tests.resuming import assert_same_bits, prepared, saved_at, start
from tests.test_training_step import state_of, weights_of
from tests.tiny import curve, metrics_of, run_main

STEPS, INFINITE = 10, 4
SCALE, GROWTH_INTERVAL = 1024.0, 3
# One step at a scale of 1024, three of it make 2048, an infinity 1024, three of that 2048, ...
SCALES = [1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048, 2048]
OPTIONS: dict[str, Any] = {
    "iterations": STEPS,
    "val_interval": 0,
    "batch_size": 4,
    "dtype": "float16",
    "max_skipped_steps": 1,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("float16"))


def main_with_a_scaler(
    argv: list[str], scale: float = SCALE, infinite: int = INFINITE
) -> list[tuple[str, str]]:
    """The run with a scaler of these tests', and an infinity in a gradient of its last rank.

    Returns:
        By step a fingerprint of weights and state.
    """
    import train_ddp
    from model.transformer import OutputHead

    head, training_step = OutputHead.forward, train_ddp.training_step
    step, is_last = 0, False
    fingerprints = []

    def spoiling(self: Any, features: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        if is_last and step == infinite and features.requires_grad:
            one = torch.zeros(features.shape)
            one.view(-1)[0] = math.inf
            features.register_hook(lambda gradient: gradient + one)
        return head(self, features, *targets)

    def noting(job: Any) -> None:
        nonlocal step, is_last
        step, is_last = job.iteration, job.world.rank == job.world.world_size - 1
        training_step(job)
        fingerprints.append((weights_of(job), state_of(job)))

    scaler = partial(GradScaler, init_scale=scale, growth_interval=GROWTH_INTERVAL)
    with (
        mock.patch("training.parts.GradScaler", scaler),
        mock.patch.object(OutputHead, "forward", spoiling),
        mock.patch.object(train_ddp, "training_step", noting),
    ):
        run_main(argv)
    return fingerprints


@pytest.fixture(scope="module")
def exact(tmp_path_factory, data_dir) -> list[dict[str, Any]]:
    """Measurements of the same run in float32, without an infinity."""
    out_dir = tmp_path_factory.mktemp("exact") / "run"
    start(run_main, 1, data_dir, out_dir, **{**OPTIONS, "dtype": "float32"})
    return metrics_of(out_dir)


@pytest.mark.parametrize("shard", ["true", "false"])
def test_an_infinity_on_one_rank_makes_all_skip_the_step_and_halve_the_scale(
    tmp_path, data_dir, exact, shard
):
    options = {**OPTIONS, "shard_optimizer": shard, "gradient_accumulation_steps": 2}
    ranks = start(main_with_a_scaler, 2, data_dir, tmp_path / "run", **options)
    for fingerprints in ranks:
        for part in (0, 1):
            changes = [before[part] != after[part] for before, after in pairwise(fingerprints)]
            assert changes == [step != INFINITE for step in range(2, STEPS + 1)]
    assert [weights for weights, _ in ranks[0]] == [weights for weights, _ in ranks[1]]
    entries = metrics_of(tmp_path / "run")
    assert curve(entries, "grad_scale") == SCALES
    # To be left out once would end a run whose loss is NaN: here max_skipped_steps is 1.
    assert curve(entries, "skipped_steps") == [int(step >= INFINITE) for step in range(1, 11)]
    steps = {
        int(state["step"]) for state in saved_at(tmp_path / "run", STEPS)["optimizer"].values()
    }
    assert steps == {STEPS - 1}
    # Up to the infinity it is the run in float32, norms included; they are not those of 1024.
    for name in ("loss_train", "grad_norm"):
        ours, theirs = curve(entries, name), curve(exact, name)
        assert ours[: INFINITE - 1] == pytest.approx(theirs[: INFINITE - 1], rel=0.01)
        assert ours[: INFINITE - 1] != theirs[: INFINITE - 1]
    assert curve(entries)[INFINITE:] == pytest.approx(curve(exact)[INFINITE:], rel=0.05)
    assert not math.isfinite(float(curve(entries, "grad_norm")[INFINITE - 1]))


def test_an_infinity_at_a_scale_of_1_is_the_models(tmp_path, data_dir):
    with pytest.raises(DistributedError) as caught:
        start(main_with_a_scaler, 1, data_dir, tmp_path / "run", 1.0, 2, **OPTIONS)
    (failure,) = caught.value.failures.values()
    assert failure.kind == "DivergedError"
    assert "1 steps in a row had no update, the last one step 2" in failure.message


def test_a_resumed_run_goes_on_with_the_scale_and_how_long_it_has_stood(tmp_path, data_dir, exact):
    """Left after steps 5 and 6, where the scale has stood one and two steps since it fell."""
    options = {**OPTIONS, "cos_cycle_iters": STEPS, "resume": "auto"}
    start(main_with_a_scaler, 1, data_dir, tmp_path / "straight", **options)
    for iterations in (5, 6, STEPS):
        leg = {**options, "iterations": iterations}
        start(main_with_a_scaler, 1, data_dir, tmp_path / "run", **leg)
        saved = saved_at(tmp_path / "run", iterations)["scaler"]
        if iterations < STEPS:
            assert (saved["scale"], saved["_growth_tracker"]) == (1024, iterations - INFINITE)
    straight, resumed = (saved_at(tmp_path / name, STEPS) for name in ("straight", "run"))
    assert_same_bits(resumed, straight)
    assert resumed["scaler"] == straight["scaler"]
    measured = [metrics_of(tmp_path / name) for name in ("straight", "run")]
    for name in ("loss_train", "grad_norm", "grad_scale", "skipped_steps"):
        assert curve(measured[0], name) == curve(measured[1], name)
    assert curve(measured[0], "grad_scale") == SCALES


@pytest.mark.parametrize(
    ("dtype", "wanted", "is_scaled"),
    [("float16", "off", False), ("float32", "on", True), ("float32", "auto", False)],
)
def test_the_scaler_is_there_when_it_is_wanted(tmp_path, data_dir, exact, dtype, wanted, is_scaled):
    options = {**OPTIONS, "dtype": dtype, "grad_scaler": wanted, "iterations": 2}
    start(run_main, 1, data_dir, tmp_path / "run", **options, cos_cycle_iters=STEPS)
    entries = metrics_of(tmp_path / "run")
    assert curve(entries, "grad_scale") == ([65536.0] * 2 if is_scaled else [])
    scaler = saved_at(tmp_path / "run", 2)["scaler"]
    assert (scaler is not None) == is_scaled
    # Powers of 2 take no digit away.
    assert (curve(entries) == curve(exact)[:2]) == (dtype == "float32")
