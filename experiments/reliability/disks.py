"""Runs every command that writes where there is too little room: it succeeds, or ends in one line, and nothing else.

    python -m experiments.reliability.disks --out figures

A command runs in a small file system of its own, with its logs, cache and temporary files: ``space``, tmpfs of so many
bytes; ``names``, tmpfs of so many files; ``read-only``. Without root there are none. Other limits are those of
processes: ``file size`` (``ulimit -f``), ``open files`` (``ulimit -n``) and ``memory`` (``ulimit -v``). Sizes are drawn
between nothing and what the command takes at most. Then it runs once more in the same place, with room: it must
succeed.

Prints a table of outcomes by command and kind, and writes a CSV with a row for each run. *Refused* is exit code 2, one
line on standard error (of each rank that is refused something), no traceback, nothing that looks whole and is not, and
no temporary file. *Other* is all else; the exit code is 3 if there is any.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import math
import os
import random
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import pygdist.commands.export
import pygdist.commands.generate
import pygdist.commands.partition
import pygdist.commands.report
import pygdist.commands.train
import pygdist.commands.verify  # noqa: F401  (all of them: forked processes need not)
from experiments.machine import SOME_FAILED, provenance
from experiments.reliability.campaign import TEMPORARY
from pygdist import cli
from pygdist.checkpoints import read
from pygdist.graph import degree_corrected_sbm, read_description, read_meta, save_npy
from pygdist.graph.store.meta import open_part

TIMEOUT_S, GRACE_S = 180.0, 15.0
TERMINATED = 128 + signal.SIGTERM
PLENTY = 1 << 29
MOUNTED = ("space", "names", "read-only")  # kinds that need a file system of their own
LIMITS = {"file size": resource.RLIMIT_FSIZE, "open files": resource.RLIMIT_NOFILE, "memory": resource.RLIMIT_AS}
#: A line that tells of a disk, but of no file or folder there.
NAMELESS = re.compile(r"pygdist: error: (No space left|Disk quota|File too large|Read-only|Input/output)[^/]*$")
KINDS = (*MOUNTED, *LIMITS)
_FEWEST_FILES = 24  # that Python and torch need to start

CONFIG = """\
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, enable_progress_bar: false, enable_model_summary: false}
model:
  model: {class_path: torch_geometric.nn.GCN, init_args: {in_channels: 32, hidden_channels: 8, num_layers: 2, \
out_channels: 4}}
  check: false
data: {dataset: INPUTS/graph, partitioner: hash, cache_dir: cache}
"""


@dataclass(frozen=True)
class Command:
    """A command that writes.

    Attributes:
        name: Its name in the table.
        args: Its arguments; ``INPUTS`` stands for the folder of the inputs.
        result: The file or folder that it writes, if it has to be there in the end.
        ranks: Processes that are started as by torchrun.
    """

    name: str
    args: str
    result: str | None = None
    ranks: int = 1


_FIT = "--config=INPUTS/run.yaml"
_TWO = f"{_FIT} --trainer.devices=2 --trainer.strategy=graph_ddp_fork"
_PARTS = "--model.backend=replica --data.num_parts=4 --trainer.strategy=model_averaging"
_CHECKPOINT = "--ckpt_path=INPUTS/last.ckpt"
_SAMPLED = "--data.batches=NeighborBatches --data.batches.batch_size=100 --data.batches.fan_out=[3,3]"
COMMANDS = [
    Command("generate", "generate reddit-like --scale=0.0005 --out=graph", "graph"),
    Command("partition", "partition --dataset=INPUTS/graph --out=parts", "parts"),
    Command("partition a file", "partition --input=INPUTS/graph --symmetrize=true --method=ldg --out=parts", "parts"),
    Command("partition by 2ps-l", "partition --dataset=INPUTS/graph --method=2ps-l --out=parts", "parts"),
    Command("partition replicas", "partition --dataset=INPUTS/graph --hops=2 --out=parts", "parts"),
    Command("partition edges", "partition --dataset=INPUTS/graph --placement=edges --out=parts", "parts"),
    Command("fit", f"fit {_FIT}", "runs"),
    Command("fit, 2 forked ranks", f"fit {_TWO} --exchange.ranks=ranks.csv", "runs"),
    Command("fit, 2 ranks", f"fit {_FIT} --trainer.devices=2 --model.check=true", "runs", ranks=2),
    Command("fit, parts in turn", f"fit {_FIT} {_PARTS} {_SAMPLED}", "runs"),
    Command("fit, few in memory", f"fit {_FIT} --trainer.devices=2 --model.backend=pygdist.backends.TensorBackend "
            "--model.backend.memory_gib=0.0001", "runs", ranks=2),
    Command("fit, hybrid", f"fit {_FIT} --model.backend=hybrid --trainer.devices=2", "runs", ranks=2),
    Command("fit, delayed", f"fit {_FIT} --model.backend=DelayedBackend --model.backend.delay=1 --trainer.devices=2 "
            "--data.partitioner=libra", "runs", ranks=2),
    Command("validate", f"validate {_FIT} {_CHECKPOINT}", "runs"),
    Command("test", f"test {_FIT} {_CHECKPOINT} {_PARTS}", "runs"),
    Command("predict", f"predict {_FIT} {_CHECKPOINT} --predictions.output=logits", "predictions.npy"),
    Command("predict, 2 ranks", f"predict {_FIT} {_CHECKPOINT} --trainer.devices=2", "predictions.npy", ranks=2),
    Command("predict, parts in turn", f"predict {_FIT} {_CHECKPOINT} {_PARTS}", "predictions.npy"),
    Command("export", "export INPUTS/last.ckpt model.pt", "model.pt"),
    Command("export safetensors", "export INPUTS/last.ckpt model.safetensors", "model.safetensors"),
    Command("report", "report INPUTS/results -o report.html", "report.html"),
    Command("verify", f"verify {_FIT} --model.backend=comm"),
]  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """What there is too little of, and how much there is."""

    kind: str
    size: int


@dataclass(frozen=True)
class Run:
    """How the processes of a command ended, what they said, and what they took at most."""

    codes: list[int]
    said: str
    used: Mapping[str, int]


def run(command: Command, folder: Path, inputs: Path, limit: Limit | None = None) -> Run:
    """Run a command in a folder; all it writes is below. The processes are forked, with everything imported."""
    args = command.args.replace("INPUTS", str(inputs)).split()
    place = {"TMPDIR": str(folder / "tmp"), "HOME": str(folder), "MASTER_ADDR": "127.0.0.1"}
    for name in ("work", "tmp"):
        with contextlib.suppress(OSError):  # there may be room for neither
            (folder / name).mkdir(exist_ok=True)
    shared = {
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(command.ranks),
        "LOCAL_WORLD_SIZE": str(command.ranks),
    }
    store = _host(int(shared["MASTER_PORT"])) if command.ranks > 1 else None
    pipes, processes = [], []
    for rank in range(command.ranks):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "disks"}
        number["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.close(reading)
            _become(args, folder / "work", place | (shared | number if command.ranks > 1 else {}), writing, limit)
        os.close(writing)
        pipes.append(reading)
        processes.append(pid)
    said, used, codes = _listen(pipes, processes, folder)
    if store is not None:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    return Run(codes, said, used)


def _host(port: int) -> int:
    """Start a process with the store in which ranks meet, as torchrun has one; return its number."""
    if pid := os.fork():
        return pid
    try:
        _store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)  # it lives as long
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _become(args: list[str], folder: Path, environment: Mapping[str, str], err: int, limit: Limit | None) -> None:
    """Be the command: never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(err, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ.update(environment)
        tempfile.tempdir = None
        os.chdir(folder if folder.is_dir() else folder.parent)
        sys.argv = ["pygdist", *args]
        if limit is not None and limit.kind in LIMITS:
            resource.setrlimit(LIMITS[limit.kind], (limit.size, limit.size))
        code = cli.main(args)
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        os._exit(code)


def _listen(pipes: Sequence[int], processes: Sequence[int], folder: Path) -> tuple[str, dict[str, int], list[int]]:
    """Read what the processes, and those that they started, say, until all are gone; note what the folder holds.

    As torchrun does, ranks are ended some time after one has failed.
    """
    codes: dict[int, int] = {}
    said: dict[int, bytes] = dict.fromkeys(pipes, b"")
    used, deadline = {"space": 0, "names": 0, "file size": 0}, time.monotonic() + TIMEOUT_S
    failed = math.inf
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select(timeout=0.01):
                if block := os.read(key.fd, 1 << 16):
                    said[key.fd] += block
                else:
                    waiting.unregister(key.fd)
            for kind, now in _used(folder).items():
                used[kind] = max(used[kind], now)
            for pid in [pid for pid in processes if pid not in codes]:
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
                    failed = min(failed, time.monotonic()) if codes[pid] else failed
            if time.monotonic() > failed + GRACE_S:
                failed = math.inf
                for pid in [pid for pid in processes if pid not in codes]:
                    os.kill(pid, signal.SIGTERM)
            if time.monotonic() > deadline:
                for pid in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                said[pipes[0]] += b"\nTIMEOUT\n"
                deadline += TIMEOUT_S
    for pipe in pipes:
        os.close(pipe)
    for pid in [pid for pid in processes if pid not in codes]:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = "\n".join(text.decode(errors="replace") for text in said.values())
    return text, used, [codes[pid] for pid in processes]


def _used(folder: Path) -> dict[str, int]:
    """Return the bytes and names in a folder, and the size of its largest file; files without a name are left out."""
    sizes, count = [0], 0
    for place, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(place, name), follow_symlinks=False).st_size)
    pages = sum(-(-size // 4096) * 4096 for size in sizes)
    if os.path.ismount(folder):
        state = os.statvfs(folder)
        pages, count = (state.f_blocks - state.f_bfree) * state.f_frsize, state.f_files - state.f_ffree
    return {"space": pages, "names": count, "file size": max(sizes)}


@contextlib.contextmanager
def mounted(folder: Path, limit: Limit | None) -> Iterator[Callable[[], None]]:
    """Make ``folder`` a file system of a limited size, if root may; yields the function that lifts the limit."""
    folder.mkdir(parents=True)
    if not is_root():
        yield lambda: None
        shutil.rmtree(folder)
        return
    options = {"size": PLENTY, "nr_inodes": 1 << 16}
    if limit is not None and limit.kind in ("space", "names"):
        options["size" if limit.kind == "space" else "nr_inodes"] = limit.size
    _mount(options, "pygdist", str(folder))
    try:
        if limit is not None and limit.kind == "read-only":
            for name in ("work", "tmp"):
                (folder / name).mkdir()
            _mount({}, "-o", "remount,ro", str(folder))
        yield lambda: _mount({"size": PLENTY, "nr_inodes": 1 << 16}, "-o", "remount,rw", str(folder))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def _mount(options: Mapping[str, int], *words: str) -> None:
    given = ["-o", ",".join(f"{name}={value}" for name, value in options.items())] if options else []
    subprocess.run(["mount", "-t", "tmpfs", *given, *words], check=True)


def is_root() -> bool:
    """Tell if file systems can be mounted."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def what_is_wrong(command: Command, made: Run, folder: Path, whole: Mapping[str, bytes]) -> str:
    """Return why the outcome of a run is neither success nor a refusal in one line; empty if it is one.

    ``whole`` are the contents of files that come out the same each time, by path.
    """
    lines = [line for line in made.said.splitlines() if line.startswith("pygdist: error: ")]
    if TERMINATED in made.codes:  # a rank that the others had not met yet
        codes = [code for code in made.codes if code != TERMINATED] or made.codes
        made = replace(made, codes=codes)
        lines = [line for line in lines if "SIGTERM" not in line]
    if "TIMEOUT" in made.said:
        return "did not end"
    if "Traceback" in made.said or "terminate called" in made.said:
        return "traceback"
    if any(code not in (0, 2) for code in made.codes) or len(set(made.codes)) > 1:
        return f"exit codes {made.codes}"
    if not made.codes[0] // 2 <= len(lines) <= made.codes[0] * len(made.codes):  # each rank may be refused something
        return f"{len(lines)} lines of error"
    if any(NAMELESS.match(line) for line in lines):
        return "the line names no folder"
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if TEMPORARY.search(name):
            return f"{name} is left"
        if reason := _damage(path, whole.get(name)):
            return f"{name} looks whole: {reason}"
    if made.codes[0] == 0 and command.result is not None and not (folder / "work" / command.result).exists():
        return f"there is no {command.result}"
    return ""


def _damage(path: Path, whole: bytes | None) -> str:
    """Open a finished file or folder with pygdist's own reader; return what is wrong with it."""
    try:
        if path.name == "meta.json":
            meta = read_meta(path.parent)
            for part in range(meta["num_parts"]):
                open_part(path.parent, part, meta=meta)
        elif path.name == "graph.json":
            for relation in read_description(path.parent)["edges"]:
                shape = np.load(path.parent / "edge_index.npy", mmap_mode="r").shape
                assert shape == (2, relation["num_edges"]), shape
        elif path.suffix == ".ckpt":
            read(path)
        elif path.suffix == ".pt":
            torch.load(path)
        elif path.name == "report.html":
            assert path.read_text(encoding="utf-8").rstrip().endswith("</html>"), "its end is missing"
        if whole is not None:
            assert path.read_bytes() == whole, "it differs"
    except Exception as error:  # whatever a reader says
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def prepare(inputs: Path) -> None:
    """Write the graph, the configuration, a checkpoint and results."""
    save_npy(degree_corrected_sbm(600, num_classes=4, avg_degree=12, num_features=32, seed=3), inputs / "graph")
    (inputs / "run.yaml").write_text(CONFIG.replace("INPUTS", str(inputs)))
    (inputs / "results").mkdir()
    (inputs / "results" / "one.csv").write_text("ranks,epoch_s\n1,0.5\n2,0.25\n")
    (inputs / "made").mkdir()
    made = run(Command("", f"fit {_FIT}"), inputs / "made", inputs)
    if made.codes != [0]:
        raise SystemExit(f"the first run failed:\n{made.said}")
    shutil.copy(inputs / "made/work/runs/version_0/checkpoints/last.ckpt", inputs / "last.ckpt")


def reference(command: Command, folder: Path, inputs: Path) -> tuple[Run, dict[str, bytes]]:
    """Run a command with plenty of room; return what it takes, and the files that come out the same each time."""
    with mounted(folder, None):
        made = run(command, folder, inputs)
        if reason := what_is_wrong(command, made, folder, {}) or "".join(
            f"exit code {code} " for code in made.codes if code
        ):
            raise SystemExit(f"{command.name} fails with plenty of room: {reason}\n{made.said}")
        same = [path for pattern in ("*.npy", "*.safetensors") for path in (folder / "work").glob(pattern)]
        return made, {str(path.relative_to(folder)): path.read_bytes() for path in same}


def limits(kind: str, taken: Mapping[str, int], count: int, generator: random.Random) -> list[Limit]:
    """Draw limits between nothing and a little more than a command takes at most."""
    if kind == "read-only":
        return [Limit(kind, 0)]
    shares = [(number + generator.random()) / count * 1.1 for number in range(count)]
    if kind == "open files":
        return [Limit(kind, _FEWEST_FILES + int(64 * share)) for share in shares]
    if kind == "memory":
        return [Limit(kind, int(_virtual_memory() + share * (3 << 29))) for share in shares]
    least = 4096 if kind == "space" else 3 if kind == "names" else 1
    return [Limit(kind, max(least, int(taken[kind] * share))) for share in shares]


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def trial(command: Command, limit: Limit, folder: Path, inputs: Path, whole: Mapping[str, bytes]) -> dict[str, object]:
    """Run a command under a limit, and again without; return the row of the table."""
    with mounted(folder, limit) as lift:
        began = time.monotonic()
        made = run(command, folder, inputs, limit)
        seconds = time.monotonic() - began
        reason = what_is_wrong(command, made, folder, whole)
        outcome = "other" if reason else "refused" if made.codes[0] else "success"
        lift()
        again = run(command, folder, inputs)
        if not reason and (later := what_is_wrong(command, again, folder, {}) or (again.codes[0] and "refused")):
            outcome, reason, made = "other", f"with room: {later}", replace(made, said=f"{made.said}\n{again.said}")
    line = next((line for line in made.said.splitlines() if line.startswith("pygdist: error: ")), "")
    row = {"command": command.name, "kind": limit.kind, "size": limit.size, "outcome": outcome, "reason": reason}
    said = made.said if reason else ""
    return {**row, "line": line.replace(str(folder), ""), "seconds": round(seconds, 1), "said": said}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--commands", nargs="+", choices=[one.name for one in COMMANDS], metavar="NAME")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=["space", "file size"], metavar="KIND")
    options.add_argument("--sizes", type=int, default=20, help="limits for each command and kind (default: 20)")
    options.add_argument("--seed", type=int, default=0, help="seed of the limits")
    options.add_argument("--out", type=Path, default=Path("."), help="folder of the CSV")
    return options


def main() -> int:
    """Run the campaign; the exit code tells if there is any other outcome than success and refusal."""
    options = parser().parse_args()
    torch.set_num_threads(1)  # no thread may exist where processes are forked
    kinds = [kind for kind in options.kinds if is_root() or kind not in MOUNTED]
    if len(kinds) < len(options.kinds):
        print("without root there are no file systems of a limited size: limits of processes alone", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, facts = [], provenance(1)
    with contextlib.ExitStack() as stack:
        scratch = tempfile.mkdtemp(prefix="disks-")  # a TemporaryDirectory would go with the first forked process
        stack.callback(shutil.rmtree, scratch)
        file = stack.enter_context((options.out / "disks.csv").open("w", newline=""))
        for row in _trials(options, kinds, Path(scratch)):
            print(f"{row['command']}, {row['kind']} {row['size']}: {row['outcome']} {row['reason']}", file=sys.stderr)
            print(row.pop("said"), end="", file=sys.stderr)
            rows.append({**row, **facts})
            if len(rows) == 1:
                (writer := csv.DictWriter(file, fieldnames=list(rows[0]))).writeheader()
            writer.writerow(rows[-1])
            file.flush()  # forked processes would write it once more
    _show(rows)
    return SOME_FAILED if any(row["outcome"] == "other" for row in rows) else 0


def _trials(options: argparse.Namespace, kinds: Sequence[str], scratch: Path) -> Iterator[dict[str, object]]:
    """Yield the row of each run, command by command."""
    generator, inputs = random.Random(options.seed), scratch / "inputs"
    prepare(inputs)
    for command in (one for one in COMMANDS if options.commands is None or one.name in options.commands):
        taken, whole = reference(command, scratch / "reference", inputs)
        for kind in kinds:
            for limit in limits(kind, taken.used, options.sizes, generator):
                yield trial(command, limit, scratch / "place", inputs, whole)


def _show(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table("command", "limit", "success", "refused", "other")
    counts = Counter((row["command"], row["kind"], row["outcome"]) for row in rows)
    for command, kind in dict.fromkeys((row["command"], row["kind"]) for row in rows):
        numbers = (str(counts[command, kind, outcome]) for outcome in ("success", "refused", "other"))
        table.add_row(str(command), str(kind), *numbers)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
