"""Cache folder, atomic writes, and checks of output paths."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import threading
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from platformdirs import user_cache_dir

from anabranch.errors import FileError

__all__ = [
    "LONE_SURROGATES",
    "cache_home",
    "check_folder",
    "check_output",
    "check_writable",
    "keep_recent",
    "shown_command",
    "without_folders",
    "write_atomically",
]

# unpaired surrogates, which JSON allows: tokenizers reject them, and UTF-8 cannot encode them
LONE_SURROGATES = re.compile("[\ud800-\udfff]+")
# an absolute path in a specification: in quotes, or up to a comma or a plus sign that a setting or a method follows
_PATH = re.compile(
    r"""(?<==")(?:\\.|[^"\\])*(?=")|(?<==')[^']*(?=')|(?<==)(?:/|[A-Za-z]:[/\\])(?:(?![,+]\w+[=:]).)*""", re.DOTALL
)


def cache_home() -> Path:
    """The folder of files kept between runs: ``$ANABRANCH_HOME``, or the user's cache directory."""
    if chosen := os.environ.get("ANABRANCH_HOME"):
        return Path(chosen).expanduser()
    return Path(user_cache_dir("anabranch", appauthor=False))


def shown_command(*words: str, hidden: Collection[str] = ()) -> str:
    """A command line for result files, without the folders of absolute paths; options in ``hidden`` have the value DIR.

    >>> shown_command("anabranch", "bench", "--data", "mine", "--limit", "3", hidden=("--data",))
    'anabranch bench --data DIR --limit 3'
    """
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        option, equals, _ = word.partition("=")
        shown.append("DIR" if before in hidden else f"{option}=DIR" if equals and option in hidden else word)
    return shlex.join(map(without_folders, shown))


def without_folders(text: str) -> str:
    """Reduce absolute paths in a word or a specification to their last part, for result files, which are shared.

    >>> without_folders('a=rest:data=/home/me/a,b,nodes=8+draft_model:model="/home/me/c,d"')
    'a=rest:data=a,b,nodes=8+draft_model:model="c,d"'
    """

    def last(match: re.Match[str]) -> str:
        return Path(match[0]).name if Path(match[0]).is_absolute() else match[0]

    return last(whole) if (whole := re.fullmatch("/.*", text, re.DOTALL)) else _PATH.sub(last, text)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write to a temporary file beside ``path`` and rename it, so that readers never see a partial file.

    Missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        if isinstance(data, str):
            staged.write_text(data, encoding="utf-8")
        else:
            staged.write_bytes(data)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def keep_recent(paths: Iterable[Path], most: int) -> None:
    """Delete the files that were used least recently, by their times, until the others have at most ``most`` bytes."""
    files = []
    for path in paths:
        with suppress(OSError):  # deleted by another process
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
            total -= size


def check_folder(folder: Path, what: str, instead: str) -> None:
    """Check that a folder is writable, or can be created, before a long run. Raises FileError.

    Leaves no folder behind: a run that is refused later has written nothing. A missing folder is tried under another
    name, since other processes may check or use it at the same time.
    """
    try:
        there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        with ExitStack() as stack:
            tried = there
            if there != folder:
                tried = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=there))) / folder.relative_to(there)
                tried.mkdir(parents=True)
            stack.enter_context(tempfile.TemporaryFile(dir=tried))
    except OSError as error:
        raise FileError(f"{what} cannot be written to {folder} ({error.strerror}); choose another {instead}") from error


def check_writable(out: Path, what: str = "results", option: str = "--out") -> None:
    """Check that a file can be written, without touching it; ``what`` and ``option`` are for the message.

    Raises FileError.
    """
    if out.exists() and not out.is_file():
        raise FileError(f"{out} is {'a folder' if out.is_dir() else 'not a regular file'}; give {option} a file name")
    check_folder(out.parent, what, option)
    if out.exists() and not os.access(out, os.W_OK):
        raise FileError(f"{out} is not writable; choose another {option}")


def check_output(path: Path, *, force: bool, what: str = "results", option: str = "--out") -> None:
    """Check that a file can be written, and that it does not exist yet unless ``force``. Raises FileError.

    Every command that writes a file calls this before it loads a model. ``what`` and ``option`` are for the message.
    """
    check_writable(path, what, option)
    if path.exists() and not force:
        raise FileError(f"{path} exists already; give another {option}, or --force to replace it")
