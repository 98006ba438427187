"""Tokenizers: exact both ways, blind to spelled special tokens, whole characters when streaming."""

import json
import random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from data.errors import CorpusError
from data.tokenizer import (
    END_OF_TEXT,
    StreamingDecoder,
    Tokenizer,
    character_tokenizer,
    fingerprint,
    train_bpe,
)

TEXT = (
    "def encode(text):\n    return [token for token in text]\n\n\n"
    "class Tokenizer:\n\tdef encode(self, text): return 12345, 'it's'\r\n"
    "The tokenizer encodes text; 你好 世界 Ещё один текст 🎉👍🏽 नमस्ते\n"
) * 3
AWKWARD = [
    " ",
    "\n",
    "\r\n",
    "\t",
    "\0",
    "你",
    "🎉",
    "\u0301",
    "\u00a0",
    "\u2028",
    "\ufffd",
    END_OF_TEXT,
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([TEXT], 330)


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return character_tokenizer([TEXT, "\ufffd"])


def foreign(vocabulary: dict[str, int], **marks: bool) -> tokenizers.Tokenizer:
    """Make a tokenizer of another maker: words are characters, `</s>` is an added token."""
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    if "</s>" in vocabulary:
        inner.add_tokens([AddedToken("</s>", **marks)])
    return inner


@given(text=st.lists(st.text() | st.sampled_from(AWKWARD)).map("".join))
def test_decoding_bpe_inverts_encoding(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.end_of_text_id not in ids


@given(text=st.text(st.sampled_from(TEXT)))
def test_decoding_characters_inverts_encoding_and_each_is_one_token(characters, text):
    ids = characters.encode(text)
    assert characters.decode(ids) == text
    assert len(ids) == len(text)


def test_bpe_makes_fewer_tokens_than_bytes(bpe):
    assert len(bpe.encode(TEXT)) < 0.75 * len(TEXT.encode())


def test_text_that_spells_the_end_of_text_stays_text_also_after_reading_the_file_back(tmp_path):
    text = f"before{END_OF_TEXT}after"
    (tmp_path / "tokenizer.json").write_text(train_bpe([TEXT], 300).to_json(), encoding="utf-8")
    for tokenizer in (
        train_bpe([TEXT], 300),
        character_tokenizer([text]),
        Tokenizer.from_file(tmp_path / "tokenizer.json"),
        Tokenizer.from_json(character_tokenizer([text]).to_json()),
    ):
        for ids in (tokenizer.encode(text), tokenizer.encode_batch(["", text])[1]):
            assert tokenizer.end_of_text_id not in ids
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("special", [True, False])
def test_a_foreign_end_of_text_is_known_by_its_name_and_not_made_from_text(special):
    vocabulary = {"?": 0, "<": 1, "/": 2, "s": 3, ">": 4, "</s>": 5}
    tokenizer = Tokenizer.from_json(foreign(vocabulary, special=special).to_str())
    assert tokenizer.end_of_text_id == 5
    assert tokenizer.encode("s</s>") == [3, 1, 2, 3, 4]


def test_a_tokenizer_without_end_of_text_is_refused():
    with pytest.raises(CorpusError, match=r"no end-of-text token: add <\|endoftext\|>"):
        Tokenizer.from_json(foreign({"?": 0, "a": 1}).to_str())


def test_a_file_that_is_missing_or_no_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(CorpusError, match=r"cannot read .*no\.json"):
        Tokenizer.from_file(tmp_path / "no.json")
    for content in (b"{}", b"not json", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(CorpusError, match=r"bad\.json"):
            Tokenizer.from_file(tmp_path / "bad.json")


def test_padding_and_truncation_of_a_foreign_file_are_ignored():
    inner = foreign({"?": 0, "a": 1, "</s>": 2})
    inner.enable_truncation(2)
    inner.enable_padding(length=6)
    assert Tokenizer.from_json(inner.to_str()).encode("aaaa") == [1, 1, 1, 1]


def test_the_vocabulary_size_is_above_every_id_even_where_ids_have_holes():
    assert Tokenizer(foreign({"?": 0, "a": 7, "</s>": 9})).vocab_size == 10


def test_equal_text_gives_an_equal_tokenizer():
    assert train_bpe([TEXT], 300).to_json() == train_bpe(iter([TEXT]), 300).to_json()
    assert character_tokenizer([TEXT]).to_json() == character_tokenizer([TEXT[::-1]]).to_json()


def test_a_tokenizer_survives_being_written_down(bpe, characters):
    for tokenizer in (bpe, characters):
        again = Tokenizer.from_json(tokenizer.to_json())
        assert again.to_json() == tokenizer.to_json()
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(TEXT) == tokenizer.encode(TEXT)
        assert (again.vocab_size, again.end_of_text_id) == (tokenizer.vocab_size, 0)


def test_the_fingerprint_is_of_the_content_and_not_of_its_layout(bpe, characters):
    content = json.loads(bpe.to_json())
    layout = json.dumps(dict(reversed(content.items())), indent=4, ensure_ascii=False)
    assert fingerprint(layout) == bpe.fingerprint
    assert bpe.fingerprint != characters.fingerprint != train_bpe([TEXT], 300).fingerprint


def test_a_vocabulary_larger_than_the_text_supports_is_refused_with_the_size_that_works():
    with pytest.raises(
        CorpusError, match=r"vocab_size 9999 is larger.*use --vocab_size (\d+)"
    ) as e:
        train_bpe([TEXT], 9999)
    size = int(str(e.value).split("--vocab_size ")[1].split()[0])
    assert train_bpe([TEXT], size).vocab_size == size


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(CorpusError, match=r"vocab_size 256 is too small.*at least 257"):
        train_bpe([TEXT], 256)
    assert train_bpe([TEXT], 257).vocab_size == 257


@pytest.mark.parametrize("unit", ["a", "漢", "!", "7", " ", "\n", " \n", "a\u0301", "\r", "\u0301"])
def test_text_without_words_is_cut_into_bounded_words(bpe, unit):
    words = bpe._inner.pre_tokenizer.pre_tokenize_str(unit * 5000)
    assert max(end - begin for _, (begin, end) in words) <= 81


def test_an_unknown_character_is_named(characters):
    with pytest.raises(CorpusError, match=r"does not know '\\xe9', '\\u6f22'"):
        characters.encode("caf\u00e9 \u6f22")


def test_a_prompt_that_an_ascii_locale_has_hidden_in_half_characters_is_restored(bpe):
    hidden = "你好".encode().decode("ascii", "surrogateescape")
    assert bpe.decode(bpe.encode(hidden)) == "你好"
    assert bpe.decode(bpe.encode("a\ud800")) == "a\ufffd"


def test_ids_outside_the_vocabulary_decode_to_nothing(bpe):
    ids = [*bpe.encode("text"), 5000]
    assert bpe.decode(ids) == streamed(bpe, ids) == "text"


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = StreamingDecoder(tokenizer)
    return "".join([*(decoder.push(token_id) for token_id in ids), decoder.flush()])


def test_streaming_hands_out_only_whole_characters(bpe):
    text = "漢字 🎉👍🏽 e\u0301"
    ids = bpe.encode(text)
    assert len(ids) > len(text)
    decoder = StreamingDecoder(bpe)
    parts = [decoder.push(token_id) for token_id in ids]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == text
    assert decoder.flush() == ""


@given(seed=st.integers(0, 2**32))
def test_streaming_any_ids_adds_up_to_decoding_them_at_once(bpe, characters, seed):
    draw = random.Random(seed)
    for tokenizer in (bpe, characters):
        ids = draw.choices(range(tokenizer.vocab_size + 1), k=draw.randrange(40))
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_streaming_a_foreign_tokenizer_keeps_spaces_and_joins_byte_tokens():
    tokens = ["?", "</s>", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "?"))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    tokenizer = Tokenizer(inner)
    ids = [
        2,
        3,
        *(4 + byte for byte in "🎉".encode()),
        3,
        2,
        *(4 + b for b in "漢".encode()),
        2,
    ] * 4
    assert tokenizer.decode(ids) == ("a b🎉 b a漢 a " * 4).rstrip()
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_streaming_looks_back_no_further_after_many_tokens(characters, monkeypatch):
    ids = characters.encode("\ufffd" * 100 + TEXT)
    decode, lengths = characters.decode, []

    def measured(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(characters, "decode", measured)
    streamed(characters, ids)
    assert max(lengths) <= StreamingDecoder.CONTEXT_TOKENS + StreamingDecoder.MOST_HELD_BACK
