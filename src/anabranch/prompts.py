"""Convert prompts to token ids: text, ids, arrays, tensors, or a tokenizer's encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.model.text import ChatTemplate, encode, render_chat
from anabranch.support.files import LONE_SURROGATES

__all__ = ["Arrays", "Ids", "TextOrMessages", "chat_ids", "check_stream", "conversation_ids", "read_prompts"]

Ids: TypeAlias = Sequence[int]
# a user's text, or a conversation
TextOrMessages: TypeAlias = str | Sequence[Mapping[str, str]]
# one prompt or several, depending on the number of dimensions
Arrays: TypeAlias = Tensor | NDArray[np.integer[Any]] | Mapping[str, Any]

EMPTY = "the prompt is empty; give some text or at least one token id"
KINDS = "a string, a list of token ids, an integer tensor or array, a tokenizer's encoding, or a list of these"
IDS, MASK = "input_ids", "attention_mask"
# entries of a tokenizer's encoding that a decoder-only model does not use
UNUSED = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length", "num_truncated_tokens"}


def read_prompts(prompt: Any, tokenizer: Any, **options: Any) -> tuple[bool, list[list[int]]]:
    """Return whether ``prompt`` is a single prompt, and the token ids of each prompt.

    An integer tensor or array is one prompt if it has one dimension [L], and a list of prompts if it has two [B, L].
    The same holds for a tokenizer's encoding (``BatchEncoding``, or any mapping with ``input_ids``); padding at either
    end, as marked by its ``attention_mask``, is removed.
    ``options`` are those of the tokenizer's ``encode``.

    Raises InputError for any other type, for an empty prompt, and for a mask that hides tokens inside a prompt.
    """
    if isinstance(prompt, str):
        return True, [_encode(prompt, tokenizer, **options)]
    if isinstance(prompt, Mapping):
        return _encoding(prompt)
    if isinstance(prompt, Tensor | np.ndarray):
        return _array(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise InputError(f"a prompt must be {KINDS}, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise InputError(EMPTY)
    if (ids := _ids(prompt)) is not None:
        return True, [ids]
    return False, [_one(item, tokenizer, **options) for item in prompt]


def check_stream(prompts: int) -> None:
    """Raise InputError for a number of prompts that cannot be streamed."""
    if prompts > 1:
        raise InputError(f"stream takes one prompt at a time, got {prompts}; use generate for several")


def chat_ids(
    tokenizer: Any,
    text: TextOrMessages,
    *,
    raw: bool = False,
    system: str | None = None,
    model: str = "this model",
) -> list[int]:
    """The token ids of a user's text, in the chat template if there is one and ``raw`` is not set.

    ``text`` may also be a conversation, which needs the template.
    ``system`` is an optional system message. Raises InputError for a text or message that the tokenizer or the
    template rejects and for ``system`` with ``raw``, CapabilityError for ``system`` without a template.
    """
    if system is not None and raw:
        raise InputError("a system message needs the chat template, which raw disables; give only one of them")
    if not isinstance(text, str):
        if raw:
            raise InputError("a conversation needs the chat template, which raw disables; leave raw out")
        return conversation_ids(text, tokenizer, model)
    templated = bool(getattr(tokenizer, "chat_template", None))
    if system is not None and not templated:
        raise CapabilityError(f"{model} has no chat template and so accepts no system message; leave it out")
    if raw or not templated:
        return _tokenize(text, tokenizer)
    first = [] if system is None else [{"role": "system", "content": system}]
    return conversation_ids([*first, {"role": "user", "content": text}], tokenizer, model)


def conversation_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    model: str = "this model",
    template: ChatTemplate | None = None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """The token ids of a conversation in the tokenizer's chat template, ending where the answer begins or continues.

    ``add_special_tokens`` lets the tokenizer add BOS and the like, which templates usually write themselves.
    Raises InputError for a conversation that the template rejects, and CapabilityError if ``model`` has no template.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputError(
            f"a conversation must be a list of messages {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    for message in messages:
        _check_message(message)
    if not getattr(tokenizer, "chat_template", None) and (template is None or template.chat_template is None):
        raise CapabilityError(f"{model} has no chat template; use generate with a plain prompt")
    template = template or ChatTemplate()
    if template.continue_final_message is None:
        template = replace(template, continue_final_message=_resumes(messages[-1]))
    text = render_chat(tokenizer, messages, model, template)
    if not (ids := _tokenize(text, tokenizer, add_special_tokens=add_special_tokens)):
        raise InputError(f"the chat template of {model} makes an empty prompt of this conversation")
    return ids


def _resumes(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the beginning of an answer."""
    return message["role"] == "assistant" and bool(message.get("content")) and not message.get("tool_calls")


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"a message must be a dictionary with a role and a content, got {message!r}")
    content = message.get("content")
    if content is None and not message.keys() - {"role", "content", "name"}:
        raise InputError(f"a message must be a dictionary with a role and a content, got {message!r}")
    if isinstance(content, str | None):
        return
    if not isinstance(content, list | tuple):
        raise InputError(f"the content of a message must be a string or a list of parts, got {content!r}")
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping):
            raise InputError(f"a part of a message's content must be {{'type': 'text', 'text': ...}}, got {part!r}")
        if (kind := part.get("type", "text")) != "text":
            raise CapabilityError(f"the model reads text only, and a message has a part of type {kind!r}; leave it out")
        if not isinstance(part.get("text"), str):
            raise InputError(f"a part of a message's content must be {{'type': 'text', 'text': ...}}, got {part!r}")


def _tokenize(text: str, tokenizer: Any, **options: Any) -> list[int]:
    if half := LONE_SURROGATES.search(text):
        raise InputError(f"the prompt contains an unpaired surrogate, {half[0]!r}, at index {half.start()}; remove it")
    return encode(tokenizer, text, **options)


def _encode(text: str, tokenizer: Any, **options: Any) -> list[int]:
    ids = _tokenize(text, tokenizer, **options)
    if not text or not ids:
        raise InputError(EMPTY)
    return ids


def _one(item: Any, tokenizer: Any, **options: Any) -> list[int]:
    """The ids of one prompt of a list."""
    if isinstance(item, str):
        return _encode(item, tokenizer, **options)
    if isinstance(item, Tensor | np.ndarray | Mapping):
        single, lists = _encoding(item) if isinstance(item, Mapping) else _array(item)
        if not single and len(lists) > 1:
            raise InputError(f"an item of a list of prompts must be one prompt, got {len(lists)} in one item")
        return lists[0]
    ids = _ids(item) if isinstance(item, Sequence) and not isinstance(item, bytes) else None
    if ids is None:
        raise InputError(f"an item of a list of prompts must be a string or token ids, got {item!r}")
    if not ids:
        raise InputError(EMPTY)
    return ids


def _ids(items: Sequence[Any]) -> list[int] | None:
    """Integers of any type as Python integers; None if an item is not an integer."""
    return [int(item) for item in items] if all(map(_is_id, items)) else None


def _is_id(item: Any) -> bool:
    if isinstance(item, Tensor | np.ndarray):  # the items of list(tensor)
        return item.ndim == 0 and _is_integer(item)
    return isinstance(item, Integral) and item is not True and item is not False


def _is_integer(array: Tensor | NDArray[Any]) -> bool:
    if isinstance(array, Tensor):
        return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)
    return array.dtype.kind in "iu"


def _array(array: Tensor | NDArray[Any], what: str = "token ids") -> tuple[bool, list[list[int]]]:
    kind = "a tensor" if isinstance(array, Tensor) else "an array"
    shape, dtype = tuple(array.shape), str(array.dtype).removeprefix("torch.")
    if not _is_integer(array):
        raise InputError(f"{what} must be integers, got {kind} of {dtype}")
    if len(shape) not in (1, 2):
        raise InputError(f"{kind} of {what} must have one dimension or two, got the shape {shape}")
    if 0 in shape:
        raise InputError(EMPTY)
    rows: Any = array.tolist()
    return (True, [rows]) if len(shape) == 1 else (False, rows)


def _encoding(encoding: Mapping[str, Any]) -> tuple[bool, list[list[int]]]:
    if IDS not in encoding:
        names = ", ".join(map(repr, encoding)) or "an empty one"
        raise InputError(f"a mapping given as a prompt must contain {IDS!r}, got {names}")
    if unknown := [name for name in encoding if name not in UNUSED | {IDS, MASK}]:
        raise InputError(f"the encoding of a prompt may contain {IDS!r} and {MASK!r}, got {unknown[0]!r}; leave it out")
    single, rows = _integers(encoding[IDS], IDS)
    given = encoding.get(MASK)
    if given is None:
        return single, rows
    if isinstance(given, Tensor | np.ndarray) and not _is_integer(given):  # boolean masks
        given = given.tolist()
    _, masks = _integers(given, MASK)
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise InputError(f"{MASK!r} must have the shape of {IDS!r}")
    return single, [_unpadded(row, mask) for row, mask in zip(rows, masks, strict=True)]


def _integers(values: Any, name: str) -> tuple[bool, list[list[int]]]:
    """One entry of an encoding: whether it is a single list of integers, and the lists."""
    if isinstance(values, Tensor | np.ndarray):
        return _array(values, name)
    wrong = f"{name!r} must be a list of integers, a list of such lists, or an integer tensor or array"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputError(f"{wrong}, got {type(values).__name__}")
    if name == MASK:
        values = [int(item) if isinstance(item, bool) else item for item in values]
    if (ids := _ids(values)) is not None:
        if not ids:
            raise InputError(EMPTY)
        return True, [ids]
    rows = []
    for row in values:
        if isinstance(row, Tensor | np.ndarray | list | tuple):
            single, lists = _integers(row, name)
            if single:
                rows += lists
                continue
        raise InputError(f"{wrong}, got an item {row!r}")
    return False, rows


def _unpadded(ids: list[int], mask: list[int]) -> list[int]:
    """Remove the padding at both ends."""
    kept = [place for place, value in enumerate(mask) if value]
    if not kept:
        raise InputError(f"the prompt is empty: its {MASK!r} marks all of its {len(ids)} tokens as padding")
    inside = range(kept[0], kept[-1] + 1)
    if len(kept) != len(inside):
        hidden = next(place for place in inside if not mask[place])
        raise InputError(
            f"{MASK!r} hides token {hidden} inside the prompt; only padding at the ends can be masked, so remove the "
            "token instead"
        )
    return ids[inside.start : inside.stop]
