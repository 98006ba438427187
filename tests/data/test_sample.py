"""The sample that BPE learns from: bounded in text and in words, from all over the corpus."""

import random
import string
from itertools import pairwise

from data.sample import WORD, spread_sample


def test_a_corpus_within_the_bound_is_taken_whole():
    pieces = [f"piece {number}" for number in range(100)]
    assert spread_sample(pieces, max_bytes=10_000) == pieces


def test_a_larger_corpus_gives_between_half_the_bound_and_the_bound_spread_over_all_of_it():
    pieces = [f"{number:04d} " + "ü" * 95 for number in range(1000)]  # 195 bytes each
    sample = spread_sample(pieces, max_bytes=20_000)
    assert 10_000 <= sum(len(piece.encode()) for piece in sample) <= 20_000
    numbers = [int(piece[:4]) for piece in sample]
    steps = {after - before for before, after in pairwise(numbers)}
    assert len(steps) == 1
    assert numbers[0] == 0
    assert numbers[-1] >= 1000 - steps.pop()


def test_distinct_words_have_a_bound_of_their_own():
    draw = random.Random(0)
    pieces = ["".join(draw.choices(string.ascii_letters, k=100)) for _ in range(1000)]
    sample = spread_sample(pieces, max_bytes=80_000)
    words = {word for piece in sample for word in WORD.findall(piece)}
    assert 5_000 <= sum(map(len, words)) <= 10_000
    repeated = ["the same words again"] * 1000
    assert spread_sample(repeated, max_bytes=80_000) == repeated


def test_one_piece_beyond_the_bound_is_still_a_sample():
    assert spread_sample(["x" * 100, "y" * 100], max_bytes=10) == ["x" * 100]
