"""Writing checkpoints beside the training: what is saved is copied at the step border, and a thread
of each rank brings it to rank 0 and to the disk while the next steps run.

The copies lie in memory that is kept for the next save: this rank's shard of weights and optimizer
state, no more. Threads of different ranks talk over a process group of their own, so that their
messages never stand in the way of gradients.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dist.collectives import all_reduce_sum, broadcast_object
from dist.process_group import World
from training.checkpoint import Collected
from training.console import say
from training.run_folder import RunFolder

# Of the threads, whose disk may be slow; see `_await_thread` for ranks that are gone.
PATIENCE = timedelta(days=1)
SECONDS_BETWEEN_QUESTIONS = 0.5


class CheckpointWriter:
    """Writes one checkpoint at a time; every rank has one and calls the same methods.

    Args:
        world: the processes.
        folder: of the run.
        is_async: go on while it is written; False: `save` returns when all is done.
    """

    def __init__(self, world: World, folder: RunFolder, is_async: bool) -> None:
        self._world = world
        self._folder = folder
        self._is_async = is_async
        self._copies = HostCopies()
        self._group = None
        if world.world_size > 1:
            self._group = torch_dist.new_group(backend="gloo", timeout=PATIENCE)
        self._thread: threading.Thread | None = None
        self._is_unfinished = False
        self._problem: str | None = None
        self._fault: BaseException | None = None

    def save(self, collected: Collected, is_best: bool, is_due: bool) -> None:
        """Save a checkpoint; `finish` says later whether it could be.

        Args:
            collected: of this step.
            is_best: write best.pt.
            is_due: write the numbered file.
        """
        assert not self._is_unfinished, "finish() comes between two saves"
        self._is_unfinished = True
        self._problem = self._fault = None
        tensors = collected.tensors
        if self._is_async:
            tensors = self._copies.of(tensors)
        # A daemon: a process that ends by a failure does not wait for its disk.
        self._thread = threading.Thread(
            target=self._write, args=(collected, tensors, is_best, is_due), daemon=True
        )
        self._thread.start()
        if not self._is_async:
            self._await_thread()

    def finish(self) -> str | None:
        """Wait for the last save, if there was one since the last call.

        Returns:
            On every rank: None, or why it could not be written. Files that were there still are.
        """
        if not self._is_unfinished:
            return None
        self._await_thread()
        self._is_unfinished = False
        return broadcast_object(self._problem)

    def _await_thread(self) -> None:
        """Wait until the save is over on all ranks, however long it takes.

        The threads' group is patient with a slow disk, and would be as patient with a rank that is
        gone: gloo does not always notice that a connection has ended. So the ranks go on asking
        each other over the group of the training, and its time-out ends what one does not answer.
        """
        if self._thread is None:
            return
        is_over = False
        while not is_over:
            self._thread.join(SECONDS_BETWEEN_QUESTIONS)
            is_alive = self._thread.is_alive()
            if self._fault is not None:
                raise self._fault
            alive = torch.tensor(float(is_alive), device=self._world.device)
            is_over = all_reduce_sum(alive).item() == 0
        self._thread = None

    def _write(
        self, collected: Collected, tensors: Sequence[Tensor], is_best: bool, is_due: bool
    ) -> None:
        try:
            pieces = collected.pieces(tensors, self._group)
            if self._world.rank == 0:
                self._problem = self._folder.save(collected.content, pieces, is_best, is_due)
                if self._problem is not None:
                    say(f"{self._problem}; the training goes on")
            for _ in pieces:  # all of them on other ranks; here those that a failure left
                pass
        except BaseException as fault:
            self._fault = fault


class HostCopies:
    """Copies of tensors in the CPU's memory, which is used again for the next ones."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; the copies of the call before must not be in use any more."""
        fitting: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for buffer in self._buffers:
            fitting.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
        copies = []
        for tensor in tensors:
            free = fitting.get((tensor.shape, tensor.dtype))
            copies.append(free.pop() if free else _new_buffer(tensor))
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        self._buffers = copies
        return copies


def _new_buffer(tensor: Tensor) -> Tensor:
    # Pinned memory is what a GPU copies to without waiting.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
