"""One step of the training job, and what it must do beside descending: each part against something
plainer than itself.

The whole run is compared with thirty lines of torch; rows, gradients and states are looked at from
inside the ranks, by functions that stand in for the job's own there.
"""

import contextlib
import hashlib
import json
import math
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import prepare
from data.tokens import RandomWindows, open_tokens
from model.config import ModelConfig
from model.transformer import Block, OutputHead, Transformer
from tests.harness import DistributedError, run_distributed
from tests.tiny import TINY, curve, flags, metrics_of, run_main, train, write_corpus
from training.checkpoint_file import load_checkpoint
from training.resume import changes

CONTEXT, BATCH_SIZE = 64, 8  # the first is that of the preset that TINY names
# No value is a default, and each changes the numbers. A large eps makes AdamW feel the size of a
# gradient, so that clipping to a norm that every step exceeds shows in the weights.
SEED, STEPS, WARMUP, LR_MAX, LR_MIN = 7, 20, 4, 5e-3, 1e-3
BETAS, EPS, WEIGHT_DECAY, MAX_NORM = (0.8, 0.9), 1e-4, 0.3, 0.1
RECIPE = {
    "batch_size": BATCH_SIZE,
    "iterations": STEPS,
    "warmup_iters": WARMUP,
    "lr_max": LR_MAX,
    "lr_min": LR_MIN,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "max_norm": MAX_NORM,
    "seed": SEED,
    "val_interval": 0,
}


def prepared(folder: Path, **corpus: int) -> Path:
    options = prepare.PrepareConfig(
        input=[str(write_corpus(folder / "texts", **corpus))],
        out_dir=str(folder / "data"),
        vocab_size=400,
    )
    prepare.prepare(options, show_progress=False)
    return folder / "data"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("corpus"))


def saved_at(out_dir: Path, iteration: int) -> dict[str, Any]:
    return load_checkpoint(out_dir / "checkpoints" / f"ckpt_{iteration:08d}.pt")


def run_ranks(
    function: Any, world_size: int, data_dir: Path, out_dir: Path, *args: Any, **options: Any
) -> list[Any]:
    """Like `train`, of a function that changes the job before it runs it; the ranks' results."""
    argv = flags(**{**TINY, "data_dir": data_dir, "out_dir": out_dir, **options})
    return run_distributed(function, world_size, argv, *args, process_group=False)


# The whole run, against torch alone.


def plain_run(data_dir: Path, initial: dict[str, Any]) -> dict[str, Any]:
    """RECIPE in one process, one piece and nothing but torch's own classes."""
    shape = {field.name: initial["config"][field.name] for field in fields(ModelConfig)}
    model = Transformer(ModelConfig(**shape))
    model.load_state_dict(initial["model"])
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    windows = RandomWindows(open_tokens(data_dir).train, CONTEXT, SEED)
    curves: dict[str, list[float]] = {"loss_train": [], "grad_norm": [], "lr": []}
    for step in range(1, STEPS + 1):
        lr = LR_MAX * step / WARMUP
        if step > WARMUP:
            half_turn = math.pi * (step - WARMUP) / (STEPS - WARMUP)
            lr = LR_MIN + (LR_MAX - LR_MIN) * (1 + math.cos(half_turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        samples = np.arange((step - 1) * BATCH_SIZE, step * BATCH_SIZE)
        tokens = torch.from_numpy(windows.rows(samples))
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        for name, value in zip(curves, (loss.item(), grad_norm.item(), lr), strict=True):
            curves[name].append(value)
    return {**curves, "model": model.state_dict()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data_dir) -> dict[str, dict[str, Any]]:
    """The plain run of the model with a head of its own ("false") and of the tied one ("true")."""
    runs = {}
    for tie_weights in ("false", "true"):
        out_dir = tmp_path_factory.mktemp("initial") / "run"
        train(1, data_dir, out_dir, **{**RECIPE, "iterations": 0, "tie_weights": tie_weights})
        runs[tie_weights] = plain_run(data_dir, saved_at(out_dir, 0))
        assert min(runs[tie_weights]["grad_norm"]) > 2 * MAX_NORM
    return runs


@pytest.mark.parametrize("shard", ["false", "true"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tie_weights", ["false", "true"])
def test_a_run_is_that_of_torchs_own_classes_in_one_process_and_one_piece(
    tmp_path, data_dir, plain, tie_weights, world_size, shard
):
    split = {"gradient_accumulation_steps": 2, "shard_optimizer": shard, "bucket_cap_mb": 0.1}
    entries = train(
        world_size, data_dir, tmp_path / "run", **RECIPE, **split, tie_weights=tie_weights
    )
    expected = plain[tie_weights]
    assert curve(entries, "lr") == pytest.approx(expected["lr"], rel=1e-12)
    assert curve(entries) == pytest.approx(expected["loss_train"], rel=2e-5)
    assert curve(entries, "grad_norm") == pytest.approx(expected["grad_norm"], rel=2e-5)
    saved = saved_at(tmp_path / "run", STEPS)
    assert saved["model"].keys() == expected["model"].keys()
    for name, tensor in saved["model"].items():
        torch.testing.assert_close(tensor, expected["model"][name], rtol=0, atol=2e-6)
    head, embedding = (saved["model"][f"{n}.weight"] for n in ("output_head", "embedding"))
    assert torch.equal(head, embedding) == (tie_weights == "true")
    once = {"output_head.weight"} if tie_weights == "true" else set()
    assert saved["optimizer"].keys() == saved["model"].keys() - once


# Epochs: what is read.


def main_noting_rows(argv: list[str]) -> list[list[tuple[int, ...]]]:
    """The rows that this rank trains on, a list a step, each as the tokens of its window."""
    import train_ddp

    steps: dict[int, list[tuple[int, ...]]] = {}
    micro_batch = train_ddp.micro_batch

    def noting(job: Any, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = micro_batch(job, micro_step)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
        steps.setdefault(job.iteration, []).extend(map(tuple, rows))
        return inputs, targets

    with mock.patch.object(train_ddp, "micro_batch", noting):
        run_main(argv)
    assert list(steps) == list(range(1, len(steps) + 1))
    return list(steps.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_trains_on_every_window_once_and_fills_the_last_batch_from_the_next(
    tmp_path, data_dir, world_size
):
    tokens = np.load(data_dir / "train.npy").tolist()
    starts = range(0, len(tokens) - CONTEXT, CONTEXT)
    windows = [tuple(tokens[start : start + CONTEXT + 1]) for start in starts]
    assert len(set(windows)) == len(windows)
    batch_size = 48
    steps = math.ceil(len(windows) / batch_size)
    wrapped = steps * batch_size - len(windows)
    assert 0 < wrapped < batch_size

    shape = {"epochs": 1, "batch_size": batch_size, "gradient_accumulation_steps": 2}
    by_rank = run_ranks(
        main_noting_rows, world_size, data_dir, tmp_path / "run", **shape, val_interval=0
    )
    for rows_of_steps in by_rank:
        assert [len(rows) for rows in rows_of_steps] == [batch_size // world_size] * steps
    read = Counter(row for rows_of_steps in by_rank for rows in rows_of_steps for row in rows)
    assert set(read) == set(windows)
    assert sorted(read.values()) == [1] * (len(windows) - wrapped) + [2] * wrapped
    first, last = ({row for rows in by_rank for row in rows[step]} for step in (0, -1))
    twice = {row for row, times in read.items() if times == 2}
    assert twice <= last
    assert not twice <= first  # the next epoch has an order of its own


# A step whose gradient is not finite, on one rank of two.


def main_with_a_fault(argv: list[str], faults: dict[int, str]) -> list[tuple[str, str, str, str]]:
    """The run, rank 1's "loss" or one element of its "gradient" being NaN at these steps.

    Returns:
        Fingerprints by step: weights before and after, optimizer state before and after.
    """
    import train_ddp

    step = rank = 0
    head, training_step = OutputHead.forward, train_ddp.training_step
    fingerprints = []

    def spoiling(self: Any, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        fault = faults.get(step) if rank == 1 and features.requires_grad else None
        if fault == "gradient":
            one_nan = torch.zeros(features.shape)
            one_nan.view(-1)[0] = math.nan
            features.register_hook(lambda gradient: gradient + one_nan)
        loss = head(self, features, targets)
        return loss * math.nan if fault == "loss" else loss

    def noting(job: Any) -> Any:
        nonlocal step, rank
        step, rank = job.iteration, job.world.rank
        before = weights_of(job), state_of(job)
        result = training_step(job)
        after = weights_of(job), state_of(job)
        fingerprints.append((before[0], after[0], before[1], after[1]))
        return result

    with (
        mock.patch.object(OutputHead, "forward", spoiling),
        mock.patch.object(train_ddp, "training_step", noting),
    ):
        run_main(argv)
    return fingerprints


def weights_of(job: Any) -> str:
    return digest(job.model.state_dict().values())


def state_of(job: Any) -> str:
    """Of the optimizer; a sharded one's is this rank's part."""
    state = getattr(job.optimizer, "_local", job.optimizer).state
    return digest(value for entries in state.values() for value in entries.values())


def digest(values: Any) -> str:
    """Equal exactly when all bits are."""
    found = hashlib.sha256()
    for value in values:
        found.update(torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("shard", "optimizer"), [("false", "adamw"), ("true", "adamw"), ("true", "muon")]
)
def test_a_nan_on_one_rank_leaves_every_rank_untouched_for_this_step_alone(
    tmp_path, data_dir, shard, optimizer
):
    faults = {3: "gradient", 6: "loss"}
    by_rank = run_ranks(
        main_with_a_fault,
        2,
        data_dir,
        tmp_path / "run",
        faults,
        iterations=8,
        max_skipped_steps=2,
        shard_optimizer=shard,
        optimizer=optimizer,
        val_interval=0,
    )
    for fingerprints in by_rank:
        assert len(fingerprints) == 8
        for step, (weights, new_weights, state, new_state) in enumerate(fingerprints, start=1):
            assert (weights == new_weights) == (step in faults), step
            assert (state == new_state) == (step in faults), step
    first, second = ([step[1] for step in fingerprints] for fingerprints in by_rank)
    assert first == second
    entries = metrics_of(tmp_path / "run")
    assert curve(entries, "skipped_steps") == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [math.isfinite(float(norm)) for norm in curve(entries, "grad_norm")] == [
        step not in faults for step in range(1, 9)
    ]
    states = saved_at(tmp_path / "run", 8)["optimizer"].values()
    assert {int(state["step"]) for state in states if "step" in state} == {6}


def test_nans_that_follow_each_other_end_the_run_on_every_rank(tmp_path, data_dir):
    options = {"iterations": 8, "max_skipped_steps": 2, "val_interval": 0}
    faults = {3: "loss", 5: "gradient", 6: "gradient"}
    with pytest.raises(DistributedError) as caught:
        run_ranks(main_with_a_fault, 2, data_dir, tmp_path / "run", faults, **options)
    failures = caught.value.failures
    assert [failures[rank].kind for rank in (0, 1)] == ["DivergedError"] * 2
    assert "2 steps in a row had no update, the last one step 6" in failures[0].message


# Mixed precision.


def main_noting_losses(argv: list[str]) -> list[tuple[torch.dtype, torch.dtype, float, float]]:
    """Of each micro-batch: dtype of logits and loss, the loss, and the same logits' in float64."""
    noted = []
    head = OutputHead.forward

    def noting(self: Any, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = head(self, features, targets)
        if features.requires_grad:
            logits = head(self, features).detach()
            exact = functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
            noted.append((logits.dtype, loss.dtype, loss.item(), exact.item()))
        return loss

    with mock.patch.object(OutputHead, "forward", noting):
        run_main(argv)
    return noted


def test_bfloat16_multiplies_narrow_and_takes_the_loss_wide(tmp_path, data_dir):
    options = {"iterations": 4, "val_interval": 4}
    for dtype in ("float32", "bfloat16"):
        (noted,) = run_ranks(
            main_noting_losses, 1, data_dir, tmp_path / dtype, dtype=dtype, **options
        )
        assert len(noted) == 4
        for logits_dtype, loss_dtype, loss, exact in noted:
            assert logits_dtype == getattr(torch, dtype)
            assert loss_dtype == torch.float32
            assert loss == pytest.approx(exact, rel=1e-6)
    wide, narrow = metrics_of(tmp_path / "float32"), metrics_of(tmp_path / "bfloat16")
    # From the first forward pass on, with equal weights still: of training and of validation.
    for name in ("loss_train", "val_loss"):
        assert curve(narrow, name)[0] != curve(wide, name)[0]
        assert curve(narrow, name) == pytest.approx(curve(wide, name), rel=1e-2)


def test_bfloat16_loses_no_small_update(tmp_path, data_dir):
    """A step of this learning rate is far less than the last digit of a bfloat16 weight."""
    recipe: dict[str, Any] = {"schedule": "constant", "lr_max": 1e-5, "weight_decay": 0}
    recipe |= {"warmup_iters": 0, "batch_size": 2, "val_interval": 0}
    train(1, data_dir, tmp_path / "start", **recipe, iterations=0)
    start = saved_at(tmp_path / "start", 0)["model"]
    narrow = {"dtype": "bfloat16"}
    ways: dict[str, dict[str, str]] = {
        "float32": {},
        "bfloat16 products": narrow,
        "bfloat16 weights": {**narrow, "param_dtype": "bfloat16"},
    }
    moved, losses = {}, {}
    for way, options in ways.items():
        entries = train(1, data_dir, tmp_path / way, **recipe, **options, iterations=50)
        losses[way] = curve(entries)[-1]
        saved = saved_at(tmp_path / way, 50)
        parts = []
        for name, before in start.items():
            state = saved["optimizer"][name]
            has_master = way == "bfloat16 weights"
            after = state["master"] if has_master else saved["model"][name]
            assert {after.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {
                torch.float32
            }
            begin = before.bfloat16().float() if has_master else before
            parts.append((after != begin).flatten())
        moved[way] = torch.cat(parts)
    exact = moved.pop("float32")
    assert exact.float().mean() > 0.5
    for way, also in moved.items():
        assert (also & exact).sum() > 0.9 * exact.sum(), way
        assert losses[way] == pytest.approx(losses["float32"], rel=0.01)


# Activation checkpointing.


def main_counting_blocks(argv: list[str]) -> tuple[int, int]:
    """How often the run went through a block: of a model in training, and in evaluation mode."""
    runs: Counter[bool] = Counter()

    def forward(block: Block, *args: Any) -> torch.Tensor:
        runs[block.training] += 1
        return plain_forward(block, *args)

    plain_forward = Block.forward
    with mock.patch.object(Block, "forward", forward):
        run_main(argv)
    return runs[True], runs[False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_runs_blocks_twice_and_changes_no_bit(tmp_path, data_dir, dtype):
    options = {"dtype": dtype, "dropout": 0.1, "gradient_accumulation_steps": 2, "iterations": 10}
    entries, digests, runs = [], [], []
    for on in ("false", "true"):
        out_dir, option = tmp_path / on, {"activation_checkpointing": on}
        runs += run_ranks(main_counting_blocks, 1, data_dir, out_dir, **options, **option)
        entries.append(metrics_of(out_dir))
        digests.append(digest(saved_at(out_dir, 10)["model"].values()))
    for name in ("loss_train", "val_loss", "grad_norm"):
        assert curve(entries[0], name) == curve(entries[1], name)
    assert digests[0] == digests[1]
    (trained, evaluated), (trained_again, evaluated_again) = runs
    assert trained == 10 * 2 * 2  # steps x micro-batches x layers
    assert (trained_again, evaluated_again) == (2 * trained, evaluated)


# Resume.


def test_a_run_may_go_on_with_activation_checkpointing(tmp_path, data_dir):
    """Where the memory did not suffice; the option is no part of what the run is."""
    options = {"iterations": 10, "dropout": 0.1, "val_interval": 0, "cos_cycle_iters": 10}
    train(1, data_dir, tmp_path / "straight", **options)
    train(1, data_dir, tmp_path / "run", **{**options, "iterations": 5})
    more = {"resume": "auto", "activation_checkpointing": "true"}
    train(1, data_dir, tmp_path / "run", **options, **more)
    straight, resumed = (saved_at(tmp_path / name, 10) for name in ("straight", "run"))
    assert digest(resumed["model"].values()) == digest(straight["model"].values())
    listed = changes(straight, resumed["config"])
    assert "activation_checkpointing: False -> True" in listed


def test_the_tokens_of_another_tokenizer_are_refused_on_resume(tmp_path, data_dir):
    other = prepared(tmp_path / "other", seed=1)
    sizes = [
        json.loads((folder / "meta.json").read_text())["vocab_size"] for folder in (data_dir, other)
    ]
    assert sizes[0] == sizes[1]
    before = train(2, data_dir, tmp_path / "run", iterations=5, val_interval=0)
    with pytest.raises(DistributedError) as caught:
        train(2, other, tmp_path / "run", iterations=10, resume="auto")
    failures = caught.value.failures
    assert [failures[rank].kind for rank in (0, 1)] == ["CheckpointError"] * 2
    assert "prepared with another tokenizer" in failures[0].message
    assert metrics_of(tmp_path / "run") == before


def test_a_resumed_run_does_not_take_a_worse_model_for_its_best(tmp_path, data_dir):
    options = {"val_interval": 5, "checkpoint_interval": 5, "warmup_iters": 0}
    train(1, data_dir, tmp_path / "run", iterations=10, **options)
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    before = best.read_bytes()
    # A learning rate of 1 ruins the model.
    ruin = {"iterations": 15, "resume": "auto", "lr_max": 1, "lr_min": 1}
    val_losses = curve(train(1, data_dir, tmp_path / "run", **ruin, **options), "val_loss")
    assert val_losses[-1] > val_losses[2] == min(val_losses)
    assert best.read_bytes() == before
    assert saved_at(tmp_path / "run", 15)["best_val_loss"] == val_losses[2]


# Figures.


def main_with_a_peak(argv: list[str], peak: float) -> None:
    """The run on a device whose peak rate in float32 is known."""

    def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
        return peak if (device.type, dtype) == ("cpu", torch.float32) else None

    with mock.patch("training.metrics.peak_flops", peak_flops):
        run_main(argv)


@pytest.mark.parametrize("world_size", [1, 2])
def test_mfu_is_the_share_of_all_devices_peak(tmp_path, data_dir, world_size):
    options = {"iterations": 3, "val_interval": 0, "batch_size": BATCH_SIZE}
    run_ranks(main_with_a_peak, world_size, data_dir, tmp_path / "run", 1e12, **options)
    entries = metrics_of(tmp_path / "run")
    config = saved_at(tmp_path / "run", 3)["config"]
    model = Transformer(ModelConfig(**{f.name: config[f.name] for f in fields(ModelConfig)}))
    flops_per_token = model.num_flops_per_token()
    tokens = BATCH_SIZE * CONTEXT
    for entry in entries:
        rate = tokens / entry["seconds_per_step"]
        assert entry["tokens_per_second"] == pytest.approx(rate)
        assert entry["mfu"] == pytest.approx(rate * flops_per_token / (world_size * 1e12))
        assert 0 <= entry["data_wait_share"] < 1
        assert ("comm_wait_share" in entry) == (world_size > 1)
    if world_size > 1:
        for entry in entries:
            assert 0 < entry["comm_wait_share"] < 1
            assert 1 <= entry["slowest_rank_share"] <= world_size
    assert len(entries) == 3


def what_a_run_has_set_up(argv: list[str]) -> dict[str, Any]:
    """As a step finds it, on one rank."""
    import gc

    import train_ddp

    found: dict[str, Any] = {}
    training_step = train_ddp.training_step
    calls = {
        name: mock.patch.object(train_ddp, name)
        for name in ("share_cores", "keep_freed_memory", "allow_tf32")
    }

    def on_step(job: Any) -> Any:
        found["reads ahead"] = job.batches._thread.is_alive()
        found["collects by itself"] = gc.isenabled()
        found["frozen"] = gc.get_freeze_count() > 0
        return training_step(job)

    with contextlib.ExitStack() as stack:
        mocks = {name: stack.enter_context(patch) for name, patch in calls.items()}
        stack.enter_context(mock.patch.object(train_ddp, "training_step", on_step))
        run_main(argv)
        found |= {name: each.call_count for name, each in mocks.items()}
    return found


def test_a_run_sets_up_threads_memory_garbage_and_reading_ahead(tmp_path, data_dir):
    argv = flags(**{**TINY, "data_dir": data_dir, "out_dir": tmp_path, "iterations": 2})
    assert run_distributed(what_a_run_has_set_up, 1, argv, process_group=False) == [
        {
            "reads ahead": True,
            "collects by itself": False,
            "frozen": True,
            "share_cores": 1,
            "keep_freed_memory": 1,
            "allow_tf32": 1,
        }
    ]
