"""The folder of a run: a new one for each, or that of a run which goes on; ``--ckpt_path=last`` looks there too.

A file ``.unfinished`` is in the folder while the run has not ended. The process that writes there holds a lock on it.
It holds the names of its job by torchrun, SLURM and Kubernetes: a run that is started again finds its folder by them.

Runs may save in one folder (``--checkpoint.dirpath``), so each checkpoint notes the name of its run, which the file
``.run`` holds, and digests of its options.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pygdist import checkpoints
from pygdist.bounded_yaml import read_yaml
from pygdist.checkpoints import RUN_FACTS
from pygdist.errors import InputError
from pygdist.launch_variables import count, job_of_slurm
from pygdist.lightning.meeting import agent
from pygdist.lightning.resume import newest_checkpoint
from pygdist.lightning.stopping import ON_SIGNAL

_MARK, _NAME = ".unfinished", ".run"
_OF_EVALUATIONS = {"verbose", "return_predictions"}  # options that fit does not have
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
        run: The name of the run, which no other run has; it stays if the run goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = _locked(path / _MARK)
        self._mark.truncate(0)
        self._mark.write("".join(f"{line}\n" for line in (*_jobs(), _container())))
        self._mark.flush()
        self.run = _run_in(path) or uuid.uuid4().hex
        (path / _NAME).write_text(f"{self.run}\n")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "run": self.run}  # a spawned rank gets one without the lock

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


@dataclass(frozen=True)
class OwnCheckpoints:
    """Tells the checkpoints of a run from those of other runs that save in the same folder.

    Args:
        run: The name of the run; empty if it has no folder, so that the options tell.
        config: The configuration.
        root: The folder of all runs.
        saved: Where checkpoints are.
    """

    run: str
    config: Mapping[str, Any]
    root: Path
    saved: Path

    @classmethod
    def of(cls, folder: Path | None, config: Mapping[str, Any], root: Path, saved: Path) -> OwnCheckpoints:
        """Return that of the run in a folder."""
        return cls("" if folder is None else _run_in(folder) or "unknown", config, root, saved)

    def __call__(self, checkpoint: Mapping[str, Any]) -> bool:
        """Tell if this run has saved a checkpoint. One that notes no run counts if no other run saves there."""
        run, options = _noted(checkpoint)
        if options is None:
            return not self._is_shared
        return run == self.run if self.run else not _other_option(options, self.config)

    @cached_property
    def _is_shared(self) -> bool:
        shared = len(_savers(self.root, self.saved)) > 1
        if shared:
            rank_zero_info(f"{self.saved}: several runs save there, so checkpoints that do not say whose do not count")
        return shared


def note_of(folder: RunFolder | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint notes of its run."""
    return {"run": "" if folder is None else folder.run, "options": _digests(config)}


def _noted(checkpoint: object) -> tuple[str, dict[str, str] | None]:
    """Return the name of the run that saved a checkpoint, and digests of its options; ``None`` if none are noted."""
    facts = checkpoint.get(RUN_FACTS) if isinstance(checkpoint, dict) else None
    options = facts.get("options") if isinstance(facts, dict) else None
    if not isinstance(facts, dict) or not isinstance(options, dict):
        return "", None
    return str(facts.get("run", "")), {str(name): str(digest) for name, digest in options.items()}


def _digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the options in which runs differ, by name; ``None`` is as if an option was not there."""
    options: dict[str, Any] = {}
    for part in _COMPARED:
        value = config.get(part)
        if isinstance(value, Mapping):
            compared = value.keys() - set(_MAY_DIFFER.get(part, ()))
            options |= {f"--{part}.{name}": value[name] for name in sorted(compared)}
        else:
            options[f"--{part}"] = value
    texts = {name: yaml.safe_dump(value) for name, value in options.items() if value is not None}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _other_option(noted: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Name an option that is not as a checkpoint notes it; empty if there is none."""
    ours = _digests(config)
    return next((name for name in {**ours, **noted} if ours.get(name) != noted.get(name)), "")


def _run_in(folder: Path) -> str:
    """Return the name of the run in a folder; empty if it has none, as an older version of pygdist began it."""
    with contextlib.suppress(OSError):
        return (folder / _NAME).read_text().strip()
    return ""


def _savers(root: Path, saved: Path) -> list[Path]:
    """Return the folders of the runs that save checkpoints in a folder, by their configurations."""
    return [folder for _, folder in _versions(root) if _saves_in(folder, saved)]


def _saves_in(folder: Path, saved: Path) -> bool:
    config: Any = None
    with contextlib.suppress(InputError):
        config = read_yaml(folder / "config.yaml")
    if not isinstance(config, dict) or _OF_EVALUATIONS & config.keys():
        return False
    checkpoint = config.get("checkpoint")
    place = checkpoint.get("dirpath") if isinstance(checkpoint, dict) else None
    return isinstance(place, str) and Path(place).expanduser().resolve() == saved.expanduser().resolve()


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
        counts = None if saved is None else OwnCheckpoints.of(folder, config, root, saved)
        if differs := _difference(folder, config):
            rank_zero_info(f"{folder}: is another run's ({differs}), so training does not go on from it")
        elif newest_checkpoint(folder if saved is None else saved, counts) is not None:
            return folder
    place = root if saved is None else saved
    if resume:
        rank_zero_info(f"--resume: there is no checkpoint of this run under {place}, so it begins")
    elif folders or _restarts() > 0:
        rank_zero_info(f"this job was started again, but there is no checkpoint of it under {place}, so the run begins")
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


def named_checkpoint(name: str, root: Path, config: Mapping[str, Any], saved: Path | None = None) -> Path:
    """Return the file that ``--ckpt_path=last``, ``best`` or ``hpc`` means: of the newest run of this configuration.

    Args:
        name: One of the three. ``last`` may be a file that was saved on a signal; ``hpc`` is one that was saved when
            SLURM asked for a requeue, so runs without such a file do not count.
        root: The folder of all runs.
        config: The configuration, compared with that of a run as ``--resume`` does.
        saved: Where checkpoints are, if not in the run's folder.

    Raises:
        InputError: If there is none; names a run of another configuration, if there is one, and how it differs.
    """
    option, pattern = f"--ckpt_path={name}", "hpc_ckpt_*.ckpt" if name == "hpc" else "*.ckpt"
    place, others = root if saved is None else saved, ""
    for folder, files, noted in _saved_runs(place, pattern):
        differs = _why_another(folder, files[0], noted, config)
        if not differs and noted is None and folder == saved:
            differs = _why_unknown(files[0], config, root, saved)
        if differs:
            others = others or differs
            continue
        if others:
            rank_zero_info(f"{option}: {others}, so it does not count")
        meant = _best(files[0]) if name == "best" else [path for path in files if _SAVED_LAST.fullmatch(path.name)]
        if not meant:
            raise InputError(f"{option}: {folder} has checkpoints, but none that is called so; give the file")
        return meant[0]
    if others:
        raise InputError(
            f"{option}: there is no run of this configuration: {others}; correct the option, or give the file"
        )
    raise InputError(f"{option}: there is no run with {pattern} under {place}; give the file")


def _saved_runs(place: Path, pattern: str) -> list[tuple[Path, list[Path], dict[str, str] | None]]:
    """Return the runs that have saved something, the newest first: folder, files, and digests of noted options."""
    folders = {path: path.rglob(pattern) for _, path in _versions(place)}
    runs: list[Any] = [(folder, _newest_first(files), None) for folder, files in folders.items()]
    by_run: dict[Any, Any] = {}
    for path in _newest_first(path for path in place.rglob(pattern) if not folders.keys() & set(path.parents)):
        content = None
        with contextlib.suppress(Exception):  # torch.load raises nearly any; read() names it if the file is taken
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        run, options = _noted(content)
        key = run, options and tuple(options.items())
        by_run.setdefault(key, (place, [], options))[1].append(path)
    return sorted((run for run in [*runs, *by_run.values()] if run[1]), key=lambda run: _time(run[1][0]), reverse=True)


def _why_another(folder: Path, newest: Path, noted: Mapping[str, str] | None, config: Mapping[str, Any]) -> str:
    """Say why a run is not of this configuration; empty if it is, or if there is nothing to compare."""
    if noted is not None:
        differs = _other_option(noted, config)
        return f"{newest} is another run's ({differs})" if differs else ""
    differs = _difference(folder, config)
    return f"{folder} is another run's ({differs})" if differs else ""


def _why_unknown(newest: Path, config: Mapping[str, Any], root: Path, saved: Path) -> str:
    """Say why a checkpoint that notes no run may be that of another; empty if all runs that save there are alike."""
    savers = _savers(root, saved)
    if len(savers) < 2 or not any(_difference(one, config) for one in savers):
        return ""
    return f"several runs save in {saved}, and {newest.name} does not say whose it is"


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
