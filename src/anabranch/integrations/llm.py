"""A plugin for ``llm``, the command line and library for language models: models that anabranch decodes.

``anabranch`` is the default model. ``extra-anabranch-models.yaml`` in llm's folder, a list, names others:

    - model_id: coder
      model: ~/models/coder.gguf    # and other arguments of ``anabranch.load``
      quantize: int4
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import click
import llm
import yaml
from llm.parts import ReasoningPart, TextPart
from pydantic import Field, create_model

from anabranch.declared import CALL, Keywords, check
from anabranch.errors import AnabranchError, InputError

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.decoding.generation import Generation

__all__ = ["AsyncDecoder", "Decoder", "register_models"]

FILE = "extra-anabranch-models.yaml"
LOADING = ("model", "adapter", "drafter", "dtype", "device", "quantize", "revision", "threads", "lora", "kv")
OPTIONS = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("stop", "regex", "drafter", "rule"), str),
}
FIELDS: dict[str, Any] = {
    name: (kind | None, Field(None, description=CALL[name].help)) for name, kind in OPTIONS.items()
}


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    """Register the default model and those of the file; a malformed entry is reported and left out."""
    loadings: dict[str, dict[str, Any]] = {"anabranch": {}}
    path = llm.user_dir() / FILE
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        for entry in entries or ():
            name, loading = _entry(entry)
            loadings[name] = loading
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        click.echo(f"cannot read all models of {path}: {error}", err=True)
    for name, loading in loadings.items():
        loaded = _Loaded(loading)
        register(Decoder(name, loaded), AsyncDecoder(name, loaded))


def _entry(entry: Any) -> tuple[str, dict[str, Any]]:
    """The id and the arguments of loading of one entry. Raises InputError."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model_id"), str):
        raise InputError(f"an entry must have a model_id, got {entry!r}")
    loading = dict(entry)
    name = loading.pop("model_id")
    if unknown := [each for each in loading if each not in LOADING]:
        raise InputError(f"{name} has {unknown[0]!r}; give {', '.join(LOADING)}")
    return name, loading


class _Loaded:
    """A model that is loaded at its first prompt and stays in memory."""

    def __init__(self, loading: Mapping[str, Any]) -> None:
        self._loading = dict(loading)
        self._model: Model | None = None
        self._lock = threading.Lock()

    def model(self) -> Model:
        """The model. Raises what ``anabranch.load`` raises."""
        from anabranch.api import load

        with self._lock:
            if self._model is None:
                loading = dict(self._loading)
                self._model = load(loading.pop("model", "default"), **loading)
            return self._model


class _Both:
    """The common part of the two models of an id."""

    can_stream = True
    supports_schema = True
    Options: ClassVar[Any] = create_model("Options", __base__=llm.Options, **FIELDS)

    def __init__(self, model_id: str, loaded: _Loaded) -> None:
        self.model_id, self._loaded = model_id, loaded

    def _prepared(self, prompt: Any) -> tuple[Model, list[int], Keywords]:
        """The model, the prompt's token ids and the options of a call. Raises AnabranchError."""
        from anabranch.prompts import chat_ids

        keywords: Any = prompt.options.model_dump(exclude_none=True)
        if prompt.schema is not None:
            keywords["schema"] = prompt.schema
        check(keywords)
        messages = [{"role": message.role, "content": _text(message)} for message in prompt.messages]
        model = self._loaded.model()
        # a model without a chat template continues a prompt as it stands
        single = len(messages) == 1 and messages[0]["role"] == "user"
        asked = messages[0]["content"] if single else messages
        return model, chat_ids(model.tokenizer, asked, model=self.model_id), keywords

    def _ended(self, response: Any, prompt: list[int], result: Generation | None) -> None:
        """Give a response the counts that llm shows and logs."""
        assert result is not None
        response.set_usage(input=len(prompt), output=len(result.token_ids))
        response.response_json = {
            "finish_reason": result.finish_reason,
            "steps": result.stats.steps,
            "mean_acceptance_length": round(result.stats.mean_acceptance_length, 3),
            "tokens_per_second": round(result.stats.tokens_per_second, 1),
        }


def _text(message: Any) -> str:
    texts = []
    for part in message.parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif not isinstance(part, ReasoningPart):  # a model is not shown its earlier thoughts
            raise InputError(f"a message has a {type(part).__name__}, but the model takes only text")
    return "\n".join(texts)


class Decoder(_Both, llm.Model):  # type: ignore[misc]
    """A model for ``llm``. Raises llm.ModelError where anabranch raises AnabranchError."""

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield the answer as it is decoded."""
        try:
            model, ids, keywords = self._prepared(prompt)
            for chunk in model.stream(ids, **keywords):
                yield chunk.text
        except AnabranchError as error:
            raise llm.ModelError(str(error)) from error
        self._ended(response, ids, chunk.result)


class AsyncDecoder(_Both, llm.AsyncModel):  # type: ignore[misc]
    """The same with asyncio; prompts at the same time are decoded together."""

    async def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> AsyncGenerator[str, None]:
        """Yield the answer as it is decoded."""
        try:
            model, ids, keywords = await asyncio.to_thread(self._prepared, prompt)
            async for chunk in model.astream(ids, **keywords):
                yield chunk.text
        except AnabranchError as error:
            raise llm.ModelError(str(error)) from error
        self._ended(response, ids, chunk.result)
