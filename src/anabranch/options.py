"""The options of a call of ``generate``, ``stream`` or ``chat``, with defaults and validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypedDict

from anabranch.decoding.engine import Request
from anabranch.errors import InputError
from anabranch.methods import Spec, parse_spec
from anabranch.model.load import Target
from anabranch.sampling import LogitsProcessor, SamplingParams
from anabranch.verify import Rule

__all__ = ["Keywords", "Options"]


class Keywords(TypedDict, total=False):
    """The options as keyword arguments; see ``Options`` for defaults and ``Model.generate`` for descriptions."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str] | None
    ignore_eos: bool
    drafter: str | Spec | None
    rule: Rule
    log_probs: bool
    processors: Sequence[LogitsProcessor]
    rows: int
    on_prompt: Callable[[int, int], None] | None
    lora: str | None


@dataclass(frozen=True)
class Options:
    """The validated options of a call; see ``Model.generate``. Raises InputError for an invalid value."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False
    drafter: str | Spec | None = None
    rule: Rule = "match"
    log_probs: bool = False
    processors: Sequence[LogitsProcessor] = ()
    rows: int = 8
    on_prompt: Callable[[int, int], None] | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.on_prompt is not None and not callable(self.on_prompt):
            raise InputError(f"on_prompt must be a function, got {self.on_prompt!r}")
        if self.rule not in ("match", "rejection"):
            raise InputError(f"rule must be 'match' or 'rejection', got {self.rule!r}")
        if self.lora is not None and not isinstance(self.lora, str):
            raise InputError(f"lora must be the name of a loaded LoRA, got {self.lora!r}")
        if self.drafter is not None:
            parse_spec(self.drafter)
        if not isinstance(self.stop, str | Sequence | None) or any(
            not isinstance(text, str) or not text for text in self.stops
        ):
            raise InputError(f"stop takes strings of at least one character, got {self.stop!r}")
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise InputError(f"processors must be a list of functions, got {self.processors!r}")
        _ = self.sampling

    @staticmethod
    def of(keywords: Keywords) -> Options:
        """From the keywords of a call. Raises InputError for an unknown name."""
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
        """The parameters of the next-token distribution."""
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
        """The engine's request for a prompt. Raises InputError for a LoRA that the target does not have."""
        if self.lora is not None:
            target.decoder.loras.check(self.lora)
        stop_ids = frozenset() if self.ignore_eos else frozenset(target.config.eos_token_ids)
        return Request(
            *(prompt_ids, int(self.max_new_tokens), self.sampling, stop_ids, self.rule, self.log_probs),
            on_prompt=self.on_prompt,
            lora=self.lora,
        )
