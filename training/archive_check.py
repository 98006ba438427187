"""Whether a checkpoint file (archive.py) holds every bit that was written.

Each record is compared with the checksum in the directory, and all that is no record with the seal.
"""

import contextlib
import hashlib
import os
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from training.archive import END, END_SIGNATURE, LOCAL_HEADER, SEAL_BYTES, SEAL_PREFIX

VERIFY_THREADS = 4
VERIFY_THREAD_BYTES = 1 << 24  # one more thread for so many bytes
VERIFY_CHUNK_BYTES = 1 << 20  # held by each thread


class ArchiveError(ValueError):
    """A damaged file: the message says which, and what is wrong with it."""


def verify_archive(path: Path) -> None:
    """Read an archive through and compare every bit with the checksums.

    A file of torch.save's has no seal; its records are compared with theirs.

    Raises:
        ArchiveError: the file is damaged, cut off, continued or no archive, or cannot be read.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            _check_records(file.fileno(), _check_seal(file))
        except MemoryError:
            raise
        except Exception as error:  # over damaged bytes, zipfile raises many kinds
            raise ArchiveError(f"{path} is damaged: {error or type(error).__name__}") from error


def _check_seal(file: BinaryIO) -> list[tuple[str, int, int, int]]:
    """Compare all that is no record with the seal; name, checksum, start and end of each record."""
    number, size = file.fileno(), os.fstat(file.fileno()).st_size
    # Whether there is a seal is read off the exact places. zipfile is content with an end that is
    # somewhere near, so to it a file that is cut off or continued can look like one without a seal.
    seal_start = size - SEAL_BYTES
    end = _read(number, max(0, seal_start - END.size), size)
    is_sealed = _is_end(end[: END.size], SEAL_BYTES)
    if not is_sealed and not _is_end(end[-END.size :], 0):
        raise ArchiveError("it does not end as an archive does")
    records = sorted(zipfile.ZipFile(file).infolist(), key=lambda record: record.header_offset)
    if not records or records[0].header_offset != 0:
        raise ArchiveError("it does not begin with a record")
    seal, position, extents = hashlib.sha256(), 0, []
    for record in records:
        header_end = record.header_offset + LOCAL_HEADER.size
        header = LOCAL_HEADER.unpack(_read(number, record.header_offset, header_end))
        start = header_end + header[-2] + header[-1]  # behind the name and the extra field
        if start < position:
            raise ArchiveError(f"{record.filename} overlaps the record before it")
        for chunk in _chunks(number, position, start):
            seal.update(chunk)
        position = start + record.file_size
        extents.append((record.filename, record.CRC, start, position))
    for chunk in _chunks(number, position, seal_start):
        seal.update(chunk)
    if is_sealed and end[END.size :] != SEAL_PREFIX + seal.hexdigest().encode():
        raise ArchiveError("its headers or its directory are not what was written")
    return extents


def _is_end(data: bytes, comment_bytes: int) -> bool:
    return data.startswith(END_SIGNATURE) and data.endswith(comment_bytes.to_bytes(2, "little"))


def _check_records(number: int, extents: list[tuple[str, int, int, int]]) -> None:
    """Compare the records of an open file with their checksums, several at a time."""
    waiting = iter(extents)
    damages: list[str] = []

    def check() -> None:
        for name, checksum, start, end in waiting:
            found = 0
            try:
                for chunk in _chunks(number, start, end):
                    found = zlib.crc32(chunk, found)
            except Exception as error:
                damages.append(f"{name} cannot be read: {error}")
            if found != checksum:
                damages.append(f"{name} is not what was written")
            if damages:
                break

    # No executor: it takes no work once the main thread has ended, and a checkpoint that is written
    # in the background may come to this only then.
    size = sum(end - start for *_, start, end in extents)
    count = min(VERIFY_THREADS, size // VERIFY_THREAD_BYTES)
    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # where no thread can start, this one does it all
        while len(threads) < count - 1:
            thread = threading.Thread(target=check)
            thread.start()
            threads.append(thread)
    check()
    for thread in threads:
        thread.join()
    if damages:
        raise ArchiveError(damages[0])


def _chunks(number: int, start: int, end: int) -> Iterator[memoryview]:
    """Part of an open file, piece by piece; each is overwritten by the next."""
    buffer = memoryview(bytearray(max(0, min(VERIFY_CHUNK_BYTES, end - start))))
    while start < end:
        count = os.preadv(number, [buffer[: end - start]], start)
        if count == 0:
            raise ArchiveError("it ends too early")
        yield buffer[:count]
        start += count


def _read(number: int, start: int, end: int) -> bytes:
    return b"".join(bytes(chunk) for chunk in _chunks(number, start, end))
