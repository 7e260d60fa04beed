"""Files that the command line is asked to write are refused before any work is done."""

from pathlib import Path

import pytest

from gradtx.__main__ import main


@pytest.mark.parametrize("command", ["demo", "compressors"])
def test_a_file_in_no_folder_is_refused_at_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--json", str(tmp_path / "nowhere" / "x.json")])
    said = capsys.readouterr()
    assert "cannot be written: no such folder" in said.err
    assert said.out == ""
