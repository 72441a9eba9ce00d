"""``anabranch train``: let a target write answers, and train stream adapters on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli.help import HELP

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.train import Progress
    from anabranch.train.advice import Curve

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Train a stream adapter for a model of yours: first answers, then streams.", **HELP
)

Model = Annotated[str, typer.Option(help="default, a folder, a .gguf file or a hub id")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: all that this process may use)")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.command()
def answers(
    prompts: Annotated[Path, typer.Option(help="JSONL: a field 'prompt' or 'messages' a line; 'chat', 'id', 'source'")],
    out: Annotated[Path, typer.Option(help="JSONL to write; prompts that it answers already are skipped")],
    model: Model = "default",
    rows: Annotated[int, typer.Option(help="sequences decoded at a time")] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="tokens of an answer at most")] = 256,
    longest_prompt: Annotated[int, typer.Option(help="leave out prompts of more tokens")] = 1024,
    limit: Annotated[int | None, typer.Option(help="read only that many prompts, the first ones")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample from that many tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="sample from the most probable tokens of that mass; 1: all")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of sampling")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Let the model answer prompts by plain decoding: what a stream adapter learns from.

    Each answer is written when it is finished. Stop with Ctrl-C or SIGTERM at any time; the same command goes on.
    """
    from anabranch.cli.screen import clock, screen
    from anabranch.errors import FileError
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.processor import set_threads
    from anabranch.sampling import SamplingParams
    from anabranch.train import AnswerProgress, read_prompts, write_answers
    from anabranch.train.answers import check_out

    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not prompts.is_file():
        raise FileError(f"there is no file {prompts}; give a JSONL file with a field 'prompt' or 'messages' a line")
    check_out(out, prompts)
    set_threads(threads)
    with screen() as shown, _resumable():
        shown.show(f"loading {model}", "", plain=f"loading {model}")
        target = load_target(model, dtype=dtype, device=device)
        asked = read_prompts(prompts, target.tokenizer, limit=limit)
        pack_decoder(target.decoder)

        def report(now: AnswerProgress) -> None:
            left = f", {clock(now.seconds_left)} left" if now.seconds_left else ""
            rate = f", {now.tokens_per_second:,.0f} tokens/s{left}" if now.tokens else ""
            first = f"answer {now.answers:,}/{now.wanted:,} {now.answers / now.wanted:.0%}{rate}"
            second = f"{now.tokens:,} tokens written in {out.name}"
            shown.show(first, second, plain=first, now=now.answers == now.wanted)

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
        print(f"{done.answers:,} answers in {out}, {done.tokens:,} tokens by this run")
        if left_out:
            print(f"left out: {left_out:,} prompts longer than {longest_prompt:,} tokens")
        print(f"Next: anabranch train streams --answers {out} --out FOLDER")


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
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="go on with an unfinished run in --out, or begin anew")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="replace a finished adapter in --out, and the figure")] = False,
    figure: Annotated[Path | None, typer.Option(help="draw the learning curve (FILE.png or FILE.svg)")] = None,
    timing: Annotated[
        bool | None,
        typer.Option(
            "--timing/--no-timing",
            help="time decoding steps at the end, to predict tokens/s (default: below 500M parameters, or on a GPU)",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train a stream adapter on the model's own answers (or on plain text) and write its folder.

    Options override the recipe's. Stop with Ctrl-C or SIGTERM at any time; the same command goes on exactly there.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from anabranch.cli import train_result
    from anabranch.cli.screen import screen
    from anabranch.files import check_output, shown_command
    from anabranch.model.load import load_target
    from anabranch.processor import set_threads
    from anabranch.train import recipe_with
    from anabranch.train.advice import curve_of
    from anabranch.train.checkpoint import read_log
    from anabranch.train.figure import draw_curves
    from anabranch.train.job import check_data, check_folder_is_free, read_data, train_streams
    from anabranch.tune.figure import check_figure

    plan = recipe_with(recipe, given)
    licences = _licences(licence or [])
    check_data(answers, text, init)
    if figure is not None:
        check_figure(figure)
        check_output(figure, force=force, what="the figure", option="--figure")
    check_folder_is_free(out, force=force)
    set_threads(threads)
    run = out / "training"
    with screen() as shown, _resumable():
        shown.show(f"loading {model}", "", plain=f"loading {model}")
        target = load_target(model, dtype=dtype, device=device)
        examples = read_data(target, plan, answers=answers, text=text)
        timed = train_result.timing_pays(target) if timing is None else timing
        tokens = sum(len(example.answer_ids) for example in examples)
        shown.say(f"{len(examples):,} examples, {tokens:,} answer tokens, {plan.held_out:,} examples held out")
        record = train_streams(
            target,
            plan,
            examples,
            out,
            report=_Report(shown, curve_of(read_log(run)) if resume else [], held_out=plan.held_out),
            init=init,
            resume=resume,
            command=shown_command("anabranch", *sys.argv[1:]),
            licences=licences,
        )
        shown.keep()
        speeds = {}
        if timed and plan.held_out:
            speeds = train_result.predicted_speeds(target, record, out, examples, shown)
    log = read_log(run)
    found = train_result.summary(record, log, speeds, model=model, out=out)
    if as_json:
        print(json.dumps({**record, "run": found}))
    else:
        train_result.show(record, found, out)
    if figure is not None:  # last: the result is printed by now, whatever happens to the figure
        draw_curves(log, found["curve"], figure)


class _Report:
    """Shows each step of a training; ``curve`` is the held-out acceptance of the steps before."""

    def __init__(self, shown: Screen, curve: Curve, *, held_out: int) -> None:
        self.shown, self.curve, self.held_out = shown, curve, held_out
        self.loss: float | None = None

    def __call__(self, now: Progress) -> None:
        from anabranch.cli.screen import clock

        self.loss = now.loss if self.loss is None else 0.9 * self.loss + 0.1 * now.loss
        if now.evaluation is not None:
            self.curve.append((now.step, now.evaluation["tree"]))
        rate = f"{now.positions_per_second:,.0f} tokens/s, {clock(now.seconds_left)} left"
        first = f"step {now.step:,}/{now.steps:,} {now.step / now.steps:.0%}, {rate}"
        second = f"loss {self.loss:.3f}, {self._held_out()}"
        due = now.evaluation is not None or now.step == now.steps
        self.shown.show(first, second, plain=f"{first}, {second}", now=due)

    def _held_out(self) -> str:
        if not self.held_out:
            return "nothing held out"
        if not self.curve:
            return "held-out not evaluated yet"
        latest = self.curve[-1][1]
        if len(self.curve) == 1:
            return f"held-out {latest:.2f} tokens/pass"
        change = latest - self.curve[-2][1]
        return f"held-out {latest:.2f} tokens/pass ({change:+.2f})"


def _licences(given: list[str]) -> dict[str, str]:
    from anabranch.errors import InputError

    if wrong := [item for item in given if "=" not in item]:
        raise InputError(f"--licence is SOURCE=LICENCE, got {wrong[0]!r}")
    return dict(item.split("=", 1) for item in given)


@contextmanager
def _resumable() -> Iterator[None]:
    from anabranch.interrupt import INTERRUPTED

    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None
