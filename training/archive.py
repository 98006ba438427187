"""The format of checkpoint files: torch.save's own, but written tensor by tensor and sealed.

`torch.save` wants all tensors in memory at once. Here a `Record` holds the place of a tensor whose
values come later, from another process say, so that the writer never holds more than one of them.
`torch.load(path, weights_only=True, mmap=True)` reads the file without this module.

Such a file is an uncompressed zip archive: `data.pkl`, the pickled content, in which each tensor
names the record of its bytes; `data/0`, `data/1`, ..., these bytes, aligned so that they can be
used where they are mapped; `version` and `byteorder`. A zip archive has a checksum of each record,
but none of its own headers and directory, where one wrong bit can lose a good record. So the
archive's comment, its last bytes, is the SHA-256 of all that is no record: the seal.
"""

import hashlib
import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; torch.save's, and enough for any vector instruction
SEAL_PREFIX = b"sha256:"
SEAL_BYTES = len(SEAL_PREFIX) + 64
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
END = struct.Struct("<4s8sLLH")
END_SIGNATURE = b"PK\5\6"
SEE_ZIP64 = 0xFFFFFFFF  # in a field of 32 bits: what belongs here stands in Zip64's

# How torch's pickled content names a dtype; for other dtypes it has no such name.
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


@dataclass(frozen=True, eq=False)
class Record:
    """Stands in the content for a tensor whose values come later. It is equal only to itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BinaryWriter(Protocol):
    """What an archive is written to."""

    def write(self, data: Any, /) -> int:
        """Take data, in whole or a part; returns how many bytes."""

    def flush(self) -> None:
        """Hand everything to the operating system."""


class ArchiveWriter:
    """Writes an archive from front to back, each tensor when its values are there.

    Args:
        file: empty, open for binary writing. It need not be seekable; closing it and making it
            durable is left to the caller.
        content: dicts, lists and tuples of None, bool, int, float, str, tensors and Records.
            Tensors are written at once. What stands in several places, the same Record or tensors
            of the same memory, is stored once, and is one tensor again when it is loaded.

    Raises:
        TypeError: the content holds something else; the message says where and what.
        OSError: of the file. `write` and `close` raise it too, and ValueError from then on.
    """

    def __init__(self, file: BinaryWriter, content: Any) -> None:
        stored: dict[Hashable, _StoredTensor] = {}
        description = io.BytesIO()
        _Pickler(description, protocol=2).dump(_describe(content, "content", stored))
        self._file = file
        self._is_usable = True
        self._offset = 0
        self._seal = hashlib.sha256()
        self._directory: list[bytes] = []
        self._records = {one.record: one for one in stored.values() if one.values is None}
        self._missing = dict(self._records)
        self._append("data.pkl", description.getvalue())
        self._append("version", b"3\n")
        self._append("byteorder", sys.byteorder.encode())
        for one in stored.values():
            if one.values is not None:
                self._append(f"data/{one.key}", _bytes_of(one.values))

    def write(self, record: Record, tensor: Tensor) -> None:
        """Write a Record's values; Records come in any order.

        Args:
            record: one that stands in the content.
            tensor: of the record's shape and dtype, on any device and in any layout. It may be
                overwritten as soon as the file lets go of it: once this returns, unless the file is
                a WriteBehind.

        Raises:
            ValueError: the record is not of the content or is written already, shape or dtype is
                another, or the writer is closed or has failed.
        """
        if record not in self._records:
            raise ValueError(f"{record} does not stand in the content")
        one = self._records[record]
        if record not in self._missing:
            raise ValueError(f"{one.place} is written already")
        if tuple(tensor.shape) != tuple(record.shape) or tensor.dtype != record.dtype:
            raise ValueError(
                f"{one.place} is {record.dtype} of shape {tuple(record.shape)}, "
                f"its values are {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        self._append(f"data/{one.key}", _bytes_of(tensor))
        del self._missing[record]

    def close(self) -> None:
        """Write the directory and the seal, and flush the file.

        Raises:
            ValueError: Records lack their values, or the writer is closed or has failed.
        """
        if self._missing:
            places = [one.place for one in self._missing.values()]
            shown = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            raise ValueError(f"{len(places)} of {len(self._records)} records lack values: {shown}")
        self._begin()
        count, start = len(self._directory), self._offset
        self._put(b"".join(self._directory))
        end, size = self._offset, self._offset - start
        self._put(
            struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
            + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
            + END.pack(END_SIGNATURE, bytes(4) + b"\xff" * 4, SEE_ZIP64, SEE_ZIP64, SEAL_BYTES)
        )
        _write_all(self._file, SEAL_PREFIX + self._seal.hexdigest().encode())
        self._file.flush()

    def _append(self, name: str, values: bytes | memoryview) -> None:
        """Write one record behind its header, and note its entry in the directory.

        The layout is that of PKWARE's APPNOTE.TXT, 4.3. Sizes and offsets stand in the fields of
        Zip64 even where 32 bits would do: so a file of more than 4 GiB is written by the very lines
        that write a small one.
        """
        self._begin()
        path, start, size = f"archive/{name}".encode(), self._offset, len(values)
        # In front of the writing, as in torch.save: a thread beside it gains only while a core is
        # idle, and starting one for each record costs more than it saves.
        checksum = zlib.crc32(values)
        # Zip version 4.5; stored as it is; 1 January 1980: equal content makes equal files.
        common = (45, 0, 0, 0, 1 << 5 | 1, checksum, SEE_ZIP64, SEE_ZIP64, len(path))
        zip64 = struct.pack("<2H2Q", 1, 16, size, size)
        padding = -(start + LOCAL_HEADER.size + len(path) + len(zip64) + 4) % ALIGNMENT
        extra = zip64 + struct.pack("<2H", 0x4246, padding) + bytes(padding)  # as torch marks it
        self._put(LOCAL_HEADER.pack(b"PK\3\4", *common, len(extra)) + path + extra)
        _write_all(self._file, values)
        self._offset += size
        extra = struct.pack("<2H3Q", 1, 24, size, size, start)
        entry = struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, *common, len(extra), 0, 0, 0, 0, SEE_ZIP64
        )
        self._directory.append(entry + path + extra)
        self._is_usable = True

    def _begin(self) -> None:
        """Unusable until the step is done: behind half a record, no offset would be right."""
        if not self._is_usable:
            raise ValueError("the archive is closed, or writing to it has failed")
        self._is_usable = False

    def _put(self, data: bytes) -> None:
        """Write what is no record, and so falls under the seal."""
        self._seal.update(data)
        _write_all(self._file, data)
        self._offset += len(data)


def _write_all(file: BinaryWriter, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # an unbuffered file may take a part only
        left = left[file.write(left) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values in row-major order, copied only where they do not lie so on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not flatten: a dimension of size 1 may have any stride, and flatten keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@dataclass(frozen=True, eq=False)
class _StoredTensor:
    """Stands in the pickled content for a tensor, and is pickled as torch.save pickles one."""

    record: Record
    key: str  # of the archive's record
    place: str  # where it first stands in the content
    values: Tensor | None

    def __reduce__(self) -> tuple[Any, ...]:
        like = torch.empty(self.record.shape, dtype=self.record.dtype, device="meta")
        storage = _Storage(("storage", STORAGES[like.dtype], self.key, "cpu", like.numel()))
        # The dict is for hooks; the loaded tensor keeps it, so each needs its own.
        arguments: tuple[Any, ...]
        arguments = (storage, 0, tuple(like.shape), like.stride(), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Storage(tuple[Any, ...]):
    """What a pickled tensor says of its memory."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return tuple(value) if type(value) is _Storage else None


def _describe(value: Any, place: str, stored: dict[Hashable, _StoredTensor]) -> Any:
    """The content with a _StoredTensor for each tensor and Record.

    Args:
        value: part of the content.
        place: where it stands, for messages.
        stored: gets the tensors and Records, by what makes them the same.
    """
    same: Hashable
    # Exact types: what derives from them, as numpy.float64 does, is pickled as a class of its own.
    if type(value) in (dict, OrderedDict):
        for key in value:
            if not _is_plain(key):
                raise TypeError(f"a key of {place} cannot be stored: it is a {type(key).__name__}")
        return {key: _describe(value[key], f"{place}[{key!r}]", stored) for key in value}
    if type(value) in (list, tuple):
        items = enumerate(value)
        return type(value)(_describe(item, f"{place}[{i}]", stored) for i, item in items)
    if _is_plain(value):
        return value
    if type(value) is Record:
        same, record, values = value, value, None
    elif (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
    ):
        memory = (value.device, value.data_ptr(), value.is_conj(), value.is_neg())
        same = (*memory, value.shape, value.stride(), value.dtype)
        record, values = Record(value.shape, value.dtype), value
    else:
        raise TypeError(
            f"{place} cannot be stored: it is a {type(value).__name__}, not None, bool, int of up "
            "to 255 bytes, float, str, dict, list, tuple, dense tensor or Record"
        )
    if record.dtype not in STORAGES:
        raise TypeError(f"{place} cannot be stored: it is of {record.dtype}")
    return stored.setdefault(same, _StoredTensor(record, str(len(stored)), place, values))


def _is_plain(value: Any) -> bool:
    if type(value) is int:  # the weights-only unpickler has no instruction for longer ones
        return value.bit_length() < 255 * 8
    return type(value) in (type(None), bool, float, str)
