"""Writes the scoreboard: each claim of the five papers, the paper's figure, ours, and if the claim holds here.

    python -m experiments.scoreboard --out experiments/results

``claims.yaml`` lists the claims. ``let`` names values, one after the other; ``ours`` is an f-string over the CSV
``table`` and these; ``holds`` an expression that is true, false, or the words ``in part``. All are written as in
:mod:`experiments.readmes`. A claim without a table is *missing*: nothing has been measured yet. ``pygdist report``
opens its page with ``scoreboard.csv``.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

from experiments.readmes import HERE, FigureError, Names, expression, filled, read_table

PAPERS = ("NeutronStar", "NeutronTP", "CATGNN", "DistGNN", "P3")
COLUMNS = ("paper", "where", "claim", "published", "ours", "verdict", "table")
MISSING = "missing"
_VERDICTS = {"True": "holds", "False": "does not hold", "in part": "holds in part"}


def scoreboard(claims: Path = HERE / "claims.yaml", papers: Sequence[str] = PAPERS) -> list[dict[str, str]]:
    """Return a row for each claim, paper by paper."""
    listed = yaml.safe_load(claims.read_text(encoding="utf-8"))
    return [_row(paper, claim, claims.parent) for paper in papers for claim in listed[paper]]


def _row(paper: str, claim: Mapping[str, Any], folder: Path) -> dict[str, str]:
    row = {"paper": paper, **{name: claim.get(name, "") for name in COLUMNS[1:]}}
    if "table" not in claim:
        return {**row, "verdict": MISSING}
    rows = read_table(folder / claim["table"])
    names = Names(rows, rows, folder)
    for name, value in claim.get("let", {}).items():
        names[name] = found = expression(value, names)
        if bool(pd.isna(found).any() if isinstance(found, pd.Series) else isinstance(found, float) and pd.isna(found)):
            raise FigureError(f"{claim['claim']}: {name}: there is no number")
    verdict = _VERDICTS[str(expression(claim["holds"], names))]
    return {**row, "ours": " ".join(filled(claim["ours"], names).split()), "verdict": verdict}


def text_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the CSV."""
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(description="Write the scoreboard of the papers' claims.")
    cli.add_argument("--papers", nargs="+", choices=PAPERS, default=PAPERS, help="default: all")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for scoreboard.csv")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Write the scoreboard, and print it."""
    options = parser().parse_args(argv)
    rows = scoreboard(papers=options.papers)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scoreboard.csv").write_text(text_of(rows), encoding="utf-8", newline="")
    table = Table("paper", "claim", "published", "ours", "verdict")
    for row in rows:
        table.add_row(*(row[name] for name in ("paper", "claim", "published", "ours", "verdict")))
    Console().print(table)
    print(", ".join(f"{verdict}: {count}" for verdict, count in Counter(row["verdict"] for row in rows).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
