"""Why the paper's lossless form starves on a small target, and what lets it learn: ACL sections 2.1 and 2.4.

The form is literal: rank-8 adapters in place of the MLP of stream rows, in four layers. The paper leaves open what the
adapters start from, and how fast each parameter learns.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary
from anabranch.learning.recipe import Recipe, TrainOptions
from anabranch.learning.target import run_frozen
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import mlp_rows, reproduce_mlps, scale_to_target
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import TRAINING
from anabranch.model.decoder import Decoder
from anabranch.train.data import batches, frequent_tokens, split
from anabranch.train.trainer import Progress, Trainer
from studies.base import Chart, Line, Result, Setup, Study, Table, rounded

__all__ = ["STARTS", "STUDY"]

Begin = Callable[[Decoder, StreamAdapter, Sequence[Example]], None]
TOKENS, WORDS, HELD_OUT = 512, 8192, 0.15
SAMPLE = 4  # texts that gradients are measured on


def _zero(target: Decoder, adapter: StreamAdapter, examples: Sequence[Example]) -> None:
    """Adapters at zero, and one learning rate for all parameters."""


def _scaled(target: Decoder, adapter: StreamAdapter, examples: Sequence[Example]) -> None:
    scale_to_target(target, adapter)


def _both(target: Decoder, adapter: StreamAdapter, examples: Sequence[Example]) -> None:
    scale_to_target(target, adapter)
    reproduce_mlps(target, adapter, examples)


PAPER, STEEP = {"lr": 5e-4, "schedule": "linear"}, {"lr": 1e-3, "schedule": "cosine"}
STARTS: dict[str, tuple[Begin, dict[str, Any]]] = {
    "zero, one learning rate": (_zero, STEEP),
    "zero, embeddings learn by the states' size": (_scaled, STEEP),
    "MLPs reproduced": (reproduce_mlps, STEEP),
    "both": (_both, STEEP),
    "both, the paper's learning rate": (_both, PAPER),
}


def _layers(target: Decoder, adapter: StreamAdapter, examples: Sequence[Example]) -> list[dict[str, float]]:
    """Root mean squares of main rows and of what MLPs add, and the share of it that the adapters reproduce."""
    held_out = mlp_rows(target, adapter, examples)
    taps = tuple(range(adapter.start, target.config.num_layers))
    states = run_frozen(target, Batch.of([examples[0]]), taps=taps).taps
    found = []
    for index, (x_MD, y_MD) in held_out.items():
        term = adapter.layer(index).mlp
        assert term is not None
        with torch.no_grad():
            missed = (y_MD - term(x_MD)).square().sum() / y_MD.square().sum()
        main, added = (float(rows.float().square().mean(-1).sqrt().median()) for rows in (states[index], y_MD))
        found.append({"layer": index, "main": main, "mlp": added, "reproduced": 1 - float(missed)})
    return [{name: round(value, 4) for name, value in each.items()} for each in found]


def _gradients(objective: StreamObjective, adapter: StreamAdapter, examples: Sequence[Example]) -> dict[str, float]:
    """Norms of the loss's gradient by kind of parameter, and the loss itself."""
    batch, sums = Batch.of(examples[:SAMPLE]), {"loss": 0.0}
    frozen = objective.freeze(batch)
    for segment in objective.segments(batch):
        loss = objective.loss(batch, frozen, segment).loss / objective.predictions(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        sums["loss"] += float(loss.detach())
    for name, parameter in adapter.named_parameters():
        if parameter.grad is not None:
            kind = name.split(".")[-1]
            sums[kind] = math.hypot(sums.get(kind, 0.0), float(parameter.grad.norm()))
    adapter.zero_grad(set_to_none=True)
    return {name: round(value, 4) for name, value in sums.items()}


def _recipe(target: Decoder, options: dict[str, Any]) -> Recipe:
    """The literal recipe without the pruning layer's loss, which is beside the streams'."""
    layers = min(TRAINING.recipe("paper-lossless").config.num_stream_layers, target.config.num_layers)
    recipe = TRAINING.recipe("paper-lossless", {"stream_layers": layers, **options})
    return replace(recipe, loss=replace(recipe.loss, pruning=0.0))


def _train(
    target: Decoder, begin: Begin, options: dict[str, Any], examples: list[Example], held_out: list[Example], steps: int
) -> dict[str, Any]:
    recipe = _recipe(target, options)
    torch.manual_seed(0)
    always = list(target.config.eos_token_ids)
    words = frequent_tokens(examples, min(WORDS, target.config.vocab_size), target.config.vocab_size, always)
    adapter = StreamAdapter(target.config, recipe.config, words)
    begin(target, adapter, examples)
    objective = StreamObjective(target, adapter, recipe.loss, segment=recipe.options.segment)
    record: dict[str, Any] = {"start": _gradients(objective, adapter, held_out)}
    record["layers"] = _layers(target, adapter, held_out)
    per_epoch = len(list(batches(examples, TOKENS, seed=0)))
    each = TrainOptions(
        **options, epochs=steps / per_epoch, batch_tokens=TOKENS, keep_states="exact", evaluate_every=10**9
    )
    curve: list[tuple[int, float]] = [(0, record["start"]["loss"])]

    def seen(now: Progress) -> None:
        if now.step % 10 == 0 or now.step == now.steps:
            curve.append((now.step, round(now.loss, 4)))

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(target, adapter, objective, examples, held_out, each, Path(folder))
        evaluation = trainer.run(seen, resume=False)
    uniform = math.log(len(Vocabulary.of(target, words).head_VD))
    return record | {
        "rates": dict(adapter.rates()),
        "uniform": round(uniform, 4),
        "curve": curve,
        "length": evaluation["tree"],
        "top 1": rounded(evaluation["top 1"]),
    }


def _measure(setup: Setup) -> dict[str, Any]:
    examples = setup.answers()
    target = setup.target(pack=False, dtype="float32").decoder.requires_grad_(False)
    if len(examples) < 2:
        raise InputError(f"the study needs completions to train on and others to measure; give more than {setup.limit}")
    training, held_out = split(examples, max(1, int(HELD_OUT * len(examples))), 0)
    found = {}
    for name, (begin, options) in STARTS.items():
        setup.report(f"{name}: {setup.steps} steps")
        train = partial(_train, target, begin, options, training, held_out, setup.steps)
        found[name] = setup.part(name, train)
    tokens = sum(len(example.answer_ids) for example in training)
    return {"tokens": tokens, "steps": setup.steps, "starts": found}


def _ours(result: Result) -> str:
    starts = list(result["starts"].items())
    (first, before), (last, after) = starts[0], starts[-2]
    top = after["layers"][-1]
    return (
        f"after {result['steps']} steps, loss {before['curve'][-1][1]:.1f} ({first}) against "
        f"{after['curve'][-1][1]:.1f} ({last}; uniform {after['uniform']:.1f}), mean acceptance length "
        f"{before['length']:.2f} against {after['length']:.2f}; the last MLP adds {top['mlp']:.1f} to states of "
        f"{top['main']:.1f} (root mean squares), and rank 8 reproduces {top['reproduced']:.0%} of it"
    )


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for name, found in result["starts"].items():
        start, curve = found["start"], found["curve"]
        norms = ", ".join(f"{start[kind]:.3g}" for kind in ("embeddings", "down", "up"))
        reproduced = " ".join(f"{each['reproduced']:.0%}" for each in found["layers"])
        row = [name, reproduced, norms, f"{start['loss']:.2f}", f"{curve[-1][1]:.2f}", f"{found['length']:.2f}"]
        rows.append([*row, " ".join(f"{share:.2f}" for share in found["top 1"])])
    return (
        "start",
        "share of MLPs reproduced, by layer",
        "gradient norms of embeddings, down, up",
        "loss at the start",
        "loss at the end",
        "predicted mean acceptance length",
        "accuracy by stream",
    ), rows


def _chart(result: Result) -> Chart:
    lines = [Line(name, *zip(*found["curve"], strict=True)) for name, found in result["starts"].items()]
    return Chart("The paper's lossless form by its start", "steps of 512 tokens", "loss a prediction", lines)


STUDY = Study(
    name="lossless",
    papers="ACL sections 2.1 and 2.4, lossless mode",
    title="Starts of the paper's lossless form",
    measures="Streams of the literal form (rank-8 adapters in place of the MLP, four layers) trained on the same "
    "completions from several starts: adapters at zero or reproducing the MLP, embeddings that learn as fast as all "
    "else or in proportion to the states. The loss is the streams' alone, over a draft vocabulary of 8,192.",
    paper="none of this; learning rate 5e-4, linear",
    differs="a small target and short runs, to compare starts; the paper says nothing of starts or of learning rates "
    "by parameter",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
    limit=60,
)
