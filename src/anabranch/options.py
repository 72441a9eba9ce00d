"""The options of a call of ``generate``, ``stream`` or ``chat``, with defaults and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypedDict, cast

from anabranch.decoding.engine import Request
from anabranch.errors import InputError
from anabranch.methods import Spec, parse_spec
from anabranch.model.generation_config import GenerationDefaults
from anabranch.model.load import Target
from anabranch.model.text import ChatTemplate, template_reads
from anabranch.processors import ScoreOptions, ids_of
from anabranch.sampling import LogitsProcessor, SamplingParams
from anabranch.verify import Rule

__all__ = ["NEW_TOKENS", "ChatKeywords", "Keywords", "Options", "chat_options"]

TEMPLATE_OPTIONS = ("tools", "documents", "chat_template", "continue_final_message")
NEW_TOKENS = 256  # unless the call or the model says otherwise


class Keywords(TypedDict, total=False):
    """The options as keyword arguments; see ``Options`` for defaults and ``Model.generate`` for descriptions."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | Sequence[int]
    n: int
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int]
    ignore_eos: bool
    drafter: str | Spec | None
    rule: Rule
    log_probs: bool
    top_log_probs: int
    processors: Sequence[LogitsProcessor]
    rows: int
    on_prompt: Callable[[int, int], None] | None
    lora: str | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any] | None
    logit_bias: Mapping[int, float] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    min_length: int | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: Sequence[float] | None
    encoder_repetition_penalty: float | None
    encoder_no_repeat_ngram_size: int | None
    remove_invalid_values: bool | None


class ChatKeywords(Keywords, total=False):
    """The options of ``Model.chat``; besides these, it takes the variables that the model's chat template reads."""

    tools: Sequence[Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    continue_final_message: bool | str | None
    template: Mapping[str, Any]
    enable_thinking: bool


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
    known = Options.__dataclass_fields__
    extra = {name: given.pop(name) for name in [*given] if name not in known}
    for name in extra:
        if not template_reads(tokenizer, name, template):
            raise InputError(
                f"there is no option {name!r}, and the model's chat template does not read it; options are "
                f"{', '.join((*TEMPLATE_OPTIONS, 'template', *known))}"
            )
    return replace(template, variables={**variables, **extra}), cast(Keywords, given)


@dataclass(frozen=True)
class Options(ScoreOptions):
    """The validated options of a call; see ``Model.generate``. Raises InputError for an invalid value.

    None is the model's default (its generation config), or else that of ``Model.generate``.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | Sequence[int] = 0
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: int | Sequence[int] = ()
    ignore_eos: bool = False
    drafter: str | Spec | None = None
    rule: Rule = "match"
    log_probs: bool = False
    top_log_probs: int = 0
    processors: Sequence[LogitsProcessor] = ()
    rows: int = 8
    on_prompt: Callable[[int, int], None] | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "rows", "n"):
            value = getattr(self, name)
            if value is None and name == "max_new_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not _is_count(self.top_log_probs):
            raise InputError(f"top_log_probs must be a whole number of at least 0 (off), got {self.top_log_probs!r}")
        if self.n > 1 and self.temperature == 0:
            raise InputError(
                f"n={self.n} samples are all the same at temperature 0; give a temperature, or leave n out"
            )
        if self.on_prompt is not None and not callable(self.on_prompt):
            raise InputError(f"on_prompt must be a function, got {self.on_prompt!r}")
        if self.rule not in ("match", "rejection"):
            raise InputError(f"rule must be 'match' or 'rejection', got {self.rule!r}")
        if self.lora is not None and not isinstance(self.lora, str):
            raise InputError(f"lora must be the name of a loaded LoRA, got {self.lora!r}")
        if self.drafter is not None:
            parse_spec(self.drafter)
        if not isinstance(self.stop, str | Sequence | None) or any(
            not isinstance(text, str) or not text for text in _listed(self.stop)
        ):
            raise InputError(f"stop takes strings of at least one character, got {self.stop!r}")
        ids_of(self.stop_token_ids, "stop_token_ids")
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise InputError(f"processors must be a list of functions, got {self.processors!r}")
        for seed in self._seeds:
            self._sampling(GenerationDefaults(), seed)

    @staticmethod
    def of(keywords: Keywords) -> Options:
        """From the keywords of a call. Raises InputError for an unknown name."""
        known = Options.__dataclass_fields__
        if unknown := sorted(set(keywords) - set(known)):
            raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(known)}")
        return Options(**keywords)

    def stops(self, target: Target) -> tuple[str, ...]:
        """The stop strings."""
        return target.generation.stop if self.stop is None else _listed(self.stop)

    @property
    def _seeds(self) -> tuple[int, ...]:
        """The seeds that are given."""
        return (
            (self.seed,) if isinstance(self.seed, int | str) or not isinstance(self.seed, Sequence) else (*self.seed,)
        )

    def seeds(self, prompts: int) -> list[list[int]]:
        """The seeds of each prompt's samples. Raises InputError for a list of seeds of another length."""
        if isinstance(self.seed, Sequence) and len(self.seed) != prompts:
            raise InputError(f"seed must be a number or a list of one for each of {prompts} prompts, got {self.seed!r}")
        given = self._seeds if isinstance(self.seed, Sequence) else self._seeds * prompts
        return [[int(seed) + sample for sample in range(int(self.n))] for seed in given]

    def check_single(self) -> None:
        """Raise InputError for samples that a stream does not have."""
        if self.n > 1:
            raise InputError(f"stream decodes one sample at a time, got n={self.n}; use generate for several")

    def _sampling(
        self,
        defaults: GenerationDefaults,
        seed: int,
        penalty: float = 1.0,
        processors: tuple[LogitsProcessor, ...] = (),
    ) -> SamplingParams:
        """The parameters of the next-token distribution."""
        given = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        cuts = {**defaults.cuts, **{name: value for name, value in given.items() if value is not None}}
        return SamplingParams(
            temperature=self.temperature, seed=seed, repetition_penalty=penalty, processors=processors, **cuts
        )

    def request(self, prompt_ids: list[int], target: Target, seed: int | None = None) -> Request:
        """The engine's request for a prompt. Raises InputError for a LoRA or a token id that the target does not have,
        and for a prompt that leaves no room below the model's own ``max_length``.

        seed  None: the first one that is given
        """
        if self.lora is not None:
            target.decoder.loras.check(self.lora)
        ends = frozenset(() if self.ignore_eos else target.config.eos_token_ids)
        vocabulary = target.config.vocab_size
        stop_ids = ids_of(self.stop_token_ids, "stop_token_ids")
        if wrong := [token for token in stop_ids if token >= vocabulary]:
            raise InputError(f"stop_token_ids has {wrong[0]}, but the vocabulary ends at {vocabulary - 1}")
        ends |= set(stop_ids)
        new, defaults = self._new_tokens(len(prompt_ids), target.generation), target.generation
        scores = defaults.scores.given | self.given
        if self.min_length is not None and self.min_new_tokens is None:
            scores["min_new_tokens"] = None  # the call's own min_length counts, not the model's min_new_tokens
        settled = ScoreOptions(**scores)
        own = settled.score_processors(prompt_ids, ends, len(prompt_ids) + new, vocabulary)
        if self.top_log_probs > vocabulary:
            raise InputError(f"top_log_probs must be at most {vocabulary}, got {self.top_log_probs}")
        seed = next(iter(self._seeds), 0) if seed is None else seed
        sampling = self._sampling(defaults, seed, settled.first_penalty, (*own, *self.processors))
        return Request(
            *(prompt_ids, new, sampling, ends, self.rule, self.log_probs),
            on_prompt=self.on_prompt,
            lora=self.lora,
            top_log_probs=int(self.top_log_probs),
        )

    def _new_tokens(self, prompt: int, defaults: GenerationDefaults) -> int:
        if self.max_new_tokens is not None:
            return int(self.max_new_tokens)
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


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _listed(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
