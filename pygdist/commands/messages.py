"""Errors of the command line on one line: the name of the option, and what is wrong with its value.

jsonargparse describes a wrong value by the tree of types that it tried, over ten lines or more. :func:`shorten` keeps
the path to the option and the innermost messages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from jsonargparse import set_loader, set_parsing_settings
from typing_extensions import override

from pygdist.bounded_yaml import LOADER, check_yaml, read_text, read_yaml
from pygdist.errors import InputError, did_you_mean

_LONGEST_PATH = 4000  # of Linux
_UNKNOWN = re.compile(r"^(?:unknown option |option '(?=\S+' is not accepted$))(--)?([\w.-]+)")
_KEY = re.compile(r'^Parser key "([^"]+)":\s*(.*)$')
_NESTED = re.compile(r"^--(\S+): --(\S+?)(:| is required)")
_EXPECTED = re.compile(r"^Expected an? (.+?)(?:\. Got value: (.*))?$")
_GIVEN = re.compile(r"^Given value: (.*)$")
_OF_A_NAME = re.compile(r"^NestedArg\(key='(.*)', val='(.*)'\)$")  # as if a word had options
_NO_PATH = re.compile(r"^Expected a (?:path but (\S+) either not accessible.*|dot import path string: (\S+))$")
# headings of the tree, and lines that repeat what the lines below or beside them say
_HEADINGS = re.compile(
    r"^(Does not validate against|Subtypes:|Errors:|Given value type:|Not a valid subclass of|Subclass types expect"
    r"|Problem with given class_path|a class path \(str\)|a dict with|Import path \S+ does not correspond to a subclass"
    r" of ReduceLROnPlateau)"
)
_TOP = (
    (re.compile(r"^unrecognized arguments: (.*)$"), r"unknown option \1"),
    (re.compile(r"^Subcommand '\w+' does not accept option '(.*)'$"), r"unknown option \1"),
    (
        re.compile(r"^the following arguments are required: (?:-\w/--)?(?:(?:fit|validate|test|predict)\.)?(\S+)$"),
        r"--\1 is required",
    ),
    (re.compile(r"^argument (?:-\w/)?(--\S+): "), r"\1: "),
)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which reports a mistake in one line and without the usage text."""

    @override
    def error(self, message: str) -> NoReturn:
        # positional arguments have no dashes, which shorten() would add
        text = re.sub(r"^the following arguments are required: (\w+)$", r"\1 is missing", message)
        raise InputError(f"{shorten(text)}; see {self.prog} --help")


class Parser(jsonargparse.ArgumentParser):
    """jsonargparse's parser, which takes options from signatures; it reports mistakes likewise."""

    @override
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **options: Any
    ) -> jsonargparse.Namespace:
        for option, value in options_of(args or []):
            check_value(option, value)
        try:
            return super().parse_args(args, *rest, **options)
        except (InputError, argparse.ArgumentError):
            raise
        except Exception as error:  # jsonargparse fails in many ways on values of odd types
            raise InputError(f"the options cannot be read: {described(error)}") from error

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = shorten(message)
        if unknown := _UNKNOWN.match(text):
            dashes = unknown[1] or ""  # a key of a file has none
            text += did_you_mean(f"{dashes}{unknown[2]}", (dashes + one.lstrip("-") for one in _options_in(self)))
        raise InputError(text) from ex


def _options_in(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the names of a parser's options, and of those of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inside in action._name_parser_map.values():
                yield from _options_in(inside)


def check_value(option: str, value: str) -> None:
    """Refuse a value of an option, or the file that it names, if it is YAML out of bounds.

    Raises:
        InputError: As :func:`~pygdist.bounded_yaml.check_yaml`.
    """
    name, text = option, value
    _refuse_pipe(option, value)
    if option in ("-c", "--config") or value.endswith((".yaml", ".yml")):
        path = Path(value)
        if "\0" in value or len(value) > _LONGEST_PATH or not path.is_file():
            return
        name, text = value, read_text(path)
        lines = text.splitlines() if option in ("-c", "--config") else ["an option of another kind"]
        if not any(line.strip() and not line.lstrip().startswith("#") for line in lines):
            raise InputError(f"{value}: is empty, expected options as YAML")
    elif not value.lstrip().startswith(("[", "{", "-", "!", "&", "*")) and "\n" not in value:
        return
    try:
        check_yaml(text, name)
    except yaml.YAMLError:
        return  # jsonargparse explains
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.ScalarEvent):
            _refuse_pipe(name, event.value)


def _refuse_pipe(option: str, value: str) -> None:
    """Refuse the name of a pipe, which jsonargparse would open and wait for; the shell's, as in ``<(...)``, will do."""
    is_pipe = False
    with contextlib.suppress(OSError, ValueError):  # no name of a file
        is_pipe = stat.S_ISFIFO(os.stat(value).st_mode)
    if is_pipe and not value.startswith(("/dev/fd/", "/proc/")):
        raise InputError(f"{option}: {value} is a pipe, which may never end; name a file")


def _load_bounded(text: str) -> Any:
    """Load YAML for jsonargparse, which also reads files that files name."""
    try:
        check_yaml(text, "YAML")
    except InputError as error:
        raise yaml.YAMLError(str(error)) from error
    return _load_yaml(text)


_load_yaml = jsonargparse.get_loader("yaml")
set_loader("yaml", _load_bounded, (yaml.YAMLError,))
# a value of any type is no object: else {class_path: os.system, ...} would run among the arguments of a dataset
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def described(error: BaseException) -> str:
    """Return the type, the message and the place of an error, on one line: for errors of other people's code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return one_line(f"{type(error).__name__}: {error}", 500) + place


def refused_by(error: BaseException) -> str:
    """Return the outermost call of a class's ``__init__`` in which an error came up, with its arguments, or nothing."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, made = frame.f_code, frame.f_locals.get("self")
        if code.co_name == "__init__" and not frame.f_globals.get("__name__", "").startswith(
            ("jsonargparse", "pygdist")
        ):
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            values = ", ".join(f"{name}={repr(frame.f_locals[name])[:40]}" for name in names if name in frame.f_locals)
            return one_line(f"{type(made).__name__}({values})", 300)
    return ""


def one_line(message: str, limit: int = 600) -> str:
    """Return the message without line breaks, cut to ``limit`` characters."""
    text = " ".join(message.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten(message: str) -> str:
    r"""Return the helpful part of an error message of jsonargparse or argparse, on one line.

    Example:
        >>> shorten('Parser key "model.lr":\n  Expected a <class \'float\'>. Got value: fast')
        "--model.lr: expected float, got 'fast'"
    """
    option = got = missing = ""
    reasons: list[str] = []
    types: list[str] = []
    for line in message.splitlines():
        if key := _KEY.match(line):
            option, line = f"--{key[1]}: ", key[2]
        text = line.strip().removeprefix("- ")
        if no_path := _NO_PATH.match(text):
            missing = no_path[1] or no_path[2]
        elif value := _GIVEN.match(text):
            got = got or value[1]
        elif expected := _EXPECTED.match(text):
            types += [name for name in _names(expected[1]) if name not in types]
            got = got or expected[2] or ""
        elif text and not _HEADINGS.match(text) and text not in reasons:
            reasons.append(text)
    if not reasons and (of_name := _OF_A_NAME.match(got)):
        name = option.removesuffix(": ")
        reasons = [f"a name takes no options; give the class, as in {name}=CLASS {name}.{of_name[1]}={of_name[2]}"]
    # options of a class are parsed by a parser of their own, whose message passes through here first
    return one_line(_NESTED.sub(r"--\1.\2\3", option + _explain(reasons, types, got, missing)))


def _explain(reasons: list[str], types: list[str], got: str, missing: str) -> str:
    if reasons:
        text = "; ".join(reasons)
        for pattern, replacement in _TOP:
            text = pattern.sub(replacement, text)
        return text[0].lower() + text[1:] if text.split()[0].rstrip(":")[1:].islower() else text  # no name of a class
    if missing and not types:
        return f"there is no class '{missing}' that fits here; check the spelling, or give its full path"
    if not types:
        return f"{got!r} cannot be used here" if got else "cannot be set in a file or on the command line"
    expected = f"one of {', '.join(types)}" if len(types) > 2 else " or ".join(types)
    return f"expected {expected}, got {got!r}"


def _names(expected: str) -> list[str]:
    """Return readable names of the expected types, without ``None``: int for ``<class 'int'>``, a Literal's values."""
    if literal := re.match(r"^typing\.Literal\[(.*)\]$", expected):
        return literal[1].split(", ")
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>", r"\1", expected)
    return [] if name == "NoneType" else [name]


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each option, written as ``--name=value`` or as ``--name value``."""
    for option, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        yield name, value if equals else following


def last_value(arguments: list[str], *names: str) -> Any:
    """Return the last value of an option (given by the parts of its name) on the command line or in its YAML files."""
    result: Any = None
    for option, value in options_of(arguments):
        if option == f"--{'.'.join(names)}":
            result = value
        elif option in ("--config", "-c") and Path(value).is_file():
            content = read_yaml(Path(value))
            for name in names:
                content = content.get(name) if isinstance(content, dict) else None
            result = result if content is None else content
    return result
