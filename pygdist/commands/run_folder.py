"""The folder of a run: a new one for each, or that of a run which goes on; ``--ckpt_path=last`` looks there too.

A file ``.unfinished`` is in the folder while the run has not ended. The process that writes there holds a lock on it.
It holds the names of its job by torchrun, SLURM and Kubernetes: a run that is started again finds its folder by them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pygdist import checkpoints
from pygdist.bounded_yaml import read_yaml
from pygdist.errors import InputError
from pygdist.launch_variables import count, job_of_slurm
from pygdist.lightning.meeting import agent
from pygdist.lightning.resume import newest_checkpoint
from pygdist.lightning.stopping import ON_SIGNAL

_MARK = ".unfinished"
_SAVED_LAST = re.compile(rf"last(-v\d+)?\.ckpt|hpc_ckpt_\d+\.ckpt|{re.escape(ON_SIGNAL)}")  # most are Lightning's names
_MOUNTS = Path("/proc/self/mountinfo")
_OF_POD = re.compile(r"/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/etc-hosts /etc/hosts ")
_WAIT_S = 30.0  # within which processes of a run that was lost are gone
# a run is the same one with other values of these
_MAY_DIFFER = {
    "data": ("cache_dir", "num_workers", "num_parts", "memory_gib", "reserve"),
    "model": ("check", "savings"),
}
_COMPARED = ("task", "seed_everything", "model", "data", "optimizer", "lr_scheduler")


class RunFolder:
    """A folder that this process alone writes to, until it ends.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = _locked(path / _MARK)
        self._mark.truncate(0)
        self._mark.write("".join(f"{line}\n" for line in (*_jobs(), _container())))
        self._mark.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # a spawned rank gets one without the lock

    def finish(self) -> None:
        """Note that the run has ended by itself."""
        (self.path / _MARK).unlink(missing_ok=True)
        self._mark.close()


def new_folder(root: Path) -> RunFolder:
    """Make the next ``version_N``. Several processes may do so at once; each gets its own."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = max((number for number, _ in _versions(root)), default=-1) + 1
        while True:
            with contextlib.suppress(FileExistsError):
                (root / f"version_{number}").mkdir()
                return RunFolder(root / f"version_{number}")
            number += 1
    except OSError as error:
        raise InputError(
            f"{error.filename or root}: cannot be written to ({error.strerror}), but logs and checkpoints go there; "
            "set --trainer.default_root_dir to another folder, or --trainer.logger=false"
        ) from error


def folder_to_go_on(
    root: Path, config: Mapping[str, Any], resume: bool | None, saved: Path | None = None
) -> Path | None:
    """Return the folder of the newest run that has a whole checkpoint, if training should go on there.

    Args:
        root: The folder of all runs.
        config: The configuration; a run that differs in what it learns is another one.
        resume: Go on or do not. ``None`` goes on if torchrun, SLURM or Kubernetes has started the same job before.
        saved: Where checkpoints are, if not in the run's folder.
    """
    if resume is False:
        return None
    folders = [folder for _, folder in sorted(_versions(root), reverse=True)]
    if resume is None:
        folders = [folder for folder in folders if _is_of_this_job(folder)]
    for folder in folders:
        if differs := _difference(folder, config):
            rank_zero_info(f"{folder}: is another run's ({differs}), so training does not go on from it")
        elif newest_checkpoint(folder if saved is None else saved) is not None:
            return folder
    if resume:
        rank_zero_info(f"--resume: there is no checkpoint of this run under {root}, so it begins")
    elif folders or _restarts() > 0:
        rank_zero_info(f"this job was started again, but there is no checkpoint of it under {root}, so the run begins")
    return None


def _is_of_this_job(folder: Path) -> bool:
    """Tell if a run has not ended, and its job has been started again since: this process is of that job."""
    try:
        noted = (folder / _MARK).read_text().splitlines()
    except OSError:
        return False
    again = {"SLURM": count("SLURM_RESTART_COUNT") > 0, "Kubernetes": _container() not in noted}
    return any(job in noted and again.get(job.split()[0], True) for job in _jobs())


def _jobs() -> list[str]:
    """Return the names of this job, which stay if it is started again."""
    jobs, torchrun, slurm = list[str](), os.environ.get("TORCHELASTIC_RUN_ID"), job_of_slurm()
    if torchrun is not None:
        # without --rdzv-id all jobs are called "none", and only the agent that started this process tells one of them
        jobs.append(f"torchrun {agent() if torchrun == 'none' else torchrun}")
    if slurm is not None:
        jobs.append(f"SLURM {slurm}")
    pod, index = os.environ.get("HOSTNAME"), os.environ.get("JOB_COMPLETION_INDEX")
    if pod and "KUBERNETES_SERVICE_HOST" in os.environ:
        # pods of an indexed Job have its name and their number for a host name; other names may come again
        of_job = index is not None and pod.endswith(f"-{index}")
        jobs.append(f"Kubernetes Job {pod}" if of_job else f"Kubernetes pod {pod} {_pod_uid()}")
    return jobs


def _pod_uid() -> str:
    """Return the unique number of this pod, in whose folder Kubernetes keeps the list of hosts; empty if not seen."""
    with contextlib.suppress(OSError):
        if found := _OF_POD.search(_MOUNTS.read_text()):
            return found[1]
    return ""


def _container() -> str:
    """Name this start of the container, or machine, by the time at which its first process began."""
    with contextlib.suppress(OSError):
        began = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
        return f"container {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {began}"
    return "container"


def _restarts() -> int:
    return max(count("TORCHELASTIC_RESTART_COUNT"), count("SLURM_RESTART_COUNT"))


def _versions(root: Path) -> list[tuple[int, Path]]:
    folders = [(re.fullmatch(r"version_(\d+)", path.name), path) for path in root.glob("version_*")]
    return [(int(match[1]), path) for match, path in folders if match and path.is_dir()]


def _difference(folder: Path, config: Mapping[str, Any]) -> str:
    """Name an option in which a run learns something else; empty if there is none, or nothing to compare."""
    path = folder / "config.yaml"
    try:
        theirs = read_yaml(path) if path.is_file() else None
    except InputError as error:  # cut off, as its disk was full
        return str(error)
    if not isinstance(theirs, dict):
        return ""
    for part in _COMPARED:
        ours, others = config.get(part), theirs.get(part)
        if isinstance(ours, Mapping) and isinstance(others, Mapping):
            names = [name for name in {**ours, **others} if name not in _MAY_DIFFER.get(part, ())]
            for name in names:
                if ours.get(name) != others.get(name):
                    return f"--{part}.{name}"
        elif ours != others:
            return f"--{part}"
    return ""


def _locked(path: Path) -> IO[str]:
    """Open a file that one process at a time may hold; a process that ends lets go of it."""
    file, until = path.open("a+"), time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"{path.parent}: another process is still training there; end it first, or begin a run of its own "
                    "with --resume=false"
                ) from error
            time.sleep(0.2)
        else:
            return file


def named_checkpoint(name: str, root: Path, config: Mapping[str, Any]) -> Path:
    """Return the file that ``--ckpt_path=last``, ``best`` or ``hpc`` means: of the newest run of this configuration.

    Args:
        name: One of the three. ``last`` may be a file that was saved on a signal; ``hpc`` is one that was saved when
            SLURM asked for a requeue, so runs without such a file do not count.
        root: The folder of all runs.
        config: The configuration, compared with that of a run as ``--resume`` does.

    Raises:
        InputError: If there is none; names a run of another configuration, if there is one, and how it differs.
    """
    option, pattern = f"--ckpt_path={name}", "hpc_ckpt_*.ckpt" if name == "hpc" else "*.ckpt"
    folders = {path: path.rglob(pattern) for _, path in _versions(root)}
    inside = {root: (path for path in root.rglob(pattern) if not folders.keys() & set(path.parents))}
    found = [(folder, _newest_first(files)) for folder, files in (folders | inside).items()]
    runs = [(folder, files) for folder, files in found if files]
    runs.sort(key=lambda run: _time(run[1][0]), reverse=True)
    others = ""
    for folder, saved in runs:
        if differs := _difference(folder, config):
            others = others or f"{folder} is another run's ({differs})"
            continue
        if others:
            rank_zero_info(f"{option}: {others}, so it does not count")
        meant = _best(saved[0]) if name == "best" else [path for path in saved if _SAVED_LAST.fullmatch(path.name)]
        if not meant:
            raise InputError(f"{option}: {folder} has checkpoints, but none that is called so; give the file")
        return meant[0]
    if others:
        raise InputError(
            f"{option}: there is no run of this configuration: {others}; correct the option, or give the file"
        )
    raise InputError(f"{option}: there is no run with {pattern} under {root}; give the file")


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    files = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    return sorted(files, key=_time, reverse=True)


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns


def _saving(path: Path) -> list[dict[str, Any]]:
    """Return the states of the callbacks that save checkpoints."""
    states = checkpoints.read(path).get("callbacks", {})
    return [state for name, state in states.items() if "Checkpoint" in name and isinstance(state, dict)]


def _best(newest: Path) -> list[Path]:
    """Return the best checkpoint by what the newest one has noted; the folder may have moved."""
    for state in _saving(newest):
        if state.get("best_model_path"):
            path = newest.parent / Path(str(state["best_model_path"])).name
            if path.is_file():
                return [path]
    return []
