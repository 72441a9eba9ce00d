"""Supported combinations decode exactly; others raise the reason that ``supports`` gives."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import anabranch as public
from anabranch.adapters.folder import LoadedAdapter
from anabranch.api import Model
from anabranch.capabilities import ALPHABET, COMBINED, QUESTIONS, WITH_SOURCE, StandIn, matrix, supports
from anabranch.declared import CALL
from anabranch.decoding.engine import Request
from anabranch.drafting.settings import Settings
from anabranch.errors import AnabranchError, CapabilityError
from anabranch.methods import Method, methods, register, registry
from anabranch.methods.none import NoDrafter
from anabranch.methods.quantized_draft.copy import QuantizedCopy
from anabranch.model.pack import pack_decoder
from anabranch.native import library as native
from anabranch.options import Options
from small import decode, prompt, randomise
from toy_text import toy_model
from verbs import Anabranch

DRAFTERS = [f"{m.name}:{variant}" if variant else m.name for m in methods() for variant in m.variants]
# each method's default and its first variant, for every run and for every type
FEW_DRAFTERS = [
    drafter
    for method in methods()
    for drafter in [each for each in DRAFTERS if each.partition(":")[0] == method.name][:2]
]
SOME_DRAFTERS = [
    pytest.param(drafter, marks=() if drafter in FEW_DRAFTERS else pytest.mark.thorough) for drafter in DRAFTERS
]
USUAL_KERNELS = (torch.bfloat16, "none", "auto")
NEW = 6  # tokens


def fitting(stand_in: StandIn, drafters: Sequence[str] = DRAFTERS) -> list[str]:
    """Leave out quantised copies except for bf16 weights on the native kernels."""
    fits = QuantizedCopy.fits(stand_in.target.decoder)
    return [drafter for drafter in drafters if fits or not drafter.startswith("quantized_draft")]


def made(dtype: torch.dtype = torch.float32, quantize: str = "none", *, packed: bool = False) -> StandIn:
    """A stand-in whose weights are large enough that a wrong draft shows."""
    stand_in = StandIn(torch.device("cpu"), torch.float32, "none")
    randomise(stand_in.target.decoder, seed=1)
    if dtype != torch.float32 or quantize != "none":
        weights = stand_in.target.decoder.state_dict()
        stand_in = StandIn(torch.device("cpu"), dtype, "none")
        stand_in.target.decoder.load_state_dict(weights)
        stand_in.target.decoder.to(dtype)
        if quantize != "none":
            from anabranch.model.quantize import quantize_decoder

            quantize_decoder(stand_in.target.decoder, quantize)
    if packed:
        assert pack_decoder(stand_in.target.decoder)
        assert stand_in.target.decoder.backend.kernels is not None
    return stand_in


@pytest.fixture(scope="module")
def stand_in() -> StandIn:
    return made()


def model_of(stand_in: StandIn) -> Model:
    """The same target with the same modules, as a user has them."""
    adapters = [LoadedAdapter(stand_in.module(m), {"sha256": "0" * 64}, m) for m in methods() if m.trained is not None]
    return Model(stand_in.target, adapters, "none")


@pytest.fixture(scope="module")
def model(stand_in: StandIn) -> Iterator[Model]:
    with model_of(stand_in) as loaded:
        yield loaded


def asked_of(stand_in: StandIn) -> list[Request]:
    """A request for each question, with prompts of several lengths."""
    asked = []
    for number, options in enumerate(QUESTIONS.values()):
        call: Any = {name: value for name, value in options.items() if name in CALL}
        chosen = Options({"max_new_tokens": NEW + number % 3, "seed": number, **call})
        asked.append(chosen.request(prompt(4 + number % 4, seed=number % 3), stand_in.target))
    return asked


def plain_of(stand_in: StandIn) -> list[list[int]]:
    """The tokens of plain decoding for ``asked_of``."""
    asked = [replace(each, rule="match") for each in asked_of(stand_in)]
    return decode(stand_in.target.decoder, asked, rows=4)[0]


@pytest.fixture(scope="module")
def plain(stand_in: StandIn) -> list[list[int]]:
    return plain_of(stand_in)


def check_exact(stand_in: StandIn, drafter: str, plain: list[list[int]], rows: int = 4, *, exact: bool = True) -> None:
    """Decode what is supported in a batch whose rows join and leave; *matching* gives the tokens of plain decoding."""
    target, allowed = stand_in.target.decoder, [bool(supports(drafter, **each)) for each in QUESTIONS.values()]
    asked = list(itertools.compress(asked_of(stand_in), allowed))
    found, _ = decode(target, asked, stand_in.drafter(drafter), rows=rows)
    for request, mine, wanted in zip(asked, found, itertools.compress(plain, allowed), strict=True):
        if exact and request.rule == "match":
            assert mine == wanted
        assert len(mine) == request.max_new_tokens or mine[-1] in request.stop_ids
        if request.sampling.constraint is not None:
            assert all(ALPHABET[token].islower() for token in mine)
        assert all(0 <= token < target.config.vocab_size for token in mine)


@pytest.mark.parametrize("drafter", SOME_DRAFTERS)
def test_every_cell_decodes_exactly_or_raises_its_sentence(
    drafter: str, stand_in: StandIn, model: Model, plain: list[list[int]]
) -> None:
    if not fitting(stand_in, [drafter]):
        pytest.skip("there is no copy of float32 weights")
    check_exact(stand_in, drafter, plain)
    spec = stand_in.spec(drafter)
    for options in QUESTIONS.values():
        said = supports(drafter, **options)
        assert model.supports(spec, **options) == said
        if not said:
            call: Any = {name: value for name, value in options.items() if name not in ("prompts", "stream")}
            with pytest.raises(AnabranchError) as raised:
                model.generate([5, 7, 9], max_new_tokens=4, drafter=spec, **call)
            assert str(raised.value) == said.reason


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "quantize", "kv"),
    [
        (torch.float32, "none", "auto"),
        *((torch.bfloat16, "none", kv) for kv in ("auto", "int8")),
        (torch.bfloat16, "int8", "auto"),
        *((torch.bfloat16, "int4", kv) for kv in ("auto", "int8")),
    ],
    ids=str,
)
def test_every_cell_on_the_native_kernels(dtype: torch.dtype, quantize: str, kv: str) -> None:
    if native.library() is None:
        pytest.skip(f"the native kernels are not available: {native.why_not()}")
    stand_in = made(dtype, quantize, packed=True)
    if kv == "int8":
        stand_in.target.decoder.quantize_cache()
    plain = plain_of(stand_in)
    for drafter in fitting(stand_in, DRAFTERS if (dtype, quantize, kv) == USUAL_KERNELS else FEW_DRAFTERS):
        check_exact(stand_in, drafter, plain)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, "int4"), (torch.bfloat16, "none"), (torch.float16, "none")],
    ids=str,
)
def test_every_cell_in_every_type_in_pytorch(dtype: torch.dtype, quantize: str) -> None:
    stand_in = made(dtype, quantize)
    plain = plain_of(stand_in)
    for drafter in fitting(stand_in, FEW_DRAFTERS):
        check_exact(stand_in, drafter, plain, exact=dtype == torch.float32)  # others round by the width of a pass


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
def test_every_pair_decodes_exactly_or_raises_its_sentence(packed: bool) -> None:
    if packed and native.library() is None:
        pytest.skip(f"the native kernels are not available: {native.why_not()}")
    stand_in = made(packed=packed)
    plain = plain_of(stand_in)
    for names in itertools.combinations([*(m.name for m in methods()), "streams:placement=ride"], 2):
        drafter = "+".join(names)
        if not packed and zlib.crc32(drafter.encode()) % 6:
            continue  # PyTorch takes three times as long as the kernels, so it decodes a sixth of the pairs
        said = supports(drafter, dtype="float32")
        if said:
            check_exact(stand_in, drafter, plain, rows=3)
        else:
            with pytest.raises(AnabranchError) as raised:
                stand_in.drafter(drafter)
            assert str(raised.value) == said.reason


def test_the_matrix_has_every_method_and_follows_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(target: object, settings: Settings, module: object) -> NoDrafter:
        raise CapabilityError("there is no oak; plant one")

    monkeypatch.setattr(registry, "_registry", methods())
    register(Method("oak", "a tree", Settings, build, variants=("",), with_source=True))
    rows = {row.drafter: row for row in matrix()}
    assert list(rows) == [*DRAFTERS, "oak"]
    assert {name: cell.reason for name, cell in rows["oak"].cells.items()} == dict.fromkeys(
        [*QUESTIONS, COMBINED, WITH_SOURCE], "there is no oak; plant one"
    )
    assert rows["suffix"].cells[WITH_SOURCE]
    assert all(rows[name].cells[WITH_SOURCE] for name in ("streams", "medusa", "hydra"))
    assert (
        "streams trail the passes of encoder-decoder models" in rows["streams:placement=ride"].cells[WITH_SOURCE].reason
    )
    assert "does not draft for encoder-decoder models" in rows["eagle"].cells[WITH_SOURCE].reason
    assert rows["streams:tree=auto"].adaptive
    assert not rows["streams"].adaptive
    assert (rows["streams"].trained, rows["ngram"].trained, rows["suffix"].trained) == ("streams", "ngram", "")
    assert rows["staged"].trained == "draft-model"
    fits = fitting(StandIn.of("cpu"))
    assert all(rows[name].cells["match, greedy"] for name in fits)


@pytest.mark.parametrize(
    ("drafter", "options", "reason"),
    [
        ("steams", {}, "there is no drafter 'steams'"),
        ("streams:tree=oak", {}, "tree must be a number of nodes or one of"),
        ("streams", {"rule": "guess"}, "rule must be 'match' or 'rejection', got 'guess'"),
        ("streams", {"temperature": -1}, "temperature must be 0"),
        ("streams", {"colour": "red"}, "there is no option 'colour'"),
        ("streams", {"drafter": "suffix"}, "the drafter is given twice, as 'streams' and drafter='suffix'; drop one"),
        ("auto+suffix", {}, "'auto' takes no settings and cannot be combined"),
        ("streams", {"prompts": 0}, "prompts must be a whole number of at least 1, got 0"),
        ("streams", {"prompts": 2, "stream": True}, "stream takes one prompt at a time, got 2"),
        ("streams", {"quantize": "int3"}, "quantize must be one of"),
        ("streams", {"kv": "int4"}, "kv must be one of auto, int8, got 'int4' (did you mean 'int8'?)"),
        ("streams", {"dtype": "int32"}, "the dtype 'int32' is not known"),
        ("streams", {"device": "abacus"}, "the device 'abacus' is not known"),
        ("streams+none", {}, "'none' cannot be combined"),
        ("lookahead+streams:placement=ride", {}, "cannot share the target's pass"),
        ("space:placement=ride+streams:placement=ride", {}, "both add rows to the target's pass"),
        ("streams+suffix", {"rule": "rejection", "temperature": 1.0}, "does not provide the distribution"),
        ("lookahead:window=1000,ngram=9", {}, "use a smaller window"),
    ],
)
def test_reasons(drafter: str, options: dict[str, Any], reason: str) -> None:
    said = supports(drafter, **options)
    assert not said
    assert reason in said.reason


def test_supported_combinations_have_no_reason() -> None:
    for said in (supports(), supports("auto", quantize="int4", dtype="bfloat16"), public.supports("none", stream=True)):
        assert said
        assert said == public.Support(True)
    assert supports(drafter="suffix")
    assert not supports(drafter="suffix", rule="rejection")


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
def test_a_quantised_copy_is_supported_where_the_kernels_run_bf16_weights() -> None:
    stand_in = made(torch.bfloat16, packed=True)
    plain = plain_of(stand_in)
    for spec in ("quantized_draft", "streams+quantized_draft"):
        check_exact(stand_in, spec, plain)
        assert supports(spec)
        assert supports(f"{spec}:tokens=2+suffix", dtype="bfloat16")
        assert not supports(spec, rule="rejection", temperature=1.0)
        for options in ({"dtype": "float32"}, {"quantize": "int4"}):
            said = supports(spec, **options)
            assert not said
            assert "bf16 weights" in said.reason
            assert supports("auto", **options)
    assert not supports("streams:tree=product+quantized_draft")


def test_supports_draws_no_random_numbers() -> None:
    torch.manual_seed(4)
    wanted = torch.rand(2)
    torch.manual_seed(4)
    StandIn(torch.device("cpu"), torch.float32, "none").drafter("streams+space")
    assert torch.equal(torch.rand(2), wanted)


def test_support_depends_on_the_adapters_of_a_model() -> None:
    with toy_model() as model:
        assert model.supports()
        assert model.supports("streams+prompt_lookup", prompts=3)
        said = model.supports("space")
        assert "needs an adapter that was trained for this target" in said.reason
        with pytest.raises(CapabilityError) as raised:
            model.generate("the", drafter="space")
        assert str(raised.value) == said.reason
        refused = model.supports(rule="rejection", temperature=1.0)
        assert "best-first trees" in refused.reason
    assert model.supports().reason == "this model is closed; load it again"


def test_the_command(anabranch: Anabranch) -> None:
    rows = json.loads(anabranch("info", "--matrix", "--json").out)
    assert [row["drafter"] for row in rows] == DRAFTERS
    shown = anabranch("info", "--matrix").out
    assert all(drafter in shown for drafter in DRAFTERS)
    for row in rows:
        for cell in row["cells"].values():
            assert cell["supported"] or cell["reason"] in shown


def test_the_command_for_a_model(anabranch: Anabranch, toys: Any) -> None:
    rows = {row["drafter"]: row for row in json.loads(anabranch("info", str(toys.model), "--matrix", "--json").out)}
    assert rows["suffix"]["cells"]["match, greedy"]["supported"]
    assert "needs an adapter" in rows["streams"]["cells"]["match, greedy"]["reason"]
    assert WITH_SOURCE not in rows["suffix"]["cells"]
