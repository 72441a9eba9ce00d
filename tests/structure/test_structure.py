"""Structured output: texts follow their schema, regular expression or grammar, and are those of plain decoding."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel

from anabranch.api import Model, load
from anabranch.capabilities import StandIn
from anabranch.decoding.generation import Generation
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import Spec
from anabranch.native import library as native
from anabranch.structure.vocabulary import Vocabulary
from test_capabilities import SOME_DRAFTERS, fitting, made, model_of
from toy_text import ToyFolders, toy_model
from verbs import Anabranch

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["the", "a"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-[01][0-9]"
SUMS = """
start: term ("+" term)* "."
term: /[0-9]{1,2}/ | "[" start "]"
"""
WIDE = [{"type": "object", "properties": {f"k{n}": {"type": "integer"}}, "required": [f"k{n}"]} for n in range(6)]
MANY = {f"p{n}": {"type": "string", "pattern": "[a-z]{1,50}x"} for n in range(600)}
GIVEN: list[dict[str, Any]] = [{"schema": PERSON}, {"regex": DATE}, {"grammar": SUMS}]
DRAFTERS = ("streams", "streams:tree=chain", "prompt_lookup", "suffix", "lookahead", "auto", "streams:tree=8+suffix")
Plainly = dict[tuple[Model, str], Generation]  # what plain decoding wrote, by model and options: drafters share it


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with toy_model() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def stand_in() -> StandIn:
    """A target for which every method has a module or tables, on the native kernels where there are any."""
    return made() if native.library() is None else made(torch.bfloat16, packed=True)


@pytest.fixture(scope="module")
def trained(stand_in: StandIn) -> Iterator[Model]:
    """A model of the stand-in with the modules of all methods."""
    with model_of(stand_in) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plainly() -> Plainly:
    return {}


class Person(BaseModel):
    name: str
    age: int


def test_json_follows_its_schema(model: Model) -> None:
    for seed in range(4):
        made = model.generate("the", schema=PERSON, temperature=1.0, seed=seed, max_new_tokens=90)
        if made.finish_reason == "stop":
            jsonschema.validate(json.loads(made.text), PERSON)
            assert made.token_ids[-1] in model.target.config.eos_token_ids


def check_exact(model: Model, plainly: Plainly, drafter: str | Spec, given: dict[str, Any]) -> set[str]:
    """Compare a drafter's tokens under a constraint with those of plain decoding; returns their sources."""
    sources = set[str]()
    for more in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 20, "seed": 1}):
        call: dict[str, Any] = {**given, **more, "max_new_tokens": 40}
        key = model, repr(call)
        if key not in plainly:
            plainly[key] = model.generate("the the", drafter="none", **call)
        plain, drafted = plainly[key], model.generate("the the", drafter=drafter, **call)
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason == plain.finish_reason
        assert plain.finish_reason == "length" or not given.get("regex") or re.fullmatch(DATE, plain.text)
        sources |= {*drafted.sources}
    return sources


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("given", GIVEN, ids=lambda each: next(iter(each)))
def test_speculation_writes_what_plain_decoding_writes(
    model: Model, plainly: Plainly, drafter: str, given: dict[str, Any]
) -> None:
    check_exact(model, plainly, drafter, given)


@pytest.mark.parametrize("drafter", SOME_DRAFTERS)
def test_every_method_writes_what_plain_decoding_writes(
    stand_in: StandIn, trained: Model, plainly: Plainly, drafter: str
) -> None:
    if not fitting(stand_in, [drafter]):
        pytest.skip("there is no copy of float32 weights")
    spec = stand_in.spec(drafter)
    sources = set[str]().union(*(check_exact(trained, plainly, spec, given) for given in GIVEN))
    built = trained.drafter_of(spec)
    if built.max_nodes > 1 and not built.adaptive:  # the load decides how much an adaptive one drafts
        assert sources - {"target", "grammar"}, "some of the method's own drafts were emitted"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"regex": r"a[^\s\S]b"}, r"the regex a\[\^\\s\\S\]b matches no text"),
        ({"regex": "["}, r"the regex \[ is not supported: unclosed character class$"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"schema": {"type": "strnig"}}, "Invalid type: strnig"),
        ({"schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"schema": {"type": "string", "format": "x"}}, "Unknown format: x"),
        ({"schema": {"enum": []}}, "Unsatisfiable"),
        ({"schema": "{"}, "the schema is not JSON"),
        ({"schema": "[]"}, "object or true"),
        ({"schema": 3}, "schema must be a JSON schema"),
        ({"schema": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"grammar": "start: x"}, "the grammar start: x is not supported"),
        ({"grammar": "start: /[0-9]/ b\nb: /[^\\s\\S]/"}, "allows no token after 1 new ones"),
        ({"regex": "a" * 300_000}, "the regex has 300,000 characters; give at most"),
        ({"regex": "(" * 400 + "a" + ")" * 400}, "nested parentheses"),
        ({"schema": {"allOf": [{"anyOf": WIDE}] * 6}}, "schema too large"),
        ({"schema": {"type": "object", "properties": MANY}}, "is too complex after 0 new tokens: .* has 2407 items"),
        ({"schema": {}, "regex": "a"}, "schema and regex both"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos goes on"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_refusals_are_one_sentence(model: Model, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        model.generate("the", max_new_tokens=8, **given)
    assert "\n" not in str(caught.value)
    assert model.generate("the", max_new_tokens=2).token_ids  # nobody else suffers


def test_pydantic_models_and_json_are_schemas(model: Model) -> None:
    given: tuple[Any, ...] = (Person, Person.model_json_schema(), json.dumps(Person.model_json_schema()))
    texts = {model.generate("the", schema=each, max_new_tokens=30).text for each in given}
    assert len(texts) == 1
    assert texts.pop().startswith('{"name": "')


def test_without_llguidance_one_sentence_says_what_to_install(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(CapabilityError, match=r"pip install 'anabranch\[structure\]'"):
        model.generate("the", regex="a")


def test_the_command_line(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    grammar, schema = tmp_path / "sums.lark", tmp_path / "person.json"
    grammar.write_text(SUMS)
    schema.write_text(json.dumps(PERSON))
    where = ("--model", str(toys.model), "--adapter", str(toys.adapter))
    base = ("generate", "the", "--raw", *where, "--max-new-tokens", "12", "--json")
    with load(toys.model, adapter=toys.adapter) as loaded:
        for options, given in (
            (("--schema", str(schema)), {"schema": PERSON}),
            (("--schema", json.dumps(PERSON)), {"schema": PERSON}),
            (("--regex", DATE), {"regex": DATE}),
            (("--grammar", str(grammar)), {"grammar": SUMS}),
        ):
            wanted = loaded.generate("the", max_new_tokens=12, **given).token_ids
            assert json.loads(anabranch(*base, *options).out)["token_ids"] == wanted
    refused = anabranch(*base, "--regex", "a", "--schema", "{}")
    assert (refused.code, "schema and regex both" in refused.out) == (1, True)


def test_a_slow_grammar_holds_no_other_up(model: Model) -> None:
    target = model.target
    vocabulary = Vocabulary.of(target.tokenizer, target.config.vocab_size, target.config.eos_token_ids)
    begun, finish, made = threading.Event(), threading.Event(), list[str]()

    def slow() -> str:
        made.append("slow")
        begun.set()
        assert finish.wait(60)
        return "slow"

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(vocabulary.kept, "slow", slow) for _ in range(2)]
        assert begun.wait(60)
        assert vocabulary.kept("quick", lambda: "made") == vocabulary.kept("quick", lambda: "again") == "made"
        finish.set()
        assert [each.result() for each in waiting] == ["slow", "slow"]
    assert made == ["slow"]


def test_a_grammar_that_failed_is_not_kept(model: Model) -> None:
    target = model.target
    vocabulary = Vocabulary.of(target.tokenizer, target.config.vocab_size, target.config.eos_token_ids)

    def fail() -> str:
        raise MemoryError

    with pytest.raises(MemoryError):
        vocabulary.kept("failing", fail)
    assert vocabulary.kept("failing", lambda: "made") == "made"
