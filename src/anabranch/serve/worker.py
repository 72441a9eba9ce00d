"""The thread that owns the model: it runs the scheduler's ticks and hands what they decode to the event loop.

Handlers put an answer in and read its events; nothing of asyncio reaches the model, and nothing of the model waits for
a client. An answer has at most one event a step, and no more steps than tokens, so a client that reads slowly holds
these and nothing else.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from anabranch.api import Model
from anabranch.decoding.generation import Chunk, Output
from anabranch.decoding.scoring import scoring
from anabranch.serve.failures import RequestError
from anabranch.serve.jobs import Event, Job, ScoreJob
from anabranch.serve.metrics import Metrics
from anabranch.support.log import LOGGER

__all__ = ["Answer", "Worker"]

STOPPED = "the server is shutting down"


@dataclass(eq=False)
class Answer:
    """The parts of one request: put in together, read as events within ``with answer:``, which cancels what is left.

    deadline  the time of ``time.monotonic`` at which it ends in any case
    key       whose it is, for fairness among clients
    left      parts that have not ended
    """

    worker: Worker
    parts: Sequence[Job | ScoreJob]
    deadline: float
    key: str
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.left = len(self.parts)

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.left:
            self.worker.cancel(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The events until all parts have ended; raises what ended one early."""
        while self.left:
            event = await self.events.get()
            self.left -= event.last
            if event.error is not None:
                raise event.error
            yield event


class Worker:
    """Decodes the answers that are put in, in a thread of its own.

    room  sequences that may decode or wait at the same time
    """

    def __init__(self, model: Model, metrics: Metrics, *, room: int) -> None:
        self.model, self.room = model, room
        self.broken: BaseException | None = None  # an error of the program that ended the thread
        self._metrics = metrics
        self._threads = torch.get_num_threads()  # torch's number of CPU threads is set per thread
        self._thread = threading.Thread(target=self._run, name="anabranch-serve", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Answer | None]] = queue.SimpleQueue()
        self._size = 0  # sequences that were put in and have not ended
        self._counting = threading.Lock()  # held where it changes
        # of the thread
        self._decoding: dict[Job, tuple[Answer, int]] = {}
        self._scoring: deque[tuple[Answer, int, ScoreJob]] = deque()
        self._produced: list[tuple[Answer, Event]] = []

    # -- in the event loop; ``put`` in any thread --------------------------------------------------------
    def start(self) -> None:
        """Start the thread; events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self) -> None:
        """End what is left with an error, and then the thread."""
        self._inbox.put(("stop", None))

    async def stop(self) -> None:
        """End, and wait until the thread has ended."""
        self.end()
        await asyncio.to_thread(self._thread.join)

    @property
    def size(self) -> int:
        """Sequences that decode or wait."""
        return self._size

    @property
    def jobs(self) -> list[Job]:
        """The sequences that decode or wait, for those who only look."""
        return list(self._decoding)

    def put(self, parts: Sequence[Job | ScoreJob], deadline: float, key: str) -> Answer:
        """Queue an answer of checked jobs. Raises RequestError where the queue is full or decoding has ended."""
        if self.broken is not None:
            raise RequestError(503, "the server cannot decode any more; restart it")
        if len(parts) > self.room:
            raise RequestError(
                400, f"the request has {len(parts)} sequences, but the server takes {self.room}; send fewer"
            )
        with self._counting:
            if self._size + len(parts) > self.room:
                self._metrics.refused.inc()
                raise RequestError(503, f"{self._size} sequences decode or wait already; try again later", retry=1)
            self._size += len(parts)
        answer = Answer(self, parts, deadline, key)
        self._inbox.put(("put", answer))
        return answer

    def cancel(self, answer: Answer) -> None:
        """Cancel an answer; its sequences end after the step that is running."""
        self._inbox.put(("cancel", answer))

    def _deliver(self, produced: list[tuple[Answer, Event]]) -> None:
        with self._counting:
            self._size -= sum(event.last for _, event in produced)
        for answer, event in produced:
            answer.events.put_nowait(event)

    # -- in the thread -----------------------------------------------------------------------------------
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with self.model.target.decoder.inference():
                while self._take():
                    self._pass()
            self._end_all(RequestError(503, STOPPED, retry=5))
        except BaseException as error:
            LOGGER.exception("decoding ended by an error of the program")
            self.broken = error
            self._end_all(error)

    def _take(self) -> bool:
        """Carry out what handlers asked for, waiting for it if there is nothing to do; returns False to stop."""
        while True:
            idle = not (self._decoding or self._scoring)
            if idle and self._inbox.empty():
                self.model.settle()
            try:
                what, answer = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if answer is None:
                return False
            if what == "put":
                self._begin(answer)
            else:
                self._drop(answer)

    def _begin(self, answer: Answer) -> None:
        for part, job in enumerate(answer.parts):
            if isinstance(job, ScoreJob):
                job.passes = scoring(self.model.scheduler, job.tokens, job.lora, top=job.top)
                self._scoring.append((answer, part, job))
                continue
            try:
                job.ticket = self.model.scheduler.submit(
                    job.request, job.drafter, checked=True, key=answer.key, priority=job.priority
                )
            except Exception as error:  # the model was closed
                self._produced.append((answer, Event(part, error=error)))
                self._flush()
                continue
            job.output = Output(job.ticket, self.model.tokenizer, job.stop, whole=job.whole)
            self._decoding[job] = answer, part

    def _drop(self, answer: Answer, error: BaseException | None = None) -> None:
        """End what an answer still has, with an error or because its client has gone."""
        reason = RequestError(499, "the client has gone") if error is None else error
        for job, (owner, part) in list(self._decoding.items()):
            if owner is answer:
                self._finish(job, "abort")
                self._produced.append((answer, Event(part, error=reason)))
        gone = [entry for entry in self._scoring if entry[0] is answer]
        for entry in gone:
            self._scoring.remove(entry)
            self._produced.append((answer, Event(entry[1], error=reason)))
        self._flush()

    def _pass(self) -> None:
        """One tick, and one pass of a text that is scored."""
        scheduler = self.model.scheduler
        if scheduler.busy:
            scheduler.tick()
        for job, (answer, part) in list(self._decoding.items()):
            self._collect(job, answer, part)
        if self._scoring:
            self._score(*self._scoring[0])
        self._metrics.load(len(self._decoding) - scheduler.waiting, scheduler)
        now = time.monotonic()
        owners = {owner for owner, _ in self._decoding.values()} | {owner for owner, _, _ in self._scoring}
        for answer in {owner for owner in owners if owner.deadline < now}:
            self._drop(
                answer, RequestError(504, "the request took longer than the server allows; ask for fewer tokens")
            )
        self._flush()

    def _collect(self, job: Job, answer: Answer, part: int) -> None:
        """Produce the events of the steps that a sequence took."""
        assert job.ticket is not None
        assert job.output is not None
        if job.joined is None and job.ticket.row is not None:
            job.joined = time.monotonic()
        try:
            for step in self.model.scheduler.ready(job.ticket):
                chunk, now, before = job.output.add(step), time.monotonic(), job.last
                job.first, job.last = job.first or now, now
                self._metrics.step(job, chunk, None if before is None else now - before)
                self._produced.append((answer, Event(part, chunk)))
                if chunk.result is not None:
                    self._finish(job, chunk.result.finish_reason, chunk)
                    return
        except Exception as error:  # what ended this sequence, not the others
            self._finish(job, "error")
            self._produced.append((answer, Event(part, error=error)))

    def _finish(self, job: Job, reason: str, chunk: Chunk | None = None) -> None:
        assert job.ticket is not None
        self.model.scheduler.cancel(job.ticket)  # at a stop string the target would continue
        del self._decoding[job]
        job.reason = reason
        self._metrics.ended(job, reason, None if chunk is None else chunk.result)

    def _score(self, answer: Answer, part: int, job: ScoreJob) -> None:
        assert job.passes is not None
        try:
            next(job.passes)
            return
        except StopIteration as ended:
            event = Event(part, score=ended.value)
        except Exception as error:
            event = Event(part, error=error)
        self._scoring.popleft()
        self._produced.append((answer, event))

    def _end_all(self, error: BaseException) -> None:
        """End everything that was put in, with an error."""
        left = [*self._decoding.values(), *((answer, part) for answer, part, _ in self._scoring)]
        while not self._inbox.empty():
            what, answer = self._inbox.get()
            left += [(answer, part) for part in range(len(answer.parts))] if what == "put" and answer else []
        self._decoding.clear()
        self._scoring.clear()
        self._produced += [(answer, Event(part, error=error)) for answer, part in left]
        self._flush()

    def _flush(self) -> None:
        if self._produced and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, self._produced)
        self._produced = []
