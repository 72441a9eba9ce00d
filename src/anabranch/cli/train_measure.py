"""Tokens/s with a new adapter against plain decoding, measured at the end of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.screen import Screen

if TYPE_CHECKING:
    from anabranch.model.load import Target
    from anabranch.train import Example

__all__ = ["drafter_of", "measured_speeds"]

PROMPTS = 8  # decoded one at a time
TOKENS = 64  # of each
PLAIN = "none"


def drafter_of(record: Mapping[str, Any]) -> str:
    """The drafter that uses an adapter: "auto" if that includes its method."""
    from anabranch.methods import AUTO, methods

    found = next(method for method in methods() if method.name == record["method"])
    return AUTO if found.default else found.name


def measured_speeds(
    target: Target, record: Mapping[str, Any], out: Path, examples: Sequence[Example], screen: Screen
) -> dict[str, float]:
    """Tokens/s of decoding a few prompts one at a time, by drafter: plain decoding, and the adapter's.

    Packs the target's weights. The two alternate from prompt to prompt, after one prompt each that is not counted.
    """
    from anabranch.adapters.folder import load_adapter
    from anabranch.api import Model
    from anabranch.model.pack import pack_decoder

    adapter = load_adapter(out, target)
    pack_decoder(target.decoder)
    used = drafter_of(record)
    room = target.config.max_positions
    prompts = [list(example.prompt_ids) for example in examples if len(example.prompt_ids) < room - 1][:PROMPTS]
    seconds, tokens = {PLAIN: 0.0, used: 0.0}, {PLAIN: 0, used: 0}
    model = Model(target, (adapter,), used)
    for number, prompt in enumerate([*prompts[:1], *prompts]):
        line = f"decoding for the measured tokens/s, prompt {number + 1} of {len(prompts) + 1}"
        screen.show(line, "(--no-timing skips this)", plain=line)
        for name in seconds:
            stats = model.generate(prompt, max_new_tokens=min(TOKENS, room - len(prompt)), drafter=name).stats
            if number and stats.tokens_per_second:
                seconds[name] += stats.tokens / stats.tokens_per_second
                tokens[name] += stats.tokens
    return {name: round(tokens[name] / seconds[name], 1) for name in seconds if seconds[name]}
