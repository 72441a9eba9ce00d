"""Time steps of a model shape with random weights, by width, batch and context.

The time of a step does not depend on the values of the weights, so a machine can be evaluated for models that are not
available. The KV cache is filled with noise instead of a prompt. Three kinds of steps alternate:

    plain      one node per row
    verify n   a draft of n nodes that takes no time to make
    METHOD     each default method with a trained module, with its usual shape and random weights

Acceptance cannot be measured with random weights: ``Shape.ratios`` computes the speedup from these times and the
acceptance reported in a method's paper.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from anabranch.analysis.cost import MODELS
from anabranch.bench.cells import decimal
from anabranch.bench.machine import Machine, measure_machine
from anabranch.decoding.engine import Engine, Request
from anabranch.errors import DeviceError, InputError
from anabranch.methods import Drafter, Observation, Row, Taps, methods
from anabranch.methods.none import NoDrafter
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.pack import pack_decoder
from anabranch.model.passes import PassResult, Rider
from anabranch.model.weights import random_decoder
from anabranch.support.nearest import hint
from anabranch.support.table import Table
from anabranch.tree import DraftTree

__all__ = [
    "SHAPES",
    "WIDTHS",
    "Fixed",
    "Shape",
    "Times",
    "measure_shape",
    "shape_record",
    "shape_table",
    "wrong_chain",
]

SHAPES = {"135m": "SmolLM2-135M", "7b": "Llama-2-7B", "13b": "Llama-2-13B", "33b": "Vicuna-33B"}
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 6

Report = Callable[[str, int, int], None]


def wrong_chain(row: Row, nodes: int) -> DraftTree:
    """A chain of ``nodes`` nodes (at most ``row.max_depth`` deep) that takes no time: any token other than the root."""
    token = row.root - 1 if row.root else 1
    count = max(0, min(nodes - 1, row.max_depth))
    return DraftTree.chain(row.root, [token] * count, source="fixed", log_probs=[0.0] * count)


class Fixed(Drafter):
    """Proposes chains of a fixed number of nodes, to time passes."""

    name = "fixed"

    def __init__(self, width: int) -> None:
        self.max_nodes = self.width = width

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One chain per row."""
        return [wrong_chain(row, self.width) for row in rows]


class _Alternating(Drafter):
    """Several drafters that alternate on the same rows; ``now`` is the active one."""

    name = "turns"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters, self.now = tuple(drafters), drafters[0]

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.now.max_nodes

    @property
    def needs(self) -> Taps:  # type: ignore[override]
        return self.now.needs

    @property
    def margin(self) -> int:
        return max(drafter.margin for drafter in self.drafters)

    @property
    def rider(self) -> Rider | None:
        return self.now.rider

    def join(self, row: Row) -> None:
        for drafter in self.drafters:
            drafter.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        self.now.read(row, result, start)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        return self.now.draft(rows, budget)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        self.now.observe(rows, seen)

    def leave(self, row: Row) -> None:
        for drafter in self.drafters:
            drafter.leave(row)


@dataclass(frozen=True)
class Times:
    """Milliseconds of one kind of step: lower quartile, median and upper quartile over ``steps`` steps.

    nodes  mean number of verified nodes per row: a method's tree may have fewer than its budget
    """

    batch: int
    context: int
    kind: str
    nodes: float
    ms: tuple[float, float, float]
    steps: int


@dataclass
class Shape:
    """The measured times, and the combinations that were left out (batch, context, and why)."""

    model: str
    parameters: int
    dtype: str
    machine: Machine
    times: list[Times] = field(default_factory=list)
    left_out: list[tuple[int, int, str]] = field(default_factory=list)

    def find(self, batch: int, context: int, kind: str) -> Times | None:
        """The times of one kind of step."""
        return next((t for t in self.times if (t.batch, t.context, t.kind) == (batch, context, kind)), None)

    def ratios(self) -> list[dict[str, Any]]:
        """By batch, context and method: plain step / memory floor, method's step / plain step, and the speedup over
        plain decoding at the mean acceptance length reported in the method's paper, with the paper's own speedup.
        """
        rows = []
        for plain in (t for t in self.times if t.kind == "plain"):
            for method in methods():
                drafted = self.find(plain.batch, plain.context, method.name)
                if drafted is None:
                    continue
                row: dict[str, Any] = {"batch": plain.batch, "context": plain.context, "method": method.name}
                row["plain_ms"] = plain.ms[1]
                row["plain_over_floor"] = round(plain.ms[1] / self.machine.floor_ms, 3)
                row["over_plain"] = round(drafted.ms[1] / plain.ms[1], 3)
                if (paper := method.published.get(self.model)) is not None:
                    row["tokens_a_step"], row["speedup_in_the_paper"] = paper
                    row["speedup"] = round(paper[0] * plain.ms[1] / drafted.ms[1], 3)
                rows.append(row)
        return rows


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
    """Time steps of the shape ``name`` (of ``SHAPES``, or a model of ``analysis.cost.MODELS``).

    nodes  node budget of the methods' drafts

    Combinations of batch and context that do not fit in memory are left out. Raises InputError for unknown names and
    numbers out of range, DeviceError if the weights do not fit in memory.
    """
    model = SHAPES.get(name, name)
    if model not in MODELS:
        raise InputError(
            f"there is no shape {name!r}{hint(name, (*SHAPES, *MODELS))}; shapes are {', '.join([*SHAPES, *MODELS])}"
        )
    for what, values in (("width", widths), ("batch", batches), ("context", contexts), ("rounds", (rounds,))):
        if wrong := [value for value in values if value < 1]:
            raise InputError(f"{what} must be at least 1, got {wrong[0]}")
    config = model_config(MODELS[model])
    config = replace(config, max_positions=2**30, eos_token_ids=())  # any context is allowed
    report("weights", 0, 1)
    decoder = random_decoder(config, dtype=dtype, device=device).eval()
    parameters = sum(p.numel() for p in decoder.parameters())
    pack_decoder(decoder)
    report("memory", 0, 1)
    machine = measure_machine(decoder)
    shape = Shape(model, parameters, str(dtype).removeprefix("torch."), machine)
    kinds: dict[str, Drafter] = {"plain": NoDrafter(), **{f"verify {n}": Fixed(n) for n in sorted(set(widths))}}
    kinds |= _trained_drafters(decoder, nodes)
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


def _trained_drafters(decoder: Decoder, nodes: int) -> dict[str, Drafter]:
    """The default methods with a trained module, with random weights and at most ``nodes`` nodes per draft."""
    drafters = {}
    for method in methods():
        if method.default and method.trained is not None:
            module = method.trained.make(decoder.config, method.trained.config(), None)
            module = module.to(decoder.device, decoder.dtype).eval().requires_grad_(False)
            settings = max(method.candidates(nodes), key=lambda settings: settings.budget or 0)
            drafters[method.name] = method.build(decoder, settings, module)
    return drafters


def _cell(decoder: Decoder, kinds: dict[str, Drafter], batch: int, context: int, rounds: int) -> list[Times]:
    """Time all kinds in alternation, so that drift of the machine affects all alike, after one warm-up round."""
    turns = _Alternating(list(kinds.values()))
    deepest = max(drafter.depth_of(drafter.max_nodes) for drafter in kinds.values() if not isinstance(drafter, Fixed))
    most = 2 * (rounds + 1) * len(kinds) * (deepest + 1) + turns.margin  # maximum number of emitted tokens
    engine = Engine(decoder, turns, rows=batch, capacity=context + most)
    tokens = torch.randint(decoder.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    for slot, row in enumerate(tokens.tolist()):
        # noise instead of the keys and values of a prompt, which would take long to compute
        for half in (engine.cache.keys, engine.cache.values):
            half[:, slot, :, : context - 1].normal_()
        engine.join(Request(row, most), known=context - 1)
    milliseconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    verified: dict[str, list[int]] = {kind: [] for kind in kinds}
    for counted in range(rounds + 1):
        for kind, drafter in kinds.items():
            turns.now = drafter
            engine.step()  # not timed: no draft is prepared yet, and the CPU's caches have another kind's data
            began = time.perf_counter()
            done = engine.step()
            ms = 1e3 * (time.perf_counter() - began)
            if counted:
                milliseconds[kind].append(ms)
                verified[kind].append(max(step.tree.size for step in done))
    engine.clear()
    times = []
    for kind, values in milliseconds.items():
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
        low, middle, high = (round(value, 3) for value in quartiles)
        nodes = statistics.fmean(verified[kind])
        times.append(Times(batch, context, kind, round(nodes, 2), (low, middle, high), len(values)))
    return times


def shape_record(shape: Shape) -> dict[str, Any]:
    """The result as JSON values, for result files."""
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
    """Two tables: milliseconds by kind, one line per batch and context, and the ratios computed from them."""
    kinds = list(dict.fromkeys(times.kind for times in shape.times))
    steps: list[list[object]] = []
    for batch, context in dict.fromkeys((times.batch, times.context) for times in shape.times):
        cells = (shape.find(batch, context, kind) for kind in kinds)
        steps.append([batch, f"{context:,}", *("" if cell is None else f"{cell.ms[1]:.2f}" for cell in cells)])
    steps += [[batch, f"{context:,}", f"left out: {why}"] for batch, context, why in shape.left_out]
    names = ("plain_over_floor", "over_plain", "tokens_a_step", "speedup", "speedup_in_the_paper")
    ratios = [
        [row["batch"], f"{row['context']:,}", row["method"], *(decimal(row[n]) if n in row else "" for n in names)]
        for row in shape.ratios()
    ]
    floor = f"{shape.machine.weight_mb / 1e3:.2f} GB of weights at {shape.machine.read_gb_s[1]:.1f} GB/s"
    titles = ("plain / floor", "method / plain", "mean acceptance length", "speedup", "the paper's")
    return [
        Table(["batch", "context", *kinds], steps, f"{shape.model}, ms per step (median); floor {floor}", left=0),
        Table(["batch", "context", "method", *titles], ratios, left=3),
    ]
