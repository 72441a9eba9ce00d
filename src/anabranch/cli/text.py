"""``anabranch generate`` and ``anabranch chat``: text from a model, as it is decoded."""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Generator

    from anabranch.api import Keywords
    from anabranch.api import Model as LoadedModel
    from anabranch.generation import Chunk, Generation

__all__ = ["chat", "generate"]

Model = Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")]
Adapter = Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships for the model)")]
Drafter = Annotated[
    str,
    typer.Option(
        help="auto (what tune found), none, streams, prompt_lookup, streams+prompt_lookup; streams:nodes=32,prune=16"
    ),
]
NewTokens = Annotated[int, typer.Option(help="at most that many new tokens")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopK = Annotated[int, typer.Option(help="keep the k most probable tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="keep the most probable tokens of that mass; 1: all")]
Seed = Annotated[int, typer.Option(help="noise of sampling")]
Stop = Annotated[list[str] | None, typer.Option(help="end the text before this string; repeatable")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Quantize = Annotated[str, typer.Option(help="weights in none (as loaded), int8 or int4: then that model is the target")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="mark who proposed each token")]

# the target's own tokens are plain; drafted ones are coloured, or marked where there is no colour
COLOURS = ("green", "cyan", "magenta", "yellow", "bright_green", "bright_cyan", "bright_magenta", "bright_yellow")
OTHER_COLOUR = "red"
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
COMPARED_RUNS = 3


def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt, or - to read it from standard input")],
    model: Model = "default",
    adapter: Adapter = None,
    drafter: Drafter = "auto",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template: continue the text as it stands")] = False,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    show_drafts: ShowDrafts = False,
    compare: Annotated[bool, typer.Option("--compare", help="measure the speedup over plain decoding too")] = False,
    trace: Annotated[Path | None, typer.Option(help="record every step into this file, for 'simulate'")] = None,
    every_position: Annotated[
        bool, typer.Option("--every-position", help="with --trace: record a draft at every token and verify none")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write text: an answer to the prompt, or with --raw its continuation.

    A model with a chat template is asked through it. The last line tells tokens, tokens/s, mean acceptance length
    (tokens per forward), forwards and the drafter, what auto became; --compare adds the measured speedup over plain
    decoding. --trace records token ids, drafts and times, no text.
    """
    if compare and drafter == "none":
        raise InputError("--compare measures a drafter against plain decoding; choose another drafter than none")
    if every_position and trace is None:
        raise InputError("--every-position says how to record; give a file with --trace")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InputError("the prompt is empty; give some text")
    options = _options(max_new_tokens, temperature, top_k, top_p, seed, stop)
    loaded = _load(model, adapter, drafter, dtype=dtype, quantize=quantize, device=device, options=options)
    asked: str | list[int] = text
    if not raw and getattr(loaded.tokenizer, "chat_template", None):
        asked = loaded.chat_ids([{"role": "user", "content": text}])
    chunks = loaded.stream(asked, **options)
    if trace is not None:
        chunks = _recorded(chunks, loaded, asked, options, trace, loaded.drafter, every_position=every_position)
    found = _stream(loaded, chunks, options, show=not as_json, show_drafts=show_drafts)
    comparison = _compare(loaded, asked, options, loaded.drafter) if compare else None
    if as_json:
        record = {"text": found.text, "token_ids": found.token_ids, "finish_reason": found.finish_reason}
        if show_drafts:
            record["sources"] = found.sources
        print(json.dumps(record | {"stats": found.stats.to_dict()} | ({"compare": comparison} if comparison else {})))
        return
    _note(_summary(found, loaded.drafter, comparison))


def chat(
    model: Model = "default",
    adapter: Adapter = None,
    drafter: Drafter = "auto",
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    show_drafts: ShowDrafts = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer."""
    options = _options(max_new_tokens, temperature, top_k, top_p, seed, None)
    loaded = _load(model, adapter, drafter, dtype=dtype, quantize=quantize, device=device, options=options)
    messages = [] if system is None else [{"role": "system", "content": system}]
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return
        if not said.strip():
            return
        messages.append({"role": "user", "content": said})
        try:
            chunks = loaded.stream(loaded.chat_ids(messages), **options)
            found = _stream(loaded, chunks, options, show=True, show_drafts=show_drafts)
        except KeyboardInterrupt:
            _note("\nstopped; this question and its answer are forgotten")
            messages.pop()
            continue
        except InputError as error:
            _note(f"{error}; this question is forgotten")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": found.text})
        rate, length = found.stats.tokens_per_second, found.stats.mean_acceptance_length
        _note(f"{rate:.1f} tokens/s, mean acceptance length {length:.2f}")


def _options(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, stop: list[str] | None
) -> Keywords:
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
    }


def _summary(found: Generation, drafter: str, comparison: dict[str, Any] | None) -> str:
    line = (
        f"{found.stats.tokens} tokens, {found.stats.tokens_per_second:.1f} tokens/s, "
        f"mean acceptance length {found.stats.mean_acceptance_length:.2f}, {found.stats.steps} forwards, "
        f"drafter {drafter}"
    )
    if comparison is None:
        return line
    mine, plain = comparison["tokens_per_second"], comparison["plain_tokens_per_second"]
    same = "same tokens" if comparison["equal"] else "other tokens than plain decoding (see 'anabranch certify')"
    ratio = f"speedup {comparison['speedup']:.2f}x over plain decoding ({mine:.1f} against {plain:.1f} tokens/s)"
    return f"{line}; {ratio}, {same}"


def _note(line: str) -> None:
    """A quiet line on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(line, style="dim", highlight=False, markup=False)


def _load(
    model: str, adapter: Path | None, drafter: str, *, dtype: str, quantize: str, device: str, options: Keywords
) -> LoadedModel:
    """Check what can be checked without a model, then fetch (with a progress bar) and load it."""
    from anabranch.api import Options, load
    from anabranch.drafters import check_spec

    check_spec(drafter)
    Options.of(options)
    if model == "default":
        from anabranch.cli.models import fetch_default

        fetch_default()
    return load(model, drafter=drafter, adapter=adapter, dtype=dtype, quantize=quantize, device=device)


def _recorded(
    chunks: Generator[Chunk, None, None],
    loaded: LoadedModel,
    asked: str | list[int],
    options: Keywords,
    path: Path,
    drafter: str,
    *,
    every_position: bool,
) -> Generator[Chunk, None, None]:
    """Hand ``chunks`` on and write their steps down; to record every position, decode plainly in their place."""
    from anabranch.analysis.trace import TraceWriter
    from anabranch.api import Options
    from anabranch.drafters import make_drafter
    from anabranch.engine import Engine
    from anabranch.generation import stream

    settings = {"drafter": drafter, "model": loaded.target.name, **options}
    with TraceWriter(path, settings=settings, every_position=every_position) as writer:
        if every_position:
            call = Options.of(options)
            ids = loaded.tokenizer.encode(asked) if isinstance(asked, str) else asked
            request = call.request(list(ids), loaded.target)
            adapter = None if loaded.adapter is None else loaded.adapter.adapter
            decoder = loaded.target.decoder
            engine = Engine(
                decoder,
                writer.watch(make_drafter(drafter, decoder, adapter)),
                capacity=len(request.prompt_ids) + request.max_new_tokens,
            )
            chunks = stream(engine, request, loaded.tokenizer, stop=call.stops)
        with closing(chunks):
            for chunk in chunks:
                writer.add(chunk.step, len(chunk.token_ids))
                yield chunk


def _stream(
    loaded: LoadedModel,
    chunks: Generator[Chunk, None, None],
    options: Keywords,
    *,
    show: bool,
    show_drafts: bool,
) -> Generation:
    """Decode, showing text as it comes; returns the whole."""
    marker = _Marker(loaded.tokenizer, options.get("stop", ())) if show and show_drafts else None
    result: Generation | None = None
    with closing(chunks):
        for chunk in chunks:
            if show:
                typer.echo(chunk.text if marker is None else marker.mark(chunk), nl=False)
            result = chunk.result
    assert result is not None, "the last chunk has the result"
    if show:
        typer.echo()
    if marker is not None:
        typer.echo(marker.legend(result), err=True)
    return result


class _Marker:
    """Shows who proposed each token: by colour on a terminal, else by a mark behind the token."""

    def __init__(self, tokenizer: Any, stop: Any) -> None:
        from anabranch.generation import Detokenizer

        self._detokenizer = Detokenizer(tokenizer, (stop,) if isinstance(stop, str) else stop)
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        try:
            SUPERSCRIPTS.encode(sys.stdout.encoding or "ascii")
            self._superscripts = True
        except UnicodeEncodeError:
            self._superscripts = False

    def mark(self, chunk: Chunk) -> str:
        """The text of a chunk, token by token."""
        text = ""
        last = len(chunk.token_ids) - 1
        for i, (token, source) in enumerate(zip(chunk.token_ids, chunk.sources, strict=True)):
            ended = chunk.step.finish == "stop" and i == len(chunk.step.tokens) - 1
            piece = "" if ended else self._detokenizer.add([token])
            if i == last and chunk.result is not None:
                piece += self._detokenizer.finish()
            text += self._style(piece, source)
        return text

    def legend(self, result: Generation) -> str:
        """Who proposed how many tokens, in the order target, streams, others."""
        sources = sorted(result.stats.sources.items(), key=lambda item: (_rank(item[0]), item[0]))
        words = [self._style(source, source) + f" {count}" for source, count in sources]
        return "proposed by: " + ", ".join(words)

    def _style(self, piece: str, source: str) -> str:
        rank = _rank(source)
        if rank == 0 or not piece:
            return piece
        if self._colour:
            return typer.style(piece, fg=COLOURS[(rank - 1) % len(COLOURS)] if rank < 100 else OTHER_COLOUR)
        if not self._superscripts:
            return piece + (f"[{rank}]" if rank < 100 else "[p]")
        return piece + ("".join(SUPERSCRIPTS[int(digit)] for digit in str(rank)) if rank < 100 else "ᵖ")


def _rank(source: str) -> int:
    """0: the target; j: stream j; 100: other drafters."""
    if source == "target":
        return 0
    return int(source.rsplit(" ", 1)[1]) if source.startswith("stream ") else 100


def _compare(loaded: LoadedModel, asked: str | list[int], options: Keywords, drafter: str) -> dict[str, Any]:
    """Alternate plain decoding and the drafter on the same prompt; rates are medians, the speedup that of the pairs."""
    rates: dict[str, list[float]] = {"none": [], drafter: []}
    tokens: dict[str, list[int]] = {}
    warm_up: Keywords = {**options, "max_new_tokens": 8, "drafter": "none"}
    loaded.generate(asked, **warm_up)  # the drafter has just run
    for _ in range(COMPARED_RUNS):
        for spec, measured in rates.items():
            call: Keywords = {**options, "drafter": spec}
            found = loaded.generate(asked, **call)
            tokens[spec] = found.token_ids
            measured.append(found.stats.tokens_per_second)
    ratios = [mine / plain for mine, plain in zip(rates[drafter], rates["none"], strict=True)]
    return {
        "speedup": round(statistics.median(ratios), 4),
        "tokens_per_second": round(statistics.median(rates[drafter]), 3),
        "plain_tokens_per_second": round(statistics.median(rates["none"]), 3),
        "equal": tokens["none"] == tokens[drafter],
    }
