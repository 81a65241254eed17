"""The content of a store's ``meta.json``, as Python and notebooks show it."""

from __future__ import annotations

from typing import Any

from pygdist.display import bars, card, said_bytes, table


class StoreMeta(dict[str, Any]):
    """The content of ``meta.json`` of a partitioned graph.

    A notebook shows the content as a table, with the nodes and halo rows of each part.

    Example:
        >>> partition_graph(data, "parts", num_parts=2)
        StoreMeta(2 parts by chunk: 5,000 nodes, 60,000 edges; replication factor 1.8)
    """

    def __repr__(self) -> str:
        return (
            f"StoreMeta({self['num_parts']} parts by {self['method']}: {self['num_nodes']:,} nodes, "
            f"{self['num_edges']:,} edges; replication factor {self['replication_factor_full']:.3g})"
        )

    def _repr_html_(self) -> str:
        parts = self["parts"]
        nodes, edges = ([part[name] for part in parts] for name in ("num_owned", "num_edges"))
        rows = [
            {
                "part": number,
                "nodes": part["num_owned"],
                "halo rows": part["num_halo"],
                "edges": part["num_edges"],
                "training nodes": part["counts"]["train_mask"],
                "on disk": said_bytes(_size(part)),
            }
            for number, part in enumerate(parts)
        ]
        counts = (f"{count:,} {name.removesuffix('_mask')}" for name, count in self["counts"].items())
        figures = {
            "nodes": self["num_nodes"],
            "edges": self["num_edges"],
            "features": self["num_features"],
            "classes": self["num_classes"],
            "labelled": ", ".join(counts),
            "placement": f"{self['placement']}, {self['num_hops']} hop{'s' * (self['num_hops'] > 1)}",
            "replication factor": float(self["replication_factor_full"]),
            "edges cut": f"{self['edge_cut'] / max(self['num_edges'], 1):.1%}",
            "largest part": f"{_over_mean(nodes):.2f} x mean nodes, {_over_mean(edges):.2f} x mean edges",
            "on disk": said_bytes(sum(map(_size, parts))),
        }
        title = f"Graph in {len(parts)} parts by {self['method']}"
        plot = bars({"nodes": nodes, "halo rows": [part["num_halo"] for part in parts]})
        return card(title, figures, plot, table(rows), note="; ".join(self["preprocessing"]))


def _size(part: dict[str, Any]) -> int:
    """Return the bytes of a part's files."""
    return sum(int(file["bytes"]) for file in part["files"].values())


def _over_mean(load: list[int]) -> float:
    return max(load) * len(load) / (sum(load) or 1) if any(load) else 1.0
