"""``anabranch certify``: decode both ways and explain every difference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.options import Adapter, Device, Dtype, Model, Quantize, Seed, Threads
from anabranch.errors import InputError

__all__ = ["certify"]


def certify(
    model: Model = "default",
    adapter: Adapter = None,
    drafter: Annotated[str, typer.Option(help="drafter to compare with plain decoding")] = "auto",
    prompts: Annotated[
        str, typer.Option(help="own (a few that ship), the name of a suite with --data, or a JSONL file")
    ] = "own",
    data: Annotated[Path | None, typer.Option(help="folder with the suites' data (default: the hub)")] = None,
    field: Annotated[str, typer.Option(help="field of a JSONL file that holds the prompt")] = "prompt",
    limit: Annotated[int | None, typer.Option(help="use this many prompts")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="new tokens for each prompt")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0: greedy; above: sampled, and the same seed must give the same text")
    ] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Check that a drafter does not change the output.

    Decodes every prompt plainly and with the drafter, and explains the first token that differs: a tie, if both
    tokens' logits are within the target's own rounding error, or else a BUG. Exits with 1 if there is a BUG.
    """
    from rich.console import Console

    from anabranch.adapters.folder import find_adapter, read_record
    from anabranch.bench.suites import load_suite
    from anabranch.certify import Certificate
    from anabranch.certify import certify as run
    from anabranch.cli.bench import encode
    from anabranch.cli.models import fetch_default
    from anabranch.methods import check_spec
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.processor import set_threads
    from anabranch.profiles import resolve
    from anabranch.sampling import SamplingParams

    # whatever can be refused is refused before a model is loaded
    check_spec(drafter)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if adapter is not None:
        read_record(adapter)
    set_threads(threads)
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
