"""Checks of files before they are written."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import FileError
from anabranch.support import locks
from anabranch.support.files import check_folder, check_output, write_atomically


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


def test_threads_that_write_one_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace, staged = tmp_path / "file", os.replace, threading.Barrier(2, timeout=300)

    def together(source: Path, target: Path) -> None:
        staged.wait()
        replace(source, target)

    monkeypatch.setattr(os, "replace", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda text: write_atomically(path, text), ("one", "other")))
    assert path.read_text() in ("one", "other")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_may_be_checked_and_made_by_several_at_once(tmp_path: Path) -> None:
    def checked(number: int) -> None:
        begin.wait()
        check_folder(tmp_path / "new" / "folder", "results", "--out")
        if number == 0:
            write_atomically(tmp_path / "new" / "folder" / "file", "made")

    for _ in range(50):
        begin = threading.Barrier(8, timeout=300)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(checked, range(8)))
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        (tmp_path / "new" / "folder" / "file").unlink()
        (tmp_path / "new" / "folder").rmdir()
        (tmp_path / "new").rmdir()


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)), NotImplementedError()], ids=repr)
def test_a_file_system_without_locks_is_used_without(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockless(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(locks.FileLock, "acquire", lockless)
    with locks.alone(tmp_path / "lock", busy="", failed="", advice=""):
        assert f"{tmp_path / 'lock'}: its file system has no locks" in caplog.text
