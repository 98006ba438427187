"""Turn a corpus into train.npy and val.npy: encoded in batches, split by documents.

Validation is whole documents, chosen by a hash of how each begins: a document keeps its side
when others come or go, and copies of it share that side. With few documents the shares can come
out far from what was asked, with a single one always; then validation is the end of the token
stream instead.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from data.corpus import Corpus, ReadingReport
from data.errors import CorpusError
from data.token_writer import TokenWriter, token_dtype
from data.tokenizer import Tokenizer

# The library's result takes about 100 bytes a token, and in the worst case a character is four
# tokens; a batch still gives 16 cores a piece each.
CHARACTERS_IN_BATCH = 1 << 20
TOKENS_IN_BLOCK = 1 << 22
# How many times more or less than val_fraction a split by documents may give to validation.
TOLERANCE = 4


@dataclass(frozen=True)
class Encoded:
    """What was written."""

    train_tokens: int
    val_tokens: int
    train_documents: int
    """Documents that end in train.npy."""
    val_documents: int
    """Documents that end in val.npy."""
    split: str
    """`documents` or `tail`."""


@dataclass(frozen=True)
class _Piece:
    text: str
    for_validation: bool
    ends_document: bool


def encode_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    val_fraction: float,
    report: ReadingReport,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> Encoded:
    """Write train.npy and val.npy into `folder`, one end-of-text token after each document.

    Args:
        corpus: the texts.
        tokenizer: makes the ids.
        folder: exists.
        val_fraction: share of validation, from 0 to below a half.
        report: counts what is read.
        on_bytes: told how many bytes were read, each time some were.

    Raises:
        CorpusError: see Corpus.documents; or the tokenizer cannot encode the text.
    """
    end_of_text = tokenizer.end_of_text_id
    dtype = token_dtype(tokenizer.vocab_size)
    ended = {False: 0, True: 0}
    with (
        TokenWriter(folder / "train.npy", dtype) as train,
        TokenWriter(folder / "val.npy", dtype) as val,
    ):
        for batch in _batches(_pieces(corpus.documents(report, on_bytes), val_fraction)):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                if end_of_text in ids:
                    raise CorpusError(
                        f"the tokenizer takes text for its end-of-text token {end_of_text}, so a "
                        "document would end itself: use another --tokenizer"
                    )
                writer = val if piece.for_validation else train
                writer.append(ids)
                if piece.ends_document:
                    writer.append([end_of_text])
                    ended[piece.for_validation] += 1
    if _is_fair(train.num_tokens, val.num_tokens, val_fraction):
        return Encoded(train.num_tokens, val.num_tokens, ended[False], ended[True], "documents")
    return _split_off_tail(folder, dtype, val_fraction, end_of_text)


def _pieces(documents: Iterable[Iterator[str]], val_fraction: float) -> Iterator[_Piece]:
    for document in documents:
        first = next(document)
        for_validation = _hashed_share(first) < val_fraction
        # No piece is empty, so the empty text can stand for the end.
        for text, following in pairwise(chain([first], document, [""])):
            yield _Piece(text, for_validation, ends_document=following == "")


def _hashed_share(text: str) -> float:
    """Give a number in [0, 1) that looks random and depends on the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= CHARACTERS_IN_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_fair(train_tokens: int, val_tokens: int, val_fraction: float) -> bool:
    share = val_tokens / (train_tokens + val_tokens)
    return val_fraction / TOLERANCE <= share <= min(val_fraction * TOLERANCE, 0.5)


def _split_off_tail(
    folder: Path, dtype: np.dtype, val_fraction: float, end_of_text: int
) -> Encoded:
    """Write both files anew, the end of train.npy followed by val.npy being validation."""
    paths = (folder / "train.npy", folder / "val.npy")
    sources = [np.load(path, mmap_mode="r") for path in paths]
    num_tokens = sum(source.size for source in sources)
    left_for_train = num_tokens - max(1, round(num_tokens * val_fraction))
    new_paths = [path.with_name(f"new-{path.name}") for path in paths]
    ended = [0, 0]
    with TokenWriter(new_paths[0], dtype) as train, TokenWriter(new_paths[1], dtype) as val:
        for source in sources:
            for begin in range(0, source.size, TOKENS_IN_BLOCK):
                block = source[begin : begin + TOKENS_IN_BLOCK]
                parts = block[:left_for_train], block[left_for_train:]
                left_for_train -= parts[0].size
                for side, (writer, part) in enumerate(zip((train, val), parts, strict=True)):
                    writer.append(part)
                    ended[side] += int(np.count_nonzero(part == end_of_text))
    for path, new_path in zip(paths, new_paths, strict=True):
        os.replace(new_path, path)
    return Encoded(train.num_tokens, val.num_tokens, ended[0], ended[1], "tail")
