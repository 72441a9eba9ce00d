"""How long a step takes in the shape of a larger model, whose weights mean nothing: by width, batch and context.

Large models are seldom at hand where a machine is to be judged, and the time of a step does not depend on what the
weights say. The cache is filled with noise in place of a prompt. Three kinds of steps, in turns:

    plain      one node a row
    verify n   a draft of n nodes, which costs nothing to write
    streams    Speculative Streaming as in the paper: lossless, gamma 4, the top 4 layers, a best-first tree

What such a model would accept cannot be measured with random weights: ``Shape.ratios`` says what the times would make
of the paper's acceptance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.table import Table

from anabranch.analysis.cost import MODELS
from anabranch.bench.machine import Machine, measure_machine
from anabranch.engine import Engine, Request
from anabranch.errors import DeviceError, InputError
from anabranch.methods.base import Context, Drafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.streams.draft import DraftOptions
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import random_decoder
from anabranch.tree import DraftTree

__all__ = [
    "PAPER",
    "SHAPES",
    "WIDTHS",
    "Fixed",
    "Shape",
    "Times",
    "measure_shape",
    "shape_record",
    "shape_table",
]

SHAPES = {"135m": "SmolLM2-135M", "7b": "Llama-2-7B", "13b": "Llama-2-13B", "33b": "Vicuna-33B"}
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# tokens a step and speedup of lossless Speculative Streaming on MT-Bench, Vicuna of these sizes (ACL tables 6 and 1)
PAPER = {"Llama-2-7B": (3.52, 3.08), "Llama-2-13B": (3.63, 3.21), "Vicuna-33B": (3.75, 3.24)}
ROUNDS = 6

Report = Callable[[str, int, int], None]


class Fixed(Drafter):
    """Proposes a chain as wide as asked of a token that is not its root: for the cost of a pass, not for its tokens."""

    name = "fixed"

    def __init__(self, width: int) -> None:
        self.max_nodes = self.width = width

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """A chain a row."""
        wrong = [c.root - 1 if c.root else 1 for c in contexts]
        return [
            DraftTree.chain(c.root, [token] * min(self.width - 1, c.room), source=self.name)
            for c, token in zip(contexts, wrong, strict=True)
        ]


class _Filled(Engine):
    """Noise in place of a prompt: a long context takes no time to read."""

    def _read(self, tokens: list[int], slot: int, planned: int, on_prompt: object = None) -> None:
        for half in (self.cache.keys, self.cache.values):
            half[:, slot, :, : len(tokens)].normal_()
        self.cache.lengths[slot] = len(tokens)


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step of one kind: lower quartile, median and upper quartile over ``steps`` steps.

    ``nodes`` are verified a row; of streams the mean, since a tree may hold fewer than asked.
    """

    batch: int
    context: int
    kind: str
    nodes: float
    ms: tuple[float, float, float]
    steps: int


@dataclass
class Shape:
    """What was measured, and what could not be (batch, context, and why)."""

    model: str
    parameters: int
    dtype: str
    machine: Machine
    times: list[Times] = field(default_factory=list)
    left_out: list[tuple[int, int, str]] = field(default_factory=list)

    def find(self, batch: int, context: int, kind: str) -> Times | None:
        """The times of one kind."""
        return next((t for t in self.times if (t.batch, t.context, t.kind) == (batch, context, kind)), None)

    def ratios(self) -> list[dict[str, float]]:
        """By batch and context: plain steps over the floor of memory, steps with streams over plain ones, and the
        speedup over plain decoding that follows if as many tokens are accepted a step as in the paper, beside the
        paper's own.
        """
        found, paper = [], PAPER.get(self.model)
        for plain in (t for t in self.times if t.kind == "plain"):
            streams = self.find(plain.batch, plain.context, "streams")
            row = {"batch": plain.batch, "context": plain.context, "plain_ms": plain.ms[1]}
            row["plain_over_floor"] = round(plain.ms[1] / self.machine.floor_ms, 3)
            if streams is not None:
                row["streams_over_plain"] = round(streams.ms[1] / plain.ms[1], 3)
                if paper is not None:
                    row["tokens_a_step"], row["speedup_in_the_paper"] = paper
                    row["speedup"] = round(paper[0] * plain.ms[1] / streams.ms[1], 3)
            found.append(row)
        return found


def measure_shape(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (512,),
    nodes: int = 32,
    rounds: int = ROUNDS,
    report: Report = lambda what, done, total: None,
) -> Shape:
    """Measure steps in the shape ``name`` (of ``SHAPES``, or a model of ``analysis.cost.MODELS``).

    A batch and context that do not fit the memory are left out. Raises InputError for names and numbers that make no
    sense, DeviceError where not even the weights fit.
    """
    model = SHAPES.get(name, name)
    if model not in MODELS:
        raise InputError(f"there is no shape {name!r}; shapes are {', '.join([*SHAPES, *MODELS])}")
    for what, values in (("width", widths), ("batch", batches), ("context", contexts), ("rounds", (rounds,))):
        if wrong := [value for value in values if value < 1]:
            raise InputError(f"{what} must be at least 1, not {wrong[0]}")
    config = model_config(MODELS[model])
    config = replace(config, max_positions=2**30, eos_token_ids=())  # rotations go on as far as they are asked to
    report("weights", 0, 1)
    decoder = random_decoder(config, dtype=dtype, device=device).eval()
    adapter = StreamAdapter(config, StreamConfig()).to(device, dtype).eval().requires_grad_(False)
    parameters = sum(p.numel() for p in decoder.parameters())
    pack_decoder(decoder)
    report("memory", 0, 1)
    machine = measure_machine(decoder)
    shape = Shape(model, parameters, str(dtype).removeprefix("torch."), machine)
    kinds: dict[str, Drafter] = {"plain": NoDrafter(), **{f"verify {n}": Fixed(n) for n in sorted(set(widths))}}
    kinds["streams"] = StreamDrafter(decoder, adapter, DraftOptions(nodes=nodes))
    cells = [(batch, context) for context in contexts for batch in batches]
    for done, (batch, context) in enumerate(cells):
        report(f"batch {batch}, context {context:,}", done, len(cells))
        try:
            shape.times += _cell(decoder, kinds, batch, context, rounds)
        except (DeviceError, torch.OutOfMemoryError) as error:
            shape.left_out.append((batch, context, str(error).split("\n")[0]))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report("", len(cells), len(cells))
    return shape


def _cell(decoder: Decoder, kinds: dict[str, Drafter], batch: int, context: int, rounds: int) -> list[Times]:
    """All kinds in turns, so that a machine that drifts drifts for all. One more round goes before those that count."""
    widest = max(kinds.values(), key=lambda drafter: drafter.room)
    most = 2 * (rounds + 1) * len(kinds) * (StreamConfig().num_streams + 1) + widest.room  # tokens that steps may emit
    engine = _Filled(decoder, widest, rows=batch, capacity=context + most)
    words = torch.randint(decoder.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    for row in words.tolist():
        engine.add(Request(row, most))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    verified: dict[str, list[int]] = {kind: [] for kind in kinds}
    for counted in range(rounds + 1):
        for kind, drafter in kinds.items():
            engine.drafter = drafter
            engine.step()  # streams know no draft yet, and caches are another kind's
            began = time.perf_counter()
            done = engine.step()
            ms = 1e3 * (time.perf_counter() - began)
            if counted:
                found[kind].append(ms)
                verified[kind].append(max(step.tree.size for step in done))
    engine.clear()
    times = []
    for kind, values in found.items():
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
        low, middle, high = (round(value, 3) for value in quartiles)
        nodes = statistics.fmean(verified[kind])
        times.append(Times(batch, context, kind, round(nodes, 2), (low, middle, high), len(values)))
    return times


def shape_record(shape: Shape) -> dict[str, Any]:
    """For result files."""
    return {
        "model": shape.model,
        "parameters": shape.parameters,
        "dtype": shape.dtype,
        "machine": shape.machine.to_dict(),
        "steps": [asdict(times) for times in shape.times],
        "left_out": [{"batch": batch, "context": context, "why": why} for batch, context, why in shape.left_out],
        "ratios": shape.ratios(),
    }


def shape_table(shape: Shape) -> list[Table]:
    """Milliseconds by kind, one row a batch and context; and what follows from them."""
    kinds = list(dict.fromkeys(times.kind for times in shape.times))
    floor = f"{shape.machine.weight_mb / 1e3:.2f} GB of weights at {shape.machine.read_gb_s[1]:.1f} GB/s"
    steps = Table("batch", "context", *kinds, title=f"{shape.model}, ms a step (median); floor {floor}")
    ratios = Table("batch", "context", "plain / floor", "streams / plain", "tokens a step", "speedup", "the paper's")
    for row in shape.ratios():
        batch, context = int(row["batch"]), int(row["context"])
        cells = (shape.find(batch, context, kind) for kind in kinds)
        steps.add_row(str(batch), f"{context:,}", *("" if cell is None else f"{cell.ms[1]:.2f}" for cell in cells))
        names = ("plain_over_floor", "streams_over_plain", "tokens_a_step", "speedup", "speedup_in_the_paper")
        ratios.add_row(str(batch), f"{context:,}", *(f"{row[name]:.2f}" if name in row else "" for name in names))
    for batch, context, why in shape.left_out:
        steps.add_row(str(batch), f"{context:,}", f"left out: {why}")
    return [steps, ratios]
