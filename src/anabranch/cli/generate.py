"""``anabranch generate``: text from a model, as it is decoded."""

from __future__ import annotations

import json
import statistics
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options, show
from anabranch.errors import CapabilityError, InputError
from anabranch.files import check_output

if TYPE_CHECKING:
    from collections.abc import Generator

    from anabranch.api import Keywords, Model
    from anabranch.generation import Chunk, Generation

__all__ = ["generate"]

COMPARED_RUNS = 3


def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt, or - to read it from standard input")],
    model: options.Model = "default",
    max_new_tokens: options.NewTokens = 256,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it stands, without a chat template")] = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="end the text before this string; repeatable")] = None,
    drafter: options.Drafter = "auto",
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = "none",
    device: options.Device = "auto",
    threads: options.Threads = None,
    show_drafts: options.ShowDrafts = False,
    compare: Annotated[bool, typer.Option("--compare", help="measure the speedup over plain decoding too")] = False,
    trace: Annotated[Path | None, typer.Option(help="record every step in this file, for 'simulate'")] = None,
    every_position: Annotated[
        bool, typer.Option("--every-position", help="with --trace: record a draft at every token, verify none")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file of --trace if it exists")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Answer a prompt, or with --raw continue it.

    A model with a chat template is asked through it. The text goes to standard output. The summary goes to standard
    error: tokens, decode rate, prompt rate, mean acceptance length (tokens per forward pass), the drafter that auto
    became, and why the text ended. --compare adds the measured speedup over plain decoding. --trace records token
    ids, drafts and times, but no text.
    """
    if compare and drafter == "none":
        raise InputError("--compare measures a drafter against plain decoding; choose another drafter than none")
    if every_position and trace is None:
        raise InputError("--every-position says how to record; give a file with --trace")
    if system is not None and raw:
        raise InputError("--system needs the chat template, which --raw leaves out; give one of the two")
    if trace is not None:
        check_output(trace, force=force, what="the trace", option="--trace")
    text = options.standard_input() if prompt == "-" else prompt
    if not text.strip():
        raise InputError("the prompt is empty; give some text")
    call = options.keywords(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
    with show.Wait() as wait:
        loaded = options.load_model(
            model,
            adapter,
            drafter,
            dtype=dtype,
            quantize=quantize,
            device=device,
            threads=threads,
            options=call,
            wait=wait,
        )
        asked = _asked(loaded, text, system, raw=raw)
        streamed: Keywords = {**call, "on_prompt": show.prompt_progress(wait)}
        chunks = loaded.stream(asked, **streamed)
        if trace is not None:
            trace.unlink(missing_ok=True)
            chunks = _recorded(chunks, loaded, asked, streamed, trace, every_position=every_position)
        wait.clear()
        marker = show.Marker(loaded.tokenizer, stop or ()) if show_drafts and not as_json else None
        _, found = show.show(chunks, wait=wait, visible=not as_json, marker=marker)
    assert found is not None, "the last chunk has the result"
    if marker is not None:
        typer.echo(marker.legend(found.stats), err=True)
    comparison = _compare(loaded, asked, call, loaded.drafter) if compare else None
    if as_json:
        print(json.dumps(_record(loaded, found, call, comparison, sources=show_drafts)))
        return
    facts = show.rates(found.stats, loaded.drafter)
    ended = show.ending(found, loaded, max_new_tokens)
    facts += [*show.lesser_kernels(loaded), show.explained(ended, found, loaded, more="--max-new-tokens")]
    show.sentences(facts + (_compared(comparison) if comparison else []))


def _asked(loaded: Model, text: str, system: str | None, *, raw: bool) -> str | list[int]:
    """The prompt as ``stream`` takes it: through the chat template where there is one."""
    if raw or not getattr(loaded.tokenizer, "chat_template", None):
        if system is not None:
            raise CapabilityError(f"{loaded.target.name} has no chat template, so it takes no --system; leave it out")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return loaded.chat_ids([*messages, {"role": "user", "content": text}])


def _record(
    loaded: Model, found: Generation, call: Keywords, comparison: dict[str, Any] | None, *, sources: bool
) -> dict[str, Any]:
    """The result as JSON."""
    record: dict[str, Any] = {
        "text": found.text,
        "token_ids": found.token_ids,
        "finish_reason": found.finish_reason,
        "ended": show.ending(found, loaded, call["max_new_tokens"]),
        "prompt_tokens": len(found.prompt_ids),
        "drafter": loaded.drafter,
        "kernels": show.kernels(loaded),
    }
    if sources:
        record["sources"] = found.sources
    record["stats"] = found.stats.to_dict()
    return record if comparison is None else record | {"compare": comparison}


def _recorded(
    chunks: Generator[Chunk, None, None],
    loaded: Model,
    asked: str | list[int],
    call: Keywords,
    path: Path,
    *,
    every_position: bool,
) -> Generator[Chunk, None, None]:
    """Hand ``chunks`` on and record their steps; to record every position, decode plainly in their place."""
    from anabranch.analysis.trace import TraceWriter
    from anabranch.api import Options
    from anabranch.engine import Engine
    from anabranch.generation import stream
    from anabranch.methods import make_drafter

    settings = {name: value for name, value in call.items() if name != "on_prompt"}
    settings |= {"drafter": loaded.drafter, "model": loaded.target.name}
    with TraceWriter(path, settings=settings, every_position=every_position) as writer:
        if every_position:
            settled = Options.of(call)
            ids = loaded.tokenizer.encode(asked) if isinstance(asked, str) else asked
            request = settled.request(list(ids), loaded.target)
            adapter = None if loaded.adapter is None else loaded.adapter.adapter
            decoder = loaded.target.decoder
            engine = Engine(
                decoder,
                writer.watch(make_drafter(loaded.drafter, decoder, adapter), decoder),
                capacity=len(request.prompt_ids) + request.max_new_tokens,
            )
            chunks = stream(engine, request, loaded.tokenizer, stop=settled.stops)
        with closing(chunks):
            for chunk in chunks:
                writer.add(chunk.step, len(chunk.token_ids))
                yield chunk


def _compare(loaded: Model, asked: str | list[int], call: Keywords, drafter: str) -> dict[str, Any]:
    """Alternate plain decoding and the drafter on the same prompt; rates are medians, the speedup that of the pairs."""
    rates: dict[str, list[float]] = {"none": [], drafter: []}
    tokens: dict[str, list[int]] = {}
    warm_up: Keywords = {**call, "max_new_tokens": 8, "drafter": "none"}
    loaded.generate(asked, **warm_up)  # the drafter has just run
    for _ in range(COMPARED_RUNS):
        for spec, measured in rates.items():
            one: Keywords = {**call, "drafter": spec}
            found = loaded.generate(asked, **one)
            tokens[spec] = found.token_ids
            measured.append(found.stats.tokens_per_second)
    ratios = [mine / plain for mine, plain in zip(rates[drafter], rates["none"], strict=True)]
    return {
        "speedup": round(statistics.median(ratios), 4),
        "tokens_per_second": round(statistics.median(rates[drafter]), 3),
        "plain_tokens_per_second": round(statistics.median(rates["none"]), 3),
        "equal": tokens["none"] == tokens[drafter],
    }


def _compared(comparison: dict[str, Any]) -> list[str]:
    """The comparison as facts for the summary. Its rates include the prompt."""
    mine, plain = comparison["tokens_per_second"], comparison["plain_tokens_per_second"]
    same = "same tokens" if comparison["equal"] else "other tokens than plain decoding (see 'anabranch certify')"
    return [
        f"speedup {comparison['speedup']:.2f}x over plain decoding ({mine:.1f} against {plain:.1f} tokens/s, "
        "prompt included)",
        same,
    ]
