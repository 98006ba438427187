"""prepare.py as its user meets it: commands, messages, exit status, what lies in the folder."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepare as script
from data.errors import CorpusError, FolderExistsError
from data.tokenizer import Tokenizer, character_tokenizer
from data.tokens import open_tokens
from prepare import PrepareConfig, prepare, prepare_default_corpus
from training.command_line import build, parse_options
from training.termination import Terminated

SCRIPT = Path(script.__file__)
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def write_texts(folder: Path, count: int = 100) -> Path:
    """Write documents of seeded words, some of them not ASCII."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 8))) for _ in range(300)]
    words += ["你好", "größer", "🎉"]
    for number in range(count):
        text = " ".join(draw.choices(words, k=draw.randint(20, 400)))
        (folder / f"{number:03d}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


def run_script(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        timeout=60,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def texts(tmp_path) -> Path:
    return write_texts(tmp_path / "texts")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def config(texts: Path, out: Path, **options: Any) -> PrepareConfig:
    usual: dict[str, Any] = {"input": [str(texts)], "out_dir": str(out), "vocab_size": 400}
    return PrepareConfig(**(usual | options))


def test_texts_become_a_folder_that_opens_and_decodes_to_them(texts, out):
    prepare(config(texts, out))
    data = open_tokens(out)
    tokenizer = Tokenizer.from_json(data.tokenizer_json)
    assert data.vocab_size == tokenizer.vocab_size == 400
    documents = []
    for split in (data.train, data.val):
        (ids,) = split.windows(np.array([0]), split.num_tokens)
        documents += tokenizer.decode(ids.tolist()).split("<|endoftext|>")[:-1]
    assert sorted(documents) == sorted(path.read_text("utf-8") for path in texts.iterdir())


def test_meta_says_what_was_made_and_how(texts, out):
    prepare(config(texts, out, val_fraction=0.2))
    meta = json.loads((out / "meta.json").read_text())
    assert meta["format_version"] == 1
    assert (meta["dtype"], meta["vocab_size"], meta["end_of_text_id"]) == ("uint16", 400, 0)
    assert meta["train_tokens"] == np.load(out / "train.npy").size
    assert meta["val_tokens"] == np.load(out / "val.npy").size
    assert meta["train_documents"] + meta["val_documents"] == 100
    assert (meta["split"], meta["val_fraction"]) == ("documents", 0.2)
    assert meta["prepared"]["input"] == [str(texts)]


def test_the_summary_tells_what_was_read_and_written(texts, out, capsys):
    (texts / "empty.txt").write_text("")
    (texts / "latin.txt").write_bytes("caf\u00e9 cr\u00e8me".encode("latin-1"))
    prepare(config(texts, out))
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "101, 1 without text skipped" in printed.out
    assert printed.out.count("not UTF-8") == 1
    assert f"2 characters were not UTF-8, first {texts / 'latin.txt'}" in printed.out
    assert f"{np.load(out / 'val.npy').size:,} tokens" in printed.out
    assert str(out) in printed.out


def test_one_large_file_keeps_its_end_for_validation_and_says_so(tmp_path, out, capsys):
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question.\n" * 500)
    prepare(config(tmp_path / "input.txt", out, vocab_size=270))
    assert json.loads((out / "meta.json").read_text())["split"] == "tail"
    assert "the last 0.1 of the text is for validation" in capsys.readouterr().out


def test_the_character_tokenizer_knows_every_character_of_the_corpus(texts, out):
    prepare(config(texts, out, tokenizer="char"))
    text = "".join(path.read_text("utf-8") for path in texts.iterdir())
    data = open_tokens(out)
    assert data.vocab_size == len(set(text)) + 1
    assert data.train.num_tokens + data.val.num_tokens == len(text) + 100


def test_a_tokenizer_file_is_used_as_it_is(texts, tmp_path, out):
    characters = character_tokenizer([path.read_text("utf-8") for path in texts.iterdir()])
    (tmp_path / "tokenizer.json").write_text(characters.to_json(), encoding="utf-8")
    for number, path in enumerate([tmp_path, tmp_path / "tokenizer.json"]):
        prepare(config(texts, out / str(number), tokenizer=str(path)))
        assert open_tokens(out / str(number)).fingerprint == characters.fingerprint


def test_a_vocabulary_beyond_16_bits_is_written_in_32(texts, tmp_path, out):
    characters = [chr(code) for code in range(32, 0x11000) if not 0xD800 <= code < 0xE000]
    highest = max(characters)
    (tmp_path / "t.json").write_text(character_tokenizer(["\n", *characters, "🎉"]).to_json())
    (texts / "highest.txt").write_text(highest * 3, encoding="utf-8")
    prepare(config(texts, out, tokenizer=str(tmp_path / "t.json")))
    data = open_tokens(out)
    ids = data.train.windows(np.array([0]), data.train.num_tokens)[0]
    assert data.train.shards[0].dtype == np.uint32
    assert highest * 3 in Tokenizer.from_json(data.tokenizer_json).decode(ids.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100_000}, "vocab_size 100000 is larger than the data supports"),
        ({"vocab_size": 100}, "vocab_size 100 is too small"),
        ({"vocab_size": 10**11}, "vocab_size 100000000000 is above 16,777,216"),
        ({"input": [""]}, "input has an empty name"),
        ({"out_dir": ""}, "out_dir is empty: name a folder"),
        ({"tokenizer": "bpee"}, "tokenizer bpee: neither bpe nor char nor an existing"),
        ({"tokenizer": "x" * 300}, "tokenizer xxx.* cannot be read: File name too long"),
        ({"val_fraction": 0.5}, r"val_fraction 0\.5 is no share"),
        (
            {"val_fraction": -0.1, "tokenizer_sample_mb": 0},
            r"val_fraction.*; tokenizer_sample_mb 0",
        ),
        ({"input": ["nowhere"]}, "nowhere: no such file or folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(texts, out, options, message):
    with pytest.raises(CorpusError, match=message) as caught:
        prepare(config(texts, out, **options))
    assert "\n" not in str(caught.value)
    assert os.listdir(out.parent) == ["texts"]


def test_a_mistake_in_the_last_text_leaves_nothing(texts, out):
    (texts / "zzz.txt").write_text("hello", encoding="utf-16")
    with pytest.raises(CorpusError, match="UTF-16"):
        prepare(config(texts, out))
    assert os.listdir(out.parent) == ["texts"]


def test_an_existing_folder_stays_unless_overwriting_is_asked_for(texts, out):
    prepare(config(texts, out))
    before = contents(out)
    with pytest.raises(FolderExistsError, match="--overwrite"):
        prepare(config(texts, out, tokenizer="char"))
    assert contents(out) == before
    prepare(config(texts, out, tokenizer="char", overwrite=True))
    assert contents(out) != before


def test_the_default_corpus_is_prepared_once(texts, out, monkeypatch):
    calls = []

    def prepare_and_note(config: PrepareConfig) -> None:
        calls.append(config)
        prepare(config)

    monkeypatch.setattr(script, "prepare", prepare_and_note)
    monkeypatch.setattr(script, "PrepareConfig", lambda out_dir: config(texts, Path(out_dir)))
    prepare_default_corpus(str(out))
    prepare_default_corpus(str(out))
    assert len(calls) == 1
    assert open_tokens(out).train.num_tokens > 0


def test_the_default_corpus_may_have_been_finished_by_another_job(out, monkeypatch):
    def late(config: PrepareConfig) -> None:
        raise FolderExistsError

    monkeypatch.setattr(script, "prepare", late)
    prepare_default_corpus(str(out))


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("--input a.txt b/", {"input": ["a.txt", "b/"]}),
        ("--input a.txt --vocab_size 9 --input=b/", {"input": ["a.txt", "b/"], "vocab_size": 9}),
        ("--input [a.txt,b/]", {"input": ["a.txt", "b/"]}),
        ("--input [1].txt [x", {"input": ["[1].txt", "[x"]}),
        ("--input=[1].txt", {"input": ["[1].txt"]}),
        ("--input 1 null", {"input": ["1", "null"]}),
        ("--config more.yaml --input a.txt", {"input": ["a.txt"], "overwrite": True}),
        ("--config more.yaml", {"input": ["x", "y"], "overwrite": True}),
        ("--overwrite --input a.txt", {"input": ["a.txt"], "overwrite": True}),
        ("--overwrite false", {}),
        ("--overwrite=true", {"overwrite": True}),
    ],
)
def test_inputs_follow_one_flag_and_overwrite_may_stand_alone(tmp_path, monkeypatch, argv, options):
    monkeypatch.chdir(tmp_path)
    Path("more.yaml").write_text("input: [x, y]\noverwrite: true\n")
    parsed = parse_options([PrepareConfig], description="", argv=argv.split())
    assert build(PrepareConfig, parsed) == PrepareConfig(**options)


def test_neither_locale_nor_threads_change_a_byte(texts, tmp_path):
    (texts / "数据").mkdir()
    named = (texts / "000.txt").rename(texts / "数据" / "文.txt")
    for variables in (ASCII_LOCALE, {"LC_ALL": "C.UTF-8", "TOKENIZERS_PARALLELISM": "false"}):
        out = tmp_path / variables["LC_ALL"] / "出"
        options = ("--input", named, texts, "--out_dir", out, "--vocab_size", 400)
        ended = run_script(*options, **variables)
        assert (ended.returncode, ended.stderr) == (0, b"")
    first, second = (contents(tmp_path / locale / "出") for locale in ("C", "C.UTF-8"))
    assert first == second
    prepare(config(texts, tmp_path / "here", input=[str(named), str(texts)]))
    assert first == contents(tmp_path / "here")


def test_a_file_name_that_no_terminal_can_show_is_printed_escaped(texts, out, capsys):
    strange = os.fsdecode(os.fsencode(texts) + b"/\xe9.txt")
    Path(strange).write_bytes(b"caf\xe9")
    prepare(config(texts, out))
    assert r"\udce9.txt" in capsys.readouterr().out


def test_the_command_answers_a_mistake_with_one_line_and_status_2(tmp_path):
    (tmp_path / "short.txt").write_text("too short a text")
    ended = run_script("--input", tmp_path / "short.txt", "--out_dir", tmp_path / "out")
    assert ended.returncode == 2
    assert ended.stdout == b""
    assert ended.stderr.startswith(b"prepare.py: vocab_size 4096 is larger")
    assert ended.stderr.count(b"\n") == 1
    assert os.listdir(tmp_path) == ["short.txt"]


def test_killed_half_way_it_leaves_no_folder_and_can_run_again(tmp_path, out):
    (tmp_path / "large.txt").write_text("a line of text that is repeated often\n" * 400_000)
    arguments = ["--input", tmp_path / "large.txt", "--out_dir", out, "--tokenizer", "char"]
    process = subprocess.Popen([sys.executable, SCRIPT, *map(str, arguments)])
    while not list(tmp_path.glob("out.preparing-*/train.npy")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob("out.preparing-*"))) == 1
    (tmp_path / "large.txt").write_text("a line of text that is repeated often\n" * 100)
    prepare(config(tmp_path / "large.txt", out, vocab_size=280))
    assert open_tokens(out).train.num_tokens > 0
    assert sorted(os.listdir(tmp_path)) == ["large.txt", "out"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_half_way_leaves_nothing(texts, out, monkeypatch, name):
    def signalled(corpus, tokenizer, folder, *_):
        (folder / "train.npy").write_text("half")
        signal.raise_signal(signal.Signals[name])

    monkeypatch.setattr(script, "encode_corpus", signalled)
    before = signal.signal(signal.Signals[name], signal.SIG_DFL)  # under nohup it is another
    try:
        with pytest.raises(Terminated, match=f"ended by {name}"):
            prepare(config(texts, out))
        assert os.listdir(out.parent) == ["texts"]
    finally:
        signal.signal(signal.Signals[name], before)
