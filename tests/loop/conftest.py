"""The graph of the tests of ``accelerate``."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from pygdist.testing import random_graph
from tests.loop.graphs import reordered


@pytest.fixture
def data() -> Data:
    """A directed graph whose edges are in no order."""
    graph = random_graph("directed")[0].clone()
    return reordered(graph, torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0)))
