import sys

import pytest

from gradtx.bench.progress import progress


def test_each_tenth_is_a_line(capsys):
    with progress(25) as show:
        for number in range(25):
            show(f"step {number}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "12 %: step 2"
    assert lines[-1] == "100 %: step 24"


def test_few_steps_are_all_shown(capsys):
    with progress(2) as show:
        show("a")
        show("b")
    assert capsys.readouterr().err == "50 %: a\n100 %: b\n"


def test_terminal_gets_a_bar_from_rich(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress(2) as show:
        show("a")
    assert "━" in capsys.readouterr().err
