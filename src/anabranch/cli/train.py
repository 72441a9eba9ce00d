"""``anabranch train``: let a target write completions, and train a method's adapter on them.

``train METHOD`` trains an adapter: there is one command for each method with trained weights, whose options are those
of every training and those of the method's recipes (``Trained.options``). Without data, the target writes them first.
``train answers`` only writes completions (``cli.train_answers``). ``train lora`` tunes the model itself.
Methods that draft from tables have a command that builds them (``cli.train_tables``).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion, options
from anabranch.cli.configured import extended
from anabranch.cli.help import HELP, Verb, Verbs
from anabranch.cli.train_answers import Timing, answers
from anabranch.cli.train_data import DataConfig, OwnDataConfig
from anabranch.cli.train_tables import table_command
from anabranch.loading import LoadConfig
from anabranch.methods import TRAININGS, training

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.learning.recipe import Recipe
    from anabranch.methods import Method
    from anabranch.model.load import Target
    from anabranch.train import Example, Progress
    from anabranch.train.advice import Curve
    from anabranch.train.fit import RunOptions

__all__ = ["LoraTrainConfig", "MethodTrainConfig", "Methods", "app"]


class Methods(Verbs):
    """The commands of ``train``. Those of methods are built on demand, from their recipes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return [*super().list_commands(ctx), *TRAININGS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name not in TRAININGS:
            return super().get_command(ctx, cmd_name)
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
    """The options that all trainings have, without those of their recipes."""

    out: Annotated[Path, typer.Option(metavar="FOLDER", help="write the adapter, and the run's checkpoint, here")]
    data: DataConfig = field(default=DataConfig())
    loading: LoadConfig = field(default=LoadConfig())
    licence: Annotated[
        tuple[str, ...],
        typer.Option(metavar="SOURCE=LICENCE", help="state the licence of a data source in the card; repeatable"),
    ] = ()
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="resume an unfinished run in --out, or start over")
    ] = True
    force: Annotated[bool, typer.Option("--force", help="replace what was trained in --out, and the figure")] = False
    shard_target: Annotated[
        bool,
        typer.Option("--shard-target", help="with torchrun: keep a part of the target's layers in each process only"),
    ] = False
    log: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="KIND", help="write a log in OUT/training besides log.jsonl: csv, tensorboard; repeatable"
        ),
    ] = ()
    timing: Timing = None
    as_json: options.AsJson = False


@dataclass(frozen=True, kw_only=True)
class MethodTrainConfig(TrainConfig):
    """The options of ``anabranch train METHOD``."""

    data: OwnDataConfig = field(default=OwnDataConfig())
    recipe: Annotated[
        str | None,
        typer.Option(
            help="use the values of this recipe, below (default: the first)", autocompletion=completion.recipes
        ),
    ] = None
    init: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="start from this adapter: a folder, the name of one that ships, default (the one that ships for the "
            "model), or none for fresh weights (default: what the recipe says)",
            autocompletion=completion.starts,
        ),
    ] = None
    states: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="keep the target's states in this folder, where other trainings on the same completions find them, "
            "and leave them there",
        ),
    ] = None
    figure: options.Figure = None


@dataclass(frozen=True, kw_only=True)
class LoraTrainConfig(TrainConfig):
    """The options of ``anabranch train lora``."""

    init: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="start from this LoRA (PEFT's format) instead of a fresh one")
    ] = None


def _verb(command: str) -> Any:
    """The command that trains a method, or the target itself."""
    of = training(command)
    again = "Stop with Ctrl-C or SIGTERM at any time; the same command resumes exactly there."
    if command == "lora":
        help = f"""Fine-tune a model with LoRA and write a folder in PEFT's format.

        Changes what the model says, not how fast: learns from completions that anybody wrote, and measures loss and
        token accuracy on those held out. {again}
        """
        return extended(command, _train_lora, LoraTrainConfig, of, help)
    help = f"""Train an adapter for {of.title} and write its folder.

    Learns from the model's own completions, or from plain text. Without either, the model first writes prompts and
    completions of its own (--self-tokens). Options override the recipe's values; recipes are
    {", ".join(of.recipes)}. {again}
    """
    return extended(command, partial(_train_method, command), MethodTrainConfig, of, help)


@dataclass
class _Run:
    """A training whose target is loaded and whose data are read.

    own     completions of the user's prompts
    common  keywords of ``train_adapter`` and ``train_lora``
    """

    target: Target
    shown: Screen
    examples: list[Example]
    held_out: list[Example]
    own: list[Example]
    common: RunOptions
    first: bool


@contextmanager
def _prepared(
    config: TrainConfig, recipe: Recipe, method: Method | None = None, *, packed: bool = False
) -> Iterator[_Run]:
    """Load the target and read the data; while the training runs, Ctrl-C says how to resume it.

    method  None: the target itself is tuned
    packed  the target may be packed as its file stores it
    """
    from anabranch.cli import train_data
    from anabranch.cli.screen import resumable, screen, silent, stored_step
    from anabranch.support.files import shown_command
    from anabranch.train.advice import curve_of
    from anabranch.train.checkpoint import read_log
    from anabranch.train.fit import divided
    from anabranch.train.job import check_trains, read_data
    from anabranch.train.processes import joined
    from anabranch.train.self_prompts import SOURCE

    stated = train_data.licences_of(config.licence)
    _check(config)
    task = config.data.of_task.read()
    licences = {SOURCE: "written by the target itself"} | ({} if task is None else task.licences) | stated
    run = config.out / "training"
    with joined() as processes, screen() if processes.first else silent() as shown, resumable(run):
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        target = options.load(config.loading, pack=False, stored=packed, adapters=False).target
        if method is None:
            target.check_decoder_only("fine-tuning")
        else:
            check_trains(target, method)
        if config.data.self_written or task is not None:
            target.check_decoder_only("training without --answers")
        answered, own = train_data.write_data(target, config.data, recipe.options.seed, config.out, shown)
        if task is not None:
            shown.say(task.summary())
        examples, validation = train_data.read_examples(target, config.data, task, recipe, answered)
        own_examples = [] if own is None else read_data(target, recipe, answers=own)
        tokens = sum(len(example.answer_ids) for example in examples)
        held_out = divided(examples, validation, recipe)[1]
        shown.say(f"{len(examples):,} examples, {tokens:,} answer tokens, {len(held_out):,} examples held out")
        if config.resume and (step := stored_step(run)):
            shown.say(f"resumes from step {step:,}, the checkpoint in {run}")
        common: RunOptions = {
            "report": _Report(shown, curve_of(read_log(run)) if config.resume else [], held_out=len(held_out)),
            "resume": config.resume,
            "command": shown_command("anabranch", *sys.argv[1:]),
            "licences": licences,
            "validation": validation,
            "own": own_examples,
            "facts": None if task is None else {"task": task.described()},
            "logs": config.log,
            "processes": processes,
            "shard_target": config.shard_target,
            "say": shown.say,
        }
        yield _Run(target, shown, examples, held_out, own_examples, common, processes.first)


def _train_method(command: str, config: MethodTrainConfig, given: dict[str, Any]) -> None:
    """Train; ``given`` has the recipe's values that are overridden on the command line."""
    from anabranch.cli import train_data, train_result
    from anabranch.cli.train_measure import PLAIN, measured_speeds, measured_tuning
    from anabranch.methods import AUTO
    from anabranch.train.checkpoint import read_log
    from anabranch.train.figure import draw_curves
    from anabranch.train.fit import stored_target
    from anabranch.train.job import check_init, start_folder, train_adapter, trainable

    method, of = trainable(TRAININGS[command][0]), training(command)
    recipe = of.recipe(config.recipe, train_data.with_new_data(config.data, of.options, given))
    train_data.self_data(config.data, recipe.options.seed)  # raises InputError for a value out of range
    check_init(config.init)
    assert method.trained is not None
    packed = method.trained.packed(recipe) and recipe.options.target_format != "nf4" and not config.shard_target
    with _prepared(config, recipe, method, packed=packed) as run:
        start = start_folder(config.init, recipe, method, run.target)
        run.shown.say("starts from fresh weights" if start is None else f"starts from the adapter {start.name}")
        init = config.init if start is None else start
        common: RunOptions = {**run.common, "states": config.states}
        record = train_adapter(run.target, method, recipe, run.examples, config.out, init=init, **common)
        if not run.first:
            return
        target, shown = stored_target(run.target), run.shown
        shown.keep()
        timed = train_result.timing_pays(target) if config.timing is None else config.timing
        speeds, decoded = {}, {}
        tuned = record["target"]["fingerprint"] != target.fingerprint  # training made a target of its own
        encoder = target.config.encoder
        timed = timed and (encoder is None or not encoder.channels)  # prompts are decoded, not sounds
        if timed and run.held_out and not tuned:
            speeds = measured_speeds(target, config.out, run.own or run.held_out, shown)
        elif timed and run.held_out:
            own_model = replace(config.loading, model=str(config.out / "model"), adapters=(config.out,), lora=None)
            decoded = measured_tuning(config.loading, own_model, (PLAIN, AUTO), run.held_out, shown)
    log = read_log(config.out / "training")
    summary = train_result.summary(
        *(record, log, speeds),
        model=str(config.out / "model") if tuned else config.loading.model,
        lora=None if tuned else config.loading.lora,
        out=config.out,
        decoded=decoded,
        task=config.data.of_task.words(),
    )
    if config.as_json:
        print(json.dumps({**record, "run": summary}))
    else:
        train_result.show(record, summary, config.out)
    if config.figure is not None:  # last, so that the result is printed even if this fails
        draw_curves(log, summary["curve"], config.figure)


def _train_lora(config: LoraTrainConfig, given: dict[str, Any]) -> None:
    """Train; ``given`` has the recipe's values that are overridden on the command line."""
    from anabranch.cli import train_result
    from anabranch.cli.train_measure import PLAIN, measured_tuning
    from anabranch.errors import InputError
    from anabranch.train.lora import check_init, train_lora

    recipe = training("lora").recipe(None, given)
    check_init(config.init, given)
    if config.loading.lora is not None:
        raise InputError("--lora is merged before the training, and its result would fit no other model; use --init")
    with _prepared(config, recipe) as run:
        record = train_lora(run.target, recipe, run.examples, config.out, init=config.init, **run.common)
        if not run.first:
            return
        run.shown.keep()
        decoded = {}
        if run.held_out and (train_result.timing_pays(run.target) if config.timing is None else config.timing):
            tuned = replace(config.loading, lora=config.out)
            decoded = measured_tuning(config.loading, tuned, (PLAIN,), run.held_out, run.shown)
    if config.as_json:
        print(json.dumps(record))
    else:
        train_result.show_lora(record, decoded, config.out, config.loading.model)


def _check(config: TrainConfig) -> None:
    """Check input and output files, before a model is loaded. Raises InputError or FileError."""
    from anabranch.cli.train_data import check_data_options
    from anabranch.errors import InputError
    from anabranch.support.files import check_folder, check_output
    from anabranch.train.job import check_folder_is_free
    from anabranch.train.logs import check_logs
    from anabranch.train.processes import launched
    from anabranch.tune.figure import check_figure

    check_logs(config.log)
    if isinstance(config, MethodTrainConfig) and config.figure is not None:
        check_figure(config.figure)
        check_output(config.figure, force=config.force, what="the figure", option="--figure")
    if isinstance(config, MethodTrainConfig) and config.states is not None:
        check_folder(config.states, "the target's states", "folder (--states)")
    processes = launched()
    if processes.first:
        check_folder_is_free(config.out, force=config.force)
    check_data_options(config.data, config.out)
    if config.shard_target and processes.count == 1:
        raise InputError("--shard-target is for several processes; start them with torchrun")
    if processes.count > 1 and (config.data.self_written or config.data.own_prompts is not None):
        raise InputError("several processes train on data that exist; write them first with 'anabranch train answers'")


class _Report:
    """Shows the progress of a training; ``curve`` is the held-out acceptance of earlier steps."""

    def __init__(self, shown: Screen, curve: Curve, *, held_out: int) -> None:
        from anabranch.cli.screen import FirstRate

        self.shown, self.curve, self.held_out = shown, curve, held_out
        self.loss: float | None = None
        self.quality = ""
        self.rate = FirstRate(shown)

    def __call__(self, now: Progress) -> None:
        from anabranch.cli.screen import clock

        self.rate.see(now)
        self.loss = now.loss if self.loss is None else 0.9 * self.loss + 0.1 * now.loss
        if now.evaluation is not None:
            if "tree" in now.evaluation:
                self.curve.append((now.step, now.evaluation["tree"]))
            if tuned := now.evaluation.get("next token"):
                self.quality = f"perplexity {math.exp(tuned['loss']):.3f}, accuracy {tuned['accuracy']:.0%}"
        rate = f"{now.positions_per_second:,.0f} tokens/s, {clock(now.seconds_left)} left"
        first = f"step {now.step:,}/{now.steps:,} {now.step / now.steps:.0%}, {rate}"
        second = f"loss {self.loss:.3f}, {self._held_out()}"
        due = now.evaluation is not None or now.step == now.steps
        self.shown.show(first, second, plain=f"{first}, {second}", now=due)

    def _held_out(self) -> str:
        if not self.held_out:
            return "nothing held out"
        length = ""
        if self.curve:
            change = f" ({self.curve[-1][1] - self.curve[-2][1]:+.2f})" if len(self.curve) > 1 else ""
            length = f"mean acceptance length {self.curve[-1][1]:.2f}{change}"
        return f"held-out {', '.join(filter(None, (length, self.quality))) or 'not evaluated yet'}"
