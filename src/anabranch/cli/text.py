"""``anabranch generate`` and ``anabranch chat``: text from a model, as it is decoded."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from anabranch.api import Model as LoadedModel
    from anabranch.generation import Chunk, Generation

__all__ = ["chat", "generate"]

Model = Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")]
Adapter = Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships for the model)")]
Drafter = Annotated[
    str, typer.Option(help="none, streams, prompt_lookup, streams+prompt_lookup; settings as streams:nodes=32,prune=16")
]
NewTokens = Annotated[int, typer.Option(help="at most that many new tokens")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopK = Annotated[int, typer.Option(help="keep the k most probable tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="keep the most probable tokens of that mass; 1: all")]
Seed = Annotated[int, typer.Option(help="noise of sampling")]
Stop = Annotated[list[str] | None, typer.Option(help="end the text before this string; repeatable")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="mark who proposed each token")]

# the target's own tokens are plain; drafted ones are coloured, or marked where there is no colour
COLOURS = ("green", "cyan", "magenta", "yellow", "bright_green", "bright_cyan", "bright_magenta", "bright_yellow")
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt, or - to read it from standard input")],
    model: Model = "default",
    adapter: Adapter = None,
    drafter: Drafter = "streams",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template: continue the text as it stands")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    show_drafts: ShowDrafts = False,
    compare: Annotated[bool, typer.Option("--compare", help="measure the speedup over plain decoding too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write text: an answer to the prompt, or with --raw its continuation.

    A model with a chat template is asked through it. The last line tells tokens, tokens/s, mean acceptance length
    (tokens per forward) and forwards; --compare adds the measured speedup over plain decoding.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = _load(model, adapter, drafter, dtype, device)
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    asked: Any = text
    if has_template and not raw and text:
        asked = loaded.chat_ids([{"role": "user", "content": text}])
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    found = _stream(loaded, asked, options, show=not as_json, show_drafts=show_drafts)
    record: dict[str, Any] = found.stats.to_dict()
    comparison = _compare(loaded, asked, options, drafter) if compare else None
    if as_json:
        record = {"text": found.text, "token_ids": found.token_ids, "finish_reason": found.finish_reason, **record}
        print(json.dumps(record | (comparison or {})))
        return
    line = (
        f"{found.stats.tokens} tokens, {found.stats.tokens_per_second:.1f} tokens/s, "
        f"mean acceptance length {found.stats.mean_acceptance_length:.2f}, {found.stats.steps} forwards"
    )
    if comparison is not None:
        same = "same tokens" if comparison["equal"] else "other tokens than plain decoding (see anabranch certify)"
        line += f", speedup {comparison['speedup']:.2f}x over plain decoding, {same}"
    _console(stderr=True).print(line, style="dim", highlight=False)


def chat(
    model: Model = "default",
    adapter: Adapter = None,
    drafter: Drafter = "streams",
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    show_drafts: ShowDrafts = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer."""
    loaded = _load(model, adapter, drafter, dtype, device)
    messages = [] if system is None else [{"role": "system", "content": system}]
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    while True:
        try:
            said = input("> ")
        except EOFError:
            break
        if not said.strip():
            break
        messages.append({"role": "user", "content": said})
        try:
            found = _stream(loaded, loaded.chat_ids(messages), options, show=True, show_drafts=show_drafts)
        except KeyboardInterrupt:
            print("\n(stopped)")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": found.text})
        _console(stderr=True).print(
            f"{found.stats.tokens_per_second:.1f} tokens/s, {found.stats.mean_acceptance_length:.2f} tokens a forward",
            style="dim",
            highlight=False,
        )


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True)


def _load(model: str, adapter: Path | None, drafter: str, dtype: str, device: str) -> LoadedModel:
    if model == "default":
        from anabranch.cli.models import fetch_default

        fetch_default()
    import anabranch

    return anabranch.load(model, drafter=drafter, adapter=adapter, dtype=dtype, device=device)


def _stream(loaded: LoadedModel, asked: Any, options: dict[str, Any], *, show: bool, show_drafts: bool) -> Generation:
    """Decode, showing text as it comes; returns the whole."""
    chunks = loaded.stream(asked, **options)
    console = _console()
    if show and show_drafts:
        console.print(_legend(console.is_terminal))
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as end:
            if show:
                print(flush=True)
            return end.value  # type: ignore[no-any-return]
        if show and show_drafts:
            console.print(_marked(loaded, chunk, console.is_terminal), end="")
        elif show:
            print(chunk.text, end="", flush=True)


def _rank(source: str) -> int:
    """0: the target; j: stream j; other drafters behind the streams."""
    if source == "target":
        return 0
    return int(source.rsplit(" ", 1)[1]) if source.startswith("stream ") else 9


def _legend(colour: bool) -> Any:
    from rich.text import Text

    text = Text("who proposed it: the target itself (plain)", style="dim")
    for j in range(1, 5):
        mark = f"stream {j}" + ("" if colour else f" (word{SUPERSCRIPTS[j]})")
        text += Text(", ", style="dim") + Text(mark, style=COLOURS[j - 1])
    return text + Text(", ", style="dim") + Text("another drafter" + ("" if colour else " (word⁹)"), style="red")


def _marked(loaded: LoadedModel, chunk: Chunk, colour: bool) -> Any:
    """The tokens of a chunk one by one, coloured or marked by source."""
    from rich.text import Text

    text = Text()
    for token, source in zip(chunk.token_ids, chunk.sources, strict=True):
        word = loaded.tokenizer.decode([token], skip_special_tokens=True)
        rank = _rank(source)
        if rank == 0 or not word:
            text.append(word)
        elif colour:
            text.append(word, style="red" if rank == 9 else COLOURS[(rank - 1) % len(COLOURS)])
        else:
            text.append(word + SUPERSCRIPTS[min(rank, 9)])
    return text


def _compare(loaded: LoadedModel, asked: Any, options: dict[str, Any], drafter: str) -> dict[str, Any]:
    """Alternate plain decoding and the drafter three times on the same prompt; the ratio of medians."""
    seconds: dict[str, list[float]] = {"none": [], drafter: []}
    tokens: dict[str, list[int]] = {}
    loaded.generate(asked, drafter="none", **options)  # warm-up; the drafter has just run
    for _ in range(3):
        for spec, taken in seconds.items():
            began = time.perf_counter()
            tokens[spec] = loaded.generate(asked, drafter=spec, **options).token_ids
            taken.append((time.perf_counter() - began) / len(tokens[spec]))
    ratios = [a / b for a, b in zip(seconds["none"], seconds[drafter], strict=True)]
    return {"speedup": round(statistics.median(ratios), 4), "equal": tokens["none"] == tokens[drafter]}
