"""The contenders of ``anabranch bench``, and the models and prompts that its verbs prepare for them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion, options
from anabranch.declared import Keywords
from anabranch.errors import InputError
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.bench.entries import Entry
    from anabranch.bench.run import Encoded
    from anabranch.bench.suites import SuitePrompt
    from anabranch.loading import Loaded
    from anabranch.model.quantize import Rounding

__all__ = [
    "Contenders",
    "Out",
    "Prepared",
    "Repeats",
    "command",
    "entries_of",
    "prepared",
]

Repeats = Annotated[int, typer.Option(help="repeat every measurement this many times")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="write the result to FILE.json")]


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """Contenders, and the decoding that they are compared in."""

    loading: LoadConfig = field(default=LoadConfig())
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
    max_new_tokens: options.NewTokens = 128
    sampling: Keywords = field(default_factory=options.sampling)
    repeats: Repeats = 1

    @property
    def specs(self) -> tuple[str, ...]:
        """The drafters of --method and --methods."""
        from anabranch.bench.entries import listed

        return (*self.method, *(() if self.methods is None else listed(self.methods)))


@dataclass(frozen=True)
class Prepared:
    """The targets by kind of weights, the prompts with their token ids, and the description for the result file.

    load_seconds  of loading and packing; not part of any measurement
    """

    loaded: dict[Rounding, Loaded]
    encoded: list[Encoded]
    description: dict[str, Any]
    load_seconds: dict[str, float]


def entries_of(config: Contenders, defaults: Sequence[str] | None = None) -> list[Entry]:
    """The validated contenders; ``--quantize`` is the default kind of weights.

    defaults  the drafters besides plain decoding if none is named; None: every default method
    """
    from anabranch.bench.entries import PLAIN, check_installed, quantised, read_entries
    from anabranch.methods import methods
    from anabranch.model.quantize import rounding_of

    kind = rounding_of(config.loading.quantize)
    if defaults is None:
        defaults = [method.name for method in methods() if method.default]
    specs = [quantised(text, kind) for text in config.specs or (PLAIN, *defaults)]
    sampling = options.params(config.sampling)
    if config.peer and (sampling.min_p or sampling.repetition_penalty != 1):
        raise InputError("peers do not support --min-p and --repetition-penalty; leave out these or --peer")
    entries = read_entries(specs, config.peer)
    check_installed(entries)
    return entries


def measured(loading: LoadConfig, kind: Rounding, *, peers: bool) -> Loaded:
    """Load the target with one kind of weights, "none" being those of its file.

    Beside ``peers`` without the defaults of its generation config.
    """
    from anabranch.cli.show import name_defaults, sentences
    from anabranch.model.generation_config import GenerationDefaults

    own = loading.quantize if loading.quantize in ("auto", "none") else "auto"
    loaded = options.load(replace(loading, quantize=own if kind == "none" else kind))
    if not peers:
        name_defaults(loaded.target)
    elif (target := loaded.target).generation.honoured:
        sentences(["peers know no defaults of a generation config, so all contenders decode without them"])
        return replace(loaded, target=replace(target, generation=GenerationDefaults()))
    return loaded


def prepared(
    config: Contenders, source: options.Prompts, prompts: Sequence[SuitePrompt], entries: Sequence[Entry]
) -> Prepared:
    """Load the target once for each kind of weights, encode the ``prompts`` of ``source``, and describe it all.

    The encoded prompts include the later turns of conversations.

    Raises InputError for a prompt without tokens or too long for the model.
    """
    from anabranch.bench.conversations import with_later_turns
    from anabranch.cli.show import note
    from anabranch.model.quantize import ROUNDINGS
    from anabranch.prompts import chat_ids

    targets: dict[Rounding, Loaded] = {}
    seconds: dict[str, float] = {}
    for kind in ROUNDINGS:
        if any(entry.weights == kind for entry in entries):
            loaded = targets[kind] = measured(config.loading, kind, peers=bool(config.peer))
            suffix = "" if kind == "none" else f" {kind}"
            seconds[f"load{suffix}"] = round(loaded.load_seconds, 3)
            seconds[f"pack{suffix}"] = round(loaded.pack_seconds, 3)
    first = next(iter(targets.values()))
    longest, tokenizer = first.target.config.max_positions, first.target.tokenizer
    prompts = with_later_turns(
        prompts, first, call=config.sampling, max_new_tokens=config.max_new_tokens, raw=source.raw, tell=note
    )
    encoded: list[Encoded] = [(prompt, chat_ids(tokenizer, prompt.asked, raw=source.raw)) for prompt in prompts]
    for prompt, ids in encoded:
        if not ids:
            raise InputError(f"the prompt {prompt.name} of the task {prompt.task} has no tokens; leave it out")
        if len(ids) + config.max_new_tokens > longest:
            raise InputError(
                f"the prompt {prompt.name} of the task {prompt.task} has {len(ids)} tokens, too many for "
                f"{config.max_new_tokens} more within the model's {longest}; shorten it, or lower --max-new-tokens"
            )
    return Prepared(targets, encoded, _description(config, source, entries, encoded, first), seconds)


def _description(
    config: Contenders,
    prompts: options.Prompts,
    entries: Sequence[Entry],
    encoded: Sequence[Encoded],
    loaded: Loaded,
) -> dict[str, Any]:
    from anabranch.model.kernel_use import near_ties
    from anabranch.support.files import without_folders

    sampling = options.params(config.sampling)
    return {
        "model": without_folders(config.loading.model),
        **({} if config.loading.lora is None else {"lora": config.loading.lora.name}),
        "fingerprint": loaded.target.fingerprint,
        "adapter": loaded.adapters[0].record.get("sha256") if loaded.adapters else None,
        "suite": Path(prompts.task[0] if prompts.of_task else prompts.suite).name,
        "tasks": list(prompts.task),
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
        **({"generation_config": defaults} if (defaults := loaded.target.generation.of_tokens) else {}),
        "chat_template": not prompts.raw,
        "dtype": str(loaded.target.decoder.dtype).removeprefix("torch."),
        **({"kv": "int8"} if loaded.target.decoder.quantized_cache else {}),
        "repeats": config.repeats,
        "near_ties": near_ties(loaded.target.decoder),
    }


def command() -> str:
    """The command for the result file: with DIR for the data folder, and without --resume and --force."""
    from anabranch.support.files import shown_command

    words = [word for word in sys.argv[1:] if word not in ("--resume", "--force")]
    return shown_command("anabranch", *words, hidden=("--data",))
