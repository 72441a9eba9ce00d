"""The default model and the adapter that ships with it, in float32: what a user runs, on a few tokens.

The longer runs are research/exactness.py and ``anabranch bench``.
"""

from __future__ import annotations

import pytest

from anabranch.adapters.folder import SHIPPED, find_adapters, read_record
from anabranch.decoding.engine import Request
from anabranch.methods import make_drafter
from anabranch.methods.draft_model.load import shipped_draft
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.native import library as native
from small import decode

pytestmark = pytest.mark.default_model

RARE = "Zymurgy in Karlsruhe, Ἀθῆναι and 東京: Zymurgy in"  # tokens that the draft vocabulary lacks
PROMPTS = ("Explain why the sky is blue.", "1, 2, 3, 4, 5, 6,")


@pytest.fixture(scope="module")
def target() -> Target:
    """Packed for the native kernels, as for users who load it in float32."""
    loaded = load_target("default", dtype="float32")
    pack_decoder(loaded.decoder)
    return loaded


def test_the_shipped_adapter_belongs_to_it(target: Target) -> None:
    """A change in how files are read must not change the identity of their weights."""
    assert read_record(SHIPPED / "smollm2-135m-instruct")["target"]["fingerprint"] == target.fingerprint
    assert target.config.tied_head


@pytest.fixture(scope="module")
def adapter(target: Target) -> StreamAdapter:
    (loaded,) = find_adapters(target)
    return loaded.module


@pytest.fixture(scope="module")
def plain(target: Target, adapter: StreamAdapter) -> list[list[int]]:
    """The greedy tokens of plain decoding."""
    return _decode(target, adapter, "none", rows=1)


def _decode(target: Target, adapter: StreamAdapter, spec: str, *, rows: int) -> list[list[int]]:
    asked = [Request(target.tokenizer.encode(text), 16) for text in (*PROMPTS, RARE)]
    return decode(target.decoder, asked, make_drafter(spec, target.decoder, adapter), rows=rows, capacity=128)[0]


def test_every_method_emits_the_tokens_of_plain_decoding(
    target: Target, adapter: StreamAdapter, plain: list[list[int]]
) -> None:
    for spec in ("streams:prune=8,placement=ride", "streams+prompt_lookup"):
        # rows that join and leave; that one row alone is the same is tested in the types that users load
        assert _decode(target, adapter, spec, rows=2) == plain, spec


@pytest.mark.thorough
def test_a_draft_model_ships(target: Target, adapter: StreamAdapter, plain: list[list[int]]) -> None:
    folder = shipped_draft(target.decoder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20e6
    assert _decode(target, adapter, "draft_model", rows=2) == plain


@pytest.mark.parametrize(
    ("spec", "length"), [pytest.param("draft_model", 1.3, marks=pytest.mark.thorough), ("streams", 1.4)]
)
def test_mean_acceptance_lengths(spec: str, length: float, target: Target, adapter: StreamAdapter) -> None:
    asked = [Request(target.tokenizer.encode(PROMPTS[0]), 48)]
    drafter = make_drafter(spec, target.decoder, *([adapter] if spec == "streams" else []))
    (tokens,), (steps,) = decode(target.decoder, asked, drafter, capacity=128)
    assert len(tokens) > length * len(steps)


SPECS = (
    "none",
    "streams:tree=12+prompt_lookup",
    "prompt_lookup",
    "streams:tree=chain",
    "streams:tree=product,k=3,depth=2",
    "streams:tree=16,condition=no",
    "streams:tree=24,prune=12,placement=ride",
)


@pytest.mark.thorough
@pytest.mark.skipif(native.library() is None, reason="only the native kernels are exact in bf16")
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_every_method_in_the_types_that_users_load(quantize: str) -> None:
    target = load_target("default", dtype="bfloat16", quantize=quantize)
    assert pack_decoder(target.decoder)
    (loaded,) = find_adapters(target)
    plain = _decode(target, loaded.module, "none", rows=1)
    for spec in SPECS:
        for rows in (1, 2) if spec == "streams:tree=12+prompt_lookup" else (2,):
            assert _decode(target, loaded.module, spec, rows=rows) == plain, (spec, rows)
