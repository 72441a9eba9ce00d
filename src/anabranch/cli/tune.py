"""``anabranch tune``: find the drafter that this machine decodes fastest with."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["tune"]

SHOWN = 8  # candidates
SHORT = {"prompt_lookup": "lookup", "none": "plain"}
NODES = (1, 4, 6, 8, 12, 16, 24, 32)  # columns of the table of step times


def tune(
    model: Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")] = "default",
    adapter: Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships)")] = None,
    prompts: Annotated[
        str,
        typer.Option(help="prompts like those you serve: own, a JSONL file, or a bench suite"),
    ] = "own",
    field: Annotated[str, typer.Option(help="field of a JSONL file that holds the prompt")] = "prompt",
    data: Annotated[Path | None, typer.Option(help="folder with the suites' data")] = None,
    limit: Annotated[int, typer.Option(help="that many prompts, spread over the tasks")] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens a prompt")] = 96,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    quantize: Annotated[str, typer.Option(help="weights in none (as loaded), int8 or int4")] = "none",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all that may be used)")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="draw predicted tokens/s over nodes (FILE.png or FILE.svg)")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="replace the figure; write a profile from a busy machine")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry", help="write no profile")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the fastest drafter for this machine and these prompts, and remember it.

    Measures what a step costs by the nodes that it drafts and verifies, records which drafts would have been accepted,
    picks the method and tree with the most tokens a second, and checks them by decoding. Afterwards 'auto' means that
    drafter, for this model, adapter, number of threads and machine. Let nothing else run meanwhile.
    """
    from anabranch.adapters.folder import find_adapter
    from anabranch.bench.suites import load_suite
    from anabranch.cli.bench import encode
    from anabranch.cli.models import fetch_default
    from anabranch.errors import InputError
    from anabranch.files import check_output
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.processor import set_threads
    from anabranch.profiles import Situation, save_profile
    from anabranch.tune.figure import check_figure, draw
    from anabranch.tune.fit import fit

    if limit < 1 or max_new_tokens < 8:
        raise InputError("tuning takes at least one prompt and 8 new tokens")
    if figure is not None:
        check_figure(figure)
        check_output(figure, force=force, what="the figure", option="--figure")
    suite = load_suite(prompts, data=data, limit=limit, field=field)
    set_threads(threads)
    if model == "default":
        fetch_default()
    target = load_target(model, dtype=dtype, device=device, quantize=quantize)
    loaded = find_adapter(target, adapter)
    pack_decoder(target.decoder)
    encoded = [encode(target.tokenizer, prompt.text, raw=raw) for prompt in suite]
    room = max_new_tokens + 64  # what is decoded, and the widest drafts behind it
    fitting = [ids for ids in encoded if len(ids) + room < target.config.max_positions]
    if not fitting:
        raise InputError(
            f"no prompt leaves room for {room} tokens, drafts included, within the model's "
            f"{target.config.max_positions}; give shorter ones, or lower --max-new-tokens"
        )
    streams = None if loaded is None else loaded.adapter
    with _bar() as (bar, line):
        found = fit(
            target,
            streams,
            fitting,
            max_new_tokens=max_new_tokens,
            report=lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )
    record = _record(found, len(fitting), max_new_tokens)
    doubtful = found.doubtful and not force
    path = None if dry or doubtful else save_profile(Situation.of(target, loaded), found.spec, record)
    if as_json:
        print(json.dumps({"drafter": found.spec, "profile": None if path is None else str(path), **record}))
    else:
        _show(found, path)
    if figure is not None:  # last: the result is printed by now, whatever becomes of the figure
        draw(found, figure)
    if doubtful:
        kept = "" if dry else ", so no profile was written (--force writes it)"
        print(
            f"{_disturbance(found)}: the choice may be wrong{kept}; tune again when nothing else runs", file=sys.stderr
        )
        raise typer.Exit(0 if dry else 1)


def _record(found: Any, prompts: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "predicted_tokens_per_second": round(found.prediction, 2),
        "interval_90": [round(value, 2) for value in found.interval],
        "measured_tokens_per_second": round(found.measured, 2),
        "plain_tokens_per_second": round(found.plain, 2),
        "predicted_plain_tokens_per_second": round(found.predicted_plain, 2),
        "speedup": round(found.speedup, 3),
        "drift": round(found.drift, 3),
        "doubtful": found.doubtful,
        "date": date.today().isoformat(),
        "step_ms": _tables(found.latency.rest),
        "draft_ms": _tables(found.latency.drafts),
        "costs": {method: str(costs) for method, costs in found.costs.items()},
        "candidates": [
            {
                "drafter": c.spec,
                "tokens_per_second": round(rate, 2),
                "tokens_a_step": round(p.mean_acceptance_length, 3),
            }
            for c, p, rate in found.tried
        ],
    }


def _tables(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {str(nodes): round(ms, 3) for nodes, ms in zip(table.widths, table.ms, strict=True)}
        for name, table in measured.items()
    }


def _show(found: Any, path: Path | None) -> None:
    """The choice and its speedup, then what led to it, in at most 60 columns unless a specification is longer."""
    print(f"{found.speedup:.2f}x with {found.chosen.spec}")
    if found.chosen.spec == "none":
        print("Plain decoding is the fastest here, so 'auto' decodes plainly.")
    low, high = found.interval
    print(f"measured   {found.measured:8.1f} tokens/s, plain decoding {found.plain:.1f}")
    print(f"predicted  {found.prediction:8.1f} tokens/s, 90 % interval {low:.1f} to {high:.1f}")
    if path is not None:
        print(f"written to {path}\nThe drafter 'auto' uses it from now on.")
    print(f"\n{'predicted':<40}{'tokens':>6}{'nodes':>6}{'tokens':>8}\n{'':<40}{'/step':>6}{'/step':>6}{'/s':>8}")
    for candidate, prediction, rate in sorted(found.tried, key=lambda item: -item[2])[:SHOWN]:
        nodes = prediction.draft_nodes / max(1, prediction.steps)
        print(f"{candidate.spec:<40}{prediction.mean_acceptance_length:6.2f}{nodes:6.1f}{rate:8.1f}")
    print(f"\n{'ms by nodes':<14}" + "".join(f"{n:>5}" for n in NODES))
    for what, measured in (("verify", found.latency.rest), ("draft", found.latency.drafts)):
        for name, table in measured.items():
            known = dict(zip(table.widths, table.ms, strict=True))
            cells = "".join(f"{known[n]:5.1f}" if n in known else " " * 5 for n in NODES)
            print(f"{what + ' ' + SHORT.get(name, name):<14}{cells}".rstrip())


def _disturbance(found: Any) -> str:
    if found.latency.busy:
        return "the machine was busy: equal steps took very different times"
    return f"plain decoding was {found.drift:.2f} times as fast in the check as while steps were timed"


def _bar() -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    @contextmanager
    def shown() -> Any:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            yield bar, bar.add_task("tuning", total=None)

    return shown()
