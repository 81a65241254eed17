"""Who owns which node: the extension point for partitioners.

A partitioner reads a stream of edges and names the owner of each node; everything else (halos, plans, files) follows
from that. A new one is one file with one class; its ``name`` makes it known, and a class path from YAML works without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.registry import Registry

__all__ = ["Assignment", "Partitioner", "check_num_parts", "partitioner_names", "resolve_partitioner"]

_REGISTRY: Registry[Partitioner] = Registry("partitioner")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a partitioner found.

    Attributes:
        part: The part of each node; int32 of shape ``(N,)``.
        figures: What else it has to say, for ``meta.json``.
    """

    part: NDArray[np.int32]
    figures: dict[str, float | int] = field(default_factory=dict)


class Partitioner(ABC):
    """Assigns every node to a part.

    Subclass it (a frozen dataclass is the shortest way), set ``name``, write :meth:`assign`. The result must depend on
    the arguments and the edges only: the same on every machine, in every run, for any size of chunks.

    Attributes:
        name: What users call it; registered when the class is made. A class without one is reached by its path.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class RoundRobin(Partitioner):
        ...     name = "round-robin"
        ...
        ...     def assign(self, edges, num_parts):
        ...         return np.arange(edges.num_nodes, dtype=np.int32) % num_parts
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            _REGISTRY.register(cls.name, cls)

    def arguments(self) -> dict[str, Any]:
        """What the result depends on besides the edges, for ``meta.json`` and the key of the cache.

        By default all public attributes, which are the fields of a dataclass.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def run(self, edges: EdgeStream, num_parts: int) -> Assignment:
        """:meth:`assign`, and figures of the way there where a method has some to tell."""
        return Assignment(part=self.assign(edges, num_parts))

    @abstractmethod
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        """The part of each node.

        Args:
            edges: The graph; any number of passes.
            num_parts: Number of parts.

        Returns:
            int32 of shape ``(edges.num_nodes,)``, from 0 to ``num_parts - 1``.

        Raises:
            InputError: If the graph cannot be cut into so many parts.
        """


def resolve_partitioner(partitioner: str | Partitioner, **args: Any) -> Partitioner:
    """A partitioner from its name, a dotted class path, or itself.

    Args:
        partitioner: A registered name, the path of a :class:`Partitioner` in any package, or an instance.
        **args: Arguments of the class; none for an instance.

    Raises:
        InputError: If there is no such partitioner (the message lists those there are) or an argument does not fit.
    """
    return _REGISTRY.resolve(partitioner, Partitioner, **args)  # type: ignore[type-abstract]


def partitioner_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(_REGISTRY)


def check_num_parts(num_nodes: int, num_parts: int) -> None:
    """Refuse a number of parts that the nodes cannot fill.

    Raises:
        InputError: If ``num_parts`` is below 1 or above ``num_nodes``.
    """
    if not 1 <= num_parts <= num_nodes:
        raise InputError(
            f"num_parts is {num_parts}, but the graph has {num_nodes} nodes: expected 1 to {num_nodes}; "
            "use fewer parts (ranks)"
        )
