"""``generate`` of transformers: plain, with prompt lookup, or with a draft model."""

from __future__ import annotations

import time
from typing import Any

from .wire import FirstToken, Request, serve, versions


class Transformers:
    """A causal model and the options of its ``generate``. The model's own generation defaults are put aside."""

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
        options = {**self.options, **law(request), "max_new_tokens": request["max_new_tokens"]}
        self.torch.manual_seed(request["seed"])
        first = FirstToken()
        with self.torch.inference_mode():
            began = time.perf_counter()
            out = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), streamer=first, **options)
            tokens = out[0, ids.shape[1] :].tolist()
            seconds = time.perf_counter() - began
        return tokens, seconds, None if first.at is None else first.at - began


def law(request: Request) -> dict[str, Any]:
    """How tokens are chosen and where the text ends, in the words of ``generate``."""
    eos = request["eos"]
    chosen: dict[str, Any] = {"do_sample": request["temperature"] > 0, "pad_token_id": eos[0] if eos else 0}
    if eos:
        chosen["eos_token_id"] = eos
    if chosen["do_sample"]:
        chosen.update(temperature=request["temperature"], top_k=request["top_k"], top_p=request["top_p"])
    return chosen


if __name__ == "__main__":
    serve(Transformers)
