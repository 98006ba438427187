"""generate.py as its user meets it: what stands on stdout, what on stderr, and the exit status."""

import io
import os
import pickle
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import generate as script
from data.errors import CorpusError
from data.tokenizer import Tokenizer, character_tokenizer, train_bpe
from generate import SEPARATOR, main
from model import sampling
from model.config import ModelConfigError
from model.sampling import SamplingOptions
from model.transformer import Transformer
from tests.model.small_models import lively_model
from training.checkpoint_file import FORMAT_VERSION, CheckpointError
from training.command_line import CommandLineError

CONTEXT = 32
GREEDY = ("--temperature", "0", "--max_new_tokens", "40", "--device", "cpu")
TEXT = "the cat sat on the mat, 你好世界 and größer 🎉👩‍👩‍👧 than the dog that sat on the cat"


@dataclass
class Trained:
    """A checkpoint and what is in it."""

    path: Path
    model: Transformer
    tokenizer: Tokenizer

    def save(self) -> "Trained":
        """Write the file as train_ddp.py writes it."""
        checkpoint = {
            "format_version": FORMAT_VERSION,
            "model": self.model.state_dict(),
            "optimizer": {},
            "iteration": 100,
            "best_val_loss": 1.0,
            "config": asdict(self.model.config) | {"batch_size": 8, "data_dir": "not/there"},
            "tokenizer": self.tokenizer.to_json(),
            "scaler": None,
            "rng": [],
        }
        torch.save(checkpoint, self.path)
        return self

    def ids_after(self, row: Sequence[int], count: int = 40) -> list[int]:
        """Greedy continuation, going on past the end of the text."""
        steps = sampling.generate(
            self.model,
            [row],
            max_new_tokens=count,
            options=SamplingOptions(temperature=0),
            vocab_size=self.tokenizer.vocab_size,
        )
        return [token for step in steps for token in step if token is not None]

    def text_after(self, prompt: str) -> str:
        """What must be on stdout for a prompt: the decoded ids all at once."""
        row = self.tokenizer.encode(prompt) or [self.tokenizer.end_of_text_id]
        return prompt + self.tokenizer.decode(self.ids_after(row)) + "\n"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_trained(folder: Path, tokenizer: Tokenizer, **shape: Any) -> Trained:
    vocab_size = tokenizer.vocab_size + 20  # padded
    # This seed's greedy texts go through many tokens.
    model = lively_model(seed=3, max_seq_len=CONTEXT, vocab_size=vocab_size, **shape)
    with torch.no_grad():
        # The end of the text comes only where a test wants it.
        model.output_head.weight[tokenizer.end_of_text_id] = 0.0
    return Trained(folder / "model.pt", model, tokenizer).save()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    # 290 tokens: the bytes and a few merges, so that characters are split among tokens.
    tokenizer = train_bpe([TEXT, TEXT], vocab_size=290)
    return make_trained(tmp_path_factory.mktemp("trained"), tokenizer)


@pytest.fixture(scope="module")
def ending(tmp_path_factory, trained) -> Trained:
    """A model that ends its text after "the cat" with its 7th token."""
    model = lively_model(max_seq_len=CONTEXT, vocab_size=trained.model.config.vocab_size)
    model.load_state_dict(trained.model.state_dict())
    ids = trained.ids_after(trained.tokenizer.encode("the cat"))
    assert ids[6] not in ids[:6], "choose another seed for the model"
    with torch.no_grad():
        weight = model.output_head.weight
        weight[trained.tokenizer.end_of_text_id] = 1.01 * weight[ids[6]]
    path = tmp_path_factory.mktemp("ending") / "model.pt"
    return Trained(path, model, trained.tokenizer).save()


@pytest.fixture
def output(capsysbinary):
    """Runs main and gives (stdout, stderr) as text."""

    def run_main(trained: Trained, *arguments: str) -> tuple[str, str]:
        main([str(trained.path), *arguments])
        captured = capsysbinary.readouterr()
        return captured.out.decode("utf-8"), captured.err.decode("utf-8")

    return run_main


def calls_of_generate(monkeypatch) -> list[dict[str, Any]]:
    """Have what main gives to the model's `generate` put into this list."""
    calls: list[dict[str, Any]] = []

    def spy(model, rows, **options):
        calls.append({"rows": rows} | options)
        return sampling.generate(model, rows, **options)

    monkeypatch.setattr(script, "generate", spy)
    return calls


def force_tokens(monkeypatch, *rows: list[int]) -> None:
    """Have the model say these tokens, whatever it is asked."""
    monkeypatch.setattr(script, "generate", lambda *_, **__: zip(*rows, strict=True))


def test_stdout_is_the_prompt_and_its_continuation(trained, output):
    out, _ = output(trained, "the cat", *GREEDY)
    assert out == trained.text_after("the cat")


def test_stderr_says_in_one_line_why_it_stopped_and_how_fast_it_was(trained, output):
    _, err = output(trained, "the cat", *GREEDY)
    assert err.startswith("generate.py: stopped at max_new_tokens after 40 tokens (")
    assert err.endswith(" tokens/s)\n")
    assert err.count("\n") == 1


def test_characters_that_tokens_split_are_streamed_whole(monkeypatch, trained, output):
    ids = trained.tokenizer.encode(TEXT)
    assert "\ufffd" in "".join(trained.tokenizer.decode([i]) for i in ids), "nothing is split"
    written: list[str] = []
    write = script._write

    def write_and_note(text: str) -> None:
        written.append(text)
        write(text)

    monkeypatch.setattr(script, "_write", write_and_note)
    force_tokens(monkeypatch, ids)
    out, _ = output(trained, "你", *GREEDY)
    assert out == f"你{TEXT}\n"
    assert "\ufffd" not in "".join(written)
    assert len(written) > len(ids)


def test_bytes_that_are_no_characters_are_streamed_as_they_decode_at_once(trained, output):
    out, _ = output(trained, "你好", *GREEDY)
    assert "\ufffd" in out
    assert out == trained.text_after("你好")


def test_a_character_that_stays_incomplete_is_printed_at_the_end(monkeypatch, trained, output):
    ids = trained.tokenizer.encode(" dog ")
    ids += trained.tokenizer.encode("\u2603")[:-1]  # not a character of the tokenizer's corpus
    force_tokens(monkeypatch, ids)
    assert output(trained, "the", *GREEDY)[0] == "the dog \ufffd\n"


def test_text_is_on_stdout_before_the_next_token_is_computed(monkeypatch, trained):
    ids = trained.tokenizer.encode(" the cat sat")
    stdout = io.BytesIO()
    before_each_token: list[str] = []

    def slow_steps(*_, **__):
        for token in ids:
            before_each_token.append(stdout.getvalue().decode("utf-8"))
            yield [token]

    monkeypatch.setattr(script, "generate", slow_steps)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(stdout)))
    main([str(trained.path), "on", *GREEDY])
    decoded = [trained.tokenizer.decode(ids[:count]) for count in range(len(ids))]
    assert before_each_token == [f"on{text}" for text in decoded]


@pytest.mark.parametrize("arguments", [(), ("",)], ids=["no prompt", "empty prompt"])
def test_without_a_prompt_a_fresh_document_is_begun(monkeypatch, trained, output, arguments):
    calls = calls_of_generate(monkeypatch)
    out, _ = output(trained, *arguments, *GREEDY)
    assert calls[0]["rows"] == [[trained.tokenizer.end_of_text_id]]
    assert out == trained.text_after("")


@pytest.mark.parametrize("prompt", ["the cat ", "the cat  ", " "])
def test_a_space_that_ends_a_prompt_is_the_beginning_of_the_first_new_token(
    monkeypatch, trained, output, prompt
):
    calls = calls_of_generate(monkeypatch)
    out, _ = output(trained, prompt, *GREEDY)
    row = trained.tokenizer.encode(prompt[:-1]) or [trained.tokenizer.end_of_text_id]
    assert calls[0]["rows"] == [row]
    ids = range(trained.tokenizer.vocab_size)
    assert calls[0]["first_ids"] == [
        [i for i in ids if trained.tokenizer.decode([i]).startswith(" ")]
    ]
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 10


def test_a_space_is_a_token_like_any_other_where_tokens_are_characters(
    monkeypatch, tmp_path, output
):
    trained = make_trained(tmp_path, character_tokenizer([string.printable + "\u0120"]))
    calls = calls_of_generate(monkeypatch)
    out, _ = output(trained, "the cat ", *GREEDY)
    assert calls[0]["rows"] == [trained.tokenizer.encode("the cat ")]
    assert out == trained.text_after("the cat ")


def test_end_of_text_that_a_prompt_spells_is_ordinary_text(monkeypatch, trained, output):
    calls = calls_of_generate(monkeypatch)
    prompt = "the <|endoftext|> cat"
    out, _ = output(trained, prompt, *GREEDY)
    assert trained.tokenizer.end_of_text_id not in calls[0]["rows"][0]
    assert out == trained.text_after(prompt)


@pytest.mark.parametrize(
    "arguments",
    [
        ("{path}", "the cat", "--temperature", "0", "--max_new_tokens", "40"),
        ("{path}", "--temperature", "0", "--max_new_tokens", "40", "the cat"),
        ("--temperature=0", "{path}", "--max_new_tokens", "40", "the cat"),
        ("--max_new_tokens", "40", "--temperature", "0", "--", "{path}", "the cat"),
        ("{path}", "--temperature", "0", "--ignore_end_of_text", "the cat", "--max_new_tokens=40"),
    ],
)
def test_options_and_prompts_may_stand_in_any_order(trained, capsysbinary, arguments):
    main([argument.format(path=trained.path) for argument in arguments])
    assert capsysbinary.readouterr().out.decode() == trained.text_after("the cat")


def test_what_follows_two_dashes_is_a_prompt(trained, output):
    out, _ = output(trained, *GREEDY, "--", "--the cat")
    assert out == trained.text_after("--the cat")


@pytest.mark.parametrize("prompt", ["-1", "null", "[a, b]", "a: b", "true"])
def test_a_prompt_is_taken_literally(trained, output, prompt):
    assert output(trained, prompt, *GREEDY)[0] == trained.text_after(prompt)


def test_a_dash_reads_the_prompt_from_stdin(monkeypatch, trained, output):
    prompt = "the cat 你好\n"
    # An encoding that cannot hold it must not matter.
    stdin = io.TextIOWrapper(io.BytesIO(prompt.encode("utf-8")), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert output(trained, "-", *GREEDY)[0] == trained.text_after(prompt)


def test_a_prompt_that_is_not_utf_8_is_refused_with_its_place(monkeypatch, trained):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the c\xe4t")))
    with pytest.raises(CommandLineError, match="not UTF-8: byte 5"):
        main([str(trained.path), "-"])


@pytest.mark.parametrize("options", [GREEDY, ("--device", "cpu")], ids=["greedy", "drawn"])
def test_prompts_of_one_batch_are_continued_as_alone(trained, output, options):
    prompts = ["the cat", "", "你好 " * 30, "d"]
    alone = [output(trained, prompt, *options)[0] for prompt in prompts]
    together, _ = output(trained, *prompts, *options)
    assert together == SEPARATOR.join(alone)


def test_a_prompt_far_longer_than_the_context_is_continued_from_its_end(trained, output):
    prompt = "the cat sat on " * 100 + "the"
    length = len(trained.tokenizer.encode(prompt))
    out, err = output(trained, prompt, *GREEDY)
    assert out == trained.text_after(prompt)
    first, _ = err.splitlines()
    seen = int(first.split()[-1])
    assert first == (
        f"generate.py: prompt 1 has {length} tokens, more than the context of {CONTEXT}: "
        f"the model sees its last {seen}"
    )
    assert CONTEXT - CONTEXT // 8 < seen <= CONTEXT


def test_only_prompts_that_are_too_long_are_warned_of(trained, output):
    _, err = output(trained, "the cat", "the cat sat " * 100, *GREEDY)
    assert "prompt 2 has" in err
    assert "prompt 1 has" not in err


def test_generation_stops_at_the_end_of_the_text_and_does_not_print_it(ending, output):
    ids = ending.ids_after(ending.tokenizer.encode("the cat"))
    assert ids[6] == ending.tokenizer.end_of_text_id
    out, err = output(ending, "the cat", *GREEDY)
    assert out == "the cat" + ending.tokenizer.decode(ids[:6]) + "\n"
    assert "stopped at the end of the text after 6 tokens" in err


@pytest.mark.parametrize("flag", [("--ignore_end_of_text",), ("--ignore_end_of_text", "true")])
def test_the_end_of_the_text_may_be_ignored(ending, output, flag):
    out, err = output(ending, "the cat", *GREEDY, *flag)
    assert out == ending.text_after("the cat")
    assert "stopped at max_new_tokens after 40 tokens" in err


def test_texts_of_one_batch_end_each_at_its_own_place(ending, output):
    prompts = ["the cat", "a dog", "the cat"]
    alone = [output(ending, prompt, *GREEDY) for prompt in prompts]
    together, err = output(ending, *prompts, *GREEDY)
    assert together == SEPARATOR.join(out for out, _ in alone)
    reasons = [alone_err.split("stopped at ")[1].split(" (")[0] for _, alone_err in alone]
    assert reasons[0] != reasons[1]
    assert f"stopped at {', '.join(reasons)} (" in err


def test_rows_that_only_pad_the_vocabulary_are_never_chosen(tmp_path, trained, output):
    loud = make_trained(tmp_path, trained.tokenizer)
    weight, padding = loud.model.output_head.weight, trained.tokenizer.vocab_size
    with torch.no_grad():
        # Of two opposite rows one has a positive logit, and a large one.
        weight[padding] = 100.0
        weight[padding + 1] = -100.0
        first = loud.save().model(torch.tensor([trained.tokenizer.encode("the cat")]))[0, -1]
    assert first.argmax() >= padding
    assert output(loud, "the cat", *GREEDY)[0] == loud.text_after("the cat")


@pytest.mark.parametrize(
    "shape", [{"tie_weights": True}, {"qk_norm": False, "num_kv_heads": 4}, {"dropout": 0.5}]
)
def test_the_shape_of_the_model_comes_from_the_checkpoint(tmp_path, trained, output, shape):
    other = make_trained(tmp_path, trained.tokenizer, **shape)
    assert output(other, "the cat", *GREEDY)[0] == other.text_after("the cat")


def test_a_character_tokenizer_comes_from_the_checkpoint_too(tmp_path, output):
    characters = make_trained(tmp_path, character_tokenizer([string.printable, "你好"]))
    assert output(characters, "cat 好", *GREEDY)[0] == characters.text_after("cat 好")


def test_text_is_the_same_without_the_cache(monkeypatch, trained, output):
    calls = calls_of_generate(monkeypatch)
    options = ("--device", "cpu", "--max_new_tokens", "70")
    cached, _ = output(trained, "the cat", *options)
    fresh, _ = output(trained, "the cat", *options, "--use_cache", "false")
    assert [call["use_cache"] for call in calls] == [True, False]
    assert cached == fresh


def test_the_seed_decides_what_is_drawn(trained, output):
    first, again, other = (output(trained, "a", "--seed", seed)[0] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_no_new_tokens_give_the_prompt_back(trained, output):
    assert output(trained, "the cat", "--max_new_tokens", "0")[0] == "the cat\n"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--temperature", "-1"], ModelConfigError, "temperature is -1.0"),
        (["--top_k", "0", "--top_p", "1.5"], ModelConfigError, "top_k is 0.*; top_p is 1.5"),
        (["--max_new_tokens", "-1"], ModelConfigError, "max_new_tokens is -1"),
        (["--temprature", "0"], CommandLineError, "temprature; did you mean temperature"),
        (["--max_new_tokens", "ten"], CommandLineError, "max_new_tokens"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_printed(
    trained, capsysbinary, options, error, message
):
    with pytest.raises(error, match=message):
        main([str(trained.path), "the cat", *options])
    assert capsysbinary.readouterr().out == b""


def test_a_character_that_the_tokenizer_does_not_know_is_named(tmp_path):
    characters = make_trained(tmp_path, character_tokenizer([string.printable]))
    with pytest.raises(CorpusError, match="does not know '\\\\u4f60'"):
        main([str(characters.path), "the 你"])


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, trained):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandLineError, match="device cuda, but there is no usable GPU"):
        main([str(trained.path), "the cat", "--device", "cuda"])


def test_a_text_that_cannot_be_written_is_a_mistake_in_one_line(monkeypatch, trained):
    said = "cannot be written: No space left on device"
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full))
        with pytest.raises(CommandLineError, match=said):
            main([str(trained.path), "the cat", *GREEDY])


def test_a_prompt_that_cannot_be_read_is_a_mistake_in_one_line(monkeypatch, trained, tmp_path):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where stdin is closed
    with pytest.raises(CommandLineError, match="stdin, which is closed"):
        main([str(trained.path), "-", *GREEDY])

    def read_a_folder():
        return os.read(folder, 1)

    folder = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=read_a_folder)))
    with pytest.raises(CommandLineError, match="from stdin: Is a directory"):
        main([str(trained.path), "-", *GREEDY])
    os.close(folder)


def test_a_text_without_a_place_to_go_is_a_mistake_in_one_line(monkeypatch, trained):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(CommandLineError, match="cannot be written: stdout is closed"):
        main([str(trained.path), "the cat", *GREEDY])


def test_a_checkpoint_argument_is_required():
    with pytest.raises(CommandLineError, match="required: checkpoint"):
        main(["--temperature", "0"])
    with pytest.raises(CommandLineError, match="checkpoint's name is empty"):
        main([""])


class WantsToRunCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["missing", "text", "empty", "truncated", "pickle", "foreign"])
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, trained, kind):
    path, marker = tmp_path / f"{kind}.pt", tmp_path / "code was run"
    whole = trained.path.read_bytes()
    if kind in ("text", "empty", "truncated"):
        path.write_bytes({"text": b"hello\n", "empty": b""}.get(kind, whole[: len(whole) // 2]))
    elif kind == "pickle":
        torch.save({"format_version": FORMAT_VERSION, "model": WantsToRunCode(marker)}, path)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match=path.name) as caught:
        main([str(path), "the cat"])
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_weight_that_is_not_what_was_saved_is_no_model_to_write_with(tmp_path, trained):
    path, data = tmp_path / "model.pt", bytearray(trained.path.read_bytes())
    weight = trained.model.output_head.weight.detach().numpy().tobytes()
    data[data.index(weight) + 4 * len(weight) // 8 + 3] ^= 0x80  # one sign
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged: .* not what was written"):
        main([str(path), "the cat"])


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path, trained):
    checkpoint = torch.load(trained.path, weights_only=True)
    del checkpoint["model"]["blocks.1.feed_forward.down.weight"]
    torch.save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.feed_forward\.down\.weight"):
        main([str(tmp_path / "model.pt"), "the cat"])


def test_a_checkpoint_that_does_not_say_the_models_shape_is_refused(tmp_path, trained):
    checkpoint = torch.load(trained.path, weights_only=True)
    del checkpoint["config"]["qk_norm"]
    torch.save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="does not say the model's qk_norm"):
        main([str(tmp_path / "model.pt"), "the cat"])


def start_script(*arguments: str | bytes | Path, **variables: str) -> subprocess.Popen:
    # Output is buffered, as it is where nobody asked for anything else.
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, str(script.__file__), *arguments],
        env=os.environ | usual | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_an_ascii_locale_changes_nothing(trained):
    prompt = "你好, größer 🎉"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start_script(trained.path, prompt.encode(), *GREEDY, **locale)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.decode()) == (0, trained.text_after(prompt)), err


def test_a_mistake_is_one_line_and_exit_status_two(tmp_path):
    process = start_script(tmp_path / "best.pt", "the cat")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == b""
    assert err.decode() == f"generate.py: checkpoint {tmp_path / 'best.pt'} does not exist\n"


def test_a_reader_that_has_enough_ends_it_quietly(trained):
    process = start_script(trained.path, "the cat", "--max_new_tokens", "100000")
    assert process.stdout is not None
    assert process.stdout.read(7) == b"the cat"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
