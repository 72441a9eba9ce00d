"""The public interface: ``anabranch.load`` and the ``Model`` it returns."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, overload

import torch
from torch import nn

from anabranch import loading
from anabranch.adapters.folder import LoadedAdapter
from anabranch.capabilities import Support, check_named_once, refuse, support_of
from anabranch.control.profiles import Known, Situation, keep_choice, settle, tuned_drafter
from anabranch.declared import ChatKeywords, Keywords
from anabranch.decoding import generation
from anabranch.decoding.generation import Chunk, Generation
from anabranch.decoding.prefix_files import PrefixFiles
from anabranch.decoding.prefixes import Prefixes
from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.scoring import Score, perplexity, score
from anabranch.decoding.ticks import kept_bytes
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import LoadConfig
from anabranch.methods import AUTO, Drafter, Spec, make_drafter, parse_spec, resolve_spec
from anabranch.model.kernel_use import kernels_of
from anabranch.model.load import Target
from anabranch.options import Options, chat_options
from anabranch.prompts import Arrays, Ids, check_stream, conversation_ids, read_prompts
from anabranch.speech.audio import RATE, read_audio
from anabranch.speech.options import SpeechCall, checked
from anabranch.speech.transcripts import Transcript, transcribe
from anabranch.support.background import Worker
from anabranch.support.files import cache_home
from anabranch.support.forks import renewed_after_fork
from anabranch.support.log import LOGGER
from anabranch.support.memory import give_back
from anabranch.support.plain_torch import in_plain_torch

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Keywords", "Model", "Options", "load"]

T = TypeVar("T")
Many: TypeAlias = list[str] | tuple[str, ...] | Sequence[Ids]


def load(
    name: str | Path = "default",
    *,
    drafter: str | None = None,
    adapter: str | Path | Sequence[str | Path] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    quantize: str = "auto",
    revision: str | None = None,
    threads: int | None = None,
    lora: str | Path | None = None,
    loras: Mapping[str, str | Path] | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    cache: bool = True,
    kv: str = "auto",
) -> Model:
    """Load a target and its adapters.

    name      "default" (SmolLM2-135M-Instruct, downloaded once), a folder, a .gguf file, or a Hugging Face hub id
    drafter   a method and its settings, see ``anabranch.methods``; "none" is plain decoding; "auto" drafts with the
              adapter's method and with prompt lookup, and adapts the size of drafts to the load. With adapters of
              several methods, it uses for each prompt the one that was the fastest in recent steps. None: "auto", or
              for calls with one prompt the drafter that ``anabranch tune`` found to be faster on this machine
    adapter   an adapter folder, or several; None: those shipped for this target
    dtype     "auto" (bf16 if the weights are stored so), "float32", "bfloat16" or "float16"
    device    "auto" (cuda if available), "cpu", "cuda" or "cuda:N"
    quantize  "auto": the weights that the file has, those of a quantised GGUF file multiplied as they are stored;
              "none": dequantised; "int8" or "int4": rounded. The quantised model is the target
    revision  branch, tag or commit of a hub id; None: its main branch
    threads   CPU threads of this process; None: torch's default, limited to the container's quota
    lora      a LoRA folder in PEFT's format, merged into the weights; the tuned model is then the target
    loras     LoRA folders by name, of which each call of ``generate`` chooses one or none (``lora="name"``). Calls with
              different LoRAs share forward passes
    adapters  adapter folders by name, of which each call chooses one (``adapter="name"``) or the model's own. A LoRA
              that was trained together with one is loaded with it, and ``loras`` of the same name are decoded with it
    cache     keep packed weights in the user's cache directory, where the next load finds them
    kv        "auto": keys and values have the type of the weights; "int8": 8 bits each, with a scale for every 32 of
              them, 9/16 of the memory of bf16. The model with this cache is the target. Native kernels only

    Raises FetchError, FileError, ModelError, AdapterError, CapabilityError or DeviceError; the message says what to do.
    """
    if drafter is not None:
        parse_spec(drafter)
    if not isinstance(name, str | Path):
        raise InputError(f"a model is named by a string or a path, got {type(name).__name__}")
    given = () if adapter is None else (adapter,) if isinstance(adapter, str | Path) else tuple(adapter)
    tuned = None if lora is None else Path(lora)
    several, choices = (
        tuple((str(each), Path(folder)) for each, folder in (named or {}).items()) for named in (loras, adapters)
    )
    where = dtype, device, quantize, revision, threads
    more: dict[str, Any] = {"lora": tuned, "loras": several, "choices": choices, "cache": cache, "kv": kv}
    loaded = loading.load(LoadConfig(str(name), tuple(map(Path, given)), *where, **more))
    return Model(loaded.target, loaded.adapters, drafter, choices=loaded.choices)


DRAFTERS = 8  # the most recently used ones are kept
SECONDS = 5.0  # between two times that the yields of the drafters of "auto" are stored


class Model:
    """A target with its adapters, and one scheduler that serves all calls.

    Calls from several threads are batched, first come, first served; the result of a prompt does not depend on the
    others. ``close``, or leaving a ``with`` block, frees the memory.

    ``generate``, ``stream``, ``chat`` and ``chat_stream`` have asyncio counterparts that take the same arguments:
    ``agenerate``, ``astream``, ``achat`` and ``achat_stream``. They decode in worker threads and do not block the event
    loop. A cancelled call stops after its current step.
    """

    def __init__(
        self,
        target: Target,
        adapters: Sequence[LoadedAdapter] = (),
        drafter: str | Spec | None = None,
        *,
        choices: Mapping[str, LoadedAdapter] | None = None,
    ) -> None:
        self._target: Target | None = target
        self.adapters, self.choices = tuple(adapters), dict(choices or {})
        self._named = drafter is not None  # the drafter was, so it is that of calls with other adapters, too
        chosen = tuned_drafter(target, adapters) if drafter is None else drafter
        self.spec = resolve_spec(chosen, *self._modules)
        # of several prompts at a time: what was tuned with one at a time does not follow the load
        self.spec_of_several = self.spec if drafter is not None else resolve_spec(AUTO, *self._modules)
        self.known: Known | None = None  # step costs, measured when a drafter first needs them
        self.after_fork()
        renewed_after_fork(self)
        self._worker = Worker()
        self._drafters: dict[tuple[str | None, str], Drafter] = {}
        self._stored = -math.inf  # when the yields of the drafters of "auto" were last stored
        self._scheduler = Scheduler(target.decoder)
        self.drafter_of(self.spec)  # raise for unsupported combinations now

    def after_fork(self) -> None:
        """Replace the lock, in a forked child: a thread of the parent may hold it."""
        self._lock = threading.RLock()

    @property
    def drafter(self) -> str:
        """The default drafter of single prompts, with "auto" resolved unless it chooses between several adapters."""
        return str(self.spec)

    @property
    def adapter(self) -> LoadedAdapter | None:
        """The first adapter, or None."""
        return self.adapters[0] if self.adapters else None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of all calls, for callers that work with token ids instead of text."""
        return self._scheduler

    def keep_prefixes(self, *, memory: float | None = None, disk: int = 0, folder: str | Path | None = None) -> None:
        """Set how much is kept of the keys and values of texts that ended, which later prompts may begin like.

        memory  bytes, or below 1 a share of the memory that is free now; None: 64 MiB, or an eighth of the weights
                if more
        disk    bytes of files, so that conversations survive a restart; 0: none. They hold the tokens of the texts
        folder  of the files, of which other models' count too; None: in the cache folder

        Raises InputError for negative sizes, and FileError for a folder that cannot be written.
        """
        for name, size in (("memory", memory or 0), ("disk", disk)):
            if size < 0:
                raise InputError(f"{name} must be at least 0, got {size}")
        files = None
        if disk:
            facts = Situation.of(self.target, self.adapters)
            if facts.kernels != "torch":  # their results do not depend on the number of threads
                facts = replace(facts, threads=0)
            files = PrefixFiles(cache_home() / "prefixes" if folder is None else Path(folder), repr(facts), disk)
        self._scheduler.keep(Prefixes(kept_bytes(self.target.decoder, memory), files))

    @property
    def _modules(self) -> list[nn.Module]:
        return [loaded.module for loaded in self.adapters]

    @in_plain_torch
    def _built(self, spec: str | Spec, adapter: str | None = None) -> Drafter:
        """The drafter of a specification, from the cache or newly built. Raises what ``make_drafter`` raises.

        adapter  the name of the one that a call chose, which "auto" drafts with alone
        """
        with self._lock:
            modules = [*(() if adapter is None else (self.choices[adapter].module,)), *self._modules]
            resolved = resolve_spec(spec, *(modules if adapter is None else modules[:1]))
            name = (adapter, str(resolved))
            drafter = self._drafters.pop(name, None)
            if drafter is None:
                LOGGER.debug("building the drafter %s", resolved)
                drafter = make_drafter(resolved, self.target.decoder, *modules)
            while len(self._drafters) >= DRAFTERS:
                del self._drafters[next(iter(self._drafters))]
            self._drafters[name] = drafter
            return drafter

    def drafter_for(self, call: Options, several: bool) -> Drafter:
        """The drafter of a call, of several prompts or of one: its own, or else that of its adapter or of the model.

        Raises what ``make_drafter`` raises, and InputError for an adapter that was not loaded.
        """
        return self.drafter_of(*self._spec_for(call, several))

    def _spec_for(self, call: Options, several: bool) -> tuple[str | Spec, str | None]:
        """The specification of a call's drafter, and the name of the adapter that it drafts with."""
        adapter = call.adapter(self.choices)
        if adapter is not None and not self._named:
            return call.drafter or AUTO, adapter
        return call.drafter or (self.spec_of_several if several else self.spec), adapter

    @in_plain_torch
    def drafter_of(self, spec: str | Spec, adapter: str | None = None) -> Drafter:
        """The drafter of a specification, ready to decode: if it follows the load, steps were timed.

        adapter  the name of the one to draft with; None: the model's own

        Raises what ``make_drafter`` raises.
        """
        with self._lock:
            drafter = self._built(spec, adapter)
            if drafter.adaptive and self.known is None:
                self.known = settle(self.target, self.adapters)
                self._scheduler.use(self.known.controller(self.target.decoder))
            return drafter

    def settle(self) -> None:
        """After a call, free an idle cache that is large, and store the yields of the drafters of "auto"."""
        self._scheduler.settle()
        now = time.monotonic()
        if now >= self._stored + SECONDS and self._store_choice():
            self._stored = now

    def _store_choice(self) -> bool:
        """Store the yields of the drafters that "auto" chooses from, if they changed; returns whether they did."""
        with self._lock:
            choice = None if self.known is None else self.known.choice
            if self._target is None or choice is None or not choice.changed:
                return False
            keep_choice(Situation.of(self._target, self.adapters), choice)
            return True

    def __repr__(self) -> str:
        if self._target is None:
            return "Model(closed)"
        target, decoder = self._target, self._target.decoder
        dtype = str(decoder.dtype).removeprefix("torch.")
        facts = {
            **({} if target.lora is None else {"lora": repr(target.lora.name)}),
            **({"loras": list(decoder.loras.names)} if decoder.loras.names else {}),
            **({"adapters": list(self.choices)} if self.choices else {}),
            "adapter": None if self.adapter is None else repr(_described(self.adapter)),
            "drafter": repr(self.drafter),
            "dtype": dtype if target.quantize == "none" else f"{dtype}, quantize={target.quantize!r}",
            **({"kv": "'int8'"} if decoder.quantized_cache else {}),
            "device": str(decoder.device),
            "kernels": kernels_of(decoder).name,
            "threads": self.threads,
            **({"defaults": target.generation.honoured} if target.generation.honoured else {}),
        }
        return f"Model({target.name!r}, {', '.join(f'{name}={value}' for name, value in facts.items())})"

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and caches and stop the worker threads. A closed model cannot decode."""
        if self._target is None:
            return
        with self._lock:
            self._worker.close()
            self._scheduler.close()
            self._store_choice()
            self._drafters.clear()
            self._target, self.adapters, self.choices = None, (), {}
        give_back()

    @property
    def target(self) -> Target:
        """The model whose output is reproduced. Raises InputError if this model is closed."""
        if self._target is None:
            raise InputError("this model is closed; load it again")
        return self._target

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.target.tokenizer

    @property
    def threads(self) -> int:
        """The number of CPU threads used by a call from this thread; ``load(threads=)`` sets it for the process."""
        return torch.get_num_threads()

    @overload
    def generate(self, prompt: str | list[int], **options: Unpack[Keywords]) -> Generation: ...
    @overload
    def generate(self, prompt: Many, **options: Unpack[Keywords]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Arrays, **options: Unpack[Keywords]) -> Generation | list[Generation]: ...
    def generate(
        self, prompt: str | list[int] | Many | Arrays, **options: Unpack[Keywords]
    ) -> Generation | list[Generation]:
        """Decode one prompt, or a batch of prompts.

        A prompt is a string (used as is, without a chat template) or token ids: a list, or an integer tensor or array.
        One prompt returns one result; a list of prompts, or an array [B, L], returns a list. An encoding returned by
        the tokenizer is accepted too; its padding is removed. For an encoder-decoder model, the prompt is the source.
        Options, all by keyword:

        max_new_tokens=256, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0
        stop=()           strings that end the text and are not part of it
        stop_token_ids=() token ids that end the text, besides the model's own
        ignore_eos=False  continue after the model's end token
        drafter=None      a drafter for this call; "none" is plain decoding
        rule="match"      the verification rule; "rejection" requires a drafter that samples its drafts
        log_probs=False   return the target's raw log probabilities of the new tokens
        top_log_probs=0   return those of so many of the most probable tokens at each place
        n=1               the number of samples: with more, the result of a prompt is a list
        processors=()     functions (tokens so far, logits [V]) -> logits [V]
        rows=8            maximum number of prompts decoded at the same time
        lora=None         the name of a loaded LoRA (``load(loras=)``); None: the target as it is
        adapter=None      the name of a loaded adapter (``load(adapters=)``) to draft with, and of the LoRA, if one has
                          its name; None: that of the LoRA's name, if there is one, or else the model's own
        on_prompt=None    function (prompt tokens processed, prompt tokens in total), called after each chunk of 512

        prediction=None   text (or token ids) that the new one is expected to resemble: it becomes drafts, and changes
                          nothing but the speed (``stats.accepted_prediction_tokens``)

        At most one of these says which texts there are (docs/structure.md); the text ends where it is one of them:

        schema=None       write JSON of a JSON schema: a dictionary, its JSON, or a pydantic model
        regex=None        write a text that matches a regular expression
        grammar=None      write a text of a Lark grammar

        These change scores by the tokens so far, as the options of transformers' ``generate`` of the same names do (see
        docs/python.md): repetition_penalty, no_repeat_ngram_size, sequence_bias, logit_bias, bad_words_ids,
        suppress_tokens, begin_suppress_tokens, min_new_tokens, min_length, forced_bos_token_id, forced_eos_token_id,
        exponential_decay_length_penalty, encoder_repetition_penalty, encoder_no_repeat_ngram_size,
        remove_invalid_values. presence_penalty and frequency_penalty are those of OpenAI's API.

        An option that is None, or left out, has the default of the model's generation config if that states one.

        All prompts of a list use the same seed, or each its own in a list of seeds; the samples of a prompt count up
        from it. So the result of a prompt does not depend on the others. A sequence that reaches the model's context
        length ends with the finish reason "length".

        Raises InputError for an invalid prompt or option, CapabilityError for an unsupported combination, and
        DeviceError if memory runs out.
        """
        result: Generation | list[Generation] = self._generate(prompt, options)
        return result

    def _generate(self, prompt: Any, options: Keywords, cancelled: threading.Event | None = None) -> Any:
        single, prompts = read_prompts(prompt, self.tokenizer)
        call = Options(options)
        seeds = call.seeds(len(prompts))
        requests = [
            call.request(ids, self.target, seed) for ids, own in zip(prompts, seeds, strict=True) for seed in own
        ]
        drafter = self.drafter_for(call, len(requests) > 1)
        try:
            results = generation.generate(
                *(self._scheduler, requests, drafter, self.tokenizer),
                stop=call.stops(self.target),
                rows=int(call.values["rows"]),
                cancelled=cancelled,
            )
        finally:
            self.settle()
        if (n := int(call.values["n"])) > 1:
            samples = [results[at : at + n] for at in range(0, len(results), n)]
            return samples[0] if single else samples
        return results[0] if single else results

    def stream(self, prompt: str | list[int] | Arrays, **options: Unpack[Keywords]) -> Generator[Chunk, None, None]:
        """Decode one prompt and yield each step's chunk (text, token_ids, sources, step); options as for ``generate``.

        The last chunk holds the ``result``. Closing the generator cancels decoding and frees its row.
        """
        _, prompts = read_prompts(prompt, self.tokenizer)
        check_stream(len(prompts))
        call = Options(options)
        call.seeds(1)
        call.check_single()
        request = call.request(prompts[0], self.target)
        drafter, stop = self.drafter_for(call, several=False), call.stops(self.target)
        return self._settled(generation.stream(self._scheduler, request, drafter, self.tokenizer, stop=stop))

    def _settled(self, chunks: Generator[T, None, None]) -> Generator[T, None, None]:
        try:
            with closing(chunks):
                yield from chunks
        finally:
            self.settle()

    @overload
    def transcribe(self, audio: list[Any] | tuple[Any, ...], **options: Unpack[SpeechCall]) -> list[Transcript]: ...
    @overload
    def transcribe(self, audio: Any, **options: Unpack[SpeechCall]) -> Transcript: ...
    def transcribe(self, audio: Any, **options: Unpack[SpeechCall]) -> Transcript | list[Transcript]:
        """Transcribe a sound, or several, with a Whisper model; ``str(result)`` is the text.

        A sound is the path of a WAV file, or an array or tensor [samples] of one channel: floats in [-1, 1], or
        integers of their type's range. A list or tuple of sounds returns a list. Options, all by keyword:

        language=None                code or name of the language; None: detected in the first 30 s of each sound
        task="transcribe"            or "translate", to English
        timestamps=True              segments with times; else one segment for each window
        parallel=False               cut sounds at pauses and decode all windows together, none with the text before it
        condition_on_previous_text=True, initial_prompt=""
        temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  tried until a text is neither improbable nor repetitive
        compression_ratio_threshold=2.4, log_prob_threshold=-1.0, no_speech_threshold=0.6
        seed=0                       for temperatures above 0
        drafter=None                 a drafter for this call; "none" is plain decoding
        rows=4                       maximum number of windows decoded at the same time
        on_progress=None             function (seconds of sound done, seconds in total)
        sampling_rate=16000          of arrays, in Hz

        Raises FileError for a file that is no WAV file, InputError for an invalid option or array, CapabilityError for
        a model that reads text.
        """
        several = isinstance(audio, list | tuple)
        transcripts = list(self.transcripts(audio if several else [audio], **options))
        return transcripts if several else transcripts[0]

    def transcripts(self, audio: Sequence[Any], **options: Unpack[SpeechCall]) -> Generator[Transcript, None, None]:
        """Yield the transcripts of several sounds in their order, each as soon as it is done; as ``transcribe``."""
        given: Any = dict(options)
        rate = given.pop("sampling_rate", RATE)
        call = checked(given)
        sounds = [read_audio(each, rate) for each in audio]
        alone = len(sounds) == 1 and not call["parallel"]
        drafter: Any = call["drafter"] or (self.spec if alone else self.spec_of_several)
        chosen = self.drafter_of(drafter)
        return self._settled(transcribe(self.target, self._scheduler, chosen, sounds, call))

    @overload
    def score(self, prompt: str | list[int], *, lora: str | None = None) -> Score: ...
    @overload
    def score(self, prompt: Any, *, lora: str | None = None) -> Score | list[Score]: ...
    def score(self, prompt: Any, *, lora: str | None = None) -> Score | list[Score]:
        """The target's log probability of each token of a text given those before it; of several, a list.

        prompt  a text, token ids, or several, as for ``generate``
        lora    the name of a loaded LoRA

        Raises InputError for a text that does not fit the model, CapabilityError for a model whose passes have streams.
        """
        single, prompts = read_prompts(prompt, self.tokenizer)
        scores = [score(self._scheduler, ids, lora) for ids in prompts]
        return scores[0] if single else scores

    def perplexity(self, prompt: Any, *, lora: str | None = None) -> float:
        """The perplexity of a text, or of several together: exp of the mean negative log probability of a token."""
        scores = self.score(prompt, lora=lora)
        return perplexity([scores] if isinstance(scores, Score) else scores)

    async def ascore(self, prompt: Any, *, lora: str | None = None) -> Score | list[Score]:
        """Score as ``score`` does, without blocking the event loop."""
        return await self._later(lambda _: self.score(prompt, lora=lora))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CapabilityError(
            "a model cannot be pickled or copied; call anabranch.load in the other process, or share it between threads"
        )

    def supports(
        self,
        drafter: str | Spec | None = None,
        /,
        *,
        prompts: int = 1,
        stream: bool = False,
        **options: Unpack[Keywords],
    ) -> Support:
        """Return whether a call with these options is supported; if not, ``reason`` is the message that it would raise.

        drafter  a specification; None: the model's own
        prompts  the number of prompts decoded together
        stream   whether the call is ``stream``
        options  those of ``generate``

        Builds the drafter if no call did so yet, and decodes nothing. ``anabranch.supports`` needs no model.
        """

        def question() -> None:
            check_named_once(drafter, options)
            given: Keywords = options if drafter is None else {**options, "drafter": drafter}
            how: Any = {"prompts": prompts, "stream": stream}
            refuse(self.target, given, lambda call: self._built(*self._spec_for(call, several=False)), **how)

        return support_of(question)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKeywords]) -> Generation:
        """Answer a conversation [{"role": "user", "content": "..."}, ...] using the model's chat template.

        A message has what the template reads: a content (a string or a list of text parts), tool calls, a name. If the
        last message is the assistant's, the answer continues it. Options are those of ``generate``, and these of
        transformers' ``apply_chat_template``:

        tools=None                   functions that the model may call, or their JSON schemas
        documents=None               dictionaries with "title" and "text"
        chat_template=None           another template, or the name of one of the tokenizer's
        continue_final_message=None  whether the answer continues the last message; None: if it is the assistant's
        template={}                  variables of the template; those that it reads may be given as options by
                                     themselves, such as enable_thinking=False

        Raises what ``generate`` raises, and CapabilityError for a model without a chat template.
        """
        ids, rest = self._chat(messages, options)
        return self.generate(ids, **rest)

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKeywords]
    ) -> Generator[Chunk, None, None]:
        """Answer a conversation as ``chat`` does, and yield chunks as ``stream`` does."""
        ids, rest = self._chat(messages, options)
        return self.stream(ids, **rest)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKeywords]) -> list[int]:
        """The token ids of a conversation in the chat template, as a prompt for ``generate`` or ``stream``.

        options  those of ``chat`` that concern the template
        """
        ids, rest = self._chat(messages, options)
        if rest:
            raise InputError(f"chat_ids takes options of the chat template, got {next(iter(rest))!r}")
        return ids

    def _chat(self, messages: Sequence[Mapping[str, Any]], options: ChatKeywords) -> tuple[list[int], Keywords]:
        """The token ids of a conversation, and the options that are left for ``generate``."""
        self.target.check_decoder_only("chat")
        template, rest = chat_options(options, self.tokenizer)
        return conversation_ids(messages, self.tokenizer, self.target.name, template), rest

    # -- asyncio ------------------------------------------------------------------------------------
    @overload
    async def agenerate(self, prompt: str | list[int], **options: Unpack[Keywords]) -> Generation: ...
    @overload
    async def agenerate(self, prompt: Many, **options: Unpack[Keywords]) -> list[Generation]: ...
    @overload
    async def agenerate(self, prompt: Arrays, **options: Unpack[Keywords]) -> Generation | list[Generation]: ...
    async def agenerate(
        self, prompt: str | list[int] | Many | Arrays, **options: Unpack[Keywords]
    ) -> Generation | list[Generation]:
        """Decode as ``generate`` does, without blocking the event loop. Concurrent calls are batched."""
        return await self._later(lambda cancelled: self._generate(prompt, options, cancelled))

    def astream(self, prompt: str | list[int] | Arrays, **options: Unpack[Keywords]) -> AsyncGenerator[Chunk, None]:
        """Yield chunks as ``stream`` does, without blocking the event loop. Concurrent calls are batched.

        Errors, including those for invalid arguments, are raised with the first chunk. Closing or cancelling frees the
        row.
        """
        return self._worker.iterate(lambda: self.stream(prompt, **options))

    async def achat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKeywords]) -> Generation:
        """Answer a conversation as ``chat`` does, without blocking the event loop."""

        def answer(cancelled: threading.Event) -> Any:
            ids, rest = self._chat(messages, options)
            return self._generate(ids, rest, cancelled)

        return await self._later(answer)

    def achat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """Answer a conversation as ``chat`` does, and yield chunks as ``astream`` does."""
        return self._worker.iterate(lambda: self.chat_stream(messages, **options))

    async def _later(self, call: Callable[[threading.Event], T]) -> T:
        """Run ``call`` in a worker thread; its event is set when the awaiting task is cancelled."""
        cancelled = threading.Event()
        try:
            return await self._worker.call(lambda: call(cancelled))
        finally:
            cancelled.set()


def _described(loaded: LoadedAdapter) -> str:
    trained = loaded.method.trained
    assert trained is not None
    return f"{trained.describe(loaded.module.config)}, {loaded.module.num_parameters() / 1e6:.2f}M parameters"
