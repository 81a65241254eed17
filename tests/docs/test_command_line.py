"""The pages of the command line hold every option of every parser, and nothing that Markdown would take for a mark."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import pygdist
from pygdist import cli
from pygdist.backends import backends
from pygdist.partition import partitioner_names
from tests.docs.pages import script

_ROOT = Path(pygdist.__file__).parents[1]


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    return script("_ext/command_line.py")


@pytest.fixture(scope="module")
def pages(extension: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference") / "command-line"
    extension.write(folder)
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}


def test_every_command_has_a_page_in_the_index(extension: ModuleType, pages: dict[str, str]) -> None:
    assert {*extension.COMMANDS, *extension.TRAINING} == set(cli._COMMANDS)
    assert set(pages) == {"index", "training", "classes", *extension.COMMANDS}
    for name in set(pages) - {"index"}:
        assert f"\n{name}\n" in pages["index"]


@pytest.mark.parametrize("task", ["nodes", "links"])
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_every_option_of_training_is_there(
    extension: ModuleType, pages: dict[str, str], command: str, task: str
) -> None:
    parser = extension.training_parser(command, task)
    options = [action.option_strings[-1].removesuffix("+") for action in extension.options_of(parser)]
    assert len(options) > 90
    for option in options:
        assert pages["training"].count(f"`{option}`") >= 1, option
    lines = [line for line in pages["training"].splitlines() if line.startswith("- `--")]
    assert len(lines) == len({line.partition("`:")[0] for line in lines}), "an option is listed once"


def test_names_types_defaults_and_texts(pages: dict[str, str]) -> None:
    assert "- `--model.lr` (`float`, default `0.01`): Learning rate of Adam;" in pages["training"]
    assert "- `--trainer.devices` (`list[int] or str or int`, default `1`): Processes on this host" in pages["training"]
    assert "- `--model.decoder` (`Module or None`): " in pages["training"]
    assert re.search(r"- `--predictions.output` .*", pages["training"])
    assert re.search(r"- `--verbose` .* Only for `validate` and `test`\.", pages["training"])
    assert re.search(r"- `--model.decoder` .* Only with `--task=links`\.", pages["training"])
    assert "- `name` (`str`, required): The graph: reddit-like" in pages["generate"]
    assert "- `-o`, `--out` (`Path`, required): the file to write" in pages["report"]
    assert "- `--parts` (`int or auto`, default `2`): Number of parts" in pages["partition"]
    for name in backends:
        assert f"\n### backend `{name}`\n" in pages["classes"]
    for name in partitioner_names():
        assert f"\n### partitioner `{name}`\n" in pages["classes"]
    assert "- `--model.backend.cache_ratio` (`float or None`): Compute this share" in pages["classes"]
    assert "Exponent `γ`" in pages["classes"]
    assert not [line for line in pages["classes"].splitlines() if line.startswith("- `--") and line.endswith(": ")]


def test_nothing_is_of_this_machine_or_lists_the_classes_of_the_world(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert " at 0x" not in text
        assert str(Path.home()) + "/" not in text
        assert str(_ROOT) not in text
        assert "known subclasses" not in text
        assert "torch_geometric.nn.conv" not in text
        prose = re.sub(r"`[^`\n]*`", "", text.partition("```{toctree}")[0])
        assert not re.search(r"(?<!\\)[{}<>|*_\[\]$]", prose), f"{name} has a mark of Markdown that is not escaped"
        assert text.count("`") % 2 == 0


def test_a_second_build_changes_no_file(extension: ModuleType, tmp_path: Path) -> None:
    extension.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "check.md").write_text("stale")
    extension.write(tmp_path)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path for path in after if after[path] != before[path]} == {tmp_path / "check.md"}
    assert "stale" not in (tmp_path / "check.md").read_text()


def test_the_extension_writes_when_sphinx_begins(
    extension: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class App:
        srcdir = str(tmp_path)
        calls: ClassVar[dict[str, Any]] = {}

        def connect(self, event: str, call: Any) -> None:
            self.calls[event] = call

    written: list[Path] = []
    monkeypatch.setattr(extension, "write", written.append)
    assert extension.setup(App())["parallel_read_safe"]
    App.calls["builder-inited"](App())
    assert written == [tmp_path / "reference" / "command-line"]


def test_escaping(extension: ModuleType) -> None:
    assert extension.escaped("{a} <b> | *c* _d_ \\e [f] $g$") == (r"\{a\} \<b\> \| \*c\* \_d\_ \\e \[f\] \$g\$")
    assert extension.sentence("a_b ``b_c``, --x.y_z=1; :class:`~d.E` (type: int)") == r"a\_b `b_c`, `--x.y_z=1`; `E`."
