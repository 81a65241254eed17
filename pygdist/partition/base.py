"""The base class of partitioners: each assigns the nodes of a graph to owners.

A partitioner reads a stream of edges and returns the part of each node; halos, plans and files follow from the parts.
A new partitioner is one file with one class. The class is registered under its ``name``; a class without a name is used
by its class path.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.registry import Registry

partitioners: Registry[Partitioner] = Registry("partitioner", "pygdist.partitioners")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The result of a partitioner.

    Attributes:
        part: The part of each node; int32 of shape ``(N,)``.
        figures: Numbers about the partition, for ``meta.json``.
        edge_part: The part of each edge, ``(E,)``; ``None`` if the placement does not need it.
    """

    part: NDArray[np.int32]
    figures: dict[str, float | int] = field(default_factory=dict)
    edge_part: NDArray[Any] | None = None


class Partitioner(ABC):
    """Assigns every node to a part.

    To write a partitioner, subclass this class (a frozen dataclass is the shortest way), set ``name`` and write
    :meth:`assign`. The result may depend only on the arguments, the number of parts and the edges. It must be the same
    on every machine and in every run, for any number of edges that the stream yields at a time.

    Attributes:
        name: The name for users; registered when the class is defined. A class without a name is used by its path.

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
            partitioners.register(cls.name, cls)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments on which the result depends, for ``meta.json`` and the key of the cache.

        By default these are all public attributes, such as the fields of a dataclass.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def run(self, edges: EdgeStream, num_parts: int) -> Assignment:
        """Run :meth:`assign` and wrap its result; partitioners that report figures override this."""
        return Assignment(part=self.assign(edges, num_parts))

    @abstractmethod
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        """Return the part of each node: int32 of shape ``(edges.num_nodes,)``, from 0 to ``num_parts - 1``.

        The edges may be read in any number of passes.

        Raises:
            InputError: If the graph cannot be divided into so many parts.
        """


def resolve_partitioner(partitioner: str | Partitioner, **args: Any) -> Partitioner:
    """Return a partitioner, given its name, a dotted class path, or the partitioner itself.

    Args:
        partitioner: A registered name, the path of a :class:`Partitioner` in any package, or an instance.
        **args: Arguments of the class; none for an instance.

    Raises:
        InputError: If there is no such partitioner (the message lists all names), or an argument does not fit the
            class.
    """
    return partitioners.resolve(partitioner, Partitioner, **args)  # type: ignore[type-abstract]


def partitioner_names() -> tuple[str, ...]:
    """Return the registered names, sorted; the name of a plug-in is included once it has been used."""
    return tuple(partitioners)


def check_num_parts(num_nodes: int, num_parts: int) -> None:
    """Refuse fewer than one part, and more parts than nodes."""
    if not 1 <= num_parts <= num_nodes:
        raise InputError(
            f"num_parts is {num_parts}, but the graph has {num_nodes} nodes: expected 1 to {num_nodes} parts (ranks)"
        )


def check_number(partitioner: Partitioner, name: str, least: float, *, above: bool = False) -> None:
    """Refuse an argument that is not finite, is less than ``least``, or (``above``) equals it."""
    value = getattr(partitioner, name)
    if not (least < value if above else least <= value) or value == math.inf:
        limit = f"above {least}" if above else f"of at least {least}"
        raise InputError(f"{partitioner.name}: {name} is {value}, expected a finite number {limit}")


def check_seed(partitioner: Partitioner, seed: int) -> None:
    """Refuse a seed that is no integer from 0 to 2**64 - 1."""
    if not (isinstance(seed, int) and 0 <= seed < 1 << 64):
        raise InputError(f"{partitioner.name}: seed is {seed}, expected an integer from 0 to 2**64 - 1")
