"""``anabranch generate``: stream text from a model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import generate_batch, options, show
from anabranch.cli.configured import chosen, configured
from anabranch.declared import Keywords, check
from anabranch.errors import FileError, InputError
from anabranch.loading import LoadConfig
from anabranch.support.files import check_output
from anabranch.support.jsonfiles import parse_json, read_whole

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.decoding.generation import Chunk, Generation

__all__ = ["GenerateConfig", "generate"]

COMPARED_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The options of ``anabranch generate``."""

    prompt: Annotated[
        str | None, typer.Argument(help="the prompt, or - to read it from standard input", show_default=False)
    ] = None
    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.DefaultDrafter = None
    messages: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json", help="answer this conversation instead: a list of messages (- is standard input)"
        ),
    ] = None
    system: options.System = None
    raw: options.Raw = False
    call: Keywords = field(
        default_factory=chosen(
            *("max_new_tokens", "min_new_tokens", *options.SAMPLING, "n"),
            *("rule", "stop", "stop_token_ids", "top_log_probs"),
            *("schema", "regex", "grammar", "prediction"),
            stop=(),
            seed=(0,),
        )
    )
    show_drafts: options.ShowDrafts = False
    compare: Annotated[bool, typer.Option("--compare", help="also measure the speedup over plain decoding")] = False
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="record every step in this file, for 'simulate'")
    ] = None
    every_position: Annotated[
        bool, typer.Option("--every-position", help="with --trace: record a draft at every token, verify none")
    ] = False
    force: options.Force = False
    as_json: options.AsJson = False
    streams: Annotated[
        bool, typer.Option("--stream", help="with --json: print a line of JSON for each chunk; the last has the result")
    ] = False
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help="answer each line instead (- is standard input), as lines of JSON"),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="with --prompts: write the answers here; continues what is there"),
    ] = None

    @property
    def seeds(self) -> list[int]:
        """The seed of each sample."""
        given = self.call["seed"]
        assert isinstance(given, Sequence)
        return [seed + sample for seed in given for sample in range(self.call["n"])]

    @property
    def keywords(self) -> Keywords:
        """The options of a call for one sample."""
        stop = tuple(map(options.unescaped, self.call["stop"] or ()))
        return {**self.call, **options.from_files(self.call), "n": 1, "seed": self.seeds[0], "stop": stop or None}


@configured
def generate(config: GenerateConfig) -> None:
    """Answer a prompt, or with --raw continue it.

    Uses the model's chat template if it has one. The text is written to standard output, and a summary to standard
    error: tokens, decode rate, prompt rate, mean acceptance length (tokens per target pass), the forward passes by
    kind, the drafter that auto chose, and why the text ended. --compare adds the measured speedup over plain decoding.
    --trace records token ids, drafts and times, but no text.

    --n, or several --seed, draw several samples of the answer, each printed when all are decoded.

    --prompts FILE.jsonl --out FILE answers many prompts. The same command continues after an interruption.
    """
    _check(config)
    call = config.keywords
    if config.prompts is not None:
        load = lambda wait: show.load_model(config.loading, config.drafter, call, wait)  # noqa: E731
        generate_batch.run(
            config.prompts, config.out, call, load, force=config.force, raw=config.raw, system=config.system
        )
        return
    asked = _read(config)
    with show.Wait() as wait:
        loaded = show.load_model(config.loading, config.drafter, call, wait)
        ids = show.prompt_ids(loaded, asked, raw=config.raw, system=config.system)
        call["on_prompt"] = show.prompt_progress(wait)
        if len(config.seeds) > 1:
            several: Keywords = {**call, "seed": config.seeds}
            samples = loaded.generate([ids] * len(config.seeds), **several)
        else:
            samples = [_streamed(loaded, ids, call, config, wait)]
    call["on_prompt"] = None
    comparison = _compare(loaded, ids, call, samples[0].drafter) if config.compare else None
    if config.as_json:
        records = [_record(loaded, sample, config) for sample in samples]
        if len(records) > 1:
            records = [{"samples": [{"seed": s, **r} for s, r in zip(config.seeds, records, strict=True)]}]
        record = records[0] if comparison is None else records[0] | {"compare": comparison}
        print(json.dumps({"result": record} if config.streams else record))
        return
    if len(samples) > 1:
        _print_samples(loaded, samples, config.seeds)
        return
    facts = show.rates(samples[0].stats, samples[0].drafter)
    ended = show.ending(samples[0], loaded)
    facts += [*show.lesser_kernels(loaded), show.explained(ended, samples[0], loaded, more="--max-new-tokens")]
    show.sentences(facts + (_compared(comparison) if comparison else []))


def _streamed(loaded: Model, ids: list[int], call: Keywords, config: GenerateConfig, wait: show.Wait) -> Generation:
    """The result of one sample, whose text is printed as it is decoded."""
    chunks = loaded.stream(ids, **call)
    if config.trace is not None:
        config.trace.unlink(missing_ok=True)
        chunks = _recorded(chunks, loaded, ids, {**call, "on_prompt": None}, config)
    wait.clear()
    stops = call["stop"] or ()
    marker = show.Marker(loaded.tokenizer, stops) if config.show_drafts and not config.as_json else None
    if config.streams:
        chunks = _printed(chunks)
    _, result = show.show(chunks, wait=wait, visible=not config.as_json, marker=marker)
    assert result is not None, "the last chunk has the result"
    if marker is not None:
        typer.echo(marker.legend(result.stats), err=True)
    return result


def _print_samples(loaded: Model, samples: Sequence[Generation], seeds: Sequence[int]) -> None:
    """Print several samples, each under a line with its seed, and the statistics of all."""
    from anabranch.decoding.stats import Stats

    for sample, seed in zip(samples, seeds, strict=True):
        why = show.explained(show.ending(sample, loaded), sample, loaded, more="--max-new-tokens")
        show.note(f"seed {seed}: {why}")
        print(show.for_stdout(sample.text), flush=True)
    total = Stats.merged(sample.stats for sample in samples)
    show.sentences([*show.rates(total, samples[0].drafter, prompts=len(samples)), *show.lesser_kernels(loaded)])


def _printed(chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    """Pass ``chunks`` on, and print each as a line of JSON."""
    with closing(chunks):
        for chunk in chunks:
            record = {"text": chunk.text, "token_ids": list(chunk.token_ids), "sources": list(chunk.sources)}
            if chunk.top_log_probs is not None:
                record["top_log_probs"] = [[*place.items()] for place in chunk.top_log_probs]
            print(json.dumps(record), flush=True)
            yield chunk


def _check(config: GenerateConfig) -> None:
    """Check for contradictory options and for output files. Raises InputError or FileError."""
    check(config.call)
    given = [each for each in (config.prompt, config.messages, config.prompts) if each is not None]
    if not given:
        raise options.UsageError("Missing argument 'PROMPT', or --prompts FILE (see 'anabranch generate --help')")
    if len(given) > 1:
        raise InputError("give either a prompt, a conversation with --messages, or a file of prompts with --prompts")
    if config.prompts is None and config.out is not None:
        raise InputError("--out needs --prompts; redirect the text of one prompt instead")
    if config.streams and not config.as_json:
        raise InputError("--stream needs --json; text is streamed without it")
    if config.call["top_log_probs"] and not config.as_json:
        raise InputError("--top-log-probs needs --json, which prints them")
    several = len(config.seeds) > 1
    single = {
        "--show-drafts": config.show_drafts,
        "--compare": config.compare,
        "--trace": config.trace is not None,
        "--stream": config.streams,
        **({} if several else {"--json": config.as_json}),
        **({} if several and config.prompts is None else {"--n or several --seed": several}),
    }
    if (config.prompts is not None or several) and (name := next((name for name in single if single[name]), None)):
        what = "--prompts" if config.prompts is not None else "--n and all but one --seed"
        kind = "a single prompt" if config.prompts is not None else "a single sample"
        raise InputError(f"{name} is for {kind}; leave out {name} or {what}")
    if several and config.call["temperature"] == 0:
        raise InputError(f"{len(config.seeds)} samples are all the same at temperature 0; give --temperature 1, say")
    if config.compare and config.drafter == "none":
        raise InputError("--compare measures a drafter against plain decoding; choose another drafter than none")
    if config.every_position and config.trace is None:
        raise InputError("--every-position needs a recording; give a file with --trace")
    if config.raw and (config.system is not None or config.messages is not None):
        name = "--messages" if config.system is None else "--system"
        raise InputError(f"{name} needs the chat template, which --raw disables; give only one of them")
    if config.trace is not None:
        check_output(config.trace, force=config.force, what="the trace", option="--trace")


def _read(config: GenerateConfig) -> Any:
    """The text of the prompt, or the messages of the conversation. Raises InputError or FileError."""
    if config.messages is not None:
        stdin = config.messages == "-"
        text = options.standard_input() if stdin else read_whole(Path(config.messages).expanduser())
        try:
            return parse_json(text)
        except ValueError as error:
            where = "standard input" if stdin else config.messages
            raise FileError(f"{where} is not JSON ({error}); give a list of messages") from error
    text = options.standard_input() if config.prompt == "-" else config.prompt or ""
    if not text.strip():
        raise InputError("the prompt is empty; give some text")
    return text


def _record(loaded: Model, result: Generation, config: GenerateConfig) -> dict[str, Any]:
    """The result as JSON."""
    record = {**show.record(result, loaded), "kernels": show.kernels(loaded)}
    if config.show_drafts:
        record["sources"] = result.sources
    if result.top_log_probs is not None:
        record["top_log_probs"] = [[*place.items()] for place in result.top_log_probs]
    return {**record, "stats": result.stats.to_dict()}


def _recorded(
    chunks: Generator[Chunk, None, None], loaded: Model, ids: list[int], call: Keywords, config: GenerateConfig
) -> Generator[Chunk, None, None]:
    """Pass ``chunks`` on and record their steps; to record every position, replace them by plain decoding."""
    from anabranch.analysis.trace import TraceWriter
    from anabranch.api import Options
    from anabranch.decoding.generation import stream
    from anabranch.decoding.scheduler import Scheduler
    from anabranch.methods import make_drafter

    assert config.trace is not None
    settings: dict[str, Any] = {**call, "drafter": str(loaded.drafter), "model": loaded.target.title}
    del settings["on_prompt"]
    kind: Any = {"rule": call["rule"], "every_position": config.every_position}
    with TraceWriter(config.trace, settings=settings, **kind) as writer:
        if config.every_position:
            checked, decoder = Options(call), loaded.target.decoder
            drafter = make_drafter(loaded.spec, decoder, *(adapter.module for adapter in loaded.adapters))
            request, watched = checked.request(ids, loaded.target), writer.watch(drafter, decoder)
            stop = checked.stops(loaded.target)
            chunks = stream(Scheduler(decoder, rows=1), request, watched, loaded.tokenizer, stop=stop)
        with closing(chunks):
            for chunk in chunks:
                writer.add(chunk.step, len(chunk.token_ids))
                yield chunk


def _compare(loaded: Model, ids: list[int], call: Keywords, drafter: str) -> dict[str, Any]:
    """Alternate plain decoding and the drafter on the same prompt; rates and the paired speedup are medians."""
    rates: dict[str, list[float]] = {"none": [], drafter: []}
    tokens: dict[str, list[int]] = {}
    warm_up: Keywords = {**call, "max_new_tokens": 8, "drafter": "none"}
    loaded.generate(ids, **warm_up)  # the drafter has just run
    for _ in range(COMPARED_RUNS):
        for spec, measured in rates.items():
            one: Keywords = {**call, "drafter": spec}
            result = loaded.generate(ids, **one)
            tokens[spec] = result.token_ids
            measured.append(result.stats.tokens_per_second)
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
