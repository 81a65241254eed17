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
    *sorted(path.stem for path in (HERE / "_ext").glob("*.py")),
]

nitpicky = True
# Classes that their projects do not document under any name, or whose pages have no inventory here.
nitpick_ignore = [
    ("py:class", "lightning.pytorch.strategies.strategy.TBroadcast"),
    ("py:class", "rich.console.Console"),
    ("py:class", "torch.distributed.distributed_c10d.ProcessGroup"),
    ("py:class", "torch_geometric.nn.models.basic_gnn.BasicGNN"),
    ("py:class", "torchmetrics.metric.Metric"),
    ("py:func", "torch_geometric.nn.conv.gcn_conv.gcn_norm"),
]
nitpick_ignore_regex = [("py:class", r"numpy\._typing\..*")]
html_theme = "furo"
html_title = "pygdist"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # [text](page.md#a-heading), as code hosts have them

napoleon_custom_sections = [("Shapes", "notes_style")]
napoleon_use_rtype = False
napoleon_attr_annotations = False  # types are in the signature
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Lightning and torch are on their own pages
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
