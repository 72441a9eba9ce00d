"""``anabranch tune``: find the drafter that this machine decodes fastest with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["tune"]

DRIFT = 0.1  # of plain decoding's speed between the timing of steps and the check: more, and the choice is in doubt


def tune(
    model: Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")] = "default",
    adapter: Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships)")] = None,
    prompts: Annotated[
        str,
        typer.Option(help="prompts like those you serve: own, a JSONL file with a field 'prompt', or a bench suite"),
    ] = "own",
    data: Annotated[Path | None, typer.Option(help="folder with the suites' data")] = None,
    limit: Annotated[int, typer.Option(help="that many prompts, spread over the tasks")] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens a prompt")] = 96,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    quantize: Annotated[str, typer.Option(help="weights in none (as loaded), int8 or int4")] = "none",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    figure: Annotated[
        Path | None, typer.Option(help="draw predicted tokens/s over nodes (FILE.png or FILE.svg)")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="write no profile")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Fit drafts to this machine and these prompts, and remember the choice.

    Measures what a step costs by the nodes that it drafts and verifies, records what drafts would have been accepted,
    and picks method and tree that give most tokens a second; checks that by decoding. The choice is what 'auto' means
    afterwards, for this model, adapter, number of threads and machine. Let nothing else run meanwhile.
    """
    from anabranch.bench.suites import load_suite
    from anabranch.cli.bench import encode
    from anabranch.cli.models import fetch_default
    from anabranch.errors import InputError
    from anabranch.files import check_writable
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.profiles import Situation, save_profile
    from anabranch.streams.folder import find_adapter
    from anabranch.tune.figure import check_figure, draw
    from anabranch.tune.fit import fit

    if limit < 1 or max_new_tokens < 8:
        raise InputError("tuning takes at least one prompt and 8 new tokens")
    if figure is not None:
        check_figure(figure)
        check_writable(figure, "the figure", "--figure")
    suite = load_suite(prompts, data=data, limit=limit)
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
    path = None if dry else save_profile(Situation.of(target, loaded), found.spec, record)
    if as_json:
        print(json.dumps({"drafter": found.spec, "profile": None if path is None else str(path), **record}))
    else:
        _show(found, path)
    if figure is not None:  # last: what was found is told by now, whatever becomes of it
        draw(found, figure)


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
    from rich.table import Table

    from anabranch.bench.report import wide_console

    table = Table("drafter", "tokens/step", "nodes/step", "predicted tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for candidate, prediction, rate in sorted(found.tried, key=lambda item: -item[2])[:8]:
        table.add_row(
            candidate.spec,
            f"{prediction.mean_acceptance_length:.2f}",
            f"{prediction.draft_nodes / max(1, prediction.steps):.1f}",
            f"{rate:.1f}",
        )
    console = wide_console([table])
    for what, measured in (("a step that verifies", found.latency.rest), ("drafting", found.latency.drafts)):
        for name, points in _tables(measured).items():
            nodes = ", ".join(f"{n}: {ms:.2f}" for n, ms in points.items())
            console.print(f"ms of {what} so many nodes ({name}): {nodes}", soft_wrap=True)
    console.print(table)
    low, high = found.interval
    console.print(
        f"{found.chosen.spec}: predicted {found.prediction:.1f} tokens/s ({low:.1f}-{high:.1f}), measured "
        f"{found.measured:.1f}, plain decoding {found.plain:.1f}: {found.speedup:.2f}x",
        soft_wrap=True,
    )
    if abs(found.drift - 1) > DRIFT:
        console.print(
            f"Plain decoding was {found.drift:.2f} times as fast in this check as while steps were timed: something "
            "else ran, and the choice may be wrong; tune again when the machine is at rest",
            soft_wrap=True,
        )
    if found.chosen.spec == "none":
        console.print("Plain decoding is the fastest here, so 'auto' decodes plainly.", soft_wrap=True)
    if path is not None:
        console.print(f"written to {path}; drafter 'auto' uses it", soft_wrap=True)


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
