"""From the options of a call (``declared.Keywords``) to the engine's requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from anabranch.declared import CALL, DEFAULTS, SCORES, ChatKeywords, Keywords, ScoreKeywords, check, ids_of
from anabranch.decoding.engine import Request
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import Spec, parse_spec
from anabranch.model.encoder import Source
from anabranch.model.generation_config import GenerationDefaults
from anabranch.model.load import Target
from anabranch.model.text import ChatTemplate, encode, template_reads
from anabranch.processors import first_penalty, score_processors
from anabranch.sampling import Constraint, SamplingParams
from anabranch.structure.grammar import compiled, source_of
from anabranch.structure.matcher import GrammarConstraint
from anabranch.structure.vocabulary import Vocabulary

__all__ = ["NEW_TOKENS", "Options", "chat_options", "requests", "sampling_params"]

TEMPLATE_OPTIONS = ("tools", "documents", "chat_template", "continue_final_message")
NEW_TOKENS = 256  # unless the call or the model says otherwise


def chat_options(options: ChatKeywords, tokenizer: Any) -> tuple[ChatTemplate, Keywords]:
    """Split options of ``Model.chat`` into those of the template and those of ``Model.generate``.

    Raises InputError for an option that neither has.
    """
    given: dict[str, Any] = dict(options)
    variables = given.pop("template", None) or {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InputError(f"template must be a dictionary of variables of the chat template, got {variables!r}")
    own = {name: given.pop(name) for name in TEMPLATE_OPTIONS if name in given}
    template = ChatTemplate(**own, variables=dict(variables))
    extra = {name: given.pop(name) for name in [*given] if name not in CALL}
    for name in extra:
        if not template_reads(tokenizer, name, template):
            raise InputError(
                f"there is no option {name!r}, and the model's chat template does not read it; options are "
                f"{', '.join((*TEMPLATE_OPTIONS, 'template', *CALL))}"
            )
    return replace(template, variables={**variables, **extra}), cast(Keywords, given)


def sampling_params(options: Keywords, defaults: Mapping[str, Any] | None = None, **more: Any) -> SamplingParams:
    """The engine's parameters of a call's options; ``defaults`` are those of the model, ``more`` override both."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    given = {name: options.get(name) for name in names if options.get(name) is not None}
    return SamplingParams(**{**(defaults or {}), **given, **more})


def requests(prompts: Iterable[Sequence[int]], target: Target, options: Keywords) -> list[Request]:
    """The engine's requests of a call for each prompt, with the defaults of the model's generation config.

    Stop strings end none of them, since the engine knows no text. Raises InputError.
    """
    checked = Options(options)
    return [checked.request(list(ids), target) for ids in prompts]


class Options:
    """The checked options of a call; see ``Model.generate``. Raises InputError for an invalid value or unknown name.

    values   every option, those that were not given with their declared defaults
    drafter  that of the call; None: the model's
    """

    def __init__(self, given: Keywords) -> None:
        check(given)
        values: Keywords = {**DEFAULTS, **given}
        if values["n"] > 1 and values["temperature"] == 0:
            raise InputError(
                f"n={values['n']} samples are all the same at temperature 0; give a temperature, or leave n out"
            )
        self.values = values
        self._sources: dict[tuple[int, ...], Source] = {}
        self.structure = source_of(values)
        if self.structure is not None and values["ignore_eos"]:
            raise InputError(
                f"ignore_eos goes on after the end of a text, and {self.structure.kind} says where it ends; leave one "
                "of them out"
            )
        self.drafter: str | Spec | None = values["drafter"]  # type: ignore[assignment]
        if self.drafter is not None:
            parse_spec(self.drafter)

    def lora(self, target: Target) -> str | None:
        """The LoRA of the call: the one that is named, or else that of the adapter that is named."""
        lora, adapter = self.values["lora"], self.values["adapter"]
        return adapter if lora is None and adapter in target.decoder.loras.names else lora

    def adapter(self, loaded: Collection[str]) -> str | None:
        """The adapter of the call among those loaded: the one that is named, or else one of the LoRA's name.

        Raises InputError for one that was not loaded.
        """
        lora, adapter = self.values["lora"], self.values["adapter"]
        if adapter is None:
            return lora if lora in loaded else None
        if adapter not in loaded:
            known = f"those loaded are {', '.join(loaded)}" if loaded else "none was loaded by name (adapters=)"
            raise InputError(f"there is no adapter {adapter!r}; {known}")
        return adapter

    def stops(self, target: Target) -> tuple[str, ...]:
        """The stop strings."""
        stop = self.values["stop"]
        return target.generation.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    def seeds(self, prompts: int) -> list[list[int]]:
        """The seeds of each prompt's samples. Raises InputError for a list of seeds of another length."""
        seed = self.values["seed"]
        if isinstance(seed, Sequence) and len(seed) != prompts:
            raise InputError(f"seed must be a number or a list of one for each of {prompts} prompts, got {seed!r}")
        first = seed if isinstance(seed, Sequence) else [seed] * prompts
        return [[int(each) + sample for sample in range(int(self.values["n"]))] for each in first]

    def check_single(self) -> None:
        """Raise InputError for samples that a stream does not have."""
        if self.values["n"] > 1:
            raise InputError(f"stream decodes one sample at a time, got n={self.values['n']}; use generate for several")

    def request(self, prompt_ids: list[int], target: Target, seed: int | None = None) -> Request:
        """The engine's request for a prompt, which is the source of an encoder-decoder model.

        seed  None: the first one that is given

        Raises InputError for a token id that the target does not have, and for a prompt that leaves no room below the
        model's own ``max_length``; CapabilityError for a model that reads no text.
        """
        source, encoder = None, target.config.encoder
        if encoder is not None:
            if encoder.channels:
                raise CapabilityError(f"{target.name} reads speech, not text; use transcribe")
            source = self._sources.setdefault(tuple(prompt_ids), Source(prompt_ids))  # its samples share it
            prompt_ids = list(encoder.start)
        values, defaults, vocabulary = self.values, target.generation, target.config.vocab_size
        stop_ids = ids_of("stop_token_ids", values["stop_token_ids"])
        if wrong := [token for token in stop_ids if token >= vocabulary]:
            raise InputError(f"stop_token_ids has {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")
        if values["top_log_probs"] > vocabulary:
            raise InputError(f"top_log_probs must be at most {vocabulary}, got {values['top_log_probs']}")
        ends = frozenset((*stop_ids, *(() if values["ignore_eos"] else target.config.eos_token_ids)))
        new, scores = self._new_tokens(len(prompt_ids), defaults), self._scores(defaults)
        own = score_processors(
            *(scores, prompt_ids, ends, len(prompt_ids) + new, vocabulary), None if source is None else source.tokens
        )
        sampling = sampling_params(
            values,
            defaults.cuts,
            repetition_penalty=first_penalty(scores),
            processors=(*own, *values["processors"]),
            seed=self.seeds(1)[0][0] if seed is None else seed,
            constraint=self._constraint(target, len(prompt_ids), ends),
        )
        return Request(
            *(prompt_ids, new, sampling, ends, values["rule"], values["log_probs"]),
            on_prompt=values["on_prompt"],
            lora=self.lora(target),
            top_log_probs=int(values["top_log_probs"]),
            prediction=self._prediction(target),
            source=source,
        )

    def _prediction(self, target: Target) -> Sequence[int]:
        """The tokens of the text that is expected; none if there is none."""
        given = self.values["prediction"]
        if given is None:
            return ()
        return encode(target.tokenizer, given, add_special_tokens=False) if isinstance(given, str) else tuple(given)

    def _constraint(self, target: Target, start: int, ends: frozenset[int]) -> Constraint | None:
        """The constraint of a text after ``start`` tokens. Raises InputError or CapabilityError."""
        if self.structure is None:
            return None
        if target.tokenizer is None or not target.config.eos_token_ids:
            lacking = "a tokenizer" if target.tokenizer is None else "an end token"
            raise CapabilityError(f"{self.structure.kind} needs a model with {lacking}, and this one has none")
        size = target.config.vocab_size
        vocabulary = Vocabulary.of(target.tokenizer, size, target.config.eos_token_ids)
        return GrammarConstraint(compiled(self.structure, vocabulary), start, ends)

    def _scores(self, defaults: GenerationDefaults) -> ScoreKeywords:
        """The options that change scores, of the call or else of the model."""
        given: Any = {name: value for name, value in self.values.items() if name in SCORES and value is not None}
        scores: ScoreKeywords = {**defaults.scores, **given}
        if "min_length" in given and "min_new_tokens" not in given:
            scores["min_new_tokens"] = None  # the call's own min_length counts, not the model's min_new_tokens
        return scores

    def _new_tokens(self, prompt: int, defaults: GenerationDefaults) -> int:
        given = self.values["max_new_tokens"]
        if given is not None:
            return int(given)
        if defaults.new is not None:
            return defaults.new
        if defaults.total is None:
            return NEW_TOKENS
        if prompt >= defaults.total:
            raise InputError(
                f"the prompt has {prompt} tokens, and the model's generation config limits a text to "
                f"max_length={defaults.total}; give max_new_tokens"
            )
        return min(NEW_TOKENS, defaults.total - prompt)
