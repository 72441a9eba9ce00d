"""Models, health, slots, properties, metrics, and the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from anabranch.model.kernel_use import kernels_of
from anabranch.prompts import read_prompts
from anabranch.serve.conversation import template_messages, tools_of
from anabranch.serve.failures import FAILURES, RequestError
from anabranch.serve.fields import Body, Items
from anabranch.serve.foreign import PROMPT
from anabranch.serve.metrics import CONTENT_TYPE
from anabranch.serve.service import Service, ignored
from anabranch.serve.turns import Turn, prompt_of
from anabranch.serve.usage import token_text
from anabranch.serve.wire import Json

__all__ = ["router"]

router = APIRouter(responses=FAILURES)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Status 200 while requests are served, 503 while the server shuts down or cannot decode."""
    service = _service(request)
    said = "draining" if service.draining else "error" if service.worker.broken is not None else "ok"
    return Json({"status": said}, 200 if said == "ok" else 503)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model under its names, its LoRAs and its adapters."""
    service = _service(request)
    cards = [service.card(name) for name in (*service.names, *service.others)]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}  # of Anthropic's form
    return Json({"object": "list", "data": cards, **ends})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One model."""
    service = _service(request)
    service.choice(name)
    return Json(service.card(name))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE)


@router.get("/props")
async def props(request: Request) -> Response:
    """Properties of the model and its decoding, under llama.cpp's names where it has them."""
    service = _service(request)
    target = service.model.target
    return Json(
        {
            "model_path": target.name,
            "model_alias": service.names[0],
            "total_slots": service.settings.rows,
            "n_ctx": service.context,
            "chat_template": getattr(service.model.tokenizer, "chat_template", None),
            "modalities": {"vision": False, "audio": False},
            "drafter": str(service.model.spec_of_several),
            "loras": list(target.decoder.loras.names),
            "adapters": list(service.model.choices),
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "quantize": target.quantize,
            "device": str(target.decoder.device),
            "kernels": kernels_of(target.decoder).name,
            "threads": service.model.threads,
        }
    )


@router.get("/slots")
async def slots(request: Request) -> Response:
    """The sequences that decode or wait, without their texts."""
    found: list[dict[str, Any]] = []
    for number, job in enumerate(_service(request).worker.jobs):
        row = None if job.ticket is None else job.ticket.row
        found.append(
            {
                "id": number,
                "is_processing": row is not None,
                "n_prompt_tokens": len(job.request.prompt_ids),
                "n_decoded": job.tokens,
                "n_predict": job.request.max_new_tokens,
                "drafter": None if job.ticket is None or job.ticket.used is None else job.ticket.used.name,
            }
        )
    return Json(found)


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """Refused: the models that are served generate text."""
    raise RequestError(400, "/v1/embeddings is not served: the model generates text and has no embeddings of texts")


class TokenizeBody(Body):
    """A text, or a conversation, to tokenize; ``content`` is llama.cpp's name of ``prompt``."""

    foreign = PROMPT

    prompt: str | None = None
    content: str | None = None
    messages: Items[dict[str, Any]] | None = Field(None, min_length=1)
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="null: for texts only")
    return_token_strs: bool | None = None


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The token ids of a text or a conversation."""
    service = _service(request)
    request.state.unused = unused = body.unused()
    ids = await run_in_threadpool(_ids, service, body)
    said: dict[str, Any] = {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        said["token_strs"] = [token_text(service.model.tokenizer, token) for token in ids]
    return Json(said, headers=ignored(unused))


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        return prompt_of(service, Turn(template_messages(body.messages), tools_of(body.tools), special=special))
    text = body.content if body.prompt is None else body.prompt
    if text is None:
        raise RequestError(400, "give a prompt or messages to tokenize", param="prompt")
    if not text:
        return []
    special = body.add_special_tokens is not False
    return read_prompts(text, service.model.tokenizer, add_special_tokens=special)[1][0]


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    foreign = PROMPT

    tokens: Items[int]
    return_token_strs: bool | None = None


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    service = _service(request)
    request.state.unused = unused = body.unused()
    vocabulary = service.model.target.config.vocab_size
    if wrong := [token for token in body.tokens if not 0 <= token < vocabulary]:
        raise RequestError(400, f"tokens has {wrong[0]}, but the vocabulary ends at {vocabulary - 1}", param="tokens")
    text = str(await run_in_threadpool(service.model.tokenizer.decode, body.tokens))
    said: dict[str, Any] = {"prompt": text, "content": text}
    if body.return_token_strs:
        said["token_strs"] = [token_text(service.model.tokenizer, token) for token in body.tokens]
    return Json(said, headers=ignored(unused))
