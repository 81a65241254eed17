"""Fills the pages of ``docs/papers`` from ``experiments/`` when the site is built, so that no number is copied by hand.

A page names what it wants in comments, each on a line of its own:

===========================================  ==============================================================
``<!-- generated: experiments NAME -->``     ``experiments/NAME/README.md`` without its title; ``.`` is
                                             ``experiments/README.md``
``<!-- generated: tables NAME -->``          the tables of ``experiments/NAME``: what each shows, the command
                                             that makes it again, and the commit, day and machine of the
                                             committed one
``<!-- generated: scoreboard PAPER -->``     the claims of a paper, the paper's figures and ours; ``all`` for
                                             all papers
===========================================  ==============================================================

:func:`filled` does the work and knows nothing of Sphinx; :func:`setup` hands it the source of each page.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS, PAGES = ROOT / "experiments", ROOT / "docs" / "papers"
_MARK = re.compile(r"^<!-- generated: (experiments|tables|scoreboard) (\S+) -->$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)#\s]*)(#[^)\s]*)?\)")
_MOST_COMMITS = 3


def filled(text: str) -> str:
    """Return the source of a page with its comments replaced by what they name.

    Raises:
        FileNotFoundError: If there is no such experiment.
    """
    return _MARK.sub(lambda found: _MAKERS[found[1]](found[2]), text)


def sources(text: str) -> list[Path]:
    """Return the files from which :func:`filled` takes what a page names."""
    files = list[Path]()
    for kind, name in _MARK.findall(text):
        if kind == "experiments":
            files.append(_readme(name))
        elif kind == "tables":
            files += [
                *_descriptions(name),
                *(path for one in _descriptions(name) if (path := _table_of(one)).is_file()),
            ]
        else:
            files.append(EXPERIMENTS / "results" / "scoreboard.csv")
    return files


# -- READMEs -----------------------------------------------------------------------------------------------------------


def _readme(name: str) -> Path:
    return Path(os.path.normpath(EXPERIMENTS / name / "README.md"))


def _experiments(name: str) -> str:
    """Return a README without its title and comments, with its links as seen from ``docs/papers``."""
    path = _readme(name)
    text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    body = re.sub(r"\A# .*\n", "", text).strip()
    parts = _FENCE.split(body)  # code lies at odd places
    parts[::2] = [_LINK.sub(lambda found: _link(found, path.parent), part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match[str], folder: Path) -> str:
    """Return a link of a README in ``folder`` for the site: to a page, a file to download, or as text."""
    image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target:
        return found[0]
    path = Path(os.path.normpath(folder / target))
    page = path.parent if path.name == "README.md" else path
    if page == EXPERIMENTS or (page.parent == EXPERIMENTS and (page / "README.md").is_file()):
        return f"[{text}]({'experiments' if page == EXPERIMENTS else page.name}.md{anchor})"
    if path.is_relative_to(EXPERIMENTS):
        return f"{image}[{text}]({os.path.relpath(path, PAGES)})"
    inside = path.relative_to(ROOT)
    return f"`{inside}`" if text.strip("`") == str(inside) else f"{text} (`{inside}`)"


# -- tables ------------------------------------------------------------------------------------------------------------


def _descriptions(name: str) -> list[Path]:
    """Return the descriptions of the tables of an experiment.

    Raises:
        FileNotFoundError: If there is none.
    """
    paths = sorted((EXPERIMENTS / name).glob("*.yaml"))
    if not paths:
        raise FileNotFoundError(f"{EXPERIMENTS / name}: there are no descriptions of tables (*.yaml)")
    return paths


def _table_of(description: Path) -> Path:
    return description.parent / "results" / f"{description.stem}.csv"


def _tables(name: str) -> str:
    rows = list[Sequence[str]]()
    for path in _descriptions(name):
        content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = _table_of(path)
        measured = _rows(table) if table.is_file() else []
        command = f"`python -m experiments.run {path.relative_to(ROOT)}`"
        link = f"[{content['title']}]({os.path.relpath(table, PAGES)})" if measured else str(content["title"])
        rows.append([link, str(content.get("figure", "")), command, _origin(measured)])
    return _markdown(["table", "in the paper", "command", "commit, day, machine"], rows)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _origin(rows: Iterable[Mapping[str, str]]) -> str:
    """Say with which commits, on which days and on which machine the rows of a table were measured."""
    rows = list(rows)
    commits = [f"`{one}`" for one in _values(rows, "commit")]
    if len(commits) > _MOST_COMMITS:
        commits = [*commits[:_MOST_COMMITS], f"and {len(commits) - _MOST_COMMITS} more"]
    days = _values(rows, "date")
    span = days[0] if len(days) == 1 else f"{min(days)} to {max(days)}" if days else ""
    machines = [
        f"{cpu}, {cores} cores"
        for cpu, cores in dict.fromkeys((row.get("cpu", ""), row.get("cores", "")) for row in rows)
        if cpu
    ]
    return "; ".join(filter(None, (", ".join(commits), span, ", ".join(machines))))


def _values(rows: Iterable[Mapping[str, str]], column: str) -> list[str]:
    return [one for one in dict.fromkeys(row.get(column) or "" for row in rows) if one]


# -- the scoreboard ----------------------------------------------------------------------------------------------------


def _scoreboard(paper: str) -> str:
    claims = [row for row in _rows(EXPERIMENTS / "results" / "scoreboard.csv") if paper in ("all", row["paper"])]
    if not claims:
        raise FileNotFoundError(f"scoreboard.csv has no claims of {paper}")
    named = paper == "all"
    head = ["paper"] * named + ["claim", "in the paper", "published", "ours", "verdict", "table"]
    rows = [
        [
            *[row["paper"]] * named,
            row["claim"],
            row["where"],
            row["published"],
            row["ours"],
            row["verdict"],
            _page_of(row["table"]),
        ]
        for row in claims
    ]
    return _markdown(head, rows)


def _page_of(table: str) -> str:
    if not table:
        return ""
    return f"[{Path(table).stem}]({os.path.relpath(EXPERIMENTS / table, PAGES)})"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


_MAKERS = {"experiments": _experiments, "tables": _tables, "scoreboard": _scoreboard}


# -- Sphinx ------------------------------------------------------------------------------------------------------------


def _read(app: Any, docname: str, source: list[str]) -> None:
    if docname.startswith("papers/"):
        for path in sources(source[0]):
            app.env.note_dependency(str(path))
        source[0] = filled(source[0])


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx fill the pages."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
