"""The help of ``fit``, ``validate``, ``test`` and ``predict``: the options that people use, most of them in one line.

Texts, defaults and choices are those of the parser. Only the list of the options that are shown is kept here.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pygdist.commands.messages import Parser
from pygdist.commands.named_classes import PLACES
from pygdist.graph.sources.load import dataset_names

_WIDTH = 118
_COLUMN = 37
_FEW = 5  # choices that are shown

#: Options that are shown, by what they are for. A parser without one of them shows the others.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "Graph": (
        "data.dataset", "data.dataset_args", "data.store", "data.partitioner", "data.split", "data.edge_split",
        "data.symmetrize", "data.float_labels", "data.batches", "data.num_parts", "data.cache_dir",
    ),
    "Model": (
        "task", "model.model", "model.loss", "model.class_weights", "model.decoder", "model.train_share",
        "model.hits_at",
    ),
    "Backend": ("model.backend", "model.exact_evaluation", "model.check"),
    "Training": (
        "trainer.max_epochs", "model.lr", "model.weight_decay", "optimizer", "lr_scheduler", "trainer.precision",
        "trainer.gradient_clip_val", "trainer.check_val_every_n_epoch", "seed_everything", "ckpt_path", "resume",
    ),
    "Processes": (
        "trainer.devices", "trainer.num_nodes", "trainer.accelerator", "trainer.strategy", "trainer.callbacks",
        "trainer.enable_progress_bar",
    ),
    "Output": (
        "trainer.default_root_dir", "checkpoint.dirpath", "checkpoint.save_top_k", "checkpoint.monitor",
        "exchange.ranks", "predictions.path", "predictions.output",
    ),
}  # fmt: skip

_OF_FIT = {
    "data.batches", "model.class_weights", "model.train_share", "trainer.max_epochs", "model.lr", "model.weight_decay",
    "optimizer", "lr_scheduler", "trainer.gradient_clip_val", "trainer.check_val_every_n_epoch", "resume",
    "checkpoint.dirpath", "checkpoint.save_top_k", "checkpoint.monitor", "exchange.ranks",
}  # fmt: skip
_OF_PREDICT = {"predictions.path", "predictions.output"}
_MORE = """\
More:
  --config FILE          read options from a YAML file; the command line overrides it
  --print_config         print all options with their values as YAML, and stop
  --help-all             show all options
  --OPTION.help=CLASS    show the options of a class, such as --model.model.help=torch_geometric.nn.GCN or
                         --model.backend.help=hybrid; they are set as --model.model.hidden_channels=64
  --version              show the version

Example: pygdist fit --data.dataset=sbm --model.model=torch_geometric.nn.GCN --model.model.in_channels=-1
         --model.model.hidden_channels=64 --model.model.num_layers=2 --model.model.out_channels=10 --trainer.devices=2
"""


def short_help(command: str, parser: argparse.ArgumentParser, purpose: str, given: Mapping[str, str]) -> str:
    """Return the help of a command.

    Args:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        parser: The parser of the command.
        purpose: What the command is for.
        given: Values of the command line, by option. A backend, partitioner or strategy among them adds its options.
    """
    actions = {action.dest: action for action in parser._actions}
    skipped = _OF_PREDICT if command == "fit" else _OF_FIT if command == "predict" else _OF_FIT | _OF_PREDICT
    lines = [f"usage: pygdist {command} [--config FILE] [options]", "", *textwrap.wrap(purpose, _WIDTH)]
    for title, options in SHOWN.items():
        lines += ["", f"{title}:"]
        for option in options:
            if option in actions and option not in skipped:
                lines += _described(actions[option], option)
                lines += _of_class(option, given.get(option))
    return "\n".join([*lines, "", _MORE])


def _described(action: argparse.Action, option: str, *, cuts: bool = True) -> Iterator[str]:
    """Yield the text of an option, if it ``cuts`` on one line, and a line with the names that it takes, if any."""
    choices = _choices_of(action)
    notes = ["required"] if action.required else []
    notes += [" or ".join(choices)] if 1 < len(choices) <= _FEW else []
    default = "" if action.required else default_of(action)
    notes += [f"default: {default}"] if default else []
    note = f" ({'; '.join(notes)})" if notes else ""
    name, text = f"  --{option} ".ljust(_COLUMN), first_sentence(action.help or "")
    text = _cut(text, max(_WIDTH - len(name) - len(note), 20)) if cuts else text
    yield from _wrapped(f"{text}{note}", name)
    if names := _names_of(option):
        yield from _wrapped(f"one of {', '.join(names)}", " " * _COLUMN)


def _wrapped(text: str, begin: str) -> list[str]:
    lines = textwrap.wrap(
        text, _WIDTH, initial_indent=begin, subsequent_indent=" " * _COLUMN, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return lines or [begin.rstrip()]


def _names_of(option: str) -> list[str]:
    places = {place.option: place for place in PLACES}
    if option == "data.dataset":
        return dataset_names()
    if option == "trainer.strategy":
        ours = [name for name in places[option].names() if name.startswith(("graph_", "model_averaging"))]
        return [name for name in ours if "unused" not in name]
    return [*places[option].names()] if option in places else []


def _of_class(option: str, name: str | None) -> Iterator[str]:
    """Yield lines on the options of the class that the command line gives for an option: whole sentences."""
    place = next((one for one in PLACES if one.option == option), None)
    if place is None or name is None or (cls := place.find(name)) is None:
        return
    parser = Parser()
    parser.add_class_arguments(cls, option, fail_untyped=False)
    presets = place.presets(name) if name in place.names() else {}
    for action in parser._actions:
        if action.dest.startswith(f"{option}.") and action.default is not argparse.SUPPRESS:
            action.default = presets.get(action.dest.removeprefix(f"{option}."), action.default)
            yield from _described(action, action.dest, cuts=False)


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, without the marks of reStructuredText."""
    sentence = re.split(r"(?<!Sec)[.;](?:\s|$)", plain(text), maxsplit=1)[0]
    return sentence[:1].upper() + sentence[1:]


def _cut(text: str, room: int) -> str:
    """Return a text that fits: if it must be cut, before what explains it, or else before a clause."""
    if len(text) <= room:
        return text
    text = text.partition(": ")[0]
    ends = [match.start() for match in re.finditer(r",? (?:and|or) |, | \(", text) if match.start() <= room]
    whole = [text[:end] for end in ends if text[:end].count("(") == text[:end].count(")")]
    return text if len(text) <= room else whole[-1] if whole else textwrap.shorten(text, room, placeholder=" …")


def plain(text: str) -> str:
    """Return a help text on one line without the marks of reStructuredText."""
    text = re.sub(r":\w+(?::\w+)*:`~?(?:[^`]*\.)?([^`.]+)`", r"\1", " ".join(text.split()))
    text = re.sub(r"`{1,2}([^`]*)`{1,2}_*", r"\1", text)
    return re.sub(r"(?<!\w)\*(\w+)\*(?!\w)", r"\1", text).replace("\\", "")  # \gamma of a formula


def _choices_of(action: argparse.Action) -> list[str]:
    """Return the values that an option takes, if they are known."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    return list(dict.fromkeys(map(str, _literals(getattr(action, "_typehint", None)))))


def _literals(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    else:
        for one in typing.get_args(hint):
            yield from _literals(one)


def default_of(action: argparse.Action) -> str:
    """Return the default of an option as text; nothing if there is none."""
    value = action.default
    if value is None or value is argparse.SUPPRESS:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value)).replace(str(Path.home()), "~")


def wants_help(arguments: Iterable[str]) -> bool:
    """Tell if a command line asks for help."""
    return any(argument in ("-h", "--help") for argument in arguments)
