"""meta.json: what a folder of token files says about itself.

Ids alone cannot tell which vocabulary they index, how wide they are meant to be read, or whether
the file was cut short; each has been a silent wrong training somewhere. So the folder states it,
the writer writes this file last, and the reader believes no token file that disagrees with it.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import CorpusError

FILE_NAME = "meta.json"
FORMAT_VERSION = 1
# Entries of a vocabulary by its ids' type; no model uses a tenth of the larger number, and many
# more would not fit into memory.
IDS_OF = {"uint16": 2**16, "uint32": 2**24}


@dataclass(frozen=True)
class Meta:
    """The statements of meta.json; those with a default only inform."""

    dtype: str
    """Name of the ids' numpy type: uint16 or uint32."""
    vocab_size: int
    """Every id is below this."""
    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer.json beside this file."""
    end_of_text_id: int
    """The id that stands after each document."""
    train_tokens: int
    """Tokens in all train*.npy together."""
    val_tokens: int
    """Tokens in all val*.npy together."""
    format_version: int = FORMAT_VERSION
    """Number of this layout."""
    train_documents: int = 0
    """Documents that end in the training tokens."""
    val_documents: int = 0
    """Documents that end in the validation tokens."""
    split: str = ""
    """`documents`: validation is whole documents; `tail`: it is the end of the token stream."""
    val_fraction: float = 0.0
    """The share of validation that was asked for."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """The options that made the folder."""


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json into `folder`."""
    text = json.dumps(dataclasses.asdict(meta), indent=2) + "\n"
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """Read meta.json.

    Raises:
        CorpusError: it is missing, broken, of another version, or lacks a statement.
    """
    path = folder / FILE_NAME
    try:
        is_there = folder.is_dir()
    except OSError as error:  # too long a name, or a folder above it that may not be entered
        raise CorpusError(f"cannot read {folder}: {error.strerror}") from None
    if not is_there:
        raise CorpusError(
            f"{folder}: no such folder of token files: make it with "
            f"python prepare.py --input TEXTS --out_dir {folder}"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(
            f"{folder}: not a finished folder of token files, it has no {FILE_NAME}: "
            "make one with prepare.py"
        ) from None
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is broken ({error}): prepare the texts again") from None
    return _checked(path, found)


def _checked(path: Path, found: Any) -> Meta:
    if not isinstance(found, dict):
        raise CorpusError(f"{path} is not a JSON object: prepare the texts again")
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise CorpusError(
            f"{path} has format_version {version}, this program reads {FORMAT_VERSION}: "
            "prepare the texts again"
        )
    known = {field.name: field for field in dataclasses.fields(Meta)}
    for name, statement in known.items():
        required = statement.default is statement.default_factory is dataclasses.MISSING
        if name not in found and required:
            raise CorpusError(f"{path} does not say {name}: prepare the texts again")
        if name in found and required and type(found[name]) is not statement.type:
            raise CorpusError(
                f"{path} has a wrong {name}, {found[name]!r}: prepare the texts again"
            )
    meta = Meta(**{name: value for name, value in found.items() if name in known})
    most = IDS_OF.get(meta.dtype, IDS_OF["uint32"])
    if not 0 < meta.vocab_size <= most:
        raise CorpusError(
            f"{path} has a wrong vocab_size, {meta.vocab_size}, of ids in {meta.dtype}: "
            "prepare the texts again"
        )
    return meta
