"""Completions by Ray Data: workers on a cluster, each with a model of its own, decode blocks of the prompts.

    write_answers -> blocks of prompts -> Ray Data -> Worker (train.answers.completions) -> lines -> write_answers

Only ``write_answers`` writes, where it runs, so its file is the checkpoint. Ray starts a worker that dies again, and
hands its unfinished blocks out again. ``anabranch train answers --ray N`` runs it; docs/training.md describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray.data
from ray.exceptions import RayError

from anabranch import loading
from anabranch.decoding.engine import Request
from anabranch.errors import AnabranchError, ModelError, one_line
from anabranch.model.load import Target
from anabranch.support.interrupt import sigterm_raises
from anabranch.train.answers import CHUNK, EncodedPrompt, completions

__all__ = ["RayWorkers", "Worker"]


@dataclass(frozen=True)
class RayWorkers:
    """Completes prompts for ``write_answers(complete=)`` on the cluster of RAY_ADDRESS, or on this machine.

    config  how each worker loads the model: it has as many CPUs as threads (default: 1), and a GPU for the device
            cuda, or for auto if the cluster has GPUs
    number  of workers
    """

    config: loading.LoadConfig
    number: int = 1

    def __call__(
        self, target: Target, prompts: Sequence[EncodedPrompt], asked: Request, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the line of each prompt, in any order. Raises AnabranchError with the reason if a worker raises."""
        if not prompts:
            return
        if not ray.is_initialized():
            with sigterm_raises():  # restores the handler that ray.init replaces
                ray.init(log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        device, threads = self.config.device.partition(":")[0], self.config.threads or 1
        gpu = device == "cuda" or (device == "auto" and "GPU" in ray.cluster_resources())
        config = replace(self.config, device="cuda" if gpu else "cpu", threads=threads)
        size = min(rows * CHUNK, -(-len(prompts) // self.number))
        blocks = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        items = [{"prompts": json.dumps([asdict(prompt) for prompt in block])} for block in blocks]
        completed = ray.data.from_items(items, override_num_blocks=len(items)).map(
            Worker,
            fn_constructor_args=(config, target.fingerprint, asked, rows),
            compute=ray.data.ActorPoolStrategy(size=self.number),
            num_cpus=threads,
            num_gpus=int(gpu),
        )
        try:
            for block in completed.iter_rows():
                yield from json.loads(block["lines"])
        except RayError as error:
            cause = re.search(r"^[\w.]+: .+", str(error), re.MULTILINE)  # the worker's own error, in Ray's traces
            reason = one_line(error) if cause is None else cause[0]
            raise AnabranchError(f"a worker on Ray failed; the file keeps its lines so far: {reason}") from error


class Worker:
    """An actor that completes blocks of prompts with the model of ``fingerprint``."""

    def __init__(self, config: loading.LoadConfig, fingerprint: str, asked: Request, rows: int) -> None:
        self._target = loading.load(config, adapters=False).target
        if self._target.fingerprint != fingerprint:
            raise ModelError(f"{config.model} is another model on a worker; give all machines the same files")
        self._asked, self._rows = asked, rows

    def __call__(self, block: Mapping[str, str]) -> dict[str, str]:
        """The lines of a block, in the order in which they are finished."""
        prompts = [EncodedPrompt(**prompt) for prompt in json.loads(block["prompts"])]
        return {"lines": json.dumps([*completions(self._target, prompts, self._asked, self._rows)])}
