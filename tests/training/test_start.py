"""How a run begins: all ranks from the same file."""

from pathlib import Path

import pytest

from dist.collectives import rank
from tests.harness import run_distributed
from training.checkpoint_file import FORMAT_VERSION, CheckpointError, save
from training.start import load_alike


def loaded(paths):
    """Each rank loads a file of its own, as machines without a common disk do."""
    try:
        return load_alike(paths[rank()])["iteration"]
    except CheckpointError as error:
        return str(error)


def written(path: Path, best_val_loss: float) -> str:
    content = {"format_version": FORMAT_VERSION, "model": {}, "optimizer": {}, "config": {}}
    entries = {"best_val_loss": best_val_loss, "tokenizer": "{}", "rng": [], "iteration": 7}
    save(content | entries, path)
    return str(path)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_read_different_files_are_told_so(tmp_path, size):
    one, same = written(tmp_path / "one.pt", 0.5), written(tmp_path / "same.pt", 0.5)
    other = written(tmp_path / "other.pt", 0.25)
    assert run_distributed(loaded, size, [one, same, one]) == [7] * size
    if size > 1:
        answers = run_distributed(loaded, size, [one, same, other])
        assert all("not the same file on all ranks" in answer for answer in answers)
