"""Fields of requests: checked, named if they have no effect, refused if they would change the text unsupported.

Types and ranges are pydantic's; values that decoding itself checks are left to ``declared``, whose messages name them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from anabranch.declared import Keywords
from anabranch.model.generation_config import GenerationDefaults
from anabranch.serve.failures import RequestError
from anabranch.serve.structure import structure_of
from anabranch.support.jsonfiles import shown

__all__ = ["NEUTRAL", "Body", "Items", "Sampling", "StreamOptions"]

T = TypeVar("T")
# pydantic notes every wrong item otherwise: 2 GiB and 6 seconds for a million of them
Items = Annotated[list[T], Field(fail_fast=True)]

# fields that would change the text, with the values at which they do not; null is one for each
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "chat_template": (),
    "grammar": ("",),  # llama.cpp's, in a language of its own
    "json_schema": (),
    "structural_tag": (),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled", "auto"),
}


class Body(BaseModel):
    """A request's body. Unknown fields are kept, to be named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    model: str | None = Field(None, description="the model's name, or that of a loaded LoRA")

    def unused(self) -> list[str]:
        """The names of fields that have no effect. Raises RequestError for one that would change the text."""
        names = []
        for name, value in (self.model_extra or {}).items():
            if value is None:
                continue
            if name not in self.refused:
                names.append(name)
            elif value not in self.refused[name]:
                raise RequestError(
                    400, f"{name}={shown(value)} is not supported and would change the answer; leave it out", param=name
                )
        return sorted(names)


STRUCTURES = (
    "response_format",
    "structured_outputs",
    *(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")),
)


class StreamOptions(BaseModel):
    """Options of a stream: whether its end, or each chunk, has the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
        given |= structure_of({name: getattr(self, name) for name in STRUCTURES})
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
