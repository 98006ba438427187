"""From documents to train.npy and val.npy."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from data import encode as encode_module
from data.corpus import Corpus, ReadingReport
from data.encode import Encoded, encode_corpus
from data.errors import CorpusError
from data.tokenizer import END_OF_TEXT, Tokenizer, character_tokenizer

TOKENIZER = character_tokenizer(["abcdefghijklmnopqrstuvwxyz0123456789 \n<|>"])
END = TOKENIZER.end_of_text_id


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    return folder


def encode(texts, val_fraction=0.1, tokenizer=TOKENIZER) -> tuple[Encoded, list[str], list[str]]:
    """Encode a folder; give the result and the documents of each side."""
    encoded = encode_corpus(Corpus([texts]), tokenizer, texts, val_fraction, ReadingReport())
    train, val = (np.load(texts / f"{side}.npy") for side in ("train", "val"))
    assert (encoded.train_tokens, encoded.val_tokens) == (train.size, val.size)
    documents = [TOKENIZER.decode(ids.tolist()).split(END_OF_TEXT) for ids in (train, val)]
    return encoded, documents[0], documents[1]


def write_documents(texts, numbers):
    for number in numbers:
        (texts / f"{number:04d}.txt").write_text(f"document {number}")


def test_exactly_one_end_of_text_follows_each_document(texts):
    write_documents(texts, range(50))
    (texts / "0000.txt").write_text("")
    (texts / "0049.txt").write_text(f"spelled {END_OF_TEXT} here\n\n")
    encode_corpus(Corpus([texts]), TOKENIZER, texts, 0.1, ReadingReport())
    ids = np.concatenate([np.load(texts / "train.npy"), np.load(texts / "val.npy")])
    ends = np.flatnonzero(ids == END)
    assert len(ends) == 49
    assert np.diff(ends).min() > 1
    assert ids[-1] == END


def test_every_document_is_on_one_side_whole_and_in_order(texts):
    write_documents(texts, range(200))
    encoded, train, val = encode(texts)
    assert encoded.split == "documents"
    assert sorted(train[:-1] + val[:-1]) == sorted(f"document {number}" for number in range(200))
    assert [int(text.split()[1]) for text in train[:-1]] == sorted(
        int(text.split()[1]) for text in train[:-1]
    )
    assert (encoded.train_documents, encoded.val_documents) == (len(train) - 1, len(val) - 1)
    assert 5 <= encoded.val_documents <= 40


def test_a_document_stays_on_its_side_when_others_come(texts):
    write_documents(texts, range(0, 200, 2))
    _, _, val_before = encode(texts)
    write_documents(texts, range(200))
    _, train, val = encode(texts)
    assert set(val_before) <= set(val)
    assert not set(val_before) - {""} & set(train)


def test_a_single_document_gives_its_end_to_validation(texts):
    (texts / "a.txt").write_text("0123456789" * 10)
    encoded, train, val = encode(texts, val_fraction=0.2)
    assert encoded == Encoded(81, 20, 0, 1, "tail")
    assert train == [("0123456789" * 10)[:81]]
    assert val == [("0123456789" * 10)[81:], ""]


@pytest.mark.parametrize("shares", [(0.0, 0.9), (0.9, 0.0)])
def test_a_split_by_documents_far_from_the_share_asked_for_becomes_a_tail(
    texts, monkeypatch, shares
):
    monkeypatch.setattr(
        encode_module, "_hashed_share", lambda text: shares[0] if "long" in text else shares[1]
    )
    (texts / "a.txt").write_text("long " * 1000)
    (texts / "b.txt").write_text("short")
    encoded, train, val = encode(texts, val_fraction=0.1)
    assert encoded.split == "tail"
    assert encoded.val_tokens == round(0.1 * 5007)
    assert "".join(train + val).count("long") + "".join(train + val).count("short") >= 1000


def test_a_tail_is_cut_right_where_it_crosses_blocks(texts, monkeypatch):
    (texts / "a.txt").write_text("0123456789" * 20)
    whole = encode(texts, val_fraction=0.25)
    for block in (1, 7, 150, 201):
        monkeypatch.setattr(encode_module, "TOKENS_IN_BLOCK", block)
        assert encode(texts, val_fraction=0.25) == whole


def test_no_validation_can_be_asked_for(texts):
    write_documents(texts, range(20))
    encoded, train, _ = encode(texts, val_fraction=0)
    assert (encoded.val_tokens, encoded.split) == (0, "documents")
    assert len(train) == 21


def test_batches_make_no_difference(texts, monkeypatch):
    write_documents(texts, range(30))
    (texts / "long.txt").write_text("0123456789 \n" * 20_000)
    whole = encode(texts)
    monkeypatch.setattr(encode_module, "CHARACTERS_IN_BATCH", 50)
    assert encode(texts) == whole


def test_a_foreign_tokenizer_that_makes_the_end_of_text_of_text_is_refused(texts):
    inner = Library(models.Unigram([("?", 0.0), ("a", -1.0), ("</s>", -1.0)], unk_id=0))
    tokenizer = Tokenizer(inner)
    (texts / "a.txt").write_text("a</s>a")
    with pytest.raises(CorpusError, match="takes text for its end-of-text token"):
        encode_corpus(Corpus([texts]), tokenizer, texts, 0.1, ReadingReport())
