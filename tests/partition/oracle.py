"""The slow, obvious twins of the streaming partitioners: plain Python, edge by edge, sets for the parts of a node."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.partition.hash import mix

__all__ = ["EDGE_ORACLES", "as_list", "clusters", "degrees", "fennel", "ldg", "spring"]

Edges = list[tuple[int, int]]


def _hash(value: int, seed: int) -> int:
    return int(mix(np.array([value], dtype=np.uint64), seed)[0])


def _drawn(bits: int, count: int) -> int:
    return (bits * count) >> 64


def degrees(edges: Edges, num_nodes: int) -> list[int]:
    degree = [0] * num_nodes
    for edge in edges:
        for node in edge:
            degree[node] += 1
    return degree


def random(edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0) -> list[int]:
    return [_drawn(_hash(max(edge), _hash(min(edge), seed)), num_parts) for edge in edges]


def grid(edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0) -> list[int]:
    rows = max(rows for rows in range(1, num_parts + 1) if rows * rows <= num_parts and num_parts % rows == 0)
    columns = num_parts // rows

    def reach(node: int) -> set[int]:
        row, column = divmod(_drawn(_hash(node, seed), num_parts), columns)
        return {row * columns + c for c in range(columns)} | {r * columns + column for r in range(rows)}

    part = []
    for edge in edges:
        first, second = (divmod(_drawn(_hash(node, seed), num_parts), columns) for node in (min(edge), max(edge)))
        bits = _hash(max(edge), _hash(min(edge), seed ^ (2**64 - 1)))
        shared = sorted(reach(edge[0]) & reach(edge[1]))
        if first[0] != second[0] and first[1] != second[1]:
            part.append(first[0] * columns + second[1] if bits & 1 else second[0] * columns + first[1])
        elif first != second:
            part.append(shared[_drawn(bits, len(shared))])
        else:  # the row first, then the rest of the column
            row = [one for one in shared if one // columns == first[0]]
            part.append((row + [one for one in shared if one not in row])[_drawn(bits, len(shared))])
        assert part[-1] in shared
    return part


def dbh(edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0) -> list[int]:
    degree = degrees(edges, num_nodes)
    return [_drawn(_hash(min(edge, key=lambda node: (degree[node], node)), seed), num_parts) for edge in edges]


class _Cut:
    """Parts of each node, edges of each part."""

    def __init__(self, num_edges: int, num_parts: int, balance: float) -> None:
        self.parts: defaultdict[int, set[int]] = defaultdict(set)
        self.load = [0] * num_parts
        self.capacity = max(min(int(np.ceil(balance * num_edges / num_parts)), num_edges), 1)

    def least(self, among: Iterable[int]) -> int | None:
        """The least loaded that has room, the first of equals."""
        room = [part for part in among if self.load[part] < self.capacity]
        return min(room, key=lambda part: (self.load[part], part), default=None)

    def put(self, edge: tuple[int, int], part: int | None) -> int:
        part = self.load.index(min(self.load)) if part is None else part
        for node in edge:
            self.parts[node].add(part)
        self.load[part] += 1
        return part


def libra(
    edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0, balance: float = 1.05, by_degree: bool = True
) -> list[int]:
    cut, degree = _Cut(len(edges), num_parts, balance), degrees(edges, num_nodes)

    def choose(u: int, v: int) -> int | None:
        here, there = cut.parts[u], cut.parts[v]
        best = cut.least(here & there)
        if best is None and by_degree and here and there:
            best = cut.least(here if degree[u] < degree[v] else there)
        return cut.least(here | there) if best is None else best

    return [cut.put(edge, choose(*edge)) for edge in edges]


def powergraph(edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0, balance: float = 1.05) -> list[int]:
    cut, left = _Cut(len(edges), num_parts, balance), degrees(edges, num_nodes)

    def choose(u: int, v: int) -> int | None:
        here, there = cut.parts[u], cut.parts[v]
        best = cut.least(here & there)
        if best is None and here and there:
            best = cut.least(here if left[u] >= left[v] else there)
        if best is None:
            best = cut.least(here | there)
        left[u] -= 1
        left[v] -= 1
        return best

    return [cut.put(edge, choose(*edge)) for edge in edges]


def hdrf(
    edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0, balance: float = 1.05, balance_weight: float = 1.1
) -> list[int]:
    cut, seen = _Cut(len(edges), num_parts, balance), [0] * num_nodes

    def choose(u: int, v: int) -> int | None:
        for node in {u, v}:
            seen[node] += 1
        share = seen[u] / (seen[u] + seen[v])
        spread = balance_weight / (1.0 + (max(cut.load) - min(cut.load)))
        best, best_score = None, 0.0
        for part in range(num_parts):
            if cut.load[part] >= cut.capacity:
                continue
            score = (2.0 - share if part in cut.parts[u] else 0.0) + (1.0 + share if part in cut.parts[v] else 0.0)
            score += spread * (max(cut.load) - cut.load[part])
            if best is None or score > best_score:
                best, best_score = part, score
        return best

    return [cut.put(edge, choose(*edge)) for edge in edges]


def clusters(
    edges: Edges, num_nodes: int, max_volume: int, *, strict: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Cluster and richest neighbour of each node (-1: none), volume of each cluster."""
    degree = degrees(edges, num_nodes)
    cluster, richest, volume = [-1] * num_nodes, [-1] * num_nodes, list[int]()
    for u, v in edges:
        for node in (u, v):
            if cluster[node] < 0:
                cluster[node] = len(volume)
                volume.append(degree[node])
        a, b = cluster[u], cluster[v]
        if a != b and volume[a] <= max_volume and volume[b] <= max_volume:
            here, there = (volume[a] - degree[u], volume[b] - degree[v]) if strict else (volume[a], volume[b])
            mover, leaves, joins = (u, a, b) if here <= there else (v, b, a)
            if not strict or volume[joins] + degree[mover] <= max_volume:
                volume[leaves] -= degree[mover]
                volume[joins] += degree[mover]
                cluster[mover] = joins
        for node, other in ((u, v), (v, u)):
            if node != other and (richest[node] < 0 or degree[richest[node]] < degree[other]):
                richest[node] = other
    return cluster, richest, volume


def _spread(size: list[int], num_parts: int) -> list[int]:
    heap, part = [(0, p) for p in range(num_parts)], [0] * len(size)
    for one in sorted(range(len(size)), key=lambda one: -size[one]):
        total, p = heapq.heappop(heap)
        part[one] = p
        heapq.heappush(heap, (total + size[one], p))
    return part


def two_ps_l(
    edges: Edges, num_nodes: int, num_parts: int, *, seed: int = 0, balance: float = 1.05, volume: float = 0.5
) -> list[int]:
    degree = degrees(edges, num_nodes)
    cluster, _, volumes = clusters(edges, num_nodes, int(volume * 2 * len(edges) / num_parts), strict=True)
    home = _spread(volumes, num_parts)
    cut = _Cut(len(edges), num_parts, balance)
    full = lambda part: cut.load[part] >= cut.capacity  # noqa: E731
    placed: list[int | None] = [None] * len(edges)
    for number, (u, v) in enumerate(edges):
        a, b = home[cluster[u]], home[cluster[v]]
        if a == b and not full(a):
            placed[number] = cut.put((u, v), a)
    for number, (u, v) in enumerate(edges):
        if placed[number] is not None:
            continue
        share = degree[u] / (degree[u] + degree[v])
        in_u, in_v = volumes[cluster[u]], volumes[cluster[v]]
        a, b = home[cluster[u]], home[cluster[v]]
        best, best_score = None, 0.0
        for part in (a, b):
            if full(part):
                continue
            score = (2.0 - share if part in cut.parts[u] else 0.0) + (1.0 + share if part in cut.parts[v] else 0.0)
            score += (in_u if part == a else 0.0) / (in_u + in_v)
            score += (in_v if part == b else 0.0) / (in_u + in_v)
            if best is None or score > best_score:
                best, best_score = part, score
        if best is None:
            best = _drawn(_hash(u if degree[u] >= degree[v] else v, seed), num_parts)
            best = None if full(best) else best
        placed[number] = cut.put((u, v), best)
    return [part for part in placed if part is not None]


EDGE_ORACLES: dict[str, Callable[..., list[int]]] = {
    "random": random,
    "grid": grid,
    "dbh": dbh,
    "libra": libra,
    "powergraph": powergraph,
    "hdrf": hdrf,
    "2ps-l": two_ps_l,
}


def merged(cluster: list[int], richest: list[int], degree: list[int], max_size: int) -> list[set[int]]:
    """SPRING's merging, with the clusters as sets: the smallest is looked up anew each time (Algorithm 1, 23 to 30)."""
    members: dict[int, set[int]] = {}
    for node, one in enumerate(cluster):
        if one >= 0:
            members.setdefault(one, set()).add(node)
    # the first of equals in the order of the nodes speaks for a cluster, and the target's own before a newcomer's
    top = dict.fromkeys(members, -1)
    for node, one in enumerate(cluster):
        if one >= 0 and richest[node] >= 0 and (top[one] < 0 or degree[top[one]] < degree[richest[node]]):
            top[one] = richest[node]
    waiting = set(members)
    while waiting:
        one = min(waiting, key=lambda one: (len(members[one]), one))
        waiting.remove(one)
        if top[one] < 0:
            continue
        target = next(other for other, nodes in members.items() if top[one] in nodes)
        if target == one or len(members[one]) + len(members[target]) > max_size:
            continue
        members[target] |= members.pop(one)
        if top[target] < 0 or degree[top[target]] < degree[top[one]]:
            top[target] = top[one]
        waiting.add(target)
    return list(members.values())


def spring(edges: Edges, num_nodes: int, num_parts: int, *, volume: float, balance: float = 1.05) -> list[set[int]]:
    """The merged clusters."""
    cluster, richest, _ = clusters(edges, num_nodes, int(volume * 2 * len(edges)))
    return merged(cluster, richest, degrees(edges, num_nodes), int(balance * num_nodes / num_parts))


def _stream(
    edges: Edges, num_nodes: int, num_parts: int, capacity: int, score: Callable[[int, int], float]
) -> list[int]:
    near: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v in edges:
        near[u].append(v)
        near[v].append(u)
    part, load = [-1] * num_nodes, [0] * num_parts
    for node in range(num_nodes):
        found = [sum(part[other] == p for other in near[node] if other != node) for p in range(num_parts)]
        room = [p for p in range(num_parts) if load[p] < capacity]
        part[node] = min(room, key=lambda p: (-score(found[p], load[p]), load[p], p))
        load[part[node]] += 1
    return part


def ldg(edges: Edges, num_nodes: int, num_parts: int, *, balance: float = 1.05) -> list[int]:
    capacity = int(np.ceil(balance * num_nodes / num_parts))
    return _stream(edges, num_nodes, num_parts, capacity, lambda found, load: found * (1.0 - load / capacity))


def fennel(edges: Edges, num_nodes: int, num_parts: int, *, gamma: float = 1.5, balance: float = 1.1) -> list[int]:
    alpha = len(edges) * num_parts ** (gamma - 1) / num_nodes**gamma
    capacity = int(np.ceil(balance * num_nodes / num_parts))
    return _stream(
        edges, num_nodes, num_parts, capacity, lambda found, load: found - alpha * gamma * float(load) ** (gamma - 1)
    )


def as_list(edge_index: NDArray[Any]) -> Edges:
    """Edges as pairs of plain integers."""
    return [(int(u), int(v)) for u, v in edge_index.T]
