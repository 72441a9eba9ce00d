"""Decoding rates of an encoder-decoder target: ours at several numbers of rows, beside transformers' at batch 1."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anabranch.api import Model
from anabranch.errors import one_line
from anabranch.loading import Loaded
from studies.base import Setup

__all__ = ["in_words", "measured_rates"]

ROWS = (1, 4, 16)
GAMMA = 3  # tokens of a draft
ROUNDS = 3
Texts = list[list[int]]


def measured_rates(setup: Setup, loaded: Loaded) -> list[dict[str, Any]]:
    """Tokens per second of each way to decode the prompts greedily, and its texts that equal our plain ones.

    All take turns, and rates are medians; transformers drafts with the same smaller model (assisted generation). One
    that fails has an error instead.
    """
    sources = setup.encoded(loaded.target)
    model, draft = Model(loaded.target, loaded.adapters), f"draft_model:model={setup.draft},tree=chain,tokens={GAMMA}"
    ways: dict[str, Callable[[], Texts]] = {}
    for rows in ROWS:
        for name, spec in (("plain", "none"), (f"draft model, {GAMMA}", draft)):
            ways[f"{name}, {rows} rows" if rows > 1 else f"{name}, 1 row"] = _ours(
                model, spec, sources, rows, setup.new
            )
    ways |= _transformers(setup, sources)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, Texts] = {}
    errors: dict[str, str] = {}
    for number in range(ROUNDS + 1):
        for name, run in ways.items():
            if name in errors:
                continue
            setup.report(f"round {number}: {name}")
            began = time.perf_counter()
            try:
                texts[name] = run()
            except Exception as error:  # of another library; a failed run is no timing
                errors[name] = f"{type(error).__name__}: {one_line(error)}"
                continue
            if number:  # the first round warms up
                rates[name].append(sum(map(len, texts[name])) / (time.perf_counter() - began))
    plain = texts["plain, 1 row"]
    return [
        {"name": name, "error": errors[name]}
        if name in errors
        else {
            "name": name,
            "tokens_per_second": round(statistics.median(rates[name]), 1),
            "equal_texts": sum(one == other for one, other in zip(texts[name], plain, strict=True)),
        }
        for name in ways
    ]


def _ours(model: Model, drafter: str, sources: Texts, rows: int, new: int) -> Callable[[], Texts]:
    def run() -> Texts:
        return [each.token_ids for each in model.generate(sources, drafter=drafter, rows=rows, max_new_tokens=new)]

    return run


def _transformers(setup: Setup, sources: Texts) -> dict[str, Callable[[], Texts]]:
    from transformers import AutoModelForSeq2SeqLM

    target, draft = (AutoModelForSeq2SeqLM.from_pretrained(path).float().eval() for path in (setup.model, setup.draft))

    def run(**options: Any) -> Texts:
        with torch.inference_mode():
            given = {"max_new_tokens": setup.new, "do_sample": False, **options}
            return [target.generate(torch.tensor([ids]), **given)[0, 1:].tolist() for ids in sources]

    return {"transformers plain, 1 row": run, "transformers assisted, 1 row": lambda: run(assistant_model=draft)}


def in_words(records: Sequence[dict[str, Any]]) -> str:
    """The rates, for the page."""
    return "tokens/s: " + ", ".join(f"{each['name']} {each.get('tokens_per_second', 'failed')}" for each in records)
