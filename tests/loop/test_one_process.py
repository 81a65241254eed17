"""``accelerate``: one process, the caller's own calls and order of edges, and the same numbers as PyG's."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    GAE,
    GAT,
    GCN,
    MLP,
    DirGNNConv,
    GCNConv,
    GraphSAGE,
    GraphUNet,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)
from torch_geometric.utils import to_torch_csr_tensor

from pygdist import InputError, accelerate, undistribute
from pygdist.loop import one_process
from pygdist.testing import LAYERS
from pygdist.testing.exactness import largest_differences, reference_step
from pygdist.testing.layers import build
from tests.loop.graphs import assert_same_as_pyg, reordered


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_every_layer_equals_pygs(name: str, data: Data) -> None:
    in_order = reordered(data, data.edge_index[1].argsort(stable=True))  # which some layers of PyG need
    expected = reference_step(build(name, 5, 3), in_order)
    with mock.patch.object(one_process, "with_own_classes", wraps=one_process.with_own_classes) as runs_in_pyg:
        found = reference_step(accelerate(build(name, 5, 3), data), data)
    assert not runs_in_pyg.called
    assert max(one.absolute for one in largest_differences(found, expected).values()) < 1e-10


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_on_a_gpu_equals_pygs_on_the_host(name: str, data: Data) -> None:
    in_order = reordered(data, data.edge_index[1].argsort(stable=True))
    expected = reference_step(build(name, 5, 3), in_order)
    on_gpu = data.clone().to("cuda")
    found = reference_step(accelerate(build(name, 5, 3).cuda(), on_gpu), on_gpu)
    error = 1e-6 if name == "LabelPropagation" else 1e-10  # its labels are float32
    assert max(one.absolute for one in largest_differences(found, expected).values()) < error


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([[35], [0]], "ids from 0 to 35, but data has 3 nodes"),
        ([[-1], [0]], "ids from -1"),
        ([[0, 1, 2]], r"\(1, 3\)"),
    ],
)
def test_edges_that_lead_nowhere_are_refused(edges: list[list[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        accelerate(GCN(2, 3, num_layers=1), Data(x=torch.ones(3, 2), edge_index=torch.tensor(edges)))


def test_calls_with_other_numbers_of_rows_are_pygs(data: Data) -> None:
    layer, rows = SAGEConv((data.num_features, data.num_features), 3).double(), data.num_nodes
    half = data.edge_index[1] < rows // 2
    data.edge_index = data.edge_index[:, half]
    more = torch.cat([data.x, data.x])
    calls = [((data.x, data.x[: rows // 2]), data.edge_index), ((data.x, None), data.edge_index, (rows, rows // 2))]
    assert_same_as_pyg(layer, data, *calls, ((data.x, data.x), data.edge_index), (more, data.edge_index))


@pytest.mark.parametrize("name", ["SAGEConv-mean", "SAGEConv-max", "GCNConv", "GATConv", "GINConv"])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_edges_as_an_edge_index_of_pyg(name: str, sort_order: str | None, data: Data) -> None:
    model, rows = build(name, 5, 3), data.num_nodes
    expected = model(data.x, data.edge_index)
    edges = EdgeIndex(data.edge_index, sparse_size=(rows, rows))
    data.edge_index = edges if sort_order is None else edges.sort_by(sort_order).values
    found = accelerate(model, data)(data.x, data.edge_index)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class _OfData(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gcn = GCN(width, 8, num_layers=2, out_channels=3).double()

    def forward(self, data: Data) -> Tensor:
        out: Tensor = self.gcn(data.x, data.edge_index, edge_weight=data.edge_weight)
        return out


def test_models_that_take_the_whole_data(data: Data) -> None:
    model = _OfData(data.num_features)
    expected = model(data)
    assert torch.allclose(accelerate(model, data)(data), expected, rtol=0, atol=1e-12)


def test_training_repeats_pygs(data: Data) -> None:
    losses = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = GCN(data.num_features, 8, num_layers=2, out_channels=int(data.y.max()) + 1, norm="batch_norm").double()
        if accelerated:
            accelerate(model, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-10)


def test_it_is_undone(data: Data) -> None:
    model = GCN(data.num_features, 8, num_layers=2, out_channels=3).double()
    kinds, keys = [type(one) for one in model.modules()], list(model.state_dict())
    accelerate(model, data)
    assert list(model.state_dict()) == keys
    undistribute(model)
    assert [type(one) for one in model.modules()] == kinds
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    few = data.edge_index[:, :7]  # PyG's again, which takes any edges
    assert model(data.x, few).shape == (data.num_nodes, 3)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_transformations_of_torch_are_those_of_pyg(name: str, data: Data) -> None:
    models = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GAT": GAT}
    model = models[name](data.num_features, 4, num_layers=2, out_channels=3).double()
    parameters, tangent = dict(model.named_parameters()), torch.ones_like(data.x)

    def found() -> list[Tensor]:
        out = list(torch.func.jvp(lambda x: model(x, data.edge_index), (data.x,), (tangent,)))
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(data.x, tangent), data.edge_index)
            out += torch.autograd.forward_ad.unpack_dual(dual)
        gradients = torch.func.grad(
            lambda values: torch.func.functional_call(model, values, (data.x, data.edge_index)).square().sum()
        )
        exported = torch.export.export(model, (data.x, data.edge_index), strict=False).module()
        return [*out, *gradients(parameters).values(), exported(data.x, data.edge_index)]

    expected = found()
    accelerate(model, data)
    torch.testing.assert_close(found(), expected, rtol=0, atol=1e-12)


def test_attention_of_no_edges_has_no_weights(data: Data) -> None:
    empty = Data(x=data.x, edge_index=data.edge_index[:, :0])
    layer = TransformerConv(data.num_features, 4, heads=2).double()
    expected = layer(empty.x, empty.edge_index, return_attention_weights=True)
    accelerate(layer, empty)
    out, (edges, weights) = layer(empty.x, empty.edge_index, return_attention_weights=True)
    assert weights.shape == expected[1][1].shape == (0, 2)
    assert edges.shape == (2, 0)
    assert torch.allclose(out, expected[0], rtol=0, atol=1e-12)


def test_threads_take_turns(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 8, num_layers=2).double(), data)
    with torch.no_grad(), ThreadPoolExecutor(4) as threads:
        expected = model(data.x, data.edge_index)
        calls = [threads.submit(torch.no_grad()(model), data.x, data.edge_index) for _ in range(200)]
        assert all(torch.equal(one.result(), expected) for one in calls)


def test_a_sparse_adjacency_runs_as_in_pyg(data: Data) -> None:
    adjacency = to_torch_csr_tensor(data.edge_index.flip(0), size=(data.num_nodes, data.num_nodes)).double()
    with pytest.warns(UserWarning, match=r"call the model with data.edge_index, not with a sparse adjacency"):
        assert_same_as_pyg(GCN(data.num_features, 3, num_layers=2).double(), data, (data.x, adjacency))


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
@pytest.mark.filterwarnings("ignore:GCNConv runs as in plain PyG")
@pytest.mark.parametrize("make", [
    lambda width: SuperGATConv(width, 3),
    lambda width: DirGNNConv(GCNConv(width, 3)),
    lambda width: GraphUNet(width, 4, 3, depth=2),
    lambda width: nn.ModuleList([MLP([width, 4]), GCNConv(4, 3)]),
], ids=["SuperGATConv", "DirGNNConv", "GraphUNet", "statistics"])  # fmt: skip
def test_what_cannot_be_distributed_runs_on_one_process(make: Callable[[int], nn.Module], data: Data) -> None:
    model = make(data.num_features).double().eval()
    if isinstance(model, nn.ModuleList):
        model = _Whitened(*model)
    assert_same_as_pyg(model, data, (data.x, data.edge_index))


class _Whitened(nn.Module):
    def __init__(self, mlp: nn.Module, conv: nn.Module) -> None:
        super().__init__()
        self.mlp, self.conv = mlp, conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.mlp((x - x.mean(dim=0)) / (x.std(dim=0) + 1))
        out: Tensor = self.conv(h, edge_index)
        return out


def test_copies_and_pickles_of_a_model(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=2).double(), data)
    expected = model(data.x, data.edge_index)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(data.x, data.edge_index), expected)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert torch.equal(twin(data.x, data.edge_index), expected)
    file = io.BytesIO()
    torch.save(twin, file)
    size = file.getbuffer().nbytes
    assert size < 50_000, "the graph travels with the model"
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(data.x, data.edge_index), expected)


def test_a_model_of_another_process_runs_as_in_pyg(data: Data, tmp_path: Path) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=1).double(), data)
    torch.save((model, data, model(data.x, data.edge_index).detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch; model, data, expected = torch.load(sys.argv[1], weights_only=False); "
        "print(torch.allclose(model(data.x, data.edge_index), expected, rtol=0, atol=1e-12))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_explanations_are_those_of_pyg(data: Data) -> None:
    model = GCN(data.num_features, 3, num_layers=2).double().eval()

    def weights() -> Tensor:
        torch.manual_seed(0)
        explainer = Explainer(
            model, algorithm=GNNExplainer(epochs=3), explanation_type="model", edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )  # fmt: skip
        mask: Tensor = explainer(data.x, data.edge_index, index=0).edge_mask
        return mask

    expected = weights()
    accelerate(model, data)
    assert torch.allclose(weights(), expected, atol=1e-6)


def test_a_part_of_a_model(data: Data) -> None:
    model = GAE(GCN(data.num_features, 3, num_layers=1).double())
    expected = model.encode(data.x, data.edge_index)
    accelerate(model.encoder, data)
    found = model.encode(data.x, data.edge_index)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.allclose(model.decode(found, data.edge_index), model.decode(expected, data.edge_index), atol=1e-12)


def test_calls_past_forward_are_pygs(data: Data) -> None:
    model = GAE(GCN(data.num_features, 3, num_layers=1).double())
    expected = model.encode(data.x, data.edge_index)
    assert torch.allclose(accelerate(model, data).encode(data.x, data.edge_index), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", [HeteroData(), Data(x=torch.ones(3, 2)), torch.zeros(2, 3).long()])
def test_what_is_no_graph_is_refused(graph: object) -> None:
    model = GCN(2, 3, num_layers=1)
    with pytest.raises(InputError, match=r"takes a torch_geometric.data.Data with an edge_index"):
        accelerate(model, graph)  # type: ignore[arg-type]
    assert not model._forward_pre_hooks


def test_a_graph_with_adj_t_alone_is_refused_by_name() -> None:
    graph = Data(x=torch.ones(3, 2), adj_t=torch.eye(3).to_sparse_csr())
    with pytest.raises(InputError, match=r"data has adj_t and no edge_index; make data without ToSparseTensor"):
        accelerate(GCN(2, 3, num_layers=1), graph)


def test_pythons_random_numbers_are_left_alone() -> None:
    code = (
        "import random, torch, pygdist; from torch_geometric.data import Data; from torch_geometric.nn import GCN; "
        "random.seed(0); expected = random.random(); random.seed(0); data = Data(x=torch.ones(3, 2), "
        "edge_index=torch.tensor([[0, 1], [1, 2]])); model = pygdist.accelerate(GCN(2, 3, num_layers=1), data); "
        "model(data.x, data.edge_index); print(random.random() == expected)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_lightning_is_not_imported() -> None:
    code = "import pygdist, sys; pygdist.accelerate; print([one for one in sys.modules if one == 'lightning'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
