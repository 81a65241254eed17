"""GitHub's workflows run commands that this checkout has; its forms and the citations of papers can be read."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.core import PROJECT

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"


def _workflow(name: str) -> dict[str, Any]:
    content = yaml.safe_load((GITHUB / "workflows" / name).read_text())
    content["on"] = content.pop(True)  # YAML 1.1 takes the key "on" for a truth value
    return content  # type: ignore[no-any-return]


def _commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").iterdir()), ids=lambda path: path.name)
def test_actions_have_a_major_version_and_jobs_the_least_rights(path: Path) -> None:
    workflow = _workflow(path.name)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for used in (step["uses"] for step in job["steps"] if "uses" in step):
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", used), used
        for needed in [job["needs"]] if "needs" in job else []:
            assert needed in workflow["jobs"]
    matrices = [job["strategy"]["matrix"]["include"] for job in workflow["jobs"].values() if "strategy" in job]
    assert matrices
    assert all({one["arch"] for one in matrix} == {"x86_64", "aarch64"} for matrix in matrices)


def test_ci_runs_what_ci_run_runs() -> None:
    workflow = _workflow("ci.yml")
    assert workflow["on"].keys() == {"push", "pull_request"}
    (job,) = workflow["jobs"].values()
    assert _commands(job) == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    runners = {one["arch"]: one["runner"] for one in job["strategy"]["matrix"]["include"]}
    assert runners["aarch64"].endswith("-arm"), "native, not emulated"


def test_once_a_week_all_combinations_run() -> None:
    workflow = _workflow("exhaustive.yml")
    assert workflow["on"].keys() == {"schedule", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    assert _commands(job) == ["make test PYTEST_ARGS=--exhaustive"]
    ((minute, hour, *days, weekday),) = (one["cron"].split() for one in workflow["on"]["schedule"])
    assert all(number.isdecimal() for number in (minute, hour, weekday))
    assert days == ["*", "*"]


def test_wheels_are_built_tried_and_published_by_tags() -> None:
    workflow = _workflow("wheels.yml")
    assert workflow["on"]["push"] == {"tags": ["v*"]}
    build, demo, publish = (workflow["jobs"][name] for name in ("build", "demo", "publish"))
    (make,) = _commands(build)
    assert make.startswith("make dist ")
    assert re.search(r"^dist:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert build["container"] == "quay.io/pypa/manylinux_2_28_${{ matrix.arch }}"
    assert _commands(demo) == ["pip install dist/*.whl", "python -m pygdist.demo"]
    assert demo["needs"] == "build"
    assert publish["needs"] == "demo"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"}, "trusted publishing"
    assert "password" not in str(publish)
    patterns = workflow["on"]["pull_request"]["paths"]
    assert all((ROOT / pattern.removesuffix("/**")).exists() for pattern in patterns)


def test_forms_for_issues() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")}
    forms.pop("config")
    assert forms.keys() == {"bug", "feature", "question"}
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        for field in form["body"]:
            assert field["type"] in ("textarea", "input")
            assert field["attributes"]["label"]
    assert any("pygdist doctor --json" in field["attributes"]["label"] for field in forms["bug"]["body"])


def test_the_citation_names_the_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    assert [one["title"].partition(":")[0] for one in citation["references"]] == [
        "NeutronStar", "NeutronTP", "DistGNN", "CATGNN", "P3",
    ]  # fmt: skip
    for paper in citation["references"]:
        assert paper["type"] in ("article", "conference-paper")
        assert all(author.keys() == {"family-names", "given-names"} for author in paper["authors"])


def test_the_changelog_is_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert first is not None
    assert first[1] in ("Unreleased", PROJECT["version"])
    assert PROJECT["version"] in text
    assert set(re.findall(r"^### (\w+)", text, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security",
    }  # fmt: skip


def test_the_sdist_holds_what_a_build_needs_and_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    tops = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    left_out = {top for top in tops for one in settings["sdist"]["exclude"] if fnmatch(f"/{top}", one)}
    assert tops - left_out == {"CMakeLists.txt", "LICENSE", "README.md", "pygdist", "pyproject.toml"}


def test_the_demo_installs_only_what_it_needs(tmp_path: Path) -> None:
    def said(target: str) -> str:
        return subprocess.run(
            ["make", "--no-print-directory", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    assert "install --no-compile -c constraints.txt -e .\n" in said("demo")
    assert "[dev]" not in said("demo")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / ".venv" / ".demo").touch()
    assert "install" not in said("demo"), "it was installed"
    assert "install -c constraints.txt -e '.[dev]'\n" in said("build"), "the rest is installed beside it"
    (tmp_path / ".venv" / ".demo").unlink()
    (tmp_path / ".venv" / ".installed").touch()
    assert "install" not in said("demo"), "what tests need is enough"
