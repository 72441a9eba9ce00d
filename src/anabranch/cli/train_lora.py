"""``anabranch train lora``: fine-tune a model with LoRA on completions, without drafting."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import extended
from anabranch.cli.train_task import TaskConfig, Timing
from anabranch.methods.lora.recipes import TRAINING

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.train import Progress

__all__ = ["LoraTrainConfig", "lora_command"]


@dataclass(frozen=True, kw_only=True)
class LoraTrainConfig:
    """The options of ``anabranch train lora``, without those of the recipe."""

    out: Annotated[Path, typer.Option(metavar="FOLDER", help="write the LoRA, and the run's checkpoint, here")]
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="train on completions: JSONL with 'prompt_ids' and 'answer_ids'"),
    ] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train on a text file, or JSONL with a field 'text', instead")
    ] = None
    of_task: TaskConfig = field(default=TaskConfig())
    loading: options.Loading = field(default=options.Loading())
    init: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="start from this LoRA (PEFT's format) instead of a fresh one")
    ] = None
    licence: Annotated[
        tuple[str, ...],
        typer.Option(metavar="SOURCE=LICENCE", help="state the licence of a data source in the card; repeatable"),
    ] = ()
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="resume an unfinished run in --out, or start over")
    ] = True
    force: Annotated[bool, typer.Option("--force", help="replace a finished LoRA in --out")] = False
    timing: Timing = None
    as_json: options.AsJson = False


def lora_command() -> Any:
    """The command."""
    help = """Fine-tune a model with LoRA and write a folder in PEFT's format.

    Changes what the model says, not how fast: learns from completions that anybody wrote, and measures loss, perplexity
    and token accuracy on those held out. Stop with Ctrl-C or SIGTERM at any time; the same command resumes exactly
    there.
    """
    return extended("lora", _train, LoraTrainConfig, TRAINING, help)


def _train(config: LoraTrainConfig, given: dict[str, Any]) -> None:
    from rich.console import Console

    from anabranch.cli.screen import clock, resumable, screen, stored_step
    from anabranch.cli.train_data import licences_of
    from anabranch.cli.train_measure import PLAIN, measured_tuning
    from anabranch.cli.train_result import per_100k, quality_rows, show_quality, timing_pays
    from anabranch.errors import InputError
    from anabranch.support.files import shown_command
    from anabranch.train.job import check_data, check_folder_is_free, divided
    from anabranch.train.lora_job import check_init, read_completions, train_lora

    plan, licences = TRAINING.recipe(None, given), licences_of(config.licence)
    config.of_task.check()
    task = config.of_task.read()
    if task is None:
        check_data(config.answers, config.text)
    elif config.answers is not None or config.text is not None:
        raise InputError("--task, --answers and --text are all data to learn from; give one")
    check_init(config.init, given)
    check_folder_is_free(config.out, force=config.force)
    if config.loading.lora is not None:
        raise InputError("--lora is merged before the training, and its result would fit no other model; use --init")
    run = config.out / "training"
    with screen() as shown, resumable(run):
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        target = options.load(config.loading, pack=False, adapters=False).target
        validation = None
        if task is None:
            examples = read_completions(target, plan, answers=config.answers, text=config.text)
        else:
            shown.say(task.told())
            examples, validation = task.examples(target, plan)
        tokens = sum(len(example.answer_ids) for example in examples)
        held_out = divided(examples, validation, plan)[1]
        shown.say(f"{len(examples):,} examples, {tokens:,} answer tokens, {len(held_out):,} examples held out")
        if config.resume and (step := stored_step(run)):
            shown.say(f"resumes from step {step:,}, the checkpoint in {run}")
        record = train_lora(
            target,
            plan,
            examples,
            config.out,
            report=_Report(shown),
            init=config.init,
            resume=config.resume,
            command=shown_command("anabranch", *sys.argv[1:]),
            licences=licences if task is None else task.licences | licences,
            validation=validation,
        )
        shown.keep()
        decoded = {}
        if held_out and (timing_pays(target) if config.timing is None else config.timing):
            tuned = replace(config.loading, lora=config.out)
            decoded = measured_tuning(config.loading, tuned, (PLAIN,), held_out, shown)
    if config.as_json:
        print(json.dumps(record))
        return
    print(f"{record['parameters']:,} parameters in {config.out}")
    if scores := record["held_out"]:
        console = Console(highlight=False, markup=False)
        show_quality(quality_rows({"untuned": scores["before"], "tuned": scores["after"]}, decoded), console)
        print(f"\nAt this rate, 100,000 answer tokens take {clock(per_100k(record) or 0.0)} an epoch.")
    where = "" if config.loading.model == "default" else f"--model {config.loading.model} "
    print(f"Use it: anabranch chat {where}--lora {config.out}")


class _Report:
    """Shows the progress of a training."""

    def __init__(self, shown: Screen) -> None:
        from anabranch.cli.screen import FirstRate

        self.shown, self.loss = shown, 0.0
        self.rate = FirstRate(shown)
        self.held_out = "held-out not evaluated yet"

    def __call__(self, now: Progress) -> None:
        from anabranch.cli.screen import clock

        self.rate.see(now)
        self.loss = now.loss if now.step == 1 else 0.9 * self.loss + 0.1 * now.loss
        if now.evaluation is not None:
            scores = now.evaluation
            self.held_out = f"held-out perplexity {scores['perplexity']:.3f}, accuracy {scores['accuracy']:.0%}"
        rate = f"{now.positions_per_second:,.0f} tokens/s, {clock(now.seconds_left)} left"
        first = f"step {now.step:,}/{now.steps:,} {now.step / now.steps:.0%}, {rate}"
        second = f"loss {self.loss:.3f}, {self.held_out}"
        due = now.evaluation is not None or now.step == now.steps
        self.shown.show(first, second, plain=f"{first}, {second}", now=due)
