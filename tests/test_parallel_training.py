"""The job on several processes: what users of such scripts were hurt by, tried as they would."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.dist.helpers import fingerprint
from tests.harness import run_distributed
from tests.tiny import TINY, curve, flags, metrics_of, run_main, train, write_corpus
from training.archive import ArchiveWriter


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    from prepare import main

    folder = tmp_path_factory.mktemp("parallel")
    corpus = write_corpus(folder / "corpus")
    options = flags(input=corpus, out_dir=folder / "data", vocab_size=400)
    with mock.patch("sys.argv", ["prepare.py", *options]):
        main()
    return folder / "data"


def final(out_dir: Path, iteration: int) -> dict:
    path = out_dir / "checkpoints" / f"ckpt_{iteration:08d}.pt"
    return torch.load(path, weights_only=True, mmap=True)


def assert_one_curve(entries, reference, relative=2e-5):
    for name in ("loss_train", "val_loss", "grad_norm"):
        tolerance = 10 * relative if name == "grad_norm" else relative
        assert curve(entries, name) == pytest.approx(curve(reference, name), rel=tolerance), name


@pytest.mark.parametrize("shard", ["true", "false"])
@pytest.mark.parametrize(("world_size", "micro_steps"), [(1, 1), (1, 4), (2, 2), (4, 2)])
def test_micro_batches_ranks_and_sharding_give_one_curve_of_a_tied_model(
    tmp_path, data_dir, shard, world_size, micro_steps
):
    options = {"tie_weights": "true", "max_norm": 0.1, "iterations": 10, "val_interval": 5}
    reference = train(1, data_dir, tmp_path / "one", **options)
    split = {"gradient_accumulation_steps": micro_steps, "shard_optimizer": shard}
    # Buckets so small that the tied weight alone spans the shards of all ranks.
    split["bucket_cap_mb"] = 0.02
    entries = train(world_size, data_dir, tmp_path / "many", **options, **split)
    assert_one_curve(entries, reference)
    assert min(curve(entries, "grad_norm")) > 0.1  # shown as it was before clipping
    saved = final(tmp_path / "many", 10)
    weights, state = saved["model"], saved["optimizer"]
    assert torch.equal(weights["embedding.weight"], weights["output_head.weight"])
    assert "output_head.weight" not in state


def test_a_run_moves_between_numbers_of_ranks_and_between_sharded_and_plain(tmp_path, data_dir):
    options: dict[str, Any] = {
        "batch_size": 12,
        "cos_cycle_iters": 25,
        "val_interval": 0,
        "dropout": 0.0,
    }
    straight = train(1, data_dir, tmp_path / "straight", iterations=25, **options)
    ways = [(4, "true"), (3, "true"), (2, "false"), (4, "true"), (1, "false")]
    for leg, (world_size, shard) in enumerate(ways):
        changed = {"iterations": 5 * (leg + 1), "shard_optimizer": shard}
        if leg:
            changed["resume"] = "auto"
        moved = train(world_size, data_dir, tmp_path / "moved", **options, **changed)
    assert curve(moved) == pytest.approx(curve(straight), rel=2e-5)
    ours, theirs = (final(tmp_path / run, 25)["optimizer"] for run in ("moved", "straight"))
    assert ours.keys() == theirs.keys()
    for name, entries in theirs.items():
        assert ours[name]["step"] == entries["step"] == 25
        for key in ("exp_avg", "exp_avg_sq"):
            scale = entries[key].abs().max().item()
            torch.testing.assert_close(ours[name][key], entries[key], rtol=0, atol=2e-3 * scale)


def test_a_tiny_model_trains_saves_and_goes_on_on_more_ranks_than_some_weights_have_elements(
    tmp_path, data_dir
):
    options: dict[str, Any] = {
        "d_model": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_layers": 1,
        "d_ff": 5,
    }
    options |= {"cos_cycle_iters": 10, "val_interval": 5, "bucket_cap_mb": 0.0001}
    reference = train(1, data_dir, tmp_path / "one", iterations=10, **options)
    train(8, data_dir, tmp_path / "many", iterations=5, **options)
    entries = train(8, data_dir, tmp_path / "many", iterations=10, resume="auto", **options)
    assert_one_curve(entries, reference)


def replicas_of_every_step(argv):
    """A run's weights on this rank after every step, as digests."""
    import train_ddp

    digests: list[str] = []
    if os.environ["RANK"] == "1":
        torch.manual_seed(99)  # whatever a rank did before, the model is rank 0's
    step = train_ddp.training_step

    def record(job):
        if not digests:
            digests.append(fingerprint(job.model.state_dict().values()))
        result = step(job)
        digests.append(fingerprint(job.model.state_dict().values()))
        return result

    with mock.patch.object(train_ddp, "training_step", record):
        run_main(argv)
    return digests


@pytest.mark.parametrize("shard", ["true", "false"])
def test_all_ranks_hold_the_same_weights_before_and_after_every_step(tmp_path, data_dir, shard):
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "dropout": 0.1}
    options |= {"shard_optimizer": shard}
    options |= {"data_dir": data_dir, "out_dir": tmp_path / "run", "iterations": 20}
    argv = flags(**TINY | options)
    by_rank = run_distributed(replicas_of_every_step, 2, argv, process_group=False)
    assert by_rank[0] == by_rank[1]
    assert len(set(by_rank[0])) == 20 + 1


def slow_save(argv, seconds):
    """Every file takes longer to write than a collective may take."""
    close = ArchiveWriter.close
    slept: list[float] = []

    def slowly(archive):
        time.sleep(seconds)
        slept.append(seconds)
        close(archive)

    with mock.patch.object(ArchiveWriter, "close", slowly):
        run_main(argv)
    assert len(slept) == (2 if os.environ["RANK"] == "0" else 0)


def test_a_save_may_take_longer_than_the_time_out(tmp_path, data_dir):
    options = {**TINY, "timeout_seconds": 1, "iterations": 4, "checkpoint_interval": 2}
    options["val_interval"] = 0
    argv = flags(**options | {"data_dir": data_dir, "out_dir": tmp_path / "run"})
    run_distributed(slow_save, 2, argv, 2.5, process_group=False)
    assert len(curve(metrics_of(tmp_path / "run"))) == 4


@pytest.mark.parametrize("shard", ["true", "false"])
def test_a_changed_weight_decay_counts_from_the_first_resumed_step(tmp_path, data_dir, shard):
    options = {"cos_cycle_iters": 20, "val_interval": 0, "max_norm": 1e9}
    options["shard_optimizer"] = shard
    train(2, data_dir, tmp_path / "before", iterations=5, **options)
    before = final(tmp_path / "before", 5)["model"]
    after = {}
    for decay in (0.0, 0.5):
        out_dir = tmp_path / str(decay)
        changed = {"weight_decay": decay, "iterations": 6}
        path = tmp_path / "before" / "checkpoints" / "ckpt_00000005.pt"
        entries = train(2, data_dir, out_dir, resume=path, **options, **changed)
        after[decay] = final(out_dir, 6)["model"]
    lr = curve(entries, "lr")[-1]
    for name, weight in before.items():
        expected = -lr * 0.5 * weight if weight.dim() >= 2 else torch.zeros_like(weight)
        torch.testing.assert_close(after[0.5][name] - after[0.0][name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_16_bit_traffic_follows_the_curve(tmp_path, data_dir, world_size):
    options = {"iterations": 20, "bucket_cap_mb": 0.1}
    exact = train(world_size, data_dir, tmp_path / "exact", **options)
    for shard in ("true", "false"):
        narrow = {"gradient_dtype": "bfloat16", "shard_optimizer": shard}
        entries = train(world_size, data_dir, tmp_path / shard, **options, **narrow)
        assert curve(entries) == pytest.approx(curve(exact), rel=0.01)
        assert curve(entries) != curve(exact)


@pytest.mark.parametrize("world_size", [1, 2])
def test_16_bit_weights_follow_the_curve_and_resume_to_the_bit(tmp_path, data_dir, world_size):
    narrow = {"param_dtype": "bfloat16", "dtype": "bfloat16", "cos_cycle_iters": 20}
    exact = train(world_size, data_dir, tmp_path / "exact", cos_cycle_iters=20)
    straight = train(world_size, data_dir, tmp_path / "straight", **narrow)
    assert curve(straight) == pytest.approx(curve(exact), rel=0.02)
    train(world_size, data_dir, tmp_path / "stopped", iterations=10, **narrow)
    resumed = train(world_size, data_dir, tmp_path / "stopped", resume="auto", **narrow)
    assert curve(resumed) == curve(straight)
    saved, never_stopped = (final(tmp_path / run, 20) for run in ("stopped", "straight"))
    for name, weight in saved["model"].items():
        master = saved["optimizer"][name]["master"]
        assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, master.bfloat16())
        assert torch.equal(master, never_stopped["optimizer"][name]["master"])


def test_weights_change_their_width_on_resume_without_losing_digits(tmp_path, data_dir):
    narrow = {"param_dtype": "bfloat16", "dtype": "bfloat16"}
    common = {"cos_cycle_iters": 20, "val_interval": 0}
    path = tmp_path / "narrow" / "checkpoints" / "ckpt_00000005.pt"
    train(2, data_dir, tmp_path / "narrow", iterations=5, **narrow, **common)
    still = {"iterations": 6, "lr_max": 0, "lr_min": 0}  # what is saved is what was loaded
    train(2, data_dir, tmp_path / "wide", resume=path, **common, **still)
    masters = {name: s["master"] for name, s in torch.load(path)["optimizer"].items()}
    wide = final(tmp_path / "wide", 6)
    for name, weight in wide["model"].items():
        assert torch.equal(weight, masters[name])
        assert "master" not in wide["optimizer"][name]
    path = tmp_path / "wide" / "checkpoints" / "ckpt_00000006.pt"
    train(
        2,
        data_dir,
        tmp_path / "again",
        resume=path,
        **narrow,
        **common,
        **still | {"iterations": 7},
    )
    again = final(tmp_path / "again", 7)["optimizer"]
    for name, weight in wide["model"].items():
        assert torch.equal(again[name]["master"], weight)


def test_the_validation_loss_is_the_mean_over_tokens_however_unequal_the_shares(tmp_path, data_dir):
    # 17 windows divide by no number of ranks and no size of batch here.
    options = {"iterations": 0, "val_windows": 17}
    losses = [
        curve(
            train(ranks, data_dir, tmp_path / f"{ranks}_{rows}", batch_size=rows, **options),
            "val_loss",
        )
        for ranks, rows in ((1, 17), (1, 3), (2, 8), (3, 6))
    ]
    for loss in losses[1:]:
        assert loss == pytest.approx(losses[0], rel=1e-6)
