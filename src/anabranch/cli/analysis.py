"""``anabranch simulate`` and ``anabranch analyze``: other drafts without the model, and the theory's figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.analysis.simulate import Cut, Prediction

__all__ = ["analyze", "simulate"]


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a recording, from --trace of 'generate' or 'bench'")],
    nodes: Annotated[str | None, typer.Option(help="nodes of a draft, root included, for example 8,16,32")] = None,
    depth: Annotated[str | None, typer.Option(help="greatest depth of a draft (gamma), for example 1,2,3")] = None,
    k: Annotated[str | None, typer.Option(help="most children of a node, for example 1,4")] = None,
    threshold: Annotated[
        str | None, typer.Option(help="least joint probability of a node, for example 0.01,0.1")
    ] = None,
    drop_source: Annotated[
        list[str] | None,
        typer.Option(help="leave out the drafts of this source: prompt_lookup, stream 3, or stream; repeatable"),
    ] = None,
    latency: Annotated[
        Path | None, typer.Option(help="step times: a file of lines 'nodes,ms', or JSON such as {\"1\": 10.2}")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Predict acceptance and speed of smaller drafts from a recording, without the model.

    The first row shows the drafts as they were recorded; a row for every combination of the given settings follows.
    Only smaller drafts than the recorded ones can be replayed, so record a large tree.

    An ordinary recording has drafts only where steps began. For the positions between, the mean assumes drafts like
    the others, and the floor assumes that nothing is accepted. A recording with --every-position has them all, and its
    replays are exact.

    Tokens/s are computed from --latency, or from the recorded step times where these cover the drafts.
    """
    from anabranch.analysis.simulate import Cut, Latency, overlap
    from anabranch.analysis.simulate import simulate as replay
    from anabranch.analysis.trace import read_trace

    axes: dict[str, list[Any]] = {
        "nodes": _numbers("--nodes", nodes),
        "depth": _numbers("--depth", depth),
        "k": _numbers("--k", k),
        "threshold": _numbers("--threshold", threshold, whole=False),
    }
    drop = tuple(drop_source or ())
    asked = {name: values for name, values in axes.items() if values}
    cuts = [Cut()]
    if asked or drop:
        cuts += [
            Cut(**dict(zip(asked, values, strict=True)), drop=drop) for values in itertools.product(*asked.values())
        ]
    recording = read_trace(trace)
    _check_sources(trace, drop, recording.sources() if drop else [])
    table = Latency.of(recording) if latency is None else Latency.read(latency)
    found = [replay(recording, cut, latency=table) for cut in cuts]
    if found[0].steps == 0:
        raise InputError(f"{trace} has no steps; record a decoding first")
    alpha = overlap(recording)
    if as_json:
        record = {
            "schema": 1,
            "trace": {
                "rule": recording.rule,
                "every_position": recording.every_position,
                "settings": dict(recording.settings),
                "alpha_from_p_and_q": alpha,
            },
            "predictions": [prediction.to_dict() for prediction in found],
        }
        print(json.dumps(record))
        return
    _show(found, alpha)


def analyze(
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder for the figures and their tables")],
    model: Annotated[
        str, typer.Option(help="model of the cost figures, such as Llama-2-7B, Mistral-7B, Phi-3 or OPT-1.3b")
    ] = "Llama-2-13B",
    force: Annotated[bool, typer.Option("--force", help="replace files that exist already")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the written files as JSON")] = False,
) -> None:
    """Draw the theory's figures (PNG and SVG), with their numbers (CSV).

    They show the speedup of Speculative Streaming over a draft model (v1 figure 4, ACL figure 20), Leviathan et al.'s
    T5 experiments as predicted and as measured, and the cost of a draft in parameters, memory traffic and arithmetic
    (ACL figures 8 and 9).
    """
    from anabranch.analysis.figures import write_figures

    written = write_figures(out, model=model, force=force)
    if as_json:
        print(json.dumps([str(path) for path in written]))
        return
    for path in written:
        print(path)


def _numbers(option: str, text: str | None, *, whole: bool = True) -> list[int] | list[float]:
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    try:
        return [int(word) for word in words] if whole else [float(word) for word in words]
    except ValueError as error:
        kind = "whole numbers" if whole else "numbers"
        raise InputError(f"{option} takes {kind} with commas between them, not {text!r}") from error


def _check_sources(trace: Path, drop: Sequence[str], known: Sequence[str]) -> None:
    """Refuse to leave out what nothing in the recording comes from; "stream" stands for "stream 1" and all others."""
    groups = {name.partition(" ")[0] for name in known}
    if unknown := [name for name in drop if name not in known and name not in groups]:
        named = f"its drafts are of {', '.join(known)}" if known else "it has no drafts, so leave out --drop-source"
        raise InputError(f"nothing in {trace} was drafted by {unknown[0]!r}; {named}")


def _show(found: list[Prediction], alpha: float | None) -> None:
    from anabranch.bench.report import plain_table
    from anabranch.cli.layout import output, print_tables

    table = plain_table()
    table.add_column("drafts", no_wrap=True)
    for name in ("tokens/\nstep", "floor", "nodes/\nstep", "filled", "alpha", "tokens/s"):
        table.add_column(name, justify="right")
    for prediction in found:
        table.add_row(
            _name(prediction.cut),
            f"{prediction.mean_acceptance_length:.3f}",
            "" if prediction.floor is None else f"{prediction.floor:.3f}",
            f"{prediction.draft_nodes / prediction.steps:.1f}",
            "" if prediction.filled is None else f"{prediction.filled:.0%}",
            "" if prediction.alpha is None else f"{prediction.alpha:.3f}",
            "" if prediction.tokens_per_second is None else f"{prediction.tokens_per_second:.1f}",
        )
    console = output()
    print_tables([table], console)
    if alpha is not None:
        console.print(f"alpha from p and q: {alpha:.4f}, divergence {1 - alpha:.4f}")


def _name(cut: Cut) -> str:
    words = [f"{name} {getattr(cut, name)}" for name in ("nodes", "depth", "k") if getattr(cut, name) is not None]
    words += [f"threshold {cut.threshold:g}"] if cut.threshold else []
    words += [f"without {name}" for name in cut.drop]
    return ", ".join(words) or "as recorded"
