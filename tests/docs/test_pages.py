"""The pages tell the truth: what the README and docs show runs, in order, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, PageError, blocks, commands, files, pages, run_page, steps

pytestmark = pytest.mark.usefixtures("warm_python")


def _has_code(path: Path) -> bool:
    """Return True if a page may have code to run; the test of the convention looks closer."""
    return any(f"```{language}\n" in path.read_text(encoding="utf-8") for language in ("python", "console"))


@pytest.mark.slow
@pytest.mark.parametrize("path", filter(_has_code, pages()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_runs(path: Path, tmp_path: Path) -> None:
    run_page(path, tmp_path)


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_keeps_to_the_convention(path: Path) -> None:
    assert isinstance(steps(blocks(path.read_text(encoding="utf-8"))), list)


PAGE = """\
# A page

<!-- file: say.py -->
```python
print("hello")
```

- In a list:

  ```console
  $ python \\
      say.py > said
  hello
  $ grep -q hello said
  ```

```python
x = open("said").read()
```

```console
$ echo 1 > number
```

```python
assert x == "hello\\n" and open("number").read() == "1\\n"
```

<!-- not run: needs a GPU -->
```python
raise SystemExit("this is not run")
```

```text
only shown
```
"""


def test_steps_are_those_of_the_page() -> None:
    found = steps(blocks(PAGE))
    assert [kind for kind, _, _ in found] == ["file", "console", "console", "python", "console", "python"]
    assert found[0][1:] == ("say.py", 'print("hello")\n')
    assert found[1][2].split() == ["python", "say.py", ">", "said"]
    whole = found[-1][2].splitlines()
    numbered = dict(enumerate(PAGE.splitlines(), start=1))
    assert {number: line for number, line in enumerate(whole, start=1) if line} == {
        number: line for number, line in numbered.items() if line in whole and line
    }, "lines have their numbers"
    assert files(PAGE) == {"say.py": 'print("hello")\n'}


def test_a_page_is_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    run_page(tmp_path / "page.md", tmp_path)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("```console\n$ false\n```", "page.md: false"),
        ("```console\n$ false | true\n```", "false | true"),
        ("```console\n$ pygdist fti\n```", "unknown command 'fti'"),
        ("```python\nassert 1 > 2\n```", "line 2, in <module>"),
    ],
)
def test_what_fails_is_told(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(code)
    with pytest.raises(AssertionError, match=said.replace("|", r"\|")):
        run_page(tmp_path / "page.md", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```bash\nls\n```", "line 1: the language 'bash'"),
        ("```\nls\n```", "line 1: the language ''"),
        ("text\n\n    ls\n", "line 3: a block of code without a fence"),
        ("```{code-block} python\nls\n```", "the directive code-block may hide code"),
        ("````{note}\n\n```sh\nls\n```\n````", "line 3: the language 'sh'"),
        ("<!-- not run: -->\n```python\nx\n```", "is neither file: NAME, not run: REASON"),
        ("<!-- skip -->\n```python\nx\n```", "'<!-- skip -->' is neither"),
        ("<!-- file: a.py -->\n\ntext\n", "line 3: a comment that no block of code follows"),
    ],
)
def test_what_the_convention_does_not_know_is_refused(text: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        blocks(text)


def test_a_console_block_has_a_command() -> None:
    with pytest.raises(PageError, match=r"line 1: a console block without a line that starts with '\$ '"):
        list(commands(blocks("```console\nls\n```")[0]))
