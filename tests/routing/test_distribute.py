"""What distribute() promises: the same module, parameters and classes, and routing that nothing undoes by accident."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    ARGVA,
    GAE,
    GAT,
    GCN,
    MLP,
    VGAE,
    BatchNorm,
    ChebConv,
    CorrectAndSmooth,
    CuGraphSAGEConv,
    EdgeConv,
    EGConv,
    FastRGCNConv,
    FusedGATConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    LabelPropagation,
    MeshCNNConv,
    MessagePassing,
    MetaLayer,
    RGCNConv,
    SAGEConv,
    SuperGATConv,
    TopKPooling,
    TransformerConv,
    global_max_pool,
)
from torch_geometric.nn.aggr import MaxAggregation
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from typing_extensions import override

from pygdist import InputError, Shard, distribute, undistribute
from pygdist.backends import (
    CacheBackend,
    CommBackend,
    ReplicaBackend,
    SingleBackend,
    TensorBackend,
    backends,
    resolve_backend,
)
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.hops.hop import Hop
from pygdist.testing import RankPool, random_graph
from pygdist.testing.layers import build


class Spy(SingleBackend):
    """Counts the hops that reach it."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.hops = 0

    @override
    def propagate(self, hop: Hop) -> Tensor:
        self.hops += 1
        return super().propagate(hop)


@pytest.fixture
def graph(tmp_path: Any) -> tuple[Data, Shard]:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return data, Shard.load(tmp_path / "store", 0)


def _bound(backend: SingleBackend, shard: Shard) -> SingleBackend:
    backend.bind(shard, Communicator())
    return backend


def test_nothing_but_the_class_changes_and_undistribute_gives_it_back(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model = GCN(5, 8, 2, 3, norm="batch").double()
    keys, ids = list(model.state_dict()), [id(p) for p in model.parameters()]
    classes = [type(module) for module in model.modules()]
    expected = model(data.x, data.edge_index)
    assert distribute(model, backend=_bound(Spy(), shard)) is model
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == ids
    assert isinstance(model.convs[0], GCNConv)
    assert type(model.convs[0]).__name__ == "DistributedGCNConv"
    assert type(model.convs[0]) is type(model.convs[1])
    assert isinstance(model.norms[0], BatchNorm)
    assert torch.allclose(model(shard.x, shard.adjacency), expected, rtol=0, atol=1e-12)
    undistribute(model)
    assert [type(module) for module in model.modules()] == classes
    assert not model._forward_pre_hooks
    assert torch.equal(model(data.x, data.edge_index), expected)


def test_a_second_distribute_is_refused() -> None:
    model = distribute(GCN(5, 8, 2, 3), backend=Spy())
    with pytest.raises(InputError, match=r"GCN is distributed already; call undistribute"):
        distribute(model, backend=Spy())
    with pytest.raises(InputError, match=r"'1\.0' \(GCNConv\) belongs to a model that is distributed already"):
        distribute(nn.Sequential(nn.Linear(3, 3), model.convs), backend=Spy())


def _pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied: nn.Module = torch.load(buffer, weights_only=False)
    return copied


def test_a_subclass_is_not_run_by_its_parents_template(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    RGCNConv(5, 3, num_relations=2)  # PyG writes a propagate for it, which FastRGCNConv inherits; their messages differ
    layer = FastRGCNConv(5, 3, num_relations=2).double()
    expected = layer(data.x, data.edge_index, data.edge_type)
    distribute(layer, backend=_bound(SingleBackend(), shard))
    assert torch.allclose(layer(shard.x, shard.adjacency, shard.edge_type), expected, rtol=0, atol=1e-12)


class Inheriting(GCNConv):
    """Leaves its forward to PyG's, whose code asks for degrees."""


def _inheriting(rank: int, world_size: int, store: str) -> float:
    data, _ = random_graph("directed")
    shard, backend, layer = Shard.load(store, rank), CommBackend(), Inheriting(5, 3).double()
    torch.nn.init.ones_(layer.lin.weight)
    expected = layer(data.x, data.edge_index)[shard.owned_id]
    backend.bind(shard, Communicator(dist.new_group()))
    distribute(layer, backend=backend)
    return float((layer(shard.x, shard.adjacency) - expected).abs().max())


def test_a_subclass_that_inherits_its_forward_knows_all_degrees(tmp_path: Any, pool: RankPool) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    assert max(pool.run(_inheriting, 2, str(tmp_path / "store"))) < 1e-12


@pytest.mark.parametrize("copier", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["GCNConv", "GATv2Conv", "BatchNorm"])
def test_routing_survives_a_copy_in_the_copy_and_in_the_original(
    name: str, copier: Any, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    model, backend = build(name, 5, 3), Spy()
    extra = {"edge_weight": data.edge_weight, "edge_attr": data.edge_attr}
    expected = model(data.x, data.edge_index, **extra)
    distribute(model, backend=_bound(backend, shard))
    local = {"edge_weight": shard.edge_weight, "edge_attr": shard.edge_attr}
    twin = copier(model)
    for module in (twin, model):
        before = backend.hops
        assert torch.allclose(module(shard.x, shard.adjacency, **local), expected, rtol=0, atol=1e-12)
        hops = 4 if name == "GATv2Conv" else 2  # attention layers ask for neighbours in edge_updater too
        assert backend.hops == before + hops, "a hop did not reach the backend"
    twin.register_buffer("extra", torch.ones(1))
    assert "extra" not in model.state_dict()


def test_a_comm_model_can_be_copied_after_a_forward_and_lets_go_of_its_rows(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = CommBackend()
    backend.bind(shard, Communicator())
    model = distribute(build("GATv2Conv", 5, 3), backend=backend)
    expected = model(shard.x, shard.adjacency)
    assert not backend.fetcher._fetched
    for copier in (copy.deepcopy, _pickled, _saved):
        assert torch.equal(copier(model)(shard.x, shard.adjacency), expected)


def test_a_norm_inside_a_message_is_refused_where_a_rank_has_not_all_edges(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    layer = EdgeConv(MLP([10, 8, 3])).double().eval()  # PyG's MLP has a BatchNorm by default
    with pytest.raises(InputError, match=r"\(EdgeConv\): it takes the statistics of BatchNorm over edges"):
        distribute(layer, backend=CommBackend())
    expected = layer(data.x, data.edge_index)
    distribute(layer, backend=_bound(SingleBackend(), shard))
    assert torch.allclose(layer(shard.x, shard.adjacency), expected, rtol=0, atol=1e-12)


class NormOverEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNorm(5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(x.repeat(4, 1))
        return out


class MaxPool(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = x - global_max_pool(x, None)
        return out


class NormalisesItself(nn.Module):
    """A model that calls ``gcn_norm``, not one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, weight = gcn_norm(edge_index, None, x.size(0), add_self_loops=False)
        out: Tensor = self.conv(x, edges, weight)
        return out


def test_gcn_norm_in_a_model_is_that_of_the_whole_graph(pool: RankPool, tmp_path: Any) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    torch.manual_seed(0)
    model = NormalisesItself().double()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    pool.run(_check_gcn_norm, 2, model, str(tmp_path / "store"), expected)


def _check_gcn_norm(rank: int, world_size: int, model: nn.Module, store: str, expected: Tensor) -> None:
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    distribute(model, backend=backend)
    for copied in (model, copy.deepcopy(model)):
        with torch.no_grad():
            assert torch.allclose(copied(shard.x, shard.adjacency), expected[shard.owned_id], rtol=0, atol=1e-12)
    assert type(undistribute(model)) is NormalisesItself


def test_a_norm_over_edges_is_refused_where_it_would_be_wrong(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = CommBackend()
    backend.bind(shard, Communicator())
    model = distribute(NormOverEdges().double(), backend=backend)
    with pytest.raises(InputError, match=r"a norm over nodes got 148 rows, but this rank has 37 nodes"):
        model(shard.x, shard.adjacency)
    with torch.inference_mode():
        model.eval()(shard.x, shard.adjacency)  # running statistics are no statistics over rows


def test_a_backend_unpickled_in_another_process_is_unbound() -> None:
    backend = CommBackend()
    raw = pickle.dumps(backend)
    assert pickle.loads(raw) is backend
    del backend
    other = pickle.loads(raw)
    assert isinstance(other, CommBackend)
    with pytest.raises(InputError, match=r"backend 'comm' is not bound to a graph; call backend\.bind"):
        _ = other.shard


def test_decomposed_layers_stay_routed(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model, backend = GCNConv(5, 5).double(), Spy()  # PyG decomposes layers with one tensor only
    expected = model(data.x, data.edge_index)
    for when in ("before", "after"):
        fresh = copy.deepcopy(model)
        if when == "before":
            fresh.decomposed_layers = 5
        distribute(fresh, backend=_bound(backend, shard))
        if when == "after":
            fresh.decomposed_layers = 5
        before = backend.hops
        assert torch.allclose(fresh(shard.x, shard.adjacency), expected, rtol=0, atol=1e-12)
        assert backend.hops == before + 1
        undistribute(fresh)
        assert torch.allclose(fresh(data.x, data.edge_index), expected, rtol=0, atol=1e-12)
        assert fresh.decomposed_layers == 5


def test_what_a_layer_cached_on_another_topology_is_dropped(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    layer = GCNConv(5, 3, cached=True).double()
    smaller = data.edge_index[:, ::2]
    layer(data.x, smaller)
    assert layer._cached_edge_index is not None
    distribute(layer, backend=_bound(SingleBackend(), shard))
    ours = layer(shard.x, shard.adjacency)
    undistribute(layer)
    assert layer._cached_edge_index is None
    assert torch.allclose(ours, layer(data.x, data.edge_index), rtol=0, atol=1e-12)


def test_another_graph_on_the_same_backend_is_not_answered_from_a_cache(
    graph: tuple[Data, Shard], tmp_path: Any
) -> None:
    _, shard = graph
    other, part = random_graph("power-law")
    write_store(other, part[1], tmp_path / "other", num_parts=1, method="test", arguments={})
    second = Shard.load(tmp_path / "other", 0)
    layer, backend = GCNConv(5, 3, cached=True).double(), _bound(SingleBackend(), shard)
    expected = layer(other.x, other.edge_index)
    distribute(layer, backend=backend)
    layer(shard.x, shard.adjacency)
    backend.bind(second, Communicator())
    assert torch.allclose(layer(second.x, second.adjacency), expected, rtol=0, atol=1e-12)


def _unbuilt(cls: type[nn.Module]) -> nn.Module:
    """An object of a class whose own package is not installed."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


class Reversed(SAGEConv):
    def __init__(self) -> None:
        super().__init__(4, 4, flow="target_to_source")


class Picky(SingleBackend):
    name = ""

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        return "mixes features; comm can run it" if isinstance(layer, SAGEConv) else None


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(SuperGATConv(4, 4), r"'0' \(SuperGATConv\): it samples negative edges among all", id="samples"),
        pytest.param(MetaLayer(), r"'0' \(MetaLayer\): it reads rows of nodes by edge_index.* write a", id="meta"),
        pytest.param(VGAE(GCN(4, 4, 1)), r"'0' \(VGAE\): it draws numbers for each node.*LinkPredictor", id="vgae"),
        pytest.param(ARGVA(GCN(4, 4, 1), MLP([4, 1])), r"'0' \(ARGVA\): it averages its losses over", id="argva"),
        pytest.param(_unbuilt(FusedGATConv), r"'0' \(FusedGATConv\): it takes the graph in.*use GATConv", id="fused"),
        pytest.param(
            _unbuilt(CuGraphSAGEConv), r"'0' \(CuGraphSAGEConv\): it takes the graph in cuGraph", id="cugraph"
        ),
        pytest.param(nn.LazyBatchNorm1d(), r"'0' \(LazyBatchNorm1d\): it takes its number of channels", id="lazy"),
        pytest.param(torch.jit.script(SAGEConv(4, 4)), r"'0' .*it was compiled or traced.*distribute the", id="script"),
        pytest.param(EGConv(4, 8, ["mean"]), r"'0' \(EGConv\): it adds self-loops up to the highest node", id="loops"),
        pytest.param(Reversed(), r"'0' \(Reversed\): it has flow='target_to_source'", id="flow"),
        pytest.param(TopKPooling(4), r"'0' \(TopKPooling\): it pools nodes of the whole graph", id="pool"),
        pytest.param(
            PerformerAttention(4, 2), r"'0' \(PerformerAttention\): it attends over all nodes", id="attention"
        ),
        pytest.param(MaxAggregation(), r"'0' \(MaxAggregation\): it reads out all nodes at once", id="readout"),
        pytest.param(MaxPool(), r"'0' \(MaxPool\): it calls global_max_pool, which reads out all", id="global-pool"),
        pytest.param(nn.BatchNorm2d(4), r"'0' \(BatchNorm2d\): it takes statistics over more", id="batchnorm2d"),
        pytest.param(SAGEConv(4, 4), r"backend 'Picky' cannot run '0' \(SAGEConv\): it mixes features", id="backend"),
    ],
)
def test_what_cannot_run_is_refused_by_name_with_the_reason(module: nn.Module, said: str) -> None:
    model = nn.Sequential(module)
    with pytest.raises(InputError, match=said):
        distribute(model, backend=Picky())
    assert type(model[0]) is type(module), "a refused model must be left as it was"


def test_all_refused_layers_are_named_at_once() -> None:
    with pytest.raises(InputError, match=r"'0' \(SuperGATConv\).*; '1' \(TopKPooling\)"):
        distribute(nn.Sequential(SuperGATConv(4, 4), TopKPooling(4)), backend=SingleBackend())


class Plain(nn.Module):
    """A model that torch can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(5, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


COMPILED: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Any]] = {
    "script": lambda model, _: torch.jit.script(model),
    "trace": torch.jit.trace,
    "export": lambda model, args: torch.export.export(model, args).module(),
}


@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_model_is_refused(way: str, graph: tuple[Data, Shard]) -> None:
    data, _ = graph
    compiled = COMPILED[way](Plain().double().eval(), (data.x, data.edge_index))
    with pytest.raises(InputError, match=r"'model' \(.*\): it was compiled or traced .*; distribute the model that"):
        distribute(compiled, backend=SingleBackend())


def test_what_has_no_layer_in_it_may_be_compiled(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model = nn.Sequential(torch.jit.script(nn.Linear(5, 5)), torch.fx.symbolic_trace(nn.Linear(5, 5))).double()
    expected = model(data.x)
    assert torch.equal(distribute(model, backend=_bound(SingleBackend(), shard), check=False)(shard.x), expected)


def test_layers_of_a_refused_module_are_not_named_again() -> None:
    with pytest.raises(InputError) as caught:
        distribute(nn.Sequential(ARGVA(GCN(4, 4, 1), MLP([4, 1]))), backend=SingleBackend())
    assert "VGAE" not in str(caught.value).replace("ARGVA", "")


class ReadsOut(nn.Module):
    """Makes a hop from all nodes to one row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv((5, 5), 3, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        to_one = torch.stack([torch.arange(x.size(0)), torch.zeros(x.size(0), dtype=torch.int64)])
        out: Tensor = self.conv((x, x.mean(0, keepdim=True)), to_one)
        return out


class Reconstructs(GAE):
    """Returns the loss of an autoencoder."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        loss: Tensor = self.recon_loss(self.encode(x, edge_index), edge_index)
        return loss


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (ReadsOut(), r"GATConv: Encountered tensor with size 1 .* The hop leads to other rows than the nodes"),
        (Reconstructs(GCNConv(5, 3)), r"InnerProductDecoder \(GAE.recon_loss\) scores edges.*LinkPredictor"),
    ],
    ids=["readout", "recon_loss"],
)
def test_rows_that_a_rank_does_not_have_are_refused(module: nn.Module, said: str, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = CommBackend()
    backend.bind(shard, Communicator())
    model = distribute(module.double(), backend=backend, check=False)
    with pytest.raises(InputError, match=said):
        model(shard.x, shard.adjacency)


def test_a_layer_for_meshes_runs_where_it_is_not_tried_on_other_graphs() -> None:
    for backend in (CacheBackend(), TensorBackend()):
        with pytest.raises(
            InputError, match=r"\(MeshCNNConv\): it takes four neighbours of each node.*use backend comm"
        ):
            distribute(nn.Sequential(MeshCNNConv(5, 3)), backend=backend)
    undistribute(distribute(nn.Sequential(MeshCNNConv(5, 3)), backend=CommBackend()))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"distribute\(\) takes a torch.nn.Module, got dict"):
        distribute({}, backend=SingleBackend())  # type: ignore[arg-type]


def test_part_by_part_out_degrees_and_smoothing_are_refused() -> None:
    for module, said in (
        (ChebConv(4, 4, K=2), "it normalises by out-degrees, and a part .* use backend cache, comm, delayed, hybrid"),
        (LabelPropagation(2, 0.5), "it smooths what is known of the whole graph; use backend cache, comm"),
        (CorrectAndSmooth(2, 0.5, 2, 0.5), "it smooths what is known of the whole graph; use backend cache, comm"),
    ):
        with pytest.raises(InputError, match=said):
            distribute(nn.Sequential(module), backend=ReplicaBackend())


def test_a_row_for_every_node_of_the_graph_is_refused_in_the_hop(pool: RankPool, tmp_path: Any) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    pool.run(_check_table_is_refused, 2, str(tmp_path / "store"))


def _check_table_is_refused(rank: int, world_size: int, store: str) -> None:
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    layer = distribute(SAGEConv(4, 4), backend=backend)
    with pytest.raises(InputError, match=rf"SAGEConv: argument 'x' of propagate has 37 rows, but rank {rank} owns"):
        layer(torch.ones(37, 4), shard.adjacency)


def test_explanations_are_refused(graph: tuple[Data, Shard]) -> None:
    layer = distribute(SAGEConv(5, 4).double(), backend=_bound(SingleBackend(), graph[1]))
    layer.explain = True
    layer._edge_mask = torch.ones(graph[0].num_edges)
    with pytest.raises(InputError, match="explanations of a distributed layer"):
        layer(graph[1].x, graph[1].adjacency)


@pytest.mark.parametrize("name", ["single", "comm"])
def test_backends_are_found_by_name(name: str) -> None:
    assert resolve_backend(name).name == name
    assert name in list(backends)


def test_backends_are_found_by_class_path_and_mistakes_are_named() -> None:
    assert isinstance(resolve_backend(f"{__name__}.Spy"), Spy)
    known = r"unknown backend 'com'; known are cache, comm, delayed, hybrid, pull, pushpull, replica"
    with pytest.raises(InputError, match=known):
        resolve_backend("com")
    with pytest.raises(InputError, match=r"there is no module named 'nowhere'"):
        resolve_backend("nowhere.Backend")
    with pytest.raises(InputError, match=r"module pygdist.backends has no 'Nope'"):
        resolve_backend("pygdist.backends.Nope")
    with pytest.raises(InputError, match=r"is not a backend: it does not subclass"):
        resolve_backend("torch.nn.Linear")
    with pytest.raises(ValueError, match=r"Other is called 'comm', a name that pygdist.backends.comm.CommBackend has"):
        type("Other", (SingleBackend,), {"name": "comm"})


def test_single_refuses_several_ranks(graph: tuple[Data, Shard]) -> None:
    two = Communicator()
    two.world_size = 2
    with pytest.raises(InputError, match="backend 'single' runs on one process, not on 2"):
        SingleBackend().bind(graph[1], two)
    with pytest.raises(InputError, match="partitioned into 1 parts but 2 ranks take part"):
        CommBackend().bind(graph[1], two)


# one exchange per hop, whatever the layer reads; what was fetched is not fetched again
CALLS = {"SAGEConv": 1, "GCNConv": 1, "GAT": 2, "GATv2Conv": 1, "TransformerConv": 1}


def _check_calls(rank: int, world_size: int, store: str) -> dict[str, list[int]]:
    communicator, shard = Communicator(dist.new_group()), Shard.load(store, rank)
    layers: dict[str, nn.Module] = {
        "SAGEConv": SAGEConv(5, 3),
        "GCNConv": GCNConv(5, 3),
        "GAT": GAT(5, 3, 1),
        "GATv2Conv": GATv2Conv(5, 3),
        "TransformerConv": TransformerConv(5, 3),
    }
    found = {}
    for name, layer in layers.items():
        backend = CommBackend()
        backend.bind(shard, communicator)
        distribute(layer.double(), backend=backend, check=False)
        layer(shard.x, shard.adjacency)  # the first pass may exchange degrees
        communicator.meter.reset()
        x = shard.x.clone().requires_grad_()
        out = layer(x, shard.adjacency)
        forward = communicator.meter.reset().calls
        out.sum().backward()
        found[name] = [forward, communicator.meter.reset().calls]
    return found


def test_each_hop_makes_one_call_and_its_backward_one(pool: RankPool, tmp_path: Any) -> None:
    data, part = random_graph("directed")
    write_store(data, part[3], tmp_path / "store", num_parts=3, method="test", arguments={})
    for found in pool.run(_check_calls, 3, str(tmp_path / "store")):
        assert found == {name: [calls, calls] for name, calls in CALLS.items()}
