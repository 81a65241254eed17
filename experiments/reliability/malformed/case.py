"""A malformed input: a command line, and what its folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RUN = """\
trainer: {accelerator: cpu, max_epochs: 1, logger: false, enable_checkpointing: false, enable_progress_bar: false}
model:
  model:
    class_path: torch_geometric.nn.GCN
    init_args: {in_channels: -1, hidden_channels: 8, num_layers: 2, out_channels: 4}
data:
  dataset: graph
  cache_dir: cache
"""


REFUSED, TAKEN, EITHER = "refused", "taken", "either"


@dataclass(frozen=True)
class Case:
    """A command line on a folder.

    Attributes:
        kind: Its kind in the table.
        name: Its name among those of the kind.
        arguments: The command line.
        words: The line of error must contain one of them.
        prepare: Fills the folder, which holds what :func:`write_template` writes.
        ends: ``refused``: exit code 2 and one line; ``taken``: success, as nothing is wrong; ``either`` of them.
        environment: Variables of the process.
        begin: Called in the process, in the folder, before the command.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None
    ends: str = REFUSED
    environment: Mapping[str, str] = field(default_factory=dict)
    begin: Callable[[Path], None] = lambda folder: None


FIT = ("fit", "--config=run.yaml")
PARTITION = ("partition", "--dataset=graph", "--out=out")
FILES = ("partition", "--input=edges.txt", "--out=out")
STORE = (*FIT, "--data.store=store")


def writes(name: str, content: bytes) -> Callable[[Path], None]:
    """Return the function that writes a file into the folder of an input."""

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return prepare


def at(index: int, value: Any) -> Callable[[Any], Any]:
    """Return the function that sets an entry of an array."""

    def put(array: Any) -> Any:
        array[index] = value
        return array

    return put


def write_template(folder: Path) -> None:
    """Write what every input begins with: a configuration, a graph, its edges as text, a store of each placement."""
    from pygdist.graph import degree_corrected_sbm, save_npy, write_store

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(RUN)
    data = degree_corrected_sbm(120, num_classes=4, avg_degree=6, num_features=12, seed=3)
    save_npy(data, folder / "graph")
    (folder / "results").mkdir()
    (folder / "results" / "a.csv").write_text("x,y\n1,2\n")
    edges = data.edge_index.t().tolist()
    (folder / "edges.txt").write_text("".join(f"{source} {target}\n" for source, target in edges))
    part = np.zeros(120, dtype=np.int64)
    options: dict[str, Any] = {"num_parts": 1, "method": "given", "arguments": {}}
    write_store(data, part, folder / "store", **options)
    write_store(data, part, folder / "replicas", **options, num_hops=2)
