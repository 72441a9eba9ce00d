"""``anabranch.bench``: drafters compared on a loaded model."""

from __future__ import annotations

import html

import pytest

import anabranch
from anabranch import InputError
from anabranch.api import Model
from toy_text import toy_model


@pytest.fixture(scope="module")
def model() -> Model:
    return toy_model()


def test_drafters_are_compared_with_plain_decoding(model: Model) -> None:
    seen: list[tuple[int, int, str]] = []
    result = anabranch.bench(
        model,
        ["the thing the thing", "one two one two one two"],
        ["suffix", "wide=prompt_lookup:tokens=4"],
        max_new_tokens=12,
        repeats=2,
        report=lambda done, total, what: seen.append((done, total, what)),
    )
    assert isinstance(result, anabranch.BenchResult)
    assert [one.name for one in result.contenders] == ["none", "suffix", "wide"]
    plain, wide = result["none"], result["wide"]
    assert (plain.mean_acceptance_length, plain.speedup) == (1.0, (1.0, 1.0, 1.0))
    assert wide.drafter == "prompt_lookup:tokens=4"
    for one in result.contenders:
        assert (one.equal, one.prompts, one.error) == (2, 2, "")
        assert one.tokens_per_second > 0
    assert seen[-1] == (2, 2, "")
    # rotating order: each of the three decodes first, second and last in turn
    first = [what.split()[0] for done, _, what in seen if what][::3]
    assert first == ["none", "suffix", "wide", "none"]
    expected = model.generate("the thing the thing", max_new_tokens=12, drafter="none")
    assert result.records[0]["tokens"] >= len(expected.token_ids)


def test_the_result_prints_as_a_table_and_as_html(model: Model) -> None:
    result = anabranch.bench(model, "the thing", {"<b>": "suffix"}, max_new_tokens=8)
    text = str(result)
    assert text.splitlines()[0].startswith(result.verdict[:20])
    assert max(map(len, text.splitlines())) <= 80
    for title in ("contender", "tokens/s", "speedup", "equal"):
        assert title in text
        assert title in result._repr_html_()
    assert result.verdict in repr(result)
    assert "<b>" not in result._repr_html_()
    assert html.escape("<b>") in result._repr_html_()


def test_prompts_may_be_token_ids_and_auto_is_the_default(model: Model) -> None:
    result = anabranch.bench(model, [[3, 4, 5]], max_new_tokens=6, temperature=1.0, seed=3)
    assert [one.name for one in result.contenders] == ["none", "auto"]
    assert result["auto"].drafter != "auto"
    assert result["auto"].equal == 1


def test_one_that_fails_does_not_end_the_others(model: Model) -> None:
    result = anabranch.bench(model, "the thing", ["suffix", "draft_model"], max_new_tokens=6)
    assert "needs a draft model" in result["draft_model"].error
    assert result["suffix"].error == ""
    assert "draft_model is not measured: " in str(result)
    assert "draft_model is not measured" in result._repr_html_()
    with pytest.raises(KeyError):
        _ = result["nothing"]


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("the", "suffix"), {}, "drafters must be a list of specifications"),
        (("the", ["sufix"]), {}, "there is no drafter 'sufix' (did you mean 'suffix'?)"),
        (("the", {"a": "sufix"}), {}, "there is no drafter 'sufix'"),
        (("the", ["suffix@int8"]), {}, "load the model with quantize='int8'"),
        (("the", ["suffix", "suffix"]), {}, "two contenders are named 'suffix'"),
        (("", ["suffix"]), {}, "the prompt is empty"),
        (("the", ["suffix"]), {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        (("the", ["suffix"]), {"repeats": True}, "repeats must be a whole number"),
        (("the", ["suffix"]), {"temperature": -1}, "temperature"),
        (("the", ["suffix"]), {"max_new_tokens": 100_000}, "shorten it, or lower max_new_tokens"),
    ],
)
def test_what_is_refused(model: Model, arguments: tuple[object, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as refused:
        anabranch.bench(model, *arguments, **options)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_a_rule_that_a_drafter_does_not_have(model: Model) -> None:
    result = anabranch.bench(model, "the", ["suffix"], rule="rejection", max_new_tokens=4, temperature=1.0)
    assert "use rule='match'" in result["suffix"].error
    assert result["none"].error == ""
