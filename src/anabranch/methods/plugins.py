"""Methods from outside the package: a file that registers one, and the entry points of installed packages.

A file is any Python file that calls ``register``; it is run when it is named, with the rights of the process. A package
declares its method, named as in specifications:

    [project.entry-points."anabranch.methods"]
    bigram = "my_package.drafting:METHOD"

It is imported when a specification first names that method, and not before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import TracebackType

from anabranch.drafting.drafter import Method
from anabranch.errors import FileError, InputError, one_line
from anabranch.support.jsonfiles import shown

__all__ = ["GROUP", "installed", "run_file", "value_of"]

GROUP = "anabranch.methods"


def run_file(path: Path) -> None:
    """Run a file, which registers its methods. Raises FileError with the line at which it fails."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileError(f"there is no file {path}; give a Python file that registers a method")
    name = f"anabranch_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileError(f"{path} is not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise FileError(f"the plugin {_where(error, path)}: {_said(error)}") from error


def installed() -> dict[str, EntryPoint]:
    """The methods of installed packages, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def value_of(point: EntryPoint) -> Method:
    """The method of an entry point. Raises InputError if it cannot be imported or is something else."""
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    try:
        method = point.load()
    except Exception as error:
        raise InputError(
            f"the method {point.name!r}{package} cannot be imported ({_said(error)}); reinstall it"
        ) from error
    if not isinstance(method, Method) or method.name != point.name:
        raise InputError(f"the entry point {point.name!r}{package} must be a Method of that name, got {shown(method)}")
    return method


def _where(error: BaseException, path: Path) -> str:
    """The file and the line of it at which an error was raised."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    return f"{path}, line {_line(error.__traceback__, path)}"


def _line(trace: TracebackType | None, path: Path) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


def _said(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return one_line(ValueError(f"{type(error).__name__}: {message}" if message else type(error).__name__))
