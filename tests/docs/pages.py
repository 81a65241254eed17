"""Pages of the documentation as a test sees them: their blocks of code, and the steps that run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
#: Pages that a build writes stand beside those that are committed.
GENERATED = ROOT / "docs" / "reference" / "command-line"
#: Languages that a page may show without running them.
SHOWN = {"text", "yaml", "json", "toml", "ini", "dockerfile", "csv", "html", "markdown"}
#: Directives whose text is Markdown again.
_BOXES = {"note", "tip", "warning", "important", "admonition", "dropdown", "seealso"}
#: Directives without text that a reader could run.
_OTHERS = {"toctree", "eval-rst", "figure", "image", "math", "list-table", "glossary", "contents", "include"}
_MARKDOWN = MarkdownIt("commonmark").enable("table")


class PageError(ValueError):
    """A page that does not keep to the convention; the message names the line."""


@dataclass(frozen=True)
class Block:
    """A block of code, and the comment above it."""

    language: str
    text: str
    line: int
    file: str = ""
    not_run: str = ""


def script(path: str) -> ModuleType:
    """Import a script under ``docs``, such as ``figures/draw.py``, which no package holds."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages() -> list[Path]:
    """Return the README and all pages under ``docs`` that are committed."""
    written = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(path for path in written if GENERATED not in path.parents)]


def tokens(text: str) -> list[Token]:
    """Return what Markdown sees in a text."""
    return _MARKDOWN.parse(text)


def blocks(text: str, first_line: int = 1) -> list[Block]:
    """Return the blocks of code of a page, in order.

    Raises:
        PageError: If a comment or a block is of a kind that the convention does not know.
    """
    found, said = [], {}
    for token in tokens(text):
        line = first_line + (token.map[0] if token.map else 0)
        if token.type == "html_block" and token.content.startswith("<!--"):
            said = _comment(token.content.strip(), line)
            continue
        if token.type == "code_block":
            raise PageError(f"line {line}: a block of code without a fence")
        if token.type == "fence":
            found += _fenced(token, line, said)
        elif said:
            raise PageError(f"line {line}: a comment that no block of code follows")
        said = {}
    return found


def _comment(text: str, line: int) -> dict[str, str]:
    """Return what a comment says of the block after it."""
    match = re.fullmatch(r"<!-- (file|not run|generated): (\S.*) -->|<!-- end -->", text, re.DOTALL)
    if match is None:
        raise PageError(f"line {line}: {text!r} is neither file: NAME, not run: REASON, generated: NAME, nor end")
    kind = match[1]
    if kind in (None, "generated"):
        return {}
    return {kind.replace(" ", "_"): match[2]}


def _fenced(token: Token, line: int, said: dict[str, str]) -> list[Block]:
    info = token.info.strip()
    directive = re.match(r"{([\w-]+)}", info)
    if directive:
        if directive[1] in _BOXES:
            return blocks(token.content, line + 1)
        if directive[1] not in _OTHERS:
            raise PageError(f"line {line}: the directive {directive[1]} may hide code that nobody runs")
        return []
    if info not in {"python", "console", *SHOWN} and "file" not in said:
        raise PageError(f"line {line}: the language {info!r} is neither run nor known as one that is only shown")
    return [Block(info, token.content, line, **said)]


def files(text: str) -> dict[str, str]:
    """Return the files that a page shows, by name."""
    return {block.file: block.text for block in blocks(text) if block.file}


def commands(block: Block) -> Iterator[str]:
    """Yield the command lines of a console block.

    Raises:
        PageError: If the block has none.
    """
    lines, any_command = iter(block.text.splitlines()), False
    for line in lines:
        if line.startswith("$ "):
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                command = command.removesuffix("\\") + next(lines, "")
            any_command = True
            yield command
    if not any_command:
        raise PageError(f"line {block.line}: a console block without a line that starts with '$ '")


def steps(page: list[Block]) -> list[tuple[str, str, str]]:
    """Return what is done in order: (``file``, name, text), (``console``, "", command) or (``python``, "", program).

    The program is all Python blocks up to there: if commands stand between two blocks, the program runs before them and
    once more, longer, after them. Lines have the numbers that they have in the page.
    """
    made: list[tuple[str, str, str]] = []
    program = ""
    for block in page:
        if block.file:
            made.append(("file", block.file, block.text))
        elif block.not_run:
            continue
        elif block.language == "console":
            made += [("console", "", command) for command in commands(block)]
        elif block.language == "python":
            program += "\n" * (block.line - program.count("\n")) + block.text
            if made and made[-1][0] == "python":
                made.pop()
            made.append(("python", "", program))
    return made


def run_page(path: Path, folder: Path) -> None:
    """Do in ``folder`` what a page shows, with this checkout and the Python that runs the tests.

    Raises:
        AssertionError: If a step fails; the message has the step and its output.
    """
    work, tools = folder / "page", folder / "bin"
    work.mkdir()
    environment = {
        **os.environ, "PATH": f"{tools_of(tools)}:{os.environ['PATH']}", "HOME": str(work),
        "PYTHONPATH": f"{work}:{ROOT}",
    }  # fmt: skip
    for kind, name, text in steps(blocks(path.read_text(encoding="utf-8"))):
        if kind == "file":
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text, encoding="utf-8")
            continue
        if kind == "python":
            (tools / "page.py").write_text(text, encoding="utf-8")
            text = f"python {tools / 'page.py'}"
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", text],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{path.name}: {text}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"


def tools_of(folder: Path) -> Path:
    """Write ``python``, ``pygdist`` and ``torchrun`` into a new folder, and return it."""
    folder.mkdir()
    for name, words in (("python", ""), ("pygdist", "-m pygdist.cli "), ("torchrun", "-m torch.distributed.run ")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (folder / name).chmod(0o755)
    return folder
