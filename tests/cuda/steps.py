"""Steps on the emulated GPU, compared with one process on the CPU. They run in an emulated process."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from pygdist import Shard, distribute
from pygdist.backends import Backend, Savings, resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.nn.inputs import arguments_of
from pygdist.nn.loss import labelled_rows, summed_loss
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step, supported_layers
from pygdist.testing.graphs import random_edge_part, random_graph
from pygdist.testing.layers import LAYERS, build
from tests.cuda.emulation import EmulatedTensor, emulated_gpu


def worst_by_layer(
    backend: str,
    arguments: dict[str, Any],
    savings: dict[str, Any],
    names: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    triton: Literal["no", "runs"] = "no",
) -> dict[str, float]:
    """Return the largest difference of a step on the GPU from one on the CPU, by layer.

    Args:
        backend: Name of the backend.
        arguments: Its arguments.
        savings: Arguments of :class:`Savings`.
        names: Layers; by default all that the backend supports, ``without`` some.
        without: See ``names``.
        triton: As for :func:`emulated_gpu`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shard = _shard(folder, backend)
        return {
            name: _difference(name, shard, backend, arguments, savings, triton)
            for name in names or supported_layers(backend)
            if name not in without
        }


def waits_by_layer(
    backend: str, arguments: dict[str, Any], names: Sequence[str] = (), savings: dict[str, Any] | None = None
) -> dict[str, list[str]]:
    """Return the waits of the host in the third step of a model, by layer; arguments as above."""
    with tempfile.TemporaryDirectory() as folder:
        shard, found = _shard(folder, backend), dict[str, list[str]]()
        for name in names or supported_layers(backend):
            model, runs, communicator = build(name, 5, 3), resolve_backend(backend, **arguments), Communicator()
            with emulated_gpu() as waits:
                there = shard.to("cuda")
                runs.bind(there, communicator)
                model = distribute(model.cuda(), backend=runs, savings=Savings(**(savings or {})), check=False)
                optimizer = torch.optim.Adam(model.parameters())
                (args, inputs), rows = (
                    arguments_of(model, there, there.adjacency),
                    labelled_rows(there.y, there.train_mask),
                )
                for _ in range(3):
                    waits.lines.clear()
                    optimizer.zero_grad()
                    total, count = summed_loss(model(*args, **inputs), there.y, rows)
                    (total / count).backward()
                    optimizer.step()
                found[name] = list(waits.lines)
                runs.unbind()
        return found


def bind(backend: Backend) -> None:
    """Bind a backend to a part on the GPU; within the emulation."""
    with tempfile.TemporaryDirectory() as folder:
        backend.bind(_shard(folder, backend.name).to("cuda"), Communicator())


@contextlib.contextmanager
def group(folder: str, rank: int, name: str) -> Iterator[Communicator]:
    """Make a gloo group of two ranks, which meet under a name in a folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{name}", rank=rank, world_size=2)
    try:
        yield Communicator(dist.new_group())
    finally:
        dist.destroy_process_group()


def _shard(folder: str, backend: str) -> Shard:
    abilities = resolve_backend(backend).abilities
    data, part = random_graph("directed")
    split = abilities.placement == "edges"
    write_store(
        data, part[1], f"{folder}/store", num_parts=1, method="test", arguments={}, num_hops=abilities.num_hops,
        placement=abilities.placement, edge_part=random_edge_part("directed", data.num_edges, 1) if split else None,
    )  # fmt: skip
    return Shard.load(f"{folder}/store", 0)


def _difference(
    name: str,
    shard: Shard,
    backend: str,
    arguments: dict[str, Any],
    savings: dict[str, Any],
    triton: Literal["no", "runs"],
) -> float:
    assert name in LAYERS
    plain = build(name, 5, 3)  # on the host, where lazy layers get their sizes too
    reference = reference_step(copy.deepcopy(plain), random_graph("directed")[0])
    runs, communicator = resolve_backend(backend, **arguments), Communicator()
    with emulated_gpu(triton=triton):
        there = shard.to("cuda")
        runs.bind(there, communicator)
        model = distribute(plain.cuda(), backend=runs, savings=Savings(**savings), check=False)
        step = distributed_step(model, there, communicator)
        assert isinstance(step.output, EmulatedTensor)
        found = largest_differences(step, reference, there.owned_id.cpu())
        runs.unbind()
    return max(one.absolute for one in found.values())
