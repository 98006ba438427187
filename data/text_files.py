"""Find the texts of a corpus: which files, and in which order.

The order depends on names alone, so that every machine reads the same sequence of documents.
Hidden files and folders and links to folders are left out, the last because they can run in
circles.
"""

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from data.errors import CorpusError

JSON_LINES = ".jsonl"
_TEXT = f".txt .md .rst .tex {JSON_LINES}"
_SOURCE = (
    ".bash .c .cc .clj .cmake .cpp .cs .css .cu .cuh .cxx .dart .el .erl .ex .f90 .go .h .hpp .hs "
    ".html .java .jl .js .jsx .kt .lisp .lua .m .ml .php .pl .pm .proto .ps1 .py .pyi .pyx .r .rb "
    ".rs .scala .scm .sh .sql .swift .tcl .toml .ts .tsx .v .vim .yaml .yml .zig"
)
TEXT_SUFFIXES = frozenset(f"{_TEXT} {_SOURCE}".split())
# Of the standard library: what others installed, and tests, which are no example of style.
NOT_LIBRARY_SOURCE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def find_text_files(inputs: Sequence[str | Path]) -> list[Path]:
    """List the files behind these paths, each once, in the order given.

    A folder gives its files of known kinds in the order of their names; a file that is named
    itself is text whatever its kind. No path at all gives Python's standard library.

    Raises:
        CorpusError: a path is missing, cannot be read or holds no text.
    """
    if not inputs:
        return _standard_library_files()
    try:
        paths = [Path(_file_name(str(path))) for path in inputs]
        return list(dict.fromkeys(file for path in paths for file in _files_of(path)))
    except OSError as error:
        raise CorpusError(f"cannot read {error.filename}: {error.strerror}") from None


def _file_name(text: str) -> str:
    """Spell a name as the locale wants it, which may be unable to spell it in characters."""
    try:
        os.fsencode(text)
        return text
    except UnicodeEncodeError:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = _walk(path, TEXT_SUFFIXES)
        if not files:
            raise CorpusError(
                f"{path}: no text in this folder (.txt, .md, .jsonl or source code): name files "
                "of other kinds one by one"
            )
        return files
    if path.is_file():
        return [path]
    raise CorpusError(
        f"{path}: {'not a plain file' if path.exists() else 'no such file or folder'}"
    )


def _standard_library_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(folder, frozenset({".py"}), NOT_LIBRARY_SOURCE) if folder.is_dir() else []
    if not files:
        raise CorpusError(
            f"this Python's standard library has no source files in {folder}: "
            "give texts with --input"
        )
    return files


def _walk(
    folder: Path, suffixes: frozenset[str], left_out: frozenset[str] = frozenset()
) -> list[Path]:
    """List the files of these kinds, ordered by the bytes of their names, not by the locale."""

    def give_up(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=give_up):
        folders[:] = sorted(
            (name for name in folders if name not in left_out and not name.startswith(".")),
            key=os.fsencode,
        )
        for name in sorted(names, key=os.fsencode):
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                files.append(path)
    return files
