"""The Python in the documentation runs and prints what the page says it prints.

Every ```python block at the margin of README.md and docs/*.md runs, but for those with
``<!-- not run -->`` on the line above. The blocks of a page run from top to bottom in one
namespace; each section is one test. A block with ``>>>`` prompts is a doctest. Any other has to
print just what the ```text block directly below it holds, and nothing if there is none. ``...``
stands for anything.
"""

import contextlib
import doctest
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtx.core.explain import rules_table

ROOT = Path(__file__).parents[1]

_FENCED = re.compile(
    r"^(?P<not_run><!-- not run -->\n)?```python\n(?P<source>.*?)^```\n"
    r"(?:\n*```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    source: str
    output: str


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


class Page:
    """A Markdown page, run section by section, each section once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections = _sections(path.read_text(encoding="utf-8"))
        self._namespace: dict[str, Any] = {"__name__": path.stem}
        self._failures: list[Exception | None] = []

    def run(self, index: int) -> None:
        """Runs a section, after those before it; raises what went wrong in it."""
        for section in self.sections[len(self._failures) : index + 1]:
            self._failures.append(self._failure(section))
        failure = self._failures[index]
        if failure is not None:
            raise failure

    def _failure(self, section: Section) -> Exception | None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                for block in section.blocks:
                    self._run_block(block)
            except Exception as error:
                return error
        return None

    def _run_block(self, block: Block) -> None:
        if block.source.startswith(">>> "):
            self._run_doctest(block)
            return
        # The empty lines make a traceback point into the page.
        code = compile("\n" * block.line + block.source, str(self.path), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self._namespace)
        checker, example = doctest.OutputChecker(), doctest.Example("", block.output)
        if not checker.check_output(block.output, printed.getvalue(), doctest.ELLIPSIS):
            difference = checker.output_difference(example, printed.getvalue(), doctest.ELLIPSIS)
            raise AssertionError(f"{self.path}:{block.line}\n{difference}")

    def _run_doctest(self, block: Block) -> None:
        name = f"{self.path.name}:{block.line}"
        examples = doctest.DocTestParser().get_doctest(
            block.source, self._namespace, name, str(self.path), block.line
        )
        report = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        runner.run(examples, out=report.write, clear_globs=False)
        self._namespace.update(examples.globs)
        assert not report.getvalue(), report.getvalue()


def _sections(text: str) -> list[Section]:
    """The sections that have something to run."""
    sections = [Section("")]
    fences = [match.span() for match in _FENCE.finditer(text)]
    headings = [
        match
        for match in _HEADING.finditer(text)
        if not any(start < match.start() < end for start, end in fences)
    ]
    found = [m for m in _FENCED.finditer(text) if not m["not_run"]]
    for match in sorted([*headings, *found], key=lambda match: match.start()):
        if match.re is _HEADING:
            sections.append(Section(match[1]))
        else:
            line = text.count("\n", 0, match.start("source"))
            sections[-1].blocks.append(Block(line, match["source"], match["output"] or ""))
    return [section for section in sections if section.blocks]


PAGES = [Page(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize(
    ("page", "index"),
    [
        pytest.param(page, index, id=f"{page.path.name}: {section.title}")
        for page in PAGES
        for index, section in enumerate(page.sections)
    ],
)
def test_section_prints_what_it_says(page: Page, index: int) -> None:
    page.run(index)


def test_rules_page_holds_the_table_of_rules() -> None:
    lines = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert "\n".join(table) == rules_table()


def _page(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return Page(path)


@pytest.mark.parametrize(
    "block",
    [
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```python\nprint(1)\n```\n",
        "```python\npass\n```\n\n```text\n2\n```\n",
        "```python\n>>> 1\n2\n```\n",
    ],
)
def test_another_output_than_the_page_says_is_found(tmp_path: Path, block: str) -> None:
    with pytest.raises(AssertionError):
        _page(tmp_path, block).run(0)


def test_sections_share_a_namespace_and_marked_blocks_are_left_out(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "# One\n\n```python\n# two\ntwo = 2\n```\n\n"
        "# Two\n\n<!-- not run -->\n```python\ntwo = 3\n```\n\n"
        "# Three\n\n```python\n>>> two\n2\n>>> four = 4\n```\n\n"
        "```python\nprint(four)\n```\n\n```text\n4\n```\n",
    )
    assert [section.title for section in page.sections] == ["One", "Three"]
    page.run(1)


def test_an_error_points_into_the_page(tmp_path: Path) -> None:
    page = _page(tmp_path, "# One\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        page.run(0)
    assert caught.traceback[-1].lineno + 1 == 4
