"""The model, its names, and the way from prompts to an answer, which the handlers of all interfaces share."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from anabranch.api import Model
from anabranch.declared import Keywords
from anabranch.decoding.ticks import KEPT_SHARE
from anabranch.options import Options
from anabranch.serve.failures import RequestError
from anabranch.serve.jobs import Job, ScoreJob
from anabranch.serve.metrics import Metrics
from anabranch.serve.settings import Settings, keys_of
from anabranch.serve.worker import Answer, Worker

__all__ = ["Call", "Service", "ignored"]

MIB = 2**20
UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


@dataclass(frozen=True)
class Call:
    """A checked request: the sequences to decode and the texts to score.

    prompts  token ids of each prompt; ``jobs`` has ``n`` sequences of each, in order
    model    the LoRA or the adapter that it chose (``Service.choice``); None: the model itself
    scores   of each prompt, where its own log probabilities are wanted
    unused   fields that have no effect
    """

    prompts: Sequence[list[int]]
    n: int
    jobs: Sequence[Job]
    model: str | None = None
    scores: Sequence[ScoreJob] = ()
    unused: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return ignored(self.unused)


def ignored(unused: Sequence[str]) -> dict[str, str]:
    """The header that names fields without effect; empty for none."""
    # the names are the client's: a header takes printable ASCII, and not too much of it
    names = [UNPRINTABLE.sub("?", name)[:64] for name in unused[:32]]
    return {"x-anabranch-ignored": ", ".join(names)} if names else {}


class Service:
    """A model that is served. Raises what ``keys_of`` and ``Model.keep_prefixes`` raise."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.keys = keys_of(settings)
        own = model.target.name
        self.names = settings.names or tuple(dict.fromkeys((own.rstrip("/").rsplit("/", 1)[-1] or own, own)))
        self.metrics = Metrics(self.names[0])
        model.scheduler.limit(settings.rows)
        memory = KEPT_SHARE if settings.prefix_memory is None else settings.prefix_memory * MIB
        model.keep_prefixes(memory=memory, disk=settings.prefix_disk * MIB, folder=settings.prefix_folder)
        self.drafter = model.drafter_of(model.spec_of_several)  # measured before the first request
        self.worker = Worker(model, self.metrics, room=settings.rows + settings.queue)
        self.started = int(time.time())
        self.draining = False

    @property
    def others(self) -> list[str]:
        """The names of LoRAs and adapters, which are models of their own to clients."""
        return list(dict.fromkeys((*self.model.target.decoder.loras.names, *self.model.choices)))

    @property
    def context(self) -> int:
        """The most tokens of a text, prompt included."""
        return self.model.target.config.max_positions

    def choice(self, name: str | None) -> str | None:
        """The LoRA or the adapter that a model name stands for, None for the model itself.

        Raises RequestError for an unknown name.
        """
        if name is None or name in self.names or name.startswith("claude-"):
            return None
        if name in self.others:
            return name
        known = ", ".join((*self.names, *self.others))
        raise RequestError(404, f"there is no model {name!r} here, only {known}", param="model", code="model_not_found")

    def lora_of(self, model: str | None) -> str | None:
        """The LoRA of a choice; None: it has none."""
        return model if model in self.model.target.decoder.loras.names else None

    def jobs(
        self,
        prompts: Sequence[list[int]],
        keywords: Keywords,
        *,
        model: str | None,
        most: int | None,
        n: int,
        whole: bool,
        priority: int = 0,
    ) -> list[Job]:
        """The checked sequences of some prompts. Raises RequestError, InputError, CapabilityError or OutOfMemoryError.

        model  the LoRA or the adapter (``choice``), or both of this name
        most   new tokens; None: as many as the context and the server allow
        n      samples of each prompt, with seeds that count up
        whole  whether only the whole text is wanted
        priority  smaller ones come first, as in vLLM
        """
        arrived = time.monotonic()
        if len(prompts) * n > self.worker.room:
            asked, room = len(prompts) * n, self.worker.room
            raise RequestError(400, f"the request has {asked} sequences, but the server takes {room}; send fewer")
        limit = self.settings.max_tokens
        if limit is not None and most is not None and most > limit:
            raise RequestError(400, f"the answer is limited to {limit} tokens here, got {most}", param="max_tokens")
        scheduler, jobs = self.model.scheduler, []
        lora = self.lora_of(model)
        chosen: Keywords = {"adapter": model} if lora is None else {"lora": lora}
        for ids in prompts:
            room = self.context - len(ids)
            if room <= 0:
                raise RequestError(
                    400,
                    f"the prompt has {len(ids)} tokens, but the model's context is {self.context}; shorten it",
                    code="context_length_exceeded",
                )
            new = min(limit or room, room) if most is None else min(most, room)
            options = Options({**keywords, **chosen, "max_new_tokens": new, **({"n": n} if n > 1 else {})})
            drafter = self.model.drafter_for(options, several=True)
            stop = options.stops(self.model.target)
            for seed in options.seeds(1)[0]:
                request = options.request(list(ids), self.model.target, seed)
                scheduler.check(request, drafter)
                jobs.append(Job(request, drafter, stop, arrived, -priority, whole))
        return jobs

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self.draining = True

    def begin(self, call: Call, key: str) -> Answer:
        """Queue a call of a client's (``access.Access``). Raises RequestError if there is no room."""
        if self.draining:
            raise RequestError(503, "the server is shutting down; send the request to another one", retry=5)
        deadline = time.monotonic() + self.settings.request_seconds
        return self.worker.put([*call.jobs, *call.scores], deadline, key)

    def card(self, name: str) -> dict[str, Any]:
        """A model as ``/v1/models`` lists it, in OpenAI's form and in Anthropic's."""
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "anabranch",
            "root": self.model.target.name if name in self.names else name,
            "parent": None if name in self.names else self.names[0],
            "max_model_len": self.context,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.started, timezone.utc).isoformat(),
        }
