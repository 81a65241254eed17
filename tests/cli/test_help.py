"""The help of the training commands is short, made of the parser's own texts; --help-all has the rest."""

from __future__ import annotations

import re

import pytest

from pygdist import cli
from pygdist.backends import backends
from pygdist.commands import short_help
from pygdist.commands.train import _TEXTS, training_parser
from pygdist.partition import partitioner_names

COMMANDS = ("fit", "validate", "test", "predict")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    return re.findall(r"^  --(\S+)", text.partition("\nMore:")[0], re.MULTILINE)


@pytest.mark.parametrize("task", ["nodes", "regression", "links"])
@pytest.mark.parametrize("command", COMMANDS)
def test_it_fits_two_screens_and_names_no_class_of_the_world(
    command: str, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, command, f"--task={task}", "--help")
    assert text == said(capsys, command, "-h", f"--task={task}")
    assert len(text.splitlines()) <= 80
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "…" not in text, "a text that does not fit; reword its first sentence"
    assert "torch." not in text
    assert set(re.findall(r"torch_geometric\.\S*", text)) == {"torch_geometric.nn.GCN"}
    for word in ("--help-all", "--print_config", "--config FILE", "--model.backend.help=hybrid", "--version"):
        assert word in text
    for name in (*backends, *partitioner_names()):
        assert re.search(rf"\b{re.escape(name)}\b", text)


def test_each_command_shows_what_concerns_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {command: options_in(said(capsys, command, "--help")) for command in COMMANDS}
    for command, options in shown.items():
        assert ("trainer.max_epochs" in options) == (command == "fit")
        assert ("predictions.path" in options) == (command == "predict")
        assert {"data.dataset", "model.model", "model.backend", "trainer.devices", "ckpt_path"} <= set(options)
    links = options_in(said(capsys, "fit", "--task=links", "--help"))
    assert set(links) - set(shown["fit"]) == {"model.decoder", "model.train_share", "model.hits_at"}
    assert set(shown["fit"]) - set(links) == {"model.class_weights", "model.exact_evaluation"}
    assert links == options_in(said(capsys, "fit", "--model=LinkPredictor", "--help"))


def test_a_name_shows_the_options_that_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    for name, default in (("graph_ddp", "popen"), ("graph_ddp_fork", "fork")):
        text = said(capsys, "fit", f"--trainer.strategy={name}", "--help")
        assert re.search(rf"--trainer\.strategy\.start_method\b(?:(?!\n  --).)*default: {default}\b", text, re.DOTALL)
    text = said(capsys, "fit", "--trainer.strategy=pygdist.lightning.GraphDDPStrategy", "--help")
    assert "--trainer.strategy.start_method" in text


def test_a_given_class_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "fit", "--model.backend=hybrid", "--data.partitioner", "hdrf", "--help")
    options = options_in(text)
    assert options.index("model.backend.cache_ratio") == options.index("model.backend") + 1
    assert "data.partitioner.balance" in options
    assert "…" not in text


def test_every_option_that_is_shown_is_of_a_parser() -> None:
    tasks = ("nodes", "regression", "links")
    known = {action.dest for task in tasks for action in training_parser("fit", task)._actions}
    listed = [option for options in short_help.SHOWN.values() for option in options]
    assert len(listed) == len(set(listed))
    assert set(listed) <= known
    assert set(_TEXTS) <= known
    assert set(listed) >= short_help._OF_FIT | short_help._OF_PREDICT


def test_texts_defaults_and_choices_are_those_of_the_parser(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pygdist.lightning import NodeClassifier

    signature = NodeClassifier.__init__
    monkeypatch.setattr(
        signature, "__defaults__", tuple(0.125 if one == 0.01 else one for one in signature.__defaults__)
    )
    text = said(capsys, "fit", "--help")
    assert re.search(r"--model\.lr +Learning rate of Adam \(default: 0\.125\)\n", text)
    assert re.search(r"--task .*\(nodes or regression or links; default: nodes\)\n", text)
    assert re.search(r"--model\.model .*\(required\)\n", text)


@pytest.mark.slow
def test_help_all_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "fit", "--help-all")
    for action in training_parser("fit", "nodes")._actions:
        assert not action.option_strings or action.option_strings[-1] in text
    assert "torch_geometric.nn.GCN" in text
    assert len(text.splitlines()) > 1000


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_knows_its_version_and_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, command, "--version") == said(capsys, "--version")
    text = said(capsys, command, "--help")
    assert text.startswith(f"usage: pygdist {command} ")


def test_sentences() -> None:
    assert (
        short_help.first_sentence("the class :class:`~a.b.C`, as in ``x=1``; more. And more.")
        == "The class C, as in x=1"
    )
    assert short_help._cut("short", 10) == "short"
    assert short_help._cut("a name, or a path: either of them", 20) == "a name, or a path"
    assert (
        short_help._cut("a thing (such as this, or that) and more and more", 40)
        == "a thing (such as this, or that) and more"
    )
    assert short_help._cut("nothing-to-cut-here-at-all words", 20) == "nothing-to-cut- …"
