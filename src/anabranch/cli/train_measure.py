"""Tokens/s with a new adapter against plain decoding, measured at the end of a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.screen import Screen

if TYPE_CHECKING:
    from anabranch.model.load import Target
    from anabranch.train import Example

__all__ = ["measured_speeds"]

PROMPTS = 8  # decoded one at a time
TOKENS = 64  # of each
PLAIN = "none"


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
    prompts = [list(example.prompt_ids) for example in examples if len(example.prompt_ids) < room - 1][:PROMPTS]
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
