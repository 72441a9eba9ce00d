"""The public face on a toy model: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import anabranch
from anabranch import CapabilityError, InputError, Model

sys.path.insert(0, str(Path(__file__).parent / "model"))
from toys import CASES, save_toy, toy_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(toy_hf(*CASES["llama"]), tmp_path_factory.mktemp("api"))


@pytest.fixture
def model(folder: Path) -> Model:
    return anabranch.load(str(folder), drafter="prompt_lookup", dtype="float32")


def test_one_prompt_gives_one_result_and_a_list_a_list(model: Model) -> None:
    one = model.generate("w3 w4 w5", max_new_tokens=6, ignore_eos=True)
    assert len(one.token_ids) == 6
    assert one.finish_reason == "length"
    assert one.text == model.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    ids = model.tokenizer.encode("w3 w4 w5")
    assert model.generate(ids, max_new_tokens=6, ignore_eos=True).token_ids == one.token_ids
    many = model.generate(["w3 w4 w5", "w9", [7, 8]], max_new_tokens=6, ignore_eos=True)
    assert [len(result.token_ids) for result in many] == [6, 6, 6]
    assert many[0].token_ids == one.token_ids
    assert one.stats.steps >= 1
    assert one.stats.mean_acceptance_length == 6 / one.stats.steps
    assert one.stats.tokens_per_second > 0


def test_drafters_and_batches_change_nothing(model: Model) -> None:
    prompts = ["w3 w4", "w5 w6 w7 w5 w6 w7 w5", "w8", "w9 w9 w9"]
    plain = [model.generate(p, max_new_tokens=12, drafter="none").token_ids for p in prompts]
    assert [r.token_ids for r in model.generate(prompts, max_new_tokens=12)] == plain
    assert [r.token_ids for r in model.generate(prompts, max_new_tokens=12, rows=2)] == plain


def test_a_seed_fixes_the_text_whatever_drafts(model: Model) -> None:
    options = {"max_new_tokens": 10, "temperature": 1.0, "seed": 11}
    plain = model.generate("w3 w4", drafter="none", **options)
    assert model.generate("w3 w4", **options).token_ids == plain.token_ids
    assert model.generate("w3 w4", **{**options, "seed": 12}).token_ids != plain.token_ids


def test_stream_yields_what_generate_returns(model: Model) -> None:
    whole = model.generate("w3 w4", max_new_tokens=9)
    chunks = list(model.stream("w3 w4", max_new_tokens=9))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert all(len(chunk.sources) == len(chunk.token_ids) for chunk in chunks)


def test_closing_a_stream_frees_its_row(model: Model) -> None:
    stream = model.stream("w3 w4", max_new_tokens=40, ignore_eos=True)
    next(stream)
    stream.close()
    assert all(engine.active == 0 for engine in model._engines.values())
    assert len(model.generate("w3", max_new_tokens=2, ignore_eos=True).token_ids) == 2


def test_two_streams_at_a_time(model: Model) -> None:
    whole = model.generate("w3 w4", max_new_tokens=6, ignore_eos=True).token_ids
    first = model.stream("w3 w4", max_new_tokens=6, ignore_eos=True)
    got = list(next(first).token_ids)
    assert model.generate("w5", max_new_tokens=3, ignore_eos=True).finish_reason == "length"
    for chunk in first:
        got += chunk.token_ids
    assert got == whole


def test_stop_strings_and_log_probs(model: Model) -> None:
    free = model.generate("w3 w4", max_new_tokens=8, ignore_eos=True, log_probs=True)
    assert free.log_probs is not None
    assert len(free.log_probs) == 8
    assert all(value <= 0 for value in free.log_probs)
    word = free.text.split()[3]
    cut = model.generate("w3 w4", max_new_tokens=8, ignore_eos=True, stop=word)
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(word)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert cut.stats.tokens == len(cut.token_ids)


def test_processors_and_penalties_hold_under_speculation(model: Model) -> None:
    def no_sevens(tokens: object, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[7] = float("-inf")
        return logits

    options = {"max_new_tokens": 12, "ignore_eos": True, "repetition_penalty": 1.3, "processors": [no_sevens]}
    plain = model.generate("w3 w3 w4 w3 w4", drafter="none", **options)
    assert 7 not in plain.token_ids
    assert model.generate("w3 w3 w4 w3 w4", **options).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        (["w3", ""], {}, "empty"),
        ([[]], {}, "empty"),
        (5, {}, "string"),
        ([1.5], {}, "strings or lists"),
        ([10**6], {}, "vocabulary"),
        ("w3", {"max_new_tokens": 0}, "max_new_tokens"),
        ("w3", {"temperature": -1.0}, "temperature"),
        ("w3", {"top_p": 0.0}, "top_p"),
        ("w3", {"top_p": 1.5}, "top_p"),
        ("w3", {"rule": "maybe"}, "rule"),
        ("w3", {"rows": 0}, "rows"),
        ("w3", {"max_tokens": 5}, "no option 'max_tokens'"),
        ("w3", {"drafter": "magic"}, "no drafter 'magic'"),
        ("w3", {"drafter": "prompt_lookup:tokens=x"}, "whole number"),
        ("w3", {"drafter": "prompt_lookup:size=3"}, "no setting"),
        ("w3", {"drafter": "none+prompt_lookup"}, "cannot be combined"),
        ("w3", {"drafter": "prompt_lookup+prompt_lookup"}, "twice"),
        ([3] * 5000, {}, "limit"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(
    model: Model, prompt: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(prompt, **options)  # type: ignore[call-overload]
    # and nothing is lost
    assert len(model.generate("w3", max_new_tokens=2, ignore_eos=True).token_ids) == 2


def test_what_is_not_supported_is_never_replaced_by_something_else(folder: Path, model: Model) -> None:
    with pytest.raises(CapabilityError, match="anabranch train streams"):
        anabranch.load(str(folder))
    with pytest.raises(CapabilityError, match="medusa"):
        model.generate("w3", drafter="medusa")
    with pytest.raises(CapabilityError, match="rule"):
        model.generate("w3", rule="reject", temperature=1.0)
    with pytest.raises(CapabilityError, match="chat template"):
        model.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(InputError, match="one prompt"):
        model.stream(["w3", "w4"])  # type: ignore[arg-type]


def test_public_names() -> None:
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        anabranch.nothing  # noqa: B018
