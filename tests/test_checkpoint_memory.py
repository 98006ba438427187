"""What a save costs in memory, as the kernel counts it: only rank 0 holds anything of other ranks'
parts of the state, and no more of them than is on its way to the disk."""

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.dist.test_sharded_state import memory_of_this_process
from tests.resuming import prepared, start
from tests.tiny import run_main

# 8.5 million parameters, most of them in matrices of a megabyte, in buckets of one megabyte.
SHAPE = {"d_model": 256, "d_ff": 1024, "num_layers": 8, "num_heads": 4, "bucket_cap_mb": 1}
BUCKET = 1 << 20
RANKS = 4


def grown_by_saving(argv: list[str]) -> tuple[list[int], int]:
    """Bytes of its own that this process took, at most, in each save; and the weights' bytes."""
    import train_ddp

    libc = ctypes.CDLL(None)
    # Otherwise what one save frees could hide what the next one takes.
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is the kernel's again at once
    libc.mallopt(-8, 1)  # M_ARENA_MAX: threads keep none for themselves
    grown: list[int] = []
    weights = 0
    save_checkpoint = train_ddp.save_checkpoint

    def measuring(job: Any, new_best: float | None, is_due: bool) -> None:
        nonlocal weights
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
        before, shared = (memory_of_this_process(key) for key in ("VmRSS", "RssShmem"))
        save_checkpoint(job, new_best, is_due)
        assert train_ddp.await_checkpoint(job) is None
        # Looking at memory that ranks share takes none, but counts, by the huge page.
        looked_at = memory_of_this_process("RssShmem") - shared
        grown.append(memory_of_this_process("VmHWM") - before - looked_at)
        weights = sum(parameter.nbytes for parameter in job.model.parameters())

    with mock.patch.object(train_ddp, "save_checkpoint", measuring):
        run_main(argv)
    return grown, weights


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
@pytest.mark.parametrize("is_async", ["false", "true"])
def test_a_save_of_four_ranks_takes_copies_of_their_own_parts_at_most(tmp_path, is_async):
    data_dir = prepared(tmp_path)
    options = {**SHAPE, "async_checkpoint": is_async, "batch_size": 4, "max_seq_len": 32}
    options |= {"iterations": 4, "checkpoint_interval": 1, "val_interval": 0}
    (of_rank_zero, weights), *others = start(
        grown_by_saving, RANKS, data_dir, tmp_path / "run", **options
    )
    assert weights > 30e6
    # A shard of the weights and of both moments, in memory that later saves use again.
    copies = 3 * weights // RANKS if is_async == "true" else 0
    for (first, *later), _ in others:
        assert first <= copies + BUCKET
        assert max(later) <= BUCKET
    # What is being written, checksummed and read back, a few megabytes of each, whatever the
    # model's size; whole, the others' parts would be more than twice the weights.
    first, *later = of_rank_zero
    assert max(later) <= weights / 2
    assert first <= copies + weights / 2
