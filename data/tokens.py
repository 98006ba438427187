"""Token files read through the memory map, and the order in which training takes windows from them.

A folder holds `train*.npy` and `val*.npy`, `tokenizer.json` and `meta.json` (data/meta.py).
Nothing is read into memory before it is asked for, so a corpus may be larger than the machine's
memory; the pages that stay mapped are the kernel's to take back.

A window is `context + 1` tokens: the input, and the same shifted by one as target. Windows may
run across the border of two documents, where an end-of-text token stands, and attention sees
across it; they never run across two files. Training windows are numbered: sample n of a run is a
pure function of (seed, n). So one count of samples is all the position in the data that there is;
each rank reads just its own, at any world size and batch size, after any interruption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.errors import CorpusError
from data.meta import Meta, read_meta
from data.shuffle import random_below, random_bits, shuffled
from data.tokenizer import fingerprint

# Up to here opening a split looks at every id, which takes a fraction of a second; beyond it, at
# this many evenly spread blocks.
TOKENS_CHECKED_IN_FULL = 50_000_000
TOKENS_IN_BLOCK = 1 << 20
BLOCKS_CHECKED = 48


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """The training or the validation tokens of a folder: one or more mapped files in order.

    Positions count through all files as if they were one; a window lies in one file.
    """

    name: str
    """`training` or `validation`, for messages."""
    data_dir: Path
    """Folder of the files, for messages."""
    shards: tuple[np.ndarray, ...]
    """One 1-D array of ids a file."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return sum(shard.size for shard in self.shards)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read the windows of `length` tokens that begin at `starts`, int64 (windows, length).

        Raises:
            IndexError: a window would leave its file.
        """
        starts = np.asarray(starts, dtype=np.int64)
        sizes = np.array([shard.size for shard in self.shards])
        ends = np.cumsum(sizes)
        numbers = np.searchsorted(ends, starts, side="right")
        leaves = (starts < 0) | (starts + length > ends[np.minimum(numbers, len(ends) - 1)])
        if leaves.any():
            start = starts[np.argmax(leaves)]
            raise IndexError(f"{self.name}: no window of {length} tokens at {start}")
        windows = np.empty((len(starts), length), dtype=np.int64)
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            # One gather a file, which copies whole rows and lets other threads run meanwhile.
            every_window = sliding_window_view(np.asarray(self.shards[number]), length)
            windows[rows] = every_window[starts[rows] - (ends[number] - sizes[number])]
        return windows

    def count_windows(self, length: int, stride: int) -> int:
        """Count the windows of `length` tokens that begin every `stride` tokens of each file."""
        return int(self._windows_in_shards(length, stride).sum())

    def window_starts(self, numbers: np.ndarray, length: int, stride: int) -> np.ndarray:
        """Say where the windows with these numbers begin; count_windows is the first too high."""
        counts = self._windows_in_shards(length, stride)
        shards = np.searchsorted(np.cumsum(counts), numbers, side="right")
        sizes = np.array([shard.size for shard in self.shards])
        windows_before = (np.cumsum(counts) - counts)[shards]
        tokens_before = (np.cumsum(sizes) - sizes)[shards]
        return tokens_before + (numbers - windows_before) * stride

    def _windows_in_shards(self, length: int, stride: int) -> np.ndarray:
        sizes = np.array([shard.size for shard in self.shards])
        return np.maximum(0, (sizes - length) // stride + 1)


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A folder of token files, checked and opened."""

    train: TokenSplit
    val: TokenSplit
    tokenizer_json: str
    """Text of tokenizer.json."""
    vocab_size: int
    """Every token id is below this."""
    end_of_text_id: int
    """Stands once after each document."""
    fingerprint: str
    """Of the tokenizer; equal fingerprints give equal ids."""
    data_dir: Path


def open_tokens(data_dir: str | Path) -> PreparedData:
    """Open a folder that prepare.py wrote.

    Ids are compared with the vocabulary: all of them in splits of up to 50 million tokens, in
    larger ones 48 blocks of a million at fixed places.

    Raises:
        CorpusError: the folder is missing or unfinished, or its files contradict meta.json in
            dtype, number of tokens, tokenizer or vocabulary.
    """
    folder = Path(data_dir)
    meta = read_meta(folder)
    tokenizer_json = _read_tokenizer(folder, meta)
    return PreparedData(
        train=_open_split(folder, "train", "training", meta, meta.train_tokens),
        val=_open_split(folder, "val", "validation", meta, meta.val_tokens),
        tokenizer_json=tokenizer_json,
        vocab_size=meta.vocab_size,
        end_of_text_id=meta.end_of_text_id,
        fingerprint=meta.tokenizer_fingerprint,
        data_dir=folder,
    )


class RandomWindows:
    """Training windows drawn with replacement, each start in the files equally likely."""

    def __init__(self, split: TokenSplit, context: int, seed: int) -> None:
        self._split, self._length = split, context + 1
        self._num_starts = _require_window(split, self._length, stride=1)
        self._key = random_bits(seed % 2**64, 0)

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Read the windows of these samples, counted from 0 over the whole run.

        Args:
            samples: non-negative integers, as many as windows are wanted.

        Returns:
            int64 (samples, context + 1).
        """
        numbers = random_below(self._num_starts, self._key, samples)
        starts = self._split.window_starts(numbers, self._length, stride=1)
        return self._split.windows(starts, self._length)


class EpochWindows:
    """Training windows that do not overlap, each once an epoch, in a new order every epoch.

    Neighbours share one token, the last target of one and the first input of the next. Epochs
    follow each other without a gap: a batch may hold the end of one and the start of the next.
    """

    def __init__(self, split: TokenSplit, context: int, seed: int) -> None:
        self._split, self._context = split, context
        self._key = random_bits(seed % 2**64, 1)
        self.num_windows = _require_window(split, context + 1, stride=context)

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """Read the windows of these samples, counted from 0 over the whole run.

        Args:
            samples: non-negative integers, as many as windows are wanted.

        Returns:
            int64 (samples, context + 1).
        """
        epochs, positions = np.divmod(samples, self.num_windows)
        numbers = shuffled(positions, self.num_windows, random_bits(self._key, epochs))
        starts = self._split.window_starts(numbers, self._context + 1, stride=self._context)
        return self._split.windows(starts, self._context + 1)


class ValidationWindows:
    """A fixed choice of at most `max_windows` windows that do not overlap, in the files' order."""

    def __init__(self, split: TokenSplit, context: int, max_windows: int, seed: int) -> None:
        self._split, self._length = split, context + 1
        available = _require_window(split, self._length, stride=context)
        self.num_windows = min(max_windows, available)
        chosen = shuffled(np.arange(self.num_windows), available, random_bits(seed % 2**64, 2))
        self._starts = split.window_starts(np.sort(chosen), self._length, stride=context)

    def rows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read the windows at `indices`, each below num_windows: int64 (indices, context + 1)."""
        return self._split.windows(self._starts[indices], self._length)


def _require_window(split: TokenSplit, length: int, stride: int) -> int:
    """Count the windows of a split, which must hold one."""
    count = split.count_windows(length, stride)
    if count == 0:
        files = f" in {len(split.shards)} files" if len(split.shards) > 1 else ""
        remedy = "use a smaller max_seq_len or more text"
        if split.name == "validation":
            remedy += ", or val_interval 0 to train without validation"
        raise CorpusError(
            f"{split.data_dir}: {split.name} has {split.num_tokens} tokens{files}, "
            f"one window needs {length}: {remedy}"
        )
    return count


def _read_tokenizer(folder: Path, meta: Meta) -> str:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        found = fingerprint(text)
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CorpusError(f"{path} is broken ({error}): prepare the texts again") from None
    if found != meta.tokenizer_fingerprint:
        raise CorpusError(
            f"{path} has fingerprint {found[:12]}, the token files were made with "
            f"{meta.tokenizer_fingerprint[:12]}: prepare the texts again with this tokenizer"
        )
    return text


def _open_split(folder: Path, stem: str, name: str, meta: Meta, num_tokens: int) -> TokenSplit:
    paths = sorted(folder.glob(f"{stem}*.npy"))
    if not paths:
        raise CorpusError(f"{folder}: no {stem}*.npy: prepare the texts again")
    split = TokenSplit(name, folder, tuple(_open_shard(path, meta) for path in paths))
    if split.num_tokens != num_tokens:
        raise CorpusError(
            f"{folder}: {stem}*.npy hold {split.num_tokens} tokens, meta.json says {num_tokens}: "
            "a file is missing or too many; prepare the texts again"
        )
    return split


def _open_shard(path: Path, meta: Meta) -> np.ndarray:
    try:
        shard = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # numpy's header and zip readers raise of many kinds
        raise CorpusError(f"{path} is broken ({error}): prepare the texts again") from None
    if not isinstance(shard, np.ndarray):  # an .npz that was renamed
        raise CorpusError(f"{path} is an archive of arrays, no .npy: prepare the texts again")
    if shard.dtype.name != meta.dtype or shard.ndim != 1:
        raise CorpusError(
            f"{path} holds {shard.dtype.name} of shape {shard.shape}, meta.json says a row of "
            f"{meta.dtype}: prepare the texts again"
        )
    highest = _highest_id(shard)
    if highest >= meta.vocab_size:
        raise CorpusError(
            f"{path} holds token id {highest}, its vocabulary has {meta.vocab_size} entries: "
            "the file was made with another tokenizer; prepare the texts again"
        )
    return shard


def _highest_id(shard: np.ndarray) -> int:
    num_blocks = -(-shard.size // TOKENS_IN_BLOCK)
    numbers = np.arange(num_blocks)
    if shard.size > TOKENS_CHECKED_IN_FULL:
        numbers = np.linspace(0, num_blocks - 1, BLOCKS_CHECKED).astype(int)
    blocks = (shard[number * TOKENS_IN_BLOCK :][:TOKENS_IN_BLOCK] for number in numbers)
    return max((int(block.max()) for block in blocks), default=-1)
