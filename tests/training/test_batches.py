"""What was read ahead is what was asked for, wherever the run goes next."""

import threading

import numpy as np
import pytest
import torch

from training.batches import MOST_AHEAD, Batches

SIZE, STRIDE, CPU = 2, 6, torch.device("cpu")


class Counting:
    """Windows that hold their sample's number, and know who asked for which."""

    def __init__(self, broken: int = -1) -> None:
        self.reads: list[int] = []
        self.readers: set[str] = set()
        self._read = threading.Condition()
        self._broken = broken

    def rows(self, samples: np.ndarray) -> np.ndarray:
        with self._read:
            self.reads.append(int(samples[0]))
            self.readers.add(threading.current_thread().name)
            self._read.notify_all()
        if samples[0] == self._broken:
            raise IndexError(f"training: no window of 5 tokens at {samples[0]}")
        return samples[:, None] * 10 + np.arange(5)

    def wait_for(self, first: int) -> bool:
        with self._read:
            return self._read.wait_for(lambda: first in self.reads, timeout=20)


def assert_begins_with(tokens: torch.Tensor, first: int) -> None:
    assert tokens.dtype == torch.int64
    expected = (torch.arange(first, first + SIZE)[:, None] * 10) + torch.arange(5)
    assert torch.equal(tokens, expected)


def test_the_next_micro_batches_are_read_before_they_are_asked_for():
    windows = Counting()
    with Batches(windows, SIZE, STRIDE, CPU) as batches:
        assert_begins_with(batches.take(4), 4)
        assert windows.wait_for(4 + MOST_AHEAD * STRIDE)
        assert windows.readers == {"batches"}
        for first in range(4 + STRIDE, 100, STRIDE):
            assert_begins_with(batches.take(first), first)
    assert len(windows.reads) == len(set(windows.reads))


def test_whoever_goes_back_or_on_to_another_place_gets_that_place():
    with Batches(Counting(), SIZE, STRIDE, CPU) as batches:
        for first in (0, 6, 12, 6, 12, 100, 3, 9, 0):
            assert_begins_with(batches.take(first), first)


def test_an_error_in_reading_comes_when_that_micro_batch_is_asked_for():
    windows = Counting(broken=12)
    with Batches(windows, SIZE, STRIDE, CPU) as batches:
        assert_begins_with(batches.take(0), 0)
        assert windows.wait_for(12)
        assert_begins_with(batches.take(6), 6)
        with pytest.raises(IndexError, match="training: no window of 5 tokens at 12"):
            batches.take(12)
        assert_begins_with(batches.take(18), 18)


def test_the_thread_ends_with_the_context_and_without_it_reading_goes_on():
    windows = Counting()
    with Batches(windows, SIZE, STRIDE, CPU) as batches:
        thread = batches._thread
        batches.take(0)
        assert thread.daemon  # a disk that hangs must not hold up the end of the process
    assert not thread.is_alive()
    assert_begins_with(batches.take(6), 6)
    assert windows.readers == {"batches", threading.current_thread().name}


def test_waiting_is_counted():
    release = threading.Event()

    class Slow(Counting):
        def rows(self, samples: np.ndarray) -> np.ndarray:
            release.wait(0.05)
            return super().rows(samples)

    with Batches(Slow(), SIZE, STRIDE, CPU) as batches:
        batches.take(0)
        assert batches.seconds_waited >= 0.05
        release.set()
