"""OpenVINO GenAI on the CPU: plain, or with its prompt lookup."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from .wire import Request, serve, versions


class OpenVINO:
    """One pipeline, without its default prompt cache."""

    def __init__(self, request: Request) -> None:
        self.numpy, self.openvino = import_module("numpy"), import_module("openvino")
        self.genai = import_module("openvino_genai")
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(256, request["capacity"])
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": request["threads"], "scheduler_config": scheduler}
        if request["dtype"] == "float32":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        if request["lookup"]:
            properties["prompt_lookup"] = True
        self.pipe: Any = self.genai.LLMPipeline(request["model"], "CPU", **properties)
        self.lookup = (request["tokens"], request["ngram"]) if request["lookup"] else None
        self.info: dict[str, Any] = {
            "weights": request["format"],
            "numerics": properties.get("INFERENCE_PRECISION_HINT", "OpenVINO's own choice for this CPU"),
            "versions": versions("openvino", "openvino-genai"),
        }

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """Decode one prompt."""
        config = self.genai.GenerationConfig()
        config.max_new_tokens = request["max_new_tokens"]
        config.apply_chat_template = False
        if request["eos"]:
            config.eos_token_id = request["eos"][0]
            config.stop_token_ids = set(request["eos"])
        if self.lookup is not None:
            config.num_assistant_tokens, config.max_ngram_size = self.lookup
        if request["temperature"] > 0:
            config.do_sample = True
            config.temperature, config.top_p = request["temperature"], request["top_p"]
            if request["top_k"]:
                config.top_k = request["top_k"]
            config.rng_seed = request["seed"]
        prompt = self.openvino.Tensor(self.numpy.array([request["ids"]], dtype=self.numpy.int64))
        began = time.perf_counter()
        result = self.pipe.generate(prompt, config)
        seconds = time.perf_counter() - began
        return list(result.tokens[0]), seconds, result.perf_metrics.get_ttft().mean / 1e3


if __name__ == "__main__":
    serve(OpenVINO)
