"""The lists of layers in the README, written from the suite that runs them: ``python -m pygdist.testing.readme``.

A block of the README between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is replaced by what :data:`BLOCKS`
makes of that name. A test fails while a block is not what it would be.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from pygdist.errors import InputError
from pygdist.routing.refusals import REFUSED_LAYERS
from pygdist.testing.layers import LAYERS, LayerCase

__all__ = ["BLOCKS", "layers_table", "main", "norms_list", "refused_table", "update"]

_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def layers_table() -> str:
    """One row for each layer class: the options it was checked with, the edge inputs it took, limits."""
    rows = ["| layer | also with | edge inputs | to know |", "| --- | --- | --- | --- |"]
    for layer, cases in _by_class(norms=False).items():
        options = [name.partition("-")[2] for name in cases if "-" in name]
        inputs = sorted({name for case in cases.values() for name in case.takes if name.startswith("edge_")})
        notes = [case.note for case in cases.values() if case.note]
        rows.append(f"| {_code([layer])} | {', '.join(options)} | {_code(inputs)} | {'; '.join(notes)} |")
    return "\n".join(rows)


def norms_list() -> str:
    """The norms over nodes, with the options they were checked with."""
    texts = []
    for norm, cases in _by_class(norms=True).items():
        options = [name.partition("-")[2] for name in cases if "-" in name]
        texts.append(_code([norm]) + (f" ({', '.join(options)})" if options else ""))
    return ", ".join(texts)


def refused_table() -> str:
    """One row for each layer class that is refused, and why."""
    rows = ["| refused | because it |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {_code([name])} | {reason} |" for name, reason in sorted(REFUSED_LAYERS.items()))])


#: Name of a block -> what stands in it.
BLOCKS: dict[str, Callable[[], str]] = {"layers": layers_table, "norms": norms_list, "refused": refused_table}


def update(text: str) -> str:
    """The text with every generated block as it should be.

    Raises:
        InputError: If a block's name is not known.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise InputError(f"there is no generated block '{name}'; known are {', '.join(BLOCKS)}")
        return f"{begin}{BLOCKS[name]()}\n{end}"

    return _BLOCK.sub(block, text)


def _by_class(*, norms: bool) -> dict[str, dict[str, LayerCase]]:
    """The suite's cases by name of the layer's class, sorted."""
    found: dict[str, dict[str, LayerCase]] = {}
    for name, case in LAYERS.items():
        if _is_norm(case.layer) == norms:
            found.setdefault(name.partition("-")[0], {})[name] = case
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _is_norm(layer: type[nn.Module]) -> bool:
    return ".norm." in layer.__module__ or layer.__module__.startswith("torch.nn.")


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the blocks into a file.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m pygdist.testing.readme", description="Write the README's lists.")
    parser.add_argument("file", nargs="?", type=Path, default=Path("README.md"), help="default: README.md")
    path = parser.parse_args(argv).file
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
