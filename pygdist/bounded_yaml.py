"""YAML with bounds: how deep, how large and of which kinds a text is gets checked before anything is built of it.

Aliases let a short text stand for a huge one, and whoever copies what was built then takes hours. A key that is given
twice, of which YAML keeps the last, is most likely a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pygdist.errors import InputError

MOST_CHARACTERS = 1 << 20
MOST_VALUES = 100_000  # with those of aliases, each time that they are used
MOST_LEVELS = 50

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}


@dataclass
class _Size:
    """Values and levels of a part of a text."""

    values: int = 1
    levels: int = 0


@dataclass
class _Open(_Size):
    """A list or a mapping that is being read."""

    anchor: str | None = None
    keys: set[str] | None = None  # of a mapping
    awaits_key: bool = False


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        InputError: If it cannot be read, is not valid YAML, or is out of bounds; names the file, and the line and the
            column if known.
    """
    text = read_text(path)
    try:
        check_yaml(text, str(path))
        return yaml.safe_load(text)
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise InputError(f"{path}{place}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error


def read_text(path: Path) -> str:
    """Return the text of a file, if it is not too large; errors as :func:`read_yaml`."""
    try:
        if (size := path.stat().st_size) > 4 * MOST_CHARACTERS:  # bytes, up to four for a character
            raise InputError(f"{path}: {size:,} bytes, but at most {MOST_CHARACTERS:,} characters are read")
        return path.read_text(encoding="utf-8")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error


def check_yaml(text: str, place: str) -> None:
    """Raise if a text is out of bounds, or holds what no configuration needs.

    Raises:
        InputError: If the text is too long, too deep, or too large with its aliases; an alias stands for something that
            contains it; a key is a list, a mapping or an alias, or stands twice in a mapping; or a tag asks for an
            object of Python.
        yaml.YAMLError: If it is not YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{place}: {len(text):,} characters, but at most {MOST_CHARACTERS:,} are read")
    anchors: dict[str, _Size] = {}
    stack = [_Open()]
    for event in yaml.parse(text, Loader=LOADER):
        mark = event.start_mark
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        if isinstance(event, yaml.CollectionStartEvent):
            _check_tag(event, where)
            _check_key(stack[-1], None, where)
            keys = set[str]() if isinstance(event, yaml.MappingStartEvent) else None
            stack.append(_Open(anchor=event.anchor, keys=keys, awaits_key=keys is not None))
            _check_size(stack, _Size(), where)
        elif isinstance(event, yaml.ScalarEvent):
            _check_tag(event, where)
            _check_key(stack[-1], event.value, where)
            if event.anchor is not None:
                anchors[event.anchor] = _Size()
            _add(stack, _Size(), where)
        elif isinstance(event, yaml.AliasEvent):
            _check_key(stack[-1], None, where)
            if any(one.anchor == event.anchor for one in stack):
                raise InputError(f"{where}: alias '*{event.anchor}' stands for something that contains it")
            if event.anchor not in anchors:
                raise InputError(f"{where}: alias '*{event.anchor}' has no anchor '&{event.anchor}' before it")
            _add(stack, anchors[event.anchor], where)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = stack.pop()
            if done.anchor is not None:
                anchors[done.anchor] = _Size(done.values, done.levels)
            _add(stack, done, where)


def _add(stack: list[_Open], part: _Size, where: str) -> None:
    """Add a part that was read to the innermost list or mapping."""
    inner = stack[-1]
    inner.values += part.values
    inner.levels = max(inner.levels, part.levels + 1)
    if inner.keys is not None:
        inner.awaits_key = not inner.awaits_key
    _check_size(stack, part, where)


def _check_size(stack: list[_Open], part: _Size, where: str) -> None:
    if len(stack) - 1 + part.levels > MOST_LEVELS:
        raise InputError(f"{where}: nested more than {MOST_LEVELS} levels deep")
    if stack[-1].values > MOST_VALUES:
        raise InputError(f"{where}: more than {MOST_VALUES:,} values, counting those of aliases each time")


def _check_key(inner: _Open, key: str | None, where: str) -> None:
    if inner.keys is None or not inner.awaits_key:
        return
    if key is None:
        raise InputError(f"{where}: a list, a mapping or an alias is a key here; keys are names")
    if key in inner.keys and key != "<<":
        raise InputError(f"{where}: key '{key[:100]}' is given twice")
    inner.keys.add(key)


def _check_tag(event: Any, where: str) -> None:
    if event.tag not in (None, "!", *_TAGS):
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")
        raise InputError(f"{where}: tag '{tag[:100]}' is not understood; a class is named by class_path")
