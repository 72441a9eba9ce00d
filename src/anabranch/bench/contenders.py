"""What is measured: a drafter of ours on our loop, or ``transformers`` in the same process on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from anabranch.drafters.base import Drafter
from anabranch.engine import Engine, Request, Step
from anabranch.errors import CapabilityError
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams

__all__ = ["Contender", "Ours", "Run", "Transformers"]


@dataclass
class Run:
    """One prompt decoded once: new token ids, seconds from call to last token, and our own steps, if any."""

    token_ids: list[int]
    seconds: float
    prefill_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)


class Contender(Protocol):
    """Something that decodes a prompt."""

    name: str

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        """Decode greedily or as configured, to the end token or ``max_new_tokens``."""


class Ours:
    """One drafter on the engine. The engine is kept between prompts, as a server would keep it."""

    def __init__(self, name: str, target: Target, drafter: Drafter, *, capacity: int, sampling: SamplingParams) -> None:
        self.name, self.sampling = name, sampling
        self.engine = Engine(target.decoder, drafter, capacity=capacity)
        self.stop = frozenset(target.config.eos_token_ids)

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        """Decode one prompt."""
        began = time.perf_counter()
        self.engine.add(Request(prompt_ids, max_new_tokens, self.sampling, self.stop))
        prefilled = time.perf_counter()
        steps = list(self.engine.run())
        done = time.perf_counter()
        return Run([t for step in steps for t in step.tokens], done - began, prefilled - began, steps)


class Transformers:
    """``generate`` of transformers: plain greedy decoding, or its prompt lookup."""

    def __init__(self, target: Target, *, sampling: SamplingParams, lookup: bool = False) -> None:
        if target.path is None or not target.path.is_dir():
            raise CapabilityError("the peer transformers needs a model folder; GGUF files are not measured against it")
        from transformers import AutoModelForCausalLM

        self.name = "transformers prompt_lookup" if lookup else "transformers"
        self.model: Any = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.decoder.dtype)
        self.model.to(target.decoder.device).eval()
        self.options: dict[str, Any] = {"do_sample": not sampling.greedy, "pad_token_id": 0}
        if not sampling.greedy:
            self.options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        if lookup:
            self.options["prompt_lookup_num_tokens"] = 10
        self.eos = list(target.config.eos_token_ids)

    @torch.inference_mode()
    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        """Decode one prompt."""
        ids = torch.tensor([list(prompt_ids)], device=self.model.device)
        began = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos,
            **self.options,
        )
        return Run(out[0, ids.shape[1] :].tolist(), time.perf_counter() - began)
