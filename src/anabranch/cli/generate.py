"""``anabranch generate``: stream text from a model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli import generate_batch, options, show
from anabranch.cli.configured import configured
from anabranch.cli.generate_config import GenerateConfig
from anabranch.errors import InputError
from anabranch.support.files import check_output

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.decoding.generation import Chunk, Generation
    from anabranch.options import Keywords

__all__ = ["GenerateConfig", "generate"]

COMPARED_RUNS = 3


@configured
def generate(config: GenerateConfig) -> None:
    """Answer a prompt, or with --raw continue it.

    Uses the model's chat template if it has one. The text is written to standard output, and a summary to standard
    error: tokens, decode rate, prompt rate, mean acceptance length (tokens per target pass), the forward passes by
    kind, the drafter that auto chose, and why the text ended. --compare adds the measured speedup over plain decoding.
    --trace records token ids, drafts and times, but no text.

    --prompts FILE.jsonl --out FILE answers many prompts. The same command continues after an interruption.
    """
    _check(config)
    stops = tuple(map(options.unescaped, config.stop))
    if config.prompts is not None:
        generate_batch.run(config, config.decoding.keywords(stops, config.stop_token_id))
        return
    assert config.prompt is not None
    text = options.standard_input() if config.prompt == "-" else config.prompt
    if not text.strip():
        raise InputError("the prompt is empty; give some text")
    with show.Wait() as wait:
        loaded = show.load_model(config.loading, config.drafter, config.decoding, wait)
        asked = _asked(loaded, text, config)
        call = config.decoding.keywords(stops, config.stop_token_id)
        streamed: Keywords = {**call, "on_prompt": show.prompt_progress(wait)}
        chunks = loaded.stream(asked, **streamed)
        if config.trace is not None:
            config.trace.unlink(missing_ok=True)
            chunks = _recorded(chunks, loaded, asked, call, config)
        wait.clear()
        marker = show.Marker(loaded.tokenizer, stops) if config.show_drafts and not config.as_json else None
        if config.streams:
            chunks = _printed(chunks)
        _, found = show.show(chunks, wait=wait, visible=not config.as_json, marker=marker)
    assert found is not None, "the last chunk has the result"
    if marker is not None:
        typer.echo(marker.legend(found.stats), err=True)
    comparison = _compare(loaded, asked, call, found.drafter) if config.compare else None
    if config.as_json:
        record = _record(loaded, found, config, comparison)
        print(json.dumps({"result": record} if config.streams else record))
        return
    facts = show.rates(found.stats, found.drafter)
    ended = show.ending(found, loaded)
    facts += [*show.lesser_kernels(loaded), show.explained(ended, found, loaded, more="--max-new-tokens")]
    show.sentences(facts + (_compared(comparison) if comparison else []))


def _printed(chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    """Pass ``chunks`` on, and print each as a line of JSON."""
    with closing(chunks):
        for chunk in chunks:
            record = {"text": chunk.text, "token_ids": list(chunk.token_ids), "sources": list(chunk.sources)}
            print(json.dumps(record), flush=True)
            yield chunk


def _check(config: GenerateConfig) -> None:
    """Check for contradictory options and for output files. Raises InputError or FileError."""
    if config.prompt is None and config.prompts is None:
        raise options.UsageError("Missing argument 'PROMPT', or --prompts FILE (see 'anabranch generate --help')")
    if config.prompt is not None and config.prompts is not None:
        raise InputError("give either a prompt, or a file of them with --prompts")
    if config.prompts is None and config.out is not None:
        raise InputError("--out needs --prompts; redirect the text of one prompt instead")
    if config.streams and not config.as_json:
        raise InputError("--stream needs --json; text is streamed without it")
    single = (config.show_drafts, config.compare, config.trace, config.as_json)
    if config.prompts is not None and any(single):
        name = ("--show-drafts", "--compare", "--trace", "--json")[[bool(each) for each in single].index(True)]
        raise InputError(f"{name} is for a single prompt; leave out {name} or --prompts")
    if config.compare and config.drafter == "none":
        raise InputError("--compare measures a drafter against plain decoding; choose another drafter than none")
    if config.every_position and config.trace is None:
        raise InputError("--every-position needs a recording; give a file with --trace")
    if config.system is not None and config.raw:
        raise InputError("--system needs the chat template, which --raw disables; give only one of them")
    if config.trace is not None:
        check_output(config.trace, force=config.force, what="the trace", option="--trace")


def _asked(loaded: Model, text: str, config: GenerateConfig) -> list[int]:
    """The prompt's token ids, in the chat template if there is one."""
    from anabranch.prompts import chat_ids

    return chat_ids(loaded.tokenizer, text, raw=config.raw, system=config.system, model=loaded.target.name)


def _record(
    loaded: Model, found: Generation, config: GenerateConfig, comparison: dict[str, Any] | None
) -> dict[str, Any]:
    """The result as JSON."""
    record: dict[str, Any] = {
        "text": found.text,
        "token_ids": found.token_ids,
        "finish_reason": found.finish_reason,
        "ended": show.ending(found, loaded),
        "prompt_tokens": len(found.prompt_ids),
        "drafter": found.drafter,
        "kernels": show.kernels(loaded),
    }
    if config.show_drafts:
        record["sources"] = found.sources
    record["stats"] = found.stats.to_dict()
    return record if comparison is None else record | {"compare": comparison}


def _recorded(
    chunks: Generator[Chunk, None, None], loaded: Model, asked: list[int], call: Keywords, config: GenerateConfig
) -> Generator[Chunk, None, None]:
    """Pass ``chunks`` on and record their steps; to record every position, replace them by plain decoding."""
    from anabranch.analysis.trace import TraceWriter
    from anabranch.api import Options
    from anabranch.decoding.generation import stream
    from anabranch.decoding.scheduler import Scheduler
    from anabranch.methods import make_drafter

    assert config.trace is not None
    settings = {**call, "drafter": str(loaded.drafter), "model": loaded.target.title}
    with TraceWriter(config.trace, settings=settings, every_position=config.every_position) as writer:
        if config.every_position:
            settled = Options.of(call)
            decoder = loaded.target.decoder
            drafter = make_drafter(loaded.spec, decoder, *(found.module for found in loaded.adapters))
            request = settled.request(asked, loaded.target)
            watched = writer.watch(drafter, decoder)
            stops = settled.stops(loaded.target)
            chunks = stream(Scheduler(decoder, rows=1), request, watched, loaded.tokenizer, stop=stops)
        with closing(chunks):
            for chunk in chunks:
                writer.add(chunk.step, len(chunk.token_ids))
                yield chunk


def _compare(loaded: Model, asked: list[int], call: Keywords, drafter: str) -> dict[str, Any]:
    """Alternate plain decoding and the drafter on the same prompt; rates and the paired speedup are medians."""
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
    """The comparison as facts for the summary. Rates include the prompt."""
    mine, plain = comparison["tokens_per_second"], comparison["plain_tokens_per_second"]
    same = "same tokens" if comparison["equal"] else "different tokens than plain decoding (see 'anabranch certify')"
    return [
        f"speedup {comparison['speedup']:.2f}x over plain decoding ({mine:.1f} against {plain:.1f} tokens/s, "
        "prompt included)",
        same,
    ]
