"""Decode held-out prompts at the end of a training: tokens/s, and exact match where the target was tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.screen import Screen

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.loading import LoadConfig
    from anabranch.model.load import Target
    from anabranch.train import Example

__all__ = ["Decoded", "measured_speeds", "measured_tuning"]

PROMPTS = 8  # decoded one at a time
TOKENS = 64  # of each
PLAIN = "none"
ROWS = 24  # held-out rows that a tuned model completes
LONGEST = 128  # tokens of a completion that can be expected to match exactly


@dataclass(frozen=True)
class Decoded:
    """Held-out prompts decoded by a model: tokens/s, and the share of completions that equal the data's.

    exact_match  None where completions are too long to be compared as a whole
    """

    tokens_per_second: float
    exact_match: float | None
    rows: int


def measured_speeds(target: Target, out: Path, examples: Sequence[Example], screen: Screen) -> dict[str, float]:
    """Tokens/s of decoding a few prompts one at a time, by drafter: plain decoding, and "auto" with the adapter.

    Packs the target's weights. The two alternate from prompt to prompt, after one prompt each that is not counted.
    """
    from anabranch.adapters.folder import load_adapter
    from anabranch.api import Model
    from anabranch.methods import AUTO
    from anabranch.model.pack import pack_decoder

    adapter = load_adapter(out, target)
    pack_decoder(target.decoder)
    room = target.config.max_positions
    asked = [example.prompt_ids if example.encoded is None else example.encoded.tokens for example in examples]
    prompts = [list(ids) for ids in asked if len(ids) < room - 1][:PROMPTS]
    seconds, tokens = {PLAIN: 0.0, AUTO: 0.0}, {PLAIN: 0, AUTO: 0}
    model = Model(target, (adapter,))
    for number, prompt in enumerate([*prompts[:1], *prompts]):
        line = f"decoding for the measured tokens/s, prompt {number + 1} of {len(prompts) + 1}"
        screen.show(line, "(--no-timing skips this)", plain=line)
        for name in seconds:
            stats = model.generate(prompt, max_new_tokens=min(TOKENS, room - len(prompt)), drafter=name).stats
            if number and stats.tokens_per_second:
                seconds[name] += stats.tokens / stats.tokens_per_second
                tokens[name] += stats.tokens
    return {name: round(tokens[name] / seconds[name], 1) for name in seconds if seconds[name]}


def measured_tuning(
    loading: LoadConfig, tuned: LoadConfig, drafters: Sequence[str], examples: Sequence[Example], screen: Screen
) -> dict[str, Decoded]:
    """Decode the held-out prompts plainly with the untuned model, and with the tuned one and each of ``drafters``.

    loading, tuned  what to load as the two
    """
    from anabranch.api import Model
    from anabranch.loading import load

    decoded: dict[str, Decoded] = {}
    some = examples[:: max(1, len(examples) // ROWS)][:ROWS]
    for who, config, specs in (("untuned", loading, (PLAIN,)), ("tuned", tuned, drafters)):
        line = f"decoding {len(some)} held-out rows with the {who} model"
        screen.show(line, "(--no-timing skips this)", plain=line)
        loaded = load(config)
        with Model(loaded.target, loaded.adapters) as model:
            decoded |= {f"{who}, {spec}": _decoded(model, spec, some) for spec in specs}
    return decoded


def _decoded(model: Model, drafter: str, examples: Sequence[Example]) -> Decoded:
    from anabranch.tasks.metrics import exact_match

    room, seconds, tokens, equal = model.target.config.max_positions, 0.0, 0, 0.0
    longest = max(len(example.answer_ids) for example in examples)
    for number, example in enumerate([examples[0], *examples]):
        prompt = list(example.prompt_ids)
        most = max(1, min(longest + 1, LONGEST, room - len(prompt)))
        done = model.generate(prompt, max_new_tokens=most, drafter=drafter)
        if number and done.stats.tokens_per_second:  # the first one warms up
            seconds, tokens = seconds + done.stats.tokens / done.stats.tokens_per_second, tokens + done.stats.tokens
            wanted = model.tokenizer.decode(list(example.answer_ids), skip_special_tokens=True)
            equal += exact_match(done.text, (wanted,), {})[0]
    exact = equal / len(examples) if longest <= LONGEST else None
    return Decoded(round(tokens / seconds, 1) if seconds else 0.0, exact, len(examples))
