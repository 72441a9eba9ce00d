"""``anabranch certify``: decode both ways and explain every difference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["certify"]


def certify(
    model: Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")] = "default",
    adapter: Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships)")] = None,
    drafter: Annotated[str, typer.Option(help="the method to certify against plain decoding")] = "auto",
    prompts: Annotated[str, typer.Option(help="own, a suite's name with --data, or a JSONL file")] = "own",
    data: Annotated[Path | None, typer.Option(help="folder with the suites' data")] = None,
    field: Annotated[str, typer.Option(help="field of a JSONL file that holds the prompt")] = "prompt",
    limit: Annotated[int | None, typer.Option(help="that many prompts")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens a prompt")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above it the same seed must give the same text")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="noise of sampling")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    quantize: Annotated[str, typer.Option(help="weights in none (as loaded), int8 or int4")] = "none",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Show that a drafter changes nothing: decode plainly and with it, and explain every difference.

    The first token that differs is a tie, if the two candidates' logits are as close as the target's own rounding, or
    a BUG. Exits with 1 if there is a BUG.
    """
    from rich.console import Console

    from anabranch.bench.suites import load_suite
    from anabranch.certify import Certificate
    from anabranch.certify import certify as run
    from anabranch.cli.bench import encode
    from anabranch.cli.models import fetch_default
    from anabranch.drafters import check_spec
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.profiles import resolve
    from anabranch.sampling import SamplingParams
    from anabranch.streams.folder import find_adapter

    check_spec(drafter)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    suite = load_suite(prompts, data=data, limit=limit, field=field)
    if model == "default":
        fetch_default()
    target = load_target(model, dtype=dtype, device=device, quantize=quantize)
    loaded = find_adapter(target, adapter)
    pack_decoder(target.decoder)
    console = Console(stderr=True)
    drafter = resolve(drafter, target, loaded)

    def report(found: Certificate) -> None:
        where = ""
        if found.at is not None:
            where = f" at token {found.at}: margin {found.margin}, rounding {found.noise}"
        console.print(f"{found.prompt + 1}/{len(suite)} {suite[found.prompt].task}: {found.verdict}{where}")

    encoded = [encode(target.tokenizer, prompt.text, raw=False) for prompt in suite]
    found = run(
        target,
        None if loaded is None else loaded.adapter,
        drafter,
        encoded,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        report=report,
    )
    counts = {verdict: sum(c.verdict == verdict for c in found) for verdict in ("equal", "tie", "BUG")}
    if as_json:
        print(json.dumps({"drafter": drafter, "counts": counts, "prompts": [asdict(c) for c in found]}))
    else:
        said = f"{counts['equal']} equal, {counts['tie']} ties, {counts['BUG']} bugs"
        print(f"{said} of {len(found)} prompts with {drafter}")
    raise typer.Exit(1 if counts["BUG"] else 0)
