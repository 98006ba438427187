"""What an option may not change, the curve, against the run without it.

Numbers of ranks and micro-batches are test_parallel_training.py's, compiled blocks
training/test_compiling.py's, 16-bit weights and traffic test_parallel_training.py's.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness import run_distributed
from tests.resuming import assert_same_bits, prepared, saved_at
from tests.tiny import TINY, curve, flags, metrics_of, run_main

STEPS = 12
SHORT: dict[str, Any] = {"iterations": STEPS, "val_interval": 6, "checkpoint_interval": 6}
SHORT |= {"cos_cycle_iters": STEPS}
MUON = {"optimizer": "muon", "muon_lr": 0.01}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("curves"))


def run_counting(argv: list[str]) -> int:
    """The job; how often it ran a block so that backward runs it again."""
    from model import transformer

    with mock.patch.object(transformer, "checkpoint", wraps=transformer.checkpoint) as recomputed:
        run_main(argv)
    return recomputed.call_count


def run(world_size: int, data_dir: Path, out_dir: Path, **options: Any) -> tuple[Any, list[int]]:
    argv = flags(**{**TINY, **SHORT, "data_dir": data_dir, "out_dir": out_dir, **options})
    counts = run_distributed(run_counting, world_size, argv, process_group=False)
    return metrics_of(out_dir), counts


def assert_one_curve(entries: Any, reference: Any, relative: float) -> None:
    for name, count in (("loss_train", STEPS), ("val_loss", 3)):
        assert len(curve(entries, name)) == count
        assert curve(entries, name) == pytest.approx(curve(reference, name), rel=relative), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data_dir) -> Any:
    entries, counts = run(1, data_dir, tmp_path_factory.mktemp("plain"))
    assert counts == [0]
    return entries


@pytest.fixture(scope="module")
def plain_muon(tmp_path_factory, data_dir, plain) -> Any:
    entries, _ = run(1, data_dir, tmp_path_factory.mktemp("muon"), **MUON)
    assert curve(entries)[-1] != pytest.approx(curve(plain)[-1], rel=1e-3)
    return entries


def test_blocks_that_are_run_again_in_backward_leave_the_curve_as_it_is(tmp_path, data_dir, plain):
    entries, counts = run(1, data_dir, tmp_path, activation_checkpointing="true")
    assert counts == [2 * STEPS]  # both blocks of each step, and of no validation
    assert_one_curve(entries, plain, 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "world_size", "micro_steps"), [("adamw", 1, 1), ("adamw", 2, 2), ("muon", 2, 1)]
)
def test_bfloat16_follows_float32_at_every_step(
    tmp_path, data_dir, request, optimizer, world_size, micro_steps
):
    reference = request.getfixturevalue("plain" if optimizer == "adamw" else "plain_muon")
    options: dict[str, Any] = {**(MUON if optimizer == "muon" else {}), "dtype": "bfloat16"}
    options["gradient_accumulation_steps"] = micro_steps
    entries, _ = run(world_size, data_dir, tmp_path, **options)
    assert_one_curve(entries, reference, 0.02)
    assert curve(entries) != curve(reference)


@pytest.mark.parametrize("world_size", [2, 4])
def test_muon_over_ranks_is_muon_on_one_and_resumes_to_the_bit(
    tmp_path, data_dir, plain_muon, world_size
):
    entries, _ = run(world_size, data_dir, tmp_path / "straight", **MUON)
    assert_one_curve(entries, plain_muon, 2e-5)
    run(world_size, data_dir, tmp_path / "run", **MUON, iterations=6)
    resumed, _ = run(world_size, data_dir, tmp_path / "run", **MUON, resume="auto")
    assert curve(resumed) == curve(entries)
    assert_same_bits(*(saved_at(tmp_path / name, STEPS) for name in ("run", "straight")))


def test_micro_batches_with_muon_and_run_again_blocks_are_one_batch(tmp_path, data_dir, plain_muon):
    split = {"gradient_accumulation_steps": 2, "activation_checkpointing": "true"}
    entries, counts = run(2, data_dir, tmp_path, **MUON, **split)
    assert counts == [2 * 2 * STEPS] * 2
    assert_one_curve(entries, plain_muon, 2e-5)
