"""Options of a class that is given by its name: ``--model.backend=hybrid --model.backend.cache_ratio=0.3``.

jsonargparse knows options of classes, not of registered names. A name that has options is therefore replaced by the
path of its class: on the command line by :func:`with_class_paths`, in YAML files by :func:`of_file`. A name without
options stays a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from pygdist.backends import Backend, backends
from pygdist.bounded_yaml import check_yaml, read_yaml
from pygdist.commands.messages import Parser, last_value, options_of
from pygdist.errors import InputError, did_you_mean
from pygdist.partition import Partitioner
from pygdist.partition.base import partitioners
from pygdist.registry import Registry, import_path


def _strategy(name: str) -> type[Strategy]:
    cls: type[Strategy] = dict(StrategyRegistry)[name]["strategy"]  # the registry's get() makes an object
    return cls


def _presets(name: str) -> dict[str, Any]:
    return dict(dict(StrategyRegistry)[name]["init_params"])


def _no_presets(name: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Place:
    """An option whose value is a class with options of its own, or its name.

    Attributes:
        option: The option, such as ``model.backend``.
        kind: Word for the classes in messages.
        base: The class above all.
        names: Returns the names of classes.
        class_of: Returns the class of a name.
        presets: Returns the options that a name sets.
        default: The name that counts where none is given.
    """

    option: str
    kind: str
    base: type
    names: Callable[[], Iterable[str]]
    class_of: Callable[[str], type]
    presets: Callable[[str], dict[str, Any]] = _no_presets
    default: str | None = None

    def find(self, value: str) -> type | None:
        """Return the class of a name, of a short class name or of a class path; ``None`` if there is none."""
        if value in self.names():
            return self.class_of(value)
        if "." not in value:
            return next((cls for cls in _below(self.base) if cls.__name__ == value), None)
        try:
            cls = import_path(value, self.kind)
        except InputError:  # the parser says so
            return None
        return cls if isinstance(cls, type) and issubclass(cls, self.base) else None

    def path_of(self, name: str) -> str | None:
        """Return the class path of a name; ``None`` of what is no name."""
        if name not in self.names():
            return None
        cls = self.class_of(name)
        return f"{cls.__module__}.{cls.__qualname__}"


def _of_registry(option: str, base: type, registry: Registry[Any], default: str | None = None) -> Place:
    return Place(
        option=option, kind=registry.kind, base=base, names=registry.names, default=default,
        class_of=lambda name: registry.class_of(name, base),
    )  # fmt: skip


PLACES = (
    _of_registry("model.backend", Backend, backends, "comm"),
    _of_registry("data.partitioner", Partitioner, partitioners),
    Place(
        option="trainer.strategy", kind="strategy", base=Strategy, names=lambda: sorted(StrategyRegistry),
        class_of=_strategy, presets=_presets, default="graph_ddp",
    ),
)  # fmt: skip


def options_of_class(cls: type) -> list[str]:
    """Return the names of the options that a class takes."""
    added: list[str] = Parser().add_class_arguments(cls, "of", fail_untyped=False)
    return list(dict.fromkeys(name.removeprefix("of.").partition(".")[0] for name in added))


def with_class_paths(arguments: list[str]) -> list[str]:
    """Return a command line on which a class with options is given by its path.

    The name may come from a configuration file. The end of the command line overrides it.

    Raises:
        InputError: If a name is unknown, or its class has no such option.
    """
    for place in PLACES:
        arguments = _at(place, arguments)
    return arguments


def _at(place: Place, arguments: list[str]) -> list[str]:
    line = _on_line(place, arguments)
    _check_files(place, line.others)
    if asked := line.options.get("help"):
        return [*line.others, f"--{place.option}.help={place.path_of(asked) or asked}"]
    added = _merged(place, line, _in_files(place, line.others))
    return arguments if added is None else [*line.others, *added]


@dataclass(kw_only=True)
class _Named:
    """A class as the command line or the files give it.

    Attributes:
        name: Its name, its class path, or a mapping as YAML; ``None`` where only options are given.
        as_class: It is given as a class (a mapping or a class path) and not by a bare name.
        options: Options of the class on the command line.
        drops: Options of an earlier name on the command line are dropped.
        others: Arguments of the command line that have other purposes.
    """

    name: str | None = None
    as_class: bool = False
    options: dict[str, str] = field(default_factory=dict)
    drops: bool = False
    others: list[str] = field(default_factory=list)


def _on_line(place: Place, arguments: list[str]) -> _Named:
    """Return the class that a command line gives. Another name after the first one drops the options before it."""
    base = f"--{place.option}"
    settings, others = _taken_out(base, arguments)
    line = _Named(others=others)
    for key, value in settings:
        if key not in (base, f"{base}.class_path"):
            line.options[key.removeprefix(f"{base}.").removeprefix("init_args.")] = value
            continue
        if line.name not in (None, value) and line.options:
            line.options, line.drops = {}, True
        line.name, line.as_class = value, key != base
    if line.name is not None and line.name.lstrip().startswith("{"):
        line.name, line.as_class = _inline(line.name, place), True
    return line


def _in_files(place: Place, arguments: list[str]) -> _Named:
    """Return the class that the files of a command line give."""
    value: Any = last_value(arguments, *place.option.split("."))
    as_class = isinstance(value, Mapping)
    name = value.get("class_path") if as_class else value
    return _Named(name=None if name is None else str(name), as_class=as_class)


def _merged(place: Place, line: _Named, files: _Named) -> list[str] | None:
    """Return the arguments that add a command line to its files; ``None`` if the parser understands it as it is."""
    base = f"--{place.option}"
    if line.name is None and files.as_class and files.name is None:
        return None  # another file names the class
    if not line.options and not (line.name and (line.as_class or files.as_class)):
        return [f"{base}={line.name}"] if line.drops else None
    name = line.name if line.name is not None else files.name or place.default
    if name is None:
        raise InputError(f"{base}.{next(iter(line.options))}: name the {place.kind} too, as in {base}=NAME")
    if not name.startswith("{"):
        _check_name(place, name, line.options)
    options, path = line.options, place.path_of(name)
    if line.name is None and files.as_class:
        return _as_arguments(base, options)  # of_file gives the class
    presets = {} if path is None else {key: _as_text(value) for key, value in place.presets(name).items()}
    return [f"{base}={path or name}", *_as_arguments(base, {**presets, **options})]  # the class before its options


def _as_arguments(base: str, options: Mapping[str, str]) -> list[str]:
    return [f"{base}.{key}={value}" for key, value in options.items()]


def _as_text(value: Any) -> str:
    """Return a value as the command line has it: a text as it is, anything else as JSON, which YAML includes."""
    return value if isinstance(value, str) else json.dumps(value)


def _check_name(place: Place, name: str, options: Iterable[str]) -> None:
    cls = place.find(name)
    if cls is not None:
        _check(place, name, cls, options)
    elif "." not in name:
        raise InputError(
            f"--{place.option}: unknown {place.kind} '{name}'; known are {', '.join(place.names())}, or give a class "
            f"path{did_you_mean(name, place.names())}"
        )


def _taken_out(option: str, arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return an option and the options below it, each with its value, and the other arguments."""
    settings, others, awaits_value = list[tuple[str, str]](), list[str](), ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == option or key.startswith(f"{option}."):
            others += [awaits_value] if awaits_value else []  # the parser says what is missing
            awaits_value = "" if equals else key
            settings += [(key, value)] if equals else []
        elif awaits_value and not argument.startswith("--"):
            settings.append((awaits_value, argument))
            awaits_value = ""
        else:
            others += [awaits_value, argument] if awaits_value else [argument]
            awaits_value = ""
    return settings, others + ([awaits_value] if awaits_value else [])


def _inline(given: str, place: Place) -> str:
    """Return a mapping, written as YAML, with the path of its class."""
    check_yaml(given, f"--{place.option}")
    try:
        value = yaml.safe_load(given)
    except yaml.YAMLError:  # the parser says so
        return given
    if not isinstance(value, dict) or "class_path" not in value:
        return given
    _check_mapping(place, value)
    return str(yaml.safe_dump(_by_path(place, value), default_flow_style=True, width=1 << 20)).strip()


def _check_files(place: Place, arguments: list[str]) -> None:
    for option, value in options_of(arguments):
        if option in ("--config", "-c") and Path(value).is_file():
            content: Any = read_yaml(Path(value))
            for name in place.option.split("."):
                content = content.get(name) if isinstance(content, dict) else None
            if isinstance(content, dict):
                _check_mapping(place, content)


def _check_mapping(place: Place, value: Mapping[str, Any]) -> None:
    name, options = value.get("class_path"), value.get("init_args")
    if isinstance(name, str) and isinstance(options, dict) and (cls := place.find(name)) is not None:
        _check(place, name, cls, map(str, options))


def _check(place: Place, name: str, cls: type, options: Iterable[str]) -> None:
    """Refuse an option that a class does not have."""
    options_there = options_of_class(cls)
    for option in options:
        if (root := option.partition(".")[0]) not in (*options_there, "init_args", "dict_kwargs"):
            those = f"Its options are {', '.join(options_there)}" if options_there else "It takes no options"
            raise InputError(
                f"--{place.option}.{option}: {place.kind} '{name}' has no option '{root}'"
                f"{did_you_mean(root, options_there) or '.'} {those}"
            )


def _below(cls: type) -> Iterator[type]:
    one: type
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)


# -- in files ----------------------------------------------------------------------------------------------------------


def of_file(key: str, value: Any) -> Any:
    """Return the value of an option in a YAML file; of ``{class_path: hybrid, ...}`` with the path of the class.

    Args:
        key: The whole name of the option, such as ``model.backend``. Values of other options are returned as they are.
        value: The value.

    Raises:
        InputError: If a plug-in cannot be imported.
    """
    place = next((place for place in PLACES if place.option == key), None)
    if place is None or not isinstance(value, (dict, Namespace)) or "class_path" not in value:
        return value
    return _by_path(place, value.as_dict() if isinstance(value, Namespace) else value)


def _by_path(place: Place, value: dict[str, Any]) -> dict[str, Any]:
    name = value["class_path"]
    path = place.path_of(name) if isinstance(name, str) else None
    if path is None:
        return value
    options = {**place.presets(name), **(value.get("init_args") or {})}
    return {**value, "class_path": path, **({"init_args": options} if options else {})}
