"""A result file that is written after each part, so that a stopped run continues with the first missing one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.errors import FileError, InputError
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import read_json

__all__ = ["Parts"]

REPLACED = ("complete", "compared")  # keys of a result that ``Parts`` writes itself


class Parts:
    """The parts of the result file ``path``, by method and name.

    header    whatever else the file has; ``header["run"]`` has the settings, which must be equal to continue
    compared  one record per method: its name, and its parts by name
    """

    def __init__(self, path: Path, header: Mapping[str, Any], compared: list[dict[str, Any]]) -> None:
        self.path, self.header, self.compared = path, dict(header), compared

    @staticmethod
    def check(path: Path, *, resume: bool, force: bool) -> None:
        """Raise InputError if a result would be lost without ``force``, or if there is nothing to continue."""
        if resume and force:
            raise InputError("--resume continues a run and --force replaces it; give only one of them")
        if resume and not path.is_file():
            raise InputError(f"there is nothing to resume: {path} does not exist; run without --resume")
        if path.is_file() and not (resume or force):
            raise InputError(f"{path} exists already; give --resume to continue it, or --force to replace it")

    @staticmethod
    def resume(path: Path, run: Mapping[str, Any]) -> Parts:
        """Continue the file, with further ``methods`` if there are any.

        Raises InputError for other settings, FileError for a file that is no such result.
        """
        found = read_json(path, "measure again with --force")
        stored, compared = found.get("run"), found.get("compared")
        if not isinstance(stored, dict) or not isinstance(compared, list):
            raise FileError(f"{path} is not the result of a comparison of methods; give another --out")
        known = json.loads(json.dumps(run))
        for name in {**stored, **known}:
            same = stored.get(name) == known.get(name) or _extends(name, stored.get(name), known.get(name))
            if not same and name != "command":
                raise InputError(
                    f"{path} was measured with another {name.replace('_', ' ')} ({stored.get(name)}, now "
                    f"{known.get(name)}); give the same settings, or replace it with --force"
                )
        header = {name: value for name, value in found.items() if name not in REPLACED}
        return Parts(path, header | {"run": known}, compared)

    def of(self, name: str) -> dict[str, Any]:
        """The record of a method; a new one if there is none yet."""
        for record in self.compared:
            if record["name"] == name:
                return record
        self.compared.append({"name": name})
        return self.compared[-1]

    def write(self, *, complete: bool = False) -> None:
        """Write the file."""
        whole = {**self.header, "complete": complete, "compared": self.compared}
        write_atomically(self.path, json.dumps(whole, indent=1) + "\n")


def _extends(name: str, before: Any, now: Any) -> bool:
    """Return whether a list of methods has all that it had before."""
    return name == "methods" and isinstance(before, list) and all(method in now for method in before)
