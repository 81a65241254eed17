"""``pygdist verify``: compare one training step on N processes with the same step on one process."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch_geometric.data import Data

from pygdist.backends import Backend, SingleBackend
from pygdist.comm import Communicator
from pygdist.commands.messages import ArgumentParser
from pygdist.commands.train import GraphCLI
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.layer import own_class
from pygdist.hops.user_code import in_one_line
from pygdist.lightning import GraphDataModule, LinkPredictor, NodeRegressor
from pygdist.memory.limits import writes_to
from pygdist.nn.inputs import checked_columns, checked_rows, fill_in_sizes, outputs_of
from pygdist.nn.loss import Losses, Regression, node_losses, value_losses
from pygdist.routing import distribute
from pygdist.routing.causes import ELSEWHERE, reads_missing_rows
from pygdist.testing import Difference, RankPool, Step, without_randomness
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step

log = logging.getLogger(__name__)

Reference = Literal["auto", "pyg", "single"]
_ONE_TENSOR = "wrap the model in a module that returns one tensor with a row per node"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def verify(
    model: nn.Module,
    backend: Backend,
    data: GraphDataModule,
    *,
    world_size: int,
    reference: Reference = "auto",
    double: bool = False,
    loss: Regression | None = None,
) -> tuple[dict[str, Difference], str]:
    """Compare one training step on ``world_size`` processes with one process, dropout off.

    Args:
        model: The model; it is not changed.
        backend: The backend to verify.
        data: The graph; it is partitioned into ``world_size`` parts.
        world_size: Number of processes.
        reference: Code of the one process. ``pyg`` is plain PyTorch Geometric on the whole graph; ``single`` is the
            backend ``single``; ``auto`` is ``pyg`` if PyG's messages (edges x features) fit in memory, else ``single``.
        double: Compute in float64.
        loss: The loss of :class:`~pygdist.lightning.NodeRegressor`; by default that of
            :class:`~pygdist.lightning.NodeClassifier`.

    Returns:
        The largest difference over all ranks in the loss, the output, each gradient, each updated parameter and each
        buffer, by name; and the reference that was used.

    Raises:
        InputError: If the input cannot be used or a layer cannot run on the backend.
    """
    if data.store is not None:
        raise InputError("verify needs the whole graph for its reference: give data.dataset in place of data.store")
    if world_size < 1:
        raise InputError(f"--world-size is {world_size}, expected at least 1")
    if backend.abilities.mini_batches:
        raise InputError(
            f"verify compares a step on the whole graph, but backend '{backend.name}' trains on parts or "
            "mini-batches; verify the model with --model.backend=comm"
        )
    data.model = model
    whole, _ = data.load()
    if data.num_parts not in (None, world_size):
        log.info("num_parts=%s is not used: each of %d processes gets one part", data.num_parts, world_size)
    data.num_parts, data.backend = world_size, backend
    writes_to(data.cache_dir)
    data.prepare_data()
    whole = whole.apply(lambda value: value.to(_dtype(double)) if value.is_floating_point() else value)
    losses = None if loss is None else partial(value_losses, loss=loss)
    model = _fitted(model.double() if double else model.float(), whole, data.meta, losses)
    distribute(copy.deepcopy(model), backend=backend)  # refuses what cannot run, before any process is started
    used = _choose_reference(reference, whole)
    log.info("one step on one process (%s), %d nodes, %d edges", used, whole.num_nodes, whole.num_edges)
    with without_randomness():
        alone = copy.deepcopy(model)
        expected = reference_step(alone, whole, losses) if used == "pyg" else _single_step(alone, data, double, losses)
    log.info("the same step on %d processes, backend %s", world_size, backend.name or type(backend).__name__)
    with RankPool(world_size) as pool:
        answers = pool.run(_compare, world_size, model, backend, str(data.folder), expected, double, losses)
    if mistake := next((answer for answer in answers if isinstance(answer, str)), None):
        raise InputError(mistake)
    return _merge(answers), used


def _compare(
    rank: int,
    world_size: int,
    model: nn.Module,
    backend: Backend,
    folder: str,
    expected: Step,
    double: bool,
    losses: Losses | None,
) -> dict[str, Difference] | str:
    """Return the differences on one rank, or the mistake in the input, which every rank finds."""
    communicator = Communicator(dist.new_group(), check_order=True)
    try:
        shard = Shard.load(folder, rank, num_parts=world_size).astype(_dtype(double))
        backend.bind(shard, communicator)
        distribute(model, backend=backend, check=False)
        with without_randomness():
            step = distributed_step(model, shard, communicator, losses=losses or node_losses)
        return largest_differences(step, expected, shard.owned_id)
    except InputError as error:
        return str(error)
    except (IndexError, RuntimeError, ValueError) as error:
        if not reads_missing_rows(error):
            raise
        name = own_class(model).__name__
        return f"{name} ran on one process, and failed on rank {rank}: {in_one_line(error)}. {ELSEWHERE}"


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist verify",
        allow_abbrev=False,  # an option of fit may be a prefix of ours
        description="Compare one training step on N processes with the same step on one process. The exit status is 1 "
        "if a number differs by more than the tolerance. The options of 'pygdist fit' choose model, backend and graph; "
        "--data.store, --task=links, and backends that train on parts or mini-batches are refused.",
    )
    result.add_argument("--world-size", "--world_size", type=int, default=2, help="number of processes (default: 2)")
    result.add_argument(
        "--reference", choices=["auto", "pyg", "single"], default="auto",
        help="code that the one process runs: pyg is plain PyTorch Geometric, single is the backend single, auto is "
        "pyg if PyG's messages fit in memory, else single",
    )  # fmt: skip
    result.add_argument("--double", action="store_true", help="compute in float64")
    result.add_argument(
        "--tolerance", type=float,
        help="largest relative difference that counts as equal (default: 1e-5, with --double 1e-10)",
    )  # fmt: skip
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`verify`, which takes the options of ``fit``, too."""
    options, rest = parser().parse_known_args(arguments)
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        raise InputError(f"--tolerance is {options.tolerance}, expected a finite number from 0")
    cli = GraphCLI(["fit", *rest])
    if isinstance(cli.model, LinkPredictor):
        raise InputError("--task=links: verify compares a step on labels of nodes; leave --task out")
    named = {name: getattr(options, name) for name in ("world_size", "reference", "double")}
    if isinstance(cli.model, NodeRegressor):
        named["loss"] = cli.model.loss
        cli.datamodule.preprocessing["float_labels"] = True
    differences, used = verify(cli.model.model, cli.model.backend, cli.datamodule, **named)
    tolerance = options.tolerance if options.tolerance is not None else TOLERANCE[_dtype(options.double)]
    return _report(differences, tolerance, f"{options.world_size} processes against one ({used})")


def _report(differences: Mapping[str, Difference], tolerance: float, title: str) -> int:
    table = Table("quantity", "absolute", "relative", title=title)
    for name, difference in differences.items():
        style = None if difference.relative <= tolerance else "bold red"
        table.add_row(name, f"{difference.absolute:.1e}", f"{difference.relative:.1e}", style=style)
    worst = max(differences, key=lambda name: differences[name].relative)
    ok = differences[worst].relative <= tolerance
    console = Console()
    console.print(table)
    console.print(
        f"{'equal' if ok else 'NOT equal'} within {tolerance:.0e}: the largest relative difference is "
        f"{differences[worst].relative:.1e} ({worst})"
    )
    return 0 if ok else 1


def _merge(ranks: list[dict[str, Difference]]) -> dict[str, Difference]:
    return {
        name: Difference(max(rank[name].absolute for rank in ranks), max(rank[name].relative for rank in ranks))
        for name in ranks[0]
    }


def _choose_reference(reference: Reference, data: Data) -> str:
    if reference != "auto":
        return reference
    # PyG holds about three copies of edges x features: gathered, scaled, and for the backward pass
    messages = 3 * data.edge_index.size(1) * data.x.size(1) * data.x.element_size()
    return "pyg" if messages < psutil.virtual_memory().available / 2 else "single"


def _single_step(model: nn.Module, data: GraphDataModule, double: bool, losses: Losses | None) -> Step:
    alone = copy.copy(data)
    alone.num_parts, alone.backend = 1, (backend := SingleBackend())
    alone.partitioner, alone.partitioner_args = None, {}
    alone.prepare_data()
    shard = Shard.load(alone.folder, 0, num_parts=1).astype(_dtype(double))
    backend.bind(shard, Communicator())
    model = distribute(model, backend=backend, check=False)
    return distributed_step(model, shard, Communicator(), losses=losses or node_losses)


def _fitted(model: nn.Module, data: Data, meta: Mapping[str, Any], losses: Losses | None) -> nn.Module:
    """Fill in unknown input sizes of the model, and run it on the first edge: wrong sizes are refused at once."""
    fill_in_sizes(model, data)
    few = data.subgraph(data.edge_index[:, :1].unique() if data.num_edges else torch.zeros(1, dtype=torch.long))
    probe = copy.deepcopy(model).eval()  # in training, norms would refuse or record the statistics of one edge
    with torch.no_grad():
        out = outputs_of(probe, few, few.edge_index)
    if losses is not None and "y" in few:
        losses(out, few.y)
    elif "targets" in meta:
        raise InputError("the labels (y) of the graph are numbers to predict, not classes; use --task=regression")
    else:
        checked_columns(
            checked_rows(out, _ONE_TENSOR), num_classes=meta["num_classes"], multi_label=meta["multi_label"]
        )
    return model


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32
