"""Training in several processes that ``torchrun`` starts: each takes its share of every batch.

    torchrun --nproc-per-node 2 -m anabranch train streams --answers answers.jsonl --out my-adapter

Gradients are summed once a step, after all segments and parts of the batch; ``DistributedDataParallel`` would sum them
at each backward pass, of which a step has many. All processes keep the same weights and optimizer, so a checkpoint does
not depend on their number. The first one alone evaluates, prints and writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.errors import DeviceError, InputError
from anabranch.learning.examples import Batch
from anabranch.learning.objective import Segment
from anabranch.model.decoder import Decoder

__all__ = ["Processes", "Share", "joined", "launched", "shares"]

PATIENCE = timedelta(hours=12)  # while the first process evaluates, the others wait

T = TypeVar("T")


class Processes:
    """The processes of a training, and which of them this is; by itself it is the only one.

    sharded  whether each process holds a part of the target's layers only (``shard``)
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count, self.sharded = rank, count, False

    @property
    def first(self) -> bool:
        """True in the process that evaluates, prints and writes files."""
        return self.rank == 0

    def add(self, x: Tensor) -> Tensor:
        """The sum of all processes' tensors of one shape, the same in all of them."""
        if self.count > 1:
            with _connected():
                dist.all_reduce(x)
        return x

    def broadcast(self, value: T) -> T:
        """The first process's ``value``."""
        if self.count == 1:
            return value
        values = [value]
        with _connected():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def shard(self, target: Decoder) -> None:
        """Keep this process's part of the weights of each layer only, in place (FSDP2).

        A layer's weights are gathered from all processes whenever it is called, so all must call the same layers in the
        same order. Embeddings, the last norm and the head stay whole. Raises InputError for a single process.
        """
        if self.count == 1:
            raise InputError("a target is sharded between several processes; start them with torchrun")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(target.device.type, (self.count,))
        for block in target.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        self.sharded = True


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo raises when the other side is gone
        raise DeviceError(
            "another process of this training has ended; its own message says why, and the same command resumes from "
            "the last checkpoint"
        ) from error


def launched() -> Processes:
    """This process and the others that ``torchrun`` started; they are not connected yet."""
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return Processes()
    return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@contextmanager
def joined() -> Iterator[Processes]:
    """Connect the processes that ``torchrun`` started; without it there is only this one.

    Sums on a CPU go through gloo. With GPUs, each process takes the one of its local rank, and their sums go through
    NCCL (not yet run on several GPUs).
    """
    processes = launched()
    if processes.count == 1:
        yield processes
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    with _connected():
        dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield processes
    finally:
        dist.destroy_process_group()


Segments = Callable[[Batch], Iterator[Segment]]


@dataclass(frozen=True)
class Share:
    """A part of a batch.

    counted  False: the rows are another process's, and are computed without effect, to call the same layers
    least    the number of segments to compute; if the part has fewer, the last one is repeated without effect
    """

    batch: Batch
    counted: bool = True
    least: int = 0

    def weighted(self, segments: Segments) -> Iterator[tuple[Segment, float]]:
        """The segments to compute, each with the weight of its loss: 1, or 0 for those without effect."""
        done, last = 0, None
        for last in segments(self.batch):
            done += 1
            yield last, float(self.counted)
        for _ in range(self.least - done if last is not None else 0):
            assert last is not None
            yield last, 0.0


def shares(batch: Batch, segments: Segments, processes: Processes, accumulate: int) -> list[Share]:
    """The shares of this process, one after another: ``accumulate`` of them, or fewer for a small batch.

    If the target is sharded, every call of a layer gathers its weights from all processes. Then all processes compute
    as many shares and segments, those without effect included.
    """
    parts = batch.split(processes.count * accumulate)
    if not processes.sharded:
        return [Share(part) for part in parts[processes.rank :: processes.count]]
    made = []
    for first in range(0, len(parts), processes.count):
        together = parts[first : first + processes.count]
        counts = [sum(1 for _ in segments(part)) for part in together]
        most = max(counts)
        longest = together[counts.index(most)]
        mine = processes.rank < len(together) and counts[processes.rank] > 0
        made.append(Share(together[processes.rank] if mine else longest, mine, most))
    return made
