"""The figures of published graphs that matter for speed and memory, for imitations of these graphs at any scale.

With an imitation, "a tenth of Reddit" means the same to everyone who measures, even without access to Reddit. An
imitation is a random graph with the published numbers of nodes, edges, features and classes, the published split and
the published largest degree; :class:`pygdist.graph.generated.graph.GraphGenerator` generates the graph. Scale s
multiplies the numbers of nodes and edges by s, so the average degree is the published one at every scale; features and
classes are never scaled.

Counts, splits and largest degrees are published by the datasets' authors and PyG. The other numbers are ours:

- ``exponent``: ends of edges are drawn with probability rank^-a. ``a`` of the targets is chosen such that the expected
  in-degree of the most frequent target is the published largest one at scale 1
  (:meth:`EdgeGenerator.largest_in_degree`); at scale s it is about s^a times as large. The number of papers that a
  paper cites is far less skewed than the number that cite it. For ogbn-mag no largest degrees are published, so its
  exponents are guesses.
- ``inside``: share of edges drawn in a community; each class is a community. It is low for ``reddit-like``, since an
  average degree of 492 in a small community would repeat the same edges many times.
- ``noise`` of the features: a model that uses the edges is clearly better than one that does not. Test
  accuracy of a 2-layer MLP and of a 2-layer GCN (hidden 64, dropout 0.5, Adam, rate 0.01, 60 epochs, one seed) was
  0.39 and 1.00 on ``reddit-like`` at scale 0.02, 0.47 and 1.00 on ``products-like`` at 0.005, 0.34 and 0.99 on
  ``papers-like`` at 0.001, 0.51 and 0.995 on the papers and citations of ``mag-like`` at 0.02 (citations in both
  directions). With so many neighbours of the same class a GCN makes almost no errors. To compare accuracies,
  use ``wrong_labels``: with 0.07 the GCN has 0.93 on ``reddit-like`` (the MLP 0.33), and with 0.22 one of 3 layers has
  0.78 on ``products-like`` (the MLP 0.25), as models have on the published graphs; or
  :func:`pygdist.graph.degree_corrected_sbm`.

An imitation does not have classes of different sizes, triangles beyond those of communities, or nodes of a degree far
below the average (on ``reddit-like`` at scale 0.1 the lowest is 284, the average 492).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pygdist.errors import InputError

_FEWEST_NODES = 4  # of each type


@dataclass(frozen=True)
class NodeFacts:
    """Nodes of one type.

    Args:
        num_nodes: Number of nodes.
        num_features: Width of their features; 0 if they have none.
        num_classes: Number of their classes; 0 if they have none.
        split: Numbers of training, validation and test nodes; other nodes have no label.
        noise: Standard deviation of the noise in each feature, around a class centre of length 1; ours.
    """

    num_nodes: int
    num_features: int = 0
    num_classes: int = 0
    split: tuple[int, int, int] = (0, 0, 0)
    noise: float = 0.0

    def scaled(self, scale: float) -> NodeFacts:
        """Return the figures at a scale, with the same shares of the split."""
        count = max(_FEWEST_NODES, round(self.num_nodes * scale))
        # cumulative sums are rounded, so that a split of all nodes stays one
        first, second, third = (
            round(sum(self.split[:parts]) * count / self.num_nodes) for parts in range(1, len(self.split) + 1)
        )
        return dataclasses.replace(self, num_nodes=count, split=(first, second - first, third - second))


@dataclass(frozen=True, kw_only=True)
class RelationFacts:
    """Edges of one type.

    Args:
        source: Type of the source nodes.
        name: Name of the relation.
        target: Type of the target nodes.
        num_edges: Number of directed edges.
        undirected: Every edge exists in both directions.
        largest_in_degree: The published one; ``None`` if none is published.
        exponent: Skew of the sources and of the targets; ours.
        inside: Share of edges drawn in a community; ours.
    """

    source: str = "node"
    name: str = "to"
    target: str = "node"
    num_edges: int
    undirected: bool = False
    largest_in_degree: int | None = None
    exponent: tuple[float, float]
    inside: float

    @property
    def key(self) -> tuple[str, str, str]:
        """PyG's name of the relation."""
        return self.source, self.name, self.target

    def scaled(self, scale: float) -> RelationFacts:
        """Return the figures at a scale, where no largest in-degree is published."""
        count = 2 * round(self.num_edges * scale / 2) if self.undirected else round(self.num_edges * scale)
        return dataclasses.replace(self, num_edges=count, largest_in_degree=None)


@dataclass(frozen=True, kw_only=True)
class PublishedGraph:
    """The figures of a graph.

    Args:
        original: The published graph.
        nodes: Its nodes by type; a homogeneous graph has the single type ``node``.
        relations: Its edges by type.
    """

    original: str
    nodes: Mapping[str, NodeFacts]
    relations: tuple[RelationFacts, ...]

    @property
    def is_heterogeneous(self) -> bool:
        """True if there are several types of nodes."""
        return len(self.nodes) > 1

    @property
    def smallest_scale(self) -> float:
        """Smallest scale, to two digits, with at least one node for each class."""
        least = max(facts.num_classes / facts.num_nodes for facts in self.nodes.values())
        digits = 1 - math.floor(math.log10(least))
        return float(math.ceil(least * 10**digits) / 10**digits)


_MAG = (
    ("author", "affiliated_with", "institution", 1_043_998, (0.1, 0.5), 0.5),
    ("author", "writes", "paper", 7_145_660, (0.3, 0.2), 0.6),
    ("paper", "cites", "paper", 5_416_271, (0.2, 0.5), 0.6),
    ("paper", "has_topic", "field_of_study", 7_505_078, (0.1, 0.5), 0.5),
)


def _homogeneous(original: str, nodes: NodeFacts, edges: RelationFacts) -> PublishedGraph:
    return PublishedGraph(original=original, nodes={"node": nodes}, relations=(edges,))


PUBLISHED: Mapping[str, PublishedGraph] = MappingProxyType(
    {
        "reddit-like": _homogeneous(
            "Reddit (GraphSAGE, Hamilton et al., 2017; torch_geometric.datasets.Reddit)",
            NodeFacts(232_965, num_features=602, num_classes=41, split=(153_431, 23_831, 55_703), noise=0.3),
            RelationFacts(
                num_edges=114_615_892, undirected=True, largest_in_degree=21_657, exponent=(0.315, 0.315), inside=0.3
            ),
        ),
        "products-like": _homogeneous(
            "ogbn-products (Hu et al., 2020)",
            NodeFacts(2_449_029, num_features=100, num_classes=47, split=(196_615, 39_323, 2_213_091), noise=0.3),
            RelationFacts(
                num_edges=123_718_280, undirected=True, largest_in_degree=17_481, exponent=(0.4197, 0.4197), inside=0.7
            ),
        ),
        "papers-like": _homogeneous(
            "ogbn-papers100M (Hu et al., 2020); an edge leads from a paper to one that it cites",
            NodeFacts(111_059_956, num_features=128, num_classes=172, split=(1_207_179, 125_265, 214_338), noise=0.2),
            RelationFacts(num_edges=1_615_685_872, largest_in_degree=251_471, exponent=(0.2, 0.5721), inside=0.6),
        ),
        "mag-like": PublishedGraph(
            original="ogbn-mag (Hu et al., 2020)",
            nodes={
                "paper": NodeFacts(
                    736_389, num_features=128, num_classes=349, split=(629_571, 41_939, 64_879), noise=0.2
                ),
                "author": NodeFacts(1_134_649),
                "institution": NodeFacts(8_740),
                "field_of_study": NodeFacts(59_965),
            },
            relations=tuple(
                RelationFacts(
                    source=source, name=name, target=target, num_edges=count, exponent=exponent, inside=inside
                )
                for source, name, target, count, exponent, inside in _MAG
            ),
        ),
    }
)
"""Figures of each published graph, by the name of its imitation."""


def published_graph(name: str, scale: float = 1.0) -> PublishedGraph:
    """Return the figures of an imitation at a scale; there are at least four nodes of each type.

    Args:
        name: A name in :data:`PUBLISHED`.
        scale: Factor on the published numbers of nodes and edges; above 0, also above 1.

    Raises:
        InputError: If the name is not known, or the scale is not positive or gives fewer nodes than classes.

    Example:
        >>> published_graph("reddit-like", 0.1).nodes["node"].num_nodes
        23296
    """
    if name not in PUBLISHED:
        raise InputError(f"there is no generated graph '{name}'; choose one of {', '.join(PUBLISHED)}")
    whole = PUBLISHED[name]
    if not 0 < scale < math.inf:
        raise InputError(f"{name}: scale is {scale}, expected a number above 0, such as 0.1 for a tenth")
    if scale == 1:
        return whole
    nodes = {kind: facts.scaled(scale) for kind, facts in whole.nodes.items()}
    for kind, facts in nodes.items():
        if facts.num_nodes < facts.num_classes:
            of_kind = f"{kind} " if whole.is_heterogeneous else ""
            raise InputError(
                f"{name}: scale {scale:g} leaves {facts.num_nodes} {of_kind}nodes for {facts.num_classes} classes, "
                f"which are not scaled; the smallest scale is {whole.smallest_scale:g}"
            )
    return dataclasses.replace(
        whole, nodes=nodes, relations=tuple(relation.scaled(scale) for relation in whole.relations)
    )
