"""``anabranch train answers``: let a target complete prompts, given ones or its own, as training data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.declared import Keywords
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.cli.screen import Screen
    from anabranch.integrations.ray_data import RayWorkers
    from anabranch.train import AnswerProgress
    from anabranch.train.self_prompts import PromptProgress
    from anabranch.train.task_data import TaskData

__all__ = ["AnswersConfig", "TaskConfig", "Timing", "answers", "show_answers"]

Timing = Annotated[
    bool | None,
    typer.Option(
        "--timing/--no-timing",
        help="decode a few held-out prompts at the end and time them (default: below 500M parameters, or on a GPU)",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The rows of an application to learn from, and the form of their prompts."""

    task: Annotated[
        str | None,
        typer.Option(help="take the training rows of this application: sql, e2e, dialogsum or a file of rows"),
    ] = None
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="read the data set of --task here")] = None
    prompt_template: options.PromptTemplate = None
    completion: options.Completion = None
    task_rows: Annotated[int | None, typer.Option(help="with --task: draw this many rows (default: all)")] = None
    raw: options.Raw = False

    def check(self) -> None:
        """Check that no option is given without --task. Raises InputError."""
        for name in ("data", "prompt_template", "completion", "task_rows", "raw"):
            if self.task is None and getattr(self, name) != getattr(TaskConfig, name):
                raise InputError(f"--{name.replace('_', '-')} needs --task; give both, or leave it out")

    def words(self) -> list[str]:
        """The words after ``bench`` that decode the test rows; empty without --task."""
        if self.task is None:
            return []
        named = {"--data": self.data, "--prompt-template": self.prompt_template, "--completion": self.completion}
        given = [str(word) for option, value in named.items() if value is not None for word in (option, value)]
        return ["task", self.task, *given, *(["--raw"] if self.raw else [])]

    def read(self) -> TaskData | None:
        """The rows, before a model is loaded; None without --task. Raises InputError or FileError."""
        from anabranch.train.task_data import TaskData

        if self.task is None:
            return None
        return TaskData.read(
            self.task,
            data=self.data,
            template=self.prompt_template,
            completion=self.completion,
            limit=self.task_rows,
            raw=self.raw,
        )


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """The options of ``anabranch train answers``."""

    out: Annotated[Path, typer.Option(metavar="FILE", help="write JSONL; prompts with a completion in it are skipped")]
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="read JSONL with 'prompt' or 'messages'; optional: 'chat', 'id', 'source'"),
    ] = None
    sounds: Annotated[
        tuple[Path, ...],
        typer.Option(metavar="PATH", help="with a Whisper model: transcribe this WAV file or folder; repeatable"),
    ] = ()
    language: Annotated[str | None, typer.Option(help="with --sounds: their language (default: detected)")] = None
    self_prompted: Annotated[
        int | None,
        typer.Option(metavar="N", help="let the model write this many prompts itself, to OUT.prompts.jsonl"),
    ] = None
    of_task: TaskConfig = field(default=TaskConfig())
    loading: LoadConfig = field(default=LoadConfig())
    rows: Annotated[int, typer.Option(help="decode this many prompts at a time")] = 32
    max_new_tokens: options.NewTokens = 256
    longest_prompt: Annotated[int, typer.Option(help="leave out prompts of more tokens than this")] = 1024
    limit: Annotated[int | None, typer.Option(help="read only the first prompts, this many")] = None
    ray: Annotated[int | None, typer.Option(metavar="N", help="let N workers on a Ray cluster share the prompts")] = (
        None
    )
    sampling: Keywords = field(default_factory=options.sampling)
    as_json: options.AsJson = False


@configured
def answers(config: AnswersConfig) -> None:
    """Let the model complete prompts, as training data for adapters.

    Each completion is written when it is finished. Stop with Ctrl-C or SIGTERM at any time; the same command resumes.
    With --ray, several processes or machines share the prompts.
    """
    from anabranch.cli.screen import resumable, screen
    from anabranch.train import read_prompts, write_answers
    from anabranch.train.job import trainable
    from anabranch.train.self_prompts import in_words, write_prompts

    if config.sounds:
        _transcribe(config)
        return
    sampling = options.params(config.sampling)
    source, out = _check(config), config.out
    complete = _workers(config)
    task = config.of_task.read()
    written = None
    with screen() as shown, resumable():
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        loading = config.loading if complete is None else replace(config.loading, device="cpu")
        target = options.load(loading, adapters=False).target
        if config.self_prompted is not None:
            assert source is not None
            target.check_decoder_only("writing prompts (--self-prompted)")
            report = _show_prompts(shown)
            written = write_prompts(
                target, source, config.self_prompted, rows=config.rows, seed=sampling.seed, report=report
            )
            shown.say(f"{written.kept:,} prompts of {written.sampled:,} sampled: {in_words(written.dropped)}")
        if task is not None:
            prompts = task.prompts(target.tokenizer)
        else:
            assert source is not None
            prompts = read_prompts(source, target.tokenizer, limit=config.self_prompted or config.limit)
        done = write_answers(
            target,
            prompts,
            out,
            rows=config.rows,
            max_new_tokens=config.max_new_tokens,
            longest_prompt=config.longest_prompt,
            sampling=sampling,
            report=show_answers(shown, out.name),
            complete=complete,
        )
    left_out = len(prompts) - done.wanted
    if config.as_json:
        result: dict[str, object] = {"answers": done.answers, "left_out": left_out, "tokens": done.tokens}
        if written is not None:
            result |= {"prompts": {"kept": written.kept, "sampled": written.sampled, "dropped": dict(written.dropped)}}
        print(json.dumps({**result, "tokens_per_second": done.tokens_per_second}))
        return
    print(f"{done.answers:,} answers in {out}, {done.tokens:,} tokens by this run")
    if left_out:
        print(f"left out: {left_out:,} prompts longer than {config.longest_prompt:,} tokens")
    print(f"Next: anabranch train {trainable().name} --answers {config.out} --out FOLDER")


def _transcribe(config: AnswersConfig) -> None:
    """Let a Whisper model transcribe sounds."""
    from anabranch.cli.screen import resumable, screen
    from anabranch.train.answers import check_out
    from anabranch.train.sounds import found_sounds, write_transcripts

    config.of_task.check()
    options.check_at_least(1, rows=config.rows)
    for name in ("prompts", "self_prompted", "limit", "ray"):
        if getattr(config, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for prompts, and --sounds gives sounds; give one")
    if config.of_task.task is not None:
        raise InputError("--task gives prompts, and --sounds gives sounds; give one")
    sounds, out = found_sounds(config.sounds), config.out
    check_out(out, sounds[0])
    with screen() as shown, resumable():
        shown.show(f"loading {config.loading.model}", "", plain=f"loading {config.loading.model}")
        target = options.load(config.loading, adapters=False).target
        report = show_answers(shown, out.name, of="sound")
        done = write_transcripts(target, sounds, out, rows=config.rows, language=config.language, report=report)
    if config.as_json:
        print(json.dumps({"sounds": done.answers, "tokens": done.tokens, "tokens_per_second": done.tokens_per_second}))
        return
    print(f"transcripts of {done.answers:,} sounds in {out}, {done.tokens:,} tokens by this run")
    print(f"Next: anabranch train streams --model {config.loading.model} --answers {out} --out FOLDER")


def _workers(config: AnswersConfig) -> RayWorkers | None:
    """The workers of --ray. Raises CapabilityError where Ray is not installed."""
    if config.ray is None:
        return None
    options.check_at_least(1, ray=config.ray)
    try:
        from anabranch.integrations.ray_data import RayWorkers
    except ImportError as error:
        raise CapabilityError(
            f"--ray needs Ray Data, which does not import ({error}); run pip install 'anabranch[ray]'"
        ) from error
    return RayWorkers(config.loading, config.ray)


def _check(config: AnswersConfig) -> Path | None:
    """Check options and files, before a model is loaded; returns the file of the prompts, None for those of a task.

    Raises InputError or FileError.
    """
    from anabranch.errors import FileError, InputError
    from anabranch.train.answers import check_out
    from anabranch.train.self_prompts import check_prompts

    out = config.out
    config.of_task.check()
    if [config.prompts, config.self_prompted, config.of_task.task].count(None) != 2:
        raise InputError(
            "give either a file of prompts (--prompts), a number of prompts to write (--self-prompted), a task "
            "(--task), or for a Whisper model sounds (--sounds)"
        )
    if config.language is not None and not config.sounds:
        raise InputError("--language is for --sounds; leave it out")
    if config.prompts is not None:
        if not config.prompts.is_file():
            raise FileError(
                f"there is no file {config.prompts}; give a JSONL file with a field 'prompt' or 'messages' per line"
            )
        check_out(out, config.prompts)
        return config.prompts
    if config.of_task.task is not None:
        if config.limit is not None:
            raise InputError("--limit is for --prompts; give the number of rows to --task-rows")
        check_out(out, Path(config.of_task.task))  # of a file, it has the prompts
        return None
    if config.ray is not None:
        raise InputError("--ray is for prompts that are there; write them first with --self-prompted, without --ray")
    options.check_at_least(1, self_prompted=config.self_prompted, rows=config.rows)
    if config.limit is not None:
        raise InputError("--limit is for --prompts; give the number of prompts to --self-prompted")
    source = config.out.with_name(f"{config.out.stem}.prompts.jsonl")
    check_prompts(source)
    check_out(out, source)
    return source


def _show_prompts(shown: Screen) -> Callable[[PromptProgress], None]:
    """Shows the progress of ``write_prompts``."""
    from anabranch.cli.screen import clock
    from anabranch.train.self_prompts import in_words

    def report(now: PromptProgress) -> None:
        kept = min(now.kept, now.wanted)
        left = f", {clock(now.seconds_left)} left" if now.seconds_left else ""
        first = f"prompt {kept:,}/{now.wanted:,} {kept / now.wanted:.0%}, {now.tokens_per_second:,.0f} tokens/s{left}"
        second = f"{now.sampled:,} sampled: {in_words(now.dropped)}"
        shown.show(first, second, plain=f"{first}, {second}", now=now.kept == now.wanted)

    return report


def show_answers(shown: Screen, name: str, of: str = "answer") -> Callable[[AnswerProgress], None]:
    """Shows the progress of ``write_answers``; ``name`` is the file's, and ``of`` what is counted."""
    from anabranch.cli.screen import clock

    def report(now: AnswerProgress) -> None:
        left = f", {clock(now.seconds_left)} left" if now.seconds_left else ""
        rate = f", {now.tokens_per_second:,.0f} tokens/s{left}" if now.tokens else ""
        first = f"{of} {now.answers:,}/{now.wanted:,} {now.answers / now.wanted:.0%}{rate}"
        second = f"{now.tokens:,} tokens written in {name}"
        shown.show(first, second, plain=first, now=now.answers == now.wanted)

    return report
