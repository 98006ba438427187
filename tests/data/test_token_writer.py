"""Token files of unknown length."""

import numpy as np
import pytest

from data.token_writer import TokenWriter, token_dtype


def test_what_is_appended_is_read_back_through_the_memory_map(tmp_path):
    path = tmp_path / "train.npy"
    ids = np.arange(70_000) % 65_536
    with TokenWriter(path, token_dtype(65_536)) as writer:
        writer.append(ids[:3].tolist())
        writer.append([])
        writer.append(ids[3:])
    read = np.load(path, mmap_mode="r")
    assert writer.num_tokens == read.size == 70_000
    assert np.array_equal(read, ids)


def test_a_file_without_tokens_can_be_read(tmp_path):
    with TokenWriter(tmp_path / "val.npy", token_dtype(10)):
        pass
    assert np.load(tmp_path / "val.npy", mmap_mode="r").shape == (0,)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (70_000, "uint32")],
)
def test_the_type_holds_the_highest_id(tmp_path, vocab_size, dtype):
    path = tmp_path / "train.npy"
    with TokenWriter(path, token_dtype(vocab_size)) as writer:
        writer.append([vocab_size - 1])
    assert np.load(path).dtype == dtype
    assert np.load(path).tolist() == [vocab_size - 1]


def test_an_id_too_large_for_the_type_is_not_wrapped(tmp_path):
    with (
        pytest.raises(OverflowError),
        TokenWriter(tmp_path / "train.npy", token_dtype(65_536)) as writer,
    ):
        writer.append([65_536])


def test_a_file_that_was_broken_off_does_not_look_complete(tmp_path):
    path = tmp_path / "train.npy"

    def break_off() -> None:
        with TokenWriter(path, token_dtype(10)) as writer:
            writer.append([1, 2, 3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert np.load(path).size == 0
