"""Time to accuracy: what compares systems that compute different numbers, where seconds per epoch do not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SHARE = 0.95  # of the best validation accuracy of one process


def to_accuracy(runs: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return epochs and seconds until a setting is nearly as accurate as one process.

    They are medians over the seeds that get there.
    An accuracy counts from its first validation on. Seconds are those of the slowest rank in all epochs so far, the
    first ones too; validations do not count.

    Args:
        runs: Trainings of the setting that did not fail.
        alone: Trainings of the same model on one process.

    Returns:
        ``best_val_acc``, ``wanted_val_acc``, ``epochs_to_acc``, ``s_to_acc``, and the number of seeds that get there,
        ``reached``. Figures are empty where fewer than half do.
    """
    figures: dict[str, Any] = dict.fromkeys(("best_val_acc", "wanted_val_acc", "epochs_to_acc", "s_to_acc", "reached"))
    best = [max(score for _, score in run["scores"]) for run in runs if run["scores"]]
    best_alone = [max(score for _, score in run["scores"]) for run in alone if run["scores"]]
    if not best or not best_alone:
        return figures
    wanted = SHARE * statistics.fmean(best_alone)
    figures |= {"best_val_acc": round(statistics.fmean(best), 6), "wanted_val_acc": round(wanted, 6)}
    found = [one for one in (_first(run, wanted) for run in runs) if one is not None]
    figures["reached"] = len(found)
    if 2 * len(found) >= len(runs):
        epochs, seconds = zip(*found, strict=True)
        figures |= {"epochs_to_acc": statistics.median(epochs), "s_to_acc": round(statistics.median(seconds), 3)}
    return figures


def _first(run: Mapping[str, Any], wanted: float) -> tuple[float, float] | None:
    """Return the epochs and seconds of a training until its first validation with so much; ``None`` if it has none."""
    epoch = next((epoch for epoch, score in run["scores"] if score >= wanted), None)
    if epoch is None:
        return None
    slowest: dict[float, float] = {}
    for line in run["epochs"]:
        slowest[line["epoch"]] = max(line["epoch_s"], slowest.get(line["epoch"], 0.0))
    return epoch + 1, sum(seconds for number, seconds in slowest.items() if number <= epoch)
