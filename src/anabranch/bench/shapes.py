"""Time steps of a model, or of a model shape with random weights, by width, batch and context.

The time of a step does not depend on the values of the weights, so a machine can be evaluated for models that are not
available. The KV cache is filled with noise instead of a prompt. Three kinds of steps alternate:

    plain      one node per row
    verify n   a draft of n nodes that takes no time to make
    METHOD     of shapes: each default method with a trained module, with its usual shape and random weights

Acceptance cannot be measured with random weights: ``Shape.ratios`` computes the speedup from these times and the
acceptance reported in a method's paper.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from anabranch.analysis.cost import MODELS
from anabranch.bench.machine import Machine, measure_machine
from anabranch.decoding.engine import Engine, Request
from anabranch.errors import CapabilityError, DeviceError, InputError
from anabranch.methods import Drafter, Needs, Observation, Row, methods
from anabranch.methods.none import NoDrafter
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.pack import pack_decoder
from anabranch.model.passes import PassResult
from anabranch.model.quantize import ROUNDINGS, quantize_decoder, rounding_of
from anabranch.model.random_stored import random_stored_decoder
from anabranch.model.weights import build_decoder, random_decoder
from anabranch.support.nearest import hint
from anabranch.tree import DraftTree

__all__ = [
    "ROUNDS",
    "SHAPES",
    "WIDTHS",
    "Fixed",
    "Shape",
    "Times",
    "is_shape",
    "measure_decoder",
    "measure_shape",
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
    def needs(self) -> Needs:  # type: ignore[override]
        return replace(self.now.needs, probes=0, positions=max(drafter.margin for drafter in self.drafters))

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

    nodes       mean number of verified nodes per row: a method's tree may have fewer than its budget
    pass_ms     the target's pass alone
    over_plain  quartiles of the ratios to the plain step of the same round
    """

    batch: int
    context: int
    kind: str
    nodes: float
    ms: tuple[float, float, float]
    pass_ms: tuple[float, float, float]
    over_plain: tuple[float, float, float]
    steps: int


@dataclass
class Shape:
    """The measured times, and the combinations that were left out (batch, context, and why).

    weights  their form: "none" (not quantised), "int8", "int4", "stored" (as a GGUF file has them) or the format of
             random blocks
    random   whether the weights are random
    """

    model: str
    parameters: int
    dtype: str
    weights: str
    random: bool
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
                row["over_plain"] = drafted.over_plain[1]
                if (paper := method.published.get(self.model)) is not None:
                    row["tokens_a_step"], row["speedup_in_the_paper"] = paper
                    row["speedup"] = round(paper[0] / drafted.over_plain[1], 3)
                rows.append(row)
        return rows

    def first_over(self, batch: int, context: int, limit: float) -> int | None:
        """The smallest measured number of nodes whose pass takes over ``limit`` plain steps; None: none does."""
        passes = [t for t in self.times if (t.batch, t.context) == (batch, context) and t.kind.startswith("verify ")]
        over = [round(times.nodes) for times in passes if times.over_plain[1] > limit]
        return min(over, default=None)


def is_shape(name: str) -> bool:
    """Return whether a name is that of a shape, not of a model to load.

    Raises InputError for a name that can be neither, with a sentence that names the shapes.
    """
    if SHAPES.get(name, name) in MODELS:
        return True
    if name == "default" or name.endswith(".gguf") or "/" in name or Path(name).exists():
        return False
    raise InputError(
        f"there is no shape {name!r}{hint(name, (*SHAPES, *MODELS))}; shapes are {', '.join([*SHAPES, *MODELS])}, and "
        "models are default, a folder, a .gguf file or a hub id"
    )


def measure_shape(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: str = "none",
    nodes: int = 32,
    report: Report = lambda what, done, total: None,
    **grid: Any,
) -> Shape:
    """Time steps of the shape ``name`` (of ``SHAPES``, or a model of ``analysis.cost.MODELS``) with random weights.

    weights  their form: "none", "int8", "int4", or a format of quantised GGUF files, such as "Q4_K"
    nodes    node budget of the methods' drafts
    grid     the widths, batches, contexts and rounds of ``measure_decoder``

    Raises InputError for unknown names and numbers out of range, CapabilityError if the shape cannot be decoded in that
    format, and DeviceError if the weights do not fit in memory.
    """
    if not is_shape(name):
        raise InputError(f"{name} is a model, not a shape; load it, and time it with measure_decoder")
    _check_grid(**grid)
    model = SHAPES.get(name, name)
    config = model_config(MODELS[model])
    config = replace(config, max_positions=2**30, eos_token_ids=())  # any context is allowed
    report("weights", 0, 1)
    if weights in ROUNDINGS:
        decoder = random_decoder(config, dtype=dtype, device=device).eval()
        quantize_decoder(decoder, rounding_of(weights))
        pack_decoder(decoder)
    elif device.type == "cpu":
        decoder = random_stored_decoder(config, weights)
    else:
        raise CapabilityError(f"blocks of {weights} are multiplied on the CPU only; use --device cpu")
    drafters = _trained_drafters(decoder, nodes)
    return measure_decoder(decoder, model, weights=weights, random=True, drafters=drafters, report=report, **grid)


def _check_grid(**grid: Any) -> None:
    for what, values in grid.items():
        if wrong := [value for value in (values if isinstance(values, Sequence) else (values,)) if value < 1]:
            raise InputError(f"{what} must be at least 1, got {wrong[0]}")


def measure_decoder(
    decoder: Decoder,
    model: str,
    *,
    weights: str,
    random: bool = False,
    drafters: Mapping[str, Drafter] = MappingProxyType({}),
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (512,),
    rounds: int = ROUNDS,
    report: Report = lambda what, done, total: None,
) -> Shape:
    """Time plain steps, passes over drafts of ``widths`` nodes, and steps of ``drafters``, of a packed decoder.

    Combinations of batch and context that do not fit in memory are left out. Raises InputError for numbers out of
    range and for a context beyond the model's positions.
    """
    _check_grid(widths=widths, batches=batches, contexts=contexts, rounds=rounds)
    report("memory", 0, 1)
    # of the config: packed weights are no parameters
    parameters = sum(parameter.numel() for parameter in build_decoder(decoder.config).parameters())
    machine = measure_machine(decoder)
    dtype = str(decoder.dtype).removeprefix("torch.")
    shape = Shape(model, parameters, dtype, weights, random, machine)
    kinds: dict[str, Drafter] = {"plain": NoDrafter(), **{f"verify {n}": Fixed(n) for n in sorted(set(widths))}}
    kinds |= drafters
    if max(contexts) >= decoder.config.max_positions:
        raise _too_long(decoder, max(contexts))
    cells = [(batch, context) for context in contexts for batch in batches]
    for done, (batch, context) in enumerate(cells):
        report(f"batch {batch}, context {context:,}", done, len(cells))
        try:
            shape.times += _cell(decoder, kinds, batch, context, rounds)
        except (DeviceError, torch.OutOfMemoryError) as error:
            shape.left_out.append((batch, context, str(error).split("\n")[0]))
        if decoder.device.type == "cuda":
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


def _too_long(decoder: Decoder, context: int) -> InputError:
    return InputError(
        f"a context of {context:,} tokens and those that are timed do not fit the model's "
        f"{decoder.config.max_positions:,} positions; use a shorter one"
    )


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
    passes: dict[str, list[float]] = {kind: [] for kind in kinds}
    verified: dict[str, list[int]] = {kind: [] for kind in kinds}
    for counted in range(rounds + 1):
        for kind, drafter in kinds.items():
            turns.now = drafter
            engine.step()  # not timed: no draft is prepared yet, and the CPU's caches have another kind's data
            began = time.perf_counter()
            done = engine.step()
            ms = 1e3 * (time.perf_counter() - began)
            if not done:  # the rows have ended
                raise _too_long(decoder, context)
            if counted:
                milliseconds[kind].append(ms)
                passes[kind].append(1e3 * done[0].timings.forward)
                verified[kind].append(max(step.tree.size for step in done))
    engine.clear()
    return [
        Times(
            batch,
            context,
            kind,
            round(statistics.fmean(verified[kind]), 2),
            _quartiles(values),
            _quartiles(passes[kind]),
            _quartiles([ms / plain for ms, plain in zip(values, milliseconds["plain"], strict=True)]),
            len(values),
        )
        for kind, values in milliseconds.items()
    ]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    low, middle, high = (round(value, 3) for value in quartiles)
    return low, middle, high
