"""The usage and the statistics of speculation in a response, and log probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.decoding.generation import Generation
from anabranch.decoding.scoring import Score
from anabranch.decoding.stats import Stats
from anabranch.model.text import token_bytes
from anabranch.serve.service import Call

__all__ = ["chat_log_probs", "completion_log_probs", "scored", "speculation", "stop_string", "token_text", "usage"]


def usage(call: Call, generated: int | None = None) -> dict[str, Any]:
    """OpenAI's usage of a call: prompt tokens once a prompt, the new tokens of all samples.

    generated  new tokens so far; None: those that the sequences have
    """
    prompt = sum(map(len, call.prompts))
    # the samples of a prompt begin alike: the first one says what was reused
    reused = sum(0 if job.ticket is None else job.ticket.reused for job in call.jobs[:: call.n])
    new = sum(job.tokens for job in call.jobs) if generated is None else generated
    details: dict[str, Any] = {}
    if any(job.request.prediction for job in call.jobs):
        stats = _stats(call)
        counts = {name: getattr(stats, name) for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")}
        details["completion_tokens_details"] = counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
        **details,
    }


def _stats(call: Call) -> Stats:
    return Stats.merged(job.output.stats for job in call.jobs if job.output is not None)


def speculation(call: Call) -> dict[str, Any]:
    """Statistics of speculation of a call, under vLLM's names; ``acceptance_histogram[i]`` steps accepted i tokens."""
    stats = _stats(call)
    deepest = max(stats.accepted, default=0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(stats.acceptance_rate, 4),
            "acceptance_histogram": [stats.accepted[count] for count in range(deepest + 1)],
            "num_spec_steps": stats.steps,
            "num_accepted_draft_tokens": stats.accepted_tokens,
            "num_draft_tokens": stats.draft_nodes,
        }
    }


def stop_string(result: Generation) -> str | None:
    """The stop string that ended a text, as in vLLM; None: something else did."""
    return result.stop_reason if isinstance(result.stop_reason, str) else None


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text; one that is part of a character as ``bytes:`` and its bytes, as in OpenAI's completions."""
    data = token_bytes(tokenizer, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_log_probs(
    tokenizer: Any,
    tokens: Sequence[int],
    values: Sequence[float] | None,
    top: Sequence[Mapping[int, float]] | None,
    shown: int,
) -> dict[str, Any]:
    """Log probabilities in the form of chat completions; ``shown`` is the number of alternatives at each place."""

    def entry(token: int, value: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    content = []
    for place, (token, value) in enumerate(zip(tokens, values or (), strict=True)):
        best = list((top[place] if top else {}).items())[:shown]
        content.append({**entry(token, value), "top_logprobs": [entry(*pair) for pair in best]})
    return {"content": content, "refusal": None}


def completion_log_probs(
    tokenizer: Any,
    tokens: Sequence[int],
    values: Sequence[float | None],
    top: Sequence[Mapping[int, float] | None],
    offset: int = 0,
) -> dict[str, Any]:
    """Log probabilities in the form of completions; None for a token that has none, as the first of a prompt."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets, at = [], offset
    for text in texts:
        offsets.append(at)
        at += len(text)
    named = [
        None if best is None else {token_text(tokenizer, token): value for token, value in best.items()} for best in top
    ]
    # a token among the most probable ones has the value given there: clients compare the two
    both = zip(tokens, values, top, strict=True)
    chosen = [value if best is None else best.get(token, value) for token, value, best in both]
    return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": named, "text_offset": offsets}


def scored(score: Score) -> tuple[list[float | None], list[Mapping[int, float] | None]]:
    """The log probabilities of all tokens of a text; the first has none."""
    return [None, *score.log_probs], [None, *score.top_log_probs]
