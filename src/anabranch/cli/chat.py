"""``anabranch chat``: a conversation with a model."""

from __future__ import annotations

import difflib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options, show
from anabranch.cli.configured import chosen, configured
from anabranch.cli.keyboard import Reader, reader
from anabranch.cli.show import note
from anabranch.declared import Keywords
from anabranch.errors import AnabranchError, FileError, InputError
from anabranch.loading import LoadConfig
from anabranch.support.files import cache_home, check_writable, write_atomically
from anabranch.support.interrupt import Terminated

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.decoding.generation import Generation
    from anabranch.decoding.stats import Stats

__all__ = ["ChatConfig", "chat"]

COMMAND = re.compile(r"/([a-z]*!?)(?:\s+(.*))?", re.DOTALL)
COMMANDS = {
    "/help": "show this list",
    "/reset": "start over; keeps the system prompt",
    "/system [TEXT]": "show or set the system prompt; -: none",
    "/retry": "answer the last message again",
    "/drafter [NAME]": "show or change the drafter",
    "/stats": "show speed and acceptance",
    "/save FILE": "save as JSON; /save! replaces a file",
    "/quit": "leave",
}
KEYS = {
    "Enter": "send",
    "Alt+Enter": "start a new line; so does \\ then Enter",
    "Up, Down": "bring back earlier messages",
    "Ctrl-C": "stop the answer, or clear the line",
    "Ctrl-D": "leave",
}


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """The options of ``anabranch chat``."""

    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.DefaultDrafter = None
    system: options.System = None
    call: Keywords = field(
        default_factory=chosen("max_new_tokens", "min_new_tokens", *options.SAMPLING, "rule", max_new_tokens=512)
    )
    show_drafts: options.ShowDrafts = False
    stats: Annotated[bool, typer.Option("--stats", help="show speed and acceptance after each answer")] = False
    no_history: Annotated[bool, typer.Option("--no-history", help="keep no history file of what was typed")] = False


@configured
def chat(config: ChatConfig) -> None:
    """Chat with a model. Type /help for the commands; Ctrl-D leaves, Ctrl-C stops an answer.

    The text of a stopped answer stays in the conversation. From a pipe, every line is a message.
    """
    from anabranch.decoding.ticks import KEPT_SHARE

    with show.Wait() as wait:
        loaded = show.load_model(config.loading, config.drafter, config.call, wait)
        loaded.keep_prefixes(memory=KEPT_SHARE)
        talk = Conversation(loaded, config)
        talk.prompt_ids([{"role": "user", "content": "hello"}])  # raises for a model without a chat template
        words = [command.split()[0] for command in COMMANDS]
        source = reader(None if config.no_history else cache_home() / "chat_history", words)
    if source.interactive:
        show.sentences([loaded.target.title, f"drafter {loaded.drafter}", *show.lesser_kernels(loaded)])
        note("/help lists the commands, Ctrl-D leaves")
    _converse(talk, source)
    talk.farewell()


def _converse(talk: Conversation, source: Reader) -> None:
    """Read messages and commands until the end of the input."""
    while True:
        try:
            said = source.read()
        except Terminated:
            raise
        except KeyboardInterrupt:
            if not source.interactive:
                raise
            continue
        if said is None:
            return
        if not said.strip():
            continue
        try:
            if not talk.take(said):
                return
        except AnabranchError as error:
            note(f"error: {error}")
        except Terminated:
            raise
        except KeyboardInterrupt:
            if not source.interactive:
                raise
            note("stopped; /retry sends the last message again")


class Conversation:
    """The messages of a conversation and the statistics of the answers. A failed message leaves it unchanged."""

    def __init__(self, model: Model, config: ChatConfig) -> None:
        self.model, self.call, self.system = model, config.call, config.system
        self.shows_stats, self.show_drafts = config.stats, config.show_drafts
        self.messages: list[dict[str, Any]] = []
        self.drafter = str(model.drafter)
        self.answered: list[Stats] = []
        self._question: str | None = None  # the last message, answered or not
        seed = config.call["seed"]
        self._seed = seed if isinstance(seed, int) else seed[0]
        self._last: list[str] = []  # summary of the last complete answer
        self._full: list[int] | None = None  # the prompt of the last answer, if that was completed

    def take(self, said: str) -> bool:
        """Answer a message or run a command; returns False to end the conversation."""
        command = COMMAND.fullmatch(said.strip()) if said.startswith("/") else None
        if command is None:
            self.ask(said)
            return True
        name, rest = command[1], (command[2] or "").strip()
        if name in ("quit", "exit"):
            return False
        run = getattr(self, f"_{name.rstrip('!')}", None) if f"/{name}" in _names() else None
        if run is None:
            self._unknown(name)
        elif name == "save!":
            self._save(rest, replace=True)
        else:
            run(rest)
        return True

    # -- questions and answers --------------------------------------------------------------------------
    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of the system prompt and the messages."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        spoken = [{"role": message["role"], "content": message["content"]} for message in messages]
        return self.model.chat_ids(first + spoken)

    def ask(self, said: str) -> None:
        """Answer ``said``. Raises AnabranchError and leaves the conversation unchanged if that fails."""
        self._question = said
        self._answer([*self.messages, {"role": "user", "content": said}])

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        ids, limit = self.prompt_ids(messages), self.model.target.config.max_positions
        if len(ids) >= limit:
            raise InputError(
                f"with this message the conversation has {len(ids):,} tokens, and the model's limit is {limit:,}; "
                "/save FILE saves it, /reset starts a new one, and /retry then sends the message again"
            )
        marker = show.Marker(self.model.tokenizer) if self.show_drafts else None
        with _stoppable() as stopped, show.Wait() as wait:
            progress = show.prompt_progress(wait)

            def on_prompt(done: int, total: int) -> None:
                if stopped():
                    raise KeyboardInterrupt
                progress(done, total)

            call: Keywords = {
                **self.call,
                "seed": self._seed,
                "drafter": self.drafter,
                "on_prompt": on_prompt,
            }
            text, result = show.show(self.model.stream(ids, **call), wait=wait, marker=marker, stopped=stopped)
        if result is None and not text:
            note("stopped before the answer began; /retry sends the message again")
            return
        answer = {"role": "assistant", "content": text}
        self.messages = [*messages, answer if result is not None else {**answer, "interrupted": True}]
        self._full = ids if result is not None else None
        if result is None:
            note("stopped; the answer so far is kept")
            return
        if marker is not None:
            typer.echo(marker.legend(result.stats), err=True)
        self._count(result)

    def _count(self, result: Generation) -> None:
        """Add an answer to the statistics; print why it ended, unless the model ended it."""
        self.answered.append(result.stats)
        ended = show.ending(result, self.model)
        why = show.explained(ended, result, self.model, more="start chat with --max-new-tokens")
        if ended == "model_limit":
            why += "; /reset starts a new conversation"
        self._last = [*show.rates(result.stats, result.drafter), *show.lesser_kernels(self.model), why]
        if self.shows_stats:
            show.sentences(self._last)
        elif ended != "end_token":
            note(why)

    # -- commands ----------------------------------------------------------------------------------------
    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        print("\n".join(f"{name:{width}}  {does}" for name, does in (COMMANDS | KEYS).items()))

    def _reset(self, _: str) -> None:
        self.messages, self._full = [], None
        note("new conversation")

    def _system(self, text: str) -> None:
        if text:
            before, self.system = self.system, None if text == "-" else text
            try:
                self.prompt_ids([{"role": "user", "content": "hello"}])
            except AnabranchError:
                self.system = before
                raise
        note("no system prompt" if self.system is None else f"system prompt: {self.system}")

    def _retry(self, _: str) -> None:
        if self._question is None:
            raise InputError("there is no message to answer again; send one first")
        messages = self.messages
        if len(messages) >= 2 and messages[-2]["content"] == self._question:
            messages = messages[:-2]
        messages = [*messages, {"role": "user", "content": self._question}]
        if self.call["temperature"] == 0 and self.prompt_ids(messages) == self._full:
            note("the answer is the same at temperature 0; start chat with --temperature 0.7 for others")
        self._seed += 1
        self._answer(messages)

    def _drafter(self, spec: str) -> None:
        from anabranch.methods import resolve_spec

        if spec:
            modules = [loaded.module for loaded in self.model.adapters]
            spec = str(resolve_spec(spec, *modules))
            call: Keywords = {**self.call, "drafter": spec}
            self.model.stream(self.prompt_ids([{"role": "user", "content": "hello"}]), **call).close()  # may raise
            self.drafter = spec
        note(f"drafter {self.drafter}")

    def _stats(self, _: str) -> None:
        if not self._last:
            raise InputError("there is no complete answer yet; send a message first")
        show.sentences(self._last)
        if len(self.answered) > 1:
            show.sentences(self._all())

    def _save(self, name: str, *, replace: bool = False) -> None:
        if not name:
            raise InputError("/save takes a file name: /save FILE")
        path = Path(name).expanduser()
        check_writable(path, "the conversation", "file")
        if path.exists() and not replace:
            raise FileError(f"{path} exists already; give another name, or '/save! {name}' to replace it")
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        write_atomically(path, json.dumps(first + self.messages, ensure_ascii=False, indent=1) + "\n")
        note(f"saved {len(first + self.messages)} messages to {path}")

    def _unknown(self, name: str) -> None:
        near = difflib.get_close_matches(f"/{name}", _names(), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        note(f"there is no command /{name}; {hint}/help lists them, and a space before the / sends it as a message")

    def _all(self) -> list[str]:
        from anabranch.decoding.stats import Stats

        many = len(self.answered)
        return [f"{many} answers in total", *show.rates(Stats.merged(self.answered), prompts=many)]

    def farewell(self) -> None:
        """Print the statistics of all answers."""
        if len(self.answered) == 1:
            show.sentences(self._last)
        elif self.answered:
            show.sentences([*self._all(), *show.lesser_kernels(self.model)])


def _names() -> list[str]:
    return [*(command.split()[0] for command in COMMANDS), "/save!"]


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Inside the block, Ctrl-C requests a stop after the current step; a second one raises KeyboardInterrupt.

    So the text shown is the text kept, and the engine is not interrupted within a step. Yields a function that returns
    whether to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    stopping = False

    def ask(number: int, frame: Any) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: stopping
    finally:
        signal.signal(signal.SIGINT, before)
