"""Files of options, looked at before they are parsed: what is wrong is told with their name."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, TextIO, get_args, get_type_hints

import yaml


class CommandLineError(ValueError):
    """An option that cannot be taken as given; the message says what to type instead."""


def without_empty_files(arguments: Sequence[str], sections: Sequence[type]) -> list[str]:
    """The arguments without a `--config` whose file holds no option, such as comments alone.

    Args:
        arguments: without the script's name.
        sections: dataclasses of the options.

    Raises:
        CommandLineError: a file that is no YAML of options, or has an option twice, or without a
            value that needs one.
    """
    left: list[str] = []
    waiting: Iterator[str] = iter(arguments)
    for argument in waiting:
        flag, equals, path = argument.partition("=")
        if flag != "--config":
            left.append(argument)
            continue
        path = path if equals else next(waiting, "")
        if not path:
            raise CommandLineError("option config needs a file")
        if _holds_options(path, sections):
            left += ["--config", path]
    return left


def _holds_options(path: str, sections: Sequence[type]) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            content = _load(file, path)
    except OSError as error:
        raise CommandLineError(f"config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandLineError(f"config {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        where = " ".join(str(error).replace(f'in "{path}", ', "at ").split())
        raise CommandLineError(f"config {path} is not YAML: {where}") from error
    except ValueError as error:  # a date that no calendar has
        raise CommandLineError(f"config {path} is not YAML: {error}") from error
    except RecursionError as error:
        raise CommandLineError(f"config {path} nests too deep") from error
    if content is None:
        return False
    if not isinstance(content, dict):
        raise CommandLineError(f"config {path} holds no options, each a line like `seed: 1`")
    kinds = {name: kind for section in sections for name, kind in get_type_hints(section).items()}
    names = {field.name for section in sections for field in fields(section)}
    for name, value in content.items():
        if value is None and name in names and NoneType not in get_args(kinds[name]):
            raise CommandLineError(f"option {name} has no value in {path}")
    is_known = names.issuperset(content)
    # The parser takes a file of nothing but nulls for something else.
    return not (is_known and all(value is None for value in content.values()))


def _load(file: TextIO, path: str) -> Any:
    """What yaml.safe_load gives, which takes the last of several values of one name in silence."""
    loader = yaml.SafeLoader(file)
    top = loader.get_single_node()
    if isinstance(top, yaml.MappingNode):
        names = [name.value for name, _ in top.value]
        for number, (node, _) in enumerate(top.value):
            if node.value in names[:number]:
                line = node.start_mark.line + 1
                raise CommandLineError(
                    f"config {path}: option {node.value} stands twice, again at line {line}"
                )
    return None if top is None else loader.construct_document(top)
