"""Malformed inputs, drawn from a seed: options, YAML files, stores, graphs. Each must end in one line and exit code 2.

``python -m experiments.reliability.inputs`` runs the real command on every input, in a process of its own with limits
of time and memory, and prints a table: inputs by kind, and how many ended well. ``--show`` prints every line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RUN = """\
trainer: {accelerator: cpu, max_epochs: 1, logger: false, enable_checkpointing: false, enable_progress_bar: false}
model:
  model:
    class_path: torch_geometric.nn.GCN
    init_args: {in_channels: -1, hidden_channels: 8, num_layers: 2, out_channels: 4}
data:
  dataset: graph
  cache_dir: cache
"""
LIMIT_S = 40.0
LIMIT_BYTES = 12 << 30  # of address space; importing torch takes 2 GiB of it


@dataclass(frozen=True)
class Case:
    """A command line on a folder that ``prepare`` fills; ``words``: the message must contain one of them."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda folder: None


# --- options ----------------------------------------------------------------------------------------------------------

FIT = ("fit", "--config=run.yaml")
PARTITION = ("partition", "--dataset=graph", "--out=out")
FILES = ("partition", "--input=edges.txt", "--out=out")
GENERATE = ("generate", "reddit-like", "--scale=0.001", "--out=out")
VERIFY = ("verify", "--config=run.yaml", "--world-size=1")

WORDS = ["two", "nan", "inf", "-.inf", "1e400", "[1]", "{a: 1}", "[[[]]]", "{[}", "\u0663\u066b"]
HUGE = [str(10**30), str(10**13), str(-(10**30)), "9" * 5000]
#: Values that no option of a type takes. Quoted text stays text.
VALUES: dict[str, list[str]] = {
    "count": [*WORDS, *HUGE, "1.5", "-1", "0", "-7"],
    "natural": [*WORDS, *HUGE, "1.5", "-1", "-7"],
    "integer": [*WORDS, "1.5", "9" * 5000],
    "positive": ["fast", "nan", ".nan", "inf", "-.inf", "1e400", "[1]", "{a: 1}", "-1", "-0.5", "0"],
    "rate": ["fast", "nan", ".nan", "inf", "-.inf", "1e400", "[1]", "{a: 1}", "-1", "-0.5"],
    "share": ["half", ".nan", "inf", "[0.5]", "{a: 1}", "-0.5", "1.5", "7"],
    "flag": ["2", "maybe", "[true]", "{a: true}", "nan", "1.0", "-1"],
    "mapping": ["[1, 2]", "3", "text", "[{}]", "true", ".nan"],
    "shares": ["[0.5]", "[a, b, c]", "{a: 1}", "3", "[0.5, 0.5, 0.5]", "[-1, 1, 1]", "[.nan, .nan, .nan]"],
    "two shares": ["[0.5]", "[a, b]", "{a: 1}", "[0.9, 0.9]", "[-1, 0.5]", "[.nan, 0.1]", "[0.1, 0.1, 0.1]", "text"],
    "numbers": ["3", "{a: 1}", "[a]", "[-1, 1, 1, 1]", "[.nan, 1, 1, 1]", "[.inf, 1, 1, 1]", "[1]", "[[1], 1, 1, 1]"],
    "choice": ["other", "[nodes]", "{a: 1}", "3", "nan", ""],
    "class": ["nosuch.Class", "torch.nn", "[1]", "{class_path: 3}", "{class_path: os.system}", "{init_args: {}}", "3",
              "{class_path: [a]}", "..", "os.", ".os", "torch.optim.SGD", "builtins.print", "a" * 5000],
    "path": ["", "no/such/place", "run.yaml/inside", "x" * 5000],
}  # fmt: skip

#: Options by the command line that they are added to.
OPTIONS: dict[tuple[str, ...], dict[str, str]] = {
    FIT: {
        "trainer.devices": "count", "trainer.num_nodes": "count", "trainer.max_epochs": "below minus one",
        "trainer.min_epochs": "natural", "trainer.max_steps": "below minus one", "trainer.max_time": "path",
        "trainer.limit_train_batches": "rate", "trainer.limit_val_batches": "rate", "trainer.overfit_batches": "rate",
        "trainer.check_val_every_n_epoch": "count", "trainer.num_sanity_val_steps": "below minus one",
        "trainer.log_every_n_steps": "natural", "trainer.accumulate_grad_batches": "count",
        "trainer.gradient_clip_val": "rate", "trainer.gradient_clip_algorithm": "choice", "trainer.precision": "choice",
        "trainer.deterministic": "choice", "trainer.accelerator": "choice", "trainer.strategy": "choice",
        "trainer.callbacks": "class", "trainer.logger": "class", "trainer.plugins": "choice",
        "trainer.profiler": "choice", "trainer.val_check_interval": "rate", "trainer.fast_dev_run": "natural",
        "trainer.detect_anomaly": "flag", "trainer.reload_dataloaders_every_n_epochs": "natural",
        "seed_everything": "natural", "model.lr": "rate", "model.weight_decay": "rate", "model.check": "flag",
        "model.exact_evaluation": "flag", "model.class_weights": "numbers", "model.backend": "class",
        "model.savings.first_hop": "flag", "model.savings.first_hop_mib": "rate", "model.savings.block_mib": "positive",
        "model.model": "class", "model.model.init_args.hidden_channels": "count",
        "model.model.init_args.num_layers": "count", "model.model.init_args.out_channels": "count",
        "model.model.init_args.dropout": "share", "model.model.init_args.act": "class",
        "model.model.init_args.norm": "class", "model.model.init_args.jk": "choice",
        "model.model.init_args.act_kwargs": "mapping",
        "data.dataset": "class", "data.dataset_args": "mapping", "data.partitioner": "class",
        "data.partitioner_args": "mapping", "data.num_parts": "count", "data.split": "shares",
        "data.edge_split": "two shares", "data.num_classes": "count", "data.batches": "class",
        "data.batch_seed": "integer", "data.split_seed": "natural", "data.num_workers": "natural",
        "data.symmetrize": "flag", "data.store": "path", "data.memory_gib": "rate", "data.reserve": "share",
        "optimizer": "class", "lr_scheduler": "class", "optimizer.lr": "rate", "task": "choice", "config": "path",
        "ckpt_path": "path", "checkpoint.save_top_k": "below minus one", "checkpoint.mode": "choice",
        "checkpoint.every_n_epochs": "natural", "predictions.output": "choice", "model": "mapping", "data": "mapping",
        "trainer": "mapping", "trainer.strategy.timeout_s": "positive", "trainer.strategy.lost_after_s": "positive",
        "trainer.strategy.warn_after_s": "positive",
    },
    (*FIT, "--task=links", "--data.edge_split=[0.1,0.1]"): {
        "model.train_share": "share", "model.hits_at": "count", "model.seed": "integer", "model.decoder": "class",
    },
    (*FIT, "--data.dataset=sbm", "--data.dataset_args={num_classes: 4}"): {
        "data.dataset_args.num_nodes": "count", "data.dataset_args.num_classes": "count",
        "data.dataset_args.avg_degree": "rate", "data.dataset_args.num_features": "count",
        "data.dataset_args.seed": "natural",
    },
    (*FIT, "--model.backend=replica", "--data.batches=pygdist.sampler.NeighborBatches"): {
        "data.batches.init_args.batch_size": "count", "data.batches.init_args.num_neighbors": "numbers",
    },
    (*FIT, "--model.backend=replica", "--data.num_parts=auto"): {
        "data.memory_gib": "positive", "data.reserve": "share",
    },
    PARTITION: {
        "dataset": "class", "dataset_args": "mapping", "parts": "count", "method": "class", "method_args": "mapping",
        "hops": "count", "placement": "choice", "split": "shares", "split_seed": "natural", "num_classes": "count",
        "symmetrize": "flag", "overwrite": "flag", "remove_self_loops": "flag",
    },
    (*PARTITION, "--parts=auto", "--device_memory=1"): {
        "devices": "count", "device_memory": "positive", "reserve": "share",
    },
    FILES: {
        "input": "path", "columns": "mapping", "string_ids": "flag", "first_id": "natural", "features": "path",
        "labels": "path", "names": "path", "num_nodes": "count", "relabel": "flag",
    },
    GENERATE: {
        "scale": "positive", "seed": "natural", "features": "flag", "overwrite": "flag",
    },
    VERIFY: {
        "world-size": "count", "reference": "choice", "tolerance": "rate", "model.model": "class", "data.store": "path",
        "trainer.devices": "count",
    },
    ("report", "results"): {"out": "path"},
    ("test", "--config=run.yaml"): {"ckpt_path": "path", "trainer.limit_test_batches": "rate"},
    ("predict", "--config=run.yaml"): {"predictions.path": "path", "trainer.limit_predict_batches": "rate"},
    ("validate", "--config=run.yaml"): {"trainer.limit_val_batches": "rate", "model.lr": "rate"},
}  # fmt: skip
VALUES["below minus one"] = [*WORDS, *HUGE[2:], "1.5", "-2", "-7"]

#: Values of the tables above that an option takes nevertheless.
TAKEN = {
    ("out", "no/such/place"), ("predictions.path", "no/such/place"),
    ("trainer.devices", "[1]"), ("trainer.max_time", ""), ("trainer.fast_dev_run", str(10**30)),
    ("trainer.limit_train_batches", "inf"),
    ("checkpoint.every_n_epochs", str(10**30)), ("trainer.min_epochs", str(10**30)),
    ("trainer.check_val_every_n_epoch", str(10**30)), ("trainer.log_every_n_steps", str(10**30)),
    ("trainer.reload_dataloaders_every_n_epochs", str(10**30)), ("columns", "text"), ("first_id", "0"),
    ("data.symmetrize", "x"), ("optimizer", "torch.optim.SGD"), ("trainer.num_sanity_val_steps", "inf"),
    ("trainer.max_time", "x" * 0), ("data.dataset_args.avg_degree", "0"), ("tolerance", "inf"),
    ("seed", str(10**30)), ("model.hits_at", str(10**30)),
    ("model.hits_at", str(10**13)), ("model.savings.block_mib", "0"),
    ("data.batches.init_args.batch_size", str(10**30)), ("data.batches.init_args.batch_size", str(10**13)),
    ("data.num_classes", str(10**30)),
    ("data.batches.init_args.num_neighbors", "[1]"),
}  # fmt: skip


#: Options for which a huge number means "never" or "all".
HARMLESS = {
    "trainer.min_epochs", "trainer.check_val_every_n_epoch", "trainer.log_every_n_steps", "trainer.fast_dev_run",
    "trainer.reload_dataloaders_every_n_epochs", "checkpoint.every_n_epochs", "data.split_seed", "split_seed", "seed",
    "data.dataset_args.seed", "data.num_classes", "num_classes", "seed_everything",
}  # fmt: skip


def option_cases(rng: random.Random, most: int) -> Iterator[Case]:
    """Yield wrong values of options: each option at least once, then more until there are ``most``."""
    pairs = [
        (command, option, kind, value)
        for command, options in OPTIONS.items()
        for option, kind in options.items()
        for value in VALUES[kind]
        if (option, value) not in TAKEN and not (value == str(10**13) and option in HARMLESS)
    ]
    rng.shuffle(pairs)
    seen: set[tuple[tuple[str, ...], str]] = set()
    pairs.sort(key=lambda pair: (pair[:2] in seen, seen.add(pair[:2]))[0])  # stable: the first of each option leads
    for command, option, kind, value in pairs[:most]:
        arguments = (*command, f"--{option}={value}")
        words = (
            option.split(".")[-1],
            option,
            *option.split(".")[-3:-1],
            value[:40] if len(value) > 1 else f"'{value}'",
        )
        words = words if value else ()  # an empty path is the current folder
        yield Case(f"option ({kind})", f"{' '.join(arguments)[:120]}", arguments, words)


def contradictions() -> Iterator[Case]:
    """Yield options that do not go together, unknown options, and commands without what they need."""
    lines: dict[str, tuple[str, ...]] = {
        "edge_split for nodes": (*FIT, "--data.edge_split=[0.1,0.1]"),
        "class_weights for links": (*FIT, "--task=links", "--data.edge_split=[0.1,0.1]", "--model.class_weights=[1]"),
        "store and split": (*FIT, "--data.store=store", "--data.split=[0.5,0.2,0.2]"),
        "store and symmetrize": (*FIT, "--data.store=store", "--data.symmetrize=true"),
        "store and duplicates": (*FIT, "--data.store=store", "--data.remove_duplicates=true"),
        "store and self-loops": (*FIT, "--data.store=store", "--data.remove_self_loops=true"),
        "store and num_classes": (*FIT, "--data.store=store", "--data.num_classes=4"),
        "store and auto": (*FIT, "--data.store=store", "--data.num_parts=auto"),
        "memory without auto": (*FIT, "--data.memory_gib=1"),
        "reserve without auto": (*FIT, "--data.reserve=0.5"),
        "workers without batches": (*FIT, "--data.num_workers=1"),
        "batches of comm": (*FIT, "--data.batches=pygdist.sampler.NeighborBatches"),
        "files of a dataset": (*PARTITION, "--features=x.npy"),
        "reserve of a number": (*PARTITION, "--reserve=0.5"),
        "hops of nodes": (*PARTITION, "--placement=nodes", "--hops=2"),
        "relabel and num_nodes": (*FILES, "--relabel=true", "--num_nodes=120"),
        "names and no names": (*FILES, "--names=run.yaml", "--string_ids=false"),
        "unknown option": (*FIT, "--trainer.max_epocs=3"),
        "unknown option of links": (*FIT, "--model.hits_at=3"),
        "unknown nested option": (*FIT, "--model.savings.first=1"),
        "unknown nested init_args": (*FIT, "--model.model.init_args.hidden.size=3"),
        "unknown command": ("fiit",),
        "empty command": ("",),
        "stray word": (*FIT, "stray"),
        "stray dash": (*FIT, "-"),
        "no model": ("fit",),
        "no checkpoint": ("export",),
        "format": ("export", "no.ckpt", "model.bin"),
        "unknown generator": ("generate", "nosuch-like"),
        "no results": ("report", "nowhere"),
        "clipping without value": (*FIT, "--trainer.gradient_clip_algorithm=norm"),
        "min over max epochs": (*FIT, "--trainer.min_epochs=5"),
    }
    for name, arguments in lines.items():
        yield Case("contradiction", name, arguments)


# --- files of YAML ----------------------------------------------------------------------------------------------------


def yaml_texts() -> dict[str, bytes]:
    """Return contents of configuration files by name."""
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    maps = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}\n" for i in range(1, 12)
    )
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
    )
    inside = bomb.replace("\n", "\n  ").join(["data:\n  ", "\n"])
    texts: dict[str, str] = {
        "alias bomb": bomb,
        "alias bomb of mappings": maps,
        "alias bomb of merges": merges,
        "alias bomb inside data": inside,
        "alias bomb as dataset_args": "data:\n  dataset_args:\n    " + bomb.replace("\n", "\n    "),
        "alias of itself": "data: &a\n  dataset_args: *a\n",
        "list of itself": "data: &a [*a]\n",
        "merge of itself": "data: &a {<<: *a}\n",
        "undefined alias": "data: *nothing\n",
        "many aliases": "x: &x 1\ny: [" + ",".join(["*x"] * 200_000) + "]\n",
        "deep lists": "data: " + "[" * 5000 + "]" * 5000,
        "deeper lists": "data: " + "[" * 200_000,
        "deep mappings": "data: " + "{a: " * 5000 + "1" + "}" * 5000,
        "deep blocks": "".join(f"{' ' * i}a:\n" for i in range(1000)),
        "deep dashes": "- " * 5000 + "x\n",
        "deep arguments": "data: {dataset_args: " + "{a: " * 300 + "1" + "}" * 300 + "}\n",
        "tabs": "data:\n\tdataset: graph\n",
        "duplicate keys": "model: {lr: 0.1, lr: 0.2}\n",
        "duplicate sections": "data: {dataset: a}\ndata: {dataset: b}\n",
        "unknown tag": "data: !unknown {dataset: sbm}\n",
        "python name": "data: {dataset: !!python/name:os.system ''}\n",
        "python apply": "data: {dataset: !!python/object/apply:os.system ['touch OWNED']}\n",
        "python new": "data: !!python/object/new:os.system [touch OWNED]\n",
        "python module": "data: !!python/module:os ''\n",
        "binary tag": "data: {dataset: !!binary aGVsbG8=}\n",
        "set tag": "data: !!set {a, b}\n",
        "int tag": "model: {lr: !!int fast}\n",
        "two documents": "data: {}\n---\ndata: {}\n",
        "list at the top": "- data\n- model\n",
        "text at the top": "just words\n",
        "number at the top": "3\n",
        "list for a mapping": "data: [dataset, sbm]\n",
        "mapping for a list": "model: {class_weights: {a: 1}}\n",
        "mapping for a number": "model: {lr: {a: 1}}\n",
        "list for a number": "trainer: {max_epochs: [3]}\n",
        "number for a section": "trainer: 3\n",
        "text for a section": "model: GCN\n",
        "null for a model": "model: {model: null}\n",
        "unknown section": "modle: {lr: 0.1}\n",
        "unknown key": "model: {learning_rate: 0.1}\n",
        "number as a key": "model: {3: 0.1}\n",
        "null as a key": "model: {null: 0.1}\n",
        "list as a key": "model: {[a]: 0.1}\n",
        "mapping as a key": "? {a: 1}\n: 2\n",
        "true as a key": "true: 3\n",
        "empty key": "'': 3\n",
        "dots in a key": "model..lr: 3\n",
        "dotted key": "model.lr.x: 3\n",
        "unclosed quote": "data: {dataset: 'sbm}\n",
        "unclosed bracket": "data: [1, 2\nmodel: 3\n",
        "percent": "%YAML 9.9\n---\na: 1\n",
        "control characters": "data: {dataset: \x01\x02}\n",
        "nul": "data: {dataset: \0}\n",
        "huge number": "trainer: {max_epochs: " + "9" * 10_000 + "}\n",
        "huge text": "data: {dataset: " + "x" * 3_000_000 + "}\n",
        "many keys": "".join(f"k{i}: 1\n" for i in range(200_000)),
        "nan": "model: {lr: .nan}\n",
        "infinite": "model: {lr: .inf}\n",
        "date": "trainer: {max_epochs: 2020-01-01}\n",
        "zero layers": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {num_layers: 0}}}\n",
        "no width": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {hidden_channels: 0}}}\n",
        "negative width": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {hidden_channels: -3}}}\n",
        "class path of a list": "model: {model: {class_path: [a], init_args: {}}}\n",
        "init_args of a list": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: [1]}}\n",
        "callbacks of text": "trainer: {callbacks: words}\n",
        "callbacks of a mapping": "trainer: {callbacks: {a: 1}}\n",
        "logger of a function": "trainer: {logger: {class_path: os.system, init_args: {command: touch OWNED}}}\n",
        "callback of a function": "trainer: {callbacks: [{class_path: os.system, init_args: {command: touch OWNED}}]}",
    }  # fmt: skip
    binary = {
        "not UTF-8": b"data: {dataset: \xff\xfe\xfa}\n",
        "latin 1": "data: {dataset: gr\u00e4ph}\n".encode("latin-1"),
        "half a character": b"data: {dataset: \xe2\x82}\n",
        "random bytes": random.Random(3).randbytes(4000),
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(500),
        "an archive": b"PK\x03\x04" + random.Random(4).randbytes(2000),
        "zeros": bytes(5000),
        "UTF-16 cut": "data: {dataset: sbm}".encode("utf-16")[:-1],
    }
    return {**{name: text.encode() for name, text in texts.items()}, **binary}


def yaml_cases() -> Iterator[Case]:
    """Yield configuration files after a good one, configurations inside options, and descriptions of results."""

    def writes(name: str, text: bytes) -> Callable[[Path], None]:
        return lambda folder: (folder / name).write_bytes(text) and None  # type: ignore[func-returns-value]

    for name, text in yaml_texts().items():
        yield Case("YAML file", name, (*FIT, "--config=bad.yaml"), prepare=writes("bad.yaml", text))
    bombs = [
        name for name in yaml_texts() if name.startswith(("alias", "deep", "python", "many aliases", "list of it"))
    ]
    for name in bombs:
        text = yaml_texts()[name]
        yield Case("YAML section", name, (*FIT, "--data=bad.yaml"), prepare=writes("bad.yaml", text))
        if len(text) < 100_000:
            inline = text.decode()
            yield Case("YAML option", f"data.dataset_args: {name}", (*FIT, f"--data.dataset_args={inline}"))
            yield Case("YAML option", f"dataset_args: {name}", (*PARTITION, f"--dataset_args={inline}"))
    for name, text in yaml_texts().items():
        if name in ("date", "null for a model", "two documents", "huge number", "percent"):
            continue
        yield Case("description", name, ("report", "results"), prepare=lambda folder, text=text: _results(folder, text))


def _results(folder: Path, text: bytes) -> None:
    (folder / "results" / "a.yaml").write_bytes(text)


# --- stores -----------------------------------------------------------------------------------------------------------

HUGE_NUMBER = 10**30
#: Values that replace an entry of ``meta.json``, whatever it holds.
WRONG: list[Any] = ["text", [1], {"a": 1}, None, -1, 1.5, float("nan"), float("inf"), HUGE_NUMBER, True, "9" * 10_000]
#: Entries on which a run relies.
ENTRIES = (
    "num_parts", "num_nodes", "num_classes", "multi_label", "counts", "counts.train_mask", "dtypes", "placement",
    "num_hops", "parts", "parts.0", "parts.0.files", "parts.0.num_owned", "parts.0.counts", "parts.0.counts.train_mask",
    "parts.0.files.x", "parts.0.files.x.bytes", "parts.0.files.x.crc32", "parts.0.files.x.dtype",
    "parts.0.files.x.shape", "parts.0.files.indptr", "num_edges", "num_features", "preprocessing", "method",
)  # fmt: skip
FITTING = {"preprocessing": [[1], None], "method": ["text"], "num_parts": [True], "multi_label": [True]}
NAMES = ["../x", "/etc/passwd", "..", "", "a/b", "x\0y", "x" * 5000, "unknown", "../../store/part_0/x"]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], *, checksum: bool = True) -> None:
    """Change ``meta.json`` of a store, and make its checksum right."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    changed = change(meta)
    meta = meta if changed is None else changed
    if isinstance(meta, dict) and checksum:
        rest = {name: value for name, value in meta.items() if name != "crc32"}
        meta["crc32"] = f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"
    path.write_text(json.dumps(meta))


def forge(folder: Path, name: str, array: Any, part: int = 0) -> None:
    """Replace an array of a store, with size, type, shape and checksums right."""
    path = folder / f"part_{part}" / f"{name}.npy"
    np.save(path, array)

    def describe(meta: dict[str, Any]) -> None:
        array_ = np.load(path)
        meta["parts"][part]["files"][name] = {
            "bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
            "dtype": str(array_.dtype), "shape": list(array_.shape),
        }  # fmt: skip

    rewrite(folder, describe)


def _put(meta: Any, entry: str, value: Any) -> None:
    *path, last = [int(key) if key.isdigit() else key for key in entry.split(".")]
    for key in path:
        meta = meta[key]
    meta[last] = value


def meta_cases() -> Iterator[Case]:
    """Yield stores whose ``meta.json`` is malformed, with its checksum right."""

    def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        return lambda folder: rewrite(folder / "store", change)

    for entry in ENTRIES:
        for value in WRONG:
            if value in FITTING.get(entry, []) and isinstance(value, bool) in (False, entry == "multi_label"):
                continue
            yield Case(
                "meta.json", f"{entry} = {str(value)[:20]}", (*FIT, "--data.store=store"), ("meta.json",),
                changed(lambda meta, entry=entry, value=value: _put(meta, entry, value)),
            )  # fmt: skip
    for entry in ENTRIES:

        def remove(meta: dict[str, Any], entry: str = entry) -> None:
            *path, last = [int(key) if key.isdigit() else key for key in entry.split(".")]
            inner: Any = meta
            for key in path:
                inner = inner[key]
            del inner[last]

        yield Case("meta.json", f"{entry} missing", (*FIT, "--data.store=store"), ("meta.json",), changed(remove))
    for name in NAMES:

        def rename(meta: dict[str, Any], name: str = name) -> None:
            files = meta["parts"][0]["files"]
            files[name] = files["x"]

        yield Case("meta.json", f"array {name[:20]!r}", (*FIT, "--data.store=store"), ("meta.json",), changed(rename))
    texts = {
        "empty": "", "deep": "[" * 100_000, "deep and closed": "[" * 100_000 + "]" * 100_000, "list": "[]",
        "deep inside": '{"format_version": 3, "a": ' + "[" * 50_000 + "]" * 50_000 + "}", "words": "hello",
        "number": "3",
        "half": '{"format_version": 3, "parts', "huge version": '{"format_version": ' + "9" * 5000 + "}",
        "no checksum": '{"format_version": 3}', "infinite version": '{"format_version": Infinity}',
    }  # fmt: skip
    for name, text in texts.items():
        yield Case(
            "meta.json", name, (*FIT, "--data.store=store"), ("meta.json",),
            lambda folder, text=text: (folder / "store" / "meta.json").write_text(text) and None,  # type: ignore
        )  # fmt: skip
    for name, text in (("bytes", b"\xff\xfe\x00"), ("an array", b"\x93NUMPY\x01\x00v\x00")):
        yield Case(
            "meta.json", name, (*FIT, "--data.store=store"), ("meta.json",),
            lambda folder, text=text: (folder / "store" / "meta.json").write_bytes(text) and None,  # type: ignore
        )  # fmt: skip


def _at(index: int, value: Any) -> Callable[[Any], Any]:
    def put(array: Any) -> Any:
        array[index] = value
        return array

    return put


#: Changes of the arrays of a store: ``NAME`` and what becomes of it.
FORGERIES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("indptr", "starts at 1", _at(0, 1)),
    ("indptr", "starts below 0", _at(0, -5)),
    ("indptr", "ends early", _at(-1, 3)),
    ("indptr", "ends late", _at(-1, 10**6)),
    ("indptr", "ends at the largest number", _at(-1, 2**63 - 1)),
    ("indptr", "descends", _at(5, 10**9)),
    ("indptr", "descends below 0", _at(5, -(10**9))),
    ("indptr", "is empty", lambda array: array[:0]),
    ("indptr", "is short", lambda array: np.concatenate([array[:3], array[-1:]])),
    ("indptr", "is a matrix", lambda array: array.reshape(1, -1)),
    ("indptr", "is int32", lambda array: array.astype(np.int32)),
    ("indptr", "is of floats", lambda array: array.astype(np.float64)),
    ("indptr", "is one number", lambda array: np.array(3)),
    ("src", "has a huge id", _at(4, 2**31 - 1)),
    ("src", "has the id after the last", lambda array: _at(4, 120)(array)),
    ("src", "has a negative id", _at(0, -1)),
    ("src", "has a very negative id", _at(0, -(2**31))),
    ("src", "is long", lambda array: np.concatenate([array, array])),
    ("src", "is short", lambda array: array[:5]),
    ("src", "is empty", lambda array: array[:0]),
    ("src", "is of floats", lambda array: array.astype(np.float32)),
    ("src", "is of texts", lambda array: array.astype("U8")),
    ("src", "is big-endian", lambda array: array.astype(">i4")),
    ("src", "is int64 and huge", lambda array: _at(0, 2**40)(array.astype(np.int64))),
    ("src", "is a matrix", lambda array: np.stack([array, array])),
    ("e_id", "is short", lambda array: array[:5]),
    ("e_id", "is negative", _at(0, -4)),
    ("e_id", "is of floats", lambda array: array.astype(np.float64)),
    ("n_id", "is short", lambda array: array[:5]),
    ("n_id", "is long", lambda array: np.concatenate([array, array])),
    ("n_id", "names no node", _at(3, 10**9)),
    ("n_id", "is negative", _at(0, -1)),
    ("n_id", "names a node twice", _at(3, 2)),
    ("n_id", "descends", lambda array: array[::-1].copy()),
    ("n_id", "is of floats", lambda array: array.astype(np.float64)),
    ("x", "is short", lambda array: array[:5]),
    ("x", "is long", lambda array: np.concatenate([array, array])),
    ("x", "is a vector", lambda array: array[:, 0].copy()),
    ("x", "is of texts", lambda array: array.astype("U8")),
    ("x", "is complex", lambda array: array.astype(np.complex64)),
    ("x", "has no columns", lambda array: array[:, :0]),
    ("x", "has other columns", lambda array: array[:, :3].copy()),
    ("x", "is one number", lambda array: np.array(3.0, dtype=np.float32)),
    ("x", "is of records", lambda array: np.zeros(len(array), dtype=[("a", "f4")])),
    ("y", "has a class too many", _at(3, 4)),
    ("y", "has a huge class", _at(3, 2**40)),
    ("y", "is below -1", _at(3, -2)),
    ("y", "is short", lambda array: array[:5]),
    ("y", "is of floats", lambda array: array.astype(np.float32)),
    ("y", "is a matrix", lambda array: np.stack([array, array], axis=1)),
    ("train_mask", "is short", lambda array: array[:5]),
    ("train_mask", "is of integers", lambda array: array.astype(np.int64) * 7),
    ("val_mask", "is a matrix", lambda array: np.stack([array, array], axis=1)),
    ("send_index", "is long", lambda array: np.arange(7)),
    ("send_counts", "is negative", lambda array: array - 1),
    ("send_counts", "is long", lambda array: np.concatenate([array, array])),
    ("send_counts", "is of floats", lambda array: array.astype(np.float64)),
    ("recv_counts", "is negative", lambda array: array - 1),
    ("recv_counts", "counts rows that are not there", lambda array: array + 5),
    ("recv_counts", "is empty", lambda array: array[:0]),
    ("recv_counts", "is huge", lambda array: array + 2**62),
]


_PART = ("part_0/", "meta.json")  # of arrays that do not fit each other, either may be named


def array_cases() -> Iterator[Case]:
    """Yield stores with forged arrays, both placements, and with files that are cut or changed."""

    def forged(place: str, name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            forge(folder / place, name, change(np.load(folder / place / "part_0" / f"{name}.npy")))

        return prepare

    for name, what, change in FORGERIES:
        arguments = (*FIT, "--data.store=store")
        yield Case("forged array", f"{name} {what}", arguments, _PART, forged("store", name, change))
    replicas = (*FIT, "--data.store=replicas", "--model.backend=replica")
    for name, what, change in FORGERIES:
        if name != "send_index" and "counts" not in name:
            yield Case("forged replicas", f"{name} {what}", replicas, _PART, forged("replicas", name, change))
    for what, change in (
        ("is short", lambda array: array[:5]),
        ("is narrow", lambda array: array[:, :1].copy()),
        ("is of texts", lambda array: array.astype("U8")),
    ):
        yield Case(
            "forged replicas",
            f"in_degree {what}",
            replicas,
            ("in_degree.npy",),
            forged("replicas", "in_degree", change),
        )
    damages: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda raw: raw[: len(raw) // 2],
        "one byte less": lambda raw: raw[:-1],
        "empty": lambda raw: b"",
        "a byte changed": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        "header only": lambda raw: raw[:128],
        "no header": lambda raw: bytes(len(raw)),
    }
    for name in ("indptr", "src", "x", "y"):
        for what, damage in damages.items():

            def prepare(folder: Path, name: str = name, damage: Callable[[bytes], bytes] = damage) -> None:
                path = folder / "store" / "part_0" / f"{name}.npy"
                path.write_bytes(damage(path.read_bytes()))

            yield Case("damaged array", f"{name} {what}", (*FIT, "--data.store=store"), (f"{name}.npy",), prepare)
    headers = {
        "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (120,), }",
        "a huge shape": b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
        "a negative shape": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "code": b"{'descr': __import__('os').system('touch OWNED'), 'fortran_order': False, 'shape': (1,), }",
        "deep": b"(" * 5000 + b")" * 5000,
    }
    for what, header in headers.items():

        def write(folder: Path, header: bytes = header) -> None:
            header = header.ljust(((len(header) + 75) // 64) * 64 - 10)
            raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(400)
            (folder / "graph" / "x.npy").write_bytes(raw)

        yield Case("graph folder", f"x.npy of {what}", FIT, ("x.npy",), write)


# --- graphs -----------------------------------------------------------------------------------------------------------

GRAPHS: list[tuple[str, str, Callable[[Any], Any]]] = [
    *(("x", f"holds {value}", _at((3, 1), value)) for value in (np.nan, np.inf, -np.inf)),
    ("x", "overflows float32", lambda array: _at((3, 1), 1e300)(array.astype(np.float64))),
    ("x", "overflows float32 below", lambda array: _at((3, 1), -1e39)(array.astype(np.float64))),
    ("x", "is a vector", lambda array: array[:, 0].copy()),
    ("x", "is short", lambda array: array[:5]),
    ("x", "is empty", lambda array: array[:0]),
    ("x", "has no columns", lambda array: array[:, :0]),
    ("x", "is of texts", lambda array: array.astype("U8")),
    ("x", "is complex", lambda array: array.astype(np.complex64)),
    ("x", "is one number", lambda array: np.array(3.0)),
    ("edge_index", "names no node", _at((0, 3), 10**9)),
    ("edge_index", "is negative", _at((1, 3), -1)),
    ("edge_index", "has three rows", lambda array: np.concatenate([array, array[:1]])),
    ("edge_index", "is of floats", lambda array: array.astype(np.float64)),
    ("edge_index", "is a vector", lambda array: array[0].copy()),
    ("edge_index", "is bool", lambda array: array.astype(bool)),
    ("y", "is short", lambda array: array[:5]),
    ("y", "is below -1", _at(3, -7)),
    ("y", "is half", lambda array: _at(3, 0.5)(array.astype(np.float64))),
    ("y", "is infinite", lambda array: _at(3, np.inf)(array.astype(np.float64))),
    ("y", "has a huge class", _at(3, 2**40)),
    ("y", "is a cube", lambda array: array.reshape(-1, 1, 1)),
    ("train_mask", "is short", lambda array: array[:5]),
    ("train_mask", "is two", lambda array: array.astype(np.int64) * 2),
    ("edge_weight", "is short", lambda array: array[:5]),
    *(("edge_weight", f"holds {value}", _at(3, value)) for value in (np.nan, np.inf)),
    ("edge_weight", "overflows float32", lambda array: _at(3, 1e300)(array.astype(np.float64))),
    ("edge_attr", "is short", lambda array: array[:5].reshape(-1, 1)),
    ("edge_attr", "overflows float32", lambda array: _at(3, 1e300)(array.astype(np.float64))),
    *(("edge_attr", f"holds {value}", _at(3, value)) for value in (np.nan, -np.inf)),
    ("edge_type", "is negative", lambda array: _at(3, -1)(array.astype(np.int64))),
    ("edge_type", "is of floats", lambda array: array + 0.5),
]
EDGE_TEXTS = {
    "words among numbers": "0 1\n1 2\nthree 4\n5 6\n" * 3, "one column": "1\n2\n3\n", "negative": "0 1\n-1 2\n2 3\n",
    "fractions": "0 1\n1.5 2\n2 3\n", "nan": "0 1\nnan 2\n2 3\n", "empty": "", "only comments": "# a\n# b\n",
    "ragged": "0 1\n1 2 3 4\n2 3\n", "huge ids": f"0 {10**25}\n1 2\n",
    "infinite weight": "source,target,weight\n0,1,inf\n1,2,1\n", "nan weight": "source,target,weight\n0,1,nan\n1,2,1\n",
    "overflowing weight": "source,target,weight\n0,1,1e300\n1,2,1e308\n2,3,1e999\n",
    "zeros": "\0\0\0\0\n" * 5, "no end": "0 1\n1 2\n2 ",
}  # fmt: skip


def graph_cases() -> Iterator[Case]:
    """Yield folders of arrays with a fault, as a dataset and as input, and files of edges."""

    def faulty(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            path = folder / "graph" / f"{name}.npy"
            if not path.is_file():
                num_edges = np.load(folder / "graph" / "edge_index.npy").shape[1]
                np.save(path, np.ones(num_edges, dtype=np.float32))
            np.save(path, change(np.load(path)))

        return prepare

    whole = ("partition", "--input=graph", "--out=out", "--num_classes=4")
    for name, what, change in GRAPHS:
        arguments = (*FIT, "--data.num_classes=4")
        yield Case("graph folder", f"{name} {what}", arguments, (name,), faulty(name, change))
        yield Case("graph as a stream", f"{name} {what}", whole, (name,), faulty(name, change))
    for what, text in EDGE_TEXTS.items():
        yield Case(
            "edges in text", what, FILES, ("edges.txt",),
            lambda folder, text=text: (folder / "edges.txt").write_text(text) and None,  # type: ignore
        )  # fmt: skip


def code_cases() -> Iterator[Case]:
    """Yield arguments of datasets that name a callable which the dataset's signature does not ask for."""
    shell = "{class_path: os.system, init_args: {command: touch OWNED}}"
    opened = "{class_path: subprocess.Popen, init_args: {args: [touch, OWNED]}}"
    planetoid = "--data.dataset=Planetoid"
    for where in ("root", "name", "transform", "pre_transform", "split"):
        for value in (shell, opened, "{class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}"):
            arguments = {"root": "data", "name": "Cora"} | {where: "VALUE"}
            text = ", ".join(f"{key}: {value if given == 'VALUE' else given}" for key, given in arguments.items())
            yield Case("code", f"{where}: {value[:40]}", (*FIT, planetoid, f"--data.dataset_args={{{text}}}"), (where,))
    yield Case(
        "code", "sbm", (*FIT, "--data.dataset=sbm", f"--data.dataset_args={{num_nodes: {shell}}}"), ("num_nodes",)
    )
    yield Case(
        "code", "partition", ("partition", "--dataset=sbm", f"--dataset_args={{num_nodes: {shell}}}", "--out=out")
    )
    for name in ("os.system", "builtins.exec", "subprocess.run"):
        yield Case(
            "code", f"dataset {name}", (*FIT, f"--data.dataset={name}", "--data.dataset_args={command: touch OWNED}")
        )
    nested = f"{{class_path: torch_geometric.transforms.Compose, init_args: {{transforms: [{shell}]}}}}"
    yield Case("code", "nested", (*FIT, planetoid, f"--data.dataset_args={{root: d, name: Cora, transform: {nested}}}"))
    partitioner = f"--data.partitioner_args={{seed: {shell}}}"
    yield Case("code", "partitioner", (*FIT, "--data.partitioner=hash", partitioner))
    for place, command in (("backend", "--model.backend=os.system"), ("partitioner", "--data.partitioner=os.system")):
        yield Case("code", place, (*FIT, command))


def cases(seed: int = 0, options: int = 330) -> list[Case]:
    """Return all inputs of a seed."""
    rng = random.Random(seed)
    return [
        *option_cases(rng, options), *contradictions(), *yaml_cases(), *meta_cases(), *array_cases(), *graph_cases(),
        *code_cases(),
    ]  # fmt: skip


# --- the runs ---------------------------------------------------------------------------------------------------------


def write_template(folder: Path) -> None:
    """Write what every input begins with: a configuration, a graph, its edges as text, a store of each placement."""
    from pygdist.graph import degree_corrected_sbm, save_npy, write_store

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(RUN)
    data = degree_corrected_sbm(120, num_classes=4, avg_degree=6, num_features=12, seed=3)
    save_npy(data, folder / "graph")
    (folder / "results").mkdir()
    (folder / "results" / "a.csv").write_text("x,y\n1,2\n")
    edges = data.edge_index.t().tolist()
    (folder / "edges.txt").write_text("".join(f"{source} {target}\n" for source, target in edges))
    part = np.zeros(120, dtype=np.int64)
    options: dict[str, Any] = {"num_parts": 1, "method": "given", "arguments": {}}
    write_store(data, part, folder / "store", **options)
    write_store(data, part, folder / "replicas", **options, num_hops=2)


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit code (negative: the signal), what it wrote to standard error, time and memory."""

    code: int
    text: str
    seconds: float
    peak_bytes: int

    def problem(self, case: Case) -> str:
        """Return what is wrong with the end of a case, or nothing."""
        lines = [line for line in self.text.splitlines() if line.startswith("pygdist: error: ")]
        if self.code == -signal.SIGKILL:
            return "hang, or out of memory"
        if self.code < 0:
            return f"signal {-self.code}"
        if "Traceback" in self.text:
            return f"traceback: {self.text.strip().splitlines()[-1][:200]}"
        if self.code == 0:
            return "accepted"
        if self.code != 2 or len(lines) != 1:
            return f"code {self.code}, {len(lines)} lines"
        if len(lines[0]) > 700:
            return f"a line of {len(lines[0])} characters"
        if case.words and not any(word in lines[0] for word in case.words):
            return f"does not name {' or '.join(case.words)}"
        return ""


def run(case: Case, template: Path, scratch: Path) -> Outcome:
    """Run the command of a case in a forked process, in a folder of its own."""
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    case.prepare(folder)
    output = scratch / "stderr"
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(case, folder, output)
    status, used = 0, None
    while used is None:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            used = usage
        elif time.monotonic() - start > LIMIT_S:
            os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
        else:
            time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    text = output.read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if (folder / "OWNED").exists():
        text, code = f"{text}\nTraceback: the input ran a command", 1
    return Outcome(code, text, time.monotonic() - start, used.ru_maxrss * 1024)


def _in_child(case: Case, folder: Path, output: Path) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        with output.open("wb") as file:
            os.dup2(file.fileno(), 2)
            os.dup2(file.fileno(), 1)
        sys.argv = ["pygdist", *case.arguments]
        from pygdist.cli import main as pygdist

        try:
            code = pygdist(case.arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)


def warm_up() -> None:
    """Import what the commands need, so that forked processes need not; no thread may start here."""
    import torch

    torch.set_num_threads(1)
    for name in ("check", "export", "generate", "partition", "report", "train", "verify"):
        importlib.import_module(f"pygdist.commands.{name}")


def main() -> int:
    """Run all inputs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=int, default=330, help="wrong values of options (default: 330)")
    parser.add_argument("--only", default="", help="inputs whose kind or name contains this text")
    parser.add_argument("--every", type=int, default=1, help="take one input of so many")
    parser.add_argument("--show", action="store_true", help="print what every input ends in")
    options = parser.parse_args()
    warm_up()
    good, bad = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="pygdist-inputs-") as name:
        scratch = Path(name)
        write_template(scratch / "template")
        for case in cases(options.seed, options.options)[:: options.every]:
            if options.only not in f"{case.kind}: {case.name}":
                continue
            outcome = run(case, scratch / "template", scratch)
            problem = outcome.problem(case)
            (bad if problem else good)[case.kind] += 1
            if problem or options.show:
                last = (outcome.text.strip().splitlines() or ["nothing"])[-1]
                print(f"{problem or 'well'} | {case.kind}: {case.name} | {outcome.seconds:.1f} s | {last[:300]}")
                sys.stdout.flush()
    print(f"\n{'kind':<28}{'inputs':>8}{'one line':>10}")
    for kind in sorted({*good, *bad}):
        print(f"{kind:<28}{good[kind] + bad[kind]:>8}{good[kind]:>10}")
    print(f"{'all':<28}{good.total() + bad.total():>8}{good.total():>10}")
    return int(bad.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
