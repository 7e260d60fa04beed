"""The Python in the documentation runs and prints what the page says it prints.

Every ```python block at the margin of README.md and docs/*.md runs, but for those with
``<!-- not run -->`` on the line above. The blocks of a page run from top to bottom in one
namespace; each section is one test. A block with ``>>>`` prompts is a doctest. Any other has to
print just what the ```text block directly below it holds, and nothing if there is none. ``...``
stands for anything.

A block directly above a ```sh block with ``torchrun`` is a script: it is saved under the name that
is launched there, and the commands run. One below ``<!-- from FILE -->`` has to stand in that file,
which other tests run.
"""

import contextlib
import doctest
import io
import re
import shlex
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.core.explain import rules_table
from programs import ROOT, TORCHRUN, python

_FENCED = re.compile(
    r"^(?P<not_run><!-- not run -->\n)?(?:<!-- from (?P<file>\S+) -->\n)?"
    r"```python\n(?P<source>.*?)^```\n"
    r"(?:\n*```sh\n(?P<commands>(?:(?:\w+=\w+ )*torchrun [^\n]*\n)+)^```\n)?"
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
    file: str = ""
    commands: str = ""


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
        if block.file:
            self._look_up(block)
        elif block.commands:
            self._compare(block, _launched(block))
        elif block.source.startswith(">>> "):
            self._run_doctest(block)
        else:
            # The empty lines make a traceback point into the page.
            source = "\n" * block.line + block.source
            code = compile(source, str(self.path), "exec", dont_inherit=True)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, self._namespace)
            self._compare(block, printed.getvalue())

    def _compare(self, block: Block, printed: str) -> None:
        checker, example = doctest.OutputChecker(), doctest.Example("", block.output)
        if not checker.check_output(block.output, printed, doctest.ELLIPSIS):
            difference = checker.output_difference(example, printed, doctest.ELLIPSIS)
            raise AssertionError(f"{self.path}:{block.line}\n{difference}")

    def _look_up(self, block: Block) -> None:
        text = (ROOT / block.file).read_text(encoding="utf-8")
        if not any(textwrap.indent(block.source, depth * "    ") in text for depth in range(4)):
            raise AssertionError(f"{self.path}:{block.line} does not stand in {block.file}")

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


def _launched(block: Block) -> str:
    """What a script prints, started by the commands below it."""
    with tempfile.TemporaryDirectory() as folder:
        printed = ""
        for command in block.commands.splitlines():
            before, after = map(shlex.split, command.split("torchrun", 1))
            script = next(word for word in after if word.endswith(".py"))
            Path(folder, script).write_text(block.source, encoding="utf-8")
            variables = dict(word.split("=") for word in before)
            printed += python(*TORCHRUN, *after, cwd=Path(folder), **variables)
        return printed


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
            parts = (match[name] or "" for name in ("source", "output", "file", "commands"))
            sections[-1].blocks.append(Block(line, *parts))
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


def test_the_script_that_restarts_goes_on_with_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [page] = [page for page in PAGES if page.path.name == "loops.md"]
    blocks = [block for section in page.sections for block in section.blocks]
    [script] = [block.source for block in blocks if block.commands]
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(script, namespace)
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters())
        pipe = gx.Pipeline(gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()), model)
        model(torch.arange(8.0)).sum().backward()
        pipe.sync(optimizer)
        residual = pipe.state_dict()["state"]
        namespace["save"](7, model, optimizer, pipe)
        for rank, state in enumerate(gx.reshard([pipe.state_dict()], 2)):
            torch.save(state, tmp_path / "checkpoints" / "step_00000007" / f"state_{rank}.pt")
        pipe = gx.Pipeline(pipe.tx, model)
        assert namespace["load"](model, optimizer, pipe) == 7
        found = pipe.state_dict()["state"]
        assert all(torch.equal(found[key], value) for key, value in residual.items())
        assert any(value.any() for key, value in residual.items() if "residual" in key)
    finally:
        dist.destroy_process_group()


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
        "<!-- from examples/custom_loop.py -->\n```python\ndef other() -> None:\n```\n",
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


def test_a_block_from_a_file_may_stand_deeper_there(tmp_path: Path) -> None:
    line = "for rate, images, labels in batches(epochs):\n"
    _page(tmp_path, f"<!-- from examples/custom_loop.py -->\n```python\n{line}```\n").run(0)


def test_an_error_points_into_the_page(tmp_path: Path) -> None:
    page = _page(tmp_path, "# One\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        page.run(0)
    assert caught.traceback[-1].lineno + 1 == 4
