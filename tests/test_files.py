"""Checks of files before they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.errors import FileError
from anabranch.support.files import check_output


def test_an_output_that_exists_is_refused_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    check_output(out, force=False)
    check_output(tmp_path / "new" / "folder" / "results.json", force=False)
    assert not any(tmp_path.iterdir()), "checking leaves nothing behind"
    out.write_text("hours of work")
    with pytest.raises(FileError, match=r"results\.json exists already; give another --out, or --force to replace it"):
        check_output(out, force=False)
    with pytest.raises(FileError, match="give another --trace, or --force"):
        check_output(out, force=False, what="the trace", option="--trace")
    check_output(out, force=True)
    assert out.read_text() == "hours of work"


def test_force_does_not_make_a_folder_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a folder; give --out a file name"):
        check_output(tmp_path, force=True)
    with pytest.raises(FileError, match=r"the trace cannot be written to .*choose another --trace"):
        check_output(tmp_path / "file" / "trace.jsonl", force=True, what="the trace", option="--trace")
