"""The rules of the house: imports run downward and without circles, systems stand apart, the root exports little."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pygdist
from pygdist.backends import backends

ROOT = Path(pygdist.__file__).parent
#: From the ground up; a room may import the ones before it.
ROOMS = [
    "errors",
    "bounded_yaml",
    "signals",
    "launch_variables",
    "registry",
    "display",
    "memory",
    "checkpoints",
    "comm",
    "native",
    "kernels",
    "graph",
    "partition",
    "sampler",
    "nn",
    "hops",
    "backends",
    "routing",
    "loop",
    "lightning",
    "testing",
    "report",
    "commands",
    "cli",
    "demo",
]


MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, under ``TYPE_CHECKING`` and inside functions too."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules.add(name if name in MODULES else node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return {module for module in modules if module.split(".")[0] == ROOT.name}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} has no place in the order of rooms yet"
    for module in _imports(path):
        other = module.split(".")[1] if "." in module else None
        assert other is not None, f"{path.name} imports the root package"
        assert ROOMS.index(other) <= ROOMS.index(room), f"{path.name} in {room} imports {module}, which is above it"


def test_systems_do_not_import_each_other_and_machinery_imports_no_system() -> None:
    systems = {path.stem for path in (ROOT / "backends").glob("*.py")} - {"__init__", "base"}
    names = {f"pygdist.backends.{system}" for system in systems}
    for path in (ROOT / "backends").rglob("*.py"):
        if path.name != "__init__.py" or path.parent.name != "backends":
            assert not _imports(path) & (names - {f"pygdist.backends.{path.stem}"}), f"{path} imports a system"


def test_each_file_of_backends_is_a_system() -> None:
    assert {path.stem for path in (ROOT / "backends").glob("*.py")} - {"__init__", "base"} == set(backends)


def test_hops_know_no_other_rank() -> None:
    for path in (ROOT / "hops").glob("*.py"):
        assert not any(module.startswith("pygdist.comm") for module in _imports(path)), f"{path.name} imports comm"


def test_no_import_circle() -> None:
    TopologicalSorter({module: _imports(path) for module, path in MODULES.items()}).prepare()


def test_the_rooms_of_the_graph_import_downward() -> None:
    rooms = ["streams", "generated", "sources", "store"]
    for path in (ROOT / "graph").glob("*/*.py"):
        above = tuple(f"pygdist.graph.{room}." for room in rooms[rooms.index(path.parent.name) + 1 :])
        assert not [module for module in _imports(path) if module.startswith(above)], f"{path} imports a room above it"


def test_temporary_folders_are_of_the_kind_that_the_next_process_removes() -> None:
    for path in ROOT.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"TemporaryDirectory", "mkdtemp"}, f"{path.name}: use ScratchFolder"


def test_the_root_exports_at_most_a_dozen_names() -> None:
    assert len(pygdist.__all__) <= 12
    assert all(hasattr(pygdist, name) for name in pygdist.__all__)


def test_old_scripts_find_what_has_moved() -> None:
    import pygdist.backends as old

    assert (old.distribute, old.undistribute) == (pygdist.distribute, pygdist.undistribute)
    with pytest.raises(AttributeError, match="no attribute 'distributed'"):
        old.distributed  # noqa: B018
