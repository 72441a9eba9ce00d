"""The beginning from which a model writes its own prompt: the open user turn of its template, or its start token.

An instruction-tuned model continues the beginning of a user's turn with a request (Magpie, Xu et al. 2024). The turn is
found in the text of the template, whatever its syntax: a conversation with a placeholder is rendered and cut there.

    <|im_start|>user\n PLACEHOLDER <|im_end|>\n<|im_start|>assistant\n
                      ^ cut         ^ the first token after it ends the prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.errors import CapabilityError
from anabranch.model.load import Target
from anabranch.model.text import encode, render_chat

__all__ = ["OpenTurn", "open_turn", "special_ids"]

PLACEHOLDER = "PLACEHOLDER"


@dataclass(frozen=True)
class OpenTurn:
    """Token ids to continue, and what ends the continuation.

    chat      whether it is a user's turn; otherwise the beginning of a text, which nothing ends
    stop_ids  tokens that end a prompt
    stop      text that ends it, where the template has no special token for that; empty: none
    """

    ids: tuple[int, ...]
    chat: bool
    stop_ids: frozenset[int]
    stop: str = ""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special and added tokens, such as the marks of a chat template."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset({*(getattr(tokenizer, "all_special_ids", None) or ()), *map(int, added)})


def open_turn(target: Target) -> OpenTurn:
    """The beginning of a prompt by ``target``. Raises CapabilityError without a usable template or a start token."""
    tokenizer, stops = target.tokenizer, frozenset(target.config.eos_token_ids)
    if not getattr(tokenizer, "chat_template", None):
        return OpenTurn((_start(target),), False, stops)
    before, mark, after = render_chat(tokenizer, [{"role": "user", "content": PLACEHOLDER}]).partition(PLACEHOLDER)
    # a space before the text is usually part of its first token
    ids = tuple(encode(tokenizer, before.rstrip(" "), add_special_tokens=False))
    if not mark or PLACEHOLDER in after or not ids:
        raise CapabilityError(
            f"the chat template of {target.name} does not show where a user's turn begins, so it cannot write its own "
            "prompts; give prompts (--prompts)"
        )
    after = after.lstrip()
    first = encode(tokenizer, after, add_special_tokens=False)[:1] if after else []
    if first and first[0] in special_ids(tokenizer):
        return OpenTurn(ids, True, stops | set(first))
    return OpenTurn(ids, True, stops, after.partition("\n")[0].rstrip())


def _start(target: Target) -> int:
    config = target.config
    for token in (config.bos_token_id, getattr(target.tokenizer, "bos_token_id", None), *config.eos_token_ids):
        if token is not None:
            return int(token)
    raise CapabilityError(
        f"{target.name} has neither a chat template nor a start token, so it cannot write its own prompts; give "
        "prompts (--prompts)"
    )
