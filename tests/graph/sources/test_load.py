"""Sources: every way to name a graph ends in one ``Data``, every wrong one in one line."""

from __future__ import annotations

import builtins
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.transforms import ToSparseTensor

from pygdist.errors import InputError
from pygdist.graph import load_graph, load_npy, prepare, register_generator, save_npy
from pygdist.graph.sources.load import GENERATORS

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def triangle(**fields: Any) -> Data:
    return Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), y=torch.tensor([0, 1, 0]), **fields)


class Graphs(InMemoryDataset):
    """A dataset of as many triangles as asked for, in memory only."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.data, self.slices = self.collate([triangle() for _ in range(count)])


def hetero() -> HeteroData:
    return HeteroData()


def numbers() -> list[int]:
    return [1]


def missing_file(path: str = "nowhere") -> Data:
    return torch.load(path)


def same(data: Data, other: Data) -> bool:
    return set(data.keys()) == set(other.keys()) and all(torch.equal(data[key], other[key]) for key in data.keys())  # noqa: SIM118


# --- names and objects ------------------------------------------------------------------------------------------------


def test_data_passes_through_unchanged() -> None:
    data = triangle(train_mask=torch.ones(3, 2, dtype=torch.bool))
    loaded = load_graph(data)
    assert loaded is not data
    assert data.train_mask.shape == (3, 2)
    assert loaded.x.data_ptr() == data.x.data_ptr()


def test_generators_by_name() -> None:
    assert load_graph("sbm", num_nodes=50, avg_degree=4.0).num_nodes == 50
    assert load_graph("power-law", num_nodes=50, num_edges=100, num_features=2).num_edges == 100


def test_register_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygdist.graph.sources.load.GENERATORS", dict(GENERATORS))
    register_generator("three", triangle)
    assert same(load_graph("three"), triangle())
    for taken in ("three", "mag-like", "ogbn-arxiv", "Planetoid"):
        with pytest.raises(ValueError, match=f"'{taken}' is taken"):
            register_generator(taken, triangle)
    with pytest.raises(ValueError, match=r"'my\.three' has a dot or a slash"):
        register_generator("my.three", triangle)


@pytest.mark.parametrize(
    "dataset",
    [f"{__name__}.Graphs", Graphs, f"{__name__}.triangle", triangle],
    ids=["path", "class", "function path", "function"],
)
def test_datasets_and_functions(dataset: Any) -> None:
    assert same(load_graph(dataset), triangle())


@pytest.mark.parametrize("name", ["Planetoid", "torch_geometric.datasets.Planetoid"])
def test_planetoid(name: str, tmp_path: Path) -> None:
    if not (SHARED / "Planetoid").is_dir():
        pytest.skip("the raw files of Cora are not beside this checkout (../shared/data)")
    shutil.copytree(SHARED / "Planetoid" / "Cora" / "raw", tmp_path / "Cora" / "raw", copy_function=shutil.copyfile)
    data, notes = prepare(load_graph(name, root=str(tmp_path), name="Cora"))
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (2708, 10556, 1433, 7)
    assert [int(data[mask].sum()) for mask in ("train_mask", "val_mask", "test_mask")] == [140, 500, 1000]
    assert notes == []


@pytest.mark.parametrize(
    ("dataset", "args", "message"),
    [
        ("nothing-like-this", {}, "dataset 'nothing-like-this': neither a folder, nor a generator .*sbm"),
        ("./not/there", {}, "dataset './not/there': neither a folder"),
        ("no_such_package.Graphs", {}, "dataset 'no_such_package.Graphs': .* 'no_such_package'"),
        ("torch_geometric.datasets.NoSuchSet", {}, "has no 'NoSuchSet'"),
        ("torch_geometric.datasets", {}, "a module, expected a class or a function"),
        (
            "sbm",
            {"nodes": 3},
            "dataset 'sbm': got an unexpected keyword argument 'nodes'; its arguments are: num_nodes",
        ),
        ("Planetoid", {"name": "Cora"}, "dataset 'Planetoid': missing a required argument: 'root'"),
        (3, {}, "dataset: expected a name, a folder, a Data or a callable, got int"),
        (triangle(), {"root": "."}, "a Data object takes no arguments, got root"),
        (Graphs, {"count": 2}, r"dataset 'Graphs' holds 2 graphs; pass one graph, such as dataset\[0\]"),
        (hetero, {}, r"dataset 'hetero' is heterogeneous and has no edges \(edge_index\)"),
        (numbers, {}, "dataset 'numbers' returned a list, expected a torch_geometric Data"),
        (missing_file, {}, "dataset 'missing_file': could not be read or downloaded: .*nowhere"),
        (Data(x=torch.ones(2, 1)), {}, "edge_index is missing"),
    ],
)
def test_load_graph_refuses(dataset: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_graph(dataset, **args)


# --- one form for edges and masks -------------------------------------------------------------------------------------


def test_split_index_picks_a_column() -> None:
    masks = torch.tensor([[True, False], [False, True], [True, True]])
    data = triangle(train_mask=masks, test_mask=masks[:, 1])
    assert load_graph(data).train_mask.tolist() == [True, False, True]
    assert load_graph(data, split_index=1).train_mask.tolist() == [False, True, True]
    assert load_graph(data, split_index=1).test_mask.tolist() == [False, True, True], "one column serves all splits"
    with pytest.raises(InputError, match="split_index is 2, but train_mask holds splits 0 to 1"):
        load_graph(data, split_index=2)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_adjacency_in_torch_layouts(layout: torch.layout) -> None:
    plain = ToSparseTensor(layout=layout)(triangle())
    assert "edge_index" not in plain
    loaded = load_graph(plain)
    assert _edges(loaded) == {(0, 1), (1, 2), (2, 0)}
    assert "adj_t" not in loaded
    assert "edge_weight" not in loaded
    weighted = ToSparseTensor(attr="edge_weight", layout=layout)(triangle(edge_weight=torch.tensor([1.0, 2.0, 3.0])))
    loaded = load_graph(weighted)
    weights = dict(zip(zip(*loaded.edge_index.tolist(), strict=True), loaded.edge_weight.tolist(), strict=True))
    assert weights == {(0, 1): 1.0, (1, 2): 2.0, (2, 0): 3.0}


def test_adjacency_of_torch_sparse() -> None:
    pytest.importorskip("torch_sparse", reason="torch_sparse is not installed")
    from torch_sparse import SparseTensor

    source, target = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for value, name in [(torch.tensor([1.0, 2.0, 3.0]), "edge_weight"), (torch.ones(3, 2), "edge_attr"), (None, None)]:
        adjacency = SparseTensor(row=target, col=source, value=value, sparse_sizes=(3, 3))
        loaded = load_graph(Data(x=torch.eye(3), adj_t=adjacency))
        assert _edges(loaded) == {(0, 1), (1, 2), (2, 0)}
        assert name is None or loaded[name].shape == value.shape
        assert "adj_t" not in loaded


def test_adjacency_that_nobody_can_read() -> None:
    for wrong in (np.eye(3), [[0, 1], [1, 0]]):
        with pytest.raises(InputError, match=rf"adj_t is a {type(wrong).__name__}, expected a sparse matrix"):
            load_graph(Data(x=torch.eye(3), adj_t=wrong))


@pytest.mark.parametrize("values", [[1.0, 1.0], [2.0, 3.0], [2**60 + 1, 3], [True, True]])
@pytest.mark.parametrize("layout", ["torch", "coo_matrix", "csr_matrix", "csc_array"])
def test_values_of_an_adjacency_matrix_are_kept_or_told(values: list[Any], layout: str) -> None:
    targets, sources = [0, 2], [1, 0]
    if layout == "torch":
        adjacency: Any = torch.sparse_coo_tensor(torch.tensor([targets, sources]), torch.tensor(values), (3, 3))
    else:
        sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
        adjacency = getattr(sparse, layout)((np.array(values), (targets, sources)), shape=(3, 3))
    data = load_graph(Data(x=torch.eye(3), adj_t=adjacency))
    assert sorted(data.edge_index.t().tolist()) == [[0, 2], [1, 0]]
    told = any("left out the values of adj_t, which are all 1" in note for note in data.get("pygdist_notes", []))
    assert told == (set(values) == {1})
    if not told:
        assert data.edge_weight[data.edge_index[0].argsort(descending=True)].tolist() == values
    else:
        assert "edge_weight" not in data


def test_edge_index_class_becomes_a_tensor() -> None:
    data = triangle()
    data.edge_index = torch_geometric.EdgeIndex(data.edge_index, sparse_size=(3, 3))
    assert type(load_graph(data).edge_index) is torch.Tensor


def _edges(data: Data) -> set[tuple[int, int]]:
    return set(zip(*data.edge_index.tolist(), strict=True))


# --- folders of .npy --------------------------------------------------------------------------------------------------


def test_npy_round_trip(tmp_path: Path) -> None:
    data = triangle(
        train_mask=torch.tensor([True, False, False]), edge_weight=torch.rand(3), edge_attr=torch.rand(3, 2)
    )
    save_npy(data, tmp_path / "graph")
    assert same(load_graph(str(tmp_path / "graph")), data)
    assert same(load_graph(tmp_path / "graph"), data)
    np.save(tmp_path / "graph" / "valid_idx.npy", np.array([1]))
    save_npy(triangle(), tmp_path / "graph")
    assert same(load_graph(tmp_path / "graph"), triangle()), "files of the graph before are gone"


def test_npy_in_other_forms(tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2], [2, 0]], dtype=np.uint32))
    np.save(tmp_path / "x.npy", np.eye(3, dtype=">f4"))
    np.save(tmp_path / "train_idx.npy", np.array([2, 0]))
    np.save(tmp_path / "valid_idx.npy", np.array([1]))
    data, _ = prepare(load_npy(tmp_path))
    assert data.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert torch.equal(data.x, torch.eye(3))
    loaded = load_npy(tmp_path)
    assert loaded.train_mask.tolist() == [True, False, True]
    assert loaded.val_mask.tolist() == [False, True, False]


def test_npy_never_changes_a_file(tmp_path: Path) -> None:
    save_npy(triangle(), tmp_path)
    load_npy(tmp_path).x.zero_()
    assert torch.equal(load_npy(tmp_path).x, torch.eye(3))


def test_npy_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no edge_index.npy"):
        load_npy(tmp_path)
    save_npy(triangle(), tmp_path)
    with pytest.raises(InputError, match="takes no arguments, got root"):
        load_graph(tmp_path, root=".")
    for value, message in [
        (np.array([3]), r"train_idx.npy: entry 0 is node 3, but the graph has nodes 0 to 2"),
        (np.array([0.5]), r"train_idx.npy: shape \(1,\) of float64, expected a list of integer node ids"),
    ]:
        np.save(tmp_path / "train_idx.npy", value)
        with pytest.raises(InputError, match=message):
            load_npy(tmp_path)
    (tmp_path / "train_idx.npy").unlink()
    for value, message in [
        (np.array(["a"]), r"x.npy: an array of <U1, expected numbers"),
        (np.array([{}]), r"x.npy: not a readable .npy array .*Python objects"),
    ]:
        np.save(tmp_path / "x.npy", value, allow_pickle=True)
        with pytest.raises(InputError, match=message):
            load_npy(tmp_path)
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(InputError, match=r"x.npy: not a readable .npy array"):
        load_npy(tmp_path)


# --- OGB --------------------------------------------------------------------------------------------------------------


def test_ogb(tmp_path: Path) -> None:
    pytest.importorskip("ogb", reason="ogb is not installed")
    _fake_arxiv(tmp_path)
    for _ in range(2):  # the second time reads what the first one processed
        data, notes = prepare(load_graph("ogbn-arxiv", root=str(tmp_path)))
        assert (data.num_nodes, data.num_edges, data.num_features) == (5, 4, 2)
        assert data.y.tolist() == [0, 1, 2, 0, 1]
        assert data.train_mask.tolist() == [True, True, False, False, False]
        assert data.val_mask.tolist() == [False, False, True, False, False]
        assert data.test_mask.tolist() == [False, False, False, True, True]
        assert notes == ["left out unused attributes: node_year"]


def _fake_arxiv(root: Path) -> None:
    """Five papers in the raw layout of ogbn-arxiv, which its loader takes for a finished download."""
    files = {
        "raw/edge": "0,1\n1,2\n2,3\n3,4\n",
        "raw/node-feat": "0.5,1\n1,0\n1,1\n0,0\n2,2\n",
        "raw/node-label": "0\n1\n2\n0\n1\n",
        "raw/node_year": "2000\n2001\n2002\n2003\n2004\n",
        "raw/num-node-list": "5\n",
        "raw/num-edge-list": "4\n",
        "split/time/train": "0\n1\n",
        "split/time/valid": "2\n",
        "split/time/test": "3\n4\n",
    }
    folder = root / "ogbn_arxiv"
    for name, text in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    (folder / "RELEASE_v1.txt").touch()


def test_ogb_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_ogb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("ogb"):
            raise ModuleNotFoundError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ogb)
    with pytest.raises(InputError, match=r"'ogbn-arxiv' needs ogb: pip install 'pygdist\[ogb\]'"):
        load_graph("ogbn-arxiv")


def _needs_more() -> Data:
    raise ImportError("MoleculeNet requires 'rdkit'")


def test_a_package_that_a_dataset_needs_is_named() -> None:
    with pytest.raises(InputError, match="'_needs_more': MoleculeNet requires 'rdkit'; install the package that it ne"):
        load_graph(_needs_more)


def _ring(num_nodes: int, transform: Callable[[Data], Data] | None = None) -> Data:
    nodes = torch.arange(num_nodes)
    graph = Data(x=torch.tensor([[1.0, 3.0]] * num_nodes), edge_index=torch.stack([nodes, nodes.roll(1)]))
    return graph if transform is None else transform(graph)


def test_an_argument_that_is_an_object_is_written_as_its_class_path() -> None:
    transform = {"class_path": "torch_geometric.transforms.NormalizeFeatures", "init_args": {"attrs": ["x"]}}
    assert load_graph(_ring, num_nodes=5, transform=transform).x.tolist() == [[0.0, 1.0]] * 5
    with pytest.raises(InputError, match=r"module torch_geometric.transforms has no 'Nope'"):
        load_graph(_ring, num_nodes=5, transform={"class_path": "torch_geometric.transforms.Nope"})


class _Width:
    def __init__(self, value: int) -> None:
        self.value = value


class _Wide(_Width):
    """A subclass of what a signature asks for."""


def _made_of(width: _Width | None, many: list[Callable[[Data], Data]] | None = None, share: float = 1.0) -> Data:
    return Data(x=torch.ones(3, 1 if width is None else width.value), edge_index=torch.zeros(2, 0, dtype=torch.long))


def _bare(num_nodes, transform=None):  # type: ignore[no-untyped-def]
    return _ring(num_nodes, transform)


_SYSTEM = {"class_path": "os.system", "init_args": {"command": "touch OWNED"}}
_CONSTANT = {"class_path": "torch_geometric.transforms.Constant", "init_args": {"value": 2.0}}


def test_objects_are_made_where_a_signature_asks_for_them() -> None:
    path = f"{__name__}._Wide"
    assert load_graph(_made_of, width={"class_path": path, "init_args": {"value": 4}}).x.shape == (3, 4)
    assert load_graph(_made_of, width=None, many=[_CONSTANT], share=1).x.shape == (3, 1)
    assert load_graph(_bare, num_nodes=4, transform=_CONSTANT).x.shape == (4, 3)
    nested = {"class_path": "torch_geometric.transforms.Compose", "init_args": {"transforms": [_CONSTANT, _CONSTANT]}}
    assert load_graph(_ring, num_nodes=4, transform=nested).x.shape == (4, 4)


@pytest.mark.parametrize(
    ("dataset", "args", "said"),
    [
        (_ring, {"num_nodes": _SYSTEM}, "num_nodes takes no object, but class_path 'os.system'"),
        (_bare, {"num_nodes": _SYSTEM}, "num_nodes takes no object"),
        (_bare, {"num_nodes": 3, "transform": _SYSTEM}, "transform: os.system is no subclass of .*BaseTransform"),
        (_ring, {"num_nodes": 3, "transform": _SYSTEM}, "transform: os.system is no subclass of .*BaseTransform"),
        (_ring, {"num_nodes": 3, "transform": [_SYSTEM]}, "transform: os.system is no subclass"),
        (_ring, {"num_nodes": 3, "transform": {"a": _SYSTEM}}, "transform: os.system is no subclass"),
        (_made_of, {"width": _SYSTEM}, "width: os.system is no subclass of .*_Width"),
        (_made_of, {"width": {"class_path": [], "init_args": {}}}, "width: expected class_path with the path"),
        (_made_of, {"width": {"class_path": "torch_geometric.data.Data"}}, "width: .*Data is no subclass"),
        (_made_of, {"width": None, "share": float("nan")}, "share is nan, expected a finite number"),
        (_made_of, {"width": None, "share": "half"}, "share is 'half', expected a finite number"),
        (_ring, {"num_nodes": [3]}, "num_nodes is '.3.', expected a whole number"),
        (_ring, {"num_nodes": True}, "num_nodes is 'True', expected a whole number"),
        ("sbm", {"num_nodes": 50, "seed": 1.5}, "seed is '1.5', expected a whole number"),
        ("sbm", {"num_nodes": 50, "seed": -1}, "seed is -1"),
        ("sbm", {"num_nodes": 50, "feature_noise": float("inf")}, "feature_noise is inf"),
        ("sbm", {"num_nodes": 50, "num_classes": 4, "avg_degree": 1e300}, "edges do not fit among 50 nodes"),
        ("sbm", {"num_nodes": 10**13, "num_classes": 4}, "not enough memory|edges do not fit"),
        ("power-law", {"num_nodes": 100, "num_edges": 1000, "exponent": 60.0}, "exponent 60.0 leaves too few pairs"),
        ("power-law", {"num_nodes": 100, "num_edges": 100, "exponent": -1.0}, "exponent is -1.0"),
        ("os.system", {"command": "touch OWNED"}, "dataset 'os.system': Python's own modules hold no dataset"),
        (".os", {}, "expected a class path"),
    ],
)
def test_arguments_that_do_not_fit_a_signature_are_named(dataset: Any, args: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_graph(dataset, **args)


@pytest.mark.parametrize("value", [1e300, -1e39, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["x", "edge_weight", "edge_attr"])
def test_values_beyond_float32_are_refused(name: str, value: float) -> None:
    fields = {"x": torch.ones(4, 2), "edge_weight": torch.ones(6), "edge_attr": torch.ones(6, 2)}
    data = Data(edge_index=torch.randint(4, (2, 6)), **{**fields, name: fields[name].double()})
    data[name].view(-1)[3] = value
    row = 1 if data[name].dim() == 2 else 3
    held = "values above 3.4e38" if abs(value) < float("inf") else "NaN or infinite values"
    with pytest.raises(InputError, match=f"^{name}: 1 of . (node|edge)s hold {held}.* the first is (node|edge) {row};"):
        prepare(data)
    prepare(Data(x=torch.full((2, 2), 3e38, dtype=torch.float64), edge_index=data.edge_index[:, :0]))
