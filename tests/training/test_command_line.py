"""Options come from dataclasses; a mistake is one line with the nearest right name."""

import os
import signal
from dataclasses import dataclass
from typing import Literal

import pytest

from training.command_line import CommandLineError, build, did_you_mean, parse_options, run
from training.termination import Terminated

PRESETS = {"large": {"width": 1024, "rate": 0.5}}


@dataclass(frozen=True)
class Section:
    """Options of the test"""

    width: int = 64
    """How wide."""
    rate: float = 0.1
    """How fast."""
    kind: Literal["round", "square"] = "round"
    """Which kind."""
    limit: int | None = None
    """How much; none: no limit."""
    preset: str | None = None
    """Named values."""
    is_loud: bool = False
    """Whether it is loud."""
    is_round: bool | Literal["auto"] = "auto"
    """Whether it is round."""


@dataclass(frozen=True)
class LoudSection:
    """Options of another test"""

    is_loud: bool = True
    """Whether it is loud."""


def parse(*argv: str) -> Section:
    options = parse_options([Section], description="A test.", argv=argv, presets=PRESETS)
    return build(Section, options)


def message_of(*argv: str) -> str:
    with pytest.raises(CommandLineError) as caught:
        parse(*argv)
    return str(caught.value)


def test_flags_win_over_file_over_preset_over_defaults(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("rate: 0.25\nlimit: 7\n")
    assert parse() == Section()
    assert parse("--preset", "large").width == 1024
    from_file = parse("--preset", "large", "--config", str(file))
    assert (from_file.width, from_file.rate, from_file.limit) == (1024, 0.25, 7)
    from_flag = parse("--preset", "large", "--config", str(file), "--rate", "0.75")
    assert (from_flag.rate, from_flag.limit) == (0.75, 7)


def test_a_preset_can_be_named_in_the_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("preset: large\nwidth: 3\n")
    section = parse("--config", str(file))
    assert (section.width, section.rate) == (3, 0.5)


def test_a_float_may_be_written_with_an_exponent_or_as_an_integer(tmp_path):
    assert parse("--rate", "1e-3").rate == 0.001
    assert parse("--rate", "1").rate == 1.0
    file = tmp_path / "options.yaml"
    file.write_text("rate: 1e-3\n")
    assert parse("--config", str(file)).rate == 0.001


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--is_loud"], True),
        (["--is_loud", "--width", "3"], True),
        (["--is_loud", "True"], True),
        (["--is_loud=false"], False),
        (["--is_loud", "FALSE"], False),
        (["--is_loud", "on"], True),
        (["--is_loud", "Off", "--width", "3"], False),
        (["--is_loud=ON"], True),
        (["--is_loud=off"], False),
        ([], False),
    ],
)
def test_a_switch_may_stand_alone_or_with_a_value(argv, expected):
    assert parse(*argv).is_loud is expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "auto"),
        (["--is_round"], True),
        (["--is_round", "--width", "3"], True),
        (["--is_round", "on"], True),
        (["--is_round=OFF"], False),
        (["--is_round", "auto"], "auto"),
        (["--is_round=Auto"], "auto"),
    ],
)
def test_a_switch_may_know_a_further_word(argv, expected):
    assert parse(*argv).is_round == expected


def test_a_switch_that_is_on_by_default_can_be_turned_off():
    options = parse_options([LoudSection], description="A test.", argv=["--is_loud", "off"])
    assert options["is_loud"] is False


@pytest.mark.parametrize(
    ("spelling", "expected"), [("on", True), ("Off", False), ("true", True), ("'off'", False)]
)
def test_the_file_takes_the_same_spellings_of_a_switch(tmp_path, spelling, expected):
    file = tmp_path / "options.yaml"
    file.write_text(f"is_loud: {spelling}\n")
    options = parse_options([LoudSection], description="A test.", argv=["--config", str(file)])
    assert options["is_loud"] is expected


@pytest.mark.parametrize("argv", [["--widht", "3"], ["--widht=3"]])
def test_a_misspelt_flag_is_answered_with_the_nearest_name(argv):
    assert "unknown option widht; did you mean width?" in message_of(*argv)


def test_a_misspelt_key_in_the_file_is_answered_with_the_nearest_name(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("widht: 3\n")
    assert "unknown option widht; did you mean width?" in message_of("--config", str(file))


def test_a_misspelt_preset_is_answered_with_the_nearest_name():
    assert "unknown preset larg; did you mean large?" in message_of("--preset", "larg")


def test_a_flag_is_not_taken_by_its_first_letters():
    assert "unknown option wid" in message_of("--wid", "3")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--width", "wide"], ["width", "int", "wide"]),
        (["--width", "2.5"], ["width", "int", "2.5"]),
        (["--rate", "1e-3x"], ["rate", "float", "1e-3x"]),
        (["--kind", "oval"], ["kind", "round", "square", "oval"]),
        (["--is_loud=maybe"], ["is_loud", "bool", "maybe"]),
        (["stray"], ["stray"]),
        (["--config", "no-such-file.yaml"], ["no-such-file.yaml"]),
    ],
)
def test_a_wrong_value_is_named_with_its_option(argv, parts):
    message = message_of(*argv)
    assert all(part in message for part in parts), message


def test_a_name_that_other_trainers_use_leads_to_ours():
    assert did_you_mean("lr", ["lr_min", "lr_max"]) == "; did you mean lr_max?"
    assert did_you_mean("max_iters", ["decay_iters", "iterations"]) == "; did you mean iterations?"
    assert did_you_mean("lr", ["width"]) == ""


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"width: 3\nkind:\n", ["option kind has no value in", "file.yaml"]),
        (b"\xff\xfe", ["file.yaml is not UTF-8 text"]),
        (b"width: [3\n", ["file.yaml is not YAML", "line 1"]),
        (b"- width\n", ["file.yaml holds no options"]),
        (
            b"width: 3\nrate: 1\nwidth: 4\n",
            ["file.yaml: option width stands twice, again at line 3"],
        ),
        (b"[" * 3000, ["file.yaml nests too deep"]),
        (b"width: 2024-13-45\n", ["file.yaml is not YAML: month must be in 1..12"]),
        (b"other: &itself [*itself]\n", ["nests too deep, or without end"]),
    ],
)
def test_a_file_that_holds_no_options_is_named_with_the_reason(tmp_path, content, parts):
    file = tmp_path / "file.yaml"
    file.write_bytes(content)
    for argv in (["--config", str(file)], [f"--config={file}"]):
        message = message_of(*argv)
        assert all(part in message for part in parts), message


@pytest.mark.parametrize("content", ["", "# width: 3\n", "limit:\n", "limit: null\npreset: ~\n"])
def test_a_file_without_a_value_changes_nothing(tmp_path, content):
    file = tmp_path / "file.yaml"
    file.write_text(content)
    assert parse("--config", str(file), "--width", "5").width == 5
    assert parse("--width", "5", f"--config={file}") == parse("--width", "5")


def test_no_name_is_guessed_for_something_far_off():
    assert did_you_mean("zzzz", ["width", "rate"]) == ""


@pytest.mark.parametrize("rank", ["abc", ""])
def test_a_rank_that_is_no_number_does_not_hide_the_mistake(monkeypatch, capsys, rank):
    def leave(code):
        raise SystemExit(code)

    def mistaken():
        raise CommandLineError("what is wrong")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        run(mistaken)
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(": what is wrong\n")


def test_a_signal_ends_it_with_one_line_and_the_status_that_shells_give_it(monkeypatch, capsys):
    def leave(code):
        raise SystemExit(code)

    def signalled():
        raise Terminated(signal.SIGTERM)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        run(signalled)
    assert left.value.code == 143
    assert capsys.readouterr().err == "ended by SIGTERM\n"


def test_help_keeps_the_lines_of_the_description(capsys):
    text = "A test.\n\n    first command\n    second"
    with pytest.raises(SystemExit):
        parse_options([Section], description=text, argv=["-h"])
    assert "\n    first command\n    second\n" in capsys.readouterr().out


def test_help_lists_every_option_with_its_reason(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for part in ("Options of the test", "--width", "How wide.", "--limit", "default: 64"):
        assert part in text
