"""Micro-batches that are read from the token files before training asks for them.

A thread reads the next ones while the model computes: a page that has to come from a disk first
then holds up nobody, and on a GPU the tokens travel from pinned memory beside the computation. What
is read is known by the number of its first sample, and a sample is a pure function of its number
(data/tokens.py). So there is no state to wind forward or back: whoever asks for another place,
after a rollback or a resume, gets that place's, and what was read ahead in vain is dropped.
"""

import queue
import threading
import time
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# Micro-batches read ahead. More are asked for when only so many are left: each time the thread is
# woken, it takes its turn from the computation, so better one long one now and then.
LEAST_AHEAD, MOST_AHEAD = 2, 8


class Windows(Protocol):
    """What the samples are read from."""

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Read these samples, int64 (samples, context + 1)."""


class Batches:
    """One rank's micro-batches, in order; a context manager that starts its thread and ends it.

    Without the thread, outside of the context or in a forked process, they are read when asked for.

    Args:
        windows: of the training.
        size: samples in one micro-batch of one rank.
        stride: from one micro-batch's first sample to the next one's: those of all ranks.
        device: where they are needed.

    Attributes:
        seconds_waited: by those who asked, so far.
    """

    def __init__(self, windows: Windows, size: int, stride: int, device: torch.device) -> None:
        self.seconds_waited = 0.0
        self._windows, self._size, self._stride, self._device = windows, size, stride, device
        self._ahead: dict[int, Future[Tensor]] = {}
        self._asked_for: queue.SimpleQueue[tuple[int, Future[Tensor]] | None]
        self._asked_for = queue.SimpleQueue()
        # A daemon: a disk that does not answer must not hold up the end of a process.
        self._thread = threading.Thread(target=self._read_all, name="batches", daemon=True)

    def __enter__(self) -> "Batches":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        self._asked_for.put(None)
        self._thread.join(timeout=1.0)

    def take(self, first: int) -> Tensor:
        """The micro-batch that begins with this sample, int64 (size, context + 1) on the device.

        Raises:
            Exception: what reading it raised.
        """
        began = time.perf_counter()
        tokens = self._next(first).result() if self._thread.is_alive() else self._read(first)
        if self._device.type == "cuda":
            # torch keeps the pinned memory from being used again before it has been read.
            tokens = tokens.to(self._device, non_blocking=True)
        self.seconds_waited += time.perf_counter() - began
        return tokens

    def _next(self, first: int) -> Future[Tensor]:
        if first not in self._ahead:
            self._drop()
            self._ask_for(first)
        micro_batch = self._ahead.pop(first)
        if len(self._ahead) < LEAST_AHEAD:
            for number in range(1, MOST_AHEAD + 1):
                self._ask_for(first + number * self._stride)
        return micro_batch

    def _ask_for(self, first: int) -> None:
        if first not in self._ahead:
            self._ahead[first] = Future()
            self._asked_for.put((first, self._ahead[first]))

    def _drop(self) -> None:
        for micro_batch in self._ahead.values():
            micro_batch.cancel()  # unless it is being read
        self._ahead.clear()

    def _read_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else pinning would open a context on the first
        while (asked_for := self._asked_for.get()) is not None:
            first, micro_batch = asked_for
            if not micro_batch.set_running_or_notify_cancel():
                continue
            try:
                micro_batch.set_result(self._read(first))
            except BaseException as error:
                micro_batch.set_exception(error)
            del asked_for, micro_batch  # else the last one's memory would live on here

    def _read(self, first: int) -> Tensor:
        """Without operations of torch that would take more threads beside those of the training."""
        rows = self._windows.rows(np.arange(first, first + self._size))
        if self._device.type != "cuda":
            return torch.from_numpy(rows)
        pinned = torch.empty(rows.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = rows
        return pinned
