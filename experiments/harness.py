"""Measures trainings: settings take turns, each trains by ``pygdist fit`` in its own processes and gives one row.

A setting is a graph, a model, a partitioner, a backend, a strategy, a number of ranks, a network and seeds. In every
round each setting trains once, with the round's seed. The order rotates, so that drift of the machine hits all alike.
``NAME.runs.jsonl`` holds one line per training; the tables follow from it:

- ``NAME.csv``: one row per setting, over all its seeds;
- ``NAME.ranks.csv``: the figures of each rank in each epoch;
- ``NAME.traces/``: a timeline of each setting, recorded after the epochs that count.

A setting that crashes, does not fit its memory or takes too long gives a row that says so.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.markup import escape
from rich.progress import Progress

from experiments.cluster import Cluster, bits_per_second, why_unshaped
from experiments.machine import provenance, source_key
from experiments.to_accuracy import to_accuracy

__all__ = ["Setting", "measure", "settings_of"]

WARM_UP = 2  # epochs that do not count: they compute degrees, transposes and kept results, and allocate memory
TRACED = 3  # epochs recorded for the timeline, after those that count
_OF_TIMELINE = {"aggregate_s": ("aggregate",), "pack_s": ("pack", "unpack")}  # figures, and the spans they sum
STAGES = ("sampling_s", "fetching_s", "batch_wait_s")  # of mini-batches that are sampled across ranks
RANK_FIGURES = (
    "epoch_s", "compute_s", "exchange_s", "sent_bytes", "sent_messages", "peak_gib", "kept_mib", "sampling_bytes",
    *STAGES,
)  # fmt: skip
_GIB = 2**30
_KILLED = (-9, 137)
_SAYS_WHY = re.compile(r"error|what\(\):|terminate called|(free|malloc|realloc)\(\)|corrupt", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training to measure: its graph, model and placement.

    Attributes:
        name: Name in the tables; a grid makes it from the fields that differ.
        case: The part of ``name`` that the experiment's file gives, without what a grid adds.
        graph: A dataset as ``pygdist fit --data.dataset`` takes it.
        graph_args: Arguments of the dataset.
        prepare: Options of ``pygdist partition`` for the graph, such as ``split`` or ``symmetrize``.
        model: Class path of a PyG model.
        model_args: Arguments of the model; -1 as ``in_channels`` takes the graph's number of features.
        partitioner: Name of the partitioner.
        partitioner_args: Arguments of the partitioner.
        backend: A name, or ``class_path`` and ``init_args``.
        strategy: A Lightning strategy, likewise.
        ranks: Number of processes, each on its own host.
        parts: Number of parts, for a backend that trains several on a process. Default: one per rank.
        network: Rate of the hosts' links, such as ``1gbit``; ``none`` for links without a limit; ``unshaped`` for plain
            processes on this machine. Where hosts cannot be emulated, every setting becomes ``unshaped``.
        threads: Threads of each process.
        epochs: Number of epochs that count, after ``WARM_UP`` epochs that do not.
        seeds: Seeds; each gives one training.
        test: Evaluate the model on the test nodes too, after its last epoch.
        validate_every: Epochs between validations, whose seconds do not count; 0 validates after the last epoch alone.
        one_process: Name of the setting that trains the same model on one process, for the time to its accuracy.
        timeline: Record a timeline, in extra epochs after those that count.
        max_gib: Memory that a process may allocate; a training that needs more ends with a note.
        timeout_s: Seconds that a training may take.
        fit: Further configuration of ``pygdist fit``, merged into it.
        places: Folders that ``{data}`` and the like stand for in ``graph_args``; in no table.
    """

    name: str = ""
    case: str = ""
    graph: str = "sbm"
    graph_args: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    model: str = "torch_geometric.nn.models.GCN"
    model_args: dict[str, Any] = field(default_factory=dict)
    partitioner: str = "chunk"
    partitioner_args: dict[str, Any] = field(default_factory=dict)
    backend: str | dict[str, Any] = "comm"
    strategy: str | dict[str, Any] = "graph_ddp"
    ranks: int = 1
    parts: int | None = None
    network: str = "unshaped"
    threads: int = 1
    epochs: int = 10
    seeds: tuple[int, ...] = (0, 1, 2)
    test: bool = False
    validate_every: int = 0
    one_process: str = ""
    timeline: bool = True
    max_gib: float | None = None
    timeout_s: float = 1800.0
    fit: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict, repr=False)

    def here(self, text: str) -> str:
        """Return a text with the folders of this machine filled in."""
        for name, folder in self.places.items():
            text = text.replace(f"{{{name}}}", folder)
        return text

    @property
    def num_parts(self) -> int:
        """Number of parts of the graph."""
        return self.ranks if self.parts is None else self.parts

    @property
    def store_key(self) -> str:
        """Key of the partitioned graph; settings with the same key train on the same parts."""
        graph = (self.graph, self.here(json.dumps(self.graph_args)), self.prepare)
        fields = (source_key(), graph, self.partitioner, self.partitioner_args, self.num_parts)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return re.sub(r"[^a-zA-Z0-9]+", "-", self.name).strip("-")


def settings_of(description: Mapping[str, Any], *, short: bool = False, shaped: bool | None = None) -> list[Setting]:
    """Return the settings of an experiment: ``base``, changed by each of ``settings`` and each point of ``grid``.

    Args:
        description: ``base``: fields of :class:`Setting`; ``settings``: a list of fields that differ; ``grid``: lists
            of values by field, in all combinations; ``short``: fields for the short version, which may have its own
            ``grid`` and ``settings``.
        short: Return the short version.
        shaped: True if hosts can be emulated. Default: find out.

    Raises:
        ValueError: If a field is unknown, a network is not a rate, or two names give the same file name.
    """
    field_names = {one.name for one in dataclasses.fields(Setting)}
    shaped = why_unshaped() is None if shaped is None else shaped
    shorter = dict(description.get("short", {})) if short else {}
    grid = shorter.pop("grid", description.get("grid", {}))
    changes = shorter.pop("settings", description.get("settings", [{}]))
    points: list[dict[str, Any]] = [{}]
    for name, values in grid.items():
        points = [{**point, name: value} for point in points for value in values]
    expanded = []
    for change in changes:
        for point in points:
            fields = {**description.get("base", {}), **change, **point, **shorter}
            if not shaped and "network" in fields:
                fields["network"] = "unshaped"
                point = {name: fields[name] if name == "network" else value for name, value in point.items()}
            if wrong := sorted(set(fields) - field_names):
                raise ValueError(f"unknown field {wrong[0]!r} of a setting; known are {', '.join(sorted(field_names))}")
            fields["seeds"] = tuple(fields.get("seeds", Setting.seeds))
            parts = [str(change["name"])] if "name" in change else []
            parts += [f"{name} {value}" for name, value in point.items()]
            named = {
                "name": ", ".join(parts) or fields.get("graph", Setting.graph),
                "case": str(change.get("name", "")),
            }
            setting = Setting(**{**fields, **named})
            if setting.network not in ("unshaped", "none"):
                bits_per_second(setting.network)
            if setting not in expanded:  # without links, settings that differ in the network are equal
                expanded.append(setting)
    slugs = [setting.slug for setting in expanded]
    if repeated := [setting.name for setting in expanded if not setting.slug or slugs.count(setting.slug) > 1]:
        raise ValueError(f"setting {repeated[0]!r}: its name must differ from others' by letters or digits")
    return expanded


def measure(
    settings: Sequence[Setting],
    out: Path,
    name: str,
    *,
    work: Path,
    only: Sequence[str] = (),
    resume: bool = False,
    console: Progress,
) -> list[dict[str, Any]]:
    """Train every setting with each of its seeds, in turns, and write the tables.

    Args:
        settings: Settings to compare.
        out: Folder of the results.
        name: Name of the experiment and of its files.
        work: Folder for parts and checkpoints; a later run reuses the parts. It may be deleted afterwards.
        only: Names of the settings to train; earlier rows of the others stay in the tables.
        resume: Keep trainings of the same setting and commit that are in ``NAME.runs.jsonl`` already.
        console: Shows the progress.

    Returns:
        The rows of ``NAME.csv``.
    """
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    lines = out / f"{name}.runs.jsonl"
    chosen = [setting for setting in settings if not only or setting.name in only]
    runs = _kept(lines, [setting for setting in settings if setting not in chosen])
    runs += _kept(lines, chosen, commit=provenance(0)["commit"]) if resume else []
    _replace(lines, "".join(json.dumps(run) + "\n" for run in runs))
    traces = out / f"{name}.traces"
    for trace in traces.glob("*.json"):
        if f"{traces.name}/{trace.name}" not in {run["timeline"] for run in runs}:
            trace.unlink()
    done = {(run["setting"], run["seed"]) for run in runs}
    turns = [turn for turn in _turns(chosen) if (turn[0].name, turn[1]) not in done]
    task = console.add_task(escape(name), total=len(turns))
    for setting, seed in turns:
        console.update(task, description=escape(f"{name}: {setting.name}, seed {seed}"))
        run = train(setting, seed, work=work, traces=traces)
        runs.append(run)
        with lines.open("a") as file:
            file.write(json.dumps(run) + "\n")
        write_tables(settings, runs, out, name)
        console.advance(task)
    return write_tables(settings, runs, out, name)


def _turns(settings: Sequence[Setting]) -> list[tuple[Setting, int]]:
    """Return (setting, seed) in the order to train: each setting once per round, each round another one first."""
    turns = []
    for turn in range(max(len(setting.seeds) for setting in settings)):
        first = turn % len(settings)
        order = [*settings[first:], *settings[:first]]
        turns += [(setting, setting.seeds[turn]) for setting in order if turn < len(setting.seeds)]
    return turns


def _kept(lines: Path, settings: Sequence[Setting], *, commit: str = "") -> list[dict[str, Any]]:
    """Return earlier trainings of these settings that ended well; only those of ``commit``, if it is given.

    Raises:
        ValueError: If the commit does not identify the code: there are uncommitted changes, or there is no git.
    """
    if commit.endswith("+") or commit == "unknown":
        raise ValueError(
            f"--resume: commit {commit} does not identify the code; commit your changes, or run without --resume"
        )
    wanted = {setting.name: _fields(setting) for setting in settings}
    runs = []
    for line in lines.read_text().splitlines() if lines.is_file() else []:
        try:
            run = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        same = run["fields"] == wanted.get(run["setting"]) and commit in ("", run["commit"])
        if same and not run["note"]:
            runs.append(run)
    return runs


def _fields(setting: Setting) -> dict[str, Any]:
    fields = json.loads(json.dumps(dataclasses.asdict(setting)))  # as they come back from a file
    del fields["places"]
    return fields


def train(setting: Setting, seed: int, *, work: Path, traces: Path) -> dict[str, Any]:
    """Train once in separate processes. Return the figures, or a note in their place if the training failed."""
    run: dict[str, Any] = {
        "setting": setting.name, "seed": seed, "fields": _fields(setting), "note": "", "network": setting.network,
        "link_bytes": None, "epochs": [], "scores": [], "val_acc": None, "test_acc": None, "gradient_bytes": 0.0,
        "expected_epoch_s": None, "planning_s": None, "part_edges": [], "timeline": "", "partition_s": None,
        **{figure: [] for figure in _OF_TIMELINE}, **provenance(setting.threads),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=work) as name:
        try:
            _train(run, setting, seed, work, Path(name))
            if setting.timeline and (Path(name) / "timeline.json").is_file():  # missing if `fit` has other callbacks
                traces.mkdir(parents=True, exist_ok=True)
                shutil.move(Path(name) / "timeline.json", traces / f"{setting.slug}.json")
                run["timeline"] = f"{traces.name}/{setting.slug}.json"
        except (OSError, RuntimeError, ValueError) as error:  # TimeoutError is an OSError
            run |= {"note": str(error) or type(error).__name__, "epochs": []}
    return run


def _train(run: dict[str, Any], setting: Setting, seed: int, work: Path, folder: Path) -> None:
    """Train, and put the figures into ``run``."""
    store = _store(setting, work)
    meta = json.loads((store / "meta.json").read_text())
    run |= {key: meta[key] for key in ("num_nodes", "num_edges")}
    if _seconds_of(store).is_file():  # missing in a work folder of an older version
        run["partition_s"] = float(_seconds_of(store).read_text())
    run["part_edges"] = [part["num_edges"] for part in meta["parts"]]
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(configuration(setting, seed, store, folder)))
    shaped = setting.network != "unshaped"
    rate = setting.network if shaped and setting.network != "none" else None
    with Cluster(setting.ranks, rate=rate, shaped=shaped) as cluster:
        run["network"] = cluster.described
        start = time.perf_counter()
        _pygdist(cluster, setting, "fit", config)
        run["seconds"] = round(time.perf_counter() - start, 2)
        if cluster.shaped:
            run["link_bytes"] = sum(link.sent for link in cluster.traffic())
        if setting.test:
            _pygdist(cluster, setting, "test", config, f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}")
    _read(run, folder)


def _store(setting: Setting, work: Path) -> Path:
    """Return the folder of the partitioned graph, written once for all settings that train on it."""
    folder = work / f"parts-{setting.store_key}"
    if (folder / "meta.json").is_file():  # it appears when it is complete
        return folder
    command = [sys.executable, "-m", "pygdist.cli", "partition", f"--dataset={setting.graph}", f"--out={folder}"]
    command += [f"--method={setting.partitioner}", f"--parts={setting.num_parts}"]
    for name, value in (("dataset_args", setting.graph_args), ("method_args", setting.partitioner_args)):
        command += [f"--{name}={setting.here(json.dumps(value))}"] if value else []
    for name, value in setting.prepare.items():
        command.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=setting.timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"partition: did not end within {setting.timeout_s} s") from error
    if done.returncode:
        raise RuntimeError(f"partition: {_reason(done.returncode, done.stderr)}")
    _seconds_of(folder).write_text(f"{time.perf_counter() - start:.2f}")
    return folder


def _seconds_of(store: Path) -> Path:
    """Return the file with the seconds in which a store was made."""
    return store.with_name(f"{store.name}.seconds")


def configuration(setting: Setting, seed: int, store: Path, folder: Path) -> dict[str, Any]:
    """Return the configuration for ``pygdist fit --config``."""
    counted = WARM_UP + setting.epochs
    epochs = counted + (TRACED if setting.timeline else 0)
    timeline = {"path": str(folder / "timeline.json"), "first_epoch": counted, "epochs": TRACED}
    made = {
        "seed_everything": seed,
        "model": {
            "model": {"class_path": setting.model, "init_args": setting.model_args},
            "backend": setting.backend,
        },
        "data": {"store": str(store)},
        "exchange": {"ranks": str(folder / "ranks.csv")},
        "checkpoint": {"dirpath": str(folder / "checkpoints")},
        "trainer": {
            "accelerator": "cpu",
            "strategy": setting.strategy,
            "devices": 1,
            "num_nodes": setting.ranks,
            "max_epochs": epochs,
            "check_val_every_n_epoch": setting.validate_every or epochs,
            "enable_checkpointing": setting.test,
            "num_sanity_val_steps": 0,
            "default_root_dir": str(folder / "logs"),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    if setting.timeline:
        made["trainer"]["callbacks"] = [{"class_path": "pygdist.lightning.Timeline", "init_args": timeline}]
    return _merged(made, setting.fit)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _pygdist(cluster: Cluster, setting: Setting, command: str, config: Path, *more: str) -> None:
    """Run ``pygdist fit`` or ``pygdist test`` on all hosts.

    Raises:
        RuntimeError: If it fails on a host; says which one and why.
        TimeoutError: If it takes too long.
    """
    words = [sys.executable, "-m", "pygdist.cli", command, "--config", str(config), *more]
    if setting.max_gib is not None:  # then the process itself fails, instead of another one being killed
        words = ["sh", "-c", f'ulimit -d {int(setting.max_gib * _GIB) // 1024}; exec "$@"', "sh", *words]
    # all processes share this machine, so their number does not say how many threads each may use
    outcomes = cluster.run(words, threads=setting.threads, timeout=setting.timeout_s)
    failed = [one for one in outcomes if one.code]
    if failed:  # the other hosts lose a rank, or wait for it until they are killed
        first = min(failed, key=lambda one: (one.waited, one.code not in _KILLED, "LostRankError" in one.err, one.host))
        raise RuntimeError(f"{command}, rank {first.host}: {_reason(first.code, first.err)}")


def _reason(code: int, said: str) -> str:
    """Return the reason why a process failed, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if re.search(r"allocate memory|MemoryError|bad_alloc|out of memory", said):
        return "out of memory"
    if code in _KILLED:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    # C++ and glibc do not write "error" before they abort
    reason = next((line for line in reversed(lines) if _SAYS_WHY.search(line)), lines[-1] if lines else "")
    return f"exit code {code}: {reason[:300]}"


def _read(run: dict[str, Any], folder: Path) -> None:
    """Read the figures from the files of a training into ``run``."""
    with (folder / "ranks.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    counted = WARM_UP + run["fields"]["epochs"]
    run["epochs"] = [row for row in rows if row["epoch"] < counted]
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for figure in ("val_acc", "test_acc", "gradient_bytes", "expected_epoch_s", "planning_s"):
                    if value := row.get(figure) or row.get(figure.replace("_acc", "_f1")):
                        run[figure] = float(value)
                        if figure == "val_acc":
                            run["scores"].append([int(row["epoch"]), float(value)])
    if (folder / "timeline.json").is_file():
        trace = json.loads((folder / "timeline.json").read_text())
        busy = {figure: _busy(trace, kinds) for figure, kinds in _OF_TIMELINE.items()}
        run |= busy if any(map(any, busy["aggregate_s"])) else {}


def _busy(trace: Mapping[str, Any], kinds: Sequence[str]) -> list[list[float]]:
    """Return processor seconds of some activities by rank, then recorded epoch."""
    by_rank: dict[int, list[float]] = {}
    epoch_of: dict[int, str] = {}
    for event in trace["traceEvents"]:
        rank = event["pid"]
        if event["name"] == "compute" and epoch_of.get(rank) != event["args"]["of"]:  # the first event of an epoch
            epoch_of[rank] = event["args"]["of"]
            by_rank.setdefault(rank, []).append(0.0)
        elif event["name"] in kinds:
            by_rank[rank][-1] += event["tdur"] / 1e6  # not "dur": ranks share cores, and wait for them
    return [by_rank[rank] for rank in sorted(by_rank)]


def write_tables(
    settings: Sequence[Setting], runs: Sequence[Mapping[str, Any]], out: Path, name: str
) -> list[dict[str, Any]]:
    """Write ``NAME.csv`` and ``NAME.ranks.csv`` of the trainings so far; return the rows of ``NAME.csv``."""
    rows = []
    for setting in settings:
        mine, alone = ([run for run in runs if run["setting"] == name] for name in (setting.name, setting.one_process))
        if mine:
            rows.append(row_of(setting, mine, alone))
    _write(out / f"{name}.csv", list(rows[0]) if rows else ["setting"], rows)
    epoch_rows = [
        {
            "setting": run["setting"],
            "seed": run["seed"],
            **{key: int(epoch[key]) for key in ("epoch", "rank")},
            **{figure: epoch.get(figure) for figure in RANK_FIGURES},
        }
        for run in runs
        for epoch in run["epochs"]
        if epoch["epoch"] >= WARM_UP
    ]
    _write(out / f"{name}.ranks.csv", ["setting", "seed", "epoch", "rank", *RANK_FIGURES], epoch_rows)
    return rows


def row_of(
    setting: Setting, runs: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return one setting's row: over all epochs of all seeds, medians of the largest and smallest over ranks.

    ``alone`` are trainings on one process, for the time to their accuracy.
    """
    good = [run for run in runs if not run["note"]]
    epochs = [ranks for run in good for ranks in _by_epoch(run["epochs"])]
    counted = [ranks for ranks in epochs if ranks[0]["epoch"] >= WARM_UP]
    last = (good or runs)[-1]
    row: dict[str, Any] = {
        "setting": setting.name, "case": setting.case, "graph": setting.graph, "graph_args": _text(setting.graph_args),
        "nodes": last.get("num_nodes"), "edges": last.get("num_edges"), "model": setting.model,
        "model_args": _text(setting.model_args), "partitioner": setting.partitioner,
        "partitioner_args": _text(setting.partitioner_args), "backend": _text(setting.backend),
        "strategy": setting.strategy, "ranks": setting.ranks, "network": last["network"],
        "prepare": _text(setting.prepare), "fit": _text(setting.fit), "max_gib": setting.max_gib or "",
        "seeds": " ".join(str(run["seed"]) for run in good), "epochs": len(counted),
    }  # fmt: skip
    seconds = [max(rank["epoch_s"] for rank in ranks) for ranks in counted]
    row |= {
        "epoch_s": _of(statistics.median, seconds), "epoch_s_min": _of(min, seconds),
        "epoch_s_max": _of(max, seconds),
        "first_epoch_s": _of(statistics.median, [max(rank["epoch_s"] for rank in ranks) for ranks in epochs
                                                 if ranks[0]["epoch"] == 0]),
    }  # fmt: skip
    # later seeds reuse the plan of the first, so only the first one plans
    for figure, over_seeds in (("expected_epoch_s", statistics.median), ("planning_s", max)):
        row[figure] = _of(over_seeds, [run[figure] for run in good if run.get(figure) is not None])
    for figure in ("compute_s", "exchange_s", "sent_bytes"):
        for best, which in ((max, "max"), (min, "min")):
            values = [best(rank[figure] for rank in ranks) for ranks in counted]
            row[f"{figure}_{which}"] = _of(statistics.median, values)
    for figure, (best, which) in itertools.product(_OF_TIMELINE, ((max, "max"), (min, "min"))):
        # medians over epochs first: the spread of ranks counts, not that of epochs
        usual = [best(map(statistics.median, run[figure])) for run in good if run.get(figure)]
        row[f"{figure}_{which}"] = _of(statistics.median, usual)
    for best, which in ((max, "max"), (min, "min")):
        row[f"part_edges_{which}"] = best(last["part_edges"]) if last.get("part_edges") else None
    for figure in ("sent_bytes", "sent_messages", "sampling_bytes"):
        totals = [sum(rank.get(figure, 0) for rank in ranks) for ranks in counted]
        row[figure] = _of(statistics.median, totals)
    for figure in STAGES:
        row[f"{figure}_max"] = _of(statistics.median, [max(rank.get(figure, 0) for rank in ranks) for ranks in counted])
    peaks = [[max(mine) for mine in zip(*_columns(run, "peak_gib"), strict=True)] for run in good]
    row |= {
        "gradient_bytes": _of(statistics.median, [run["gradient_bytes"] * setting.ranks for run in good]),
        "link_bytes_run": _of(statistics.median, [run["link_bytes"] for run in good if run["link_bytes"] is not None]),
        "peak_gib_max": _of(max, [max(ranks) for ranks in peaks]),
        "peak_gib_total": _of(max, [sum(ranks) for ranks in peaks]),
        "partition_s": last.get("partition_s"),
        "seconds_run": _of(statistics.median, [run["seconds"] for run in good]),
    }  # fmt: skip
    for score in ("val_acc", "test_acc"):
        values = [run[score] for run in good if run[score] is not None]
        row |= {
            score: _of(statistics.fmean, values),
            f"{score}_min": _of(min, values),
            f"{score}_max": _of(max, values),
        }
    row |= to_accuracy(good, [run for run in alone if not run["note"]])
    failed = "; ".join(f"seed {run['seed']}: {run['note']}" for run in runs if run["note"])
    row |= {"timeline": next((run["timeline"] for run in reversed(good)), ""), "failed": failed}
    row["note"] = "" if good else failed  # a row with a note has no figures
    return row | {key: last[key] for key in provenance(setting.threads)}


def _by_epoch(lines: Iterable[Mapping[str, float]]) -> list[list[Mapping[str, float]]]:
    epochs: dict[float, list[Mapping[str, float]]] = {}
    for line in lines:
        epochs.setdefault(line["epoch"], []).append(line)
    return list(epochs.values())


def _columns(run: Mapping[str, Any], figure: str) -> list[list[float]]:
    """Return a figure by epoch, then rank."""
    return [[rank[figure] for rank in ranks] for ranks in _by_epoch(run["epochs"])]


def _of(function: Any, values: Sequence[float]) -> float | None:
    return round(float(function(values)), 6) if values else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""


def _write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    _replace(path, text.getvalue())


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new text, never a part."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8", newline="")
    temporary.replace(path)
