"""How long computation has stood still for other ranks' data.

Only what is waited for in the open counts: a transfer that ends under backward costs nothing.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

# So many waits of a GPU are remembered before their times are asked for.
MOST_EVENTS = 512


class WaitTime:
    """Adds up waits.

    Args:
        on_stream: it is the current CUDA stream that waits, not this thread: between two events.
    """

    def __init__(self, on_stream: bool = False) -> None:
        self._on_stream = on_stream
        self._seconds = 0.0
        self._is_waiting = False
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is waited for inside; a wait inside a wait counts once."""
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        try:
            if self._on_stream:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                yield
                end.record()
                self._events.append((begin, end))
                if len(self._events) > MOST_EVENTS:
                    self._add_past_events()
            else:
                began = time.perf_counter()
                yield
                self._seconds += time.perf_counter() - began
        finally:
            self._is_waiting = False

    def seconds(self) -> float:
        """All waits so far; on a stream those that are over, which makes nobody wait."""
        self._add_past_events()
        return self._seconds

    def _add_past_events(self) -> None:
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
