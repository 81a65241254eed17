"""Results that a backend keeps of its hops until its graph goes, and the classes made for its layers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.hops.blocks import Blocks
from pygdist.hops.first_hop import FirstHop
from pygdist.hops.fused_attention import Unweighted, attention_kernel
from pygdist.hops.hop import Hop, Kernel
from pygdist.hops.host import Host
from pygdist.hops.layer import forget_local_state
from pygdist.nn.degrees import Degrees
from pygdist.nn.label_propagation import OneHot
from pygdist.nn.laplacian import GlobalLaplacian
from pygdist.nn.normalization import GlobalGCNNorm
from pygdist.nn.readouts import Readouts
from pygdist.nn.relations import KeptRelations
from pygdist.nn.self_loops import KeptSelfLoops


class Kept:
    """Holds what one backend keeps, and runs hops with it.

    Args:
        host: The backend.

    Attributes:
        gcn_norm: Normalised edges of GCN and its relatives.
        laplacian: The graph Laplacian.
        self_loops: Edges with self-loops added or removed.
        relations: Edges of single relations.
        readouts: Sums and means over all nodes.
        degrees: In-degrees of nodes.
        one_hot: Numbers as rows of zeros and a one.
        first_hop: Results of hops over fixed rows.
        blocks: Runs messages within a budget of memory.
        layers: The layers that are on this backend.
        classes: By layer class: the subclass that routes its hops to this backend.
        hops: Calls of ``propagate`` in the pass that runs, or ran last.
        names: Names of modules, for messages.
        uncompared: A model was put on this backend to be compared with one process, and has not been called.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.gcn_norm = GlobalGCNNorm(host)
        self.self_loops, self.relations = KeptSelfLoops(host), KeptRelations()
        self.laplacian = GlobalLaplacian(host, self.self_loops)
        self.readouts, self.degrees, self.one_hot = Readouts(host), Degrees(host), OneHot(host)
        self.first_hop, self.blocks = FirstHop(host), Blocks(host)
        self.layers: weakref.WeakSet[MessagePassing] = weakref.WeakSet()
        self.classes: dict[type, type] = {}
        self.hops = 0
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.uncompared = False

    def forget(self) -> None:
        """Drop what was computed for one graph, here and in layers that cache (``cached=True``)."""
        self.gcn_norm.clear()
        self.self_loops.clear()
        self.blocks.forget()
        self.first_hop.forget()
        for layer in self.layers:
            forget_local_state(layer)

    def let_go(self, layer: MessagePassing) -> None:
        """Drop what was computed for one layer, which leaves this backend."""
        self.layers.discard(layer)
        self.first_hop.drop(layer)

    # -- hops whose rows are here --------------------------------------------------------------------------------------

    def kernel_of(self, hop: Hop) -> Kernel | None:
        """Return the attention kernel for ``hop``, if it has one and ``savings.fused_attention`` is on."""
        fused = self.host.savings.fused_attention and self.host.fuses_attention
        return attention_kernel(hop) if fused else None

    def messages(self, hop: Hop) -> Tensor:
        """Compute ``hop`` by the layer's own messages, in blocks where they would take too much memory."""
        # a backend may give one hop the adjacency, and the next one plain edges
        arguments: dict[str, Any] = {
            name: value.weights() if isinstance(value, Unweighted) else value for name, value in hop.arguments.items()
        }
        return self.blocks.run(replace(hop, edge_index=hop.plain_edges, arguments=arguments))
