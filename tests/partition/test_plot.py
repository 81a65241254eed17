from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from pygdist.graph import load_graph, prepare
from pygdist.partition import PartitionMetrics, partition_graph
from pygdist.partition.plot import plot_load, plot_traffic

METRICS = PartitionMetrics(
    num_nodes=np.array([50, 30, 20]),
    num_edges=np.array([100, 200, 700]),
    num_train=np.array([1, 2, 3]),
    edge_cut=42,
    rows=np.array([[0, 1500, 2], [30, 0, 4], [0, 6, 0]]),
)


def test_traffic_says_who_sends_how_much_to_whom() -> None:
    ax = plot_traffic(METRICS, ax=Figure().add_subplot())
    found = {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in ax.texts}
    assert found == {
        (0, 0): "–", (0, 1): "1,500", (0, 2): "2",
        (1, 0): "30", (1, 1): "–", (1, 2): "4",
        (2, 0): "0", (2, 1): "6", (2, 2): "–",
    }  # fmt: skip
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("from part", "to part")
    assert "1,542" in ax.get_title()
    assert np.array_equal(ax.images[0].get_array(), METRICS.rows)


def test_numbers_can_be_read_on_light_and_dark() -> None:
    ax = plot_traffic(METRICS, ax=Figure().add_subplot())
    assert {text.get_text(): text.get_color() for text in ax.texts if text.get_text() in ("1,500", "2")} == {
        "1,500": "white",
        "2": "black",
    }


@pytest.mark.parametrize("num_parts", [pytest.param(1, id="1-part"), pytest.param(40, id="40-parts")])
def test_traffic_of_one_part_and_of_many(num_parts: int) -> None:
    ones, zeros = np.ones(num_parts, dtype=np.int64), np.zeros((num_parts, num_parts), dtype=np.int64)
    metrics = PartitionMetrics(num_nodes=ones, num_edges=ones, num_train=ones, edge_cut=0, rows=zeros)
    ax = plot_traffic(metrics, ax=Figure().add_subplot())
    assert len(ax.texts) == (1 if num_parts == 1 else 0), "numbers are left out where they would not fit"


def test_load_shows_shares() -> None:
    ax = plot_load(METRICS, ax=Figure().add_subplot())
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}
    assert heights == {
        "nodes": pytest.approx([0.5, 0.3, 0.2]),
        "edges": pytest.approx([0.1, 0.2, 0.7]),
        "halo rows (of all nodes)": pytest.approx([0.3, 15.06, 0.06]),
    }
    assert f"{METRICS.replication_factor:.2f}" in ax.get_title()


def test_meta_gives_the_same_picture(tmp_path: Path) -> None:
    data, _ = prepare(load_graph("sbm", num_nodes=200))
    meta = partition_graph(data, tmp_path / "parts", num_parts=2, partitioner="hash")
    ax = plot_traffic(meta, ax=Figure().add_subplot())
    assert np.array_equal(ax.images[0].get_array(), PartitionMetrics.from_meta(meta).rows)


def test_without_axes_a_figure_is_made() -> None:
    plt.switch_backend("agg")
    first, second = plot_traffic(METRICS), plot_load(METRICS)
    assert first.figure is not second.figure
    plt.close("all")
