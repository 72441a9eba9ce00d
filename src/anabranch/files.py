"""Where files are kept, and writing them so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from pathlib import Path

from platformdirs import user_cache_dir

from anabranch.errors import FileError

__all__ = [
    "LONE_SURROGATES",
    "cache_home",
    "check_folder",
    "check_output",
    "check_writable",
    "shown_command",
    "without_folders",
    "write_atomically",
]

# halves of characters, as JSON can have them: no tokenizer reads them, and UTF-8 cannot hold them
LONE_SURROGATES = re.compile("[\ud800-\udfff]+")


def cache_home() -> Path:
    """The folder for everything kept between runs: ``$ANABRANCH_HOME``, else the user's cache directory."""
    if chosen := os.environ.get("ANABRANCH_HOME"):
        return Path(chosen).expanduser()
    return Path(user_cache_dir("anabranch", appauthor=False))


def shown_command(*words: str) -> str:
    """A command for result files."""
    return shlex.join(map(without_folders, words))


def without_folders(text: str) -> str:
    """A word, a spec or a setting for result files, which go to other machines: of absolute paths the last part."""

    def last(found: re.Match[str]) -> str:
        return Path(found[0]).name if Path(found[0]).is_absolute() else found[0]

    return last(whole) if (whole := re.fullmatch("/.*", text, re.DOTALL)) else re.sub("(?<==)[^=,]+", last, text)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write ``data`` beside ``path`` and move it into place; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if isinstance(data, str):
            staged.write_text(data, encoding="utf-8")
        else:
            staged.write_bytes(data)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def check_folder(folder: Path, what: str, instead: str) -> None:
    """Make a folder and try to write there, before hours are spent for nothing. Raises FileError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FileError(f"{what} cannot be written to {folder} ({error.strerror}); choose another {instead}") from error


def check_writable(out: Path, what: str = "results", option: str = "--out") -> None:
    """The same for the folder of a file, which stays as it is if it is there. ``what`` goes where ``option`` says."""
    if out.exists() and not out.is_file():
        raise FileError(f"{out} is {'a folder' if out.is_dir() else 'no file'}; give {option} a file name")
    check_folder(out.parent, what, option)
    if out.exists() and not os.access(out, os.W_OK):
        raise FileError(f"{out} may not be written; choose another {option}")


def check_output(path: Path, *, force: bool, what: str = "results", option: str = "--out") -> None:
    """Check that a new file can be written, and that none is replaced unless ``force`` says so. Raises FileError.

    Every verb that writes a file calls this before it loads a model. ``what`` is written to the path that ``option``
    names.
    """
    check_writable(path, what, option)
    if path.exists() and not force:
        raise FileError(f"{path} exists already; give another {option}, or --force to replace it")
