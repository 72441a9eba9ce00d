"""The public face: ``anabranch.load`` and the ``Model`` it returns."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from anabranch import generation
from anabranch.drafters import make_drafter
from anabranch.engine import Engine, Request
from anabranch.errors import CapabilityError, InputError
from anabranch.generation import Chunk, Generation
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.sampling import LogitsProcessor, SamplingParams
from anabranch.streams.folder import LoadedAdapter, find_adapter
from anabranch.verify import Rule

__all__ = ["Model", "load"]

Ids = Sequence[int]
MIN_CAPACITY = 512


def load(
    name: str = "default",
    *,
    drafter: str = "streams",
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    revision: str | None = None,
) -> Model:
    """Load a target and choose how it drafts.

    name     "default" (SmolLM2-135M-Instruct, fetched once), a folder, a .gguf file, or a hub id
    drafter  a method and its settings, see ``anabranch.drafters``; "none" is plain decoding
    adapter  folder of a stream adapter; None: the one that ships for this target, if any
    dtype    "auto" (bf16 where the weights are), "float32", "bfloat16", "float16"

    Raises FetchError, FileError, ModelError, AdapterError, CapabilityError and DeviceError, each with a sentence that
    says what to do.
    """
    target = load_target(name, dtype=dtype, device=device, revision=revision)
    loaded = find_adapter(target, None if adapter is None else Path(adapter))
    pack_decoder(target.decoder)
    return Model(target, loaded, drafter)


class Model:
    """A target, its adapter, and engines that are kept between calls. Not for use by several threads at once."""

    def __init__(self, target: Target, adapter: LoadedAdapter | None, drafter: str = "streams") -> None:
        self.target, self.adapter, self.drafter = target, adapter, drafter
        self._engines: dict[str, Engine] = {}
        self._make_drafter(drafter)  # what cannot work is said at once

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.target.tokenizer

    @overload
    def generate(self, prompt: str, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: list[int], **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Sequence[Ids], **options: Any) -> list[Generation]: ...
    def generate(
        self, prompt: str | list[int] | Sequence[str] | Sequence[Ids], **options: Any
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

        Every prompt of a list uses the same seed: what a prompt yields does not depend on its neighbours.
        """
        single, prompts = self._prompts(prompt)
        call = _Options(**_checked(options))
        requests = [call.request(ids, self.target) for ids in prompts]
        engine = self._engine(call.drafter or self.drafter, requests, rows=min(call.rows, len(requests)))
        found = generation.generate(engine, requests, self.tokenizer, stop=call.stop)
        return found[0] if single else found

    def stream(self, prompt: str | list[int], **options: Any) -> Generator[Chunk, None, Generation | None]:
        """Decode one prompt and hand out chunks (text, token_ids, sources, step) as they come; options of ``generate``.

        Closing the generator cancels the decoding and frees its row.
        """
        single, prompts = self._prompts(prompt)
        if not single:
            raise InputError("stream takes one prompt at a time; use generate for a list of prompts")
        call = _Options(**_checked(options))
        request = call.request(prompts[0], self.target)
        engine = self._engine(call.drafter or self.drafter, [request], rows=1)
        return generation.stream(engine, request, self.tokenizer, stop=call.stop)

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Generation:
        """Answer a conversation [{"role": "user", "content": "..."}, ...] through the model's chat template."""
        return self.generate(self.chat_ids(messages), **options)

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for an answer."""
        if not messages:
            raise InputError("the conversation is empty; give at least one message")
        if not getattr(self.tokenizer, "chat_template", None):
            raise CapabilityError(f"{self.target.name} has no chat template; use generate with a plain prompt")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _make_drafter(self, spec: str) -> Any:
        return make_drafter(spec, self.target.decoder, None if self.adapter is None else self.adapter.adapter)

    def _prompts(self, prompt: Any) -> tuple[bool, list[list[int]]]:
        if isinstance(prompt, str):
            return True, [self._encode(prompt)]
        if not isinstance(prompt, Sequence):
            raise InputError(f"a prompt is a string, a list of token ids, or a list of these, not {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InputError("the prompt is empty; give some text or at least one token id")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return True, [list(prompt)]
        many: list[list[int]] = []
        for item in prompt:
            if isinstance(item, str):
                many.append(self._encode(item))
            elif isinstance(item, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in item):
                if not item:
                    raise InputError("the prompt is empty; give some text or at least one token id")
                many.append(list(item))
            else:
                raise InputError(f"a list of prompts holds strings or lists of token ids, not {type(item).__name__}")
        return False, many

    def _encode(self, text: str) -> list[int]:
        ids = list(self.tokenizer.encode(text))
        if not text or not ids:
            raise InputError("the prompt is empty; give some text or at least one token id")
        return ids

    def _engine(self, spec: str, requests: Sequence[Request], *, rows: int) -> Engine:
        limit = self.target.config.max_positions
        wanted = min(limit, max(len(request.prompt_ids) + request.max_new_tokens for request in requests))
        kept = self._engines.get(spec)
        if kept is not None and kept.active == 0 and kept.capacity >= wanted and kept.cache.rows >= rows:
            return kept
        if kept is not None and kept.active > 0:
            # somebody still listens to a stream of it
            return Engine(self.target.decoder, self._make_drafter(spec), rows=rows, capacity=wanted)
        capacity = min(limit, max(MIN_CAPACITY, 1 << (wanted - 1).bit_length()))
        self._engines.pop(spec, None)
        engine = Engine(self.target.decoder, self._make_drafter(spec), rows=rows, capacity=capacity)
        self._engines[spec] = engine
        return engine


class _Options:
    """The options of one call."""

    def __init__(
        self,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        drafter: str | None = None,
        rule: Rule = "follow",
        log_probs: bool = False,
        processors: Sequence[LogitsProcessor] = (),
        rows: int = 8,
    ) -> None:
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}")
        if not isinstance(rows, int) or rows < 1:
            raise InputError(f"rows must be a whole number of at least 1, not {rows!r}")
        if rule not in ("follow", "reject"):
            raise InputError(f"rule must be 'follow' or 'reject', not {rule!r}")
        self.sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            processors=tuple(processors),
        )
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.max_new_tokens, self.ignore_eos, self.drafter = max_new_tokens, ignore_eos, drafter
        self.rule, self.log_probs, self.rows = rule, log_probs, rows

    def request(self, prompt_ids: list[int], target: Target) -> Request:
        stop_ids = frozenset() if self.ignore_eos else frozenset(target.config.eos_token_ids)
        return Request(prompt_ids, self.max_new_tokens, self.sampling, stop_ids, self.rule, self.log_probs)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    known = _Options.__init__.__kwdefaults__ or {}
    if unknown := sorted(set(options) - set(known)):
        raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(known)}")
    return options
