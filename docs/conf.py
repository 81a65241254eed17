"""The documentation site. ``make docs`` builds it into ``build/docs``; a warning or a broken link fails the build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "pygdist"
copyright = "the pygdist authors"  # the name that Sphinx reads
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "public_names",
]
if (HERE / "_ext" / "command_line.py").is_file():
    extensions.append("command_line")  # writes reference/command-line from the parser

nitpicky = True
# A folder may be without pages while its index is there.
suppress_warnings = ["toc.empty_glob"]
html_theme = "furo"
html_title = "pygdist"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # [text](page.md#a-heading), as code hosts have them

napoleon_custom_sections = [("Shapes", "notes_style")]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 100


def _inventory(name: str, url: str) -> tuple[str, tuple[str | None, str]]:
    """The project's own inventory, or without a network the names in ``inventories`` that our pages use."""
    return url, (None, str(HERE / "inventories" / f"{name}.inv"))


intersphinx_timeout = 3
intersphinx_mapping: dict[str, Any] = {
    "python": _inventory("python", "https://docs.python.org/3/"),
    "torch": _inventory("torch", "https://docs.pytorch.org/docs/stable/"),
    "torch_geometric": _inventory("torch_geometric", "https://pytorch-geometric.readthedocs.io/en/latest/"),
    "lightning": _inventory("lightning", "https://lightning.ai/docs/pytorch/stable/"),
    "numpy": _inventory("numpy", "https://numpy.org/doc/stable/"),
}
