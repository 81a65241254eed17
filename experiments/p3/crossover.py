"""The hidden width from which features that are pulled cost less than sums: predicted from samples, and measured.

    python -m experiments.p3.crossover --figures experiments/p3/results/hidden.csv --out results

A batch has S nodes, of which R have E in-edges, and D rows of the first layer's output are needed. ``pull`` fetches the
features of S nodes, of which 1/N are local; ``pushpull`` sends sums of D rows and their gradients to N - 1 hosts. By
these alone the two meet at H* = S F / (2 N D) channels; the structure that is pushed makes it less.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from experiments.catgnn.graphs import show, write
from experiments.machine import provenance

COLUMNS = (
    "hidden", "backend", "epoch_s", "sent_bytes", "predicted_bytes", "nodes", "rows", "edges", "predicted", "by_parts",
    "by_bytes", "by_seconds",
)  # fmt: skip
BYTES = 4  # of a number, and of an id


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--figures", type=Path, default=Path(__file__).parent / "results" / "hidden.csv")
    cli.add_argument("--scale", type=float, help="scale of the graph that is sampled, instead of the table's")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def sampled(graph: str, graph_args: dict[str, Any], fan_out: list[int], batch: int, hosts: int) -> dict[str, float]:
    """Sample one epoch of each host's batches, of nodes that are hashed; return means over them, and their number."""
    import torch

    from pygdist.graph import load_graph, prepare
    from pygdist.kernels import CSR
    from pygdist.sampler import _native

    data, _ = prepare(load_graph(graph, **graph_args))
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], num_rows=data.num_nodes, num_cols=data.num_nodes)
    train = data.train_mask.nonzero().view(-1)
    train = train[torch.randperm(train.numel(), generator=torch.Generator().manual_seed(0))]
    steps = -(-train.numel() // hosts // batch)
    nodes, rows, edges = 0, 0, 0
    for seeds in train.tensor_split(steps * hosts):
        found = _native.sample(csr, seeds, fan_out, replace=False, seed=0, epoch=0)
        nodes, rows, edges = (
            nodes + found.node.numel(), rows + sum(found.num_nodes[:-1]), edges + sum(found.num_edges)
        )  # fmt: skip
    count = steps * hosts
    return {
        "nodes": nodes / count, "rows": rows / count, "edges": edges / count, "batches": count,
        "features": data.x.size(1),
    }  # fmt: skip


def crossing(hidden: list[int], one: list[float], other: list[float]) -> float | str:
    """Return where ``one`` begins to exceed ``other``, by straight lines between the widths; empty if nowhere."""
    apart = [first - second for first, second in zip(one, other, strict=True)]
    for left, right, before, after in zip(hidden, hidden[1:], apart, apart[1:], strict=False):
        if before <= 0 < after:
            return round(left + (right - left) * -before / (after - before), 1)
    return ""


def main() -> int:
    """Read the measured table, sample the batches behind it, and write what was predicted beside what was measured."""
    options = parser().parse_args()
    with options.figures.open(newline="") as file:
        measured = [row for row in csv.DictReader(file) if row["epoch_s"]]
    first = measured[0]
    chosen = json.loads(first["fit"])["data"]["batches"]["init_args"]
    hosts, args = int(first["ranks"]), json.loads(first["graph_args"] or "{}")
    args |= {} if options.scale is None else {"scale": options.scale}
    sizes = sampled(first["graph"], args, chosen["fan_out"], chosen["batch_size"], hosts)
    by_backend: dict[str, dict[int, dict[str, str]]] = {"pull": {}, "pushpull": {}}
    for row in measured:
        by_backend[row["backend"]][json.loads(row["model_args"])["hidden_channels"]] = row
    hidden = sorted(set(by_backend["pull"]) & set(by_backend["pushpull"]))
    structure = 4 * (sizes["edges"] + 2 * sizes["rows"]) + 64
    # the last layer's own width counts in no exchange
    pulled = sizes["batches"] * (hosts - 1) / hosts * sizes["nodes"] * BYTES * (sizes["features"] + 1)
    pushed = [sizes["batches"] * (hosts - 1) * (structure + 2 * sizes["rows"] * width * BYTES) for width in hidden]
    bytes_of = {"pull": [pulled] * len(hidden), "pushpull": pushed}
    figures = {
        name: [[float(by_backend[backend][width][name]) for width in hidden] for backend in ("pushpull", "pull")]
        for name in ("sent_bytes", "epoch_s")
    }
    found = {
        "predicted": round(sizes["nodes"] * sizes["features"] / (2 * hosts * sizes["rows"]), 1),
        "by_parts": crossing(hidden, bytes_of["pushpull"], bytes_of["pull"]),
        "by_bytes": crossing(hidden, *figures["sent_bytes"]),
        "by_seconds": crossing(hidden, *figures["epoch_s"]),
    }
    rows = [
        {
            "hidden": width, "backend": backend, "epoch_s": float(by_backend[backend][width]["epoch_s"]),
            "sent_bytes": float(by_backend[backend][width]["sent_bytes"]),
            "predicted_bytes": round(bytes_of[backend][number]),
            **{name: round(sizes[name], 1) for name in ("nodes", "rows", "edges")}, **found,
        } | provenance(1)
        for number, width in enumerate(hidden)
        for backend in by_backend
    ]  # fmt: skip
    write(rows, options.out / "crossover.csv")
    show([{column: row[column] for column in COLUMNS} for row in rows], "Where push-pull stops to pay")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
