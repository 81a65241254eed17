"""The store: parts that together are the graph, plans whose two ends agree, and damage that is noticed."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import fingerprint, open_part, read_meta, store_key, write_store
from pygdist.graph.store import part_files as part_files_module
from pygdist.graph.streams import arrays as arrays_module
from pygdist.graph.streams import folder as folder_module

MASKS = ("train_mask", "val_mask", "test_mask")


def random_graph(num_nodes: int, num_edges: int, seed: int = 0, *, multi_label: bool = False) -> Data:
    """A directed multigraph with self-loops, isolated nodes and unlabelled nodes."""
    rng = np.random.default_rng(seed)
    y = rng.random((num_nodes, 3)).astype(np.float32) if multi_label else rng.integers(-1, 4, num_nodes)
    masks = {name: torch.from_numpy(rng.random(num_nodes) < 0.4) for name in MASKS}
    return Data(
        x=torch.from_numpy(rng.standard_normal((num_nodes, 3), dtype=np.float32)),
        edge_index=torch.from_numpy(rng.integers(0, max(1, num_nodes * 3 // 4), (2, num_edges))),
        edge_weight=torch.from_numpy(rng.random(num_edges)),
        edge_attr=torch.from_numpy(rng.random((num_edges, 2), dtype=np.float32)),
        edge_type=torch.from_numpy(rng.integers(0, 3, num_edges)),
        y=torch.from_numpy(y),
        num_classes=4,
        **masks,
    )


def write(data: Data, part: Any, folder: Path, num_parts: int, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"method": "given", "arguments": {"seed": 1}, **changes}
    return write_store(data, np.asarray(part), folder, num_parts=num_parts, **options)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 3 parts, the last of which is empty."""
    write(random_graph(20, 60), np.arange(20) % 2, tmp_path / "store", 3)
    return tmp_path / "store"


# --- the parts are the graph ------------------------------------------------------------------------------------------


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[Data, np.ndarray, int]:
    num_nodes, num_parts = draw(st.integers(1, 25)), draw(st.integers(1, 5))
    data = random_graph(num_nodes, draw(st.integers(0, 80)), draw(st.integers(0, 1000)))
    owners = st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes)
    return data, np.array(draw(owners)), num_parts


@pytest.mark.slow
@given(case=partitioned())
@settings(max_examples=60)
def test_parts_are_the_graph(case: tuple[Data, np.ndarray, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    data, part, num_parts = case
    folder = tmp_path_factory.mktemp("store") / "store"
    meta = write(data, part, folder, num_parts)
    opened = [open_part(folder, p, num_parts=num_parts) for p in range(num_parts)]
    for p, arrays in enumerate(opened):
        _check_rows(data, part, p, arrays)
        _check_edges(data, part, p, arrays)
    _check_plans(part, opened)
    _check_meta(data, part, opened, meta)


def _check_rows(data: Data, part: np.ndarray, p: int, arrays: dict[str, np.ndarray]) -> None:
    owned = np.flatnonzero(part == p)
    n_id = arrays["n_id"]
    np.testing.assert_array_equal(n_id[: len(owned)], owned)
    halo = n_id[len(owned) :]
    assert list(halo) == sorted(set(halo.tolist()), key=lambda node: (part[node], node)), "by owner, then by id"
    assert not (part[halo] == p).any()
    for name in ("x", "y", *MASKS):
        np.testing.assert_array_equal(arrays[name], data[name].numpy()[owned])
        assert arrays[name].dtype == data[name].numpy().dtype


def _check_edges(data: Data, part: np.ndarray, p: int, arrays: dict[str, np.ndarray]) -> None:
    source, target = data.edge_index.numpy()
    n_id, indptr, src, e_id = (arrays[name] for name in ("n_id", "indptr", "src", "e_id"))
    dst = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    # every edge into an owned node, once, and no other
    np.testing.assert_array_equal(np.sort(e_id), np.flatnonzero(part[target] == p))
    np.testing.assert_array_equal(n_id[src], source[e_id])
    np.testing.assert_array_equal(n_id[dst], target[e_id])
    np.testing.assert_array_equal(np.lexsort((e_id, dst)), np.arange(len(src)))
    assert set(n_id[np.sum(part == p) :]) == {s for s in source[e_id] if part[s] != p}, "no halo row without use"
    for name in ("edge_weight", "edge_attr", "edge_type"):
        np.testing.assert_array_equal(arrays[name], data[name].numpy()[e_id])
    assert (src.dtype, indptr.dtype, e_id.dtype, n_id.dtype) == (np.int32, np.int64, np.int64, np.int64)


def _check_plans(part: np.ndarray, opened: list[dict[str, np.ndarray]]) -> None:
    num_parts = len(opened)
    for receiver, arrays in enumerate(opened):
        start = int(np.sum(part == receiver))
        assert arrays["recv_counts"].shape == (num_parts,)
        assert arrays["recv_counts"].sum() == len(arrays["n_id"]) - start
        for sender, other in enumerate(opened):
            count = arrays["recv_counts"][sender]
            assert count == other["send_counts"][receiver]
            sent_from = other["send_counts"][:receiver].sum()
            rows = other["send_index"][sent_from : sent_from + count]
            np.testing.assert_array_equal(other["n_id"][rows], arrays["n_id"][start : start + count])
            start += count
        assert arrays["recv_counts"][receiver] == arrays["send_counts"][receiver] == 0
        assert arrays["send_index"].dtype == arrays["send_counts"].dtype == arrays["recv_counts"].dtype == np.int64


def _check_meta(data: Data, part: np.ndarray, opened: list[dict[str, np.ndarray]], meta: dict[str, Any]) -> None:
    source, target = data.edge_index.numpy()
    assert (meta["num_nodes"], meta["num_edges"], meta["num_parts"]) == (len(part), data.num_edges, len(opened))
    assert meta["edge_cut"] == int((part[source] != part[target]).sum())
    assert meta["replication_factor"] == pytest.approx(sum(len(arrays["n_id"]) for arrays in opened) / len(part))
    assert meta["counts"] == {name: int(data[name].sum()) for name in MASKS}
    for arrays, stated in zip(opened, meta["parts"], strict=True):
        num_owned = len(arrays["x"])
        assert (stated["num_owned"], stated["num_halo"]) == (num_owned, len(arrays["n_id"]) - num_owned)
        assert stated["num_edges"] == len(arrays["src"])
        assert stated["counts"] == {name: int(arrays[name].sum()) for name in MASKS}


def test_meta_says_what_is_inside(tmp_path: Path) -> None:
    data = random_graph(10, 30)
    figures = {"seconds": 1.5, "edges_per_second": 20.0}
    meta = write(data, [0] * 10, tmp_path / "store", 1, notes=["removed 3 self-loops"], figures=figures)
    assert meta == read_meta(tmp_path / "store")
    expected = {
        "format_version": 3,
        "placement": "nodes",
        "method": "given",
        "arguments": {"seed": 1},
        "preprocessing": ["removed 3 self-loops"],
        "fingerprint": fingerprint(data),
        "num_features": 3,
        "num_classes": 4,
        "multi_label": False,
        "dtypes": {
            "x": "float32",
            "y": "int64",
            "edge_weight": "float64",
            "edge_attr": "float32",
            "edge_type": "int64",
        },
        **figures,
    }
    assert {name: meta[name] for name in expected} == expected
    assert meta["peak_rss_bytes"] > 1 << 20


def test_fields_may_be_absent(tmp_path: Path) -> None:
    data = Data(x=torch.ones(3, 2, dtype=torch.float64), edge_index=torch.tensor([[0, 1], [1, 2]]))
    meta = write(data, [0, 1, 0], tmp_path / "store", 2)
    arrays = open_part(tmp_path / "store", 0)
    assert not {"y", "edge_weight", "edge_attr", "edge_type"} & arrays.keys()
    assert not arrays["train_mask"].any()
    assert arrays["x"].dtype == np.float64
    assert meta["num_classes"] == 0


def test_label_matrix(tmp_path: Path) -> None:
    data = random_graph(6, 10, multi_label=True)
    meta = write(data, [0, 1] * 3, tmp_path / "store", 2, num_classes=3)
    assert (meta["multi_label"], meta["num_classes"]) == (True, 3)
    np.testing.assert_array_equal(open_part(tmp_path / "store", 1)["y"], data.y.numpy()[1::2])


def test_rows_in_several_blocks_and_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_module, "_BLOCK_BYTES", 30)
    data = random_graph(20, 60)
    data.x = data.x.t().contiguous().t()
    write(data, np.arange(20) % 2, tmp_path / "store", 2)
    np.testing.assert_array_equal(open_part(tmp_path / "store", 1)["x"], data.x.numpy()[1::2])


def test_opened_arrays_are_private(store: Path) -> None:
    open_part(store, 0)["x"][:] = 7
    assert not (open_part(store, 0)["x"] == 7).any()


def test_files_hold_no_pickle(store: Path) -> None:
    for path in store.rglob("*"):
        if path.is_file() and path.name != "meta.json":
            np.load(path, allow_pickle=False)


# --- whole or absent --------------------------------------------------------------------------------------------------


def test_a_finished_store_is_left_alone(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    meta = write(random_graph(20, 60), np.arange(20) % 2, store, 3)
    assert meta == read_meta(store)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


@pytest.mark.parametrize(
    ("seed", "changes", "differing"),
    [
        (1, {}, "fingerprint"),
        (0, {"method": "other"}, "method"),
        (0, {"arguments": {"seed": 2}}, "arguments"),
        (0, {"num_classes": 9}, "num_classes"),
        (0, {"placement": "replicas"}, "placement"),
        (0, {"num_hops": 2}, "num_hops, placement"),
    ],
)
def test_another_store_is_never_taken_for_it(store: Path, seed: int, changes: dict[str, Any], differing: str) -> None:
    with pytest.raises(InputError, match=rf"holds another store \({differing} differ\)"):
        write(random_graph(20, 60, seed), np.arange(20) % 2, store, 3, **changes)
    with pytest.raises(InputError, match=r"partition.*differ"):
        write(random_graph(20, 60), np.zeros(20, dtype=np.int64), store, 3)
    meta = write(random_graph(20, 60, seed), np.arange(20) % 2, store, 3, overwrite=True, **changes)
    assert meta == read_meta(store)
    assert _beside(store) == []


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="exists and is not a store of pygdist"):
        write(random_graph(5, 9), [0] * 5, tmp_path, 1, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


def test_a_finished_store_may_be_read_only(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder_module, "_lock", refuse)
    assert write(random_graph(20, 60), np.arange(20) % 2, store, 3) == read_meta(store)
    with pytest.raises(InputError, match=r"could not be written \(.*Permission denied;"):
        write(random_graph(20, 60), np.arange(20) % 2, store.parent / "other", 3)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write(random_graph(5, 9), [0] * 5, tmp_path / "store", 1)
    assert read_meta(tmp_path / "store")["num_parts"] == 1


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt("stop")], ids=["full", "ctrl-c"]
)
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(part_files_module, "_write_plans", fail)
    expected = InputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=str(error).rpartition("] ")[2]):
        write(random_graph(5, 9), [0] * 5, tmp_path / "store", 1)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_cleared(store: Path) -> None:
    stale = store.parent / f".{store.name}.tmp-0123"
    shutil.copytree(store, stale)
    (stale / "meta.json").unlink()
    shutil.rmtree(store)
    (store.parent / f".{store.name}.lock").touch()
    with pytest.raises(InputError, match="no such folder"):
        open_part(store, 0)
    write(random_graph(20, 60), np.arange(20) % 2, store, 3)
    assert _beside(store) == []


def test_what_killed_writers_of_other_folders_left_is_cleared(store: Path) -> None:
    killed, alive, key = (store.parent / f".{name}.tmp-{'0' * 32}" for name in ("killed", "alive", "1" * 32))
    for stale in (killed, alive, key):
        shutil.copytree(store, stale)
    (store.parent / f".{'2' * 32}.lock").touch()
    (store.parent / ".program.lock").touch()  # of others
    (store.parent / ".program.tmp-1").touch()
    with (store.parent / ".alive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(random_graph(20, 60), np.arange(20) % 2, store.with_name("new"), 3)
    others = {".alive.lock", alive.name, ".program.lock", ".program.tmp-1", "new"}
    assert set(_beside(store)) == others


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, part = random_graph(20, 60), np.arange(20) % 2
    written, plans = [], part_files_module._write_plans
    monkeypatch.setattr(part_files_module, "_write_plans", lambda *args: (written.append(1), plans(*args)))
    found: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: found.append(write(data, part, tmp_path / "store", 2))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1, "the others waited"
    assert found == [read_meta(tmp_path / "store")] * 4
    assert _beside(tmp_path / "store") == []


def test_without_locks_the_first_writer_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_lock", lambda *_, **__: None)
    data, part, place = random_graph(20, 60), np.arange(20) % 2, tmp_path / "store"
    plans = part_files_module._write_plans

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(part_files_module, "_write_plans", plans)
        write(data, part, place, 2, figures={"seconds": 1.0})
        plans(*args)

    monkeypatch.setattr(part_files_module, "_write_plans", overtaken)
    meta = write(data, part, place, 2, figures={"seconds": 2.0})
    assert meta["seconds"] == 1.0
    assert meta == read_meta(place)
    assert _beside(place) == []


def _beside(store: Path) -> list[str]:
    return [path.name for path in store.parent.iterdir() if path != store]


# --- damage -----------------------------------------------------------------------------------------------------------


def test_another_world_size(store: Path) -> None:
    message = r"has 3 parts, but the run has 2 ranks; .* pygdist partition --method given --parts 2"
    with pytest.raises(InputError, match=message):
        open_part(store, 0, num_parts=2)
    with pytest.raises(InputError, match="has no part 3, only parts 0 to 2"):
        open_part(store, 3)


def test_no_store(tmp_path: Path, store: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder; write it with: pygdist partition"):
        read_meta(tmp_path / "absent")
    (store / "meta.json").unlink()
    with pytest.raises(InputError, match=r"has no meta.json, so it is no partitioned graph, or not a finished one"):
        open_part(store, 0)


def test_another_format(store: Path) -> None:
    meta = json.loads((store / "meta.json").read_text())
    (store / "meta.json").write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(InputError, match="format version 99, but this pygdist reads version 3"):
        read_meta(store)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3"])
def test_damaged_meta(store: Path, text: str) -> None:
    (store / "meta.json").write_text(text)
    with pytest.raises(InputError, match=r"meta.json: is corrupted"):
        open_part(store, 0)


def test_another_count_in_meta(store: Path) -> None:
    text = (store / "meta.json").read_text()
    (store / "meta.json").write_text(text.replace('"num_nodes": 20', '"num_nodes": 21'))
    with pytest.raises(InputError, match=r"meta.json: is corrupted \(its checksum does not match\)"):
        open_part(store, 0)


@pytest.mark.parametrize("name", ["x", "src", "send_index", "train_mask"])
def test_damaged_arrays(store: Path, name: str) -> None:
    path = store / "part_1" / f"{name}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=rf"part_1/{name}.npy: is damaged, its checksum"):
        open_part(store, 1)
    open_part(store, 1, verify=False)
    open_part(store, 0)  # each rank reads its own part only
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"{name}.npy: is damaged, it has {len(content) - 1} bytes instead of"):
        open_part(store, 1, verify=False)
    path.unlink()
    with pytest.raises(
        InputError,
        match=rf"part_1/{name}.npy: is missing; copy the file again if this is a copy, or partition the graph again",
    ):
        open_part(store, 1, verify=False)


def test_damaged_headers(store: Path) -> None:
    path = store / "part_0" / "x.npy"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"<f4", b"<i4"))
    with pytest.raises(InputError, match=r"x.npy: holds int32 of shape .*, but meta.json says float32"):
        open_part(store, 0, verify=False)
    path.write_bytes(b"X" + content[1:])
    with pytest.raises(InputError, match=r"x.npy: is damaged"):
        open_part(store, 0, verify=False)


@pytest.mark.parametrize(
    ("part", "num_parts", "message"),
    [
        ([0, 1], 2, r"part: int64 of shape \(2,\), expected integers of shape \(3,\)"),
        ([0.0, 1.0, 0.0], 2, "part: float64 of shape"),
        ([0, 1, 2], 2, "part: values from 0 to 2, expected parts 0 to 1"),
        ([-1, 0, 0], 2, "part: values from -1 to 0"),
    ],
)
def test_write_store_refuses_a_part(tmp_path: Path, part: list[Any], num_parts: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        write(random_graph(3, 4), part, tmp_path / "store", num_parts)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_store_key_depends_on_content_and_arguments() -> None:
    key = store_key("abc", {"method": "hash", "seed": 0})
    assert key == store_key("abc", {"seed": 0, "method": "hash"})
    assert (
        len({key, store_key("abd", {"method": "hash", "seed": 0}), store_key("abc", {"method": "hash", "seed": 1})})
        == 3
    )
    with pytest.raises(InputError, match="cannot be written as JSON"):
        store_key("abc", {"method": object()})
