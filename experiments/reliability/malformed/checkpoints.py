"""Checkpoints of a run with a part changed, removed or replaced, with the checksum right; and files that are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.reliability.malformed.case import EITHER, FIT, REFUSED, Case, writes

#: The command that leaves ``last.ckpt`` in the folder of the template.
TRAIN = (*FIT, "--trainer.enable_checkpointing=true", "--checkpoint.dirpath=.", "--checkpoint.monitor=null")
GO_ON = (*TRAIN[:-2], "--checkpoint.dirpath=again", TRAIN[-1], "--ckpt_path=last.ckpt", "--trainer.max_epochs=3")
TEST = ("test", "--config=run.yaml", "--ckpt_path=last.ckpt")
EXPORT = ("export", "last.ckpt", "model.pt")

WRONG: list[Any] = ["text", -1, 10**30, 2**63, 0.5, float("nan"), None, True, [], [[[]]], {}, {"a": {}}, b"\xff\0"]
_WEIGHT = ("state_dict", "model.convs.0.lin.weight")
_GROUP = ("optimizer_states", 0, "param_groups", 0)
_MOMENT = ("optimizer_states", 0, "state", 0)

#: Entries, what becomes of them, and commands that read them.
CHANGES: list[tuple[tuple[Any, ...], str, Callable[[Any], Any], tuple[tuple[str, ...], ...]]] = [
    (_WEIGHT, "is transposed", lambda value: value.t().contiguous(), (GO_ON, TEST)),
    (_WEIGHT, "is NaN", lambda value: value * float("nan"), (GO_ON, TEST)),
    (_WEIGHT, "is infinite", lambda value: value + float("inf"), (GO_ON, TEST)),
    (_WEIGHT, "is complex", lambda value: value.cfloat(), (GO_ON, TEST)),
    (_WEIGHT, "is sparse", lambda value: value.to_sparse(), (GO_ON, TEST)),
    (_WEIGHT, "has no storage", lambda value: value.to("meta"), (GO_ON, TEST, EXPORT)),
    (_WEIGHT, "is empty", lambda value: value[:0], (GO_ON, TEST)),
    (_WEIGHT, "is bool", lambda value: value > 0, (GO_ON, TEST)),
    (_GROUP, "names other parameters", lambda value: {**value, "params": [0, 1, 2, 99]}, (GO_ON,)),
    (_GROUP, "names too few parameters", lambda value: {**value, "params": [0]}, (GO_ON,)),
    (_GROUP, "names parameters by text", lambda value: {**value, "params": ["a", "b", "c", "d"]}, (GO_ON,)),
    (_GROUP, "has no lr", lambda value: {name: one for name, one in value.items() if name != "lr"}, (GO_ON,)),
    ((*_GROUP, "lr"), "is text", lambda value: "fast", (GO_ON,)),
    ((*_GROUP, "lr"), "is NaN", lambda value: float("nan"), (GO_ON,)),
    ((*_GROUP, "lr"), "is negative", lambda value: -1.0, (GO_ON,)),
    ((*_GROUP, "betas"), "is a number", lambda value: 3, (GO_ON,)),
    (("optimizer_states",), "is empty", lambda value: [], (GO_ON,)),
    (("optimizer_states",), "is twice as many", lambda value: value * 2, (GO_ON,)),
    ((*_MOMENT, "exp_avg"), "is of another shape", lambda value: value[:1], (GO_ON,)),
    ((*_MOMENT, "exp_avg"), "is NaN", lambda value: value * float("nan"), (GO_ON,)),
    ((*_MOMENT, "exp_avg"), "is text", lambda value: "text", (GO_ON,)),
    (_MOMENT, "is empty", lambda value: {}, (GO_ON,)),
    (("loops", "fit_loop"), "is empty", lambda value: {}, (GO_ON,)),
    (("loops", "fit_loop", "epoch_progress", "current", "completed"), "is negative", lambda value: -5, (GO_ON,)),
    (("loops", "fit_loop", "epoch_progress", "current", "completed"), "is huge", lambda value: 10**30, (GO_ON,)),
    (("loops", "fit_loop", "epoch_progress"), "is text", lambda value: "text", (GO_ON,)),
    (("callbacks",), "are numbers", lambda value: dict.fromkeys(value, 3), (GO_ON,)),
    (("callbacks",), "are empty", lambda value: {name: {} for name in value}, (GO_ON,)),
    (("pytorch-lightning_version",), "is of the future", lambda value: "99.0", (GO_ON,)),
    (("epoch",), "is huge", lambda value: 10**30, (GO_ON,)),
    (("global_step",), "is huge", lambda value: 10**30, (GO_ON,)),
]
HARMLESS = ("is of the future", "are empty")
_FILES = {
    "empty": b"", "text": b"hello\n", "zeros": bytes(5000), "an empty archive": b"PK\x05\x06" + bytes(18),
    "a pickle of code": b"cos\nsystem\n(S'touch OWNED'\ntR.", "half an archive": b"PK\x03\x04" + bytes(200),
}  # fmt: skip


def changed(path: tuple[Any, ...], change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return the function that changes an entry of the checkpoint."""

    def prepare(folder: Path) -> None:
        import torch

        from pygdist import checkpoints

        whole = torch.load(folder / "last.ckpt")
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = change(inner[path[-1]])
        checkpoints.write(whole, folder / "last.ckpt")

    return prepare


def checkpoint_cases(rng: random.Random, most: int = 60) -> Iterator[Case]:
    """Yield the changes above, files that are no checkpoints, and wrong values of entries that are drawn."""
    for path, what, change, commands in CHANGES:
        for command in commands:
            # "is empty" leaves an optimiser that begins anew, which torch takes
            ends = EITHER if what in HARMLESS or path == _MOMENT else REFUSED
            name = f"{command[0]}: {'.'.join(map(str, path))} {what}"
            yield Case("checkpoint", name, command, ("last.ckpt", "checkpoint"), changed(path, change), ends)
    for what, content in _FILES.items():
        for command in (GO_ON, TEST, EXPORT):
            yield Case("no checkpoint", f"{command[0]}: {what}", command, ("last.ckpt",), writes("last.ckpt", content))
    for _ in range(most):
        seed, value, command = rng.random(), rng.choice(WRONG), rng.choice((GO_ON, GO_ON, TEST))
        name = f"{command[0]}: an entry drawn by {seed:.6f} = {ascii(value)[:20]}"
        yield Case("drawn entry of a checkpoint", name, command, (), _drawn(seed, value), EITHER)


def _drawn(seed: float, value: Any) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import torch

        paths = list(_entries(torch.load(folder / "last.ckpt"), ()))
        changed(random.Random(seed).choice(paths), lambda _: value)(folder)

    return prepare


def _entries(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from _entries(one, (*path, key))
