"""Helpers: what memory of its own a process has, a limit on it, and a graph that takes some."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from torch_geometric.data import Data


def private_bytes() -> int:
    """Memory that the system has given to this process alone."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextlib.contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Who asks the system for more memory of its own than that gets none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def return_freed_memory() -> None:
    """Give every freed tensor's memory back to the system, so that what a process has is what it holds."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16) == 1


def large_graph(num_nodes: int, degree: int, width: int) -> Data:
    """A random graph in which every node is learned from."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, num_nodes, (2, num_nodes * degree), generator=generator)
    return Data(
        x=torch.rand(num_nodes, width, generator=generator, dtype=torch.float64),
        edge_index=edges[:, edges[1].argsort(stable=True)],
        y=torch.randint(0, 3, (num_nodes,), generator=generator),
        train_mask=torch.ones(num_nodes, dtype=torch.bool),
    )
