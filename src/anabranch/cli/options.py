"""The options that ``generate`` and ``chat`` share, and loading the model that they name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.api import Keywords
    from anabranch.api import Model as LoadedModel
    from anabranch.cli.show import Wait

__all__ = [
    "Adapter",
    "Device",
    "Drafter",
    "Dtype",
    "MinP",
    "Model",
    "NewTokens",
    "Quantize",
    "RepetitionPenalty",
    "Seed",
    "ShowDrafts",
    "System",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "decoded",
    "keywords",
    "load_model",
    "standard_input",
]

Model = Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")]
Adapter = Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships for the model)")]
Drafter = Annotated[
    str,
    typer.Option(help="auto, none, streams, prompt_lookup, streams+prompt_lookup; settings as streams:nodes=8"),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="stop after this many new tokens")]
Temperature = Annotated[float, typer.Option(help="divide the logits by this; 0: greedy")]
TopK = Annotated[int, typer.Option(help="keep the k most probable tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="keep the most probable tokens that make up this probability; 1: all")]
MinP = Annotated[float, typer.Option(help="keep tokens of at least this share of the best one's probability; 0: all")]
RepetitionPenalty = Annotated[float, typer.Option(help="divide the scores of tokens seen before by this; 1: off")]
Seed = Annotated[int, typer.Option(help="seed of the random draws")]
System = Annotated[str | None, typer.Option(help="put this system message first")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: all that this process may use)")]
Quantize = Annotated[str, typer.Option(help="none, int8 or int4 weights; the quantised model is then the target")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="mark who proposed each token")]


def keywords(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int,
    stop: list[str] | None = None,
) -> Keywords:
    """The options of a call."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }


def load_model(
    model: str,
    adapter: Path | None,
    drafter: str,
    *,
    dtype: str,
    quantize: str,
    device: str,
    threads: int | None,
    options: Keywords,
    wait: Wait,
) -> LoadedModel:
    """Check what can be checked without a model, then fetch (with a progress bar) and load it.

    ``wait`` says so on a terminal, from before the first slow import on.
    """
    wait.tell(f"loading {model} ...")
    from anabranch.api import Options, load
    from anabranch.methods import check_spec

    check_spec(drafter)
    Options.of(options)
    if model == "default":
        from anabranch.cli.models import fetch_default

        wait.clear()  # a download has a progress bar of its own
        fetch_default()
        wait.tell(f"loading {model} ...")
    return load(model, drafter=drafter, adapter=adapter, dtype=dtype, quantize=quantize, device=device, threads=threads)


def standard_input() -> str:
    """All of standard input. Raises InputError where it is not UTF-8."""
    return decoded(sys.stdin.buffer.read())


def decoded(data: bytes, start: int = 0) -> str:
    """Text from standard input, which ``start`` bytes came before. Raises InputError where it is not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {start + error.start:,}; "
            "convert it first, for example with iconv"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
