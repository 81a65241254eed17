"""Options of a class that is given by its name: ``--model.backend=hybrid --model.backend.cache_ratio=0.3``.

jsonargparse knows options of classes, not of registered names. A name that has options is therefore replaced by the
path of its class, on the command line and in YAML files. A name without options stays a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse import set_loader
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

    @property
    def key(self) -> str:
        """The last part of the option: the key in a file."""
        return self.option.rpartition(".")[2]

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
    base = f"--{place.option}"
    settings, others = _taken_out(base, arguments)
    _check_files(place, others)
    value, path = settings.pop(base, None), settings.pop(f"{base}.class_path", None)
    given = _inline(path if value is None else value, place)
    options = {key.removeprefix(f"{base}.").removeprefix("init_args."): value for key, value in settings.items()}
    if asked := options.pop("help", None):
        return [*others, f"{base}.help={place.path_of(asked) or asked}"]
    in_files: Any = last_value(others, *place.option.split("."))
    of_class = isinstance(in_files, Mapping)  # which the loader gives its path
    if not options and not (given and (of_class or given.startswith("{") or path)):
        return arguments
    if given is None and of_class and "class_path" not in in_files:
        return arguments  # another file names the class
    in_files = in_files["class_path"] if of_class else in_files
    name = given if given is not None else in_files or place.default
    if name is None:
        raise InputError(f"{base}.{next(iter(options))}: name the {place.kind} too, as in {base}=NAME")
    if given is None or not given.startswith("{"):
        _check_name(place, str(name), options)
    if given is not None or not of_class:
        path = place.path_of(str(name))
        options = {**({} if path is None else _texts(place.presets(str(name)))), **options}
        others.append(f"{base}={path or name}")  # the class before its options
    return [*others, *(f"{base}.{key}={value}" for key, value in options.items())]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: yaml.safe_dump(value).split()[0] for name, value in values.items()}


def _check_name(place: Place, name: str, options: Iterable[str]) -> None:
    cls = place.find(name)
    if cls is not None:
        _check(place, name, cls, options)
    elif "." not in name:
        raise InputError(
            f"--{place.option}: unknown {place.kind} '{name}'; known are {', '.join(place.names())}, or give a class "
            f"path{did_you_mean(name, place.names())}"
        )


def _taken_out(option: str, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of an option and of the options below it, and the other arguments."""
    settings, others, awaits_value = dict[str, str](), list[str](), ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == option or key.startswith(f"{option}."):
            others += [awaits_value] if awaits_value else []  # the parser says what is missing
            awaits_value = "" if equals else key
            settings |= {key: value} if equals else {}
        elif awaits_value and not argument.startswith("--"):
            settings[awaits_value], awaits_value = argument, ""
        else:
            others += [awaits_value, argument] if awaits_value else [argument]
            awaits_value = ""
    return settings, others + ([awaits_value] if awaits_value else [])


def _inline(given: str | None, place: Place) -> str | None:
    """Return a value; of a mapping, written as YAML, with the path of its class."""
    if given is None or not given.lstrip().startswith("{"):
        return given
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
    known = options_of_class(cls)
    for option in options:
        if (root := option.partition(".")[0]) not in (*known, "init_args", "dict_kwargs"):
            those = f"Its options are {', '.join(known)}" if known else "It takes no options"
            raise InputError(
                f"--{place.option}.{option}: {place.kind} '{name}' has no option '{root}'"
                f"{did_you_mean(root, known) or '.'} {those}"
            )


def _below(cls: type) -> Iterator[type]:
    one: type
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)


# -- in files ----------------------------------------------------------------------------------------------------------


def _by_path(place: Place, value: dict[str, Any]) -> dict[str, Any]:
    name = value["class_path"]
    path = place.path_of(name) if isinstance(name, str) else None
    if path is None:
        return value
    options = {**place.presets(name), **(value.get("init_args") or {})}
    return {**value, "class_path": path, **({"init_args": options} if options else {})}


def _with_paths(content: Any) -> Any:
    """Return the content of a YAML file in which ``{class_path: hybrid, ...}`` has the path of the class."""
    if not isinstance(content, dict):
        return content
    keys = {place.key: place for place in PLACES}
    result = {}
    for key, value in content.items():
        known = key in keys and isinstance(value, dict) and "class_path" in value
        result[key] = _by_path(keys[key], value) if known else _with_paths(value)
    return result


def _load(text: str) -> Any:
    try:
        return _with_paths(_load_yaml(text))
    except InputError as error:  # of a plug-in that cannot be imported
        raise yaml.YAMLError(str(error)) from error


_load_yaml = jsonargparse.get_loader("yaml")
set_loader("yaml", _load, (yaml.YAMLError,))
