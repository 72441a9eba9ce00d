"""From a conversation with tools to a call: what chat completions, messages and responses share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.declared import Keywords
from anabranch.model.text import ChatTemplate, template_reads
from anabranch.prompts import conversation_ids
from anabranch.serve.conversation import described_tools
from anabranch.serve.failures import RequestError
from anabranch.serve.service import Call, Service
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
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    single: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    resumes: bool | None = None

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that it is shown."""
        return () if self.choice == "none" else self.tools

    def reader(self, style: Style | None) -> ToolReader:
        """A reader of one answer."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.offered}
        return ToolReader(style if self.offered else None, schemas, single=self.single)


def prompt_of(service: Service, turn: Turn) -> list[int]:
    """The token ids of a conversation. Raises RequestError, InputError or CapabilityError."""
    tokenizer = service.model.tokenizer
    if turn.choice not in ("auto", "none"):
        raise RequestError(
            400, f"tool_choice={turn.choice!r} is not supported; leave it to the model", param="tool_choice"
        )
    if turn.offered and style(service) is None:
        raise RequestError(
            400, "the model writes tool calls in a form that is not parsed here; leave tools out", param="tools"
        )
    messages, tools = described_tools(tokenizer, turn.messages, turn.offered)
    for name in turn.variables:
        if not template_reads(tokenizer, name, ChatTemplate()):
            raise RequestError(400, f"the model's chat template does not read {name!r}", param="chat_template_kwargs")
    template = ChatTemplate(tools=tools, continue_final_message=turn.resumes, variables=dict(turn.variables))
    return conversation_ids(messages, tokenizer, service.names[0], template)


def style(service: Service) -> Style | None:
    """How the model writes tool calls."""
    tokenizer = service.model.tokenizer
    if not template_reads(tokenizer, "tools", ChatTemplate()):
        return "tags"
    template = getattr(tokenizer, "chat_template", None)
    return style_of(template if isinstance(template, str) else str(template))


def prepared(
    service: Service, turn: Turn, keywords: Keywords, *, most: int | None, n: int, whole: bool, unused: Sequence[str]
) -> Call:
    """The call of a conversation, with ``n`` samples; ``most`` and ``whole`` as in ``Service.jobs``."""
    ids = prompt_of(service, turn)
    jobs = service.jobs([ids], keywords, most=most, n=n, whole=whole)
    return Call([ids], n, jobs, unused=unused)
