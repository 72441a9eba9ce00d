"""Later turns of a suite's conversations, after the target's own answers to the earlier ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from anabranch.bench.entries import PLAIN, Entry, open_entry
from anabranch.bench.suites import SuitePrompt
from anabranch.declared import Keywords
from anabranch.errors import AnabranchWarning
from anabranch.loading import Loaded
from anabranch.prompts import chat_ids

__all__ = ["with_later_turns"]


def with_later_turns(
    prompts: Sequence[SuitePrompt],
    loaded: Loaded,
    *,
    call: Keywords,
    max_new_tokens: int,
    raw: bool = False,
    tell: Callable[[str], None] = lambda sentence: None,
) -> list[SuitePrompt]:
    """The prompts, each followed by its later turns as conversations of their own: 81, 81.2, 82, 82.2.

    The answer to an earlier turn is plain decoding's, up to ``max_new_tokens`` and with the options ``call``, so all
    contenders get the same prompts. Without a chat template, or with ``raw``, there are first turns only, and an
    AnabranchWarning says so.
    """
    if not any(prompt.later for prompt in prompts):
        return list(prompts)
    tokenizer = loaded.target.tokenizer
    if raw or not getattr(tokenizer, "chat_template", None):
        warnings.warn("only first turns are decoded, since later ones need a chat template", AnabranchWarning, 2)
        return list(prompts)
    tell("answering the earlier turns by plain decoding")
    found: list[SuitePrompt] = []
    for prompt in prompts:
        found.append(prompt)
        messages: tuple[dict[str, str], ...] = ({"role": "user", "content": prompt.text},)
        for turn, text in enumerate(prompt.later, 2):
            ids = chat_ids(tokenizer, messages)
            capacity = len(ids) + max_new_tokens
            plain = open_entry(
                Entry(PLAIN, PLAIN), loaded, call=call, threads=torch.get_num_threads(), capacity=capacity
            )
            (answer,) = plain.serve([ids], rows=1, max_new_tokens=max_new_tokens).texts
            said = tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            messages += ({"role": "assistant", "content": said}, {"role": "user", "content": text})
            found.append(SuitePrompt(f"{prompt.name}.{turn}", prompt.task, text, messages))
    return found
