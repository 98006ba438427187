"""Read texts as documents, streaming: no document, file or corpus has to fit into memory.

A document is a file or a line of a .jsonl file, and comes as an iterator of pieces of bounded
size. Text is UTF-8 whatever the locale says; what is not is replaced, counted and reported, never
guessed. Everything, the order included, depends on names and contents alone, so that every
machine makes the same tokens of the same texts.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from data.errors import CorpusError
from data.text_files import JSON_LINES, find_text_files

# A piece is at most this long and is cut at a line end, so neighbouring tokens are hardly ever
# torn; small enough that the batches made of pieces keep many cores busy.
PIECE_BYTES = 1 << 16
# A JSON line must be read whole; at four bytes a character this one takes half a gigabyte.
LONGEST_JSON_LINE = 1 << 26

# The longer marks first: UTF-32's begins like UTF-16's.
UTF8_MARK = b"\xef\xbb\xbf"
OTHER_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


@dataclass
class ReadingReport:
    """What one reading of a corpus met."""

    documents: int = 0
    """Documents handed out."""
    characters: int = 0
    """Characters in them."""
    skipped: int = 0
    """Documents without text: empty, only spaces, JSON lines without the field."""
    replaced: int = 0
    """Characters that stand for bytes that are not UTF-8."""
    first_replaced: str = ""
    """The first file with such bytes."""


class Corpus:
    """Texts in files and folders, or the source of Python's own standard library.

    It can be read any number of times; each reading streams from the files anew.
    """

    def __init__(self, inputs: Sequence[str | Path] = (), text_field: str = "text") -> None:
        """Find the files; see data/text_files.py for which.

        Args:
            inputs: files and folders; none: the standard library's .py files.
            text_field: where the text stands in a line of a .jsonl file.

        Raises:
            CorpusError: a path is missing, cannot be read or holds no text.
        """
        self.files = find_text_files(inputs)
        self.num_bytes = sum(path.stat().st_size for path in self.files)
        self._text_field = text_field

    def documents(
        self, report: ReadingReport, on_bytes: Callable[[int], object] = lambda count: None
    ) -> Iterator[Iterator[str]]:
        """Read the documents that have text, each as an iterator of its pieces in order.

        A document's pieces can be read only until the next document is asked for.

        Args:
            report: counts what is read.
            on_bytes: told how many bytes were read, each time some were.

        Raises:
            CorpusError: a file cannot be read or is UTF-16 or UTF-32; a JSON line is broken or
                its text no string; there is no document with text.
        """
        for path in self.files:
            with _opened(path) as file:
                reading = _Reading(path, report, on_bytes)
                if path.suffix.lower() == JSON_LINES:
                    yield from reading.json_documents(file, self._text_field)
                else:
                    yield from reading.whole_document(file)
        if report.documents == 0:
            raise CorpusError(
                f"no document with text among {report.skipped} in {len(self.files)} files: "
                f"empty files, or .jsonl lines without a field {self._text_field!r} "
                "(--text_field names another)"
            )

    def pieces(
        self, report: ReadingReport, on_bytes: Callable[[int], object] = lambda count: None
    ) -> Iterator[str]:
        """Read the pieces of all documents, one after another; see documents."""
        for document in self.documents(report, on_bytes):
            yield from document


@dataclass
class _Reading:
    """The reading of one file."""

    path: Path
    report: ReadingReport
    on_bytes: Callable[[int], object]

    def whole_document(self, file: BinaryIO) -> Iterator[Iterator[str]]:
        begin = file.tell()
        first_look = _Reading(self.path, ReadingReport(), lambda count: None)
        if all(piece.isspace() for piece in first_look.pieces(file)):
            self.report.skipped += 1
            return
        file.seek(begin)
        self.report.documents += 1
        yield self._document(file)

    def json_documents(self, file: BinaryIO, text_field: str) -> Iterator[Iterator[str]]:
        lines = iter(lambda: file.readline(LONGEST_JSON_LINE), b"")
        for number, line in enumerate(lines, start=1):
            self.on_bytes(len(line))
            if len(line) == LONGEST_JSON_LINE:
                raise CorpusError(
                    f"{self.path} line {number} is longer than {LONGEST_JSON_LINE >> 20} MiB: "
                    "make this document a text file of its own"
                )
            text = self._field(self.decoded(line), text_field, number)
            if not text or text.isspace():
                self.report.skipped += 1
                continue
            # JSON can hold half characters, which no UTF-8 has: they end up counted as replaced.
            stream = BytesIO(text.encode("utf-8", "surrogatepass"))
            self.report.documents += 1
            within_line = _Reading(self.path, self.report, lambda count: None)
            yield within_line._document(stream)

    def _document(self, stream: BinaryIO) -> Iterator[str]:
        for piece in self.pieces(stream):
            self.report.characters += len(piece)
            yield piece

    def pieces(self, stream: BinaryIO) -> Iterator[str]:
        """Read a stream in pieces whose borders depend on its content alone."""
        rest = b""
        while window := rest + stream.read(PIECE_BYTES - len(rest)):
            cut = _cut(window) if len(window) == PIECE_BYTES else len(window)
            piece, rest = window[:cut], window[cut:]
            self.on_bytes(len(piece))
            yield self.decoded(piece)

    def decoded(self, data: bytes) -> str:
        text = data.decode("utf-8", "replace")
        # UTF-8 is self-synchronizing: a replacement character that was in the text stays one.
        replaced = text.count("\ufffd") - data.count("\ufffd".encode())
        if replaced:
            self.report.replaced += replaced
            self.report.first_replaced = self.report.first_replaced or str(self.path)
        return text

    def _field(self, line: str, text_field: str, number: int) -> str | None:
        if line.isspace():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{self.path} line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise CorpusError(
                f"{self.path} line {number} is no JSON object but {type(record).__name__}: "
                f'write {{"{text_field}": "..."}} on each line'
            )
        text = record.get(text_field)
        if text is not None and not isinstance(text, str):
            raise CorpusError(
                f"{self.path} line {number}: field {text_field!r} is no text but "
                f"{type(text).__name__}: --text_field names another"
            )
        return text


def _cut(window: bytes) -> int:
    """Say where to cut a full window: after a line, before a space, or between characters."""
    half = len(window) // 2
    if (line_end := window.rfind(b"\n", half)) >= 0:
        return line_end + 1
    if (space := window.rfind(b" ", half)) >= 0:
        return space
    for place in range(len(window) - 1, len(window) - 5, -1):
        if window[place] >= 0xC0:  # a character's first byte
            return place
        if window[place] < 0x80:  # a whole character
            break
    return len(window)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file behind its byte order mark."""
    try:
        with open(path, "rb") as file:
            begin = file.read(4)
            for mark, name in OTHER_ENCODINGS.items():
                if begin.startswith(mark):
                    raise CorpusError(
                        f"{path} is {name} text: convert it, iconv -f {name} -t UTF-8"
                    )
            file.seek(len(UTF8_MARK) if begin.startswith(UTF8_MARK) else 0)
            yield file
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from None
