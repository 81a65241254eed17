"""``pygdist doctor``: what a machine has, and what exchanges take, on one machine and between torchrun's processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pygdist.native import load
from tests.cli.commands import assert_mistake, pygdist


def test_what_this_machine_has(tmp_path: Path) -> None:
    outcome = pygdist("doctor", "--json", "--no-exchange", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["processor"]["cores"] >= 1
    assert facts["memory_gib"]["limit"] > 0.1
    assert facts["free_disk_gib"]["home"] > 0
    assert (facts["native_library"] == "loaded") == (load() is not None)
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert "exchanges" not in facts


@pytest.mark.slow
def test_exchanges_on_this_machine(tmp_path: Path) -> None:
    outcome = pygdist("doctor", "--json", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    (row,) = json.loads(outcome.out)["exchanges"]
    assert (row["from"][0], row["to"][0]) == ("0", "1")
    assert row["mb_per_s"] > 1
    assert row["latency_us"] > 0


@pytest.mark.slow
def test_exchanges_between_the_processes_of_torchrun(tmp_path: Path, warm_python: None) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "pygdist.cli", "doctor"]
    done = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "exchange by: gloo, 3 processes" in lines
    assert [(line.split()[0], line.split()[2]) for line in lines[-3:]] == [("0", "1"), ("0", "2"), ("1", "2")]


def test_a_mistake_is_told_in_one_line(tmp_path: Path) -> None:
    assert_mistake(pygdist("doctor", "--nothing", folder=tmp_path), "--nothing")
