"""READMEs of experiments: their tables are what the CSVs beside them give, and no number is anybody's guess."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from experiments import readmes, scoreboard

ROOT = Path(__file__).parents[1]
TABLES = sorted(ROOT.glob("experiments/**/results/*.csv"))

SMALL = """\
# Epochs

`comm` takes 0.50 s with 2 hosts, which is 2.5 times as long (the paper: 3.1 times).

<!-- figures: results/epochs.csv
rows:
  comm: backend == "comm"
  tensor: backend == "tensor"
columns:
  2 hosts: {where: hosts == 2, cell: "{epoch_s:.2f}"}
  4 hosts: {where: hosts == 4, cell: "{median(epoch_s):.2f} s"}
bold: {lowest: [2 hosts], down: true}
also:
  - "{of('epoch_s', backend='comm', hosts=2) / of('epoch_s', backend='tensor', hosts=2):.1f}"
-->
<!-- end -->
"""
CSV = "backend,hosts,epoch_s,note\ncomm,2,0.5,9.9\ntensor,2,0.2,\ncomm,4,1,\ncomm,4,3,\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "epochs.csv").write_text(CSV)
    return tmp_path


@pytest.mark.parametrize("path", readmes.readmes(), ids=lambda path: path.parent.name)
def test_a_readme_says_what_its_csvs_hold(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert readmes.written(text, path.parent) == text, "python -m experiments.readmes writes its tables again"
    assert not readmes.strays(text, path.parent)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.exhaustive if number > 1 else ())  # it is the same code for all
        for number, path in enumerate(readmes.readmes())
    ],
    ids=lambda path: path.parent.name,
)
def test_a_readme_notices_that_a_column_has_changed(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("*.traces", "*.py", "*.ranks.csv"))
    blocks = list(readmes._BLOCK.finditer(path.read_text(encoding="utf-8")))
    for name in sorted({block[1] for block in blocks}):
        table, mine = copy / name, [block for block in blocks if block[1] == name]
        kept, rows = table.read_bytes(), pd.read_csv(table)
        for column in rows.select_dtypes("float").columns:
            using = [block for block in mine if _reads(block[2], column)]
            before = [readmes._known(block, copy)[0] for block in using]
            rows.assign(**{column: rows[column] * np.linspace(1.1, 2, len(rows))}).to_csv(table, index=False)
            noticed = [_changed(block, copy, known) for block, known in zip(using, before, strict=True)]
            table.write_bytes(kept)
            assert any(noticed) or not using or not rows[column].any(), f"{name}: {column}"


def _reads(block: str, column: str) -> bool:
    expressions = re.sub(r"'[^']* [^']*'", "", " ".join(re.findall(r"{[^{}]*}", block)))  # without labels of settings
    return re.search(rf"\b{column}\b", expressions) is not None


def _changed(block: re.Match[str], folder: Path, known: set[str]) -> bool:
    try:
        return readmes._known(block, folder)[0] != known
    except readmes.FigureError:  # rows that a query chooses are gone
        return True


def test_tables_are_made_from_rows_and_columns(folder: Path) -> None:
    made = readmes.written(SMALL, folder)
    assert made.endswith(
        "-->\n\n| | 2 hosts | 4 hosts |\n| --- | --- | --- |\n"
        "| comm | 0.50 | 2.00 s |\n| tensor | **0.20** | |\n\n<!-- end -->\n"
    )
    assert readmes.written(made, folder) == made


def test_numbers_that_no_csv_holds_are_found(folder: Path) -> None:
    made = readmes.written(SMALL, folder)
    assert readmes.strays(made, folder) == []
    for there, changed in (  # also where another number of the section is the same, or a paper is named
        ("is 2.5 times as long", "is 4 times as long"),
        ("as long (the", "as long, and 9.9 times with 4 (the"),
    ):
        assert len(readmes.strays(made.replace(there, changed, 1), folder)) == 1
    for there, changed in (
        ("0.50 s with", "0.51 s with"),
        ("2.5 times", "2.4 times"),
        ("2 hosts, which", "40 % of, which"),
    ):
        assert len(readmes.strays(made.replace(there, changed, 1), folder)) == 1
    (folder / "results" / "epochs.csv").write_text(CSV.replace("comm,2,0.5", "comm,2,0.55"))
    assert readmes.written(made, folder) != made
    assert len(readmes.strays(made, folder)) == 2


@pytest.mark.parametrize(
    ("there", "changed", "said"),
    [("<!-- end -->", "", "no <!-- end --> follows"), ('== "tensor"', '== "tensr"', "no row of the CSV"),
     ("{epoch_s:.2f}", "0.50", "a cell without an expression"), ("hosts == 2,", "hots == 2,", "hots")],
)  # fmt: skip
def test_blocks_that_make_no_table_are_refused(there: str, changed: str, said: str, folder: Path) -> None:
    assert there in SMALL
    with pytest.raises(readmes.FigureError, match=said):
        readmes.written(SMALL.replace(there, changed), folder)


@pytest.mark.parametrize("wrong", ["epoch_seconds:.2f", "epoch_s:.2q", "of('epoch_s', hosts=3)"])
def test_a_cell_that_cannot_be_made_is_named(folder: Path, wrong: str) -> None:
    with pytest.raises(readmes.FigureError, match=re.escape(wrong)):
        readmes.written(SMALL.replace("epoch_s:.2f", wrong, 1), folder)


def test_the_scoreboard_is_what_the_csvs_say_of_each_claim() -> None:
    rows = scoreboard.scoreboard()
    assert {row["paper"] for row in rows} == set(scoreboard.PAPERS)
    assert all((row["verdict"] == scoreboard.MISSING) == (not row["table"]) for row in rows)
    committed = (readmes.HERE / "results" / "scoreboard.csv").read_text(encoding="utf-8")
    assert scoreboard.text_of(rows) == committed, "python -m experiments.scoreboard --out experiments/results"


@pytest.mark.parametrize(
    ("holds", "verdict"), [("r > 2", "holds"), ("r > 9", "does not hold"), ("'in part'", "holds in part")]
)
def test_a_verdict_is_computed(holds: str, verdict: str, folder: Path) -> None:
    claim = {
        "where": "Figure 1", "claim": "One is faster.", "published": "3 times", "table": "results/epochs.csv",
        "let": {"r": "of('epoch_s', backend='comm', hosts=2) / of('epoch_s', backend='tensor', hosts=2)"},
        "ours": "{r:.1f} times", "holds": holds,
    }  # fmt: skip
    missing = {name: claim[name] for name in ("where", "claim", "published")}
    listed = {paper: [claim if paper == "P3" else missing] for paper in scoreboard.PAPERS}
    (folder / "claims.yaml").write_text(yaml.safe_dump(listed))
    rows = scoreboard.scoreboard(folder / "claims.yaml")
    assert [row["verdict"] for row in rows] == [scoreboard.MISSING] * 4 + [verdict]
    assert rows[-1]["ours"] == "2.5 times"


def test_rows_of_one_setting_are_divided(folder: Path) -> None:
    names = readmes.Names(table := readmes.read_table(folder / "results" / "epochs.csv"), table, folder)
    ratios = readmes.expression(
        """ratios('epoch_s', "backend == 'comm' and hosts == 2", "backend == 'tensor'", ['hosts'])""", names
    )
    assert ratios.to_dict() == {2: 2.5}
    with pytest.raises(readmes.FigureError, match="several rows have the same backend"):
        readmes.expression("""ratios('epoch_s', "backend == 'comm'", "backend == 'tensor'", ['backend'])""", names)
    with pytest.raises(readmes.FigureError, match="there are no two rows to compare"):
        readmes.expression("""ratios('epoch_s', "hosts == 2", "hosts == 9", ['backend'])""", names)


def test_equal_values_of_several_rows_are_all_counted(folder: Path) -> None:
    table = readmes.read_table(folder / "results" / "epochs.csv")
    names = readmes.Names(table.query("hosts == 4"), table, folder)
    assert readmes.filled("{total(hosts)} {std(hosts)} {n} {total(epoch_s)}", names) == "8 0.0 2 4.0"


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs the history")
@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_rows_name_commits_that_are_there(path: Path) -> None:
    if path.name.endswith(".ranks.csv") or path.name == "scoreboard.csv":
        pytest.skip("its rows belong to other tables")
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() == "true":
        pytest.skip("the history is cut")
    for commit in pd.read_csv(path, dtype=str)["commit"].unique():
        name = commit.removeprefix("just before ")
        ancestor = subprocess.run(["git", "merge-base", "--is-ancestor", name, "HEAD"], cwd=ROOT, capture_output=True)
        assert ancestor.returncode == 0, f"{commit} is no commit before this one"
        if name != commit:  # its changes were measured before they were committed, together with the table
            show = ["git", "show", "--name-only", "--format=", name]
            changed = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
            assert str(path.relative_to(ROOT)) in changed, f"{name} does not bring this table"
