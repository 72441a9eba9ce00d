"""``anabranch bench``: measure methods beside each other on the same prompts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["bench", "encode"]

METHODS = ("none", "prompt_lookup", "streams")


def bench(
    model: Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")] = "default",
    adapter: Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships)")] = None,
    suite: Annotated[str, typer.Option(help="own, spec_bench, mt_bench, humaneval, gsm8k, or a JSONL file")] = "own",
    data: Annotated[Path | None, typer.Option(help="folder with the suites' data")] = None,
    field: Annotated[str, typer.Option(help="field of a JSONL file that holds the prompt")] = "prompt",
    limit: Annotated[int | None, typer.Option(help="that many prompts, spread over the tasks")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="a drafter and its settings, e.g. streams:tree=32,prune=16; repeatable")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="transformers or transformers-lookup; repeatable")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens a prompt")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all tokens")] = 0,
    seed: Annotated[int, typer.Option(help="noise of sampling")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    repeats: Annotated[int, typer.Option(help="runs of each prompt and contender")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: torch's own choice)")] = None,
    out: Annotated[Path | None, typer.Option(help="write FILE.json and FILE.md")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Measure methods beside each other: tokens/s, speedup, mean acceptance length, time by part.

    Every prompt goes through all methods before the next one, in rotating order; speedups are over our own plain
    decoding (none) on the same prompt. Let nothing else run meanwhile.
    """
    import torch
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from anabranch.bench.contenders import Contender, Ours, Transformers
    from anabranch.bench.report import SCHEMA, environment, markdown
    from anabranch.bench.run import measure, summarise
    from anabranch.bench.suites import load_suite
    from anabranch.cli.models import fetch_default
    from anabranch.drafters import make_drafter
    from anabranch.errors import InputError
    from anabranch.files import write_atomically
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.sampling import SamplingParams
    from anabranch.streams.folder import find_adapter

    if threads is not None:
        torch.set_num_threads(threads)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
    prompts = load_suite(suite, data=data, limit=limit, field=field)
    if model == "default":
        fetch_default()
    target = load_target(model, dtype=dtype, device=device)
    loaded = find_adapter(target, adapter)
    encoded = [(prompt, encode(target.tokenizer, prompt.text, raw=raw)) for prompt in prompts]
    capacity = max(len(ids) for _, ids in encoded) + max_new_tokens
    pack_decoder(target.decoder)
    contenders: list[Contender] = []
    for spec in method or METHODS:
        drafter = make_drafter(spec, target.decoder, None if loaded is None else loaded.adapter)
        contenders.append(Ours(spec, target, drafter, capacity=capacity, sampling=sampling))
    for name in peer or ():
        if name not in ("transformers", "transformers-lookup"):
            raise InputError(f"there is no peer {name!r}; peers are transformers and transformers-lookup")
        contenders.append(Transformers(target, sampling=sampling, lookup=name.endswith("lookup")))

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    with bar:
        line = bar.add_task("warm-up", total=None)
        found = measure(
            contenders,
            encoded,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            report=lambda done, total, name: bar.update(line, completed=done, total=total, description=name),
        )
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "run": {
            "command": _command(data),
            "model": model,
            "fingerprint": target.fingerprint,
            "adapter": None if loaded is None else loaded.record.get("sha256"),
            "suite": suite if suite in ("own", "spec_bench", "mt_bench", "humaneval", "gsm8k") else Path(suite).name,
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "seed": seed,
            "chat_template": not raw,
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "repeats": repeats,
        },
        "environment": environment(target.decoder.device),
        "contenders": summarise(found, encoded),
    }
    page = markdown(result)
    if out is not None:
        write_atomically(out.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
        write_atomically(out.with_suffix(".md"), page)
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(Markdown(page))


def encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt, through the chat template where there is one and ``raw`` is off."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer.encode(text))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(chat, add_special_tokens=False))


def _command(data: Path | None) -> str:
    """The command as anyone could give it: the data folder is called DIR."""
    return shlex.join(
        "DIR" if data is not None and word == str(data) else word for word in ("anabranch", *sys.argv[1:])
    )
