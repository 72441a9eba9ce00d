"""Drafts from a grammar and from an expected text: fewer passes, the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anabranch.api import Model
from anabranch.decoding.batch import Member, Request
from anabranch.decoding.guided import FORCED, guided
from anabranch.drafting.expected import PREDICTION, Expected
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import make_drafter
from anabranch.options import Options
from anabranch.structure.grammar import Source, compiled
from anabranch.structure.matcher import GrammarConstraint
from anabranch.structure.vocabulary import Vocabulary
from anabranch.tree import DraftTree
from test_detokenizer import TOKENIZERS
from toy_text import VOCABULARY, byte_tokenizer, toy_model

END = VOCABULARY - 1
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with toy_model() as loaded:
        yield loaded


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def constraint_of(kind: str, text: str, start: int = 0, tokenizer: Any = TOKENIZER) -> GrammarConstraint:
    size = len(tokenizer)
    vocabulary = Vocabulary.of(tokenizer, size, (tokenizer.eos_token_id,))
    return GrammarConstraint(compiled(Source(kind, text), vocabulary), start)


def member_of(constraint: GrammarConstraint | None, text: Sequence[int], **options: Any) -> Member:
    request = Request([5, *text], 40, **options)
    sampling = replace(request.sampling, constraint=constraint)
    made = Member(replace(request, sampling=sampling), make_drafter("suffix", toy_target()), 60)
    made.row.max_depth = 30
    return made


def toy_target() -> Any:
    from anabranch.model.weights import build_decoder
    from toy_text import CONFIG

    return build_decoder(CONFIG, device="cpu")


# -- trees -------------------------------------------------------------------------------------------------
def test_grafted_follows_nodes_that_are_there() -> None:
    """The tree of the docstring: 9 -- 1 with the chain 1, 2 is 9 -- 1 -- 2; a better share takes the node over."""
    tree = DraftTree.chain(9, [1], log_probs=[-2.0])
    made = tree.grafted(0, [1, 2], [0.5, 0.5], "grammar")
    assert (made.tokens.tolist(), made.parents.tolist()) == ([9, 1, 2], [-1, 0, 1])
    assert made.sources == ("target", "grammar", "grammar")
    assert np.allclose(made.log_probs, [0.0, np.log(0.5), np.log(0.25)])
    kept = tree.grafted(0, [1], [0.01], "grammar")
    assert (kept.sources, kept.log_probs.tolist()) == (("target", "draft"), [0.0, -2.0])
    assert tree.grafted(1, [3], [0.5], "x").parents.tolist() == [-1, 0, 1]


def test_forbidden_nodes_go_and_forced_tokens_come() -> None:
    constraint = constraint_of("regex", "(ab|ac)defgh[0-9]", start=1)
    a, b, x, d = (ids(letter)[0] for letter in "abxd")
    tree = DraftTree.from_paths(
        5, [[a, b, d], [x, x], [a, x]], log_probs=[[-1.0, -2.0, -3.0], [-1.5, -1.6], [-1.0, -4.0]]
    )
    made = guided(member_of(constraint, []), tree, 32)
    assert x not in made.tokens.tolist()
    assert sorted(made.tokens.tolist()) == sorted([5, *ids("abdefgh")])
    assert [made.tokens[node] for node in made.path_to(made.size - 1)] == [5, *ids("abdefgh")]
    assert made.sources.count(FORCED) >= 4
    assert guided(member_of(constraint, []), tree, 3).size == 3
    assert guided(member_of(constraint, [], rule="rejection"), tree, 32) is tree


def test_the_end_is_drafted_where_nothing_else_may_follow() -> None:
    constraint = constraint_of("regex", "abc", start=1)
    made = guided(member_of(constraint, []), DraftTree.root(5), 8)
    assert made.tokens.tolist() == [5, *ids("abc"), END]


# -- matchers ----------------------------------------------------------------------------------------------
GRAMMARS = [
    ("regex", "(the|a|ü)*[0-9]{2}"),
    ("schema", '{"type": "object", "properties": {"the": {"type": "string"}, "a": {"type": "number"}}}'),
    ("grammar", 'start: ("the" | "t" "h")* "<" start ">" | "a"'),
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda each: each[0])
def test_allows_is_an_entry_of_allowed_however_it_is_asked(name: str, grammar: tuple[str, str]) -> None:
    """Over random walks that jump back; asking about one token changes no later answer."""
    tokenizer = TOKENIZERS[name]
    try:
        one, other = constraint_of(*grammar, tokenizer=tokenizer), constraint_of(*grammar, tokenizer=tokenizer)
        one.allowed([], len(tokenizer))
    except InputError:
        return  # there are no tokens to spell it with
    random, text = np.random.default_rng(0), list[int]()
    for _ in range(25):
        try:
            mask = one.allowed(text, len(tokenizer))
        except InputError:
            text = []
            continue
        assert [other.allows(text, token) for token in range(len(tokenizer))] == mask.tolist()
        text = [*text, int(random.choice(mask.nonzero()[0]))]
        if text[-1] == tokenizer.eos_token_id or random.random() < 0.2:
            text = text[: int(random.integers(0, len(text)))]


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "metaspace"])
def test_characters_may_be_cut_between_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    constraint = constraint_of("regex", "(ü|€)+", tokenizer=tokenizer)
    text, random = list[int](), np.random.default_rng(1)
    for _ in range(12):
        choices = [t for t in constraint.allowed(text, len(tokenizer)).nonzero()[0] if t != tokenizer.eos_token_id]
        text.append(int(random.choice(choices)))
    while not constraint.allows(text, tokenizer.eos_token_id):
        text.append(int(constraint.allowed(text, len(tokenizer)).nonzero()[0][0]))
    assert set(tokenizer.decode(text)) <= {"ü", "€"}


# -- expected texts ----------------------------------------------------------------------------------------
def test_an_expected_text_is_left_and_joined_again() -> None:
    expected = Expected([1, 2, 3, 4, 5, 6, 7, 8])
    assert expected.draft([], 3)[0] == [1, 2, 3]
    assert expected.draft([1, 2], 3)[0] == [3, 4, 5]
    assert expected.draft([1, 2, 9], 3)[0] == [4, 5, 6]  # 9 replaced 3
    assert expected.draft([1, 2, 9, 6], 3)[0] == [7, 8]  # 4 and 5 are left out
    assert expected.draft([1, 2, 9, 6, 1, 2], 3)[0] == [3, 4, 5]  # two tokens lead back
    first, later = Expected([1, 2]).draft([], 2)[1], Expected([1, 2]).draft([7], 2)[1]
    assert later[0] < first[0]


@pytest.mark.parametrize("drafter", ["streams", "prompt_lookup", "auto", "suffix", "lookahead"])
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.0, "seed": 4}, {"regex": "[a-z ]{40}"}], ids=["greedy", "sampled", "regex"]
)
def test_a_prediction_changes_the_passes_and_not_the_text(model: Model, drafter: str, more: dict[str, Any]) -> None:
    call = {**more, "max_new_tokens": 24}
    plain = model.generate("the", drafter="none", **call)
    right = model.generate("the", drafter=drafter, prediction=plain.token_ids, **call)
    wrong = model.generate("the", drafter=drafter, prediction="the end of the text", **call)
    assert right.token_ids == wrong.token_ids == plain.token_ids
    assert right.stats.accepted_prediction_tokens > 12
    assert right.stats.rejected_prediction_tokens >= 0
    assert right.stats.steps < 12
    assert right.sources.count(PREDICTION) == right.stats.accepted_prediction_tokens
    assert wrong.stats.rejected_prediction_tokens > 0


def test_where_a_prediction_has_no_use_it_is_refused(model: Model) -> None:
    with pytest.raises(CapabilityError, match="drafter='none' drafts nothing"):
        model.generate("the", prediction="a", drafter="none")
    with pytest.raises(CapabilityError, match="a prediction is no sample"):
        model.generate("the", prediction="a", rule="rejection", temperature=1.0, drafter="streams:tree=chain")
    with pytest.raises(InputError, match="the prediction has the token id 9999"):
        model.generate("the", prediction=[9999])
    with pytest.raises(InputError, match="prediction must be a text"):
        model.generate("the", prediction=3)


# -- rows --------------------------------------------------------------------------------------------------
def test_forced_tokens_save_passes(model: Model) -> None:
    options = {"theatre": {"enum": ["yes", "no"]}}
    schema = {"type": "object", "properties": options, "required": ["theatre"], "additionalProperties": False}
    plain = model.generate("the", drafter="none", schema=schema)
    made = model.generate("the", drafter="suffix", schema=schema)
    assert made.token_ids == plain.token_ids
    assert made.text in ('{"theatre": "yes"}', '{"theatre": "no"}')
    assert made.stats.steps < plain.stats.steps / 3
    assert made.stats.sources[FORCED] >= 10


def test_rows_with_different_constraints_share_passes_and_come_and_go(model: Model) -> None:
    calls: list[dict[str, Any]] = [
        {"regex": "(the ?){3,}"},
        {},
        {"schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
        {"regex": "[0-9]{30}", "temperature": 1.0, "seed": 2},
        {"regex": "a", "temperature": 1.0},
        {"grammar": 'start: "a" start | "b"', "repetition_penalty": 1.3},
        {"prediction": "the the"},
        {"regex": r"[0-9]+x[^\s\S]"},
    ]
    calls = [{"max_new_tokens": 20 + number, **call} for number, call in enumerate(calls)]

    def alone(call: dict[str, Any]) -> list[int] | str:
        try:
            return model.generate("the a", **{**call, "drafter": "none", "prediction": None}).token_ids
        except InputError as error:
            return str(error)

    def together(call: dict[str, Any]) -> list[int] | str:
        try:
            return model.generate("the a", **call).token_ids
        except InputError as error:
            return str(error)

    wanted = [alone(call) for call in calls]
    with ThreadPoolExecutor(len(calls) + 1) as pool:
        stream = model.stream("the a", regex="[a-z]*", max_new_tokens=60)
        next(stream)
        found = [pool.submit(together, call) for call in calls]
        next(stream)
        stream.close()  # cancelled
        assert [each.result() for each in found] == wanted
    assert "matches no text" in str(wanted[-1]) or "allows no token" in str(wanted[-1])


def test_samples_log_probs_stops_and_lengths(model: Model) -> None:
    call: dict[str, Any] = {"regex": "[a-z]{40}", "max_new_tokens": 12}
    samples = model.generate("the", n=3, temperature=1.0, **call)
    single = [model.generate("the", seed=seed, temperature=1.0, drafter="none", **call) for seed in range(3)]
    assert [each.token_ids for each in samples] == [each.token_ids for each in single]
    logged = model.generate("the", log_probs=True, **call)
    assert (logged.token_ids, len(logged.log_probs)) == (model.generate("the", **call).token_ids, len(logged.token_ids))
    assert logged.finish_reason == "length"
    stopped = model.generate("the", stop=logged.text[3:5], **call)
    assert (stopped.finish_reason, stopped.text) == ("stop", logged.text[: logged.text.index(logged.text[3:5])])
    with pytest.raises(InputError, match="forbid every token that the schema, regex or grammar allows"):
        model.generate("the", regex="a", suppress_tokens=ids("a"))
    forbidden = dict.fromkeys([*ids("abcdefghijklm"), *range(256, VOCABULARY)], -100.0)
    assert set(model.generate("the", logit_bias=forbidden, **call).text) <= set("nopqrstuvwxyz")


def test_a_stop_token_that_is_text_is_matched_as_text(model: Model) -> None:
    z, other = ids("z")[0], Options({"stop_token_ids": [END - 1]})
    assert other.values["stop_token_ids"] == [END - 1]
    made = model.generate("the", regex="z{2}a", stop_token_ids=[z])
    assert (made.token_ids, made.stop_reason) == ([z], z)
