"""Our end of the protocol with a peer: one JSON object per line each way, with timeouts and validation.

    {"op": "load", ...}                               -> {"ok": true, "info": {...}}
    {"op": "decode", "ids": [...], "max_new_tokens": N, ...}
                                    -> {"ok": true, "ids": [...], "seconds": s, "first_token_seconds": s or null}
    {"op": "batch", "prompts": [[...], ...], "max_new_tokens": N, ...}
                                    -> {"ok": true, "ids": [[...], ...], "seconds": s, "step_seconds": [...]}
                                       step_seconds[i]: when all rows had their i-th new token
    {"op": "quit"}
    any request that fails                            -> {"ok": false, "error": "..."}

Times are measured by the peer, around the engine's own call. A peer that ends, hangs or sends anything else is stopped,
with all processes that it started; later requests raise the same error, and failed ones are never timed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn, TypeGuard

from anabranch.bench.run import Answer, Outcome, Prompts
from anabranch.errors import AnabranchError, InputError
from anabranch.sampling import SamplingParams

__all__ = ["Peer", "PeerError"]

_QUIT_SECONDS, _TURN_SECONDS = 5.0, 0.5
_TAIL_LINES, _TAIL_BYTES = 3, 4000


class PeerError(AnabranchError):
    """A peer that could not be started, or gave no valid answer."""


class Peer:
    """A peer that has loaded its model, as a contender.

    ``command`` is started immediately, in its own empty folder and process group, with a ``load`` request.
    ``vocabulary`` and ``eos`` are for validating answers.

    info  versions, weights and numerics, load seconds and peak memory in bytes, as reported by the peer
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        load: Mapping[str, Any],
        *,
        sampling: SamplingParams,
        eos: Sequence[int],
        vocabulary: int,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.name, self.info, self.timeout = name, dict[str, Any](), timeout
        self._eos, self._vocabulary = tuple(eos), vocabulary
        self._sampling = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**32,  # the range that every engine supports
            "eos": list(self._eos),
        }
        self._failure: str | None = None
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="anabranch-peer-")
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the peer
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=self._folder,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise PeerError(f"the peer {name!r} could not be started ({error}); install it again") from error
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"peer {name}", daemon=True)
        self._reader.start()
        try:
            info = self._ask({"op": "load", **load}).get("info")
            if not isinstance(info, dict):
                self._fail("did not report what it loaded")
            self.info.update(info)
        except BaseException:
            self.close()
            raise

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Answer:
        """Decode one prompt. Raises PeerError for an incomplete or implausible answer."""
        if not len(prompt_ids) or max_new_tokens < 1:
            raise InputError("a peer needs at least one prompt token and max_new_tokens of at least 1")
        ids = [int(token) for token in prompt_ids]
        reply = self._ask({"op": "decode", "ids": ids, "max_new_tokens": max_new_tokens, **self._sampling})
        seconds, first = reply.get("seconds"), reply.get("first_token_seconds")
        tokens = self._checked(reply.get("ids"), max_new_tokens)
        if not _duration(seconds) or not (first is None or (_duration(first) and first <= seconds)):
            self._fail(f"sent an invalid answer: its times are {seconds!r} s, and {first!r} s to the first token")
        self._remember_peak(reply)
        arrivals = [] if first is None else [(first, 1), (seconds, len(tokens) - 1)]
        return Answer(tokens, seconds, [(at, count) for at, count in arrivals if count])

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Outcome:
        """Decode one prompt, or several in batches of ``rows``, each of which starts after the previous one has ended.

        Raises PeerError as ``decode`` and ``batch`` do.
        """
        if len(prompts) == 1:
            answer = self.decode(prompts[0], max_new_tokens=max_new_tokens)
            return Outcome([answer], answer.seconds)
        starts = range(0, len(prompts), rows)
        batches = [self.batch(prompts[start : start + rows], max_new_tokens=max_new_tokens) for start in starts]
        return Outcome(
            [answer for batch in batches for answer in batch.answers], sum(batch.seconds for batch in batches)
        )

    def batch(self, prompts: Prompts, *, max_new_tokens: int) -> Outcome:
        """Decode a batch. Raises PeerError if that is not supported, or for an incomplete or invalid answer."""
        if not prompts or not all(map(len, prompts)) or max_new_tokens < 1:
            raise InputError("a peer needs at least one prompt token and max_new_tokens of at least 1")
        ids = [[int(token) for token in prompt] for prompt in prompts]
        reply = self._ask({"op": "batch", "prompts": ids, "max_new_tokens": max_new_tokens, **self._sampling})
        answers, seconds, steps = reply.get("ids"), reply.get("seconds"), reply.get("step_seconds")
        if not isinstance(answers, list) or len(answers) != len(ids):
            self._fail(f"sent an invalid answer: not one list of token ids for each of {len(ids)} prompts")
        texts = [self._checked(answer, max_new_tokens) for answer in answers]
        if not _duration(seconds) or not isinstance(steps, list) or not all(map(_duration, steps)):
            self._fail(f"sent an invalid answer: its times are {seconds!r} s in total and {steps!r} s by step")
        if len(steps) < max(map(len, texts)) or any(a > b for a, b in zip(steps, [*steps[1:], seconds], strict=True)):
            self._fail(f"sent an invalid answer: the times of its {len(steps)} steps do not match its tokens")
        self._remember_peak(reply)
        times = [steps[: len(tokens)] for tokens in texts]
        pairs = zip(texts, times, strict=True)
        return Outcome([Answer(ids, at[-1] if at else seconds, [(t, 1) for t in at]) for ids, at in pairs], seconds)

    def _checked(self, tokens: Any, max_new_tokens: int) -> list[int]:
        """The new tokens of one prompt, validated."""
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < self._vocabulary for t in tokens):
            self._fail(f"sent an invalid answer: not a list of token ids below {self._vocabulary}")
        if len(tokens) > max_new_tokens:
            self._fail(f"sent an invalid answer: {len(tokens)} tokens, but at most {max_new_tokens} were requested")
        if any(token in self._eos for token in tokens[:-1]):
            self._fail("continued after the end token")
        if len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in self._eos):
            self._fail(f"stopped after {len(tokens)} of {max_new_tokens} tokens without an end token")
        return tokens

    def _remember_peak(self, reply: Mapping[str, Any]) -> None:
        if type(peak := reply.get("peak_memory_bytes")) is int:
            self.info["peak_memory_bytes"] = peak

    def close(self) -> None:
        """Stop the peer and every process that it started; can be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b'{"op": "quit"}\n')
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self._failure is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_QUIT_SECONDS)
        self._kill()
        process.wait()
        self._reader.join()
        process.stdout.close()
        self._stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the protocol -----------------------------------------------------------------------------------
    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._closed:
            raise PeerError(f"the peer {self.name!r} {self._failure or 'was closed'}")
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(OSError):  # it has ended: its remaining output says more
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            line = self._next_line()
        except queue.Empty:
            self._fail(f"gave no answer to {request['op']!r} within {self.timeout:g} s and was stopped")
        except BaseException:  # Ctrl-C: a late answer must not be taken for the next prompt's
            self._failure = "was interrupted"
            self.close()
            raise
        if line is None:
            self._fail(self._ending())
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
            self._fail(f"sent an invalid answer: {line[:80].decode(errors='replace').strip()!r}")
        if not reply["ok"]:
            self._fail(f"could not {request['op']}: {reply.get('error')}")
        return reply

    def _next_line(self) -> bytes | None:
        """The next line of output, None after the last one. Raises queue.Empty if there is none in time.

        Waits in short turns: Python handles a signal that comes just before a wait only after it.
        """
        limit = time.monotonic() + self.timeout
        while (left := limit - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=min(left, _TURN_SECONDS))
        raise queue.Empty

    def _fail(self, what: str) -> NoReturn:
        self._failure = what
        self.close()
        raise PeerError(f"the peer {self.name!r} {what}")

    def _ending(self) -> str:
        """The end of the process as a clause, with its last output."""
        try:
            code = self._process.wait(_QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            how = "closed its output"
        else:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
        tail = self._tail()
        return f"{how}; its last output: {tail}" if tail else f"{how} without any output"

    def _tail(self) -> str:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in [line for line in lines if line.strip()][-_TAIL_LINES:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _kill(self) -> None:
        """Kill the process group: an engine may have started workers."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()


def _duration(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
