"""The tokenizer: text to ids and exactly back, whatever the text.

All of it is a `tokenizers` object, so tokenizer.json is read by every tool of the field. What is
decided here: words are bounded, so that text without spaces costs neither memory nor time; text
that happens to spell a special token stays text, because a document must not be able to end
itself; and generated text is handed out only in whole characters.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from data.errors import CorpusError

END_OF_TEXT = "<|endoftext|>"
# What other makers call it, looked for in this order.
OTHER_ENDS_OF_TEXT = ("<|end_of_text|>", "</s>", "<eos>", "<|eos|>")

# How GPT-4 cuts text into words that merges never cross, except that contractions have no rule
# of their own (it would cut source code after every 's), that marks go with their letters, and
# that every repetition has a bound. Indentation is one word, short of the last space, which
# belongs to what follows.
WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]{1,64}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,16}",
        r"\s{0,64}[\r\n]{1,16}",
        r"\s{1,64}(?!\S)",
        r"\s{1,64}",
    )
)
# The bytes and the end of text.
SMALLEST_BPE = 257
# How a byte-level vocabulary spells the space.
BYTE_SPACE = "\u0120"


def fingerprint(tokenizer_json: str) -> str:
    """Hash the content of a tokenizer.json, however it is spaced and ordered."""
    content = json.loads(tokenizer_json)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class Tokenizer:
    """Encodes text into ids below `vocab_size` and decodes them into the same text.

    from_json and from_file take any tokenizer.json of the `tokenizers` library; that decoding
    inverts encoding is a promise only about those that prepare.py makes.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        inner.no_padding()
        inner.no_truncation()
        vocabulary = inner.get_vocab()
        end_of_text = _find_end_of_text(vocabulary)
        # Only tokens marked as special are covered by encode_special_tokens, which is a state of
        # the object and not of the file.
        inner.add_special_tokens([AddedToken(end_of_text, special=True)])
        inner.encode_special_tokens = True
        self.end_of_text_id: int = vocabulary[end_of_text]
        # Not the number of entries: ids may have holes.
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._alphabet = frozenset(vocabulary) if _is_character_tokenizer(inner) else None

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Make the tokenizer that `to_json` wrote down.

        Raises:
            CorpusError: not a tokenizer.json, or one without an end-of-text token.
        """
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise CorpusError(f"not a tokenizer.json: {error}") from None
        return cls(inner)

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json.

        Raises:
            CorpusError: see from_json; or the file cannot be read. Names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror}") from None
        except (UnicodeDecodeError, CorpusError) as error:
            raise CorpusError(f"{path}: {error}") from None

    def to_json(self) -> str:
        """Write the tokenizer down, one line of JSON."""
        return self._inner.to_str()

    @property
    def fingerprint(self) -> str:
        """Tokenizers of equal fingerprint give equal ids."""
        return fingerprint(self.to_json())

    @property
    def has_byte_tokens(self) -> bool:
        """Whether tokens spell bytes, so that a character may be split among several."""
        return isinstance(self._inner.decoder, decoders.ByteLevel)

    def encode(self, text: str) -> list[int]:
        """Encode one text, special tokens' names in it as ordinary text.

        Raises:
            CorpusError: the character tokenizer does not know a character of it.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores; see encode."""
        texts = [_without_lone_surrogates(text) for text in texts]
        if self._alphabet is not None:
            self._require_known(texts)
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens by their names; ids that are no token give nothing."""
        return self._inner.decode(ids, skip_special_tokens=False)

    def ids_that_begin_with_a_space(self) -> list[int]:
        """Find the tokens whose text begins with a space; none unless tokens spell bytes."""
        vocabulary = self._inner.get_vocab() if self.has_byte_tokens else {}
        return sorted(vocabulary[token] for token in vocabulary if token.startswith(BYTE_SPACE))

    def token(self, token_id: int) -> str | None:
        """Give the token as the vocabulary spells it, or None where the id is no token."""
        return self._inner.id_to_token(token_id)

    def _require_known(self, texts: Iterable[str]) -> None:
        assert self._alphabet is not None
        unknown = sorted(set().union(*texts) - self._alphabet)
        if unknown:
            raise CorpusError(
                f"the character tokenizer does not know {', '.join(map(ascii, unknown[:10]))}"
                f"{' and others' if len(unknown) > 10 else ''}: it knows only the "
                f"{self.vocab_size - 1} characters of the text it was made from"
            )


class StreamingDecoder:
    """Decodes ids one at a time; what it hands out adds up to `decode` of all ids at once.

    A character that several tokens spell is held back until it is complete. A token costs the
    same whether it is the tenth or the millionth.
    """

    # A foreign tokenizer's token may read differently after another one (a leading space).
    CONTEXT_TOKENS = 4
    # Its characters take up to four byte tokens; what is longer than two is not incomplete but bad.
    MOST_HELD_BACK = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._byte_of_character = _byte_of_character() if tokenizer.has_byte_tokens else None
        self._context: list[int] = []
        self._held_back: list[int] = []

    def push(self, token_id: int) -> str:
        """Take the next id and give the text that is certain by now."""
        if self._byte_of_character is None:
            return self._push_to_window(token_id)
        token = self._tokenizer.token(token_id) or ""
        try:
            spelled = bytes(self._byte_of_character[character] for character in token)
        except KeyError:  # an added token is spelled as itself
            spelled = token.encode("utf-8")
        return self._utf8.decode(spelled)

    def flush(self) -> str:
        """Give what is still held back; the next push begins a new text."""
        text = self._utf8.decode(b"", final=True) + self._release()
        self._context = []
        return text

    def _push_to_window(self, token_id: int) -> str:
        self._held_back.append(token_id)
        window = self._tokenizer.decode(self._context + self._held_back)
        incomplete = window.endswith("\ufffd") and len(self._held_back) < self.MOST_HELD_BACK
        return "" if incomplete else self._release()

    def _release(self) -> str:
        before = self._tokenizer.decode(self._context)
        window = self._tokenizer.decode(self._context + self._held_back)
        self._context = (self._context + self._held_back)[-self.CONTEXT_TOKENS :]
        self._held_back = []
        return window[len(before) :]


def train_bpe(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary; the same pieces give the same tokenizer.

    Args:
        pieces: text to learn from; memory grows with its distinct words, see data/sample.py.
        vocab_size: entries wanted, the 256 bytes and the end of text among them.

    Raises:
        CorpusError: too small for the bytes, or larger than the text supports.
    """
    if vocab_size < SMALLEST_BPE:
        raise CorpusError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {SMALLEST_BPE}, "
            "every byte and the end of text"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # what occurs once teaches nothing
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(pieces, trainer)
    found = inner.get_vocab_size()
    if found < vocab_size:
        raise CorpusError(
            f"vocab_size {vocab_size} is larger than the data supports: it has {found} tokens that "
            f"occur at least twice; use --vocab_size {found} or less, or more text"
        )
    return Tokenizer(inner)


def character_tokenizer(pieces: Iterable[str]) -> Tokenizer:
    """Make the tokenizer whose tokens are the characters of these pieces."""
    characters: set[str] = set()
    for piece in pieces:
        characters.update(piece)
    tokens = [END_OF_TEXT, *sorted(characters)]
    # BPE without merges: one token a character, ten times faster than splitting into words.
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([END_OF_TEXT])
    return Tokenizer(inner)


def _is_character_tokenizer(inner: tokenizers.Tokenizer) -> bool:
    return isinstance(inner.decoder, decoders.Fuse) and inner.pre_tokenizer is None


def _find_end_of_text(vocabulary: dict[str, int]) -> str:
    for name in (END_OF_TEXT, *OTHER_ENDS_OF_TEXT):
        if name in vocabulary:
            return name
    raise CorpusError(
        f"the tokenizer has no end-of-text token: add {END_OF_TEXT} to it "
        f"(also known: {', '.join(OTHER_ENDS_OF_TEXT)})"
    )


def _without_lone_surrogates(text: str) -> str:
    """Put right what an ASCII locale makes of a prompt: bytes that hide in half characters."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        hidden = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
        return hidden.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """Invert the spelling of bytes as printable characters that GPT-2 brought into use."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    spelled_as_itself = {chr(byte): byte for byte in printable}
    return spelled_as_itself | {chr(0x100 + place): byte for place, byte in enumerate(others)}
