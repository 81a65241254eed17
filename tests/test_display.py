"""Notebooks show stores, parts, partitions, graphs and data modules with right figures, as safe, plain HTML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import pygdist
from pygdist import GraphDataModule, Shard
from pygdist.display import bars, card, said, said_bytes, table
from pygdist.graph import StoreMeta, read_meta, write_store
from pygdist.partition import PartitionMetrics, partition_graph
from tests.lightning.runs import graph as small_graph


def _shown(thing: Any) -> tuple[dict[str, str], ElementTree.Element]:
    """Return the figures of a card, and all of it; it must be well-formed and hold no script."""
    html = thing if isinstance(thing, str) else thing._repr_html_()
    page = ElementTree.fromstring(html)
    assert not page.findall(".//script")
    assert "javascript" not in html.lower()
    assert not re.search(r"\son\w+=", html)
    rows = page.findall(".//table")[0].findall("tr")
    return {row[0].text or "": row[1].text or "" for row in rows}, page


def _heights(page: ElementTree.Element) -> dict[str, float]:
    """Return the height of each bar, by what it says."""
    return {one[0].text or "": float(one.attrib["height"]) for one in page.iter("rect") if len(one)}


def test_a_card_escapes_all_that_comes_from_names() -> None:
    evil = "<script>alert('x')</script>\"&"
    html = card(evil, {evil: evil}, bars({evil: [1, 2]}, each=evil, of=evil), table([{evil: evil}]), note=evil)
    figures, page = _shown(html)
    assert figures == {evil: evil}
    assert page[0].text == evil
    assert page[-1].text == evil


def test_bars_are_as_high_as_their_numbers() -> None:
    _, page = _shown(card("", {"a": 1}, bars({"nodes": [10, 20], "halo rows": [0, 5]})))
    heights = _heights(page)
    whole = heights["part 1: 20 nodes"]
    assert heights["part 0: 10 nodes"] == pytest.approx(whole / 2, abs=0.1)
    assert heights["part 1: 5 halo rows"] == pytest.approx(whole / 4, abs=0.1)
    assert heights["part 0: 0 halo rows"] == 0
    texts = {one.text for one in page.iter("text")}
    assert {"nodes", "halo rows", "part", "20", "0", "1"} <= texts, "series, axes and their ends"


def test_colours_are_the_page_s_or_stand_out_from_light_and_dark() -> None:
    html = card("t", {"a": 1}, bars({"x": [1], "y": [2]}), table([{"a": 1}]))
    colours = set(re.findall(r'(?:fill|stroke|color)[=:]"?([^";]+)', html)) - {"none"}
    assert "currentColor" in colours
    for colour in colours - {"currentColor"}:
        for background in ("#ffffff", "#111111"):
            assert _contrast(colour, background) >= 3, (colour, background)


def _contrast(one: str, other: str) -> float:
    """Contrast of two colours, as the web's guidelines define it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_to_plot_is_no_plot() -> None:
    assert bars({"nodes": []}) == bars({"nodes": [0, 0]}) == table([]) == ""


def test_numbers_are_said_plainly() -> None:
    assert [said(value) for value in (12345, 0.123456, True, "a<b")] == ["12,345", "0.123", "yes", "a&lt;b"]
    assert [said_bytes(size) for size in (12, 1536, 5 * 2**30)] == ["12 bytes", "1.5 KiB", "5.0 GiB"]


def test_many_parts_make_a_small_card() -> None:
    rows = [{"part": number} for number in range(1000)]
    html = card("t", {"a": 1}, bars({"nodes": list(range(1000))}), table(rows))
    _, page = _shown(html)
    assert "and 984 more" in html
    assert len(list(page.iter("text"))) < 10, "no label for each part"


def test_a_store_shows_its_parts(tmp_path: Path) -> None:
    data = small_graph()
    meta = partition_graph(data, tmp_path / "parts", num_parts=3, partitioner="hash", notes=["a <note>"])
    for one in (meta, read_meta(tmp_path / "parts")):
        assert isinstance(one, StoreMeta)
        figures, page = _shown(one)
        assert figures["nodes"] == "160"
        assert figures["edges"] == f"{data.num_edges:,}"
        assert figures["classes"] == "4"
        heights = _heights(page)
        for number, part in enumerate(meta["parts"]):
            assert f"part {number}: {part['num_owned']} nodes" in heights
            assert f"part {number}: {part['num_halo']} halo rows" in heights
        assert page[-1].text == "a <note>"
    assert repr(meta).startswith("StoreMeta(3 parts by hash: 160 nodes, ")
    assert "\n" not in repr(meta)


def test_stores_of_all_placements_show_themselves(tmp_path: Path) -> None:
    for placement in ("nodes", "replicas", "edges", "columns"):
        meta = partition_graph(small_graph(), tmp_path / placement, num_parts=2, placement=placement)
        figures, _ = _shown(meta)
        assert figures["placement"] == f"{placement}, 1 hop"
        assert figures["replication factor"] == f"{meta['replication_factor_full']:.3g}"
        for part in (0, 1):
            assert _shown(Shard.load(tmp_path / placement, part))[0]["edges"].endswith(f" of {meta['num_edges']:,}")


def test_a_partition_shows_its_measures() -> None:
    metrics = PartitionMetrics(
        num_nodes=np.array([6, 2]), num_edges=np.array([10, 10]), num_train=np.array([1, 1]), edge_cut=5,
        rows=np.array([[0, 3], [1, 0]]),
    )  # fmt: skip
    figures, page = _shown(metrics)
    assert figures == {
        "nodes": "8",
        "edges": "20",
        "edges cut": "25.0%",
        "rows per hop": "4",
        "replication factor": "1.5",
        "largest part": "1.50 x mean nodes, 1.00 x mean edges",
    }
    assert "part 1: 3 halo rows" in _heights(page)
    assert repr(metrics) == "PartitionMetrics(2 parts: 8 nodes, 4 rows per hop, replication factor 1.5)"


def test_a_shard_shows_itself_without_reading_its_values(tmp_path: Path) -> None:
    data, part = small_graph(), np.arange(160) % 2
    write_store(data, part, tmp_path / "parts", num_parts=2, method="test", arguments={})
    shard = Shard.load(tmp_path / "parts", 1)
    x = tmp_path / "parts" / "part_1" / "x.npy"
    size = sum(one.stat().st_size for one in x.parent.iterdir())
    figures, page = _shown(shard)
    assert figures["nodes"] == "80 of 160"
    assert figures["halo rows"] == f"{shard.num_halo}"
    assert figures["size"].endswith("KiB")
    assert float(figures["size"].split()[0]) * 1024 == pytest.approx(size, rel=0.2)
    assert f"other part 0: {shard.num_halo} rows received" in _heights(page)
    shard.x = torch.empty(80, 12, device="meta")  # which has no values
    assert _shown(shard)[0]["device"] == "meta"


def test_an_open_graph_shows_the_part_and_its_backend(tmp_path: Path) -> None:
    with pygdist.open_graph(small_graph(), backend="tensor", cache_dir=tmp_path) as graph:
        figures, page = _shown(graph)
    assert figures["backend"] == "tensor"
    assert figures["nodes"] == "160 of 160"
    assert page[0].text == "Part of rank 0, of a graph that 1 processes share"


def test_a_data_module_shows_itself_before_and_after_it_is_prepared(tmp_path: Path) -> None:
    module = GraphDataModule(small_graph(), num_parts=2, cache_dir=tmp_path)
    figures, page = _shown(module)
    assert figures["nodes"] == "160"
    assert page[-1].text == "Not prepared yet: trainer.fit() or prepare_data() partitions it."
    assert repr(module) == str(module) == "GraphDataModule(Data; not prepared yet)"
    assert _shown(GraphDataModule("sbm", {"num_nodes": 50}))[0]["num_nodes"] == "50"
    assert repr(GraphDataModule("sbm")) == "GraphDataModule(sbm; not prepared yet)"
    module.prepare_data()
    assert "part 1: " in "".join(_heights(_shown(module)[1]))
    assert repr(module).startswith("GraphDataModule(160 nodes, ")
    assert repr(module).endswith("4 classes, 2 parts by chunk)")


def test_a_data_module_whose_store_is_gone_says_so(tmp_path: Path) -> None:
    module = GraphDataModule(store=tmp_path / "gone")
    assert "there is no such folder" in repr(module)
    assert "there is no such folder" in module._repr_html_()
