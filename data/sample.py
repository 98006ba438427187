"""A sample of a corpus for learning a vocabulary: bounded, spread evenly, always the same.

BPE training keeps every distinct word with its merges in memory, about 100 bytes for each of its
bytes. In prose and code distinct words are a few hundredths of the text; in text without spaces
all of it is distinct, so both amounts have a bound here.
"""

import re
from collections.abc import Iterable

# A sample's distinct words may take this share of its bound on text.
SHARE_OF_DISTINCT_WORDS = 1 / 8
# Close to how the tokenizer cuts words, and ten times faster than asking it.
WORD = re.compile(r"\w{1,64}|[^\w\s]{1,64}|\s{1,64}")


def spread_sample(pieces: Iterable[str], max_bytes: int) -> list[str]:
    """Keep every n-th piece, with the smallest power of two as n that the bounds allow.

    Args:
        pieces: the text, read once.
        max_bytes: bound on the sample in UTF-8; its distinct words are bounded by an eighth.
    """
    sample = _Sample(max_bytes)
    stride = 1
    for number, piece in enumerate(pieces):
        if number % stride:
            continue
        sample.add(piece)
        while sample.is_too_large():
            sample = sample.every_other()
            stride *= 2
    return sample.pieces


class _Sample:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._words: set[str] = set()
        self._word_bytes = 0
        self.pieces: list[str] = []

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self._num_bytes += len(piece.encode("utf-8"))
        new_words = set(WORD.findall(piece)) - self._words
        self._words |= new_words
        self._word_bytes += len("".join(new_words).encode("utf-8"))

    def is_too_large(self) -> bool:
        too_many_words = self._word_bytes > self._max_bytes * SHARE_OF_DISTINCT_WORDS
        return len(self.pieces) > 1 and (self._num_bytes > self._max_bytes or too_many_words)

    def every_other(self) -> "_Sample":
        half = _Sample(self._max_bytes)
        for piece in self.pieces[::2]:
            half.add(piece)
        return half
