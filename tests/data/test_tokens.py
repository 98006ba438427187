"""Token files: which folders are refused, and which windows training reads when."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from data import tokens as tokens_module
from data.errors import CorpusError
from data.meta import Meta, write_meta
from data.tokenizer import character_tokenizer
from data.tokens import (
    EpochWindows,
    PreparedData,
    RandomWindows,
    TokenSplit,
    ValidationWindows,
    open_tokens,
)

TOKENIZER = character_tokenizer(["abcdefghi"])  # 10 entries


def write_tokens(folder: Path, train, val=(1, 2, 3), dtype="uint16", **statements) -> Path:
    """Write token files that are right except where `statements` say otherwise."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "train.npy", np.array(train, dtype=dtype))
    np.save(folder / "val.npy", np.array(val, dtype=dtype))
    (folder / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")
    meta = Meta(
        dtype=dtype,
        vocab_size=TOKENIZER.vocab_size,
        tokenizer_fingerprint=TOKENIZER.fingerprint,
        end_of_text_id=TOKENIZER.end_of_text_id,
        train_tokens=len(train),
        val_tokens=len(val),
    )
    write_meta(folder, dataclasses.replace(meta, **statements))
    return folder


def split_of(*sizes: int, name: str = "training") -> TokenSplit:
    """Make a split whose tokens are their own positions, in files of these sizes."""
    shards = np.split(np.arange(sum(sizes), dtype=np.uint16), np.cumsum(sizes)[:-1])
    return TokenSplit(name, Path("data/mine"), tuple(shards))


@pytest.fixture
def prepared(tmp_path) -> PreparedData:
    return open_tokens(write_tokens(tmp_path / "mine", [1, 2, 0, 9, 4, 0], [5, 6, 0]))


def test_an_open_folder_says_what_it_holds(prepared, tmp_path):
    assert (prepared.train.num_tokens, prepared.val.num_tokens) == (6, 3)
    assert (prepared.vocab_size, prepared.end_of_text_id) == (10, 0)
    assert prepared.fingerprint == TOKENIZER.fingerprint
    assert prepared.tokenizer_json == TOKENIZER.to_json()
    assert prepared.data_dir == tmp_path / "mine"
    windows = prepared.train.windows(np.array([0, 3]), 3)
    assert windows.dtype == np.int64
    assert windows.tolist() == [[1, 2, 0], [9, 4, 0]]


def test_tokens_stay_on_the_disk_until_they_are_asked_for(prepared):
    assert all(isinstance(shard, np.memmap) for shard in prepared.train.shards)


def test_a_folder_may_have_several_files_a_split(tmp_path):
    folder = write_tokens(tmp_path / "mine", [1, 2, 3], train_tokens=5)
    np.save(folder / "train_0001.npy", np.array([4, 5], dtype=np.uint16))
    split = open_tokens(folder).train
    assert split.windows(np.array([1, 3]), 2).tolist() == [[2, 3], [4, 5]]


def test_a_missing_folder_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(CorpusError, match=r"no such folder.*prepare\.py .*--out_dir .*nothing"):
        open_tokens(tmp_path / "nothing")


def test_a_folder_that_cannot_be_looked_at_is_refused_with_the_reason(tmp_path, monkeypatch):
    with pytest.raises(CorpusError, match=r"cannot read .*xxx: File name too long"):
        open_tokens(tmp_path / ("x" * 300))

    def forbidden(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", forbidden)
    with pytest.raises(CorpusError, match=r"cannot read .*mine: Permission denied"):
        open_tokens(tmp_path / "mine")


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.npy", "val.npy"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path, name):
    folder = write_tokens(tmp_path / "mine", [1, 2])
    (folder / name).unlink()
    with pytest.raises(CorpusError, match=name.replace(".npy", r".*\.npy")):
        open_tokens(folder)


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.npy", "val.npy"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path, name):
    folder = write_tokens(tmp_path / "mine", [1, 2, 3, 4])
    content = (folder / name).read_bytes()
    for damaged in (content[:-3], b"", b"\xff" + content):
        (folder / name).write_bytes(damaged)
        with pytest.raises(CorpusError, match=name):
            open_tokens(folder)


@pytest.mark.parametrize(("stated", "actual"), [("uint16", "uint32"), ("uint32", "uint16")])
def test_a_file_of_another_type_than_stated_is_refused(tmp_path, stated, actual):
    folder = write_tokens(tmp_path / "mine", [1, 2], dtype=actual)
    write_meta(folder, dataclasses.replace(tokens_module.read_meta(folder), dtype=stated))
    with pytest.raises(CorpusError, match=rf"train\.npy holds {actual} .* a row of {stated}"):
        open_tokens(folder)


def test_a_file_of_another_length_than_stated_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "mine", [1, 2], train_tokens=3)
    with pytest.raises(CorpusError, match=r"train\*\.npy hold 2 tokens, meta\.json says 3"):
        open_tokens(folder)


def test_a_table_of_tokens_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "mine", [[1, 2], [3, 4]])
    with pytest.raises(CorpusError, match=r"shape \(2, 2\)"):
        open_tokens(folder)


def test_an_archive_under_the_name_of_an_array_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "mine", [1, 2])
    with open(folder / "train.npy", "wb") as file:
        np.savez(file, np.array([1, 2], dtype=np.uint16))
    with pytest.raises(CorpusError, match=r"train\.npy is an archive of arrays"):
        open_tokens(folder)
    (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:-30])
    with pytest.raises(CorpusError, match=r"train\.npy is broken"):
        open_tokens(folder)


def test_another_tokenizer_than_the_one_that_made_the_tokens_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "mine", [1, 2])
    (folder / "tokenizer.json").write_text(character_tokenizer(["xyz"]).to_json())
    with pytest.raises(CorpusError, match=r"tokenizer\.json has fingerprint .* were made with"):
        open_tokens(folder)


def test_an_id_outside_the_vocabulary_is_refused_with_both_values(tmp_path):
    folder = write_tokens(tmp_path / "mine", [1, 2], val=[3, 10])
    with pytest.raises(CorpusError, match=r"val\.npy holds token id 10, .* has 10 entries"):
        open_tokens(folder)


def test_large_files_are_checked_in_blocks_the_last_one_included(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "TOKENS_CHECKED_IN_FULL", 100)
    monkeypatch.setattr(tokens_module, "TOKENS_IN_BLOCK", 10)
    monkeypatch.setattr(tokens_module, "BLOCKS_CHECKED", 4)
    for bad_position in (0, 1000):
        tokens = np.ones(1001, dtype=np.uint16)
        tokens[bad_position] = 11
        with pytest.raises(CorpusError, match="holds token id 11"):
            open_tokens(write_tokens(tmp_path / "mine", tokens))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("format_version", 99, "has format_version 99, this program reads 1"),
        ("vocab_size", None, "does not say vocab_size"),
        ("vocab_size", "ten", "has a wrong vocab_size, 'ten'"),
        ("vocab_size", 99999999999, "has a wrong vocab_size, 99999999999, of ids in uint16"),
        ("vocab_size", 2**16 + 1, "has a wrong vocab_size, 65537, of ids in uint16"),
        ("vocab_size", 0, "has a wrong vocab_size, 0"),
    ],
)
def test_statements_that_cannot_be_understood_are_refused(tmp_path, name, value, reason):
    folder = write_tokens(tmp_path / "mine", [1, 2])
    statements = json.loads((folder / "meta.json").read_text())
    statements[name] = value
    if value is None:
        del statements[name]
    (folder / "meta.json").write_text(json.dumps(statements))
    with pytest.raises(CorpusError, match=reason):
        open_tokens(folder)


def test_the_highest_ids_of_a_vocabulary_of_70000_come_back_exactly(tmp_path):
    ids = [69_999, 65_536, 65_535, 0]
    folder = write_tokens(tmp_path / "mine", ids, dtype="uint32", vocab_size=70_000)
    assert open_tokens(folder).train.windows(np.array([0]), 4).tolist() == [ids]


def test_no_window_runs_from_one_file_into_the_next():
    split = split_of(5, 3, 1, 6)
    assert split.count_windows(length=3, stride=1) == 3 + 1 + 0 + 4
    starts = split.window_starts(np.arange(8), length=3, stride=1)
    assert starts.tolist() == [0, 1, 2, 5, 9, 10, 11, 12]
    assert split.windows(starts, 3)[:, 0].tolist() == starts.tolist()
    for start in (-1, 3, 6, 8, 13, 15):
        with pytest.raises(IndexError, match=f"no window of 3 tokens at {start}"):
            split.windows(np.array([start]), 3)


def test_random_windows_reach_every_start_and_no_further():
    windows = RandomWindows(split_of(12, 2, 9), context=4, seed=0)
    batch = windows.rows(np.arange(2000))
    assert batch.shape == (2000, 5)
    assert np.array_equal(batch, batch[:, :1] + np.arange(5))
    starts, counts = np.unique(batch[:, 0], return_counts=True)
    assert starts.tolist() == [*range(8), *range(14, 19)]
    assert counts.min() > 100


@pytest.mark.parametrize("kind", [RandomWindows, EpochWindows])
def test_a_sample_is_a_function_of_seed_and_its_number_alone(kind):
    split = split_of(1000)
    one, again = kind(split, 9, seed=1), kind(split, 9, seed=1)
    late = one.rows(np.arange(56, 64))
    for sample in range(56):
        again.rows(np.array([sample]))
    assert np.array_equal(late, again.rows(np.arange(56, 64)))
    assert not np.array_equal(late, one.rows(np.arange(64, 72)))
    assert not np.array_equal(late, kind(split, 9, seed=2).rows(np.arange(56, 64)))


@pytest.mark.parametrize("kind", [RandomWindows, EpochWindows])
def test_samples_may_be_read_in_any_order_and_in_parts_of_any_size(kind):
    windows = kind(split_of(1000), 9, seed=1)
    whole = windows.rows(np.arange(300))  # several epochs
    assert len(np.unique(whole[:, 0])) > 50
    for size in (1, 7, 128):
        parts = [
            windows.rows(np.arange(300)[first : first + size]) for first in range(0, 300, size)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    picked = np.array([250, 0, 250])
    assert np.array_equal(windows.rows(picked), whole[picked])


@pytest.mark.parametrize("kind", [RandomWindows, EpochWindows])
def test_a_run_of_years_does_not_run_out_of_sample_numbers(kind):
    windows = kind(split_of(1000), 9, seed=1)
    far = windows.rows(np.arange(10**15, 10**15 + 200))
    assert far.shape == (200, 10)
    assert len(np.unique(far[:, 0])) > 50


def test_an_epoch_holds_each_window_once_and_the_next_one_in_another_order():
    windows = EpochWindows(split_of(1005), context=10, seed=3)
    assert windows.num_windows == 100
    # Batches of 8 straddle the border of two epochs.
    samples = np.concatenate([windows.rows(8 * step + np.arange(8)) for step in range(25)])
    assert np.array_equal(samples, samples[:, :1] + np.arange(11))
    first, second = samples[:100, 0], samples[100:, 0]
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first.tolist() != second.tolist()
    other_seed = EpochWindows(split_of(1005), context=10, seed=4)
    assert other_seed.rows(np.arange(100))[:, 0].tolist() != first.tolist()


def test_an_epoch_over_several_files_leaves_out_only_their_ends():
    windows = EpochWindows(split_of(25, 8, 31), context=10, seed=0)
    assert windows.num_windows == 5
    assert sorted(windows.rows(np.arange(5))[:, 0]) == [0, 10, 33, 43, 53]


@pytest.mark.parametrize("size", [11, 21, 31])
def test_few_windows_are_gone_through_again_and_again(size):
    windows = EpochWindows(split_of(size), context=10, seed=0)
    starts = windows.rows(np.arange(10 * windows.num_windows))[:, 0]
    assert np.bincount(starts // 10).tolist() == [10] * windows.num_windows


def test_validation_is_a_fixed_choice_of_windows_that_do_not_overlap():
    split = split_of(1005)
    windows = ValidationWindows(split, context=10, max_windows=20, seed=0)
    rows = windows.rows(np.arange(20))
    assert windows.num_windows == 20
    assert len(set(rows[:, 0])) == 20
    assert set(rows[:, 0] % 10) == {0}
    assert rows[-1, 0] > 500  # not only from the beginning
    again = ValidationWindows(split, context=10, max_windows=20, seed=0)
    assert np.array_equal(again.rows(range(5, 7)), rows[5:7])


def test_validation_takes_all_windows_where_there_are_fewer():
    windows = ValidationWindows(split_of(31, name="validation"), 10, max_windows=20, seed=0)
    assert windows.num_windows == 3
    assert windows.rows(np.arange(3))[:, 0].tolist() == [0, 10, 20]


@pytest.mark.parametrize("kind", [RandomWindows, EpochWindows])
def test_training_tokens_shorter_than_a_window_are_refused_with_both_numbers(kind):
    with pytest.raises(
        CorpusError,
        match=r"^data/mine: training has 120 tokens, one window needs 257: "
        r"use a smaller max_seq_len or more text$",
    ):
        kind(split_of(120), context=256, seed=0)
    assert kind(split_of(257), context=256, seed=0).rows(np.arange(2)).shape == (2, 257)


def test_validation_tokens_shorter_than_a_window_are_refused_with_the_way_to_do_without():
    with pytest.raises(CorpusError, match=r"validation has 0 tokens, one .* or val_interval 0"):
        ValidationWindows(split_of(0, name="validation"), context=256, max_windows=5, seed=0)
