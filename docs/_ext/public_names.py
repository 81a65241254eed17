"""Resolves references to classes by the names under which they are public.

A signature names a class by the module that defines it (``torch.nn.modules.module.Module``), the documentation by the
module that users import it from (``torch.nn.Module``).
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

#: Packages whose ``__all__`` is documented, the one with the fullest entries first.
PACKAGES = (
    "pygdist.lightning", "pygdist.loop", "pygdist.backends", "pygdist.partition", "pygdist.graph", "pygdist.routing",
    "pygdist.nn", "pygdist.sampler", "pygdist.comm", "pygdist.kernels", "pygdist.testing",
)  # fmt: skip

#: Classes of other projects, by the name that a signature has.
OTHERS = {
    "Tensor": "torch.Tensor",
}


def own_names() -> dict[str, str]:
    """Return the public name of each of our classes and functions, by the name of its definition."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            defined = f"{getattr(value, '__module__', package)}.{getattr(value, '__qualname__', name)}"
            names.setdefault(defined, f"{package}.{name}")
    return names


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: TextElement) -> Element | None:
    """Look a reference up by its public name; intersphinx, which is asked next, sees the public name too."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    names: dict[str, str] = env.app.public_names  # type: ignore[attr-defined]
    owner, _, member = target.rpartition(".")
    public = names.get(target) or (f"{names[owner]}.{member}" if owner in names else None)
    if public is None:
        return None
    node["reftarget"], node["reftype"] = public, "obj"
    domain = env.domains["py"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the look-up before intersphinx's."""
    app.public_names = own_names() | OTHERS  # type: ignore[attr-defined]
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True}
