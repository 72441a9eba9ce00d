"""The configuration of ``anabranch bench``, and helpers shared by its three kinds of measurement."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion, options
from anabranch.declared import Keywords
from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.bench.application import Application
    from anabranch.bench.entries import Entry
    from anabranch.bench.run import Encoded
    from anabranch.bench.suites import SuitePrompt
    from anabranch.loading import Loaded
    from anabranch.model.quantize import Quantization

__all__ = [
    "BenchConfig",
    "Weights",
    "command",
    "described",
    "encode",
    "entries_of",
    "load",
    "refuse_all_but",
]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The options of ``anabranch bench``."""

    loading: options.Loading = field(default=options.Loading())
    prompts: options.Prompts = field(default=options.Prompts())
    method: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="[LABEL=]DRAFTER[@KIND]",
            help="measure this drafter, such as auto or wide=NAME:nodes=32; @int8 or @int4 quantises its weights; "
            "repeatable",
            autocompletion=completion.drafters,
        ),
    ] = ()
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="the same for several drafters, separated by commas")
    ] = None
    peer: Annotated[
        tuple[str, ...],
        typer.Option(metavar="[LABEL=]NAME", help="measure this engine too; see 'bench peers list'; repeatable"),
    ] = ()
    metric: Annotated[
        tuple[str, ...],
        typer.Option(help="with --task: score answers by exact_match, execution or rouge instead; repeatable"),
    ] = ()
    examples: Annotated[int, typer.Option(help="with --task: show how this many of the answers were decoded")] = 1
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --task: write the tables and the examples as a web page")
    ] = None
    max_new_tokens: options.NewTokens = 128
    sampling: Keywords = field(default_factory=options.sampling)
    repeats: Annotated[int, typer.Option(help="repeat every measurement this many times")] = 1
    rows: Annotated[
        tuple[int, ...],
        typer.Option(metavar="N", help="measure throughput and latency of N prompts at a time; repeatable"),
    ] = ()
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the result to FILE.json, FILE.csv and FILE.md")
    ] = None
    figures: Annotated[bool, typer.Option("--figures", help="also draw figures, as FILE.*.png and .svg")] = False
    resume: Annotated[bool, typer.Option("--resume", help="continue the stopped run that was writing FILE")] = False
    force: options.Force = False
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="record our contenders' steps as DIR/LABEL.jsonl, for 'simulate': first runs only"
        ),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            help="time steps of a model of this size with random weights instead: 135m, 7b, 13b or 33b",
            autocompletion=completion.one_of("135m", "7b", "13b", "33b"),
        ),
    ] = None
    width: Annotated[
        tuple[int, ...], typer.Option(metavar="N", help="with --shape: verify N nodes in a step; repeatable")
    ] = ()
    batch: Annotated[
        tuple[int, ...], typer.Option(metavar="N", help="with --shape: decode N rows at a time; repeatable")
    ] = ()
    context_tokens: Annotated[
        tuple[int, ...],
        typer.Option("--context", metavar="N", help="with --shape: hold N tokens in the KV cache; repeatable"),
    ] = ()
    as_json: options.AsJson = False

    @property
    def asked(self) -> tuple[str, ...]:
        """The drafters of --method and --methods."""
        from anabranch.bench.entries import listed

        return (*self.method, *(() if self.methods is None else listed(self.methods)))

    def application(self) -> Application | None:
        """The task to measure, if there is one. Raises InputError, FileError or CapabilityError."""
        from anabranch.tasks import check_metrics

        found = self.prompts.application(self.metric)
        if found is not None:
            check_metrics(found.task.metrics)
        if found is None and (self.metric or self.html is not None):
            raise InputError(f"{'--metric' if self.metric else '--html'} needs --task; give both, or leave it out")
        return found


@dataclass(frozen=True)
class Weights:
    """The loaded targets by kind of weights; ``load_seconds`` are not part of any measurement."""

    loaded: dict[Quantization, Loaded]
    load_seconds: dict[str, float]

    @property
    def first(self) -> Loaded:
        """The target that is least quantised."""
        return next(iter(self.loaded.values()))


def refuse_all_but(allowed: Sequence[str], given: Mapping[str, str], why: str) -> None:
    """Raise InputError for an option that has no effect; ``why`` starts the message."""
    if useless := [written for name, written in given.items() if name not in allowed]:
        raise InputError(f"{why}, so {useless[0]} has no effect; leave one of them out")


def entries_of(config: BenchConfig) -> list[Entry]:
    """The validated contenders; ``--quantize`` is the default kind of weights."""
    from anabranch.bench.entries import PLAIN, check_installed, quantised, read_entries
    from anabranch.methods import AUTO, methods
    from anabranch.model.quantize import check_quantization

    kind = check_quantization(config.loading.quantize)
    defaults = [AUTO] if config.rows else [method.name for method in methods() if method.default]
    asked = config.asked or (PLAIN, *defaults)
    asked = tuple(quantised(text, kind) for text in asked)
    sampling = options.params(config.sampling)
    if config.peer and (sampling.min_p or sampling.repetition_penalty != 1):
        raise InputError("peers do not support --min-p and --repetition-penalty; leave out these or --peer")
    entries = read_entries(asked, config.peer)
    check_installed(entries)
    return entries


def load(config: BenchConfig, wanted: Sequence[Quantization]) -> Weights:
    """Load the target once for each kind of weights."""
    found: dict[Quantization, Loaded] = {}
    seconds: dict[str, float] = {}
    for kind in wanted:
        loaded = found[kind] = options.load(replace(config.loading, quantize=kind))
        suffix = "" if kind == "none" else f" {kind}"
        seconds[f"load{suffix}"] = round(loaded.load_seconds, 3)
        seconds[f"pack{suffix}"] = round(loaded.pack_seconds, 3)
    return Weights(found, seconds)


def encode(config: BenchConfig, prompts: Sequence[SuitePrompt], loaded: Loaded) -> list[Encoded]:
    """The prompts with their token ids. Raises InputError for one without tokens or too long for the model."""
    from anabranch.prompts import chat_ids

    longest, tokenizer = loaded.target.config.max_positions, loaded.target.tokenizer
    encoded = [(prompt, chat_ids(tokenizer, prompt.asked, raw=config.prompts.raw)) for prompt in prompts]
    for prompt, ids in encoded:
        if not ids:
            raise InputError(f"the prompt {prompt.name} of the task {prompt.task} has no tokens; leave it out")
        if len(ids) + config.max_new_tokens > longest:
            raise InputError(
                f"the prompt {prompt.name} of the task {prompt.task} has {len(ids)} tokens, too many for "
                f"{config.max_new_tokens} more within the model's {longest}; shorten it, or lower --max-new-tokens"
            )
    return list(encoded)


def described(
    config: BenchConfig, entries: Sequence[Entry], encoded: Sequence[Encoded], loaded: Loaded
) -> dict[str, Any]:
    """The description of the measurement, for the result file."""
    from anabranch.model.kernel_use import near_ties
    from anabranch.support.files import without_folders

    sampling = options.params(config.sampling)
    return {
        "model": without_folders(config.loading.model),
        **({} if config.loading.lora is None else {"lora": config.loading.lora.name}),
        "fingerprint": loaded.target.fingerprint,
        "adapter": loaded.adapters[0].record.get("sha256") if loaded.adapters else None,
        "suite": Path(config.prompts.task[0] if config.prompts.of_task else config.prompts.suite).name,
        "tasks": list(config.prompts.task),
        "prompts": len(encoded),
        "prompts_sha256": hashlib.sha256(json.dumps([list(ids) for _, ids in encoded]).encode()).hexdigest(),
        "contenders": [[entry.name, without_folders(str(entry.spec)), entry.kind, entry.weights] for entry in entries],
        "max_new_tokens": config.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "chat_template": not config.prompts.raw,
        "dtype": str(loaded.target.decoder.dtype).removeprefix("torch."),
        "repeats": config.repeats,
        "near_ties": near_ties(loaded.target.decoder),
    }


def command() -> str:
    """The command for the result file: with DIR for the data folder, and without --resume and --force."""
    from anabranch.support.files import shown_command

    words = [word for word in sys.argv[1:] if word not in ("--resume", "--force")]
    return shown_command("anabranch", *words, hidden=("--data",))
