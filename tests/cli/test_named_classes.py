"""A name with options stands for its class, on the command line and in files; an option that it lacks is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch_geometric.nn import GCN

from pygdist.backends import backends
from pygdist.backends.hybrid import HybridBackend
from pygdist.commands.named_classes import PLACES, options_of_class, with_class_paths
from pygdist.commands.train import GraphCLI
from pygdist.errors import InputError
from pygdist.lightning import GraphDDPStrategy, LinkPredictor, NodeRegressor
from pygdist.partition.base import partitioners
from tests.cli.commands import assert_mistake, pygdist, torchrun

MODEL = (
    "--model.model=torch_geometric.nn.GCN",
    "--model.model.init_args={in_channels: 12, hidden_channels: 8, num_layers: 2, out_channels: 4}",
)
HYBRID = "pygdist.backends.hybrid.HybridBackend"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cli(*arguments: str, **file: Any) -> GraphCLI:
    """The command with a file of options."""
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"logger": False, "accelerator": "cpu"}, **file}))
    return GraphCLI(["fit", "--config=run.yaml", *MODEL, *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.backend=hybrid", "--model.backend.cache_ratio=0.3"],
        ["--model.backend", "hybrid", "--model.backend.cache_ratio", "0.3"],
        ["--model.backend.cache_ratio=0.3", "--model.backend=hybrid"],
        ["--model.backend=hybrid", "--model.backend.init_args.cache_ratio=0.3"],
        ["--model.backend.class_path=hybrid", "--model.backend.cache_ratio=0.3"],
        ["--model.backend={class_path: hybrid, init_args: {cache_ratio: 0.3}}"],
        ["--model.backend={class_path: hybrid}", "--model.backend.cache_ratio=0.3"],
        ["--model.backend=HybridBackend", "--model.backend.cache_ratio=0.3"],
        [f"--model.backend={HYBRID}", "--model.backend.cache_ratio=0.3"],
    ],
)
def test_a_backend_takes_its_options_by_name(arguments: list[str]) -> None:
    backend = cli(*arguments).model.backend
    assert isinstance(backend, HybridBackend)
    assert backend.cache_ratio == 0.3
    assert backend.options.overlap


@pytest.mark.parametrize(
    ("of_file", "arguments", "expected"),
    [
        ("hybrid", ["--model.backend.cache_ratio=0.3"], (0.3, True)),
        ({"class_path": "hybrid", "init_args": {"cache_ratio": 0.3}}, [], (0.3, True)),
        ({"class_path": "hybrid", "init_args": {"overlap": False}}, ["--model.backend.cache_ratio=0.3"], (0.3, False)),
        ({"class_path": "hybrid", "init_args": {"overlap": False}}, ["--model.backend=hybrid"], (None, False)),
        ({"class_path": "tensor", "init_args": {"num_chunks": 3}}, ["--model.backend=hybrid"], (None, True)),
        ("tensor", ["--model.backend=hybrid", "--model.backend.overlap=false"], (None, False)),
    ],
)
def test_files_and_the_command_line_add_up(
    of_file: Any, arguments: list[str], expected: tuple[float | None, bool]
) -> None:
    backend = cli(*arguments, model={"backend": of_file}).model.backend
    assert isinstance(backend, HybridBackend)
    assert (backend.cache_ratio, backend.options.overlap) == expected


def test_options_without_a_name_are_those_of_the_default() -> None:
    backend = cli("--model.backend.overlap=false").model.backend
    assert backend.name == "comm"
    assert not backend.options.overlap
    with pytest.raises(InputError, match=r"--data.partitioner.balance: name the partitioner too, as in --data.part"):
        cli("--data.partitioner.balance=1.5")


def test_what_lacks_a_value_or_a_name_is_left_to_the_parser_or_refused() -> None:
    lacking = with_class_paths(["fit", "--model.backend", "--model.backend.overlap=false"])
    assert lacking[:2] == ["fit", "--model.backend"]
    with pytest.raises(InputError, match=r"--model\.backend: unknown backend ''; known are"):
        with_class_paths(["fit", "--model.backend=", "--model.backend.overlap=false"])
    Path("more.yaml").write_text("model: {backend: {init_args: {overlap: false}}}")
    backend = cli(
        "--config=more.yaml", "--model.backend.cache_ratio=0.3", model={"backend": {"class_path": "hybrid"}}
    ).model.backend
    assert (backend.cache_ratio, backend.options.overlap) == (0.3, False)


def test_a_name_without_options_stays_a_name() -> None:
    assert cli("--model.backend=hybrid").config.fit.model.backend == "hybrid"
    assert with_class_paths(["fit", "--model.backend", "cache"]) == ["fit", "--model.backend", "cache"]


def test_partitioners_and_strategies_too() -> None:
    made = cli("--data.partitioner=hdrf", "--data.partitioner.balance=1.5", "--trainer.strategy.timeout_s=7")
    assert (made.datamodule.partitioner.name, made.datamodule.partitioner.balance) == ("hdrf", 1.5)
    assert made.trainer.strategy._timeout_s == 7
    notebook = with_class_paths(["fit", "--trainer.strategy=graph_ddp_notebook", "--trainer.strategy.timeout_s=7"])
    assert notebook[-1] == "--trainer.strategy.timeout_s=7"
    assert "--trainer.strategy.start_method=fork" in notebook


def test_presets_of_a_name_do_not_override_a_file() -> None:
    Path("run.yaml").write_text(
        "trainer: {strategy: {class_path: graph_ddp_notebook, init_args: {start_method: spawn}}}"
    )
    arguments = ["fit", "--config=run.yaml", "--trainer.strategy.timeout_s=7"]
    assert with_class_paths(arguments) == arguments
    made = GraphCLI([*arguments, *MODEL, "--trainer.accelerator=cpu", "--trainer.logger=false"])
    assert made.config.fit.trainer.strategy.init_args.start_method == "spawn"


class Layered(GCN):
    """A model with arguments that are called as options of ours."""

    def __init__(self, strategy: dict[str, Any], backend: dict[str, Any]) -> None:
        super().__init__(12, 8, 2, 4)
        self.given = {"strategy": strategy, "backend": backend}


def test_names_in_the_arguments_of_a_model_are_its_own() -> None:
    given = {"strategy": {"class_path": "ddp_notebook"}, "backend": {"class_path": "hybrid"}}
    model = {"class_path": f"{__name__}.Layered", "init_args": given}
    Path("run.yaml").write_text(yaml.safe_dump({"model": {"model": model, "backend": {"class_path": "hybrid"}}}))
    made = GraphCLI(["fit", "--config=run.yaml", "--trainer.accelerator=cpu", "--trainer.logger=false"]).model
    assert made.model.given == given
    assert isinstance(made.backend, HybridBackend)


def test_other_parsers_of_the_process_read_what_is_written() -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--model.backend", type=dict)
    Path("theirs.yaml").write_text("model:\n  backend:\n    class_path: hybrid\n")
    assert parser.parse_args(["--config=theirs.yaml"]).model.backend == {"class_path": "hybrid"}


def test_a_file_of_the_model_alone_names_a_backend_too() -> None:
    Path("model.yaml").write_text("backend: {class_path: hybrid, init_args: {cache_ratio: 0.3}}")
    assert cli("--model=model.yaml").model.backend.cache_ratio == 0.3


def test_another_name_drops_the_options_before_it() -> None:
    first = ("--model.backend=hybrid", "--model.backend.cache_ratio=0.3")
    assert cli(*first, "--model.backend=comm").config.fit.model.backend == "comm"
    last = cli(*first, "--model.backend", "tensor", "--model.backend.num_chunks=3").model.backend
    assert (last.name, last.num_chunks) == ("tensor", 3)
    assert cli(*first, "--model.backend=hybrid").model.backend.cache_ratio == 0.3, "the same name drops nothing"
    with pytest.raises(InputError, match=r"backend 'comm' has no option 'cache_ratio'"):
        cli("--model.backend=comm", "--model.backend=hybrid", "--model.backend=comm", first[1])


def test_presets_of_any_kind_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    presets = {"words": "two words", "numbers": [1, 2], "nothing": None, "flag": True}
    entry = {"strategy": GraphDDPStrategy, "description": "", "init_params": presets}
    monkeypatch.setitem(StrategyRegistry, "with_presets", entry)
    line = with_class_paths(["fit", "--trainer.strategy=with_presets", "--trainer.strategy.timeout_s=7"])
    read = {name: yaml.safe_load(line[-5 + number].partition("=")[2]) for number, name in enumerate(presets)}
    assert read == presets


@pytest.mark.parametrize(
    ("arguments", "cls"),
    [
        (["--model=NodeRegressor"], NodeRegressor),
        (["--model", "NodeRegressor"], NodeRegressor),
        (["--model", "LinkPredictor"], LinkPredictor),
    ],
)
def test_the_class_of_the_task_stands_for_the_task(arguments: list[str], cls: type) -> None:
    assert type(cli(*arguments).model) is cls


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.option)
def test_every_name_takes_an_option_of_its_class(place: Any) -> None:
    ours = {"model.backend": set(backends), "data.partitioner": set(partitioners)}.get(
        place.option, {"graph_ddp", "graph_ddp_notebook", "model_averaging"}
    )
    for name in ours:
        known = options_of_class(place.class_of(name))
        for option in known:
            rewritten = with_class_paths(["fit", f"--{place.option}={name}", f"--{place.option}.{option}=1"])
            assert f"--{place.option}={place.path_of(name)}" in rewritten
        with pytest.raises(InputError) as refusal:
            with_class_paths(["fit", f"--{place.option}={name}", f"--{place.option}.nosuch=1"])
        text = str(refusal.value)
        assert text.startswith(f"--{place.option}.nosuch: {place.kind} '{name}' has no option 'nosuch'")
        assert text.endswith(f"Its options are {', '.join(known)}" if known else "It takes no options")


REFUSED = {
    "on the command line": (
        ["--model.backend=hybrid", "--model.backend.cache_ration=0.3"],
        {},
        ["--model.backend.cache_ration: backend 'hybrid' has no option 'cache_ration'; did you mean 'cache_ratio'?"],
    ),
    "by class path": (
        [f"--model.backend={HYBRID}", "--model.backend.cache_ration=0.3"],
        {},
        ["did you mean 'cache_ratio'? Its options are cache_ratio, costs, memory_gib, replan, ring, overlap"],
    ),
    "in a file": (
        [],
        {"model": {"backend": {"class_path": "hybrid", "init_args": {"cache_ration": 0.3}}}},
        ["--model.backend.cache_ration", "did you mean 'cache_ratio'?"],
    ),
    "of the class in a file": (
        ["--model.backend.num_chunk=2"],
        {"model": {"backend": {"class_path": "tensor"}}},
        ["backend 'tensor' has no option 'num_chunk'; did you mean 'num_chunks'?"],
    ),
    "without options": (["--model.backend=single", "--model.backend.x=1"], {}, ["It takes no options"]),
    "unknown name": (
        ["--model.backend=hybird", "--model.backend.cache_ratio=0.3"],
        {},
        ["--model.backend: unknown backend 'hybird'; known are cache, comm", "did you mean 'hybrid'?"],
    ),
    "wrong type": (
        ["--model.backend=hybrid", "--model.backend.cache_ratio=many"],
        {},
        ["--model.backend.cache_ratio: expected float, got 'many'"],
    ),
    "out of range": (["--model.backend=hybrid", "--model.backend.cache_ratio=3"], {}, ["cache_ratio is 3.0"]),
    "no value": (["--model.backend=hybrid", "--model.backend.cache_ratio"], {}, ["expected one argument"]),
    "partitioner": (
        ["--data.partitioner=hdrf", "--data.partitioner.balanc=1.5"],
        {},
        ["--data.partitioner.balanc: partitioner 'hdrf' has no option 'balanc'; did you mean 'balance'?"],
    ),
    "options twice": (
        ["--data.partitioner=hash", "--data.partitioner.seed=1", "--data.partitioner_args={seed: 1}"],
        {},
        ["arguments ['seed'] do not go with a partitioner that is an object already"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "of_file", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(arguments: list[str], of_file: dict[str, Any], words: list[str], folder: Path) -> None:
    (folder / "more.yaml").write_text(yaml.safe_dump(of_file or {"seed_everything": 0}))
    outcome = pygdist("fit", "--config=run.yaml", "--config=more.yaml", *arguments, folder=folder)
    assert_mistake(outcome, *words)


@pytest.mark.slow
def test_the_saved_configuration_repeats_the_run(folder: Path) -> None:
    options = ("--model.backend=delayed", "--model.backend.delay=2", "--data.partitioner=hdrf")
    more = ("--data.partitioner.balance=1.5",)
    for arguments in (["--config=run.yaml", *options, *more], ["--config=runs/version_0/config.yaml"]):
        ranks = torchrun("fit", *arguments, folder=folder)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    saved = [(folder / "runs" / f"version_{number}" / "config.yaml").read_text() for number in (0, 1)]
    assert saved[0] == saved[1]
    assert "delay: 2" in saved[0]
    assert "balance: 1.5" in saved[0]
    losses = [_losses(folder / "runs" / f"version_{number}" / "metrics.csv") for number in (0, 1)]
    assert losses[0] == losses[1]
    exact = torchrun("fit", "--config=run.yaml", *options, *more, "--model.backend.delay=0", folder=folder)
    assert exact[0].code == 0, exact[0].err
    assert _losses(folder / "runs" / "version_2" / "metrics.csv") != losses[0], "the delay has an effect"


def _losses(path: Path) -> list[str]:
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    return [row[header.index("train_loss")] for row in rows if row[header.index("train_loss")]]


@pytest.mark.slow
def test_verify_takes_them_too(folder: Path) -> None:
    options = ("--model.backend=hybrid", "--model.backend.cache_ratio=0.5")
    outcome = pygdist("verify", "--config=run.yaml", *options, folder=folder)
    assert outcome.code == 0, outcome.err
    assert "equal within" in outcome.out
    refused = pygdist("verify", "--config=run.yaml", "--model.backend=hybrid", "--model.backend.x=1", folder=folder)
    assert_mistake(refused, "backend 'hybrid' has no option 'x'")


@pytest.mark.slow
def test_help_of_a_name(folder: Path) -> None:
    outcome = pygdist("fit", "--model.backend.help=hybrid", folder=folder)
    assert outcome.code == 0, outcome.err
    assert "--model.backend.cache_ratio" in outcome.out
