"""The public face: ``anabranch.load`` and the ``Model`` it returns."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from jinja2 import TemplateError

from anabranch import generation
from anabranch.drafters import AUTO, Drafter, check_spec, make_drafter
from anabranch.engine import Request
from anabranch.errors import CapabilityError, InputError
from anabranch.files import LONE_SURROGATES
from anabranch.generation import Chunk, Generation
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.pool import EnginePool
from anabranch.processor import set_threads
from anabranch.profiles import explain, resolve
from anabranch.sampling import LogitsProcessor, SamplingParams
from anabranch.streams.folder import LoadedAdapter, find_adapter
from anabranch.verify import Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Model", "Options", "load"]

Ids = Sequence[int]
EMPTY = "the prompt is empty; give some text or at least one token id"


class Keywords(TypedDict, total=False):
    """The options of a call as keywords; ``Options`` says what they mean and what they are without being given."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str] | None
    ignore_eos: bool
    drafter: str | None
    rule: Rule
    log_probs: bool
    processors: Sequence[LogitsProcessor]
    rows: int


def load(
    name: str | Path = "default",
    *,
    drafter: str = AUTO,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    quantize: str = "none",
    revision: str | None = None,
    threads: int | None = None,
) -> Model:
    """Load a target and choose how it drafts.

    name     "default" (SmolLM2-135M-Instruct, fetched once), a folder, a .gguf file, or a hub id
    drafter  a method and its settings, see ``anabranch.drafters``; "none" is plain decoding; "auto" is what
             ``anabranch tune`` found best here, or streams with prompt lookup where there is an adapter
    adapter  folder of a stream adapter; None: the one that ships for this target, if any
    dtype    "auto" (bf16 where the weights are), "float32", "bfloat16", "float16"
    quantize "int8" or "int4" weights: that model is then the target, whose own output speculation keeps
    threads  CPU threads of this process; None: torch's choice, at most what the container's quota allows

    Raises FetchError, FileError, ModelError, AdapterError, CapabilityError and DeviceError, each with a sentence that
    says what to do.
    """
    check_spec(drafter)
    if not isinstance(name, str | Path):
        raise InputError(f"a model is named by a string or a path, not {type(name).__name__}")
    set_threads(threads)
    target = load_target(str(name), dtype=dtype, device=device, quantize=quantize, revision=revision)
    loaded = find_adapter(target, None if adapter is None else Path(adapter))
    pack_decoder(target.decoder)
    return Model(target, loaded, drafter)


class Model:
    """A target, its adapter, and engines that are kept between calls.

    Calls of several threads wait for each other: lists of prompts are what is decoded together. A stream lets others in
    between its chunks.
    """

    def __init__(self, target: Target, adapter: LoadedAdapter | None, drafter: str = AUTO) -> None:
        self.target, self.adapter = target, adapter
        self.choice = explain(drafter, target, adapter)  # which drafter, and why
        self.drafter = self.choice.drafter
        self._lock = threading.RLock()
        self._pool = EnginePool(target.decoder, self._make_drafter)
        self._pool.drafter(self.drafter)  # what cannot work is said at once

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.target.tokenizer

    @overload
    def generate(self, prompt: str, **options: Unpack[Keywords]) -> Generation: ...
    @overload
    def generate(self, prompt: list[int], **options: Unpack[Keywords]) -> Generation: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[Keywords]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Sequence[Ids], **options: Unpack[Keywords]) -> list[Generation]: ...
    def generate(
        self, prompt: str | list[int] | Sequence[str] | Sequence[Ids], **options: Unpack[Keywords]
    ) -> Generation | list[Generation]:
        """Decode one prompt, or a list of prompts together.

        A string is decoded as it stands (no chat template), and so is a list of ids. One prompt gives one result, a
        list of prompts a list. Options, all by keyword:

        max_new_tokens=256, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0
        stop=()           strings that end the text; they are not part of it
        ignore_eos=False  go on behind the model's end token
        drafter=None      another drafter for this call; "none" is plain decoding
        rule="follow"     or "reject", where drafts are sampled (streams:tree=chain or tree=product, no pruning)
        log_probs=False   the target's raw log probabilities of the new tokens
        processors=()     functions (tokens so far, logits [V]) -> logits [V]
        rows=8            prompts decoded together at most

        Every prompt of a list uses the same seed: what a prompt yields does not depend on its neighbours. A text that
        reaches the model's limit ends there with the finish reason "length".

        Raises InputError for a prompt or an option that cannot be used, CapabilityError for a combination that is not
        supported, DeviceError where memory does not suffice.
        """
        single, prompts = self._prompts(prompt)
        call = Options.of(options)
        requests = [call.request(ids, self.target) for ids in prompts]
        with self._lock:
            try:
                rows = min(int(call.rows), len(requests))
                engine = self._pool.take(call.drafter or self.drafter, requests, rows=rows)
                found = generation.generate(engine, requests, self.tokenizer, stop=call.stops)
            finally:
                self._pool.settle()
        return found[0] if single else found

    def stream(self, prompt: str | list[int], **options: Unpack[Keywords]) -> Generator[Chunk, None, None]:
        """Decode one prompt and hand out chunks (text, token_ids, sources, step) as they come; options of ``generate``.

        The last chunk carries the ``result``. Closing the generator cancels the decoding and frees its row.
        """
        single, prompts = self._prompts(prompt)
        if not single:
            raise InputError("stream takes one prompt at a time; use generate for a list of prompts")
        call = Options.of(options)
        request = call.request(prompts[0], self.target)
        spec = call.drafter or self.drafter
        with self._lock:
            self._pool.take(spec, [request], rows=1).check(request)  # what cannot work is said at once
        return self._stream(spec, request, call.stops)

    def _stream(self, spec: str, request: Request, stops: Sequence[str]) -> Generator[Chunk, None, None]:
        chunks: Generator[Chunk, None, None] | None = None
        try:
            while True:
                with self._lock:
                    if chunks is None:  # the engine is taken with the first chunk: until then others may use it
                        engine = self._pool.take(spec, [request], rows=1)
                        chunks = generation.stream(engine, request, self.tokenizer, stop=stops)
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            if chunks is not None:
                with self._lock:
                    chunks.close()
                    del engine
                    self._pool.settle()

    def chat(self, messages: Sequence[dict[str, str]], **options: Unpack[Keywords]) -> Generation:
        """Answer a conversation [{"role": "user", "content": "..."}, ...] through the model's chat template."""
        return self.generate(self.chat_ids(messages), **options)

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for an answer by ``generate`` or ``stream``."""
        if not messages:
            raise InputError("the conversation is empty; give at least one message")
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise InputError(f"a message is a dictionary with a role and a content, not {message!r}")
            if not isinstance(message["content"], str):
                raise InputError(f"the content of a message is a text, not {message['content']!r}")
        if not getattr(self.tokenizer, "chat_template", None):
            raise CapabilityError(f"{self.target.name} has no chat template; use generate with a plain prompt")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise InputError(f"the chat template of {self.target.name} refuses this conversation: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: Any) -> list[int]:
        if half := LONE_SURROGATES.search(text):
            raise InputError(f"the prompt is no valid text: {half[0]!r} at {half.start()} is half a character")
        return list(self.tokenizer.encode(text, **options))

    def _make_drafter(self, spec: str) -> Drafter:
        known = resolve(spec, self.target, self.adapter)
        return make_drafter(known, self.target.decoder, None if self.adapter is None else self.adapter.adapter)

    def _prompts(self, prompt: Any) -> tuple[bool, list[list[int]]]:
        if isinstance(prompt, str):
            return True, [self._encode(prompt)]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError(
                f"a prompt is a string, a list of token ids, or a list of these, not {type(prompt).__name__}"
            )
        if len(prompt) == 0:
            raise InputError(EMPTY)
        if _are_ids(prompt):
            return True, [[int(token) for token in prompt]]
        many: list[list[int]] = []
        for item in prompt:
            if isinstance(item, str):
                many.append(self._encode(item))
            elif isinstance(item, Sequence) and not isinstance(item, bytes) and _are_ids(item):
                if not item:
                    raise InputError(EMPTY)
                many.append([int(token) for token in item])
            else:
                raise InputError(f"a list of prompts holds strings or lists of token ids, not {item!r}")
        return False, many

    def _encode(self, text: str) -> list[int]:
        ids = self._ids(text)
        if not text or not ids:
            raise InputError(EMPTY)
        return ids


@dataclass(frozen=True)
class Options:
    """The options of one call; see ``Model.generate``. Raises InputError for a value that means nothing."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False
    drafter: str | None = None
    rule: Rule = "follow"
    log_probs: bool = False
    processors: Sequence[LogitsProcessor] = ()
    rows: int = 8

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.rule not in ("follow", "reject"):
            raise InputError(f"rule must be 'follow' or 'reject', not {self.rule!r}")
        if self.drafter is not None:
            check_spec(self.drafter)
        if not isinstance(self.stop, str | Sequence | None) or any(
            not isinstance(text, str) or not text for text in self.stops
        ):
            raise InputError(f"stop takes strings of at least one character, not {self.stop!r}")
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise InputError(f"processors are a list of functions, not {self.processors!r}")
        _ = self.sampling

    @staticmethod
    def of(keywords: Keywords) -> Options:
        """From the keywords of a call."""
        known = Options.__dataclass_fields__
        if unknown := sorted(set(keywords) - set(known)):
            raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(known)}")
        return Options(**keywords)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling(self) -> SamplingParams:
        """The law that tokens are drawn from."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            processors=tuple(self.processors),
        )

    def request(self, prompt_ids: list[int], target: Target) -> Request:
        """What the engine is asked for."""
        stop_ids = frozenset() if self.ignore_eos else frozenset(target.config.eos_token_ids)
        return Request(prompt_ids, int(self.max_new_tokens), self.sampling, stop_ids, self.rule, self.log_probs)


def _are_ids(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Integral) and not isinstance(item, bool) for item in items)
