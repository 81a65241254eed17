"""Pages of the command line for the documentation, written from the parsers: no option is described by hand.

As a Sphinx extension this writes ``reference/command-line/`` when a build begins. :func:`write` works without Sphinx.
"""

from __future__ import annotations

import argparse
import importlib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from html.entities import html5
from pathlib import Path
from typing import Any

from pygdist.commands.messages import Parser
from pygdist.commands.named_classes import PLACES, Place
from pygdist.commands.short_help import default_of
from pygdist.commands.train import PURPOSES, TASKS, training_parser

#: Commands with a page of their own, in the order of ``pygdist --help``.
COMMANDS = ("generate", "partition", "check", "info", "export", "doctor", "verify", "report")
TRAINING = ("fit", "validate", "test", "predict")
_GROUPS = {
    "": "Run",
    "model": "Model and backend",
    "data": "Graph",
    "trainer": "Trainer",
    "optimizer": "Optimizer",
    "lr_scheduler": "Learning rate",
    "checkpoint": "Checkpoints",
    "exchange": "Figures of exchanges",
    "predictions": "Predictions",
}
_PAGE = "reference/command-line"


def write(folder: Path) -> None:
    """Write one page for each command, and ``index.md``, to a folder.

    Args:
        folder: ``docs/reference/command-line``. It is made if it is missing; other files in it stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"training": _training_page(), **{name: _page(name) for name in COMMANDS}}
    pages["classes"] = _classes_page()
    pages["index"] = _index_page()
    for name, lines in pages.items():
        text = "\n".join(lines).rstrip() + "\n"
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # else Sphinx would read all again
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Write the pages when Sphinx begins to build."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / _PAGE))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _index_page() -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "Every option of every command, written from the parsers. `pygdist COMMAND --help` shows the same texts."
    yield "For `fit`, `validate`, `test` and `predict`, `--help` shows the options that are used most, and `--help-all`"
    yield "all options."
    yield ""
    yield "```{toctree}"
    yield ":maxdepth: 1"
    yield ""
    yield from ("training", "classes", *COMMANDS)
    yield "```"


def _training_page() -> Iterator[str]:
    yield "# pygdist fit, validate, test, predict"
    yield ""
    parsers = {(command, task): training_parser(command, task) for command in TRAINING for task in TASKS}
    for command in TRAINING:
        yield f"- `pygdist {command}`: {marked_up(PURPOSES[command])}"
    yield ""
    yield "All four commands take the options on this page unless an option says otherwise."
    yield ""
    groups: dict[str, dict[str, argparse.Action]] = {name: {} for name in _GROUPS}
    takers: dict[str, list[tuple[str, str]]] = {}
    defaults: dict[str, dict[str, str]] = {}
    for which, parser in parsers.items():
        for action in options_of(parser):
            groups[_group_of(action.dest)].setdefault(action.dest, action)
            takers.setdefault(action.dest, []).append(which)
            defaults.setdefault(action.dest, {}).setdefault(which[1], default_of(action))
    for root, actions in groups.items():
        yield f"## {_GROUPS[root]}"
        yield ""
        for dest, action in actions.items():
            yield from _entry(action, _takers(takers[dest]), _default_by_task(defaults[dest]))
        yield ""


def _default_by_task(defaults: Mapping[str, str]) -> str:
    """Return the first task's default as Markdown, and the defaults of other tasks where these differ."""
    first, *_ = defaults.values()
    others: dict[str, list[str]] = {}
    for task, default in defaults.items():
        if default != first:
            others.setdefault(default, []).append(f"`--task={task}`")
    notes = [f"`{default or None}` with {' or '.join(tasks)}" for default, tasks in others.items()]
    return ", ".join([f"default `{first or None}`", *notes]) if first or notes else ""


def _group_of(dest: str) -> str:
    root, dot, _ = dest.partition(".")
    return root if dot or root in ("optimizer", "lr_scheduler") else ""


def _takers(which: Iterable[tuple[str, str]]) -> str:
    """Return a note on the commands and tasks that have an option; nothing if all have it."""
    commands, tasks = (list(dict.fromkeys(one)) for one in zip(*which, strict=True))
    notes = []
    if len(commands) < len(TRAINING):
        notes.append(f"Only for {' and '.join(f'`{one}`' for one in commands)}.")
    if len(tasks) < len(TASKS):
        notes.append(f"Only with {' or '.join(f'`--task={one}`' for one in tasks)}.")
    return " ".join(notes)


def _classes_page() -> Iterator[str]:
    yield "# Options of backends, partitioners and strategies"
    yield ""
    yield "A class that is given by name takes options, such as"
    yield "`--model.backend=hybrid --model.backend.cache_ratio=0.3`."
    yield ""
    for place in PLACES:
        yield f"## `--{place.option}`"
        yield ""
        shortest: dict[type, str] = {}  # names of a class: the others differ from the shortest one by their presets
        for name in sorted(_own_names(place), key=len):
            shortest.setdefault(place.class_of(name), name)
        for name in _own_names(place):
            yield f"### {place.kind} `{name}`"
            yield ""
            yield from _options_of_name(place, name, shortest[place.class_of(name)])
            yield ""


def _options_of_name(place: Place, name: str, shortest: str) -> Iterator[str]:
    """Yield the options of a name with its presets as defaults; only those that differ from the ``shortest`` name's."""
    actions = _preset_options(place, name)
    if name != shortest:
        usual = {action.dest: action.default for action in _preset_options(place, shortest)}
        actions = [action for action in actions if action.default != usual[action.dest]]
        yield f"The options of {place.kind} `{shortest}`. These have other defaults:"
        yield ""
    yield from [line for action in actions for line in _entry(action)] or ["No options."]


def _preset_options(place: Place, name: str) -> list[argparse.Action]:
    parser = Parser()
    parser.add_class_arguments(place.class_of(name), place.option, fail_untyped=False)
    actions = options_of(parser)
    presets = {f"{place.option}.{option}": value for option, value in place.presets(name).items()}
    for action in actions:
        action.default = presets.get(action.dest, action.default)
    return actions


def _own_names(place: Place) -> list[str]:
    """Return the names of pygdist's own classes: not of those that happen to be installed here."""
    return [name for name in place.names() if place.class_of(name).__module__.startswith("pygdist.")]


def _page(command: str) -> Iterator[str]:
    parser = importlib.import_module(f"pygdist.commands.{command}").parser()
    yield f"# pygdist {command}"
    yield ""
    yield marked_up(parser.description or "")
    yield ""
    for action in options_of(parser):
        yield from _entry(action)


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser, without those that show help."""
    return [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and not any(option.endswith(".help") for option in action.option_strings)
        and "--help" not in action.option_strings
        and type(action).__name__ != "_ActionConfigLoad"  # --trainer CONFIG
    ]


def _entry(action: argparse.Action, note: str = "", default: str | None = None) -> Iterator[str]:
    """Yield the lines of one option: name, type, default (the action's, unless it is given) and text."""
    name = ", ".join(f"`{option}`" for option in action.option_strings if not option.endswith("+"))
    facts = [f"`{type_}`" if (type_ := type_of(action)) else ""]
    facts += ["required" if action.required else ""]
    value = default_of(action)
    facts += [default if default is not None else f"default `{value}`" if value else ""]
    about = ", ".join(filter(None, facts))
    text = " ".join(filter(None, [sentence(action.help or ""), note]))
    yield f"- {name or f'`{action.dest}`'}{f' ({about})' if about else ''}: {text}"


def sentence(text: str) -> str:
    """Return a help text as a line of Markdown that ends with a full stop."""
    line = " ".join(text.split("(type:")[0].replace("%(prog)s", "pygdist").split())
    return marked_up(line if not line or line.endswith((".", "!", "?")) else f"{line}.")


def marked_up(text: str) -> str:
    """Return a help text as Markdown.

    Roles and literals of reStructuredText, formulas, and options become code; other marks are removed.
    """
    text = re.sub(r":math:`([^`]+)`", lambda found: f"`{_formula(found[1])}`", text)
    text = re.sub(r":\w+(?::\w+)*:`~?(?:[^`]*\.)?([^`.]+)`", r"`\1`", text)
    text = re.sub(r"(?<!`)`([^`<]+?)\s*<([^`>]+)>`_{1,2}", r"\1 (`\2`)", text)  # links
    text = re.sub(r"\.\. (\w+)::", lambda found: f"{found[1].capitalize()}:", text)  # directives
    text = re.sub(r"(?<![\w`*/.])\*(\w+)\*(?![\w`*])", r"\1", text).replace("``", "`")
    parts = re.split(r"(`[^`]+`|--[a-z][\w.-]*\w(?:=[\w/.-]*\w)?)", text)
    return "".join(
        part if part.startswith("`") else f"`{part}`" if part.startswith("--") else escaped(part) for part in parts
    )


def _formula(latex: str) -> str:
    """Return a formula as text: a LaTeX command becomes the character of this name in HTML, if there is one."""
    return re.sub(r"\\([A-Za-z]+)", lambda found: html5.get(f"{found[1]};", found[0]), latex)


def type_of(action: argparse.Action) -> str:
    """Return the type of an option in short, such as ``int or None``."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return " or ".join(map(str, action.choices))
    hint = getattr(action, "_typehint", None) or action.type
    return "" if hint is None else _type_text(hint).replace("`", "")


def _type_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "None"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_text, arguments))
    if arguments:
        return f"{origin.__name__}[{', '.join(map(_type_text, arguments))}]"
    return str(getattr(hint, "__name__", hint)).rpartition(".")[2]


def escaped(text: str) -> str:
    """Return a text in which nothing is taken for Markdown or for a role of MyST."""
    return re.sub(r"([\\`*_{}\[\]<>|#$~^])", r"\\\1", text)
