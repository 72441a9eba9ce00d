"""The script for the JSON Schema Test Suite, on a few groups in the suite's form: every kind of outcome is counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import json_schema_suite


def group(schema: Any, valid: list[Any], invalid: list[Any]) -> dict[str, Any]:
    cases = [{"data": data, "valid": True} for data in valid] + [{"data": data, "valid": False} for data in invalid]
    return {"description": "a group", "schema": schema, "tests": [{"description": "a test", **case} for case in cases]}


PAIR = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
GROUPS = [
    group({"type": "integer"}, [-7, 1.0], [1.5, "1"]),
    group({"enum": ["ü", None, 3]}, ["ü", None], ["u"]),
    group({"type": "string", "minLength": 2, "maxLength": 3}, ["éé"], ["é", "four"]),
    group({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd"]),
    group({"type": "array", "items": {"type": "boolean"}, "maxItems": 1}, [[True]], [[True, True], [0]]),
    group({**PAIR, "required": ["a"]}, [{"a": 1, "b": 2}, {"a": []}], [{"b": 2}, {"a": 1, "c": 2}]),
    group(PAIR, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], []),
    group({"anyOf": [{"type": "null"}, {"minimum": 2, "type": "integer"}]}, [None, 2], [1]),
    group({"$ref": "#/$defs/x", "$defs": {"x": {"const": [1, {"y": "z"}]}}}, [[1, {"y": "z"}]], [[1]]),
    group({"not": {}}, [], [1]),
    group({"uniqueItems": True}, [[1, 2]], [[1, 1]]),
]


def test_schemas_are_refused_or_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for draft in json_schema_suite.DRAFTS:
        (tmp_path / "tests" / draft).mkdir(parents=True)
        (tmp_path / "tests" / draft / "some.json").write_text(json.dumps(GROUPS), encoding="utf-8")
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["research/json_schema_suite.py", str(tmp_path), "--out", str(out)])
    json_schema_suite.main()
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["command"].startswith("python research/json_schema_suite.py")
    assert record["environment"]["commit"]
    for draft in json_schema_suite.DRAFTS:
        found = record["drafts"][draft]
        assert found["unsound"] == []
        assert found["counts"] == {"schemas": 11, "refused": 2, "sound": 24, "narrower": 2}
        assert set(found["refusals"]) == {'Unimplemented keys: ["not"]', 'Unimplemented keys: ["uniqueItems"]'}
