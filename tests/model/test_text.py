"""Chat templates and tokenizers are files: whatever they do ends in text, or in one sentence."""

from __future__ import annotations

import time
from typing import Any

import pytest

from anabranch.errors import FileError, InputError
from anabranch.model import text
from anabranch.model.text import encode, foreign_errors, render_chat, time_limit
from toy_text import byte_tokenizer

MESSAGES = [{"role": "user", "content": "the"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ 1 / 0 }}",
        "{{ messages.x.y.z }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no\nthanks') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**16 }}",
        "{% include 'x' %}",
    ],
)
def test_templates_that_fail_are_one_sentence(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="the chat template of toy refuses this conversation: ") as caught:
        render_chat(tokenizer, MESSAGES, "toy")
    assert "\n" not in str(caught.value)


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "TEMPLATE_SECONDS", 0.2)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InputError, match="it takes more than"):
        render_chat(tokenizer, MESSAGES)


def test_a_time_limit_that_is_kept_leaves_nothing_behind() -> None:
    late = 0
    for _ in range(50):
        try:
            with time_limit(0.001):
                time.sleep(0.001)
        except Exception:
            late += 1
    time.sleep(0.01)  # an exception that came too late would arrive here
    assert late <= 50


def test_a_tokenizer_that_lacks_a_word() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")))
    assert encode(tokenizer, "a") == [0]
    with pytest.raises(InputError, match="the tokenizer rejects this text"):
        encode(tokenizer, "b")


def test_panics_are_errors_and_ctrl_c_is_not() -> None:
    class PanicException(BaseException):
        pass

    def explain(why: str) -> FileError:
        return FileError(f"broken ({why})")

    def fail(error: BaseException) -> Any:
        with foreign_errors(explain):
            raise error

    with pytest.raises(FileError, match=r"broken \(out of range\)"):
        fail(PanicException("out\nof range."))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
