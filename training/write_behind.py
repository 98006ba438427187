"""A file that writes what it was given while the next is being prepared.

Bringing data into the kernel's memory and computing their checksum take about equally long, and
neither needs Python's lock: side by side they take half the time where a core is free.
"""

import queue
import threading
from typing import BinaryIO

# Less than this is kept until more comes: handing it to the thread would take longer than writing.
HANDED_OVER_BYTES = 1 << 20


class WriteBehind:
    """The writing half of a binary file; a context manager that ends its thread.

    Args:
        file: open for writing; to be used by nobody else until the end of the block.

    Data must not be changed before the write after the next has returned, or `flush`. An OSError
    comes from the write that follows, or from `flush`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pending: list[bytes | memoryview] = []
        self._size = 0
        # One batch is being written, one waits, one is being put together.
        self._batches: queue.Queue[list[bytes | memoryview] | None] = queue.Queue(maxsize=1)
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._write_batches, daemon=True)

    def __enter__(self) -> "WriteBehind":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.put(None)
        self._thread.join()

    def write(self, data: bytes | memoryview) -> int:
        """Take data; returns their length."""
        self._raise_failure()
        self._pending.append(data)
        self._size += len(data)
        if self._size >= HANDED_OVER_BYTES:
            self._hand_over()
        return len(data)

    def flush(self) -> None:
        """Wait until all that was given is written."""
        self._hand_over()
        self._batches.join()
        self._raise_failure()
        self._file.flush()

    def _hand_over(self) -> None:
        self._batches.put(self._pending)
        self._pending, self._size = [], 0

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                if self._failure is None:
                    for data in batch:
                        self._file.write(data)
            except OSError as failure:
                self._failure = failure
            self._batches.task_done()
