"""Shared by ``generate`` and ``chat``: loading with progress, safe output on terminals, draft marks, summaries."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli.wrapping import Wrapper, columns_of, wrapped
from anabranch.errors import AnabranchWarning
from anabranch.support.interrupt import Terminated
from anabranch.support.log import LOGGER, NOTICE

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from anabranch.api import Model
    from anabranch.declared import Keywords
    from anabranch.decoding.generation import Chunk, Generation
    from anabranch.decoding.stats import Stats
    from anabranch.loading import LoadConfig
    from anabranch.model.load import Target

__all__ = [
    "Marker",
    "Notices",
    "Wait",
    "bar",
    "cleaned",
    "consoles",
    "ending",
    "explained",
    "for_stdout",
    "kernels",
    "labelled",
    "lesser_kernels",
    "load_model",
    "name_defaults",
    "note",
    "packing_progress",
    "passes",
    "prompt_ids",
    "prompt_progress",
    "rates",
    "record",
    "sentences",
    "show",
    "show_warning",
]

# the target's own tokens are plain; drafted ones are coloured, or marked without colour
COLOURS = ("green", "cyan", "magenta", "yellow", "bright_green", "bright_cyan", "bright_magenta", "bright_yellow")
OTHER_COLOUR = "red"
TARGET = "target"  # the source of the target's own tokens
SUPERSCRIPTS = dict(zip("0123456789abcdefghijklmnoprstuvwxyz", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ", strict=True))

# one pass and several, by ``Call.kind``
PASSES = {
    "target": ("target pass", "target passes"),
    "copy": ("pass of its 4-bit copy", "passes of its 4-bit copy"),
    "partial": ("partial pass", "partial passes"),
    "draft": ("draft model pass", "draft model passes"),
    "heads": ("pass of draft heads", "passes of draft heads"),
    "inner": ("inner draft", "inner drafts"),
}

# C0 without tab and newline, DEL, C1, and the embeddings, overrides and isolates that reorder text
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
BAR = 30  # characters of a bar of progress
PATIENCE = 1.0  # seconds before the progress of a prompt is shown


def cleaned(text: str) -> str:
    r"""``text`` with control characters escaped: ESC becomes the four characters ``\x1b``."""
    return CONTROLS.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if match[0] <= "\xff" else f"\\u{ord(match[0]):04x}", text
    )


def for_stdout(text: str) -> str:
    """``text`` for standard output: cleaned on a terminal, unchanged in a pipe or a file."""
    return cleaned(text) if sys.stdout.isatty() else text


def note(line: str) -> None:
    """Print a dim line on standard error; on a terminal cleaned and wrapped between words."""
    labelled("", "", cleaned(line) if sys.stderr.isatty() else line, style="dim")


def show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Print the package's own warnings as one line on standard error; those of other packages are not shown."""
    if issubclass(category, AnabranchWarning):
        labelled("warning: ", "bold yellow", str(message))


def labelled(label: str, colour: str, sentence: str, *, style: str = "default") -> None:
    """Print a sentence on standard error, above progress; wrapped at words on a terminal, one line in a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = consoles[-1] if consoles else Console(stderr=True)
    with above_the_line():
        text = Text(label, style=colour) + Text(sentence, style=style)
        console.print(text, soft_wrap=not console.is_terminal)


def sentences(parts: Iterable[str]) -> None:
    """Print facts as one line on standard error; on a terminal wrapped, between facts where possible."""
    if not sys.stderr.isatty():
        note("; ".join(parts))
        return
    width, line = shutil.get_terminal_size().columns, ""
    for part in parts:
        if line and len(line) + len(part) + 3 > width:
            note(line + ";")
            line = part
        else:
            line = f"{line}; {part}" if line else part
    note(line)


class Notices(logging.Handler):
    """Shows the package's notices on standard error: inside the block, and above the line of a ``Wait``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: hasattr(record, NOTICE))

    def __enter__(self) -> Notices:
        self._before = LOGGER.level
        if LOGGER.getEffectiveLevel() > logging.INFO:
            LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)
        LOGGER.setLevel(self._before)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a notice."""
        note(record.getMessage())


class Wait:
    """A status line on standard error, erased afterwards; only on a terminal. Warnings are printed above it."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._terminal = sys.stderr.isatty()
        self._erases = self._terminal and os.environ.get("TERM") not in (None, "", "dumb")
        self._shown = ""

    def __enter__(self) -> Wait:
        _waiting.append(self)
        self.tell(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        _waiting.remove(self)
        self.clear()

    def tell(self, text: str) -> None:
        """Replace the line by ``text``; a terminal that cannot erase shows only the first one."""
        if not self._terminal or not text or (self._shown and not self._erases):
            return
        self.clear()
        width = shutil.get_terminal_size().columns
        self._shown = cleaned(text)[: max(1, width - 1)]
        sys.stderr.write(self._shown if self._erases else self._shown + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._shown and self._erases:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


_waiting: list[Wait] = []
consoles: list[Console] = []  # of progress with live lines (``screen``), above which everything else is printed


@contextmanager
def above_the_line() -> Iterator[None]:
    """Erase the line of a ``Wait`` while the block prints."""
    wait = _waiting[-1] if _waiting else None
    shown = "" if wait is None else wait._shown
    if wait is not None:
        wait.clear()
    yield
    if wait is not None:
        wait.tell(shown)


def prompt_progress(wait: Wait) -> Callable[[int, int], None]:
    """A callback for ``on_prompt`` that shows the progress of a prompt that takes more than a second."""
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        if done < total and time.monotonic() - began > PATIENCE:
            wait.tell(f"reading prompt: {done:,} of {total:,} tokens")

    return tell


def bar(done: float, total: float) -> str:
    """A bar of progress; full if there is nothing to do."""
    filled = int(BAR * done / total) if total else BAR
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def packing_progress(wait: Wait) -> Callable[[int, int], None]:
    """A callback that shows a bar of progress while weights are packed."""

    def tell(done: int, total: int) -> None:
        wait.tell(f"packing the weights {bar(done, total)} {100 * done // total} %")

    return tell


def show(
    chunks: Generator[Chunk, None, None],
    *,
    wait: Wait | None = None,
    visible: bool = True,
    marker: Marker | None = None,
    stopped: Callable[[], bool] | None = None,
) -> tuple[str, Generation | None]:
    """Print text as it is decoded. Returns the text shown, and the result unless decoding was stopped.

    wait     cleared when the first chunk arrives
    stopped  called after each chunk; returns whether to stop. If given, Ctrl-C also stops the text
    """
    text, result, written = "", None, _Written()
    try:
        with closing(chunks):
            for chunk in chunks:
                if wait is not None:
                    wait.clear()
                text += chunk.text
                if visible:
                    written.write(for_stdout(chunk.text) if marker is None else marker.mark(chunk))
                result = chunk.result
                if stopped is not None and stopped():
                    break
    except KeyboardInterrupt as interrupt:
        if stopped is None or isinstance(interrupt, Terminated):
            raise
    finally:
        written.end()
    if visible and (text or result is not None):
        print(flush=True)
    return text, result


class _Written:
    """Text on standard output as it arrives: wrapped between words on a terminal, unchanged in a pipe or a file."""

    def __init__(self) -> None:
        self._wrapper = Wrapper(lambda: columns_of(sys.stdout)) if sys.stdout.isatty() else None

    def write(self, text: str) -> None:
        # not typer.echo, which would remove escape sequences even from output to a pipe
        sys.stdout.write(text if self._wrapper is None else self._wrapper.add(text))
        sys.stdout.flush()

    def end(self) -> None:
        if self._wrapper is not None:
            sys.stdout.write(self._wrapper.finish())


# --- summary lines ------------------------------------------------------------------------------------------------


def rates(stats: Stats, drafter: str | None = None, *, prompts: int = 1) -> list[str]:
    """Tokens, the rates of decoding and of prompt processing, mean acceptance length, drafter."""
    facts = [f"{stats.tokens:,} tokens, {stats.decode_tokens_per_second:.1f} tokens/s"]
    if stats.prefill_tokens:
        read = stats.prefill_tokens + prompts
        facts.append(f"prompt {read:,} tokens, {stats.prompt_tokens_per_second:,.0f} tokens/s")
    facts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f} per target pass")
    facts.append(passes(stats))
    return facts if drafter is None else [*facts, f"drafter {drafter}"]


def passes(stats: Stats) -> str:
    """The number of forward passes of each kind, the target's first; an acceptance length counts those alone."""
    facts = [f"{stats.steps:,} {PASSES['target'][stats.steps != 1]}"]
    for (kind, layers, of), count in sorted(stats.calls.items()):
        if kind in PASSES and kind != "target":
            part = f" ({layers} of {of} layers)" if kind == "partial" else ""
            facts.append(f"{count:,} {PASSES[kind][count != 1]}{part}")
    return ", ".join(facts)


def ending(result: Generation, model: Model) -> str:
    """The reason why a text ended: "end_token", "stop_token", "stop_string", "max_new_tokens" or "model_limit"."""
    if result.finish_reason == "stop":
        if isinstance(result.stop_reason, str):
            return "stop_string"
        return "end_token" if result.stop_reason in model.target.config.eos_token_ids else "stop_token"
    longest = model.target.config.max_positions
    return "model_limit" if len(result.prompt_ids) + len(result.token_ids) >= longest else "max_new_tokens"


def explained(ended: str, result: Generation, model: Model, *, more: str) -> str:
    """The reason as a sentence; ``more`` is how to get more than ``max_new_tokens``."""
    return {
        "end_token": "ended by the model",
        "stop_token": f"ended by the stop token {result.stop_reason}",
        "stop_string": "ended before a stop string",
        "max_new_tokens": f"stopped at {len(result.token_ids):,} tokens; {more} for more",
        "model_limit": f"the model's limit of {model.target.config.max_positions:,} tokens is reached",
    }[ended]


def kernels(model: Model) -> dict[str, str]:
    """The kernels in use, and why not faster ones: name, why, advice."""
    from dataclasses import asdict

    from anabranch.model.kernel_use import kernels_of

    return asdict(kernels_of(model.target.decoder))


def lesser_kernels(model: Model) -> list[str]:
    """A fact for the summary, if faster kernels are missing on a CPU."""
    use = kernels(model)
    return (
        [f"kernels {use['name']} ('anabranch info' tells why)"]
        if use["why"] and model.target.decoder.device.type == "cpu"
        else []
    )


# --- what proposed each token -------------------------------------------------------------------------------------


class Marker:
    """Marks what proposed each token: by colour on a terminal, otherwise by a suffix."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        from anabranch.decoding.detokenizer import Detokenizer

        self._detokenizer = Detokenizer(tokenizer, stop)
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        try:
            "".join(SUPERSCRIPTS.values()).encode(sys.stdout.encoding or "ascii")
            self._superscripts = True
        except UnicodeEncodeError:
            self._superscripts = False

    def mark(self, chunk: Chunk) -> str:
        """The text of a chunk, token by token."""
        end = len(chunk.step.tokens) - 1 if chunk.step.finish == "stop" else None
        return self.tokens(chunk.token_ids, chunk.sources, end=end, last=chunk.result is not None)

    def tokens(
        self, token_ids: Sequence[int], sources: Sequence[str], *, end: int | None = None, last: bool = False
    ) -> str:
        """The text of tokens, one by one, given what proposed each.

        end   the index of an end token, which has no text
        last  whether no tokens follow
        """
        pieces = self._detokenizer.pieces(token_ids, end=end, last=last)
        return "".join(self._style(for_stdout(piece), each) for piece, each in zip(pieces, sources, strict=True))

    def legend(self, stats: Stats) -> str:
        """The number of tokens by what proposed them: the target, numbered sources, then the others.

        A line for standard error.
        """
        sources = sorted(stats.sources.items(), key=lambda item: _place(item[0]))
        words = [self._style(source, source) + f" {count}" for source, count in sources]
        return wrapped("proposed by: " + ", ".join(words), sys.stderr)

    def _style(self, piece: str, source: str) -> str:
        if source == TARGET or not piece:
            return piece
        mark = _mark(source)
        if self._colour:
            return typer.style(piece, fg=COLOURS[(int(mark) - 1) % len(COLOURS)] if mark.isdigit() else OTHER_COLOUR)
        superscripts = [SUPERSCRIPTS.get(character, "") for character in mark]
        return piece + ("".join(superscripts) if self._superscripts and all(superscripts) else f"[{mark}]")


def _mark(source: str) -> str:
    """The number at the end of a source ("head 3" -> "3"), or its first letter ("echo" -> "e")."""
    number = source.rpartition(" ")[2]
    return number if number.isdigit() else source[:1]


def _place(source: str) -> tuple[bool, bool, tuple[int, int], str]:
    """The key that sorts sources in the legend."""
    from anabranch.methods import methods

    ranks = [rank for method in methods() if (rank := method.order(source)) is not None]
    return source != TARGET, not _mark(source).isdigit(), min(ranks, default=(sys.maxsize, 0)), source


# --- models -------------------------------------------------------------------------------------------------------


def load_model(loading: LoadConfig, drafter: str | None, call: Keywords, wait: Wait) -> Model:
    """Check the options, then download the model if necessary (with a progress bar) and load it.

    On a terminal, ``wait`` shows this before the first slow import.
    """
    said = f"loading {loading.model} ..."
    wait.tell(said)
    from anabranch.api import Model
    from anabranch.cli.models import fetch_default
    from anabranch.loading import load
    from anabranch.methods import parse_spec
    from anabranch.options import Options

    if drafter is not None:
        parse_spec(drafter)
    Options(call)

    def fetch() -> None:
        wait.clear()  # a download has its own progress bar
        fetch_default()
        wait.tell(said)

    loaded = load(loading, fetch=fetch, progress=packing_progress(wait))
    if loaded.target.generation.honoured:
        wait.clear()
        name_defaults(loaded.target, text=True)
    return Model(loaded.target, loaded.adapters, drafter, choices=loaded.choices)


def name_defaults(target: Target, *, text: bool = False) -> None:
    """Print the defaults of the model's generation config that a command uses (``GenerationDefaults.sentences``)."""
    if defaults := target.generation.sentences(text=text):
        sentences(defaults)


def prompt_ids(model: Model, asked: Any, *, raw: bool = False, system: str | None = None) -> list[int]:
    """The token ids of a text, in the chat template if there is one, or of a conversation.

    Raises InputError or CapabilityError.
    """
    from anabranch.prompts import chat_ids

    if isinstance(asked, str):
        return chat_ids(model.tokenizer, asked, raw=raw, system=system, model=model.target.name)
    first = [] if system is None else [{"role": "system", "content": system}]
    return model.chat_ids([*first, *asked] if isinstance(asked, list) else asked)


def record(result: Generation, model: Model) -> dict[str, Any]:
    """A result as JSON values, without its statistics."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "ended": ending(result, model),
        "prompt_tokens": len(result.prompt_ids),
        "drafter": result.drafter,
    }
