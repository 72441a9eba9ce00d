"""Fields of requests: checked, named if they have no effect, refused if they would change the answer unsupported.

Types and ranges are pydantic's; values that decoding itself checks are left to ``declared``, whose messages name them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from anabranch.declared import Keywords
from anabranch.model.generation_config import GenerationDefaults
from anabranch.serve.failures import RequestError
from anabranch.serve.foreign import FOREIGN, Foreign
from anabranch.serve.structure import VLLM, structure_of
from anabranch.support.jsonfiles import shown

__all__ = ["FORMATS", "Body", "Items", "Sampling", "StreamOptions"]

T = TypeVar("T")
# pydantic notes every wrong item otherwise: 2 GiB and 6 seconds for a million of them
Items = Annotated[list[T], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """Options of a stream: whether its end, or each chunk, has the usage. Unknown ones are kept, to be named."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# the keys that have an effect in fields that are objects
KEYS: Mapping[str, Sequence[str]] = {
    "output_config": ("format",),
    "stream_options": tuple(StreamOptions.model_fields),
    "structured_outputs": VLLM,
    "text": ("format",),
}


class Body(BaseModel):
    """A request's body. Unknown fields are kept, to be named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    foreign: ClassVar[Mapping[str, Foreign]] = FOREIGN

    model: str | None = Field(None, description="the model's name, or that of a loaded LoRA")

    def unused(self) -> list[str]:
        """The names of fields that have no effect. Raises RequestError for one that would change the answer."""
        names = []
        for name, value in self.extras():
            known = self.foreign.get(name)
            if value is None:
                continue
            if known is None or known.hint:
                names.append(name)
                continue
            if known.limits and all(getattr(self, field, None) in (None, idle) for field, idle in known.limits):
                continue
            use = next((field for field in known.use if field in type(self).model_fields), None)
            if value not in known.neutral and (use is None or value != getattr(self, use)):
                advice = "leave it out" if use is None else f"use {use} instead"
                raise RequestError(
                    400, f"{name}={shown(value)} is not supported and would change the answer; {advice}", param=name
                )
        return sorted(names)

    def extras(self) -> Iterator[tuple[str, Any]]:
        """The names and values of fields, and of keys within fields, that the interface lacks."""
        yield from (self.model_extra or {}).items()
        for field, keys in KEYS.items():
            given = dict(getattr(self, field) or {}) if field in type(self).model_fields else {}
            yield from ((f"{field}.{key}", value) for key, value in given.items() if key not in keys)


FORMATS = (
    "response_format",
    "structured_outputs",
    *(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")),
)


class Sampling(Body):
    """Fields that decide which tokens are drawn, under the names that OpenAI, vLLM and llama.cpp use."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: all")
    min_p: float | None = None
    seed: int | None = Field(None, description="null: a random one")
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31, description="smaller ones come first")
    prediction: dict[str, Any] | None = Field(None, description="text that the answer will resemble, for drafts")
    drafter: str | None = Field(None, description="none: plain decoding; null: the server's drafter")

    def keywords(self, defaults: GenerationDefaults) -> Keywords:
        """The options of a call, those of single answers; the length is the caller's. Raises RequestError.

        defaults  those of the model: its suggested temperature is used where a request gives none, as vLLM does
        """
        suggested = defaults.suggested
        usual = suggested.get("temperature", 1.0) if suggested.get("do_sample", True) else 0.0
        given: dict[str, Any] = {
            "temperature": usual if self.temperature is None else self.temperature,
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "stop": None if self.stop == [] else self.stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "min_new_tokens": self.min_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self._bias(),
        }
        if self.drafter not in (None, "auto", "none"):
            raise RequestError(400, f"drafter must be 'none' or 'auto', got {self.drafter!r}", param="drafter")
        given["drafter"] = self.drafter
        given["prediction"] = self._prediction() if self.drafter != "none" else None  # which drafts nothing
        given |= structure_of({name: getattr(self, name) for name in FORMATS})
        return {name: value for name, value in given.items() if value is not None}  # type: ignore[return-value]

    def _prediction(self) -> str | None:
        """The text of OpenAI's ``prediction``; None: there is none. Raises RequestError."""
        if self.prediction is None:
            return None
        content = self.prediction.get("content")
        parts = [{"text": content}] if isinstance(content, str) else content
        if self.prediction.get("type") != "content" or not isinstance(parts, list) or not all(map(_is_text, parts)):
            raise RequestError(
                400, 'prediction must be {"type": "content", "content": TEXT}, or have text parts', param="prediction"
            )
        return "".join(part["text"] for part in parts) or None

    def _bias(self) -> dict[int, float] | None:
        biases: dict[int, float] = {}
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) < math.inf:
                raise RequestError(400, f"logit_bias has {shown(bias)}, which is no finite number", param="logit_bias")
            try:
                biases[int(token)] = float(bias)
            except (ValueError, OverflowError) as error:
                raise RequestError(
                    400,
                    f"logit_bias has a key that is no token id, or a value that is too large: {error}",
                    param="logit_bias",
                ) from error
        return biases or None


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
