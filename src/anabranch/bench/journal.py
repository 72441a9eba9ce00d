"""The progress of a run, one line per prompt, from which a stopped run is resumed: FILE.partial.jsonl.

The first line has the settings and the environment; a run is resumed only if the settings have not changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.bench.run import Answer, Outcome, Round
from anabranch.errors import FileError, InputError
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import is_whole, parse_json, read_json, read_text

__all__ = ["Journal", "beside"]

FORMATS = (".json", ".csv", ".md")


def beside(out: Path, suffix: str) -> Path:
    """``out`` with ``suffix``, which replaces the suffix of a result file: results/a.json -> results/a.csv."""
    stem = out.name.removesuffix(out.suffix) if out.suffix in FORMATS else out.name
    return out.with_name(stem + suffix)


class Journal:
    """The journal next to ``out``. ``header`` has the settings, which must be equal to resume, and data to keep."""

    def __init__(self, path: Path, header: dict[str, Any], rounds: list[Round]) -> None:
        self.path, self.header, self.rounds = path, header, rounds

    @staticmethod
    def path_of(out: Path) -> Path:
        """The path of the journal of ``out``."""
        return beside(out, ".partial.jsonl")

    @staticmethod
    def check(out: Path, *, resume: bool, force: bool) -> None:
        """Raise InputError if a stopped run would be lost without ``force``, or if there is nothing to resume."""
        path, result = Journal.path_of(out), beside(out, ".json")
        if resume and force:
            raise InputError("--resume continues a run and --force replaces it; give only one of them")
        if resume and not path.is_file():
            if _is_complete(result):
                raise InputError(f"the run is complete, and its result is {result}; start a new one with another --out")
            replaced = f", with --force to replace {result}, or give another --out" if result.exists() else ""
            raise InputError(f"there is nothing to resume: {path} does not exist; run without --resume{replaced}")
        if path.is_file() and not (resume or force):
            raise InputError(
                f"{path} was left by a stopped run; give --resume to continue it, or --force to replace it"
            )

    def begin(self, errors: Mapping[str, str]) -> None:
        """Write the first line; ``errors`` has the contenders that could not be opened."""
        self.header["errors"] = dict(errors)
        write_atomically(self.path, json.dumps(self.header) + "\n")

    @staticmethod
    def resume(out: Path, settings: Mapping[str, Any]) -> Journal:
        """Continue the existing file. Raises InputError for other settings, FileError for a damaged file."""
        path = Journal.path_of(out)
        lines = read_text(path, "delete it and start again").splitlines()
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(parse_json(line))
            except ValueError as error:
                if number == len(lines) and number > 1:  # incomplete because the run was killed
                    break
                raise FileError(f"line {number} of {path} is not JSON; delete the file and start again") from error
        if not (records and isinstance(records[0], dict) and isinstance(records[0].get("settings"), dict)):
            raise FileError(f"{path} does not start with the settings of a run; delete it and start again")
        header = records[0]
        known = json.loads(json.dumps(settings))
        other = [name for name in {**header["settings"], **known} if header["settings"].get(name) != known.get(name)]
        if other:
            was, now = header["settings"].get(other[0]), known.get(other[0])
            raise InputError(
                f"{path} was measured with another {other[0].replace('_', ' ')} ({was}, now {now}); give the same "
                "settings, or delete it"
            )
        rounds = []
        for number, record in enumerate(records[1:], 2):
            try:
                rounds.append(_round(record))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise FileError(
                    f"line {number} of {path} is not a round of measurements; delete the file and start again"
                ) from error
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
        return Journal(path, header, rounds)

    def add(self, one: Round) -> None:
        """Append a round of one prompt; it is on disk when this returns."""
        answers = {name: [each.answers[0].to_dict() for each in many] for name, many in one.outcomes.items()}
        record = {"prompt": one.index, "answers": answers, "errors": one.errors}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rounds.append(one)

    def remove(self) -> None:
        """Delete the file: the run is complete and written."""
        self.path.unlink(missing_ok=True)


def _round(record: Any) -> Round:
    """Parse a round written by ``Journal.add``. Raises AttributeError, KeyError, TypeError or ValueError for others."""
    answers = {str(name): list(map(Answer.from_dict, many)) for name, many in dict(record["answers"]).items()}
    outcomes = {name: [Outcome((one,), one.seconds) for one in many] for name, many in answers.items()}
    if not is_whole(record["prompt"], 0) or not all(isinstance(why, str) for why in dict(record["errors"]).values()):
        raise TypeError("prompt or errors")
    return Round(record["prompt"], 1, outcomes, dict(record["errors"]))


def _is_complete(result: Path) -> bool:
    """Return whether a result file is that of a complete run."""
    try:
        return read_json(result, "measure again").get("complete") is True
    except FileError:
        return False
