"""``generate`` of transformers: plain, with prompt lookup, or with a draft model."""

from __future__ import annotations

import time
from typing import Any

from .wire import Request, Times, serve, versions


class Transformers:
    """A causal model and the options of its ``generate``, without the model's own generation defaults."""

    def __init__(self, request: Request) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(request["threads"])
        self.torch: Any = torch
        self.device = request["device"]
        self.options: dict[str, Any] = {}

        def read(folder: str) -> Any:
            dtype = getattr(torch, request["dtype"])
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
            return model.to(self.device).eval()

        self.model: Any = read(request["model"])
        self.model.generation_config = GenerationConfig()
        if request["method"] == "lookup":
            self.options["prompt_lookup_num_tokens"] = request["tokens"]
        elif request["method"] == "assisted":
            self.options["assistant_model"] = read(request["assistant"])
        self.info: dict[str, Any] = {"weights": request["dtype"], "versions": versions("transformers", "torch")}

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """Decode one prompt."""
        ids = self.torch.tensor([request["ids"]], device=self.device)
        options = {**self.options, **sampling(request), "max_new_tokens": request["max_new_tokens"]}
        self.torch.manual_seed(request["seed"])
        times = Times()
        with self.torch.inference_mode():
            began = time.perf_counter()
            out = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), streamer=times, **options)
            tokens = out[0, ids.shape[1] :].tolist()
            seconds = time.perf_counter() - began
        return tokens, seconds, times.at[0] - began if times.at else None

    def batch(self, request: Request) -> tuple[list[list[int]], float, list[float]]:
        """Decode a left-padded batch: new token ids, seconds, and seconds to each step."""
        if self.options:
            raise NotImplementedError("transformers drafts for one prompt at a time")
        torch, prompts, options = self.torch, request["prompts"], sampling(request)
        longest, padding = max(map(len, prompts)), options["pad_token_id"]
        ids = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        torch.manual_seed(request["seed"])
        times = Times()
        with torch.inference_mode():
            began = time.perf_counter()
            out = self.model.generate(
                ids, attention_mask=mask, streamer=times, **options, max_new_tokens=request["max_new_tokens"]
            )
            rows = out[:, longest:].tolist()
            seconds = time.perf_counter() - began
        return [_ended(row, request["eos"]) for row in rows], seconds, [at - began for at in times.at]


def _ended(row: list[int], eos: list[int]) -> list[int]:
    """A row up to its end token; padding follows it."""
    end = next((place for place, token in enumerate(row) if token in eos), len(row) - 1)
    return row[: end + 1]


def sampling(request: Request) -> dict[str, Any]:
    """Sampling parameters and end tokens as options of ``generate``."""
    eos = request["eos"]
    chosen: dict[str, Any] = {"do_sample": request["temperature"] > 0, "pad_token_id": eos[0] if eos else 0}
    if eos:
        chosen["eos_token_id"] = eos
    if chosen["do_sample"]:
        chosen.update(temperature=request["temperature"], top_k=request["top_k"], top_p=request["top_p"])
    return chosen


if __name__ == "__main__":
    serve(Transformers)
