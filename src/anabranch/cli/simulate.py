"""``anabranch simulate``: replay recorded drafts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.analysis.simulate import Cut, Prediction

__all__ = ["SimulateConfig", "simulate"]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """The options of ``anabranch simulate``."""

    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a recording, from --trace of 'generate' or 'bench'")]
    nodes: Annotated[str | None, typer.Option(help="try these node budgets, root included, such as 8,16,32")] = None
    depth: Annotated[str | None, typer.Option(help="try these maximum depths of a draft (gamma), such as 1,2,3")] = None
    k: Annotated[str | None, typer.Option(help="try these maximum numbers of children of a node, such as 1,4")] = None
    threshold: Annotated[
        str | None, typer.Option(help="try these minimum joint probabilities of a node, such as 0.01,0.1")
    ] = None
    drop_source: Annotated[
        tuple[str, ...],
        typer.Option(help="leave out the drafts of this source, or of a group (a name without its number); repeatable"),
    ] = ()
    latency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="read step times: lines 'nodes,ms', or JSON such as {\"1\": 10.2}"),
    ] = None
    as_json: options.AsJson = False

    def cuts(self) -> list[Cut]:
        """The drafts as recorded, then every combination of the settings. Raises InputError."""
        from anabranch.analysis.simulate import Cut

        axes: dict[str, list[Any]] = {
            "nodes": _numbers("--nodes", self.nodes),
            "depth": _numbers("--depth", self.depth),
            "k": _numbers("--k", self.k),
            "threshold": _numbers("--threshold", self.threshold, whole=False),
        }
        given = {name: values for name, values in axes.items() if values}
        if not given and not self.drop_source:
            return [Cut()]
        combinations = itertools.product(*given.values())
        return [Cut(), *(Cut(**dict(zip(given, c, strict=True)), drop=self.drop_source) for c in combinations)]


@configured
def simulate(config: SimulateConfig) -> None:
    """Predict acceptance and speed of smaller drafts from a recording, without the model.

    The first row shows the drafts as they were recorded; a row for every combination of the given settings follows.
    Only smaller drafts than the recorded ones can be replayed, so record a large tree.

    An ordinary recording has drafts only where steps began. For the positions between, the mean assumes drafts like
    the others, and the floor assumes that nothing is accepted. A recording with --every-position has them all, and its
    replays are exact.

    Tokens/s are computed from --latency, or from the recorded step times where these cover the drafts.
    """
    from anabranch.analysis.simulate import Latency, overlap
    from anabranch.analysis.simulate import simulate as replay
    from anabranch.analysis.trace import read_trace

    cuts = config.cuts()
    recording = read_trace(config.trace)
    _check_sources(config, recording.sources() if config.drop_source else [])
    table = Latency.of(recording) if config.latency is None else Latency.read(config.latency)
    predictions = [replay(recording, cut, latency=table) for cut in cuts]
    if predictions[0].steps == 0:
        raise InputError(f"{config.trace} has no steps; record a decoding first")
    alpha = overlap(recording)
    if config.as_json:
        record = {
            "schema": 1,
            "trace": {
                "rule": recording.rule,
                "every_position": recording.every_position,
                "settings": dict(recording.settings),
                "alpha_from_p_and_q": alpha,
            },
            "predictions": [prediction.to_dict() for prediction in predictions],
        }
        print(json.dumps(record))
        return
    _show(predictions, alpha)


def _numbers(option: str, text: str | None, *, whole: bool = True) -> list[int] | list[float]:
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    try:
        return [int(word) for word in words] if whole else [float(word) for word in words]
    except ValueError as error:
        kind = "whole numbers" if whole else "numbers"
        raise InputError(f"{option} must be {kind} separated by commas, got {text!r}") from error


def _check_sources(config: SimulateConfig, known: Sequence[str]) -> None:
    """Raise InputError for a source that drafted nothing; a name without its number stands for the whole group."""
    groups = {name.partition(" ")[0] for name in known}
    if unknown := [name for name in config.drop_source if name not in known and name not in groups]:
        named = f"its drafts are of {', '.join(known)}" if known else "it has no drafts, so leave out --drop-source"
        raise InputError(f"nothing in {config.trace} was drafted by {unknown[0]!r}; {named}")


def _show(predictions: list[Prediction], alpha: float | None) -> None:
    from anabranch.cli.layout import output, print_tables
    from anabranch.support.table import Table

    rows = [
        (
            _name(prediction.cut),
            f"{prediction.mean_acceptance_length:.3f}",
            "" if prediction.floor is None else f"{prediction.floor:.3f}",
            f"{prediction.draft_nodes / prediction.steps:.1f}",
            "" if prediction.filled is None else f"{prediction.filled:.0%}",
            "" if prediction.alpha is None else f"{prediction.alpha:.3f}",
            "" if prediction.tokens_per_second is None else f"{prediction.tokens_per_second:.1f}",
        )
        for prediction in predictions
    ]
    titles = ("drafts", "tokens/\nstep", "floor", "nodes/\nstep", "filled", "alpha", "tokens/s")
    console = output()
    print_tables([Table(titles, rows)], console)
    if alpha is not None:
        console.print(f"alpha from p and q: {alpha:.4f}, divergence {1 - alpha:.4f}")


def _name(cut: Cut) -> str:
    words = [f"{name} {getattr(cut, name)}" for name in ("nodes", "depth", "k") if getattr(cut, name) is not None]
    words += [f"threshold {cut.threshold:g}"] if cut.threshold else []
    words += [f"without {name}" for name in cut.drop]
    return ", ".join(words) or "as recorded"
