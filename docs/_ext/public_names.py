"""Resolves references to classes by the names under which they are public.

A signature names a class by the module that defines it (``torch.nn.modules.module.Module``), the documentation by the
module that users import it from (``torch.nn.Module``). Names of our own that exist but are not public become plain
text; names that do not exist fail the build.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry
from sphinx.environment import BuildEnvironment

#: Packages that have a page for the names in their ``__all__``.
PACKAGES = (
    "pygdist.lightning", "pygdist.loop", "pygdist.backends", "pygdist.partition", "pygdist.graph", "pygdist.routing",
    "pygdist.nn", "pygdist.sampler", "pygdist.comm", "pygdist.kernels", "pygdist.testing",
)  # fmt: skip

#: Names of other projects: how a signature or a docstring has them, and how the project's own pages do.
OTHERS = {
    "Path": "pathlib.Path",
    "lightning.fabric.plugins.io.checkpoint_io.CheckpointIO": "lightning.pytorch.plugins.io.CheckpointIO",
    "lightning.pytorch.LightningModule": "lightning.pytorch.core.LightningModule",
    "lightning.pytorch.callbacks.callback.Callback": "lightning.pytorch.callbacks.Callback",
    "lightning.pytorch.callbacks.prediction_writer.BasePredictionWriter":
        "lightning.pytorch.callbacks.BasePredictionWriter",
    "lightning.pytorch.core.datamodule.LightningDataModule": "lightning.pytorch.core.LightningDataModule",
    "lightning.pytorch.core.module.LightningModule": "lightning.pytorch.core.LightningModule",
    "lightning.pytorch.strategies.ddp.DDPStrategy": "lightning.pytorch.strategies.DDPStrategy",
    "numpy.int32": "numpy.int32",  # attributes on NumPy's page
    "numpy.int64": "numpy.int64",
    "numpy.uint64": "numpy.uint64",
    "torch.nn.modules.container.Sequential": "torch.nn.Sequential",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch_geometric.data.data.Data": "torch_geometric.data.Data",
    "torch_geometric.data.dataset.Dataset": "torch_geometric.data.Dataset",
    "torch_geometric.data.hetero_data.HeteroData": "torch_geometric.data.HeteroData",
    "torch_geometric.edge_index.EdgeIndex": "torch_geometric.EdgeIndex",
    "torch_geometric.nn.MessagePassing": "torch_geometric.nn.conv.MessagePassing",
    "torch_geometric.nn.conv.message_passing.MessagePassing": "torch_geometric.nn.conv.MessagePassing",
    "torch_geometric.sampler.base.BaseSampler": "torch_geometric.sampler.BaseSampler",
    "torch_geometric.sampler.base.EdgeSamplerInput": "torch_geometric.sampler.EdgeSamplerInput",
    "torch_geometric.sampler.base.NegativeSampling": "torch_geometric.sampler.NegativeSampling",
    "torch_geometric.sampler.base.NodeSamplerInput": "torch_geometric.sampler.NodeSamplerInput",
    "torch_geometric.sampler.base.SamplerOutput": "torch_geometric.sampler.SamplerOutput",
}  # fmt: skip


def own_names() -> dict[str, str]:
    """Return the public name of each of our classes and functions, by the name of its definition."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            defined = f"{getattr(value, '__module__', package)}.{getattr(value, '__qualname__', name)}"
            if defined.startswith("pygdist."):  # an alias such as Literal[...] calls itself by typing's name
                names.setdefault(defined, f"{package}.{name}")
    return names


def name_the_root(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Let names of ``pygdist`` itself lead to the entries of the packages that they come from."""
    domain = env.domains.python_domain
    for name in importlib.import_module("pygdist").__all__:
        package = next(one for one in (*PACKAGES, "pygdist.errors") if f"{one}.{name}" in domain.objects)
        entry = domain.objects[f"{package}.{name}"]
        domain.objects[f"pygdist.{name}"] = ObjectEntry(entry.docname, entry.node_id, entry.objtype, True)
    return []


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: TextElement) -> Element | None:
    """Look a reference up by its public name; intersphinx, which is asked next, sees the public name too."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    owner, _, member = target.rpartition(".")
    names: dict[str, str] = app.public_names  # type: ignore[attr-defined]
    public = names.get(target) or (f"{names[owner]}.{member}" if owner in names else None)
    if public is not None:
        node["reftarget"], node["reftype"] = public, "obj"
        return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    return contnode if _is_ours(target, node.get("py:module") or "", node.get("py:class") or "") else None


def _is_ours(target: str, package: str, cls: str) -> bool:
    """Return True if a name of pygdist exists: as it stands, in the class, or in a module of the package."""
    modules = [name for name in sys.modules if f"{name}.".startswith(f"{package}.")] if package else []
    places = [target, f"{package}.{cls}.{target}", *(f"{module}.{target}" for module in modules)]
    return any(_exists(place) for place in places if place.startswith("pygdist."))


def _exists(name: str) -> bool:
    """Return True if a name of pygdist exists, and is no name of a module that pygdist imports, as ``torch.device``."""
    owner = name.rpartition(".")[0]
    try:
        pkgutil.resolve_name(name)
        place = pkgutil.resolve_name(owner)
    except (AttributeError, ImportError, ValueError):
        return False
    return not isinstance(place, ModuleType) or place.__name__.startswith("pygdist")


def readable(app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str) -> Any:
    """Write defaults that a dataclass makes so that Sphinx can parse the signature and find its types."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the look-up before intersphinx's."""
    app.public_names = own_names() | OTHERS  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", readable)
    app.connect("env-updated", name_the_root)
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True}
