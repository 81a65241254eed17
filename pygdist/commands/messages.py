"""What the command line says when an option is wrong: one line, with the option's name and the part that matters.

jsonargparse describes a wrong value by the tree of types that it tried, over ten lines or more. :func:`shorten` keeps
the path to the option and the innermost complaints.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml
from typing_extensions import override

from pygdist.errors import InputError

__all__ = ["ArgumentParser", "check_yaml", "one_line", "options_of", "shorten"]

_KEY = re.compile(r'^Parser key "([^"]+)":\s*(.*)$')
_NESTED = re.compile(r"^--(\S+): --(\S+?)(:| is required)")
_EXPECTED = re.compile(r"^Expected an? (.+?)(?:\. Got value: (.*))?$")
_GIVEN = re.compile(r"^Given value: (.*)$")
_NO_PATH = re.compile(
    r"^(?:Expected a path but (\S+) either not accessible.*|Expected a dot import path string: (\S+))$"
)
# headings of the tree, and what follows from the lines below or beside them
_HEADINGS = re.compile(
    r"^(Does not validate against|Subtypes:|Errors:|Given value type:|Not a valid subclass of|Subclass types expect"
    r"|Problem with given class_path|a class path \(str\)|a dict with|Import path \S+ does not correspond to a subclass"
    r" of ReduceLROnPlateau)"
)
_TOP = (
    (re.compile(r"^unrecognized arguments: (.*)$"), r"unknown option \1"),
    (re.compile(r"^Subcommand '\w+' does not accept option '(.*)'$"), r"unknown option \1"),
    (
        re.compile(r"^the following arguments are required: (?:(?:fit|validate|test|predict)\.)?(\S+)$"),
        r"--\1 is required",
    ),
    (re.compile(r"^argument (?:-\w/)?(--\S+): "), r"\1: "),
)


class ArgumentParser(argparse.ArgumentParser):
    """argparse without the usage text in front of its complaint."""

    @override
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{shorten(message)}; see {self.prog} --help")


def one_line(message: str, limit: int = 600) -> str:
    """The message without line breaks, cut to ``limit`` characters."""
    text = " ".join(message.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten(message: str) -> str:
    r"""The part of a jsonargparse (or argparse) complaint that helps, on one line.

    Example:
        >>> shorten('Parser key "model.lr":\n  Expected a <class \'float\'>. Got value: fast')
        "--model.lr: expected float, got 'fast'"
    """
    option = given = missing = ""
    found: list[str] = []
    types: list[str] = []
    for line in message.splitlines():
        if key := _KEY.match(line):
            option, line = f"--{key[1]}: ", key[2]
        text = line.strip().removeprefix("- ")
        if no_path := _NO_PATH.match(text):
            missing = no_path[1] or no_path[2]
        elif value := _GIVEN.match(text):
            given = given or value[1]
        elif expected := _EXPECTED.match(text):
            types += [name for name in _names(expected[1]) if name not in types]
            given = given or expected[2] or ""
        elif text and not _HEADINGS.match(text) and text not in found:
            found.append(text)
    # the option of a class is told by a parser of its own, and its complaint comes through here first
    return one_line(_NESTED.sub(r"--\1.\2\3", option + _say(found, types, given, missing)))


def _say(found: list[str], types: list[str], given: str, missing: str) -> str:
    if found:
        text = "; ".join(found)
        for pattern, replacement in _TOP:
            text = pattern.sub(replacement, text)
        return text[0].lower() + text[1:] if text[1:2].islower() else text
    if missing and not types:
        return f"there is no class '{missing}' that fits here; check the spelling, or give its full path"
    if not types:
        return f"cannot be read from {given!r}" if given else "cannot be given in a file or on the command line"
    expected = f"one of {', '.join(types)}" if len(types) > 2 else " or ".join(types)
    return f"expected {expected}, got {given!r}"


def _names(expected: str) -> list[str]:
    """Readable names of what was expected, ``None`` left out: ``<class 'int'>`` is int, a Literal its values."""
    if literal := re.match(r"^typing\.Literal\[(.*)\]$", expected):
        return literal[1].split(", ")
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>", r"\1", expected)
    return [] if name == "NoneType" else [name]


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument as an option and its value, whether given as ``--name=value`` or as ``--name value``."""
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        yield name, value if equals else following


def check_yaml(arguments: Sequence[str]) -> None:
    """Name the file, line and column of a mistake in the syntax of a ``--config`` file.

    Raises:
        InputError: If one cannot be read as YAML.
    """
    for name, value in options_of(arguments):
        path = Path(value)
        if name not in ("--config", "-c") or not path.is_file():
            continue
        try:
            yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            raise InputError(f"{path}{place}: not valid YAML: {error.problem}") from error
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise InputError(f"{path}: not valid YAML: {error}") from error
