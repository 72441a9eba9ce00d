"""Options shared by several commands, each declared once with its help text, unit and default.

``configured`` turns them into command-line options, as it does those of a call (``declared``) and of loading.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import completion
from anabranch.cli.configured import chosen
from anabranch.declared import Keywords
from anabranch.errors import AnabranchWarning, InputError
from anabranch.loading import LoadConfig, Loaded
from anabranch.support.jsonfiles import read_whole

if TYPE_CHECKING:
    from anabranch.bench.suites import Application, SuitePrompt
    from anabranch.sampling import SamplingParams

__all__ = [
    "AsJson",
    "Completion",
    "Drafter",
    "Figure",
    "Force",
    "NewTokens",
    "PromptTemplate",
    "Prompts",
    "Raw",
    "Seed",
    "ShowDrafts",
    "System",
    "UsageError",
    "check_at_least",
    "decoded",
    "from_files",
    "load",
    "params",
    "sampling",
    "standard_input",
    "unescaped",
]


class UsageError(InputError):
    """Arguments that cannot be a call of the command, which then exits as for an unknown option."""


Drafter = Annotated[
    str,
    typer.Option(
        help="draft with this method: auto, or one below; with settings: NAME:SETTING=VALUE,...",
        autocompletion=completion.drafters,
    ),
]
DefaultDrafter = Annotated[
    str | None,
    typer.Option(
        help="draft with this method: auto, or one below; with settings: NAME:SETTING=VALUE,... By default, auto, or "
        "the drafter that 'anabranch tune' found to be faster",
        autocompletion=completion.drafters,
    ),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="stop after this many new tokens")]
Seed = Annotated[int, typer.Option(help="use this random seed")]
System = Annotated[str | None, typer.Option(help="put this system message first")]
Raw = Annotated[bool, typer.Option("--raw", help="use no chat template: continue the text as is")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="mark what proposed each token")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
PromptTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="with --task: write prompts like this, with fields of a row as {name} (default: the field prompt)",
    ),
]
Completion = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD", help="with --task: the field of the completion, or of a list of them (default: completion)"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace files that exist")]
OF_TASKS = ("prompt_template", "completion", "split")  # options of --task
Figure = Annotated[Path | None, typer.Option(metavar="FILE", help="draw a figure (FILE.png or FILE.svg)")]


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")  # the fields of ``SamplingParams``
sampling = chosen(*SAMPLING)


def params(options: Keywords) -> SamplingParams:
    """The engine's parameters, without defaults of a model. Raises InputError for a value out of range."""
    from anabranch.options import sampling_params

    return sampling_params(options)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts to decode, and how they are turned into token ids."""

    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            "--prompts",
            help="decode own (a few built-in ones), a suite such as spec_bench, or a JSONL file",
            autocompletion=completion.one_of("own", "spec_bench", "mt_bench", "humaneval", "gsm8k"),
        ),
    ] = "own"
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="read suites and data sets here, as NAME/test.jsonl.gz (default: the hub, for suites)"
        ),
    ] = None
    field: Annotated[str, typer.Option(help="take prompts from this field of a JSONL file")] = "prompt"
    task: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="TASK",
            help="decode this application: sql, e2e, dialogsum or a JSONL file; with --suite, use only this task of "
            "it; repeatable",
            autocompletion=completion.one_of("sql", "e2e", "dialogsum"),
        ),
    ] = ()
    prompt_template: PromptTemplate = None
    completion: Completion = None
    split: Annotated[
        str, typer.Option(help="with --task: use the rows of train, validation, test, or all of a file of your own")
    ] = "test"
    limit: Annotated[
        int | None, typer.Option(help="use only this many prompts or conversations, spread over the tasks")
    ] = None
    raw: Raw = False

    @property
    def of_task(self) -> bool:
        """Return whether --task names an application, and not tasks of a suite."""
        return self.suite == "own" and bool(self.task)

    def application(self, metrics: tuple[str, ...] = ()) -> Application | None:
        """The application that --task names without --suite, and its rows; None if there is none.

        metrics  names of metrics instead of the task's own

        Raises InputError or FileError.
        """
        return self._application(self.limit, metrics)

    def _application(self, limit: int | None, metrics: tuple[str, ...] = ()) -> Application | None:
        from anabranch.bench.suites import Application

        if not self.of_task:
            if useless := [name for name in OF_TASKS if getattr(self, name) != getattr(Prompts, name)]:
                raise InputError(f"--{useless[0].replace('_', '-')} needs --task without --suite")
            return None
        if len(self.task) > 1:
            raise InputError(f"--task decodes one application at a time, got {' and '.join(self.task)}")
        if self.field != Prompts.field:
            raise InputError("--field has no effect with --task; give --prompt-template instead")
        application = Application.read(
            self.task[0],
            data=self.data,
            split=self.split,
            limit=limit,
            template=self.prompt_template,
            completion=self.completion,
            metrics=metrics,
        )
        self._tell_if_fewer(len(application.rows), f"the task {self.task[0]!r} has", "rows")
        return application

    def read(self, *, limit: int | None = None) -> list[SuitePrompt]:
        """The prompts, at most ``limit`` without --limit. Raises InputError, FileError or FetchError."""
        from anabranch.bench.suites import load_suite

        most = limit if self.limit is None else self.limit
        if (application := self._application(most)) is not None:
            return application.prompts
        prompts = load_suite(self.suite, data=self.data, limit=most, field=self.field, tasks=self.task)
        where = "the built-in prompts are" if self.suite == "own" else f"the suite {self.suite!r} has"
        self._tell_if_fewer(len(prompts), where, "" if self.suite == "own" else "prompts")
        return prompts

    def _tell_if_fewer(self, count: int, where: str, what: str) -> None:
        if self.limit is not None and count < self.limit:
            sentence = f"--limit {self.limit} has no effect: {where} {count} {what}".rstrip()
            more = (
                "; give more with --suite NAME or --suite FILE.jsonl" if self.suite == "own" and not self.task else ""
            )
            warnings.warn(sentence + more, AnabranchWarning, stacklevel=2)


def load(loading: LoadConfig, *, pack: bool = True, stored: bool = False, adapters: bool = True) -> Loaded:
    """Load the model and adapters; the default model is downloaded first if necessary, with a progress bar."""
    from anabranch.cli import models
    from anabranch.cli.show import Wait, packing_progress
    from anabranch.loading import load as load_config

    with Wait() as wait:
        progress = packing_progress(wait)
        return load_config(
            *(loading,), pack=pack, stored=stored, adapters=adapters, fetch=models.fetch_default, progress=progress
        )


def check_at_least(least: int, **values: int | None) -> None:
    """Raise InputError for a value below ``least``; keywords are option names with underscores."""
    for name, value in values.items():
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


_ESCAPE = re.compile(r"\\(?:([ntr\\])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def from_files(call: Keywords) -> Keywords:
    """The options schema, grammar and prediction with the contents of the files that they name. Raises FileError."""
    texts: Keywords = {}
    schema, grammar, prediction = call.get("schema"), call.get("grammar"), call.get("prediction")
    if isinstance(schema, str) and not schema.lstrip().startswith("{") and schema not in ("true", "false"):
        texts["schema"] = read_whole(Path(schema).expanduser())
    if grammar is not None:
        texts["grammar"] = read_whole(Path(grammar).expanduser())
    if isinstance(prediction, str):
        texts["prediction"] = read_whole(Path(prediction).expanduser())
    return texts


def unescaped(text: str) -> str:
    r"""Replace ``\n``, ``\t``, ``\r``, ``\\``, ``\xNN``, ``\uNNNN`` and ``\UNNNNNNNN``.

    Other backslashes stay, as in ``\boxed``. Raises InputError for an escape that is no character.
    """

    def character(match: re.Match[str]) -> str:
        digits = match[2] or match[3] or match[4]
        return chr(int(digits, 16)) if digits else _ESCAPED[match[1]]

    try:
        # pairs of surrogates, as in JSON, are one character
        return _ESCAPE.sub(character, text).encode("utf-16", "surrogatepass").decode("utf-16")
    except (ValueError, OverflowError) as error:
        raise InputError(rf"{text!r} has an escape that is no character; write \\ for a backslash") from error


def standard_input() -> str:
    """All of standard input. Raises InputError if it is not UTF-8."""
    return decoded(sys.stdin.buffer.read())


def decoded(data: bytes, start: int = 0) -> str:
    """Decode bytes read at offset ``start`` of standard input. Raises InputError if they are not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {start + error.start:,}; "
            "convert it first, for example with iconv"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
