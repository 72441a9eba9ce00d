"""From the options ``schema``, ``regex`` and ``grammar`` of a call to a compiled grammar.

JSON is written on one line, as Python's ``json.dumps`` writes it: with ", " and ": ", and no other space. Most of its
punctuation and all names of properties then follow from the schema, and a small model cannot write spaces forever. A
schema with ``"x-guidance"`` (llguidance's own keyword) says otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from anabranch.declared import structure_of
from anabranch.errors import InputError
from anabranch.structure.vocabulary import Vocabulary, library

__all__ = ["Compiled", "Source", "compiled", "source_of"]

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST = 240  # characters of another library's message
LARGEST = 2**18  # characters of a grammar


class Source(NamedTuple):
    """The option that was given, and its text: of a schema, its JSON."""

    kind: str
    text: str


class Compiled:
    """A grammar in a vocabulary; ``matcher`` is one at its beginning, of which every text has a copy."""

    def __init__(self, source: Source, vocabulary: Vocabulary) -> None:
        self.source, self.vocabulary = source, vocabulary
        if len(source.text) > LARGEST:
            raise InputError(f"the {source.kind} has {len(source.text):,} characters; give at most {LARGEST:,}")
        module = library()
        self.matcher = module.LLMatcher(vocabulary.tokens, _llguidance(module, source), log_level=0)
        if self.matcher.is_error():
            raise InputError(f"{named(source)} is not supported: {reason(self.matcher.get_error())}")
        first = self.matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error() and not first.is_accepting():
            why = reason(first.get_error())
            empty = not why or "NoExtension" in why
            raise InputError(
                f"{named(source)} {'matches no text; check it' if empty else f'is too complex: {why}; simplify it'}"
            )


def source_of(given: Mapping[str, Any]) -> Source | None:
    """The given one of ``schema``, ``regex`` and ``grammar``; None if none is. Raises InputError for two."""
    kind = structure_of(given)
    if kind is None:
        return None
    return Source(kind, _schema_text(given[kind]) if kind == "schema" else given[kind])


def compiled(source: Source, vocabulary: Vocabulary) -> Compiled:
    """A grammar, ready to match. Raises InputError for one that is invalid, unsupported, too large or empty."""
    return vocabulary.kept(source, lambda: Compiled(source, vocabulary))


def named(source: Source) -> str:
    """A source for messages, shortened."""
    text = " ".join(source.text.split())
    return f"the {source.kind} {text if len(text) <= 60 else f'{text[:57]}...'}"


def reason(message: str) -> str:
    """llguidance's message in one line, without what it appends: its state and grammar, or the place of an error."""
    text = " ".join(message.split("<state>")[0].split())
    for before in (" (in regex): ", " error: "):
        text = text.rpartition(before)[2]
    text = re.sub(r" \d+ \| .*", "", text).rstrip(". ^")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _schema_text(value: Any) -> str:
    """A schema as JSON: given as JSON, as a dictionary, or as a class with ``model_json_schema`` (pydantic's)."""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"the schema cannot be written as JSON ({error}); give a JSON schema") from error


def _llguidance(module: Any, source: Source) -> str:
    """The source in llguidance's own form. Raises InputError for a schema that is not JSON."""
    if source.kind == "regex":
        return str(module.LLMatcher.grammar_from_regex(source.text))
    if source.kind == "grammar":
        own = source.text.lstrip().startswith('{"grammars"')
        return source.text if own else str(module.LLMatcher.grammar_from_lark(source.text))
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the schema is not JSON ({error}); give a JSON schema") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InputError(f"a JSON schema is an object or true, got {named(source).removeprefix('the schema ')}")
    form = {"x-guidance": {**JSON_FORM, **schema.get("x-guidance", {})}}
    try:
        return str(module.LLMatcher.grammar_from_json_schema(json.dumps({**schema, **form})))
    except ValueError as error:
        raise InputError(f"{named(source)} is not supported: {reason(str(error))}") from error
