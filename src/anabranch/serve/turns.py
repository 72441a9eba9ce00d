"""From a conversation with tools to a call, for chat completions, messages and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.declared import STRUCTURES, Keywords
from anabranch.model.text import ChatTemplate, template_reads
from anabranch.prompts import conversation_ids
from anabranch.serve.conversation import described_tools
from anabranch.serve.failures import RequestError
from anabranch.serve.fields import FORMATS, Sampling
from anabranch.serve.service import Call, Service
from anabranch.serve.structure import call_grammar, text_grammar, wanted_format
from anabranch.serve.toolcalls import Style, ToolReader, style_of

__all__ = ["Turn", "prepared", "prompt_of"]


@dataclass(frozen=True)
class Turn:
    """A conversation that the model is to continue.

    messages   as templates take them
    tools      functions that it may call, in OpenAI's form
    choice     "auto", "none", "required", or the name of the function to call
    single     whether it may call one at most
    variables  of the template
    resumes    whether the answer continues the last message; None: if it is the assistant's
    special    whether the tokenizer adds its special tokens to the template's text
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    single: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    resumes: bool | None = None
    special: bool = False

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that it is shown."""
        return () if self.choice == "none" else self.tools

    def forced(self, style: Style) -> Keywords:
        """The option of a call that makes the model call a tool, where it has no choice, and call it rightly.

        Raises RequestError.
        """
        if self.choice in ("auto", "none"):
            strict = any(tool["function"].get("strict") for tool in self.offered)
            return {"grammar": text_grammar(self.offered, style)} if strict else {}
        tools = [tool for tool in self.tools if self.choice in ("required", tool["function"]["name"])]
        if not tools:
            asked = "one" if self.choice == "required" else repr(self.choice)
            raise RequestError(
                400, f"tool_choice asks for {asked}, which is not among the request's tools", param="tool_choice"
            )
        return {"grammar": call_grammar(tools, style)}

    def reader(self, style: Style | None) -> ToolReader:
        """A reader of one answer."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.offered}
        return ToolReader(style if self.offered else None, schemas, single=self.single)


def prompt_of(service: Service, turn: Turn) -> list[int]:
    """The token ids of a conversation. Raises RequestError, InputError or CapabilityError."""
    tokenizer = service.model.tokenizer
    if turn.offered and style(service) is None:
        raise RequestError(
            400, "the model writes tool calls in a form that is not parsed here; leave tools out", param="tools"
        )
    messages, tools = described_tools(tokenizer, turn.messages, turn.offered)
    for name in turn.variables:
        if not template_reads(tokenizer, name, ChatTemplate()):
            raise RequestError(400, f"the model's chat template does not read {name!r}", param="chat_template_kwargs")
    template = ChatTemplate(tools=tools, continue_final_message=turn.resumes, variables=dict(turn.variables))
    return conversation_ids(messages, tokenizer, service.names[0], template, add_special_tokens=turn.special)


def style(service: Service) -> Style | None:
    """The form in which the model writes tool calls."""
    tokenizer = service.model.tokenizer
    if not template_reads(tokenizer, "tools", ChatTemplate()):
        return "tags"
    template = getattr(tokenizer, "chat_template", None)
    return style_of(template if isinstance(template, str) else str(template))


def prepared(
    service: Service,
    turn: Turn,
    body: Sampling,
    *,
    most: int | None,
    form: tuple[str, Any] = ("", None),
    extra: Keywords | None = None,
) -> Call:
    """The call of a conversation with the options of its request, and ``extra`` ones; ``most`` as in ``Service.jobs``.

    form  an interface's own field for the answer's format, and what it says

    Raises RequestError, InputError, CapabilityError or OutOfMemoryError.
    """
    unused, model = body.unused(), service.choice(body.model)
    keywords: Keywords = {**body.keywords(service.model.target.generation), **(extra or {})}
    name, value = form
    if value is not None:
        if other := next((each for each in FORMATS if getattr(body, each) is not None), None):
            said = f"{name} and {other} both say what the answer must be; give one of them"
            raise RequestError(400, said, param=name)
        keywords |= wanted_format(value, name)
    ids, n = prompt_of(service, turn), body.n or 1
    if turn.offered and any(name in keywords for name in STRUCTURES):
        raise RequestError(
            400, "an answer in a given format cannot call tools; leave one of them out, or set tool_choice to 'none'"
        )
    keywords |= turn.forced(style(service) or "tags")
    whole, priority = not body.stream, body.priority or 0
    jobs = service.jobs([ids], keywords, model=model, most=most, n=n, whole=whole, priority=priority)
    return Call([ids], n, jobs, model, unused=unused)
