"""Two versions of the project measured in turns, each in a process of its own: what the comparing scripts share."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["HERE", "Worker", "in_turns"]

HERE = Path(__file__).resolve().parents[1]


class Worker:
    """A script run with ``--serve``, and with the package of one checkout on the path.

    It has the variables ``environment`` beside this process's. It reads its settings as a line of JSON, and then one
    line a question; it answers each with a line of JSON.

    ready  its answer to the settings
    """

    def __init__(
        self, script: str, checkout: Path, settings: dict[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(script).resolve()), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {}), "PYTHONPATH": str(checkout / "src")},
            text=True,
        )
        self.ready = self.ask(json.dumps(settings))

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line to the worker and read its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the worker."""
        self._process.communicate()


def in_turns(workers: Mapping[str, Worker], case: str, repeats: int) -> dict[str, Any]:
    """Ask two workers for the same case, in the opposite order each time, and summarise their answers.

    An answer has the milliseconds "ms" and a "digest" of the results. The ratios are the first worker's time over the
    second's.
    """
    times: dict[str, list[float]] = {name: [] for name in workers}
    same = True
    for turn in range(repeats):
        answers = {name: workers[name].ask(case) for name in list(workers)[:: 1 if turn % 2 == 0 else -1]}
        for name, answer in answers.items():
            times[name].append(answer["ms"])
        same = same and len({answer["digest"] for answer in answers.values()}) == 1
    first, second = times.values()
    low, median, high = statistics.quantiles([a / b for a, b in zip(first, second, strict=True)], n=4)
    return {
        "kernels": {name: worker.ready["kernels"] for name, worker in workers.items()},
        "median_ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "ratio": {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]},
        "same_results": same,
    }
