"""The files of ``deploy/`` run as a cluster would run them, on two emulated machines."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import _rendezvous

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SMALL = ["--data.dataset_args.num_nodes=300", "--trainer.max_epochs=2"]
SRUN = """\
#!/bin/bash
# The tasks of all machines, with the variables of SLURM; ends with the worst exit code.
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  export SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE))
  SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
"""


@pytest.fixture
def programs(tmp_path: Path, warm_python: None) -> Path:
    """A folder for ``PATH`` with ``pygdist``, ``torchrun`` and ``srun``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    modules = {"pygdist": "pygdist.cli", "torchrun": "torch.distributed.run"}
    texts = {name: f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n' for name, module in modules.items()}
    for name, text in {**texts, "srun": SRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def _run(command: list[str], folder: Path, programs: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def _assert_trained_together(run: Path) -> None:
    with (run / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["epoch"] for row in rows if row["train_loss"]] == ["0", "1"]
    sent = [float(row["sent_bytes_total"]) for row in rows if row["sent_bytes_total"]]
    assert len(sent) == 2, "of two epochs"
    assert min(sent) > 0, "two ranks exchanged rows"


@pytest.mark.slow
def test_the_batch_script_trains_on_two_nodes_with_two_tasks_each(programs: Path, tmp_path: Path) -> None:
    port = int(_rendezvous()["MASTER_PORT"])  # Lightning's is 15000 plus the last four digits of the job
    while not 15_000 <= port < 25_000:
        port = int(_rendezvous()["MASTER_PORT"])
    job = {
        "SLURM_JOB_ID": f"7{port - 15_000:04}", "SLURM_JOB_NAME": "pygdist", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_NODELIST": "127.0.0.[1-2]",
    }  # fmt: skip
    script = str(DEPLOY / "pygdist.sbatch")
    outcome = _run(["bash", script, str(DEPLOY / "run.yaml"), *SMALL], tmp_path, programs, job)
    assert outcome.returncode == 0, outcome.stderr
    _assert_trained_together(tmp_path / "runs" / "version_0")
    trainer = yaml.safe_load((tmp_path / "runs" / "version_0" / "config.yaml").read_text())["trainer"]
    assert (trainer["num_nodes"], int(trainer["devices"])) == (2, 2)

    outcome = _run(["bash", script, str(DEPLOY / "run.yaml"), "--model.backend=nonsense"], tmp_path, programs, job)
    assert outcome.returncode == 2, "the job fails with its tasks"
    assert _run(["bash", script], tmp_path, programs, job).stderr.startswith("usage: sbatch pygdist.sbatch CONFIG")


def test_the_batch_script_asks_for_what_it_uses() -> None:
    text = (DEPLOY / "pygdist.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert options.keys() >= {"nodes", "ntasks-per-node", "cpus-per-task", "time", "requeue", "signal"}
    assert "ntasks" not in options, "Lightning refuses it"
    assert "--gpus-per-task" not in text, "a task would see one GPU, where Lightning looks for those of all tasks"
    assert "--gpus-per-node=2 --gpu-bind=none" in text


def _manifest(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the job, with folders of this machine in place of those of the pods."""
    text = (DEPLOY / "pytorchjob.yaml").read_text()
    text = text.replace("/shared", str(folder / "shared")).replace("/run/pygdist", str(folder))
    config, job = yaml.safe_load_all(text)
    return config, job


def test_the_manifest_is_a_job_that_the_operator_takes(tmp_path: Path) -> None:
    config, job = _manifest(tmp_path)
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert isinstance(job["spec"]["nprocPerNode"], str)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for one in replicas.values():
        assert one["restartPolicy"] in ("OnFailure", "Never", "ExitCode", "Always")
        pod = one["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator sets its variables in no other container"
        assert container["imagePullPolicy"] == "IfNotPresent", "an image of this machine is in no registry"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["run"]["configMap"]["name"] == config["metadata"]["name"]
        assert volumes["memory"]["emptyDir"].keys() == {"medium", "sizeLimit"}


def test_the_manifest_holds_the_run_of_the_other_files() -> None:
    config = next(yaml.safe_load_all((DEPLOY / "pytorchjob.yaml").read_text()))
    run = yaml.safe_load(config["data"]["run.yaml"])
    assert run["data"].pop("cache_dir").startswith("/shared/"), "all pods read the parts"
    assert run["trainer"].pop("default_root_dir").startswith("/shared/")
    assert run == yaml.safe_load((DEPLOY / "run.yaml").read_text())


@pytest.mark.slow
def test_the_pods_train_together(programs: Path, tmp_path: Path) -> None:
    config, job = _manifest(tmp_path)
    (tmp_path / "run.yaml").write_text(config["data"]["run.yaml"])
    where = _rendezvous()
    pods = []
    for index, kind in enumerate(("Master", "Worker")):
        # what the operator sets in a pod
        env = {**where, "WORLD_SIZE": "2", "RANK": str(index), "PYTHONUNBUFFERED": "1"}
        env |= {f"PET_{name}": value for name, value in where.items()}
        env |= {"PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
        (container,) = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"]
        pods.append((container["command"] + SMALL, tmp_path, programs, env))
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda pod: _run(*pod), pods))
    assert [outcome.returncode for outcome in outcomes] == [0, 0], [outcome.stderr for outcome in outcomes]
    _assert_trained_together(tmp_path / "shared" / "runs" / "version_0")


def _instructions() -> list[list[str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_copies_files_that_are_there_and_runs_as_a_user() -> None:
    instructions = _instructions()
    assert {name for name, _ in instructions} <= {"ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "CMD"}
    # the last line of .dockerignore that fits decides; the first one leaves everything out
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    stages = {rest.split(" AS ")[1] for name, rest in instructions if name == "FROM" and " AS " in rest}
    copied = set()
    for rest in (rest for name, rest in instructions if name == "COPY"):
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        copied |= set(words[:-1])
    assert copied == kept, "what is sent to Docker is what the image copies"
    assert all((ROOT / name).exists() for name in copied)
    needed = {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "pygdist", "constraints.txt"}
    assert copied == needed
    names = [name for name, _ in instructions]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    assert dict(instructions)["USER"] != "root"
