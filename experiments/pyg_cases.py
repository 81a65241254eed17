"""How the models of PyG's examples and benchmarks are made and called; see ``pyg_examples.py``.

Texts are Python expressions. Those of ``model`` see the definitions of the example's file, and in place of its data set
the small graph of the experiment; widths and depths are smaller than in the examples. Those of ``call`` see ``model``,
``data`` and the graph's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import degree


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model of one file.

    Attributes:
        file: The file, in the checkout.
        model: Makes the model.
        call: Calls it.
        trains: Calls it in training, if otherwise.
        title: The model's name in the table; by default the name that ``model`` begins with.
        directed: The example's data set is a directed graph.
        draws: In training the model draws random numbers, dropout aside; it is compared in evaluation alone.
        names: What the script assigns to names that the file's classes use; texts are expressions.
        prepare: The transform of the script.
    """

    file: str
    model: str
    call: str = "model(x, edge_index)"
    trains: str = ""
    title: str = ""
    directed: bool = False
    draws: bool = False
    names: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Data], Data] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.model.split("(")[0])

    @property
    def training_call(self) -> str:
        """Calls the model in training."""
        return self.trains or self.call


def target_indegree(data: Data) -> Data:
    """Give each edge the in-degree of its target, as ``TargetIndegree`` does."""
    count = degree(data.edge_index[1], data.num_nodes, dtype=data.x.dtype)[data.edge_index[1]]
    data.edge_attr = (count / count.max()).view(-1, 1)
    return data


def gcn_norm(data: Data) -> Data:
    """Add self-loops and normalised weights, as ``GCNNorm`` does, and sort edges again."""
    ones = torch.ones(data.num_edges, dtype=data.x.dtype)
    made = GCNNorm()(Data(edge_index=data.edge_index, edge_weight=ones, num_nodes=data.num_nodes))
    order = made.edge_index[1].argsort(stable=True)
    kept: dict[str, Any] = {name: data[name] for name in ("x", "y", "train_mask")}
    return Data(edge_index=made.edge_index[:, order], edge_weight=made.edge_weight[order], **kept)


_NET = "Net(dataset.num_features, 16, dataset.num_classes, num_layers=3)"
_READS_GLOBAL = "model()"
_TAKES_DATA = "model(data)"
_RELATIONS = "model(x, edge_index, edge_type)"
_GCN2 = "Net(hidden_channels=16, num_layers=4, alpha=0.1, theta=0.5)"
_PLAIN = "in_channels=dataset.num_features, hidden_channels=16, out_channels=dataset.num_classes"


def _typed(node_type: str, more: str = "") -> str:
    return f"model({{'{node_type}': x}}, {{('{node_type}', 'to', '{node_type}'): edge_index}}{more})"


def _metadata(node_type: str) -> str:
    return f"(['{node_type}'], [('{node_type}', 'to', '{node_type}')])"


@dataclass(frozen=True)
class OneType:
    """In place of a graph with node types: the types of one that has one of nodes and one of edges."""

    node_type: str

    @property
    def node_types(self) -> list[str]:
        """The node types."""
        return [self.node_type]

    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Return the node types and the edge types."""
        return [self.node_type], [(self.node_type, "to", self.node_type)]


CASES = [
    Case(file="examples/agnn.py", model="Net()", call=_READS_GLOBAL),
    Case(file="examples/ar_link_pred.py", model="GCNEncoder(dataset.num_features, 16, 8)"),
    Case(
        file="examples/argva_node_clustering.py",
        model="ARGVA(Encoder(dataset.num_features, 16, 8), Discriminator(8, 16, 8))",
        call="model.encode(x, edge_index)",
        draws=True,
    ),
    Case(file="examples/arma.py", model="Net()", call=_READS_GLOBAL),
    Case(file="examples/autoencoder.py", model="GCNEncoder(dataset.num_features, 8)"),
    Case(file="examples/autoencoder.py", model="VariationalGCNEncoder(dataset.num_features, 8)"),
    Case(file="examples/autoencoder.py", model="LinearEncoder(dataset.num_features, 8)"),
    Case(file="examples/autoencoder.py", model="VariationalLinearEncoder(dataset.num_features, 8)"),
    Case(file="examples/autoencoder.py", model="GAE(GCNEncoder(dataset.num_features, 8))", title="GAE.forward"),
    Case(
        file="examples/autoencoder.py",
        model="GAE(GCNEncoder(dataset.num_features, 8))",
        call="model.encode(x, edge_index)",
        title="GAE.encode",
    ),
    Case(
        file="examples/autoencoder.py",
        model="VGAE(VariationalGCNEncoder(dataset.num_features, 8))",
        call="model.encode(x, edge_index)",
        title="VGAE.encode",
        draws=True,
    ),
    Case(file="examples/cluster_gcn_ppi.py", model=_NET),
    Case(file="examples/cluster_gcn_reddit.py", model="Net(dataset.num_features, dataset.num_classes)"),
    Case(
        file="examples/compile/gcn.py",
        model="GCN(dataset.num_features, 16, dataset.num_classes)",
        prepare=gcn_norm,
        call="model(x, edge_index, edge_weight)",
    ),
    Case(file="examples/cora.py", model="Net()", call=_READS_GLOBAL, prepare=target_indegree),
    Case(
        file="examples/correct_and_smooth.py",
        model="MLP([dataset.num_features, 16, dataset.num_classes])",
        call="model(x)",
    ),
    Case(
        file="examples/correct_and_smooth.py",
        title="CorrectAndSmooth",
        model="CorrectAndSmooth(2, 1.0, 2, 0.8, autoscale=False, scale=20.)",
        call="model.smooth(x[:, :3].softmax(-1), y[train_mask & (y >= 0)], train_mask & (y >= 0), edge_index)",
    ),
    Case(
        file="examples/dir_gnn.py",
        model="DirGNN(dataset.num_features, 16, dataset.num_classes, alpha=0.5)",
        names={"Conv": "GCNConv"},
        directed=True,
        title="DirGNN (GCNConv)",
    ),
    Case(
        file="examples/dir_gnn.py",
        model="DirGNN(dataset.num_features, 16, dataset.num_classes, alpha=0.5)",
        names={"Conv": "SAGEConv"},
        directed=True,
        title="DirGNN (SAGEConv)",
    ),
    Case(file="examples/dna.py", model="Net(dataset.num_features, 16, dataset.num_classes, 3, heads=4, groups=4)"),
    Case(file="examples/film.py", model=_NET),
    Case(file="examples/gat.py", model="GAT(dataset.num_features, 4, dataset.num_classes, 4)"),
    Case(file="examples/gcn.py", model="GCN(dataset.num_features, 16, dataset.num_classes)"),
    Case(
        file="examples/gcn.py",
        model="GCN(dataset.num_features, 16, dataset.num_classes)",
        title="GCN, weighted",
        call="model(x, edge_index, edge_weight)",
    ),
    Case(file="examples/gcn2_cora.py", model=_GCN2),
    Case(file="examples/gcn2_ppi.py", model=_GCN2),
    Case(
        file="examples/geniepath.py",
        model="GeniePath(dataset.num_features, dataset.num_classes)",
        names={"dim": "16", "lstm_hidden": "16"},
    ),
    Case(
        file="examples/geniepath.py",
        model="GeniePathLazy(dataset.num_features, dataset.num_classes)",
        names={"dim": "16", "lstm_hidden": "16"},
    ),
    Case(file="examples/glnn.py", model=f"GCN({_PLAIN}, num_layers=2)"),
    Case(
        file="examples/glnn.py",
        model="MLP([dataset.num_node_features, 16, dataset.num_classes], norm=None)",
        call="model(x)",
    ),
    Case(
        file="examples/graph_sage_unsup.py", model="GraphSAGE(data.num_node_features, hidden_channels=16, num_layers=2)"
    ),
    Case(
        file="examples/graph_sage_unsup_ppi.py",
        model="GraphSAGE(dataset.num_features, hidden_channels=16, num_layers=2, out_channels=16)",
    ),
    Case(file="examples/graph_saint.py", model="Net(hidden_channels=16)"),
    Case(
        file="examples/graph_saint.py",
        model="Net(hidden_channels=16)",
        title="Net, weighted",
        call="model(x, edge_index, edge_weight)",
    ),
    Case(
        file="examples/graph_saint.py",
        model="Net(hidden_channels=16)",
        title="Net, set_aggr('mean')",
        call="[model.set_aggr('mean'), model(x, edge_index)][1]",
    ),
    Case(file="examples/graph_unet.py", model="Net()", call=_READS_GLOBAL, draws=True),
    Case(file="examples/graphland.py", model="Model(dataset.num_features, 16, dataset.num_classes)"),
    Case(file="examples/hierarchical_sampling.py", model=f"GraphSAGE({_PLAIN}, num_layers=3)"),
    Case(
        file="examples/infomax_inductive.py",
        draws=True,
        title="DeepGraphInfomax",
        call="model(x, [(edge_index, None, (None, None))] * 3)",
        model="DeepGraphInfomax(16, Encoder(dataset.num_features, 16), lambda z, *_: torch.sigmoid(z.mean(dim=0)), "
        "corruption)",
    ),
    Case(file="examples/infomax_transductive.py", model="Encoder(dataset.num_features, 16)"),
    Case(
        file="examples/infomax_transductive.py",
        draws=True,
        title="DeepGraphInfomax",
        model="DeepGraphInfomax(16, Encoder(dataset.num_features, 16), lambda z, *_, **__: z.mean(dim=0).sigmoid(), "
        "corruption)",
    ),
    Case(file="examples/jit/gat.py", model="Net()"),
    Case(file="examples/jit/gat.py", model="torch.jit.script(Net())"),
    Case(
        file="examples/label_prop.py",
        model="LabelPropagation(num_layers=3, alpha=0.9)",
        # PyG encodes numbers in float32, where everything else here is in float64
        call="model((y.view(-1, 1) == y.new_tensor(range(8))).double(), edge_index, mask=train_mask)",
    ),
    Case(
        file="examples/lightgcn.py",
        model="LightGCN(num_nodes=data.num_nodes, embedding_dim=16, num_layers=2)",
        call="model.get_embedding(edge_index)",
    ),
    Case(file="examples/link_pred.py", model="Net(dataset.num_features, 16, 8)", call="model.encode(x, edge_index)"),
    Case(
        file="examples/linkx.py",
        model="LINKX(data.num_nodes, data.num_features, 16, dataset.num_classes, num_layers=1)",
    ),
    Case(file="examples/mixhop.py", model="MixHop()"),
    Case(
        file="examples/ogbn_products_gat.py",
        model="GAT(dataset.num_features, 4, dataset.num_classes, num_layers=3, heads=4)",
    ),
    Case(
        file="examples/ogbn_products_sage.py",
        model=_NET.replace("Net", "SAGE"),
        call="model(x, [(edge_index, None, (None, None))] * 3)",
    ),
    Case(
        file="examples/ogbn_proteins_deepgcn.py",
        model="DeeperGCN(hidden_channels=16, num_layers=4)",
        names={"data": Data(x=torch.zeros(1, 8), edge_attr=torch.zeros(1, 4), y=torch.zeros(1, 3))},
        call="model(x, edge_index, edge_attr)",
    ),
    Case(file="examples/ogbn_train.py", model=f"GraphSAGE({_PLAIN}, num_layers=3)"),
    Case(file="examples/ogbn_train.py", model=f"GAT({_PLAIN}, num_layers=3, heads=4)"),
    Case(
        file="examples/ogbn_train.py",
        model=f"SGFormer({_PLAIN}, gnn_num_layers=3)",
        call="model(x, edge_index, edge_index.new_zeros(x.size(0)))",
    ),
    Case(
        file="examples/ogbn_train.py",
        model=f"Polynormer({_PLAIN}, local_layers=3)",
        call="model(x, edge_index, edge_index.new_zeros(x.size(0)))",
    ),
    Case(file="examples/pmlp.py", model=f"PMLP({_PLAIN}, num_layers=2, norm=False)", trains="model(x)"),
    Case(file="examples/ppi.py", model="Net()"),
    Case(
        file="examples/rect.py",
        model="RECT_L(dataset.num_features, 16, normalize=False)",
        call="model(x, edge_index, edge_weight)",
    ),
    Case(
        file="examples/rect.py",
        model="RECT_L(dataset.num_features, 16, normalize=False)",
        title="RECT_L.embed",
        trains="model(x, edge_index, edge_weight)",
        call="model.embed(x, edge_index, edge_weight)",
    ),
    Case(file="examples/reddit.py", model="SAGE(dataset.num_features, 16, dataset.num_classes)"),
    Case(file="examples/rev_gnn.py", model=_NET.replace("Net", "RevGNN").replace(")", ", dropout=0.0)")),
    Case(
        file="examples/rgat.py",
        model="RGAT(dataset.num_features, 16, dataset.num_classes, dataset.num_relations)",
        call=_RELATIONS,
        directed=True,
    ),
    Case(
        file="examples/rgcn.py",
        model="Net()",
        call="model(edge_index, edge_type)",
        directed=True,
        title="Net (RGCNConv)",
    ),
    Case(
        file="examples/rgcn.py",
        model="Net()",
        call="model(edge_index, edge_type)",
        directed=True,
        title="Net (FastRGCNConv)",
        names={"RGCNConv": "FastRGCNConv"},
    ),
    Case(
        file="examples/rgcn_link_pred.py",
        model="GAE(RGCNEncoder(data.num_nodes, 20, dataset.num_relations), None)",
        call="model.encode(edge_index, edge_type)",
        directed=True,
    ),
    Case(file="examples/sgc.py", model="Net()", call=_READS_GLOBAL),
    Case(
        file="examples/shadow.py",
        model="GNN(dataset.num_features, 16, dataset.num_classes)",
        call="model(x, edge_index, torch.arange(x.size(0)), torch.arange(x.size(0)))",
    ),
    Case(file="examples/sign.py", model="Net()", call="model([x, x, x])"),
    Case(
        file="examples/signed_gcn.py",
        model="SignedGCN(dataset.num_features, 16, num_layers=2)",
        directed=True,
        call="model(x, edge_index[:, edge_type == 0], edge_index[:, edge_type == 1])",
    ),
    Case(file="examples/super_gat.py", model="Net()"),
    Case(file="examples/tagcn.py", model="Net()", call=_READS_GLOBAL),
    Case(
        file="examples/unimp_arxiv.py",
        model="UnimpNet(dataset.num_features, dataset.num_classes, 16, 2)",
        call="model(x, y, edge_index, train_mask & (y >= 0))",
    ),
    Case(
        file="examples/hetero/han_imdb.py",
        model="HAN(in_channels=-1, out_channels=3, hidden_channels=16, heads=4)",
        call=_typed("movie"),
        names={"data": OneType("movie")},
    ),
    Case(
        file="examples/hetero/hetero_conv_dblp.py",
        call=_typed("author"),
        model=f"HeteroGNN({_metadata('author')}, hidden_channels=16, out_channels=4, num_layers=2)",
    ),
    Case(
        file="examples/hetero/hgt_dblp.py",
        call=_typed("author"),
        model="HGT(hidden_channels=16, out_channels=4, num_heads=2, num_layers=1)",
        names={"data": OneType("author")},
    ),
    Case(file="benchmark/citation/appnp.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/citation/arma.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/citation/cheb.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/citation/gat.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/citation/gcn.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/citation/sgc.py", model="Net(dataset)", call=_TAKES_DATA),
    Case(file="benchmark/runtime/gat.py", model="GAT(dataset.num_features, dataset.num_classes)", call=_TAKES_DATA),
    Case(file="benchmark/runtime/gcn.py", model="GCN(dataset.num_features, dataset.num_classes)", call=_TAKES_DATA),
    Case(
        file="benchmark/runtime/rgcn.py",
        call=_TAKES_DATA,
        directed=True,
        model="RGCN(data.num_nodes, dataset.num_classes, dataset.num_relations)",
    ),
    Case(
        file="benchmark/utils/hetero_gat.py",
        call=_typed("paper"),
        model=f"HeteroGAT({_metadata('paper')}, 16, 2, dataset.num_classes, 4)",
    ),
    Case(
        file="benchmark/utils/hetero_sage.py",
        call=_typed("paper"),
        model=f"HeteroGraphSAGE({_metadata('paper')}, 16, 2, dataset.num_classes)",
    ),
]
