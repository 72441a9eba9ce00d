"""The data of ``anabranch train METHOD``: a file, or what the target writes itself; and the user's prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.train_answers import TaskConfig

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.learning.recipe import Recipe
    from anabranch.model.load import Target
    from anabranch.train import Example
    from anabranch.train.self_data import DataProgress, SelfData
    from anabranch.train.task_data import TaskData

__all__ = [
    "DataConfig",
    "OwnDataConfig",
    "check_data_options",
    "licences_of",
    "read_examples",
    "self_data",
    "with_new_data",
    "write_data",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The options that say what to learn from: completions, a text, or the rows of a task."""

    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train on the JSONL that 'train answers' wrote")
    ] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train on a text file, or JSONL with a field 'text', instead")
    ] = None
    of_task: TaskConfig = field(default=TaskConfig())

    @property
    def self_written(self) -> bool:
        """True if the target writes the data."""
        return False

    @property
    def own_prompts(self) -> Path | None:
        """The prompts of the user to evaluate on."""
        return None


@dataclass(frozen=True, kw_only=True)
class OwnDataConfig(DataConfig):
    """The same, for what learns the target's own completions: the target can write them."""

    self_tokens: Annotated[
        int | None,
        typer.Option(
            help="without --answers and --text, let the model write its own prompts and answers, with this many "
            "tokens of answers (default: 250,000)",
        ),
    ] = None
    self_rows: Annotated[int | None, typer.Option(help="write this many of them at a time (default: 64)")] = None
    self_temperature: Annotated[
        float | None, typer.Option(help="sample their answers at this temperature (default: 0, greedy)")
    ] = None
    evaluate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="evaluate on these prompts too: JSONL as for 'train answers --prompts'"),
    ] = None

    @property
    def self_written(self) -> bool:
        """True if the target writes the data."""
        return self.answers is None and self.text is None and self.of_task.task is None

    @property
    def own_prompts(self) -> Path | None:
        """The prompts of the user to evaluate on."""
        return self.evaluate


def check_data_options(config: DataConfig, out: Path) -> None:
    """Check the options and their files, before a model is loaded. Raises InputError or FileError."""
    from anabranch.errors import FileError, InputError
    from anabranch.train.answers import check_out
    from anabranch.train.job import check_data
    from anabranch.train.self_data import check_self_data

    _check_task(config)
    if config.self_written:
        check_self_data(_folder(out))
    else:
        if config.of_task.task is None:
            check_data(config.answers, config.text)
        for name in ("self_tokens", "self_rows", "self_temperature"):
            if getattr(config, name, None) is not None:
                raise InputError(
                    f"--{name.replace('_', '-')} is for data that the model writes itself; leave it out, or give "
                    "none of --answers, --text and --task"
                )
    if (prompts := config.own_prompts) is not None:
        if not prompts.is_file():
            raise FileError(
                f"there is no file {prompts}; give --evaluate a JSONL file with a field 'prompt' or 'messages' per line"
            )
        check_out(_own(out), prompts)


def _check_task(config: DataConfig) -> None:
    """Check the options of --task. Raises InputError."""
    from anabranch.errors import InputError

    config.of_task.check()
    if config.of_task.task is None:
        return
    if config.answers is not None or config.text is not None:
        raise InputError(f"--task and --{'text' if config.text else 'answers'} are both data to learn from; give one")
    if config.own_prompts is not None:
        raise InputError("--task evaluates on its own validation rows, so --evaluate has no effect; leave it out")


def with_new_data(config: OwnDataConfig, options: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values for self-written data: one epoch unless ``given``, since new answers teach more than old ones.

    ``options`` are the names that the recipe has.
    """
    if not config.self_written or "epochs" in given:
        return given
    once = {"epochs": 1.0, "keep_states": "none"}
    return {**{name: value for name, value in once.items() if name in options}, **given}


def self_data(config: OwnDataConfig, seed: int) -> SelfData:
    """The amount and form of self-written data. Raises InputError for a value out of range."""
    from anabranch.train.self_data import SelfData

    given = {"tokens": config.self_tokens, "rows": config.self_rows, "temperature": config.self_temperature}
    return SelfData(seed=seed, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def write_data(
    target: Target, config: DataConfig, seed: int, out: Path, shown: Screen
) -> tuple[Path | None, Path | None]:
    """Let the target write what is missing; returns the files of answers to learn from and to evaluate on, if any."""
    from dataclasses import replace

    from anabranch.cli.train_answers import show_answers
    from anabranch.train import read_prompts, write_answers
    from anabranch.train.fit import packed_copy
    from anabranch.train.self_data import write_self_data

    learn, own = config.answers, None
    if not isinstance(config, OwnDataConfig) or not (config.self_written or config.evaluate):
        return learn, own
    plan = self_data(config, seed)
    writer = replace(target, decoder=packed_copy(target))
    if config.self_written:
        learn = write_self_data(writer, _folder(out), plan, report=lambda now: _show(shown, now))
    if config.evaluate is not None:
        own = _own(out)
        prompts = read_prompts(config.evaluate, target.tokenizer)
        write_answers(
            writer,
            prompts,
            own,
            rows=plan.rows,
            max_new_tokens=plan.max_new_tokens,
            sampling=plan.sampling,
            report=show_answers(shown, own.name),
        )
    return learn, own


def licences_of(given: tuple[str, ...]) -> dict[str, str]:
    """The licences of ``--licence`` by source. Raises InputError."""
    from anabranch.errors import InputError

    if wrong := [item for item in given if "=" not in item]:
        raise InputError(f"--licence must be SOURCE=LICENCE, got {wrong[0]!r}")
    return dict(item.split("=", 1) for item in given)


def read_examples(
    target: Target, config: DataConfig, task: TaskData | None, recipe: Recipe, learn: Path | None
) -> tuple[list[Example], list[Example] | None]:
    """The examples to learn from, and those that a task has for validation; without a task, None."""
    from anabranch.train.job import read_data

    if task is not None:
        return task.examples(target, recipe)
    anybodys = not isinstance(config, OwnDataConfig)
    return read_data(target, recipe, answers=learn, text=config.text, anybodys=anybodys), None


def _show(shown: Screen, now: DataProgress) -> None:
    from anabranch.cli.screen import clock
    from anabranch.train.self_prompts import in_words

    left = f", {clock(now.seconds_left)} left" if now.seconds_left else ""
    share = min(1.0, now.tokens / now.wanted)
    first = (
        f"writing {now.stage}: {now.tokens:,}/{now.wanted:,} {share:.0%}, {now.tokens_per_second:,.0f} tokens/s{left}"
    )
    second = f"{now.answers:,} answers, {now.kept:,} of {now.sampled:,} prompts: {in_words(now.dropped)}"
    shown.show(first, second, plain=f"{first}, {second}")


def _folder(out: Path) -> Path:
    return out / "data"


def _own(out: Path) -> Path:
    return out / "data" / "evaluate.jsonl"
