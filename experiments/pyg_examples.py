"""Runs the node models of PyG's own examples and benchmarks on pygdist, and compares each with plain PyG.

    python -m experiments.pyg_examples --checkout CHECKOUT --out figures

CHECKOUT is a checkout of PyG's repository, or a folder that holds one as ``pytorch_geometric/``; without the option,
the environment variable ``PYG_CHECKOUT`` names it, or it is beside the installed package. No text of PyG is kept here:
a model's classes and functions are taken from its file, which is parsed but not run. ``experiments/pyg_cases.py`` says
how each model is made and called.

Every model runs on a graph with nodes without edges and parts of several sizes: on one process with plain PyG, then on
pygdist with one rank, and with two on each backend; two passes in training, a backward pass, an evaluation, in float64
and without dropout (other random numbers of torch are constants). Models are checked before their first pass, as those
of users are. Verdicts:

- ``exact``: outputs, loss, gradients and buffers differ by at most 1e-10 from those of plain PyG.
- ``refused``: pygdist raised an ``InputError``; the column ``reason`` holds it.
- ``wrong``: numbers differ, and pygdist did not say so. ``crash``: any other exception, or no answer within a minute.
- ``parts``: numbers differ because the model has norms over nodes, which are those of the part with ``replica``.
- ``not run``: plain PyG itself fails here; the column ``reason`` says why.

A ``*`` says that pygdist warned that the model cannot be checked. Prints the table, writes ``pyg_examples.csv``, and
exits with code 1 if a verdict is ``wrong`` or ``crash``.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import os
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import to_undirected

from experiments.machine import provenance
from experiments.pyg_cases import CASES, Case
from pygdist.backends import Backend, ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.hops.arguments import tensors_of
from pygdist.hops.draws import without_randomness
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from pygdist.testing.exactness import Step, largest_differences
from pygdist.testing.ranks import RankError

BACKENDS = ("single", "comm", "cache", "hybrid", "tensor", "replica")
FEATURES, CLASSES, RELATIONS = 8, 3, 2
_FIELDS = ("x", "edge_weight", "edge_attr", "edge_type", "y", "train_mask")
_ROOT = Path(__file__).resolve().parents[1]
_TOLERANCE = 1e-10
_MOST_SECONDS = 60.0


# -- the examples ------------------------------------------------------------------------------------------------------


def definitions(path: Path, stand_ins: dict[str, Any]) -> tuple[types.ModuleType, list[str]]:
    """Execute the imports, classes, functions and plain constants of a script, and nothing else.

    Args:
        path: The script.
        stand_ins: Global variables that the script would have made.

    Returns:
        The module, in ``sys.modules`` so that PyG finds the code of layers, and what could not be imported or defined.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    module = types.ModuleType("_".join(("pyg", *path.with_suffix("").parts[-3:])))
    module.__file__ = str(path)
    vars(module).update({"args": _default_arguments(tree), **stand_ins})
    sys.modules[module.__name__] = module
    missing = []
    for node in tree.body:
        defines = isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef))
        if not defines and not _is_constant(node, stand_ins):
            continue
        try:
            exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
        except (ImportError, NameError) as error:
            missing.append(str(error))
    return module, missing


def _is_constant(node: ast.stmt, taken: dict[str, Any]) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
        return False
    return all(isinstance(one, ast.Name) and one.id not in taken for one in node.targets)


def _default_arguments(tree: ast.Module) -> types.SimpleNamespace:
    """Return the defaults of a script's command line."""
    values = types.SimpleNamespace()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            default = next((one.value for one in node.keywords if one.arg == "default"), ast.Constant(value=False))
            setattr(values, str(names[-1]).strip("-").replace("-", "_"), ast.literal_eval(default))
    return values


def example(checkout: Path, case: Case) -> tuple[types.ModuleType, nn.Module, Data, list[str]]:
    """Return the definitions of an example, its model with parameters from one seed, and its graph."""
    data = graph(case)
    facts = {
        "num_features": FEATURES,
        "num_node_features": FEATURES,
        "num_classes": CLASSES,
        "num_relations": RELATIONS,
    }
    dataset = types.SimpleNamespace(**facts)
    stand_ins = {"dataset": dataset, "train_dataset": dataset, "data": data, "device": torch.device("cpu")}
    module, missing = definitions(checkout / case.file, stand_ins)
    for name, value in case.names.items():
        setattr(module, name, eval(value, vars(module)) if isinstance(value, str) else value)
    torch.manual_seed(0)
    model: nn.Module = eval(case.model, vars(module))
    if any(is_lazy(one) for one in model.parameters()):
        with torch.no_grad():
            _call(case.call, module, model, data)
    return module, model, data, missing


def graph(case: Case) -> Data:
    """Return a graph of 37 nodes, a third of them without edges, as the example's data set is: directed or not."""
    data, _ = random_graph("isolated", num_features=FEATURES, num_classes=CLASSES)
    if not case.directed:
        data.edge_index = to_undirected(data.edge_index)
        data.edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
        drawn = torch.Generator().manual_seed(1)
        data.edge_attr = torch.rand(data.num_edges, 4, generator=drawn, dtype=torch.float64)
        data.edge_weight, data.edge_type = data.edge_attr[:, 0].contiguous(), (data.edge_attr[:, 1] > 0.5).long()
    if case.prepare is not None:
        data = case.prepare(data)
    data.num_nodes = data.x.size(0)
    return data


def _call(text: str, module: types.ModuleType, model: nn.Module, data: Data) -> list[Tensor]:
    """Evaluate the call of a model, and return the floating-point tensors of its output."""
    vars(module)["data"] = data
    out = eval(text, {**vars(module), "model": model, **dict(iter(data))})
    return [one for one in tensors_of(out) if one.is_floating_point()]


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Results of plain PyG: a step, and the number of hops.

    Attributes:
        step: The step.
        of_nodes: Whether each tensor of the output has a row per node, in training and in evaluation.
        num_hops: Number of calls of ``propagate`` in a pass.
        has_norms: The model has norms over nodes.
    """

    step: Step
    of_nodes: dict[bool, list[bool]]
    num_hops: int
    has_norms: bool


def _reference(rank: int, world_size: int, checkout: Path, case: Case) -> Reference | str:
    """Run plain PyG; return why it fails if it does."""
    torch.set_default_dtype(torch.float64)
    missing: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, model, data, missing = example(checkout, case)
            hops: Counter[str] = Counter()
            for one in model.modules():
                if isinstance(one, MessagePassing):
                    one.register_propagate_forward_pre_hook(lambda *_: hops.update(["hops"]))
            of_nodes = {}
            for training in (True, False):
                hops.clear()
                text = case.training_call if training else case.call
                outputs = _call(text, module, model.train(training and not case.draws), data)
                of_nodes[training] = [one.dim() > 0 and one.size(0) == data.num_nodes for one in outputs]
            if not all(any(one) for one in of_nodes.values()):
                return "no output has a row for each node"
            module, model, _, _ = example(checkout, case)
            step = _step(case, module, model, data, of_nodes, torch.arange(data.num_nodes), Communicator())
    except Exception as error:  # of any code of an example
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        return "; ".join([f"{type(error).__name__}: {said}", *(missing if isinstance(error, NameError) else [])])
    finally:
        torch.set_default_dtype(torch.float32)
    return Reference(step, of_nodes, hops["hops"], any(isinstance(one, tuple(GLOBAL_NORMS)) for one in model.modules()))


def _step(
    case: Case,
    module: types.ModuleType,
    model: nn.Module,
    data: Data,
    of_nodes: dict[bool, list[bool]],
    rows: Tensor,
    communicator: Communicator,
) -> Step:
    """Make two passes in training, the backward pass of a weighted sum over training nodes, and an evaluation."""

    def run(training: bool) -> tuple[Tensor, dict[str, Tensor]]:
        text = case.training_call if training else case.call
        outputs = list(zip(_call(text, module, model, data), of_nodes[training], strict=True))
        others = {f"output {at}": one for at, (one, is_row) in enumerate(outputs) if not is_row}
        of_rows = [one for one, is_row in outputs if is_row]
        assert all(len(one) == len(rows) for one in of_rows), "an output has other rows than the rank's own"
        return torch.cat([one.flatten(1) for one in of_rows], 1), others

    with without_randomness():
        model.train(not case.draws)
        run(True)
        out, others = run(True)
        weights = torch.randn(1000, out.size(1), generator=torch.Generator().manual_seed(2))[rows]
        total = (out * weights * data.train_mask.view(-1, 1)).sum()
        if total.requires_grad:
            total.backward()
        model.eval()
        with torch.no_grad():
            evaluated, _ = run(False)
    parameters = dict(model.named_parameters())
    flat = [total.detach().view(1)]
    flat += [(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in parameters.values()]
    summed = communicator.sum_over_ranks(torch.cat(flat), label="gradients").split([one.numel() for one in flat])
    buffers = {name: one for name, one in model.named_buffers() if one.is_floating_point()}
    return Step(
        loss=float(summed[0]),
        output=out.detach(),
        gradients={name: one.view(parameters[name].shape) for name, one in zip(parameters, summed[1:], strict=True)},
        parameters={},
        buffers=buffers | {name: one.detach() for name, one in others.items()},
        evaluated=evaluated,
        unused=frozenset(),
    )


def _on_rank(
    rank: int, world_size: int, checkout: Path, case: Case, backend: Backend, store: str, reference: Reference
) -> tuple[str, float, str]:
    """Return the verdict, the largest difference, and what pygdist said."""
    torch.set_default_dtype(torch.float64)
    shard = Shard.load(store, rank)
    communicator = Communicator(dist.new_group())
    backend.bind(shard, communicator)
    fields = {name: getattr(shard, name) for name in _FIELDS if getattr(shard, name) is not None}
    data = Data(edge_index=shard.adjacency, **fields)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, model, _, _ = example(checkout, case)
            for one in model.state_dict().values():  # as DistributedDataParallel does; PyG leaves some unset
                dist.broadcast(one, 0)
            distribute(model, backend=backend)
            step = _step(case, module, model, data, reference.of_nodes, shard.owned_id, communicator)
    except InputError as error:
        return "refused", 0.0, str(error)
    finally:
        torch.set_default_dtype(torch.float32)
        backend.unbind()
    said = next((str(one.message) for one in caught if "without having been compared" in str(one.message)), "")
    try:
        differences = largest_differences(step, reference.step, shard.owned_id)
    except AssertionError as error:  # of other shapes
        return "wrong", float("inf"), str(error)
    quantity = max(differences, key=lambda name: differences[name].relative)
    difference = differences[quantity].relative
    if difference <= _TOLERANCE:
        return "exact", difference, said
    return "wrong", difference, f"{quantity} differs by {difference:.1e}. {said}".strip()


def verdict(
    pool: RankPool, checkout: Path, case: Case, name: str, reference: Reference, work: Path
) -> tuple[str, float, str]:
    """Run a case on a backend; return the verdict, the largest difference, and what pygdist said."""
    hops = max(reference.num_hops, 1)
    backend = ReplicaBackend(hops=hops) if name == "replica" else resolve_backend(name)
    ranks = 1 if name == "single" else 2
    store = work / "store"
    data = graph(case)
    part = np.arange(data.num_nodes) % 3 // 2 if ranks == 2 else np.zeros(data.num_nodes, dtype=np.int64)
    write_store(
        data, part, store, num_parts=ranks, method="examples", arguments={}, num_classes=CLASSES,
        num_hops=hops if name == "replica" else backend.abilities.num_hops, placement=backend.abilities.placement,
        overwrite=store.exists(),
    )  # fmt: skip
    try:
        found = pool.run(_on_rank, ranks, checkout, case, backend, str(store), reference)
    except RankError as error:
        return "crash", 0.0, str(error).strip().splitlines()[-1]
    verdicts = {one for one, _, _ in found}
    if "refused" in verdicts and len(verdicts) > 1:
        return "crash", 0.0, "one rank refuses the model alone"
    worst = max(found, key=lambda one: (one[0] != "exact", one[1]))
    if worst[0] == "wrong" and name == "replica" and reference.has_norms:
        return "parts", worst[1], "norms over nodes are those of the part"
    said = next((text for _, _, text in found if text), "")
    return worst[0] + ("*" if "without having been compared" in said else ""), worst[1], said


# -- the table ---------------------------------------------------------------------------------------------------------


def row(pool: RankPool, checkout: Path, case: Case, backends: Sequence[str], work: Path) -> dict[str, str]:
    """Return the row of a case: a verdict per backend, and the reasons."""
    shown = {"file": case.file, "model": case.title, **dict.fromkeys(BACKENDS, ""), "difference": "", "reason": ""}
    if not (checkout / case.file).is_file():
        return shown | dict.fromkeys(backends, "not run") | {"reason": "the checkout has no such file"}
    try:
        (reference,) = pool.run(_reference, 1, checkout, case)
    except RankError as error:
        reference = str(error).strip().splitlines()[-1]
    if isinstance(reference, str):
        return shown | dict.fromkeys(backends, "not run") | {"reason": f"plain PyG: {reference}"}
    reasons: dict[str, list[str]] = {}
    largest = 0.0
    for name in backends:
        shown[name], difference, said = verdict(pool, checkout, case, name, reference, work)
        largest = max(largest, difference)
        if said:
            reasons.setdefault(_without_places(said, checkout).replace(f"'{name}'", "'...'"), []).append(name)
    shown["difference"] = f"{largest:.0e}"
    shown["reason"] = " | ".join(f"{', '.join(names)}: {said}" for said, names in reasons.items())
    return shown


def _without_places(text: str, checkout: Path) -> str:
    """Return a message without the folders of this machine."""
    return re.sub(r"/\S*/site-packages/", "", text.replace(f"{checkout}/", "").replace(f"{_ROOT}/", ""))


def find_checkout(given: Path | None) -> Path:
    """Return the folder that holds ``examples/``.

    Raises:
        InputError: If there is none.
    """
    spec = importlib.util.find_spec("torch_geometric")
    beside = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []
    named = [Path(os.environ["PYG_CHECKOUT"])] if "PYG_CHECKOUT" in os.environ else []
    for place in [given] if given is not None else [*named, *beside]:
        for folder in (place, place / "pytorch_geometric"):
            if (folder / "examples" / "gcn.py").is_file():
                return folder.resolve()
    raise InputError(
        f"there is no examples/gcn.py in {given or 'PYG_CHECKOUT or beside the installed package'}; give --checkout, "
        "a checkout of PyG's repository"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--checkout", type=Path, help="checkout of PyG's repository, or a folder that holds it")
    cli.add_argument("--files", nargs="+", metavar="FILE", help="run only these files of the checkout")
    cli.add_argument("--models", nargs="+", metavar="MODEL", help="run only these models of the files")
    cli.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for pyg_examples.csv")
    return cli


def chosen(files: Sequence[str] | None, models: Sequence[str] | None) -> list[Case]:
    """Return the cases to run.

    Raises:
        InputError: If no case has a name that is given.
    """
    for given, known in ((files, {one.file for one in CASES}), (models, {one.title for one in CASES})):
        unknown = sorted(set(given or ()) - known)
        if unknown:
            raise InputError(f"experiments/pyg_cases.py has no {', '.join(unknown)}")
    return [one for one in CASES if one.file in (files or [one.file]) and one.title in (models or [one.title])]


def main() -> int:
    """Run the cases that the command line asks for; 1 if any is wrong or crashes, 2 after a mistake."""
    options = parser().parse_args()
    try:
        checkout, cases = find_checkout(options.checkout), chosen(options.files, options.models)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows, facts = [], provenance(1)
    options.out.mkdir(parents=True, exist_ok=True)
    shown = Table("file", "model", *options.backends, title="PyG's examples on pygdist")
    with (
        tempfile.TemporaryDirectory(prefix="pygdist-examples-") as work,
        RankPool(2, timeout_s=_MOST_SECONDS) as pool,
        (options.out / "pyg_examples.csv").open("w", newline="") as file,
    ):
        for case in cases:
            rows.append(row(pool, checkout, case, options.backends, Path(work)))
            writer = csv.DictWriter(file, fieldnames=[*rows[0], *facts])
            if len(rows) == 1:
                writer.writeheader()
            writer.writerow({**rows[-1], **facts})
            file.flush()
            shown.add_row(*(rows[-1][name] for name in ("file", "model", *options.backends)))
            print(" ".join(rows[-1][name] or "-" for name in rows[0]), file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    counts = Counter(one[name].rstrip("*") for one in rows for name in options.backends)
    print(f"{len({one.file for one in cases})} files, {len(cases)} models: "
          + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))  # fmt: skip
    return int(bool(counts["wrong"] or counts["crash"]))


if __name__ == "__main__":
    raise SystemExit(main())
