"""Make token files of texts: `python prepare.py --input my_texts/ --out_dir data/mine`.

    python prepare.py                                             Python's own library as corpus
    python prepare.py --input a.txt b/ --out_dir data/mine --vocab_size 16384
    python prepare.py --input a.txt --out_dir data/chars --tokenizer char
    python prepare.py --input a.txt --out_dir data/gpt2 --tokenizer gpt2/tokenizer.json

A corpus may be larger than memory: it is read, learned from and encoded in pieces. The same texts
and options give the same token files, byte for byte.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from data.corpus import Corpus, ReadingReport
from data.encode import Encoded, encode_corpus
from data.errors import CorpusError, FolderExistsError
from data.meta import FILE_NAME as META
from data.meta import IDS_OF, Meta, write_meta
from data.new_folder import new_folder
from data.sample import spread_sample
from data.token_writer import token_dtype
from data.tokenizer import Tokenizer, character_tokenizer, train_bpe
from training.command_line import build, parse_options, run
from training.console import say
from training.termination import signals_raised

MOST_ENTRIES = max(IDS_OF.values())


@dataclass(frozen=True)
class PrepareConfig:
    """What to read, how to make tokens of it, and where to write them."""

    input: list[str] = field(default_factory=list)
    """Files and folders of .txt, .md, .jsonl and code, any number; none: Python's own library."""
    out_dir: str = "data/mine"
    """Folder to write, for --data_dir of train_ddp.py."""
    tokenizer: str = "bpe"
    """bpe: learn byte-level BPE; char: one token a character; or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """Entries of the BPE vocabulary; other tokenizers have their own."""
    text_field: str = "text"
    """Where the text stands in a line of a .jsonl file."""
    val_fraction: float = 0.1
    """Share of the documents that is kept for validation."""
    tokenizer_sample_mb: int = 32
    """Megabytes, spread over the corpus, that BPE learns from; at worst it takes 16 times that."""
    overwrite: bool = False
    """Replace out_dir, once the new one is complete."""


def main() -> None:
    """Read the options and prepare."""
    options = parse_options([PrepareConfig], description=__doc__ or "")
    prepare(build(PrepareConfig, options))


def prepare_default_corpus(out_dir: str) -> None:
    """Prepare Python's own library, unless that was done before."""
    if (Path(out_dir) / META).exists():
        return
    try:
        prepare(PrepareConfig(out_dir=out_dir))
    except FolderExistsError:  # another job was faster; the same corpus gives the same files
        return


def prepare(config: PrepareConfig, show_progress: bool = True) -> None:
    """Write a folder of token files and say on stdout what is in it.

    Args:
        config: what to do.
        show_progress: draw progress bars on stderr, if it is a terminal.

    Raises:
        FolderExistsError: `out_dir` holds token files and is not to be overwritten.
        CorpusError: any other mistake in the options or the texts; nothing is left behind.
        Terminated: a signal asks to end; nothing is left behind.
    """
    started = time.perf_counter()
    _check(config)
    with signals_raised(), new_folder(config.out_dir, config.overwrite) as folder:
        corpus = Corpus(config.input, config.text_field)
        tokenizer = _make_tokenizer(config, corpus, show_progress)
        report = ReadingReport()
        with _progress("encoding", corpus, show_progress) as on_bytes:
            encoded = encode_corpus(
                corpus, tokenizer, folder, config.val_fraction, report, on_bytes
            )
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        write_meta(folder, _describe(config, tokenizer, encoded))
    _summarize(config, corpus, report, tokenizer, encoded, time.perf_counter() - started)


def _check(config: PrepareConfig) -> None:
    problems = []
    if not 0 <= config.val_fraction < 0.5:
        problems.append(
            f"val_fraction {config.val_fraction} is no share for validation: use 0 to below 0.5"
        )
    if not config.out_dir:
        problems.append("out_dir is empty: name a folder")
    if not all(config.input):
        problems.append("input has an empty name: name files and folders")
    if config.vocab_size > MOST_ENTRIES:
        problems.append(f"vocab_size {config.vocab_size} is above {MOST_ENTRIES:,}")
    if config.tokenizer_sample_mb < 1:
        problems.append(f"tokenizer_sample_mb {config.tokenizer_sample_mb}: use 1 or more")
    if problems:
        raise CorpusError("; ".join(problems))


def _make_tokenizer(config: PrepareConfig, corpus: Corpus, show_progress: bool) -> Tokenizer:
    if config.tokenizer not in ("bpe", "char"):
        return Tokenizer.from_file(_tokenizer_file(config.tokenizer))
    with _progress(f"learning {config.tokenizer}", corpus, show_progress) as on_bytes:
        pieces = corpus.pieces(ReadingReport(), on_bytes)
        if config.tokenizer == "char":
            return character_tokenizer(pieces)
        sample = spread_sample(pieces, config.tokenizer_sample_mb * 1_000_000)
    return train_bpe(sample, config.vocab_size)


def _tokenizer_file(name: str) -> Path:
    path = Path(name)
    try:
        is_there, is_folder = path.exists(), path.is_dir()
    except OSError as error:  # said here, where it is known whose name cannot be looked at
        raise CorpusError(f"tokenizer {name} cannot be read: {error.strerror}") from None
    if not is_there:
        raise CorpusError(f"tokenizer {name}: neither bpe nor char nor an existing tokenizer.json")
    return path / "tokenizer.json" if is_folder else path


def _describe(config: PrepareConfig, tokenizer: Tokenizer, encoded: Encoded) -> Meta:
    options = dataclasses.asdict(config)
    for name in ("out_dir", "overwrite", "val_fraction"):
        del options[name]
    return Meta(
        dtype=token_dtype(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        end_of_text_id=tokenizer.end_of_text_id,
        val_fraction=config.val_fraction,
        prepared=options,
        **dataclasses.asdict(encoded),
    )


def _summarize(
    config: PrepareConfig,
    corpus: Corpus,
    report: ReadingReport,
    tokenizer: Tokenizer,
    encoded: Encoded,
    seconds: float,
) -> None:
    num_tokens = encoded.train_tokens + encoded.val_tokens
    if encoded.split == "documents":
        split = (
            f"{encoded.train_documents:,} documents for training, {encoded.val_documents:,} for "
            "validation, chosen by hash"
        )
    else:
        split = (
            f"too few documents to choose among: the last {config.val_fraction:.3g} of the text "
            "is for validation"
        )
    lines = {
        "read": f"{len(corpus.files):,} files, {corpus.num_bytes:,} bytes",
        "documents": f"{report.documents:,}, {report.skipped:,} without text skipped",
        "characters": f"{report.characters:,}",
        "replaced": f"{report.replaced:,} characters were not UTF-8, first {report.first_replaced}",
        "tokenizer": f"{config.tokenizer}, {tokenizer.vocab_size:,} entries",
        "tokens": f"{num_tokens:,}, {report.characters / num_tokens:.2f} characters per token",
        "split": split,
        "training": f"{encoded.train_tokens:,} tokens",
        "validation": f"{encoded.val_tokens:,} tokens",
        "written": f"{config.out_dir} in {seconds:.1f} s",
    }
    if not report.replaced:
        del lines["replaced"]
    for name, value in lines.items():
        say(f"{name:12}{value}")


@contextmanager
def _progress(title: str, corpus: Corpus, show_progress: bool) -> Iterator[Callable[[int], object]]:
    """Give the function that takes the number of bytes just read."""
    disable = None if show_progress else True  # None: unless stderr is a terminal
    with tqdm(
        desc=title, total=corpus.num_bytes, unit="B", unit_scale=True, disable=disable
    ) as bar:
        yield bar.update


if __name__ == "__main__":
    run(main, (CorpusError,))
