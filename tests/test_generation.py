"""Text over tokens: whole characters, stop strings inside accepted paths, cancellation, rows, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from anabranch.api import Model
from anabranch.decoding import generation
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.errors import CapabilityError, DeviceError, InputError
from anabranch.sampling import SamplingParams
from small import Oracle
from toy_text import toy_model


@pytest.fixture(scope="module")
def model() -> Model:
    return toy_model()


def run(model: Model, drafter: Drafter, request: Request, stop: Sequence[str] = ()) -> generation.Generation:
    scheduler = Scheduler(model.target.decoder)
    chunks = list(generation.stream(scheduler, request, drafter, model.tokenizer, stop=stop))
    result = chunks[-1].result
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [source for chunk in chunks for source in chunk.sources] == result.sources
    assert not scheduler.busy
    return result


def plain(model: Model, new: int = 40, **options: Any) -> generation.Generation:
    return model.generate("the river that", max_new_tokens=new, ignore_eos=True, drafter="none", **options)


def test_a_stop_string_cuts_inside_an_accepted_path(model: Model) -> None:
    whole = plain(model)
    said = [model.tokenizer.decode(whole.token_ids[: n + 1]) for n in range(len(whole.token_ids))]
    # two characters of the middle of the text as the stop string
    middle = whole.text[len(whole.text) // 2 :]
    stop = next(middle[i : i + 2] for i in range(len(middle)) if "�" not in middle[i : i + 2])
    cut = whole.text.index(stop)
    count = next(n + 1 for n, text in enumerate(said) if stop in text)
    request = Request(whole.prompt_ids, 40, log_probs=True)
    for drafter in (Oracle([whole.prompt_ids + whole.token_ids]), Oracle([])):
        result = run(model, drafter, request, [stop])
        assert result.text == whole.text[:cut]
        assert result.token_ids == whole.token_ids[:count]
        assert result.finish_reason == "stop"
        assert result.stats.tokens == count == sum(result.stats.sources.values())
        assert len(result.log_probs) == count


def test_the_end_token_is_a_token_but_no_text(model: Model) -> None:
    whole = plain(model)
    # a token with text as the end token: it must not show
    end = next(token for token in whole.token_ids[10:] if token < 256)
    count = whole.token_ids.index(end) + 1
    for drafter in (Oracle([whole.prompt_ids + whole.token_ids]), Oracle([])):
        result = run(model, drafter, Request(whole.prompt_ids, 40, stop_ids=frozenset({end})))
        assert result.token_ids == whole.token_ids[:count]
        assert result.text == model.tokenizer.decode(whole.token_ids[: count - 1])
        assert result.finish_reason == "stop"


def test_statistics_of_an_oracle(model: Model) -> None:
    whole = plain(model)
    result = run(model, Oracle([whole.prompt_ids + whole.token_ids]), Request(whole.prompt_ids, 36))
    stats = result.stats
    assert (stats.tokens, stats.steps, stats.mean_acceptance_length) == (36, 4, 9.0)
    assert dict(stats.accepted) == {8: 4}
    assert dict(stats.sources) == {"oracle": 32, "target": 4}
    assert stats.acceptance_by_depth() == [1.0] * 8
    assert 0 < stats.prefill_seconds < stats.seconds
    assert sum(stats.parts.values()) < stats.seconds
    assert stats.tokens_per_second == pytest.approx(36 / stats.seconds)
    assert stats.prefill_tokens == len(whole.prompt_ids) - 1
    assert stats.decode_tokens_per_second == pytest.approx(36 / (stats.seconds - stats.prefill_seconds))
    assert stats.prompt_tokens_per_second == pytest.approx(stats.prefill_tokens / stats.prefill_seconds)
    assert Stats.from_dict(stats.to_dict()).prefill_tokens == stats.prefill_tokens
    assert stats.to_dict()["accepted"] == {"8": 4}
    assert Stats().to_dict()["mean_acceptance_length"] == 0


def test_on_prompt_reports_progress(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.decoding.ticks.CHUNK", 4)
    seen: list[tuple[int, int]] = []
    model.generate(list(range(1, 12)), max_new_tokens=1, on_prompt=lambda *at: seen.append(at))
    assert seen == [(4, 10), (8, 10), (10, 10)]
    with pytest.raises(InputError, match="on_prompt must be a function, got 3"):
        model.generate([1], on_prompt=3)


def test_an_exception_of_a_listener_cancels_the_request(model: Model) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    scheduler = Scheduler(model.target.decoder)
    with pytest.raises(KeyboardInterrupt):
        next(generation.stream(scheduler, Request([1, 2, 3], 4, on_prompt=stop), Oracle([]), model.tokenizer))
    assert not scheduler.busy
    assert run(model, Oracle([]), Request([1, 2, 3], 4)).token_ids


def test_closing_a_stream_frees_its_row(model: Model) -> None:
    scheduler = Scheduler(model.target.decoder)
    chunks = generation.stream(scheduler, Request([1, 2, 3], 40), Oracle([]), model.tokenizer)
    next(chunks)
    assert scheduler.engine.active == 1
    chunks.close()
    assert not scheduler.busy
    assert scheduler.engine.active == 0


def test_a_stream_that_never_started_holds_up_nobody(model: Model) -> None:
    scheduler = Scheduler(model.target.decoder, rows=1)
    chunks = generation.stream(scheduler, Request([1, 2, 3], 40), Oracle([]), model.tokenizer)
    del chunks  # a generator that never ran has nothing to close
    (found,) = generation.generate(scheduler, [Request([4, 5], 3)], Oracle([]), model.tokenizer)
    assert len(found.token_ids) == 3


def test_the_clock_stops_while_nobody_listens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr("anabranch.decoding.ticks.time.perf_counter", lambda: float(next(clock)))
    chunks = []
    scheduler = Scheduler(model.target.decoder)
    for chunk in generation.stream(scheduler, Request([1, 2, 3], 4), Oracle([]), model.tokenizer):
        chunks.append(chunk)
        for _ in range(1000):
            next(clock)
    assert chunks[-1].result is not None
    assert chunks[-1].result.stats.seconds < 100


def test_many_prompts_through_few_rows(model: Model) -> None:
    requests = [Request([i + 1, 5, 7 + i], 5 + 3 * i, SamplingParams(temperature=0.9, seed=i)) for i in range(5)]
    alone = [run(model, Oracle([]), request) for request in requests]
    scheduler = Scheduler(model.target.decoder)
    together = generation.generate(scheduler, requests, Oracle([]), model.tokenizer, rows=2)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]


def test_a_request_that_cannot_be_served_is_refused_before_any_is(model: Model) -> None:
    scheduler = Scheduler(model.target.decoder)
    with pytest.raises(InputError, match="empty"):
        generation.generate(scheduler, [Request([1], 5), Request([], 5)], Oracle([]), model.tokenizer)
    with pytest.raises(CapabilityError, match="rejection"):
        generation.stream(scheduler, Request([1], 5, rule="rejection"), Oracle([]), model.tokenizer)
    assert not scheduler.busy


def test_running_out_of_memory_is_one_sentence(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(engine: Engine) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    scheduler = Scheduler(model.target.decoder)
    monkeypatch.setattr(Engine, "step", full)
    with pytest.raises(DeviceError, match="no memory left"):
        list(generation.stream(scheduler, Request([1, 2], 5), Oracle([]), model.tokenizer))
    assert not scheduler.busy
