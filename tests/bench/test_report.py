"""The commit in a result, and the checkout that made it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.bench.report import _commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, check=True, text=True)
    return done.stdout.strip()


def _repository(folder: Path, package: Path) -> str:
    package.mkdir(parents=True)
    (package / "code.py").write_text("1")
    (folder / "README.md").write_text("read")
    _git(folder, "init", "--quiet")
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "all")
    return _git(folder, "rev-parse", "--short", "HEAD")


def test_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path: Path) -> None:
    package = tmp_path / "src" / "anabranch"
    commit = _repository(tmp_path, package)
    (tmp_path / "README.md").write_text("changed")
    (package / "new.py").write_text("not tracked")
    assert _commit(package) == commit
    (package / "code.py").write_text("2")
    assert _commit(package) == f"{commit}-dirty"


def test_the_commit_of_somebody_elses_repository_is_not_ours(tmp_path: Path) -> None:
    package = tmp_path / "venv" / "lib" / "site-packages" / "anabranch"
    _repository(tmp_path, package)
    (tmp_path / "src" / "anabranch").mkdir(parents=True)
    assert _commit(package) == "unknown"
    assert _commit(tmp_path / "gone") == "unknown"
