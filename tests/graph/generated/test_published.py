"""Doubles of published graphs: the published figures, at any scale, the same in memory and in files."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from pygdist.errors import InputError
from pygdist.graph import PUBLISHED, GraphFiles, load_graph, load_hetero, load_npy, write_generated
from pygdist.graph.generated import files as generated_files
from pygdist.graph.generated.graph import HETEROGENEOUS, HOMOGENEOUS, GraphGenerator
from pygdist.graph.generated.published import published_graph
from pygdist.partition import partition_graph

SMALL = {"reddit-like": 0.003, "products-like": 0.003, "papers-like": 0.0002, "mag-like": 0.01}
MASKS = ("train_mask", "val_mask", "test_mask")


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_the_largest_degree_is_the_published_one(name: str) -> None:
    graph = GraphGenerator(name)
    published = graph.facts.relations[0].largest_in_degree
    assert published is not None
    (edges,) = graph.edges.values()
    assert edges.largest_in_degree() == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_at_scale_one_are_the_published_ones(name: str) -> None:
    graph = GraphGenerator(name)
    assert graph.facts is PUBLISHED[name]
    assert [edges.num_edges for edges in graph.edges.values()] == [one.num_edges for one in graph.facts.relations]
    assert [nodes.num_nodes for nodes in graph.nodes.values()] == [one.num_nodes for one in graph.facts.nodes.values()]


@pytest.mark.parametrize(("name", "scale"), SMALL.items())
def test_average_degree_skew_and_split_at_a_small_scale(name: str, scale: float) -> None:
    whole, small = published_graph(name), published_graph(name, scale)
    graph = GraphGenerator(name, scale=scale)
    for original, relation in zip(whole.relations, small.relations, strict=True):
        degrees = [one.num_edges / graphs.nodes[one.target].num_nodes for graphs, one in
                   ((whole, original), (small, relation))]  # fmt: skip
        assert degrees[1] == pytest.approx(degrees[0], rel=0.01)
        target = graph.edges[relation.key].read(0, relation.num_edges)[1]
        largest = np.bincount(target).max()
        if original.largest_in_degree is not None:
            assert largest == pytest.approx(original.largest_in_degree * scale ** original.exponent[1], rel=0.2)
    for kind, facts in small.nodes.items():
        assert facts.num_nodes == round(whole.nodes[kind].num_nodes * scale)
        assert np.array(facts.split) == pytest.approx(np.array(whole.nodes[kind].split) * scale, abs=1)
        assert (facts.num_features, facts.num_classes) == (
            whole.nodes[kind].num_features, whole.nodes[kind].num_classes,
        )  # fmt: skip


def test_wrong_labels_are_a_share_and_change_nothing_else() -> None:
    right, some = (load_graph("products-like", scale=0.003, wrong_labels=share) for share in (0.0, 0.22))
    labelled = right.y >= 0
    wrong = (some.y != right.y)[labelled].double().mean()
    assert float(wrong) == pytest.approx(0.22, abs=0.02)
    assert set(some.y[labelled].tolist()) == set(range(47))
    assert torch.equal(right.y < 0, some.y < 0)
    assert all(torch.equal(right[name], some[name]) for name in ("x", "edge_index", *MASKS))
    with pytest.raises(InputError, match=r"wrong_labels is 1\.0, expected a share of the nodes from 0, below 1"):
        load_graph("products-like", scale=0.003, wrong_labels=1.0)


def test_every_node_of_a_full_split_is_in_it() -> None:
    for scale in (0.001, 0.0123, 0.5, 3.7):
        facts = published_graph("reddit-like", scale).nodes["node"]
        assert sum(facts.split) == facts.num_nodes


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_smallest_scale_is_accepted_and_below_it_none(name: str) -> None:
    smallest = PUBLISHED[name].smallest_scale
    assert min(facts.num_nodes for facts in published_graph(name, smallest).nodes.values()) >= 4
    with pytest.raises(InputError, match=rf"{name}: scale .* the smallest scale is {smallest:g}"):
        published_graph(name, smallest * 0.9)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_no_scale(scale: float) -> None:
    with pytest.raises(InputError, match=r"reddit-like'?: scale is .*, expected a (number above 0|finite number)"):
        load_graph("reddit-like", scale=scale)


def test_other_arguments_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="there is no generated graph 'cora-like'; choose one of reddit-like, "):
        published_graph("cora-like")
    with pytest.raises(InputError, match="seed is -1"):
        load_graph("reddit-like", scale=0.01, seed=-1)


# --- content ----------------------------------------------------------------------------------------------------------


def test_labels_features_and_edges_agree() -> None:
    data = load_graph("products-like", scale=0.003)
    x, y = data.x, data.y
    centres = torch.stack([x[y == number].mean(0) for number in range(47)])
    nearest = torch.cdist(x, centres).argmin(1)
    assert (nearest == y).float().mean() > 0.4  # one in 47 by chance
    source, target = data.edge_index
    assert (y[source] == y[target]).float().mean() == pytest.approx(0.7 + 0.3 / 47, abs=0.02)
    mean = torch.zeros_like(x).index_add_(0, target, x[source])
    assert (torch.cdist(torch.nn.functional.normalize(mean), centres).argmin(1) == y).float().mean() > 0.95


def test_splits_are_exact_and_do_not_depend_on_degree() -> None:
    data = load_graph("products-like", scale=0.01, features=False)  # three blocks of nodes
    assert "x" not in data
    assert [int(data[name].sum()) for name in MASKS] == [1966, 393, 22131]
    assert not (data.train_mask & data.val_mask | data.val_mask & data.test_mask).any()
    degree = torch.bincount(data.edge_index[1], minlength=24_490).float()
    assert float(degree[data.train_mask].mean()) == pytest.approx(50.5, rel=0.1)


def test_labels_are_there_where_a_split_is() -> None:
    data = load_graph("papers-like", scale=0.0005, features=False)
    assert [int(data[name].sum()) for name in MASKS] == [604, 62, 107]
    labelled = data.train_mask | data.val_mask | data.test_mask
    assert torch.equal(data.y >= 0, labelled)
    assert int(data.y.max()) == 171


def test_seeds_differ_and_relations_do_too() -> None:
    one, other = (load_graph("reddit-like", scale=0.001, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.edge_index, other.edge_index)
    assert not torch.equal(one.x, other.x)
    assert not torch.equal(one.train_mask, other.train_mask)
    seeds = [GraphGenerator("mag-like").edge_arguments(one)["seed"] for one in PUBLISHED["mag-like"].relations]
    assert len(set(seeds)) == 4


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_files_hold_what_memory_holds(name: str, tmp_path: Path) -> None:
    folder = write_generated(name, tmp_path / "graph", scale=SMALL[name], seed=4)
    ours, theirs = load_graph(folder), load_graph(name, scale=SMALL[name], seed=4)
    for field in ("edge_index", "x", "y", *MASKS):
        assert ours[field].dtype == theirs[field].dtype
        assert torch.equal(ours[field], theirs[field]), field
    description = json.loads((folder / "graph.json").read_text())
    (edges,) = description["edges"]
    assert edges["largest_in_degree"] == int(torch.bincount(theirs.edge_index[1]).max())
    distinct = theirs.edge_index.unique(dim=1).size(1)
    assert edges["parallel_share"] == pytest.approx(1 - distinct / edges["num_edges"], abs=0.02)
    assert {path.name for path in tmp_path.iterdir()} == {"graph"}


def test_a_heterogeneous_graph(tmp_path: Path) -> None:
    folder = write_generated("mag-like", tmp_path / "mag", scale=0.01)
    ours, theirs = load_hetero(folder), load_hetero("mag-like", scale=0.01)
    assert isinstance(ours, HeteroData)
    assert ours.validate()
    assert ours.node_types == theirs.node_types == ["paper", "author", "institution", "field_of_study"]
    assert ours.edge_types == theirs.edge_types
    for store in (*ours.node_stores, *ours.edge_stores):
        assert set(store) == set(theirs[store._key])
        for field, value in store.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[store._key][field])), field
    assert set(ours["author"]) == {"num_nodes"}
    ours["paper"].x[0] = 7.0  # copy on write
    assert not (load_hetero(folder)["paper"].x[0] == 7).any()


def test_papers_of_a_class_share_authors() -> None:
    data = load_hetero("mag-like", scale=0.01, features=False)
    assert "x" not in data["paper"]
    writes = GraphGenerator("mag-like", scale=0.01).edges["author", "writes", "paper"]
    author, paper = data["author", "writes", "paper"].edge_index.numpy()
    assert np.array_equal(writes.communities(paper), data["paper"].y.numpy()[paper])
    same = writes.communities(author, end="source") == writes.communities(paper)
    assert same.mean() == pytest.approx(0.6, abs=0.02)


def test_a_folder_is_partitioned_as_a_stream(tmp_path: Path) -> None:
    folder = write_generated("papers-like", tmp_path / "graph", scale=0.0001)
    meta = partition_graph(GraphFiles(edges=folder), tmp_path / "parts", num_parts=2, partitioner="hash")
    assert (meta["num_nodes"], meta["num_edges"], meta["num_features"]) == (11_106, 161_569, 128)
    assert sum(part["counts"]["train_mask"] for part in meta["parts"]) == 121


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    folder = write_generated("reddit-like", tmp_path / "graph", scale=0.001)
    before = (folder / "graph.json").stat()
    write_generated("reddit-like", folder, scale=0.001)
    assert (folder / "graph.json").stat() == before
    with pytest.raises(InputError, match=r"graph: holds another graph \(seed 0\); choose another folder"):
        write_generated("reddit-like", folder, scale=0.001, seed=1)
    with pytest.raises(InputError, match=r"holds another graph \(scale 0.001, features True\)"):
        write_generated("reddit-like", folder, scale=0.002, features=False)
    write_generated("reddit-like", folder, scale=0.002, features=False, overwrite=True)
    assert not (folder / "x.npy").exists()
    assert np.load(folder / "y.npy").shape == (466,)


def test_other_peoples_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="exists and is not a generated graph"):
        write_generated("reddit-like", tmp_path, scale=0.001, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(generated_files, "_write_nodes", fail)
    with pytest.raises((InputError, KeyboardInterrupt)):
        write_generated("reddit-like", tmp_path / "graph", scale=0.001)
    assert not list(tmp_path.iterdir())


def test_a_replacement_that_was_killed_puts_the_old_graph_back(tmp_path: Path) -> None:
    folder = write_generated("reddit-like", tmp_path / "graph", scale=0.001)
    folder.rename(tmp_path / ".graph.tmp-0-old")
    write_generated("reddit-like", folder, scale=0.001)
    assert {path.name for path in tmp_path.iterdir()} == {"graph"}


def test_a_graph_that_does_not_fit_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Usage = namedtuple("Usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2, 1, 1))
    with pytest.raises(InputError, match=r"papers-like at scale 1 takes 83\.\d GB, but only 0\.0 GB are free"):
        write_generated("papers-like", tmp_path / "graph")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_graph(tmp_path: Path) -> None:
    peaks = []
    for scale in (0.02, 0.06):
        tracemalloc.start()
        write_generated("products-like", tmp_path / str(scale), scale=scale)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


# --- what cannot be read ----------------------------------------------------------------------------------------------


def test_each_kind_of_graph_names_what_reads_it(tmp_path: Path) -> None:
    mag = write_generated("mag-like", tmp_path / "mag", scale=0.001)
    reddit = write_generated("reddit-like", tmp_path / "reddit", scale=0.001)
    for one in (load_graph("mag-like", scale=0.001), load_graph(mag)):
        assert int(one.edge_type.max()) == 3
    with pytest.raises(InputError, match=r"mag: holds a heterogeneous graph; use pygdist\.graph\.load_hetero"):
        load_npy(mag)
    with pytest.raises(InputError, match=r"one type; use load_graph\('reddit-like'\)"):
        load_hetero("reddit-like")
    with pytest.raises(InputError, match=r"one type; use load_graph\('.*/"):
        load_hetero(reddit)
    with pytest.raises(InputError, match=r"'nowhere': neither a folder nor a heterogeneous graph \(mag-like\)"):
        load_hetero("nowhere")
    with pytest.raises(InputError, match="is a folder, which takes no scale, seed, features or wrong labels"):
        load_hetero(mag, seed=3)
    assert HETEROGENEOUS == ("mag-like",)


@pytest.mark.parametrize(
    ("path", "array", "message"),
    [
        pytest.param("graph.json", None, "has no graph.json", id="no-json"),
        pytest.param("graph.json", b"{", "graph.json: is damaged", id="json"),
        pytest.param("graph.json", b'{"format_version": 9, "nodes": {"a": 1}, "edges": [1]}', "version 9", id="format"),
        pytest.param("nodes/paper/x.npy", None, "x.npy: not a readable", id="no-x"),
        pytest.param("nodes/paper/x.npy", b"\x93NUMPY", "x.npy: not a readable", id="cut-x"),
        pytest.param("nodes/paper/y.npy", np.zeros(3, np.int64), r"y.npy: shape \(3,\), expected a row", id="rows"),
        pytest.param("edges/paper__cites__paper/edge_index.npy", np.zeros((2, 3), np.int64), "expected int64 of shape",
                     id="edges"),
        pytest.param("edges/paper__cites__paper/edge_index.npy", np.full((2, 5416), 736), "the source of edge 0 is node"
                     " 736, but nodes are numbered from 0 to 735", id="ids"),
    ],
)  # fmt: skip
def test_a_damaged_folder(path: str, array: Any, message: str, tmp_path: Path) -> None:
    folder = write_generated("mag-like", tmp_path / "mag", scale=0.001)
    if array is None:
        (folder / path).unlink()
    elif isinstance(array, bytes):
        (folder / path).write_bytes(array)
    else:
        np.save(folder / path, array)
    with pytest.raises(InputError, match=message):
        load_hetero(folder)
