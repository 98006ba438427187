"""The fingerprint of the data: alike for what trains alike, another for what does not."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from data import fingerprint
from data.fingerprint import data_fingerprint
from data.tokens import PreparedData, TokenSplit

TOKENS = np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16)


def data_of(*sizes: int, tokens: np.ndarray = TOKENS, val: np.ndarray = TOKENS[:70]):
    """Prepared data whose training tokens lie in files of these sizes; none: in one file."""
    shards = np.split(tokens, np.cumsum(sizes)[:-1]) if sizes else [tokens]
    return PreparedData(
        train=TokenSplit("training", Path("here"), tuple(shards)),
        val=TokenSplit("validation", Path("here"), (val,)),
        tokenizer_json="{}",
        vocab_size=1000,
        end_of_text_id=0,
        fingerprint="of the tokenizer",
        data_dir=Path("here"),
    )


def changed_at(*positions: int) -> PreparedData:
    tokens = TOKENS.copy()
    tokens[list(positions)] += 1
    return data_of(tokens=tokens)


@pytest.fixture
def few_blocks(monkeypatch) -> None:
    """Four blocks of 100 tokens, so that TOKENS is too large to be read in whole."""
    monkeypatch.setattr(fingerprint, "BLOCKS_READ", 4)
    monkeypatch.setattr(fingerprint, "TOKENS_IN_BLOCK", 100)


def test_a_copy_in_another_place_has_the_same_fingerprint():
    data = data_of(tokens=TOKENS.copy())
    moved = dataclasses.replace(data, data_dir=Path("there"))
    assert data_fingerprint(data_of()) == data_fingerprint(moved)
    assert len(data_fingerprint(moved)) == 64


@pytest.mark.parametrize(
    "other",
    [
        data_of(tokens=TOKENS[:-1]),
        data_of(tokens=TOKENS.astype(np.uint32)),
        data_of(2000, 3000),
        data_of(val=TOKENS[:69]),
        data_of(val=TOKENS[1:71]),
        dataclasses.replace(data_of(), fingerprint="of another"),
    ],
    ids=["length", "dtype", "files", "validation length", "validation text", "tokenizer"],
)
def test_other_data_have_another_fingerprint(other):
    assert data_fingerprint(other) != data_fingerprint(data_of())


def test_files_in_another_order_have_another_fingerprint():
    first, second = data_of(2000, 3000), data_of(3000, 2000)
    swapped = TokenSplit("training", Path("here"), first.train.shards[::-1])
    found = {data_fingerprint(data) for data in (first, second)}
    found.add(data_fingerprint(dataclasses.replace(first, train=swapped)))
    assert len(found) == 3


@pytest.mark.parametrize("position", [0, 99, 100, 2345, 4900, 4999])
def test_one_other_token_anywhere_shows_where_the_split_is_read_in_whole(monkeypatch, position):
    monkeypatch.setattr(fingerprint, "TOKENS_IN_BLOCK", 100)
    assert data_fingerprint(changed_at(position)) != data_fingerprint(data_of())


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("position", [0, 99, 1633, 3266, 4900, 4999])
def test_of_a_large_split_blocks_from_both_ends_and_between_are_read(position):
    assert data_fingerprint(changed_at(position)) != data_fingerprint(data_of())


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("sizes", [(), (1650, 3350), (1, 4999), (1000, 0, 4000), (50,) * 100])
def test_of_a_large_split_no_more_is_read_however_many_files_it_has(monkeypatch, sizes):
    read: list[int] = []

    class Counted(np.ndarray):
        """Counts the tokens that are sliced out of it."""

        def __getitem__(self, key):
            part = super().__getitem__(key)
            read.append(part.size)
            return part

    data = data_of(*sizes)
    counted = tuple(shard.view(Counted) for shard in data.train.shards)
    train = TokenSplit("training", Path("here"), counted)
    data_fingerprint(dataclasses.replace(data, train=train))
    assert sum(read) == 4 * 100


def test_splits_without_tokens_have_a_fingerprint_too():
    nothing = np.array([], dtype=np.uint16)
    assert data_fingerprint(data_of(tokens=nothing)) != data_fingerprint(data_of(val=nothing))
