"""``anabranch bench``: measure methods and other engines beside each other; compare results; install peers."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import peers
from anabranch.cli.help import HELP
from anabranch.errors import CapabilityError, InputError
from anabranch.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch.adapters.folder import LoadedAdapter
    from anabranch.bench.run import Encoded
    from anabranch.bench.session import Session
    from anabranch.model.load import Target
    from anabranch.model.quantize import Quantization

__all__ = ["app", "encode"]

METHODS = ("none", "prompt_lookup", "streams")
# what --shape uses; all else is of prompts
OF_SHAPES = (
    *("shape", "width", "batch", "context_tokens", "dtype", "device", "threads", "repeats", "out", "force", "as_json"),
)

app = typer.Typer(invoke_without_command=True, **HELP)
app.add_typer(peers.app, name="peers")


@app.callback()
def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")] = "default",
    adapter: Annotated[Path | None, typer.Option(help="adapter folder (default: the one that ships)")] = None,
    suite: Annotated[
        str,
        typer.Option(help="prompts: own (a few that ship), spec_bench, mt_bench, humaneval, gsm8k, or a JSONL file"),
    ] = "own",
    data: Annotated[
        Path | None, typer.Option(help="folder with the suites, as spec_bench/test.jsonl.gz (default: the hub)")
    ] = None,
    field: Annotated[str, typer.Option(help="field of a JSONL file that holds the prompt")] = "prompt",
    task: Annotated[list[str] | None, typer.Option(help="use only this task of the suite; repeatable")] = None,
    limit: Annotated[int | None, typer.Option(help="use this many prompts, spread over the tasks")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="drafter to measure, as [LABEL=]DRAFTER, for example wide=streams:nodes=32; ends in @int8 or @int4 "
            "for quantised weights; repeatable"
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="another engine to measure, as [LABEL=]NAME; see 'bench peers list'; repeatable"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="new tokens for each prompt")] = 128,
    temperature: Annotated[float, typer.Option(help="divide the logits by this; 0: greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="keep the k most probable tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="keep the most probable tokens that make up this probability; 1: all")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the random draws")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="use no chat template")] = False,
    repeats: Annotated[int, typer.Option(help="runs of each prompt with each contender")] = 1,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of every contender (default: all that this process may use)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the result to FILE.json, FILE.csv and FILE.md")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures", help="also write figures, as FILE.*.png and .svg")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue the stopped run that was writing FILE")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace files that exist already")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="record our contenders' steps as DIR/LABEL.jsonl, for 'simulate': the first run of each prompt",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="instead of decoding prompts, time steps of a model of this size with random weights: 135m, 7b, 13b "
            "or 33b"
        ),
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="with --shape: nodes verified in a step; repeatable")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="with --shape: rows of a batch; repeatable")] = None,
    context_tokens: Annotated[
        list[int] | None, typer.Option("--context", help="with --shape: tokens in the cache; repeatable")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Measure drafters and other engines on the same prompts, on this machine.

    Every prompt goes through all contenders before the next one, in rotating order. Speedups are over plain decoding
    (none) of the same prompts with the same weights, which is always measured too. Let nothing else run meanwhile.

    Ctrl-C keeps what is done; --resume continues. 'bench compare' compares two results, and 'bench peers' installs
    other engines.
    """
    if context.invoked_subcommand is not None:
        return
    if shape is not None:
        others = [option for option in context.command.params if option.name not in OF_SHAPES]
        sources = [context.get_parameter_source(str(option.name)) for option in others]
        said = [source is not None and source.name == "COMMANDLINE" for source in sources]
        if useless := [option.opts[0] for option, here in zip(others, said, strict=True) if here]:
            raise InputError(f"--shape decodes no prompts, so {useless[0]} has nothing to say; leave one of them out")
        _shape(
            *(shape, width, batch, context_tokens),
            dtype=dtype,
            device=device,
            threads=threads,
            repeats=repeats,
            out=out,
            force=force,
            as_json=as_json,
        )
        return
    from rich.console import Console

    from anabranch.adapters.folder import read_record
    from anabranch.bench.entries import check_installed, plain_of, read_entries
    from anabranch.bench.journal import Journal
    from anabranch.bench.recordings import Recordings, recorded_places
    from anabranch.bench.report import heading, tables
    from anabranch.bench.session import Session
    from anabranch.bench.suites import load_suite
    from anabranch.cli.layout import output, print_tables
    from anabranch.files import check_output, check_writable, without_folders
    from anabranch.model.quantize import QUANTIZATIONS
    from anabranch.plots import check_matplotlib
    from anabranch.sampling import SamplingParams

    # whatever can be refused is refused before a model is loaded
    for name, given in (("--width", width), ("--batch", batch), ("--context", context_tokens)):
        if given:
            raise InputError(f"{name} is for measuring a shape; give --shape too, or leave it out")
    if (figures or resume) and out is None:
        raise InputError(f"{'--figures' if figures else '--resume'} needs --out FILE, beside which it finds its files")
    for name, value in (("--max-new-tokens", max_new_tokens), ("--repeats", repeats), ("--threads", threads)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    entries = read_entries(method or METHODS, peer or ())
    check_installed(entries)
    if figures:
        check_matplotlib("or leave out --figures")
    if out is not None:
        check_writable(out)
        Journal.check(out, resume=resume, force=force)
        for path in _results(out, figures=figures):
            check_output(path, force=force or resume)
    if adapter is not None:
        read_record(adapter)
    places = {} if trace is None else recorded_places(trace, entries, resume=resume, force=force)
    prompts = load_suite(suite, data=data, limit=limit, field=field, tasks=task or ())

    wanted = [kind for kind in QUANTIZATIONS if kind == "none" or any(entry.weights == kind for entry in entries)]
    loaded = _load(model, adapter, wanted, dtype=dtype, device=device, threads=threads)
    encoded = [(prompt, encode(loaded.target.tokenizer, prompt.text, raw=raw)) for prompt in prompts]
    _check_lengths(encoded, max_new_tokens, loaded.target.config.max_positions)
    run = {
        "model": without_folders(model),
        "fingerprint": loaded.target.fingerprint,
        "adapter": None if loaded.adapter is None else loaded.adapter.record.get("sha256"),
        "suite": Path(suite).name,
        "tasks": task or [],
        "prompts": len(encoded),
        "prompts_sha256": hashlib.sha256(json.dumps([list(ids) for _, ids in encoded]).encode()).hexdigest(),
        "contenders": [[entry.name, without_folders(entry.spec), entry.kind, entry.weights] for entry in entries],
        "baseline": plain_of(entries, "none"),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "chat_template": not raw,
        "dtype": str(loaded.target.decoder.dtype).removeprefix("torch."),
        "repeats": repeats,
    }
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    interrupted = False
    told = {name: value for name, value in run.items() if name not in ("contenders", "baseline", "repeats")}
    recordings = Recordings(places, {entry.name: entry.spec for entry in entries}, told)
    with Session(run, entries, encoded, loaded.pairs, sampling, console.print, recordings) as session:
        try:
            _go(session, out, resume=resume, console=console)
        except KeyboardInterrupt:
            if not session.done:
                session.forget()
                raise
            interrupted = True
        if len(session.failed) == len(entries):
            if not resume:  # what was done before may still be of use
                session.forget()
            why = "; ".join(f"{name}: {error}" for name, error in session.failed.items())
            raise CapabilityError(f"no contender could be measured ({why})")
        result = session.result(_command()) | {"load_seconds": loaded.clocks}
    written = [] if out is None else _write(result, out, figures=figures)
    if session.complete:
        session.forget()
    if as_json:
        print(json.dumps(result))
    else:
        show = output()
        for sentence in heading(result):
            show.print(sentence)
        print_tables(tables(result), show)
    for path in [*written, *recordings.written]:
        console.print(f"wrote {path}")
    if interrupted:
        again = (
            "what is done is kept: add --resume to go on" if out is not None else "give --out FILE to be able to resume"
        )
        console.print(f"stopped after {result['prompts_done']} of {len(encoded)} prompts; {again}")
        raise typer.Exit(INTERRUPTED)


def _shape(
    name: str,
    widths: list[int] | None,
    batches: list[int] | None,
    contexts: list[int] | None,
    *,
    dtype: str,
    device: str,
    threads: int | None,
    repeats: int,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    import torch
    from rich.console import Console

    from anabranch.bench.journal import beside
    from anabranch.bench.report import environment
    from anabranch.bench.shapes import ROUNDS, WIDTHS, measure_shape, shape_record, shape_table
    from anabranch.cli.layout import print_tables
    from anabranch.files import check_output, write_atomically
    from anabranch.model.load import resolve_device, resolve_dtype
    from anabranch.processor import set_threads

    if out is not None:
        check_output(beside(out, ".json"), force=force)
    set_threads(threads)
    console, place = Console(stderr=True, highlight=False, markup=False, soft_wrap=True), resolve_device(device)
    found = measure_shape(
        name,
        dtype=resolve_dtype(dtype) or torch.bfloat16,
        device=place,
        rounds=ROUNDS * repeats,
        report=lambda what, done, total: console.print(f"{done}/{total} {what}") if what else None,
        widths=widths or WIDTHS,
        batches=batches or (1,),
        contexts=contexts or (512,),
    )
    result = {
        "command": _command(),
        "environment": environment(place),
        **shape_record(found),
    }
    if out is not None:
        write_atomically(beside(out, ".json"), json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        print_tables(shape_table(found))
    if out is not None:
        console.print(f"wrote {beside(out, '.json')}")


@app.command("compare")
def compare_results(
    a: Annotated[Path, typer.Argument(metavar="A", help="a result: the FILE of 'anabranch bench --out FILE'")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another result")],
    as_json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Compare two results: the speed of B over A by contender, with quartiles over prompts.

    Warns where model, dtype, machine, threads or prompts differ, since the ratio is then not due to the methods alone.
    """
    from anabranch.bench.compare import compare, comparison_table, read_result
    from anabranch.cli.layout import output, print_tables

    found = compare(read_result(a), read_result(b))
    if as_json:
        print(json.dumps(found))
        return
    console = output()
    for line in (f"A: {a}", f"B: {b}", *(f"warning: {warning}" for warning in found["warnings"])):
        console.print(line)
    print_tables([comparison_table(found)], console)


def encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt, through the chat template where there is one and ``raw`` is off."""
    from anabranch.model import text as model_text

    if raw or not tokenizer.chat_template:
        return model_text.encode(tokenizer, text)
    chat = model_text.render_chat(tokenizer, [{"role": "user", "content": text}])
    return model_text.encode(tokenizer, chat, add_special_tokens=False)


@dataclass(frozen=True)
class _Loaded:
    """Targets and adapters by their weights; ``clocks`` are seconds outside every measurement."""

    pairs: dict[Quantization, tuple[Target, LoadedAdapter | None]]
    clocks: dict[str, float]

    @property
    def target(self) -> Target:
        """With the weights as they are."""
        return self.pairs["none"][0]

    @property
    def adapter(self) -> LoadedAdapter | None:
        """Its adapter."""
        return self.pairs["none"][1]


def _load(
    model: str,
    adapter: Path | None,
    wanted: Sequence[Quantization],
    *,
    dtype: str,
    device: str,
    threads: int | None,
) -> _Loaded:
    from anabranch.adapters.folder import find_adapter
    from anabranch.cli.models import fetch_default
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.processor import set_threads

    set_threads(threads)
    if model == "default":
        fetch_default()
    pairs: dict[Quantization, tuple[Target, LoadedAdapter | None]] = {}
    clocks: dict[str, float] = {}
    for kind in wanted:
        began = time.perf_counter()
        target = load_target(model, dtype=dtype, device=device, quantize=kind)
        found = find_adapter(target, adapter)
        loaded = time.perf_counter()
        pack_decoder(target.decoder)
        suffix = "" if kind == "none" else f" {kind}"
        clocks[f"load{suffix}"] = round(loaded - began, 3)
        clocks[f"pack{suffix}"] = round(time.perf_counter() - loaded, 3)
        pairs[kind] = (target, found)
    return _Loaded(pairs, clocks)


def _check_lengths(encoded: Sequence[Encoded], max_new_tokens: int, longest: int) -> None:
    for prompt, ids in encoded:
        if not ids:
            raise InputError(f"the prompt {prompt.name} of the task {prompt.task} has no tokens; leave it out")
        if len(ids) + max_new_tokens > longest:
            raise InputError(
                f"the prompt {prompt.name} of the task {prompt.task} has {len(ids)} tokens, which leaves no room for "
                f"{max_new_tokens} more within the model's {longest}; shorten it, or lower --max-new-tokens"
            )


def _go(session: Session, out: Path | None, *, resume: bool, console: Console) -> None:
    """From physics to the last prompt, with progress and time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    session.prepare(out, resume=resume)
    session.open()
    already, began = len(session.done), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
    # prompts take seconds to minutes: the estimate looks back over all of them
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=1e9,
        disable=not console.is_terminal,  # a log gets a line a prompt instead
    )
    with bar:
        line = bar.add_task("", total=len(session.prompts), completed=already)

        def report(done: int, total: int, what: str) -> None:
            bar.update(line, completed=done, description=what)
            if not what and not console.is_terminal:
                left = (time.perf_counter() - began) / (done - already) * (total - done)
                console.print(f"{done}/{total} prompts, about {left / 60:.1f} minutes left")

        session.decode(report)


def _results(out: Path, *, figures: bool) -> list[Path]:
    """The files that a run writes, as far as they are known before it, and figures that it may replace."""
    from anabranch.bench.journal import FORMATS, beside

    files = [beside(out, suffix) for suffix in FORMATS]
    if figures and out.parent.is_dir():
        stem = beside(out, ".").name
        files += sorted(
            path for path in out.parent.iterdir() if path.name.startswith(stem) and path.suffix in (".png", ".svg")
        )
    return files


def _write(result: dict[str, Any], out: Path, *, figures: bool) -> list[Path]:
    from anabranch.bench.figures import save_figures
    from anabranch.bench.journal import beside
    from anabranch.bench.report import markdown, sheet
    from anabranch.files import write_atomically

    drawn = save_figures(result, out) if figures else []
    texts = {
        ".json": json.dumps(result, indent=1) + "\n",
        ".csv": sheet(result),
        ".md": markdown(result, [path.name for path in drawn if path.suffix == ".png"]),
    }
    for suffix, text in texts.items():
        write_atomically(beside(out, suffix), text)
    return [*(beside(out, suffix) for suffix in texts), *drawn]


def _command() -> str:
    """The command as anyone could give it: the data folder is called DIR; --resume and --force change no result."""
    from anabranch.files import shown_command

    words = [word for word in sys.argv[1:] if word not in ("--resume", "--force")]
    for place, word in enumerate(words):
        if word.startswith("--data="):
            words[place] = "--data=DIR"
        elif word == "--data" and place + 1 < len(words):
            words[place + 1] = "DIR"
    return shown_command("anabranch", *words)
