"""Options of every script, made from dataclasses, and the one line that answers a mistake.

jsonargparse turns dataclass fields into flags and YAML keys with checked types. What it does not
do stands here: the nearest right name for a misspelt one, presets between file and default, and
`run`, which decides who speaks when a script ends badly. A user's mistake is one line from one
rank and exit status 2; anything else is a fault: its traceback, its rank, and a hard exit, because
any clean-up that talks to other ranks could wait for one that is gone.
"""

import argparse
import contextlib
import difflib
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    set_parsing_settings,
)

from training.option_files import CommandLineError, without_empty_files
from training.termination import Terminated

# How long a rank keeps still when it met a mistake that rank 0 will report: leaving first would
# make the launcher end rank 0 before its line is out.
SECONDS_FOR_RANK_ZERO_TO_SPEAK = 10.0


# What other trainers call our options; by spelling alone a wrong one would be suggested.
NAMES_ELSEWHERE = {
    "lr": "lr_max",
    "learning_rate": "lr_max",
    "min_lr": "lr_min",
    "max_iters": "iterations",
    "max_steps": "iterations",
    "steps": "iterations",
    "warmup_steps": "warmup_iters",
    "grad_clip": "max_norm",
    "block_size": "max_seq_len",
    "n_ctx": "max_seq_len",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "d_model",
}

# How a switch may be spelt after its flag, as in YAML. Not YAML's yes and no: after a flag that
# stands alone, they could be a word that the script takes without one.
BOOLEANS = {"true": "true", "false": "false", "on": "true", "off": "false"}


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that keeps the lines of a script's docstring: they hold its exact commands."""


def parse_options(
    sections: Sequence[type],
    *,
    description: str,
    argv: Sequence[str] | None = None,
    positionals: Callable[[ArgumentParser], None] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Read flags over `--config` file over preset over defaults.

    Args:
        sections: dataclasses whose fields carry docstrings; each becomes a group of `--help`.
        description: what the script does, shown by `--help`.
        argv: arguments without the script's name; None: the process's own.
        positionals: adds arguments without dashes to the parser, for scripts that have them.
        presets: values by preset name; the option `preset` chooses one.

    Returns:
        Every option's value by name, with the types that the fields declare.

    Raises:
        CommandLineError: unknown option, wrong type, unreadable file; names the nearest option.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        description=description,
        formatter_class=_Help,
        allow_abbrev=False,
        exit_on_error=False,
    )
    if positionals is not None:
        positionals(parser)
    parser.add_argument("--config", action="config", help="YAML file of options; flags win over it")
    for section in sections:
        parser.add_class_arguments(section)
    given = sys.argv[1:] if argv is None else argv
    arguments = _spell_out(without_empty_files(given, sections), sections)
    names = [field.name for section in sections for field in fields(section)]
    try:
        with _help_from_rank_zero_alone():
            options = parser.parse_args(arguments)
            if presets is not None and options["preset"] is not None:
                parser.set_defaults(dict(_preset(presets, options["preset"])))
                options = parser.parse_args(arguments)
    except ArgumentError as error:
        raise CommandLineError(_explain(str(error), names)) from None
    except RecursionError:  # as of a YAML list that holds itself
        raise CommandLineError("the value of an option nests too deep, or without end") from None
    return {name: value for name, value in vars(options).items() if name != "config"}


def build(section: type, options: Mapping[str, Any]) -> Any:
    """Make one dataclass instance from the options that bear its fields' names."""
    return section(**{field.name: options[field.name] for field in fields(section)})


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Say which known name was probably meant: `; did you mean x?`, or nothing."""
    if NAMES_ELSEWHERE.get(name) in known:
        return f"; did you mean {NAMES_ELSEWHERE[name]}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def run(main: Callable[[], None], mistakes: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Run a script's `main` and leave with the right status, message and speaker.

    Args:
        main: the script.
        mistakes: exceptions that a user's mistake raises, beside CommandLineError.

    Exit status: 0 after a good end, 2 after a mistake, 1 after a fault, 130 after Ctrl-C, as shells
    count: 128 and the signal's number.
    """
    said_rank = os.environ.get("RANK", "0")
    # A rank that is no number is init_process_group's to refuse; until then speak as rank 0.
    rank = int(said_rank) if said_rank.isdecimal() else 0
    try:
        main()
    except KeyboardInterrupt:
        _leave(130, "interrupted" if rank == 0 else "")
    except Terminated as ended:
        _leave(128 + ended.number, str(ended) if rank == 0 else "")
    except Exception as error:
        if isinstance(error, (CommandLineError, *mistakes)):
            _leave(2, _one_line(error, rank))
        world_size = os.environ.get("WORLD_SIZE", "1")
        where = f"rank {rank} of {world_size} failed:\n" if world_size != "1" else ""
        _leave(1, where + traceback.format_exc().rstrip())
    # Not through the interpreter's teardown: there gloo's threads now and then abort a process
    # whose work was done ("terminate called without an active exception").
    _leave(0, "")


def _leave(status: int, message: str) -> NoReturn:
    """Speak and end this process at once, whatever threads and process groups are alive."""
    with contextlib.suppress(OSError, AttributeError):  # stdout may be full, or closed
        sys.stdout.flush()
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
    os._exit(status)


def _one_line(error: Exception, rank: int) -> str:
    message = " ".join(str(error).split())
    script = os.path.basename(sys.argv[0])
    if rank == 0:
        return f"{script}: {message}"
    time.sleep(SECONDS_FOR_RANK_ZERO_TO_SPEAK)
    return f"{script}: rank {rank}: {message}"


def _spell_out(arguments: Sequence[str], sections: Sequence[type]) -> list[str]:
    """Say `--flag` as `--flag=true` and `--files a b` as `--files=["a", "b"]`.

    The second of each is what jsonargparse takes for a bool and a list, the first what people
    type. A list that is given twice is added to.
    """
    kinds = {name: kind for section in sections for name, kind in get_type_hints(section).items()}
    spelled_out: list[str] = []
    lists_seen: set[str] = set()
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        kind = kinds.get(flag.removeprefix("--")) if flag.startswith("--") else None
        if kind is bool or bool in get_args(kind):
            words = {**BOOLEANS, **_further_words(kind)}
            follows = not equals and waiting and waiting[0].lower() in words
            value = waiting.pop(0) if follows else value if equals else "true"
            argument = f"{flag}={words.get(value.lower(), value)}"
        elif get_origin(kind) is list:
            listed = [value] if equals else list(itertools.takewhile(_is_value, waiting))
            # An ASCII locale hides other characters in surrogates, which YAML does not take.
            readable = [os.fsencode(word).decode("utf-8", "surrogateescape") for word in listed]
            if listed and not (listed[0].startswith("[") and listed[0].endswith("]")):
                argument = f"{flag}{'+' * (flag in lists_seen)}={json.dumps(readable)}"
                del waiting[: 0 if equals else len(listed)]
                lists_seen.add(flag)
        spelled_out.append(argument)
    return spelled_out


def _further_words(kind: Any) -> dict[str, str]:
    """What a switch may be beside on and off, such as auto."""
    literals = [part for part in get_args(kind) if get_origin(part) is Literal]
    return {word: word for literal in literals for word in get_args(literal)}


def _is_value(word: str) -> bool:
    return not word.startswith("-")


@contextlib.contextmanager
def _help_from_rank_zero_alone() -> Iterator[None]:
    if os.environ.get("RANK", "0") == "0":
        yield
    else:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


def _preset(presets: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    if name not in presets:
        known = list(presets)
        raise CommandLineError(
            f"unknown preset {name}{did_you_mean(name, known)} (presets: {', '.join(known)})"
        )
    return presets[name]


def _explain(message: str, names: Sequence[str]) -> str:
    """Turn the parser's message into one line in this project's words."""
    if match := re.search(r"unrecognized arguments: (.*)", message, re.DOTALL):
        first = match[1].strip().split(" ")[0]
        if not first.startswith("-"):
            return f"unexpected argument {first or '(empty)'}"
        return _unknown_option(first.lstrip("-").split("=")[0], names)
    if match := re.search(r"Option '([^']*)' is not accepted", message):
        return _unknown_option(match[1], names)
    if match := re.search(r'Parser key "([^"]*)":\s*(.*)', message, re.DOTALL):
        reason = _of_one_kind(match[2])
        reason = reason.replace("typing.", "").replace("<class '", "").replace("'>", "")
        if re.search(r"'on'.*Got value: (True|False)", reason, re.DOTALL):
            reason += ': to YAML, on and off are booleans, so write "on" and "off"'
        return f"option {match[1]}: {reason}"
    return message


def _of_one_kind(reason: str) -> str:
    """What was expected where several kinds are, in the words for one: a float or null."""
    given = re.search(r"Given value: (.*)", reason, re.DOTALL)
    kinds = re.findall(r"- (Expected .*?)\s*(?=\n\s*- |\n\s*Given|$)", reason, re.DOTALL)
    if given is None or not kinds:
        return reason
    words = [re.sub(r"^Expected (an? )?", "", kind).replace("NoneType", "null") for kind in kinds]
    return f"Expected a {' or '.join(words)}. Got value: {given[1].strip()}"


def _unknown_option(name: str, names: Sequence[str]) -> str:
    return f"unknown option {name}{did_you_mean(name, names)} (--help lists all)"
