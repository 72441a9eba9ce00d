"""The peers' virtual environments: ``<home>/peers/NAME``. A marker file, written last, says that one is complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from anabranch.bench.peers.catalogue import ENVIRONMENTS, PEERS, Environment
from anabranch.errors import CapabilityError, FetchError, FileError, InputError
from anabranch.support.files import cache_home, write_atomically
from anabranch.support.nearest import hint

__all__ = ["Installed", "environment_folder", "environment_of", "find_python", "install", "remove", "status"]

_MARKER = "anabranch-peer.json"
_SPOKEN = ("Collecting ", "Downloading ", "Installing ", "Successfully ", "Uninstalling ", "ERROR:")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Installed:
    """The state of an environment: ``bytes`` on disk, and whether it is complete and of this version."""

    folder: Path
    ready: bool
    bytes: int


def environment_folder(name: str) -> Path:
    """The folder of the environment ``name``, which may not exist."""
    return cache_home() / "peers" / name


def environment_of(peer: str) -> str | None:
    """The environment of a peer (or of an environment, by its own name); None: our own interpreter."""
    if peer in ENVIRONMENTS:
        return peer
    if peer not in PEERS:
        raise InputError(f"there is no peer {peer!r}{hint(peer, PEERS)}; peers are {', '.join(PEERS)}")
    return PEERS[peer].environment


def find_python(name: str) -> Path:
    """The interpreter of an environment. Raises CapabilityError if it is missing or was built for another version."""
    if not _ready(name):
        raise CapabilityError(f"the peer {name!r} is not installed; run 'anabranch bench peers install {name}' first")
    return _python(environment_folder(name))


def status(name: str) -> Installed:
    """The state of an environment."""
    folder = environment_folder(name)
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Installed(folder, _ready(name), sum(path.stat().st_size for path in files))


def install(name: str, tell: Tell = lambda line: None, *, environment: Environment | None = None) -> bool:
    """Create the environment ``name`` with venv and pip; returns False if it is installed already.

    ``tell`` is called with lines of progress. If it fails, nothing remains. ``environment`` replaces the catalogue's.

    Raises FetchError with pip's message, and FileError if the folder is not writable.
    """
    plan = ENVIRONMENTS[name] if environment is None else environment
    folder = environment_folder(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{name}.lock", timeout=5):
            if _ready(name, plan):
                return False
            _build(plan, folder, tell)
    except Timeout as error:
        raise FileError(f"another process is installing the peer {name!r}; wait for it and try again") from error
    except OSError as error:
        raise FileError(
            f"the peer {name!r} cannot be stored in {folder.parent} ({error}); free some space there, "
            "or set ANABRANCH_HOME to a writable folder"
        ) from error
    return True


def remove(name: str) -> bool:
    """Delete the environment with everything in it; returns False if there is none."""
    folder = environment_folder(name)
    if not folder.exists():
        return False
    # the marker first, so that an interrupted removal does not look like an installation
    try:
        (folder / _MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        raise FileError(f"{folder} cannot be deleted ({error}); delete it by hand") from error
    return True


def _ready(name: str, environment: Environment | None = None) -> bool:
    """Return whether the marker exists and lists exactly the current installation steps."""
    plan = ENVIRONMENTS[name] if environment is None else environment
    folder = environment_folder(name)
    try:
        record = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return record == _record(plan) and _python(folder).exists()


def _record(plan: Environment) -> dict[str, object]:
    record: dict[str, object] = {"name": plan.name, "steps": [list(step) for step in plan.steps]}
    return record | ({"variables": dict(plan.variables)} if plan.variables else {})


def _python(folder: Path) -> Path:
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def _build(plan: Environment, folder: Path, tell: Tell) -> None:
    remove(plan.name)  # of another version, or incomplete
    try:
        tell(f"{plan.name}: creating a virtual environment")
        variables = {**dict(plan.variables), "PATH": f"{_python(folder).parent}{os.pathsep}{os.environ['PATH']}"}
        _execute([sys.executable, "-m", "venv", str(folder)], plan.name, tell, variables)
        for verb, *words in plan.steps:
            quiet = ["--no-input", "--progress-bar", "off"] if verb == "install" else []
            _execute([str(_python(folder)), "-m", "pip", verb, *quiet, *words], plan.name, tell, variables)
        write_atomically(folder / _MARKER, json.dumps(_record(plan), indent=1) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _execute(command: Sequence[str], name: str, tell: Tell, variables: Mapping[str, str]) -> None:
    lines: deque[str] = deque(maxlen=40)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(variables)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in map(str.strip, process.stdout):
                lines.append(line)
                if line.startswith(_SPOKEN):
                    tell(f"{name}: {line}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        complaint = (errors or [line for line in lines if line] or ["no message"])[-1].rstrip(".")
        raise FetchError(f"the peer {name!r} could not be installed ({complaint}); nothing was kept, so try again")
