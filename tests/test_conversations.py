"""Conversations in the shapes that chat clients send have the token ids of transformers' apply_chat_template."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.api import Model
from anabranch.errors import CapabilityError, InputError
from toy_text import toy_model

TEMPLATE = (
    "{%- if tools %}[tools {{ tools | tojson }}]{% endif %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "nothink{% endif %}{{ mood }}{% endif %}"
)
STRINGS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '.' }}{% endfor %}[assistant]"
PRINTED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
USER = {"role": "user", "content": "the thing"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return city


@pytest.fixture(scope="module")
def model() -> Model:
    made = toy_model("none")
    made.tokenizer.chat_template = TEMPLATE
    return made


SHAPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER], {}),
    "empty content": ([{"role": "user", "content": ""}], {}),
    "content parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], {}),
    "extra fields": ([{**USER, "name": "bob", "cache_control": None}], {}),
    "tool call": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "5"}],
        {},
    ),
    "tool call alone": ([USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}], {}),
    "ends with a tool call": ([USER, {"role": "assistant", "content": "hm", "tool_calls": [CALL]}], {}),
    "tools": ([USER], {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    "functions as tools": ([USER], {"tools": [weather]}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "another template": ([USER], {"chat_template": "{{ messages[0].content }}!"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_ids_are_those_of_transformers(model: Model, name: str) -> None:
    messages, options = SHAPES[name]
    expected = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert model.chat_ids(messages, **options) == expected


def test_chat_takes_them_too(model: Model) -> None:
    messages = ({"role": "user", "content": [{"type": "text", "text": "a"}]},)
    expected = model.chat_ids(messages, enable_thinking=False)
    assert model.chat(messages, max_new_tokens=2, enable_thinking=False).prompt_ids == expected
    *_, last = model.chat_stream(messages, max_new_tokens=2, enable_thinking=False)
    assert last.result.prompt_ids == expected


def test_a_last_message_of_the_assistant_is_continued(model: Model) -> None:
    begun = [USER, {"role": "assistant", "content": "it is"}]
    apply = model.tokenizer.apply_chat_template
    resumed = apply(begun, continue_final_message=True, return_dict=False)
    assert model.chat_ids(begun) == model.chat_ids(begun, continue_final_message=True) == resumed
    assert model.tokenizer.decode(resumed).endswith("<assistant>it is")
    anew = apply(begun, add_generation_prompt=True, return_dict=False)
    assert model.chat_ids(begun, continue_final_message=False) == anew
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "it is"}]}]
    assert model.chat_ids(parts) == resumed


def test_variables_of_the_template(model: Model) -> None:
    calm = model.chat_ids([USER], template={"mood": "calm", "unread": 3})
    assert calm == model.chat_ids([USER], mood="calm")
    assert model.tokenizer.decode(calm).endswith("calm")
    with pytest.raises(InputError, match="no option 'max_new_token', and the model's chat template does not read it"):
        model.chat([USER], max_new_token=3)
    with pytest.raises(InputError, match="chat_ids takes options of the chat template, got 'seed'"):
        model.chat_ids([USER], seed=3)
    with pytest.raises(InputError, match="template must be a dictionary"):
        model.chat([USER], template="enable_thinking")


@pytest.mark.parametrize("template", [STRINGS, PRINTED])
def test_templates_for_strings_get_parts_as_one_string(template: str) -> None:
    model = toy_model("none")
    model.tokenizer.chat_template = template
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "thing"}]}]
    assert model.chat_ids(parts) == model.chat_ids([{"role": "user", "content": "the\nthing"}])


def test_several_templates(model: Model) -> None:
    several = toy_model("none")
    several.tokenizer.chat_template = {"default": STRINGS, "tool_use": TEMPLATE}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert several.chat_ids([USER], tools=tools) == model.chat_ids([USER], tools=tools)
    assert several.chat_ids([USER], chat_template="tool_use") == model.chat_ids([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "a message must be a dictionary with a role and a content"),
        ([{"content": "x"}], "a message must be a dictionary with a role and a content"),
        ([{"role": "user", "content": 3}], "must be a string or a list of parts, got 3"),
        ([{"role": "user", "content": [3]}], "a part of a message's content must be .*, got 3"),
        ([{"role": "system", "content": "be brief"}, USER], "refuses this conversation: no system role"),
        ([{"role": "user", "content": None}], "a message must be a dictionary with a role and a content"),
        ([{"role": "user", "content": "\ud800"}], "unpaired surrogate"),
        ([], "the conversation is empty"),
    ],
)
def test_messages_that_are_none(model: Model, messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.chat(messages)


def test_unsupported_conversations_are_refused(model: Model) -> None:
    with pytest.raises(CapabilityError, match="no chat template"):
        toy_model(template=False).chat([USER])
    with pytest.raises(CapabilityError, match="reads text only, and a message has a part of type 'image'"):
        model.chat([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
