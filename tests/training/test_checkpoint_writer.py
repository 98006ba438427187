"""Checkpoints written beside the training: of the step they were asked at, at any world size."""

import math
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from optim.adamw import AdamW
from tests.harness import DistributedError, current_world, run_distributed
from training.archive import ArchiveWriter
from training.checkpoint import Collected, collect
from training.checkpoint_file import load_checkpoint
from training.checkpoint_writer import CheckpointWriter, HostCopies
from training.run_folder import RunFolder


class Run:
    """A tiny model in training, sharded or not, with what saves it."""

    def __init__(self, out_dir: Path, sharded: bool, is_async: bool) -> None:
        torch.manual_seed(0)
        self.world = current_world()
        self.model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11))
        self.model[2].weight = self.model[0].weight
        self.ddp = DDP(self.model, 50 * 4 / 2**20)
        if sharded:
            named = self.model.parameters()
            self.optimizer: torch.optim.Optimizer = ShardedOptimizer(
                named, AdamW, ddp=self.ddp, lr=0.1
            )
        else:
            self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.folder = RunFolder(str(out_dir), keep_checkpoints=10)
        self.writer = CheckpointWriter(self.world, self.folder, is_async)
        self.is_async = is_async
        self.iteration = 0

    def step(self) -> None:
        self.iteration += 1
        ids = torch.arange(11).roll(self.iteration + self.world.rank)
        self.ddp(ids).square().sum().backward()
        self.ddp.finish_gradient_sync()
        self.optimizer.step()
        self.ddp.zero_grad()

    def collect(self) -> Collected:
        return collect(
            model=self.model,
            optimizer=self.optimizer,
            progress={"iteration": self.iteration, "best_val_loss": math.inf},
            config={},
            tokenizer_json="{}",
            data_fingerprint="",
            in_shards=self.is_async,
        )

    def save(self, is_best: bool = False) -> None:
        self.writer.save(self.collect(), is_best, is_due=True)


def saved_while_training(out_dir, sharded, is_async):
    """Weights at the three steps that are saved."""
    run = Run(out_dir, sharded, is_async)
    problems, weights = [], []
    for _ in range(3):
        run.step()
        problems.append(run.writer.finish())
        run.save()
        weights.append({name: t.clone() for name, t in run.model.state_dict().items()})
        run.step()
    problems.append(run.writer.finish())
    assert run.writer.finish() is None  # again: nothing is under way
    assert problems == [None] * 4
    return weights


def contents(out_dir: Path) -> list[dict]:
    return [load_checkpoint(out_dir / "checkpoints" / f"ckpt_{n:08d}.pt") for n in (1, 3, 5)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_is_written_beside_the_training_is_what_blocking_would_write(tmp_path, size, sharded):
    """References: the weights in the model, and the blocking, unsharded way for the optimizer."""
    run_distributed(saved_while_training, size, tmp_path / "reference", False, False)
    weights, *_ = run_distributed(saved_while_training, size, tmp_path / "run", sharded, True)
    saved = zip(contents(tmp_path / "reference"), contents(tmp_path / "run"), weights, strict=True)
    for one, other, expected in saved:
        assert other["model"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, other["model"][name]), name
        assert one["optimizer"].keys() == other["optimizer"].keys()
        for name, state in one["optimizer"].items():
            assert state.keys() == other["optimizer"][name].keys()
            for key, value in state.items():
                torch.testing.assert_close(
                    other["optimizer"][name][key], value, msg=f"{name} {key}"
                )
        held = other["model"]
        assert held["0.weight"].data_ptr() == held["2.weight"].data_ptr()  # tied in the file too


def slow_and_failing(out_dir):
    """While rank 0 writes, all ranks train on; a failure is told to all."""
    run = Run(out_dir, sharded=True, is_async=True)
    may_write = threading.Event()
    close = ArchiveWriter.close

    def held_back(archive):
        may_write.wait()
        close(archive)

    ArchiveWriter.close = held_back  # type: ignore[method-assign]
    run.step()
    run.save(is_best=True)
    for _ in range(3):
        run.step()
    assert run.world.rank or not list(run.folder.checkpoints.glob("*.pt"))
    may_write.set()
    assert run.writer.finish() is None
    assert run.folder.best.exists()

    def fail(archive, record, tensor):
        raise OSError(28, "No space left on device")

    ArchiveWriter.write = fail  # type: ignore[method-assign]
    run.save()
    run.step()
    return run.writer.finish()


def test_training_goes_on_while_a_checkpoint_is_written_or_fails(tmp_path):
    problems = run_distributed(slow_and_failing, 3, tmp_path)
    assert len(set(problems)) == 1
    assert f"checkpoint of step 4 not saved in {tmp_path / 'checkpoints'}: " in problems[0]
    assert "No space left on device" in problems[0]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "ckpt_00000001.pt"]


def vanished_folder(out_dir):
    run = Run(out_dir, sharded=True, is_async=True)
    run.step()
    run.save()
    assert run.writer.finish() is None
    if run.world.rank == 0:
        for path in run.folder.checkpoints.iterdir():
            path.unlink()
        run.folder.checkpoints.rmdir()
    run.step()
    run.save()
    return run.writer.finish()


def test_a_folder_that_vanished_is_made_again(tmp_path):
    assert run_distributed(vanished_folder, 2, tmp_path) == [None, None]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["ckpt_00000002.pt"]


def read_back_wrong(out_dir):
    run = Run(out_dir, sharded=False, is_async=True)
    close = ArchiveWriter.close

    def close_and_flip(archive):  # a disk that keeps other bits than it was given
        close(archive)
        with open(archive._file._file.name, "r+b") as file:
            file.seek(200)
            byte = file.read(1)[0]
            file.seek(200)
            file.write(bytes([byte ^ 1]))

    ArchiveWriter.close = close_and_flip  # type: ignore[method-assign]
    run.step()
    run.save()
    return run.writer.finish()


def test_a_file_that_reads_back_otherwise_is_no_checkpoint(tmp_path):
    (problem,) = run_distributed(read_back_wrong, 1, tmp_path)
    assert "reads back other than written" in problem
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_copies_are_the_tensors_and_use_their_memory_again():
    copies = HostCopies()
    tensors = [torch.ones(3), torch.zeros(3), torch.ones(2, 2, dtype=torch.bfloat16)]
    first = copies.of(tensors)
    tensors[0].fill_(7)
    assert [copy.sum().item() for copy in first] == [3, 0, 4]
    second = copies.of(tensors)
    assert second[0].sum().item() == 21
    assert {copy.data_ptr() for copy in second} == {copy.data_ptr() for copy in first}
    assert copies.of([torch.ones(5)])[0].shape == (5,)


def dies_in_the_middle(out_dir):
    run = Run(out_dir, sharded=True, is_async=True)
    run.step()
    collected = run.collect()
    if run.world.rank == 1:
        raise RuntimeError("rank 1 is gone")
    run.writer.save(collected, False, True)
    run.writer.finish()


def test_a_rank_that_dies_in_the_middle_of_a_save_ends_the_others(tmp_path):
    with pytest.raises(DistributedError) as caught:
        run_distributed(dies_in_the_middle, 3, tmp_path)
    assert "rank 1 is gone" in str(caught.value)
    assert all(failure.kind != "hang" for failure in caught.value.failures.values())
    assert not list((tmp_path / "checkpoints").glob("*.pt"))
