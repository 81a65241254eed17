"""Cut edges by Libra as DGL 2.1 has it, in a process that imports DGL: ``SITE EDGES NUM_NODES NUM_PARTS OUT``.

``EDGES`` is an array of shape ``(2, E)``; ``OUT`` gets the part of each edge.
"""

import sys
import tempfile
import types

import numpy as np
import torch

site, edges_path, num_nodes, num_parts, out = sys.argv[1:]
sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")  # wants a library for each version of torch
sys.path.insert(0, site)
from dgl._sparse_ops import libra_vertex_cut  # noqa: E402

edges = torch.from_numpy(np.load(edges_path)).long()
degree = torch.bincount(edges.flatten(), minlength=int(num_nodes))
part = torch.zeros(edges.size(1), dtype=torch.int32)
with tempfile.TemporaryDirectory() as folder:
    libra_vertex_cut(
        int(num_parts), degree, degree.clone(), torch.zeros(int(num_parts), dtype=torch.int64), edges[0].contiguous(),
        edges[1].contiguous(), torch.ones(edges.size(1), dtype=torch.int64), part, int(num_nodes), edges.size(1),
        folder,
    )  # fmt: skip
np.save(out, part.numpy())
