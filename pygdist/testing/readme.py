"""Writes the documentation's lists of layers from the suite that runs them: ``python -m pygdist.testing.readme``.

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is replaced by the result of ``BLOCKS[NAME]``. A test
fails if a block is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pygdist.errors import InputError
from pygdist.routing.refusals import REFUSED_LAYERS
from pygdist.testing.layers import LAYERS, LayerCase

#: The page with the lists.
LAYERS_PAGE = Path("docs/reference/layers.md")
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def layers_table() -> str:
    """Return a table with a row for each layer class: tested options and edge inputs, and limits."""
    rows = ["| layer | also with | edge inputs | to know |", "| --- | --- | --- | --- |"]
    for layer, cases in _by_class(norms=False).items():
        inputs = sorted({name for case in cases.values() for name in case.takes if name.startswith("edge_")})
        notes = [case.note for case in cases.values() if case.note]
        rows.append(f"| {_code([layer])} | {_options(cases)} | {_code(inputs)} | {'; '.join(notes)} |")
    return "\n".join(rows)


def norms_list() -> str:
    """Return the list of norms over nodes, with their tested options."""
    norms = {norm: _options(cases) for norm, cases in _by_class(norms=True).items()}
    return ", ".join(_code([norm]) + (f" ({options})" if options else "") for norm, options in norms.items())


def refused_table() -> str:
    """Return a table with a row for each layer class that is refused, with the reason."""
    rows = ["| refused | because it |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {_code([name])} | {reason} |" for name, reason in sorted(REFUSED_LAYERS.items()))])


#: By name of a block, the function that returns its text.
BLOCKS: dict[str, Callable[[], str]] = {"layers": layers_table, "norms": norms_list, "refused": refused_table}


def update(text: str) -> str:
    """Return the text with all generated blocks up to date.

    Raises:
        InputError: If a block's name is not known.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise InputError(f"there is no generated block '{name}'; use one of {', '.join(BLOCKS)}")
        return f"{begin}{BLOCKS[name]()}\n{end}"

    return _BLOCK.sub(block, text)


def _by_class(*, norms: bool) -> dict[str, dict[str, LayerCase]]:
    """Return the suite's cases by name of the layer's class, sorted."""
    cases: dict[str, dict[str, LayerCase]] = {}
    for name, case in LAYERS.items():
        module = case.layer.__module__
        if (".norm." in module or module.startswith("torch.nn.")) == norms:
            cases.setdefault(name.partition("-")[0], {})[name] = case
    return dict(sorted(cases.items(), key=lambda item: item[0].lower()))


def _options(cases: Iterable[str]) -> str:
    return ", ".join(name.partition("-")[2] for name in cases if "-" in name)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Bring the blocks of a file up to date; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m pygdist.testing.readme", description="Write the lists of layers of the documentation."
    )
    parser.add_argument("file", nargs="?", type=Path, default=LAYERS_PAGE, help=f"default: {LAYERS_PAGE}")
    path = parser.parse_args(argv).file
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
