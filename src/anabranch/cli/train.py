"""``anabranch train``: let a target write answers, and train stream adapters on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.help import HELP

if TYPE_CHECKING:
    from anabranch.train import Progress

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Train a stream adapter for a model of yours: first answers, then streams.", **HELP
)

Model = Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.command()
def answers(
    prompts: Annotated[Path, typer.Option(help="JSONL: a field 'prompt' or 'messages' a line; 'chat', 'id', 'source'")],
    out: Annotated[Path, typer.Option(help="JSONL to write; what it answers already is kept")],
    model: Model = "default",
    rows: Annotated[int, typer.Option(help="sequences decoded at a time")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="an answer is cut there")] = 256,
    longest_prompt: Annotated[int, typer.Option(help="prompts of more tokens are left out")] = 1024,
    limit: Annotated[int | None, typer.Option(help="the first that many prompts")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all tokens")] = 0,
    top_p: Annotated[float, typer.Option(help="1: all tokens")] = 1.0,
    seed: Annotated[int, typer.Option(help="noise of sampling")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Let the model answer prompts by plain decoding: what a stream adapter learns from.

    Each answer is written when it is finished. Stop with Ctrl-C whenever you like; the same command goes on.
    """
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.sampling import SamplingParams
    from anabranch.train import AnswerProgress, read_prompts, write_answers
    from anabranch.train.answers import check_out

    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    check_out(out, prompts)
    target = load_target(model, dtype=dtype, device=device)
    asked = read_prompts(prompts, target.tokenizer, limit=limit)
    pack_decoder(target.decoder)
    with _bar("answers") as (bar, line), _resumable():

        def report(now: AnswerProgress) -> None:
            note = f"{now.tokens_per_second:.0f} tokens/s, {_time(now.seconds_left)} left"
            bar.update(line, completed=now.answers, total=now.wanted, note=note)

        done = write_answers(
            target,
            asked,
            out,
            rows=rows,
            max_new_tokens=max_new_tokens,
            longest_prompt=longest_prompt,
            sampling=sampling,
            report=report,
        )
    left_out = len(asked) - done.wanted
    if as_json:
        result = {"answers": done.answers, "left_out": left_out, "tokens": done.tokens}
        print(json.dumps({**result, "tokens_per_second": done.tokens_per_second}))
    else:
        skipped = f"; {left_out} prompts longer than {longest_prompt} tokens left out" if left_out else ""
        print(f"{done.answers} answers in {out}, {done.tokens} tokens by this run{skipped}")


@app.command()
def streams(
    out: Annotated[Path, typer.Option(help="adapter folder to write; holds the run's checkpoint too")],
    answers: Annotated[Path | None, typer.Option(help="JSONL that 'train answers' wrote")] = None,
    text: Annotated[Path | None, typer.Option(help="instead: a text file, or JSONL with a field 'text'")] = None,
    model: Model = "default",
    recipe: Annotated[str, typer.Option(help="paper-lossless, small or default-adapter")] = "default-adapter",
    init: Annotated[Path | None, typer.Option(help="adapter folder to begin with instead of fresh weights")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the data")] = None,
    lr: Annotated[float | None, typer.Option(help="peak learning rate")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="padded tokens a step")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine or linear")] = None,
    warmup: Annotated[int | None, typer.Option(help="steps until the peak learning rate")] = None,
    segment: Annotated[int | None, typer.Option(help="positions whose streams are in memory at a time")] = None,
    keep_states: Annotated[
        bool | None,
        typer.Option(
            "--keep-states/--no-keep-states",
            help="keep the target's states: on a CPU in a nameless file in the run's folder, on a GPU in its memory",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="order of the batches and initial weights")] = None,
    num_streams: Annotated[int | None, typer.Option(help="tokens drafted beyond the next one (gamma)")] = None,
    stream_layers: Annotated[int | None, typer.Option(help="top layers that streams run through (N_s)")] = None,
    stream_mlp: Annotated[str | None, typer.Option(help="adapter (the paper) or mlp+adapter")] = None,
    adapter_rank: Annotated[int | None, typer.Option(help="rank of the stream adapters (R_s)")] = None,
    attention_rank: Annotated[int | None, typer.Option(help="rank of deltas on q, k, v and o; 0: none")] = None,
    conditioning: Annotated[str | None, typer.Option(help="none, parent or path")] = None,
    conditioning_rank: Annotated[int | None, typer.Option(help="width of that term")] = None,
    root_width: Annotated[
        int | None, typer.Option(help="width of the term that tells streams the root; 0: none")
    ] = None,
    pruning_rank: Annotated[int | None, typer.Option(help="rank of the early-exit pruning layer; 0: none")] = None,
    draft_vocabulary: Annotated[int | None, typer.Option(help="drafts are made of that many tokens; 0: all")] = None,
    soft: Annotated[float | None, typer.Option(help="share of the target's distribution in the loss")] = None,
    unconditioned: Annotated[float | None, typer.Option(help="weight of the loss without conditioning")] = None,
    decay: Annotated[float | None, typer.Option(help="stream j weighs decay ** (j - 1)")] = None,
    held_out: Annotated[int | None, typer.Option(help="examples to evaluate on instead")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longer examples are cut there")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="steps between evaluations")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between checkpoints")] = None,
    licence: Annotated[list[str] | None, typer.Option(help="SOURCE=LICENCE of data, for the card; repeatable")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="go on with the run in --out")] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a stream adapter on the model's own answers (or on plain text) and write its folder.

    Options override the recipe's. Stop with Ctrl-C whenever you like; the same command goes on exactly there.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from anabranch.files import shown_command
    from anabranch.model.load import load_target
    from anabranch.train import recipe_with
    from anabranch.train.job import read_data, train_streams

    plan = recipe_with(recipe, given)
    target = load_target(model, dtype=dtype, device=device)
    examples = read_data(target, plan, answers=answers, text=text)
    with _bar("training") as (bar, line), _resumable():

        def report(now: Progress) -> None:
            right = " ".join(f"{share:.2f}" for share in now.accuracy)
            speed = f"{now.positions_per_second:.0f} tokens/s, {_time(now.seconds_left)} left"
            note = f"loss {now.loss:.3f}, right by stream {right}, {speed}"
            bar.update(line, completed=now.step, total=now.steps, note=note)
            if now.evaluation is not None:
                bar.console.print(f"step {now.step}: " + json.dumps(now.evaluation), highlight=False)

        record = train_streams(
            target,
            plan,
            examples,
            out,
            report=report,
            init=init,
            resume=resume,
            command=shown_command("anabranch", *sys.argv[1:]),
            licences=_licences(licence or []),
        )
    if as_json:
        print(json.dumps(record))
    else:
        size = record["bytes"] / 2**20
        print(f"{record['parameters']:,} parameters, {size:.1f} MiB in {out}: {json.dumps(record['measured'])}")


def _licences(given: list[str]) -> dict[str, str]:
    from anabranch.errors import InputError

    if wrong := [item for item in given if "=" not in item]:
        raise InputError(f"--licence is SOURCE=LICENCE, not {wrong[0]!r}")
    return dict(item.split("=", 1) for item in given)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@contextmanager
def _bar(name: str) -> Iterator[tuple[Any, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task(name, total=None, note="")


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
