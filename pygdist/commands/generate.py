"""``pygdist generate``: write a synthetic graph with the shape of a published one, at any scale."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pygdist.commands.messages import Parser


def generate(
    name: str,
    scale: float = 1.0,
    out: Path | None = None,
    seed: int = 0,
    features: bool = True,
    wrong_labels: float = 0.0,
    overwrite: bool = False,
) -> Path:
    """Write a synthetic graph with the size, degrees, features and classes of a published graph to a folder.

    Args:
        name: The graph: reddit-like, products-like, papers-like or mag-like.
        scale: Factor on the published numbers of nodes and edges; 0.1 writes a tenth. The average degree, the width of
            the features and the number of classes stay the same.
        out: The folder to write; it appears when it is complete. By default NAME-SCALE.
        seed: Seed; the same seed gives the same graph.
        features: Write features.
        wrong_labels: Share of the nodes whose label is wrong, that is, of another class. With 0.07 (reddit-like) or
            0.22 (products-like) a GCN is about as accurate as on the published graph.
        overwrite: Replace a finished folder that has other arguments; by default such a folder is refused.

    Returns:
        The folder.
    """
    from pygdist.graph import Progress, write_generated

    options: dict[str, Any] = {
        "scale": scale, "seed": seed, "features": features, "wrong_labels": wrong_labels, "overwrite": overwrite,
    }  # fmt: skip
    return write_generated(name, out or Path(f"{name}-{scale:g}"), **options, progress=Progress())


def parser() -> Parser:
    """Return the parser of the command line."""
    result = Parser(prog="pygdist generate", description=(generate.__doc__ or "").split("\n")[0])
    result.add_function_arguments(generate, as_group=False, as_positional=True)
    result.add_argument("--json", action="store_true", help="print graph.json to standard output, and nothing else")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`generate`."""
    options = parser().parse_args(arguments).as_dict()
    as_json = options.pop("json")
    from pygdist.graph import read_description  # imports torch: not before the options are read

    start = time.monotonic()
    folder = generate(**options)
    description = read_description(folder)
    if as_json:
        sys.stdout.write(json.dumps(description, indent=1) + "\n")
    else:
        _print(description, folder, time.monotonic() - start)
    return 0


def _print(description: dict[str, Any], folder: Path, seconds: float) -> None:
    from pygdist.memory.machine import peak_rss_bytes

    hetero = description["heterogeneous"]
    nodes = Table(title=f"{folder}: {description['name']} at scale {description['scale']:g}")
    for column in ("nodes of type",) * hetero + ("nodes", "features", "classes", "training", "validation", "test"):
        nodes.add_column(column, justify="right")
    for kind, facts in description["nodes"].items():
        numbers = (facts["num_nodes"], facts["num_features"], facts["num_classes"], *facts["split"])
        nodes.add_row(*(kind,) * hetero, *(f"{number:,}" for number in numbers))
    edges = Table()
    for column in ("edges of type",) * hetero + ("edges", "average degree", "largest in-degree", "parallel edges"):
        edges.add_column(column, justify="right")
    for facts in description["edges"]:
        average = facts["num_edges"] / facts["num_nodes"][1]
        numbers = (f"{facts['num_edges']:,}", f"{average:.1f}", f"{facts['largest_in_degree']:,}")
        ends = f"{facts['source']} {facts['relation']} {facts['target']}"
        edges.add_row(*(ends,) * hetero, *numbers, f"{facts['parallel_share']:.1%}")
    console = Console()
    console.print(nodes, edges)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    console.print(f"{size / 1e6:,.1f} MB on disk; {seconds:.1f} s, peak memory {peak_rss_bytes() / 2**30:.2f} GiB")
    homogeneous = f"--data.dataset={folder}, or partition --input={folder}"
    console.print(f"use it with pygdist.graph.load_hetero('{folder}')" if hetero else f"use it with {homogeneous}")
