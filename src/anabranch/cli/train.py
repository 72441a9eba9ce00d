"""``anabranch train``: let a target write completions, and train a method's adapter on them.

``train METHOD`` trains an adapter: there is one command for each method with trained weights, whose options are those
of every training and those of the method's recipes (``Trained.options``). Without data, the target writes them first.
``train answers`` only writes completions (``cli.train_answers``). ``train lora`` tunes the model itself
(``cli.train_lora``).
Methods that draft from tables have a command that builds them (``cli.train_tables``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import extended
from anabranch.cli.help import HELP, Verb, Verbs
from anabranch.cli.train_answers import answers
from anabranch.cli.train_data import DataConfig
from anabranch.cli.train_lora import lora_command
from anabranch.cli.train_tables import table_command
from anabranch.cli.train_task import Timing
from anabranch.methods import TRAININGS, training

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.train import Progress
    from anabranch.train.advice import Curve

__all__ = ["Methods", "TrainConfig", "app"]


class Methods(Verbs):
    """The commands of ``train``. Those of methods are built on demand, from their recipes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return [*super().list_commands(ctx), *TRAININGS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name not in TRAININGS:
            return super().get_command(ctx, cmd_name)
        if cmd_name == "lora":
            return lora_command()
        return _verb(cmd_name) if training(cmd_name).recipes else table_command(cmd_name)


app = typer.Typer(
    no_args_is_help=True,
    help="Train an adapter for your own model; without data, the model writes its own.",
    **{**HELP, "cls": Methods},
)


@app.callback()
def _group() -> None:
    pass


app.command(cls=Verb)(answers)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of ``anabranch train METHOD``, without those of the method's recipes."""

    out: Annotated[Path, typer.Option(metavar="FOLDER", help="write the adapter, and the run's checkpoint, here")]
    data: DataConfig = field(default=DataConfig())
    loading: options.Loading = field(default=options.Loading())
    recipe: Annotated[str | None, typer.Option(help="use the values of this recipe, below (default: the first)")] = None
    init: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="start from this adapter: a folder, the name of one that ships, default (the one that ships for the "
            "model), or none for fresh weights (default: what the recipe says)",
        ),
    ] = None
    licence: Annotated[
        tuple[str, ...],
        typer.Option(metavar="SOURCE=LICENCE", help="state the licence of a data source in the card; repeatable"),
    ] = ()
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="resume an unfinished run in --out, or start over")
    ] = True
    force: Annotated[bool, typer.Option("--force", help="replace a finished adapter in --out, and the figure")] = False
    shard_target: Annotated[
        bool,
        typer.Option("--shard-target", help="with torchrun: keep a part of the target's layers in each process only"),
    ] = False
    figure: options.Figure = None
    log: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="KIND", help="write a log in OUT/training besides log.jsonl: csv, tensorboard; repeatable"
        ),
    ] = ()
    timing: Timing = None
    as_json: options.AsJson = False


def _verb(command: str) -> Any:
    """The command that trains a method."""
    of = training(command)

    help = f"""Train an adapter for {of.title} and write its folder.

    Learns from the model's own completions, or from plain text. Without either, the model first writes prompts and
    completions of its own (--self-tokens). Options override the recipe's values; recipes are
    {", ".join(of.recipes)}. Stop with Ctrl-C or SIGTERM at any time; the same command resumes exactly there.
    """
    return extended(command, partial(_train, command), TrainConfig, of, help)


def _train(command: str, config: TrainConfig, given: dict[str, Any]) -> None:
    """Train; ``given`` has the recipe's values that are overridden on the command line."""
    from anabranch.cli import train_data, train_result
    from anabranch.cli.screen import resumable, screen, silent, stored_step
    from anabranch.cli.train_measure import PLAIN, measured_speeds, measured_tuning
    from anabranch.methods import AUTO
    from anabranch.support.files import shown_command
    from anabranch.train.advice import curve_of
    from anabranch.train.checkpoint import read_log
    from anabranch.train.figure import draw_curves
    from anabranch.train.job import divided, read_data, stored_target, train_adapter, trainable
    from anabranch.train.processes import joined
    from anabranch.train.self_prompts import SOURCE
    from anabranch.train.start import start_folder

    method, of = trainable(TRAININGS[command][0]), training(command)
    plan = of.recipe(config.recipe, train_data.with_new_data(config.data, of.options, given))
    writing = train_data.self_data(config.data, plan.options.seed)
    stated = train_data.licences_of(config.licence)
    _check(config)
    task = config.data.of_task.read()
    licences = {SOURCE: "written by the target itself"} | ({} if task is None else task.licences) | stated
    run = config.out / "training"
    with joined() as processes, screen() if processes.first else silent() as shown, resumable(run):
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        target = options.load(config.loading, pack=False, adapters=False).target
        answered, own = train_data.write_data(target, config.data, writing, config.out, shown)
        if task is not None:
            shown.say(task.told())
        examples, validation = train_data.read_examples(target, config.data, task, plan, answered)
        own_examples = [] if own is None else read_data(target, plan, answers=own)
        tokens = sum(len(example.answer_ids) for example in examples)
        held_out = divided(examples, validation, plan)[1]
        shown.say(f"{len(examples):,} examples, {tokens:,} answer tokens, {len(held_out):,} examples held out")
        start = start_folder(config.init, plan, method, target)
        shown.say("starts from fresh weights" if start is None else f"starts from the adapter {start.name}")
        curve = curve_of(read_log(run)) if config.resume else []
        if config.resume and (step := stored_step(run)):
            shown.say(f"resumes from step {step:,}, the checkpoint in {run}")
        record = train_adapter(
            target,
            method,
            plan,
            examples,
            config.out,
            report=_Report(shown, curve, held_out=len(held_out)),
            init=config.init if start is None else start,
            resume=config.resume,
            command=shown_command("anabranch", *sys.argv[1:]),
            licences=licences,
            validation=validation,
            own=own_examples,
            facts=None if task is None else {"task": task.described()},
            logs=config.log,
            processes=processes,
            shard_target=config.shard_target,
        )
        if not processes.first:
            return
        target = stored_target(target)
        shown.keep()
        timed = train_result.timing_pays(target) if config.timing is None else config.timing
        speeds, timings, decoded = {}, {}, {}
        tuned = record["target"]["fingerprint"] != target.fingerprint  # training made a target of its own
        if timed and held_out and not tuned:
            speeds = train_result.predicted_speeds(target, record, config.out, examples, shown)
            timings = measured_speeds(target, config.out, own_examples or held_out, shown)
        elif timed and held_out:
            own_model = replace(config.loading, model=str(config.out / "model"), adapters=(config.out,), lora=None)
            decoded = measured_tuning(config.loading, own_model, (PLAIN, AUTO), held_out, shown)
    log = read_log(run)
    used = str(config.out / "model") if tuned else config.loading.model
    lora = None if tuned else config.loading.lora
    found = train_result.summary(
        *(record, log, speeds, timings),
        model=used,
        lora=lora,
        out=config.out,
        decoded=decoded,
        task=config.data.of_task.words(),
    )
    if config.as_json:
        print(json.dumps({**record, "run": found}))
    else:
        train_result.show(record, found, config.out)
    if config.figure is not None:  # last, so that the result is printed even if this fails
        draw_curves(log, found["curve"], config.figure)


def _check(config: TrainConfig) -> None:
    """Check input and output files, before a model is loaded. Raises InputError or FileError."""
    from anabranch.cli.train_data import check_data_options
    from anabranch.errors import InputError
    from anabranch.support.files import check_output
    from anabranch.train.job import check_folder_is_free
    from anabranch.train.logs import check_logs
    from anabranch.train.processes import launched
    from anabranch.train.start import check_init
    from anabranch.tune.figure import check_figure

    check_init(config.init)
    check_logs(config.log)
    if config.figure is not None:
        check_figure(config.figure)
        check_output(config.figure, force=config.force, what="the figure", option="--figure")
    processes = launched()
    if processes.first:
        check_folder_is_free(config.out, force=config.force)
    check_data_options(config.data, config.out)
    if config.shard_target and processes.count == 1:
        raise InputError("--shard-target is for several processes; start them with torchrun")
    if processes.count > 1 and (config.data.self_written or config.data.evaluate is not None):
        raise InputError("several processes train on data that exist; write them first with 'anabranch train answers'")


class _Report:
    """Shows the progress of a training; ``curve`` is the held-out acceptance of earlier steps."""

    def __init__(self, shown: Screen, curve: Curve, *, held_out: int) -> None:
        from anabranch.cli.screen import FirstRate

        self.shown, self.curve, self.held_out = shown, curve, held_out
        self.loss: float | None = None
        self.accuracy = ""
        self.rate = FirstRate(shown)

    def __call__(self, now: Progress) -> None:
        from anabranch.cli.screen import clock

        self.rate.see(now)
        self.loss = now.loss if self.loss is None else 0.9 * self.loss + 0.1 * now.loss
        if now.evaluation is not None:
            self.curve.append((now.step, now.evaluation["tree"]))
            if tuned := now.evaluation.get("next token"):
                self.accuracy = f", accuracy {tuned['accuracy']:.0%}"
        rate = f"{now.positions_per_second:,.0f} tokens/s, {clock(now.seconds_left)} left"
        first = f"step {now.step:,}/{now.steps:,} {now.step / now.steps:.0%}, {rate}"
        second = f"loss {self.loss:.3f}, {self._held_out()}{self.accuracy}"
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
