"""Checkpoints: complete or absent, self-contained, safe to read, true to the bit."""

import math
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dist.process_group import World, set_random_seed
from dist.sharded_optimizer import ShardedOptimizer
from optim.adamw import AdamW
from training.checkpoint import collect, restore
from training.checkpoint_file import (
    CheckpointError,
    checkpoint_path,
    copy_whole,
    delete_old,
    load_checkpoint,
    numbered_checkpoints,
    save,
    verify,
)

ALONE = World(0, 0, 1, torch.device("cpu"))


class TiedModel(nn.Module):
    """Embedding and head are one matrix, as in the language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def trained(steps: int = 3) -> tuple[TiedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TiedModel()
    optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()


def write(path: Path, model, optimizer, iteration: int = 3) -> None:
    collected = collect(
        model=model,
        optimizer=optimizer,
        progress={
            "iteration": iteration,
            "best_val_loss": math.inf,
            "skipped_steps": 0,
            "skipped_in_a_row": 0,
        },
        config={"d_model": 3, "d_ff": None},
        tokenizer_json="{}",
        data_fingerprint="0",
    )
    save(collected.content, path, collected.pieces(collected.tensors, None))


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt.pt"
    write(path, *trained())
    return path


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("counts_in_int", [False, True])
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, is_sharded, counts_in_int):
    """Also from a file of before steps were counted on the device."""
    model, optimizer = trained()
    write(tmp_path / "ckpt.pt", model, optimizer)
    other, other_optimizer = trained(steps=0)
    if is_sharded:
        other_optimizer = ShardedOptimizer(other.parameters(), AdamW, lr=0.1)
    checkpoint = load_checkpoint(tmp_path / "ckpt.pt")
    for entries in checkpoint["optimizer"].values():
        assert entries["step"] == 3
        if counts_in_int:
            entries["step"] = int(entries["step"])
    restore(checkpoint, model=other, optimizer=other_optimizer, world=ALONE, seed=0)
    for _ in range(3):
        step(model, optimizer)
        step(other, other_optimizer)
    for name, tensor in model.state_dict().items():
        # In one flat piece the kernel rounds otherwise at the ends of these small tensors.
        tolerance = 1e-6 if is_sharded else 0.0
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=tolerance)
    write(tmp_path / "later.pt", other, other_optimizer)
    states = load_checkpoint(tmp_path / "later.pt")["optimizer"].values()
    assert [entries["step"] for entries in states] == [6] * 3


def test_all_random_generators_go_on_where_they_were(tmp_path):
    def draw():
        return torch.rand(2).tolist(), np.random.rand(), random.random(), random.gauss(0, 1)

    set_random_seed(5)
    draw()
    model, optimizer = trained()
    write(tmp_path / "ckpt.pt", model, optimizer)
    expected = draw()
    set_random_seed(6)
    checkpoint = load_checkpoint(tmp_path / "ckpt.pt")
    restore(checkpoint, model=model, optimizer=optimizer, world=ALONE, seed=0)
    assert draw() == expected


def test_at_another_world_size_the_generators_start_from_a_seed_of_this_iteration(tmp_path):
    checkpoint = load_checkpoint(saved(tmp_path))
    model, optimizer = trained()

    def first_draw(iteration: int, rank: int) -> float:
        world = World(rank, rank, 2, torch.device("cpu"))
        checkpoint["iteration"] = iteration
        restore(checkpoint, model=model, optimizer=optimizer, world=world, seed=7)
        return torch.rand(()).item()

    draws = [first_draw(iteration, rank) for iteration in (3, 4) for rank in (0, 1)]
    assert len(set(draws)) == 4
    assert first_draw(3, 0) == draws[0]


def test_the_file_needs_no_pickle_and_names_no_wrapper(tmp_path):
    raw = torch.load(saved(tmp_path), weights_only=True, mmap=True)
    assert set(raw["model"]) == {"embedding.weight", "norm.weight", "norm.bias", "head.weight"}
    assert set(raw["optimizer"]) == {"embedding.weight", "norm.weight", "norm.bias"}
    assert raw["optimizer"]["norm.bias"]["exp_avg"].dtype == torch.float32


def test_tied_weights_stand_in_the_file_once_and_come_back_tied(tmp_path):
    checkpoint = load_checkpoint(saved(tmp_path))
    model, optimizer = trained(steps=0)
    restore(checkpoint, model=model, optimizer=optimizer, world=ALONE, seed=0)
    assert model.head.weight is model.embedding.weight
    held = checkpoint["model"]
    assert held["head.weight"].data_ptr() == held["embedding.weight"].data_ptr()


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = saved(tmp_path)
    before = path.read_bytes()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save({"weight": torch.ones(100)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_checkpoint_is_named_with_what_is_there(tmp_path):
    saved(tmp_path)
    message = refused(tmp_path / "ckpt_9.pt")
    assert "ckpt_9.pt does not exist" in message
    assert "ckpt.pt" in message


def test_a_folder_is_no_checkpoint_and_the_answer_says_which_file_to_name(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for folder in (tmp_path, checkpoints):
        assert refused(folder) == f"{folder} is a folder, not a checkpoint"
    for name in ("other.pt", "ckpt_00000005.pt", "ckpt_00000010.pt", "best.pt"):
        (checkpoints / name).touch()
        advice = f" is a folder: name a checkpoint in it, such as {checkpoints / name}"
        assert refused(checkpoints).endswith(advice)
    assert refused(tmp_path).endswith(advice)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        assert str(path) in refused(path)
    path.write_bytes(whole[:-1])  # complete but for the seal
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)


def test_damage_inside_a_file_of_full_length_is_found(tmp_path):
    path = saved(tmp_path)
    verify(path)
    whole = bytearray(path.read_bytes())
    moment = load_checkpoint(path)["optimizer"]["embedding.weight"]["exp_avg"]
    place = whole.find(moment.numpy().tobytes())
    assert place > 0
    whole[place] ^= 1  # one bit
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)


def test_a_second_name_of_a_file_is_the_file_whole(tmp_path, monkeypatch):
    path = saved(tmp_path)
    copy_whole(path, tmp_path / "best.pt")
    monkeypatch.setattr(os, "link", raise_no_links)
    copy_whole(path, tmp_path / "copied.pt")
    names = sorted(other.name for other in tmp_path.iterdir())
    assert names == ["best.pt", "ckpt.pt", "copied.pt"]
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1


def raise_no_links(*_) -> None:
    raise OSError("no links here")


def test_a_file_that_wants_to_run_code_is_refused_and_runs_none(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "trap.pt"
    path.write_bytes(pickle.dumps({"model": Trap()}))
    assert str(path) in refused(path)
    torch.save({"model": Trap()}, path)
    assert str(path) in refused(path)
    assert not (tmp_path / "ran").exists()


def test_another_programs_file_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    assert "no checkpoint of train_ddp.py" in refused(path)


def test_another_models_checkpoint_is_refused_by_the_first_difference(tmp_path):
    checkpoint = load_checkpoint(saved(tmp_path))
    model = TiedModel()
    model.norm = nn.LayerNorm(4)
    with pytest.raises(CheckpointError, match=r"norm.weight is \(3,\) there and \(4,\) here"):
        restore(checkpoint, model=model, optimizer=AdamW(model.parameters()), world=ALONE, seed=0)


def test_the_newest_are_kept_by_number_not_by_name(tmp_path):
    for number in (9, 10, 99_999_999, 100_000_000):
        checkpoint_path(tmp_path, number).touch()
    (tmp_path / "best.pt").touch()
    (tmp_path / "ckpt_.pt").touch()
    delete_old(tmp_path, keep=2)
    assert [number for number, _ in numbered_checkpoints(tmp_path)] == [99_999_999, 100_000_000]
    assert (tmp_path / "best.pt").exists()
