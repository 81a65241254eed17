"""Partitions a graph of 1 billion edges and 60 million nodes with ``pygdist partition``, on one small machine.

    python -m experiments.catgnn.billion --folder /a/disk/with/60/GB --out results
    python -m experiments.catgnn.billion --nodes 600000 --edges 10000000 --parts 8     # a trial

The script streams generated edges to disk, partitions them by the command line in a separate process, and looks for a
sample of the edges in the parts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.catgnn.graphs import show, write
from experiments.catgnn.throughput import generate
from pygdist.graph import EdgeFile, read_meta

_GIB = 2**30


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--nodes", type=int, default=60_000_000)
    cli.add_argument("--edges", type=int, default=1_000_000_000)
    cli.add_argument("--method", default="spring")
    cli.add_argument("--parts", type=int, default=32)
    cli.add_argument(
        "--folder", type=Path, default=Path(), help="folder for edges and parts; needs about 40 bytes per edge"
    )
    cli.add_argument("--sample", type=int, default=1000, help="number of edges to look for in the parts")
    cli.add_argument("--out", type=Path, default=Path("results"))
    return cli


def main() -> None:
    """Run what the command line asks for."""
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        row = run(Path(folder), options)
    write([row], options.out / "billion.csv")
    show([{"figure": name, "value": value} for name, value in row.items()], "pygdist partition")


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate the graph, partition it, check the parts, and return the figures."""
    start = time.perf_counter()
    generate(folder / "edges.npy", options.nodes, options.edges)
    generated = time.perf_counter() - start
    needed = 40 * options.edges - (folder / "edges.npy").stat().st_size
    if shutil.disk_usage(folder).free < needed:
        raise SystemExit(f"{folder}: needs {needed / _GIB:.0f} GiB of free disk space; give another --folder")
    command = [sys.executable, "-m", "pygdist.cli", "partition", f"--input={folder / 'edges.npy'}"]
    command += [f"--num_nodes={options.nodes}", f"--method={options.method}", f"--parts={options.parts}"]
    start = time.perf_counter()
    subprocess.run([*command, f"--out={folder / 'parts'}", "--json"], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    meta = read_meta(folder / "parts")
    look(folder, meta, options.sample)
    names = ("method", "num_parts", "num_nodes", "num_edges", "replication_factor_full", "edge_cut", "num_clusters",
             "num_merged_clusters", "seconds", "edges_per_second", "seconds_writing")  # fmt: skip
    sizes = [sum(one["files"][name]["bytes"] for name in one["files"]) for one in meta["parts"]]
    return {
        **{name: meta.get(name) for name in names},
        "seconds_generating": generated,
        "seconds_command": seconds,
        "peak_gib": meta["peak_rss_bytes"] / _GIB,
        "bytes_of_parts": sum(sizes),
        "nodes_balance": max(one["num_owned"] for one in meta["parts"]) * options.parts / options.nodes,
        "edges_balance": max(one["num_edges"] for one in meta["parts"]) * options.parts / options.edges,
        "json": json.dumps(meta["arguments"]),
    }


def look(folder: Path, meta: dict[str, Any], sample: int) -> None:
    """Check that each sampled edge is only in the part that owns its target, and that each node has one owner."""
    edges, rng = EdgeFile(folder / "edges.npy"), np.random.default_rng(0)
    wanted = np.sort(rng.choice(edges.num_edges, min(sample, edges.num_edges), replace=False))
    ends = np.concatenate([edges.read(edge, edge + 1) for edge in wanted], axis=1)
    copies = np.zeros(len(wanted), dtype=np.int64)
    num_owned = 0
    for part, one in enumerate(meta["parts"]):
        place = folder / "parts" / f"part_{part}"
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in ("n_id", "indptr", "src", "e_id")}
        owned = arrays["n_id"][: one["num_owned"]]
        num_owned += len(owned)
        for number, (source, target) in enumerate(ends.T):
            row = int(np.searchsorted(owned, target))
            if row < len(owned) and owned[row] == target:
                entries = slice(arrays["indptr"][row], arrays["indptr"][row + 1])
                at = np.searchsorted(arrays["e_id"][entries], wanted[number]) + entries.start
                assert arrays["e_id"][at] == wanted[number], f"edge {wanted[number]} is not in part {part}"
                assert arrays["n_id"][arrays["src"][at]] == source, f"edge {wanted[number]} has another source"
                copies[number] += 1
    assert (copies == 1).all(), f"edges {wanted[copies != 1]} are not in one part"
    assert num_owned == meta["num_nodes"], f"{num_owned} owned rows"


if __name__ == "__main__":
    main()
