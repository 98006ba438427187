"""Continue texts with a trained model; all that it needs is in the checkpoint.

    python generate.py runs/default/checkpoints/best.pt "def main("
    python generate.py best.pt "def main(" "class " --max_new_tokens 100 --temperature 0
    python generate.py best.pt - --top_k 50 --top_p 0.95 --seed 7 < prompt.txt
    python generate.py best.pt                                     # a fresh document
    python generate.py best.pt --device cpu -- "--a prompt with dashes"

On stdout stands each prompt with its continuation and a line end, UTF-8 in every locale; a line of
dashes is between two texts. What is to be said about them goes to stderr.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from jsonargparse import ArgumentParser

from data.errors import CorpusError
from data.tokenizer import StreamingDecoder, Tokenizer
from dist.process_group import Device
from model.config import ModelConfig, ModelConfigError
from model.sampling import SamplingOptions, generate, window_start
from model.transformer import Transformer
from training.checkpoint import load_weights
from training.checkpoint_file import CheckpointError, load_checkpoint, verify
from training.command_line import BOOLEANS, CommandLineError, build, parse_options, run

SEPARATOR = "-" * 80 + "\n"


@dataclass(frozen=True)
class GenerateOptions:
    """Generation"""

    max_new_tokens: int = 256
    """Tokens to add to each prompt at most."""
    seed: int = 0
    """Fixes what is drawn."""
    ignore_end_of_text: bool = False
    """Go on past the end of the text, into another one."""
    device: Device = "auto"
    """Where to compute; auto: the GPU, if there is one."""
    use_cache: bool = True
    """Keep keys and values of earlier tokens; false computes all anew, for the same text."""


def main(argv: Sequence[str] | None = None) -> None:
    """Options, model, prompts, generation, and how it ended."""
    options = parse_options(
        (SamplingOptions, GenerateOptions),
        description=__doc__ or "",
        argv=_options_first(sys.argv[1:] if argv is None else argv),
        positionals=_add_positionals,
    )
    sampling, settings = build(SamplingOptions, options), build(GenerateOptions, options)
    model, tokenizer = _load_model(options["checkpoint"], _device(settings.device))
    prompts = [_prompt_text(argument) for argument in options["prompts"] or [""]]
    prompts, first_ids = _hand_over_last_space(prompts, tokenizer, settings.max_new_tokens)
    # Nothing to go on from is where documents begin: after the end of another.
    rows = [tokenizer.encode(prompt) or [tokenizer.end_of_text_id] for prompt in prompts]
    started = time.perf_counter()
    steps = generate(
        model,
        rows,
        max_new_tokens=settings.max_new_tokens,
        options=sampling,
        vocab_size=tokenizer.vocab_size,
        stop_id=None if settings.ignore_end_of_text else tokenizer.end_of_text_id,
        first_ids=first_ids,
        seed=settings.seed,
        use_cache=settings.use_cache,
    )
    _warn_of_long_prompts(rows, model.config.max_seq_len)
    counts = _write_texts(prompts, steps, tokenizer)
    _say(_ending(counts, settings.max_new_tokens, time.perf_counter() - started))


def _load_model(path: str, device: torch.device) -> tuple[Transformer, Tokenizer]:
    if not path:
        raise CommandLineError("the checkpoint's name is empty: name a .pt file")
    verify(Path(path))
    checkpoint = load_checkpoint(path)
    tokenizer = Tokenizer.from_json(checkpoint["tokenizer"])
    config = checkpoint["config"]
    if missing := [field.name for field in fields(ModelConfig) if field.name not in config]:
        raise CheckpointError(f"{path} does not say the model's {', '.join(missing)}")
    model = Transformer(build(ModelConfig, config).resolve(tokenizer.vocab_size))
    load_weights(checkpoint, model)
    return model.to(device).eval(), tokenizer


def _hand_over_last_space(
    prompts: Sequence[str], tokenizer: Tokenizer, max_new_tokens: int
) -> tuple[list[str], list[list[int] | None]]:
    """Leave a prompt's last space to the first new token, which must then begin with it.

    In byte-level vocabularies the space before a word belongs to the word's token. After a space
    that is a token by itself the model has hardly ever seen a word follow.
    """
    with_space = tokenizer.ids_that_begin_with_a_space() if max_new_tokens else []
    ends_so = [prompt.endswith(" ") and bool(with_space) for prompt in prompts]
    shorter = [p[:-1] if ends else p for p, ends in zip(prompts, ends_so, strict=True)]
    return shorter, [with_space if ends else None for ends in ends_so]


def _write_texts(
    prompts: Sequence[str], steps: Iterable[Sequence[int | None]], tokenizer: Tokenizer
) -> list[int]:
    """Write the first text as it comes and the others whole after it; count their new tokens."""
    decoders = [StreamingDecoder(tokenizer) for _ in prompts]
    counts = [0 for _ in prompts]
    held_back = ["", *(SEPARATOR + prompt for prompt in prompts[1:])]
    _write(prompts[0])
    for step in steps:
        for row, token in enumerate(step):
            if token is not None:
                held_back[row] += decoders[row].push(token)
                counts[row] += 1
        _write(held_back[0])
        held_back[0] = ""
    for text, decoder in zip(held_back, decoders, strict=True):
        _write(text + decoder.flush() + "\n")
    return counts


def _write(text: str) -> None:
    if sys.stdout is None:
        raise CommandLineError("the text cannot be written: stdout is closed")
    try:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The reader has enough, as `head` does. What is left to flush at exit must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        raise CommandLineError(f"the text cannot be written: {error.strerror}") from None


def _options_first(arguments: Sequence[str]) -> list[str]:
    """Bring the prompts together, wherever they stand: argparse takes them from one place only."""
    switches = {f"--{field.name}" for field in fields(GenerateOptions) if field.type is bool}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options: list[str] = []
    others: list[str] = []
    for before, word in zip(["", *arguments], arguments[:end], strict=False):
        takes_a_word = before.startswith("--") and "=" not in before and before not in switches
        is_value = takes_a_word or (before in switches and word in BOOLEANS)
        (options if is_value or word.startswith("--") or word == "-h" else others).append(word)
    others += arguments[end + 1 :]
    return [*options, "--", *others] if others else options


def _add_positionals(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a .pt file that train_ddp.py wrote")
    parser.add_argument(
        "prompts", nargs="*", default=[], help="texts to continue; -: one text from stdin"
    )


def _prompt_text(argument: str) -> str:
    """The prompt that an argument stands for, UTF-8 even where the locale says otherwise."""
    if argument == "-" and sys.stdin is None:
        raise CommandLineError("the prompt - is read from stdin, which is closed")
    # An ASCII locale hides the bytes of other characters in surrogates.
    hidden = argument.encode("utf-8", "surrogateescape")
    try:
        return (sys.stdin.buffer.read() if argument == "-" else hidden).decode("utf-8")
    except OSError as error:  # stdin may be a folder
        raise CommandLineError(f"the prompt cannot be read from stdin: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandLineError(f"a prompt is not UTF-8: byte {error.start} is wrong") from None


def _device(name: Device) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise CommandLineError("device cuda, but there is no usable GPU here: use device cpu")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _warn_of_long_prompts(rows: Sequence[Sequence[int]], max_seq_len: int) -> None:
    for number, row in enumerate(rows, start=1):
        if start := window_start(len(row), max_seq_len):
            _say(
                f"prompt {number} has {len(row)} tokens, more than the context of {max_seq_len}: "
                f"the model sees its last {len(row) - start}"
            )


def _ending(counts: Sequence[int], max_new_tokens: int, seconds: float) -> str:
    reasons = ["max_new_tokens" if n == max_new_tokens else "the end of the text" for n in counts]
    endings = [f"{reason} after {n} tokens" for reason, n in zip(reasons, counts, strict=True)]
    return f"stopped at {', '.join(endings)} ({sum(counts) / seconds:.1f} tokens/s)"


def _say(message: str) -> None:
    print(f"generate.py: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main, (CheckpointError, CorpusError, ModelConfigError))
