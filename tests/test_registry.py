"""Names of plug-ins: found in the metadata of installed packages, imported on use, told apart from built-in ones."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pygdist.backends import CommBackend, backends, resolve_backend
from pygdist.errors import InputError, did_you_mean
from pygdist.graph import load_graph
from pygdist.graph.sources.load import dataset_names
from pygdist.partition import partitioner_names, resolve_partitioner
from pygdist.partition.base import partitioners
from tests.packages import write_metadata

MODULE = """
from pygdist.backends import CommBackend
from pygdist.graph import degree_corrected_sbm

class Mine(CommBackend):
    '''Fetches rows.'''

def tiny(num_nodes: int = 20):
    return degree_corrected_sbm(num_nodes, num_classes=2, avg_degree=3, num_features=3)

number = 3
"""


def install(folder: Path, package: str, module: str, text: str, **groups: dict[str, str]) -> None:
    """Install a package of one module."""
    write_metadata(folder, package, {f"pygdist.{group}": points for group, points in groups.items()})
    (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(sys.modules[name].__file__).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_plug_in_is_listed_without_import_and_imported_when_used(site: Path) -> None:
    install(
        site, "extra-things", "extra_things", MODULE,
        backends={"mine": "extra_things:Mine"}, data={"tiny": "extra_things:tiny"},
    )  # fmt: skip
    assert "mine" in backends.names()
    assert "mine" not in set(backends)
    assert "tiny" in dataset_names()
    assert "extra_things" not in sys.modules
    backend = resolve_backend("mine", overlap=False)
    assert type(backend).__name__ == "Mine"
    assert isinstance(backend, CommBackend)
    assert not backend.options.overlap
    assert load_graph("tiny", num_nodes=30).num_nodes == 30


def test_a_package_that_is_installed_later_is_seen(site: Path) -> None:
    with pytest.raises(InputError, match="unknown backend 'late'"):
        resolve_backend("late")
    install(site, "late-things", "late_things", MODULE, backends={"late": "late_things:Mine"})
    assert type(resolve_backend("late")).__name__ == "Mine"


def test_a_wrong_name_is_answered_with_the_nearest_one(site: Path) -> None:
    install(site, "extra-things", "extra_things", MODULE, backends={"mine": "extra_things:Mine"}, data={"tiny": "x:y"})
    with pytest.raises(InputError, match=r"unknown backend 'min'; known are .*hybrid, mine, .*did you mean 'mine'\?"):
        resolve_backend("min")
    with pytest.raises(InputError, match=r"unknown partitioner 'metsi'; .*; did you mean 'metis'\?"):
        resolve_partitioner("metsi")
    with pytest.raises(InputError, match=r"'tinny'.*nor in an installed package \(tiny\).*did you mean 'tiny'\?"):
        load_graph("tinny")
    with pytest.raises(InputError, match=r"'Planetoit'.*did you mean 'Planetoid'\?"):
        load_graph("Planetoit")
    assert did_you_mean("zzzz", ["fit"]) == ""


def test_a_package_that_fails_harms_nobody_who_does_not_name_it(site: Path) -> None:
    install(
        site, "broken-things", "broken_things", "import no_such_module",
        backends={"broken": "broken_things:Mine"}, partitioners={"shattered": "broken_things:P"},
        data={"rubble": "broken_things:d"},
    )  # fmt: skip
    assert type(resolve_backend("comm")) is CommBackend
    assert "shattered" in partitioners.names()
    assert "shattered" not in partitioner_names()
    for name, call in (("broken", resolve_backend), ("shattered", resolve_partitioner), ("rubble", load_graph)):
        with pytest.raises(
            InputError, match=rf"'{name}': broken_things:\w+ of the package broken-things cannot be"
        ) as it:
            call(name)
        assert "ModuleNotFoundError: No module named 'no_such_module'" in str(it.value)
        assert "\n" not in str(it.value)


def test_what_is_no_class_of_the_kind_is_refused(site: Path) -> None:
    install(
        site, "extra-things", "extra_things", MODULE,
        backends={"data": "extra_things:tiny"}, data={"three": "extra_things:number"},
    )  # fmt: skip
    with pytest.raises(
        InputError, match=r"data is not a backend: it does not subclass pygdist\.backends\.base\.Backend"
    ):
        resolve_backend("data")
    with pytest.raises(InputError, match="dataset 'three': a int, expected a class or a function"):
        load_graph("three")


def test_two_packages_with_one_name(site: Path) -> None:
    install(site, "extra-things", "extra_things", MODULE, backends={"mine": "extra_things:Mine"})
    install(site, "other-things", "other_things", MODULE, backends={"mine": "other_things:Mine"})
    with pytest.raises(
        InputError, match=r"backend 'mine': the packages (extra|other)-things and .* both offer this name"
    ):
        resolve_backend("mine")


def test_a_built_in_name_keeps_its_meaning(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(
        site, "extra-things", "extra_things", MODULE,
        backends={"comm": "extra_things:Mine"}, data={"sbm": "extra_things:tiny"},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert type(resolve_backend("comm")) is CommBackend
        resolve_backend("comm")
        assert load_graph("sbm", num_nodes=200).num_nodes == 200
    backend, data = (record.getMessage() for record in caplog.records if "offers the name too" in record.getMessage())
    assert backend == (
        "backend 'comm' is that of pygdist; the package extra-things offers the name too, and is not used: give its "
        "class path, extra_things.Mine"
    )
    assert "dataset 'sbm' is that of pygdist" in data
    assert "extra_things" not in sys.modules


def test_a_class_that_registers_its_name_does_not_clash_with_itself(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(
        site, "own-name", "own_name", "from pygdist.partition import HashPartitioner\n"
        "class Deal(HashPartitioner):\n    name = 'own-name-deal'\n", partitioners={"own-name-deal": "own_name:Deal"},
    )  # fmt: skip
    try:
        with caplog.at_level(logging.WARNING):
            assert type(resolve_partitioner("own-name-deal")) is type(resolve_partitioner("own-name-deal"))
        assert not caplog.records
    finally:
        partitioners._classes.pop("own-name-deal", None)


def test_a_package_wins_over_a_folder_and_says_so(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "extra-things", "extra_things", MODULE, data={"tiny": "extra_things:tiny"})
    monkeypatch.chdir(site)
    (site / "tiny").mkdir()
    with caplog.at_level(logging.WARNING):
        assert load_graph("tiny").num_nodes == 20
    assert "for the folder write ./tiny" in caplog.text
    with pytest.raises(InputError, match=r"tiny: has no edge_index\.npy"):
        load_graph("./tiny")
