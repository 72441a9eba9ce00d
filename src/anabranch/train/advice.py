"""Warnings before and during a training run, and what to try next, from the data and the curves.

The thresholds come from the runs of docs/log.md; docs/training.md states them with their reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.train.trainer import Progress

__all__ = ["Scaling", "Watch", "before", "curve_of", "fit_scaling", "more_data", "next_steps", "scaling_of"]

Log = Sequence[Mapping[str, Any]]
Curve = list[tuple[int, float]]

WARMUP = 0.2  # fraction of all steps; the runs of docs/log.md warmed up for 4 to 10 %
PER_TOKEN = 12  # parameters per completion token: 88 k tokens for 1.06 M parameters are the fewest known to work
LATEST = 5  # minimum number of log lines (50 steps) to average a loss over
CHANGE = 0.01  # smaller relative changes of the acceptance length, or of right predictions, are noise
FALL = 0.02  # held-out acceptance that is lower than its best by this fraction counts as falling
AHEAD = 0.05  # training accuracy minus held-out accuracy above which new completions help more than epochs


def before(
    examples: Sequence[Example], options: TrainOptions, steps: int, parameters: int, *, max_tokens: int
) -> list[str]:
    """Warnings before a training: too little data for the warmup or for the parameters, most examples cut.

    parameters  the trained ones; 0: they start from trained weights, so any data will do
    """
    sentences = []
    if (options.warmup or 0) > WARMUP * steps:
        sentences.append(
            f"the warmup of {options.warmup} steps is more than {WARMUP:.0%} of the {steps} steps of this training; "
            f"give more completions or --epochs, or --warmup {steps // 10}"
        )
    tokens = sum(len(example.answer_ids) for example in examples)
    if tokens * PER_TOKEN < parameters:
        sentences.append(
            f"{tokens:,} completion tokens are few for {parameters:,} parameters: at least one token per {PER_TOKEN} "
            f"parameters is known to work, here {math.ceil(parameters / PER_TOKEN):,}; give more completions, or train "
            "a smaller adapter (see the options for its ranks and widths)"
        )
    cut = sum(len(example) >= max_tokens for example in examples)
    if 2 * cut > len(examples) and any(example.id != "" for example in examples):  # plain text is always cut
        sentences.append(
            f"{cut:,} of {len(examples):,} examples are cut at {max_tokens} tokens, so the ends of completions are not "
            "learned; raise --max-tokens"
        )
    return sentences


def curve_of(log: Log, last: Mapping[str, Any] | None = None, step: int = 0) -> Curve:
    """Held-out acceptance length (the evaluation's "tree") by step; ``last`` is the final evaluation, after ``step``.

    It is skipped if the log has one of that step, which uses the same examples as the earlier ones. The evaluations of
    a LoRA without a drafter have no acceptance length, so its curve is empty.
    """
    evaluated = [(int(line["step"]), line["evaluation"]) for line in log if line["evaluation"]]
    curve = [(at, float(evaluation["tree"])) for at, evaluation in evaluated if "tree" in evaluation]
    if last and "tree" in last and not (curve and curve[-1][0] >= step):
        curve.append((step, float(last["tree"])))
    return curve


@dataclass
class Watch:
    """Warns once if the loss does not fall, and once if held-out acceptance falls.

    ``held_out`` says whether there are evaluations. If so, a rising acceptance length takes precedence, and so do more
    right predictions, since the loss of a nearly trained adapter falls by less than it varies between batches.
    """

    held_out: bool = True
    said: set[str] = field(default_factory=set)

    def see(self, log: Log, progress: Progress) -> list[str]:
        """The new warnings after ``progress``, given the run's earlier ``log``."""
        curve = curve_of(log, progress.evaluation, progress.step)
        sentences = {"falls": _falls(curve), "stalls": ""}
        if len(curve) >= 2 or not self.held_out:
            sentences["stalls"] = _stalls(log, progress.steps, curve)
        new = {name: sentence for name, sentence in sentences.items() if sentence and name not in self.said}
        self.said.update(new)
        return list(new.values())


def _falls(curve: Curve) -> str:
    if len(curve) < 2:
        return ""
    step, best = max(curve, key=lambda point: point[1])
    if curve[-1][1] >= (1 - FALL) * best:
        return ""
    return (
        f"held-out mean acceptance length fell from {best:.2f} at step {step} to {curve[-1][1]:.2f} at step "
        f"{curve[-1][0]}: the adapter overfits; stop, and give more completions, fewer --epochs or a lower --lr"
    )


def _stalls(log: Log, steps: int, curve: Curve) -> str:
    count = max(LATEST, math.ceil(steps / 100))  # one line is 10 steps: a tenth of the run
    if len(log) < 2 * count:
        return ""
    if len(curve) >= 2 and curve[-1][1] > (1 + CHANGE) * curve[0][1]:
        return ""
    first = statistics.mean(line["loss"] for line in log[:count])
    latest = statistics.mean(line["loss"] for line in log[-count:])
    early, late = (statistics.mean(map(_right, lines)) for lines in (log[:count], log[-count:]))
    if latest < first or late > (1 + CHANGE) * early:
        return ""
    return (
        f"the loss does not fall: {first:.2f} in the first {10 * count} steps, {latest:.2f} in the last {10 * count}; "
        "try a lower --lr, or inspect the completions"
    )


def _right(line: Mapping[str, Any]) -> float:
    """The share of right predictions of a line of the log, over all predictors."""
    return float(statistics.mean(line["accuracy"]))


def next_steps(
    curve: Curve,
    *,
    accuracy: float | None = None,
    held_out_accuracy: float | None = None,
    speeds: Mapping[str, float] | None = None,
) -> list[str]:
    """Advise on the next training, one sentence each, from the curve of held-out acceptance.

    accuracy, held_out_accuracy  of the first predictor on the training text (the last steps) and on held-out examples
    speeds                       measured tokens/s by drafter, plain decoding as "none"
    """
    sentences = []
    if len(curve) < 3:
        sentences.append("fewer than three evaluations show no trend; hold examples out and train longer")
    else:
        last_step, last = curve[-1]
        best_step, best = max(curve, key=lambda point: point[1])
        earlier = next(value for step, value in reversed(curve) if step <= last_step * 2 / 3 or step == curve[0][0])
        ahead = None not in (accuracy, held_out_accuracy) and float(accuracy or 0) - float(held_out_accuracy or 0)
        if last < (1 - FALL) * best:
            sentences.append(
                f"falling since step {best_step} (best {best:.2f}): fewer epochs, more completions, or a lower --lr"
            )
        elif last > (1 + CHANGE) * earlier:
            more = "new completions" if ahead and ahead > AHEAD else "more epochs or more completions"
            sentences.append(f"still rising ({last - earlier:+.2f} in the last third): {more}")
        else:
            sentences.append("flat in the last third: a larger adapter; more layers first, then higher ranks")
    if speeds and max(speeds, key=lambda name: speeds[name]) == "none":
        sentences.append("plain decoding is faster here: raise the mean acceptance length first")
    return sentences


def scaling_of(curve: Curve, training: Mapping[str, Any]) -> Scaling | None:
    """Held-out acceptance by amount of data, from the part of ``curve`` in which all data were new.

    That is the first epoch, after the warmup. ``training`` is what the adapter's record says of the run. None if there
    are too few evaluations in it.
    """
    options, steps = training.get("options", {}), training.get("planned_steps", training.get("steps", 0))
    if not steps or "epochs" not in options:
        return None
    tokens = training["answer_tokens"] * options["epochs"] / steps
    new = [(step * tokens, length) for step, length in curve if options["warmup"] <= step <= steps / options["epochs"]]
    return fit_scaling(new)


def more_data(scaling: Scaling) -> str:
    """State the predicted gain of twice the data, and the amount up to which doubling pays."""
    gain, now = scaling.doubling, scaling.at(scaling.tokens)
    said = f"twice the data is predicted to change it by {gain:+.2f} (fit within {scaling.error:.2f})"
    if gain < CHANGE * now:
        return f"more data no longer raises the mean acceptance length enough: {said}"
    until = scaling.pays_until(CHANGE)
    far = "no end in sight" if until is None else f"up to about {until:,} answer tokens"
    return f"more data raises the mean acceptance length, {far}: {said}"


FEWEST = 4  # points for three parameters
FARTHEST = 10  # doublings of the data that are looked at
EXPONENTS = np.geomspace(0.02, 2.0, 100)


@dataclass(frozen=True)
class Scaling:
    """Held-out acceptance by the amount of training data, L(n) = a - b n^-c, fitted to a run's own curve.

    Its points are acceptance lengths after n answer tokens, none of which was seen before. The learning rate falls over
    the run, which raises the last points, so the predicted gain is rather too high than too low.

    a, b, c   of a - b n^-c, with n answer tokens; a is the acceptance length that no amount of data exceeds
    tokens    of the last point
    error     root mean square deviation of the points
    """

    a: float
    b: float
    c: float
    tokens: int
    error: float

    def at(self, tokens: float) -> float:
        """The predicted acceptance length after ``tokens`` answer tokens."""
        return float(self.a - self.b * tokens**-self.c)

    @property
    def doubling(self) -> float:
        """Predicted gain in mean acceptance length from twice the data."""
        return self.at(2 * self.tokens) - self.at(self.tokens)

    def pays_until(self, share: float) -> int | None:
        """The amount of data from which on doubling it brings less than ``share`` of the acceptance length.

        In doublings of ``tokens``; None if that is more than a thousand times as much.
        """
        for tokens in (self.tokens << doublings for doublings in range(FARTHEST)):
            if self.at(2 * tokens) - self.at(tokens) < share * self.at(tokens):
                return tokens
        return None


def fit_scaling(points: Sequence[tuple[float, float]]) -> Scaling | None:
    """Fit (answer tokens, acceptance length) by least squares; None for fewer than four points.

    For each exponent of a grid, a and b follow from a linear fit with b >= 0: a curve that does not rise is a constant.

    Exactly on the curve 3 - 10 n^-0.5, doubling 10,000 tokens gains 0.1 (1 - 2^-0.5) = 0.029:

    >>> round(fit_scaling([(n, 3 - 10 * n**-0.5) for n in (1e3, 3e3, 5e3, 1e4)]).doubling, 3)
    0.029
    """
    if len(points) < FEWEST:
        return None
    tokens, lengths = (np.array(values, float) for values in zip(*sorted(points), strict=True))
    best: Scaling | None = None
    for c in EXPONENTS:
        x = -((tokens / tokens[-1]) ** -c)
        spread = float(((x - x.mean()) ** 2).sum())
        slope = max(0.0, float(((x - x.mean()) * (lengths - lengths.mean())).sum()) / spread) if spread else 0.0
        a = float(lengths.mean() - slope * x.mean())
        error = float(np.sqrt(((a + slope * x - lengths) ** 2).mean()))
        if best is None or error < best.error:
            best = Scaling(a, slope * float(tokens[-1]) ** float(c), float(c), int(tokens[-1]), error)
    return best
