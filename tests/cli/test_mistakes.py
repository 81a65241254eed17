"""A mistake of the user ends in one line that names the file, field or option, exit code 2, and nothing left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.commands import assert_mistake, files, pygdist

FIT = ("fit", "--config=run.yaml")
PARTITION = ("partition", "--out=parts")

OPTIONS = {
    "unknown command": (["fiit"], ["unknown command 'fiit'", "partition"]),
    "no such config": (["fit", "--config=nowhere.yaml"], ["--config", "nowhere.yaml"]),
    "no model": (["fit"], ["--model.model is required"]),
    "unknown option": (
        [*FIT, "--trainer.max_epocs=3"],
        ["unknown option --trainer.max_epocs", "did you mean '--trainer.max_epochs'?"],
    ),
    "no processes": ([*FIT, "--trainer.devices=0"], ["--trainer.devices is 0, expected at least 1"]),
    "all GPUs": ([*FIT, "--trainer.devices=-1", "--trainer.accelerator=cpu"], ["-1, which means all GPUs"]),
    "wrong type": ([*FIT, "--trainer.max_epochs=many"], ["--trainer.max_epochs: expected int, got 'many'"]),
    "wrong choice": ([*FIT, "--predictions.output=x"], ["--predictions.output: expected 'label' or 'logits', got 'x'"]),
    "wrong length": ([*FIT, "--data.split=[0.5,0.5]"], ["--data.split: expected tuple with 3 elements"]),
    "no such model": ([*FIT, "--model.model=torch_geometric.nn.GCNN"], ["--model.model", "no attribute 'GCNN'"]),
    "no such module": ([*FIT, "--model.model=nosuch.Model"], ["--model.model", "o module named 'nosuch'"]),
    "no model class": ([*FIT, "--model.model=torch.optim.Adam"], ["--model.model", "torch.optim.Adam", "Module"]),
    "unknown init arg": (
        [*FIT, "--model.model.init_args.hidden=8"],
        ["--model.model: option 'hidden' is not accepted"],
    ),
    "wrong init arg": (
        [*FIT, "--model.model.hidden_channels=x"],
        ["--model.model.hidden_channels: expected int, got 'x'"],
    ),
    "refused init arg": ([*FIT, "--model.model.act=nonsense"], ["'nonsense'"]),
    "unknown backend": ([*FIT, "--model.backend=com"], ["unknown backend 'com'", "comm", "single"]),
    "no such backend class": ([*FIT, "--model.backend=nosuch.Backend"], ["backend 'nosuch.Backend'", "'nosuch'"]),
    "no backend class": ([*FIT, "--model.backend=torch.nn.Linear"], ["torch.nn.Linear is not a backend"]),
    "unknown strategy": ([*FIT, "--trainer.strategy=graph"], ["--trainer.strategy", "'graph'", "graph_ddp"]),
    "ddp": ([*FIT, "--trainer.strategy=ddp", "--trainer.devices=2"], ["--trainer.strategy", "'ddp'", "use graph_ddp"]),
    "wrong strategy option": (
        [*FIT, "--trainer.strategy=pygdist.GraphDDPStrategy", "--trainer.strategy.timeout_s=long"],
        ["--trainer.strategy.timeout_s: expected float, got 'long'"],
    ),
    "unknown optimizer": ([*FIT, "--optimizer=Adan"], ["--optimizer: there is no class 'Adan'"]),
    "unknown optimizer option": ([*FIT, "--optimizer=SGD", "--optimizer.lrr=1"], ["--optimizer: option 'lrr'"]),
    "missing callback option": (
        [*FIT, "--trainer.callbacks+=EarlyStopping"],
        ["--trainer.callbacks.monitor is required"],
    ),
    "missing checkpoint": ([*FIT, "--ckpt_path=no.ckpt"], ["no.ckpt: there is no such checkpoint"]),
    "unreadable checkpoint": ([*FIT, "--ckpt_path=run.yaml"], ["run.yaml: not a Lightning checkpoint"]),
    "predict without checkpoint": (["predict", "--config=run.yaml", "--ckpt_path=no.ckpt"], ["no.ckpt"]),
    "verify on a store": (["verify", "--config=run.yaml", "--data.store=parts"], ["data.dataset", "data.store"]),
    "verify on no process": (["verify", "--config=run.yaml", "--world-size=0"], ["--world-size is 0"]),
    "verify with a wrong number": (["verify", "--world-size=two"], ["--world-size", "'two'"]),
    "verify with an unknown option": (
        ["verify", "--config=run.yaml", "--toleranse=1"],
        ["unknown option --toleranse=1"],
    ),
    "export nothing": (["export"], ["checkpoint, out"]),
    "export no file": (["export", "no.ckpt", "model.pt"], ["no.ckpt: there is no such checkpoint"]),
    "export no checkpoint": (["export", "run.yaml", "model.pt"], ["run.yaml: not a Lightning checkpoint"]),
    "partition nothing": (["partition"], ["give either --dataset or --input"]),
    "partition two things": (["partition", "--dataset=sbm", "--input=e.txt"], ["give either --dataset or --input"]),
    "partition into words": (
        [*PARTITION, "--dataset=sbm", "--parts=two"],
        ["--parts: expected int or 'auto', got 'two'"],
    ),
    "partition into too many": (
        [*PARTITION, "--dataset=sbm", "--dataset_args={num_nodes: 50}", "--parts=51"],
        ["num_parts is 51", "50 nodes"],
    ),
    "unknown method": (
        [*PARTITION, "--dataset=sbm", "--method=metiss"],
        ["unknown partitioner 'metiss'", "chunk, dbh"],
    ),
    "unknown method option": (
        [*PARTITION, "--dataset=sbm", "--method=hash", "--method_args={sed: 1}"],
        ["partitioner 'hash'", "'sed'"],
    ),
    "option of another type": (
        [*PARTITION, "--dataset=sbm", "--method=hash", "--method_args={seed: abc}"],
        ["hash: seed is abc, expected an integer"],
    ),
    "argument of another type": (
        [*PARTITION, "--dataset=sbm", "--dataset_args={num_nodes: many}"],
        ["dataset 'sbm'", "num_nodes is 'many', expected a whole number"],
    ),
    "negative rate": ([*FIT, "--model.lr=-1"], ["lr is -1.0"]),
    "rate beyond float32": ([*FIT, "--model.lr=1e39"], ["lr is 1e+39, expected a number from 0 to 1e+30"]),
    "decay that overflows": ([*FIT, "--model.weight_decay=1e38"], ["weight_decay is 1e+38"]),
    "rate of an optimizer": ([*FIT, "--optimizer=SGD", "--optimizer.lr=1e39"], ["--optimizer.lr is 1e+39"]),
    "factor of a scheduler": (
        [*FIT, "--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=1e300"],
        ["--lr_scheduler.gamma is 1e+300"],
    ),
    "seconds": (
        [*FIT, "--trainer.strategy=graph_ddp", "--trainer.strategy.timeout_s=1e300"],
        ["timeout_s is 1e+300, expected seconds from 0.1 to 1e+09"],
    ),
    "seconds too few": (
        [*FIT, "--trainer.strategy=graph_ddp", "--trainer.strategy.lost_after_s=1e-9"],
        ["lost_after_s is 1e-09"],
    ),
    "pattern": ([*FIT, "--checkpoint.filename={epoch:"], ["--checkpoint.filename", "'{epoch:'"]),
    "empty checkpoint": (["test", "--config=run.yaml", "--ckpt_path="], ["--ckpt_path is empty"]),
    "resume from two": ([*FIT, "--resume", "--ckpt_path=a.ckpt"], ["--resume", "--ckpt_path", "leave one of them out"]),
    "resume what": (["test", "--config=run.yaml", "--resume"], ["--resume is for fit; test takes --ckpt_path=last"]),
    "best of what": (["test", "--config=run.yaml", "--ckpt_path=best"], ["--ckpt_path=best"]),
    "no predictions": (
        ["predict", "--config=run.yaml", "--trainer.limit_predict_batches=0"],
        ["--trainer.limit_predict_batches=0"],
    ),
    "partition over something": ([*PARTITION, "--dataset=sbm", "--out=run.yaml"], ["run.yaml: exists"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("args", "words"), OPTIONS.values(), ids=OPTIONS)
def test_options(args: list[str], words: list[str], folder: Path) -> None:
    before = files(folder)
    assert_mistake(pygdist(*args, folder=folder), *words)
    assert files(folder) == before


GRAPHS = {
    "nan": ["x: 1 of 120 nodes", "NaN", "node 17"],
    "edge": ["edge_index: edge 5 goes from 120", "nodes 0 to 119"],
    "label": ["y: 1 labels out of range", "11 at node 3", "num_classes is 4"],
    "negative": ["y: node 3 has label -7"],
    "missing": ["missing", "neither a folder"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "partition"])
@pytest.mark.parametrize(("name", "words"), GRAPHS.items(), ids=GRAPHS)
def test_graphs(command: str, name: str, words: list[str], folder: Path, graphs: Path) -> None:
    before = files(folder)
    if command == "fit":
        args = ["--config=run.yaml", f"--data.dataset={graphs / name}", "--data.num_classes=4"]
    else:
        args = ["--out=parts", f"--dataset={graphs / name}", "--num_classes=4"]
    assert_mistake(pygdist(command, *args, folder=folder), *words)
    assert files(folder) - {"cache"} == before


def test_verify_names_what_is_wrong_with_a_graph(folder: Path, graphs: Path) -> None:
    for name, words in (("nan", GRAPHS["nan"]), ("one-node", ["num_parts is 2", "1 nodes"])):
        outcome = pygdist("verify", "--config=run.yaml", f"--data.dataset={graphs / name}", folder=folder)
        assert_mistake(outcome, *words)
    assert files(folder) - {"cache"} == {"run.yaml"}


MODELS = {
    "too few outputs": (["--model.model.out_channels=3"], ["3 values per node", "4 classes", "out_channels to 4"]),
    "other inputs": (["--model.model.in_channels=5"], ["12 features per node", "in_channels to 12"]),
    "refused layer": (
        [
            "--model.model=torch_geometric.nn.SuperGATConv",
            "--model.model.init_args={in_channels: 12, out_channels: 4}",
        ],
        ["(SuperGATConv): it samples negative edges"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "verify"])
@pytest.mark.parametrize(("args", "words"), MODELS.values(), ids=MODELS)
def test_models(command: str, args: list[str], words: list[str], folder: Path) -> None:
    before = files(folder)
    assert_mistake(pygdist(command, "--config=run.yaml", *args, folder=folder), *words)
    assert files(folder) - {"cache", "runs"} == before
    assert not any((folder / "runs").glob("*"))


def test_tasks(folder: Path) -> None:
    before = files(folder)
    assert_mistake(pygdist(*FIT, "--task=edges", folder=folder), "--task: 'edges'", "nodes or regression or links")
    test = ("test", "--config=run.yaml", "--task=links")
    assert_mistake(pygdist(*test, folder=folder), "no edges are held out for stage 'test'", "edge_split")
    assert files(folder) - {"cache", "runs"} == before


def test_a_mistake_in_the_syntax_of_a_file_is_placed(folder: Path) -> None:
    (folder / "bad.yaml").write_text("trainer:\n  callbacks: [1, 2\ndata: 3\n")
    assert_mistake(pygdist("fit", "--config=bad.yaml", folder=folder), "bad.yaml:3:", "not valid YAML")


@pytest.mark.slow
def test_a_checkpoint_of_another_model(folder: Path, checkpoint: Path) -> None:
    outcome = pygdist(*FIT, f"--ckpt_path={checkpoint}", "--model.model.hidden_channels=16", folder=folder)
    assert_mistake(outcome, "--ckpt_path", "another model", "size mismatch")


def test_files_that_cannot_be_written(folder: Path, checkpoint: Path) -> None:
    before = files(folder)
    predict = ("predict", "--config=run.yaml", f"--ckpt_path={checkpoint}")
    assert_mistake(pygdist(*predict, "--predictions.path=run.yaml/a.npy", folder=folder), "--predictions.path")
    assert_mistake(pygdist("export", str(checkpoint), "run.yaml/a.pt", folder=folder), "run.yaml/a.pt")
    assert_mistake(pygdist("export", str(checkpoint), "model.bin", folder=folder), "'.bin'", ".safetensors")
    assert files(folder) == before
    for name, command in (
        ("rows", (*predict, "--predictions.path=rows")),
        ("w.pt", ("export", str(checkpoint), "w.pt")),
    ):
        with socket.socket(socket.AF_UNIX) as no_file:  # as /dev/null, which would become a file
            no_file.bind(str(folder / name))
            assert_mistake(pygdist(*command, folder=folder), name, "name a file")
            assert (folder / name).is_socket()


def test_other_parts_are_not_overwritten(folder: Path, graphs: Path) -> None:
    args = ("partition", f"--dataset={graphs / 'good'}", "--out=parts")
    assert pygdist(*args, folder=folder).code == 0
    assert_mistake(pygdist(*args, "--parts=3", folder=folder), "parts: holds another store", "num_parts")
    assert pygdist(*args, "--parts=3", "--overwrite=true", folder=folder).code == 0
