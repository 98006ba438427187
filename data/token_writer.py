"""Write token ids to a .npy file of unknown length, a block at a time.

The header of a .npy file states the number of elements, which is known only at the end. numpy
leaves room in it for the first axis to grow to any length, so it is written twice, in place.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np


def token_dtype(vocab_size: int) -> np.dtype:
    """Choose the narrowest type that holds every id: uint16 up to 65,536 entries, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """A .npy file that grows; leaving its `with` block completes it and forces it to the disk."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115, closed by __exit__
        self._write_header()
        self._header_bytes = self._file.tell()
        self.num_tokens = 0

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Write ids at the end.

        Raises:
            OverflowError: an id does not fit the file's type.
        """
        self._file.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self.num_tokens += len(ids)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if exception is None:
                self._file.seek(0)
                self._write_header(self.num_tokens)
                assert self._file.tell() == self._header_bytes, "the header grew into the ids"
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write_header(self, num_tokens: int = 0) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)
