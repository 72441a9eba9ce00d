"""Certificates of toy targets: equal in float32 whatever drafts, greedy and sampled, one row and several."""

from __future__ import annotations

import pytest

from anabranch.certify import Certificate, certify
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import parse_spec
from small import as_target, prompt, small, small_adapter

PROMPTS = [prompt(5, 1), prompt(9, 2)]


@pytest.mark.parametrize("spec", ["auto", "none", "prompt_lookup", "streams:nodes=12", "streams:nodes=8+prompt_lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(spec: str, temperature: float) -> None:
    target = as_target(small())
    heard: list[Certificate] = []
    certificates = certify(
        target,
        [small_adapter(target.decoder)],
        parse_spec(spec),
        PROMPTS,
        max_new_tokens=20,
        call={"temperature": temperature, "seed": 3},
        report=heard.append,
    )
    assert [one.verdict for one in certificates] == ["equal", "equal"]
    assert heard == certificates


def test_invalid_certificates_are_refused_first() -> None:
    target = as_target(small())
    with pytest.raises(InputError, match="at least one prompt"):
        certify(target, [], "none", [], max_new_tokens=4)
    with pytest.raises(InputError, match="rows must be a whole number of at least 1, got 0"):
        certify(target, [], "none", PROMPTS, max_new_tokens=4, rows=0)
    with pytest.raises(CapabilityError, match="needs an adapter"):
        certify(target, [], "streams", PROMPTS, max_new_tokens=4)
