"""Values of options that are of a wrong type or out of range, and options that do not go together."""

from __future__ import annotations

import random
from collections.abc import Iterator

from experiments.reliability.malformed.case import FILES, FIT, PARTITION, Case

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
    "size": ["much", ".nan", "inf", "1e400", "1e300", "1e39", "[1]", "{a: 1}", "-1", "0"],
    "seed": [*WORDS, "1.5", "9" * 5000, str(2**63), "-1"],
    "interval": ["often", ".nan", "inf", "1e400", "1e300", str(2**31), str(2**53), "[1]", "-1", "1.5"],
    "seconds": ["soon", ".nan", "inf", "1e400", "1e300", "1e12", str(2**63), "[1]", "{a: 1}", "-1", "0", "1e-9"],
    "step size": ["fast", ".nan", "inf", "1e400", "1e300", "1e39", "1e38", str(10**31), "[1]", "{a: 1}", "-1"],
    "pattern": ["{epoch:", "{", "}", "{epoch", "{epoch:z}", "{val_loss:d}", "{0}", "{}", "x" * 5000,
                "{epoch:9999d}"],
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
        "trainer.profiler": "choice", "trainer.val_check_interval": "interval", "trainer.fast_dev_run": "natural",
        "trainer.detect_anomaly": "flag", "trainer.reload_dataloaders_every_n_epochs": "natural",
        "seed_everything": "natural", "model.lr": "step size", "model.weight_decay": "step size", "model.check": "flag",
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
        "optimizer": "class", "lr_scheduler": "class", "optimizer.lr": "step size", "task": "choice", "config": "path",
        "ckpt_path": "path", "checkpoint.save_top_k": "below minus one", "checkpoint.mode": "choice",
        "checkpoint.every_n_epochs": "natural", "predictions.output": "choice", "model": "mapping", "data": "mapping",
        "trainer": "mapping", "trainer.strategy.timeout_s": "seconds", "trainer.strategy.lost_after_s": "seconds",
        "trainer.strategy.warn_after_s": "seconds",
    },
    (*FIT, "--trainer.enable_checkpointing=true"): {"checkpoint.filename": "pattern"},
    (*FIT, "--optimizer=SGD"): {
        "optimizer.lr": "step size", "optimizer.momentum": "step size", "optimizer.weight_decay": "step size",
    },
    (*FIT, "--optimizer=Adam"): {"optimizer.lr": "step size", "optimizer.eps": "step size"},
    (*FIT, "--optimizer=Adagrad"): {
        "optimizer.lr_decay": "step size", "optimizer.initial_accumulator_value": "step size",
    },
    (*FIT, "--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"): {
        "lr_scheduler.gamma": "step size",
    },
    (*FIT, "--task=links", "--data.edge_split=[0.1,0.1]"): {
        "model.train_share": "share", "model.hits_at": "count", "model.seed": "seed", "model.decoder": "class",
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
        "data.memory_gib": "size", "data.reserve": "share",
    },
    (*FIT, "--model.backend=pygdist.backends.CommBackend"): {
        "model.backend.init_args.halo_gib": "positive", "model.backend.init_args.ring": "flag",
        "model.backend.init_args.wire_dtype": "choice",
    },
    (*FIT, "--model.backend=pygdist.backends.HybridBackend"): {
        "model.backend.init_args.cache_ratio": "share", "model.backend.init_args.memory_gib": "rate",
        "model.backend.init_args.replan": "flag",
    },
    (*FIT, "--model.backend=pygdist.backends.ReplicaBackend"): {
        "model.backend.init_args.hops": "natural", "model.backend.init_args.scale_rim": "flag",
    },
    (*FIT, "--model.backend=pygdist.backends.TensorBackend"): {
        "model.backend.init_args.num_chunks": "count", "model.backend.init_args.memory_gib": "positive",
        "model.backend.init_args.device": "choice",
    },
    (*FIT, "--trainer.strategy=model_averaging"): {
        "trainer.strategy.sync_every": "count", "trainer.strategy.sync_unit": "choice",
        "trainer.strategy.optimizer_state": "choice",
    },
    (*FIT, "--model.backend=replica", "--data.batches=pygdist.sampler.ClusterBatches"): {
        "data.batches.init_args.num_clusters": "count", "data.batches.init_args.partitioner": "class",
        "data.batches.init_args.partitioner_args": "mapping",
    },
    (*PARTITION, "--method=2ps-l"): {"method_args.seed": "natural", "method_args.nosuch": "count"},
    PARTITION: {
        "dataset": "class", "dataset_args": "mapping", "parts": "count", "method": "class", "method_args": "mapping",
        "hops": "count", "placement": "choice", "split": "shares", "split_seed": "natural", "num_classes": "count",
        "symmetrize": "flag", "overwrite": "flag", "remove_self_loops": "flag",
    },
    (*PARTITION, "--parts=auto", "--device_memory=1"): {
        "devices": "count", "device_memory": "size", "reserve": "share",
    },
    FILES: {
        "input": "path", "columns": "mapping", "string_ids": "flag", "first_id": "natural", "features": "path",
        "labels": "path", "names": "path", "num_nodes": "count", "relabel": "flag", "num_classes": "count",
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
    ("trainer.limit_train_batches", "inf"), ("lr_scheduler.gamma", "-1"),
    ("checkpoint.every_n_epochs", str(10**30)), ("trainer.min_epochs", str(10**30)),
    ("trainer.check_val_every_n_epoch", str(10**30)), ("trainer.log_every_n_steps", str(10**30)),
    ("trainer.reload_dataloaders_every_n_epochs", str(10**30)), ("columns", "text"), ("first_id", "0"),
    ("data.symmetrize", "x"), ("optimizer", "torch.optim.SGD"), ("trainer.num_sanity_val_steps", "inf"),
    ("trainer.max_time", "x" * 0), ("data.dataset_args.avg_degree", "0"), ("tolerance", "inf"),
    ("seed", str(10**30)), ("model.hits_at", str(10**30)),
    ("model.hits_at", str(10**13)), ("model.savings.block_mib", "0"),
    ("data.batches.init_args.batch_size", str(10**30)), ("data.batches.init_args.batch_size", str(10**13)),
    ("data.batches.init_args.num_neighbors", "[1]"), ("data.batches.init_args.num_clusters", str(10**30)),
}  # fmt: skip


#: Options for which a huge number means "never" or "all".
HARMLESS = {
    "trainer.min_epochs", "trainer.check_val_every_n_epoch", "trainer.log_every_n_steps", "trainer.fast_dev_run",
    "trainer.reload_dataloaders_every_n_epochs", "checkpoint.every_n_epochs", "data.split_seed", "split_seed", "seed",
    "data.dataset_args.seed", "seed_everything", "method_args.seed",
    "data.batches.init_args.num_clusters",
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
        "store and split_seed": (*FIT, "--data.store=store", "--data.split_seed=3"),
        "arguments of a partitioner that takes none": (*FIT, "--data.partitioner_args={seed: 3}"),
        "split of nodes for links": (*FIT, "--task=links", "--data.edge_split=[0.1,0.1]", "--data.split=[0.5,0.2,0.3]"),
        "lr beside an optimizer": (*FIT, "--optimizer=Adam", "--model.lr=0.3"),
        "weight_decay beside an optimizer": (*FIT, "--optimizer=Adam", "--model.weight_decay=0.3"),
        "scheduler without an optimizer": (*FIT, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"),
        "memory of a shortcut that is off": (
            *FIT,
            "--model.savings.first_hop=false",
            "--model.savings.first_hop_mib=3",
        ),
        "overfit and limit": (*FIT, "--trainer.overfit_batches=1", "--trainer.limit_train_batches=0.5"),
        "ratio and replan": (
            *FIT,
            "--model.backend=pygdist.backends.HybridBackend",
            "--model.backend.cache_ratio=0.5",
            "--model.backend.replan=true",
        ),
        "columns of an array": (
            "partition",
            "--input=graph/edge_index.npy",
            "--out=out",
            "--columns=source=1,target=2",
        ),
        "names of an array": ("partition", "--input=graph/edge_index.npy", "--out=out", "--string_ids=true"),
        "relabel and features": (*FILES, "--relabel=true", "--features=graph/x.npy"),
        "other number of nodes": (*FILES, "--num_nodes=999", "--features=graph/x.npy"),
        "first id of names": (*FILES, "--string_ids=true", "--first_id=1"),
        "arguments of a folder": (*PARTITION, "--dataset_args={num_nodes: 5}"),
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
        "empty checkpoint": ("test", "--config=run.yaml", "--ckpt_path="),
        "empty checkpoint to go on from": (*FIT, "--ckpt_path="),
        "empty checkpoint to export": ("export", "", "model.pt"),
        "unknown command": ("fiit",),
        "empty command": ("",),
        "stray word": (*FIT, "stray"),
        "stray dash": (*FIT, "-"),
        "no model": ("fit",),
        "no checkpoint": ("export",),
        "format": ("export", "no.ckpt", "model.bin"),
        "unknown generator": ("generate", "nosuch-like"),
        "no results": ("report", "nowhere", "--out=page.html"),
        "clipping without value": (*FIT, "--trainer.gradient_clip_algorithm=norm"),
        "min over max epochs": (*FIT, "--trainer.min_epochs=5"),
    }
    for name, arguments in lines.items():
        yield Case("contradiction", name, arguments)
