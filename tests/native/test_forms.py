"""Forms of the kernels that this processor would not choose: what the kernels promise holds in each.

AMX's instructions cannot be tested on a processor without them; ``pretended_tiles.h`` follows their definition.
``scalar.h`` is an instruction set written from the list in ``simd.h`` alone, which shows that the list is complete.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import test_kernels
import test_stored
import torch

from anabranch.errors import InputError
from anabranch.model.native_linear import NativeLinear
from anabranch.native import build
from anabranch.native import library as native
from anabranch.native.arguments import STORED_TYPES
from anabranch.support.processor import processor_flags, processor_vendor

HEADER, SCALAR = Path(__file__).with_name("pretended_tiles.h"), Path(__file__).with_name("scalar.h")
TILES = build.INSTRUCTION_SETS["amx"][1][0]

needs_avx512 = pytest.mark.skipif(
    native.library() is None or "avx512" not in build.instruction_sets(), reason="this processor has no AVX-512"
)
FASTER = [pytest.param("avx2", marks=needs_avx512), pytest.param("amx", marks=(needs_avx512, pytest.mark.thorough))]
SCALAR_FORM = pytest.param("scalar", marks=(test_kernels.needs_kernels, pytest.mark.thorough))
# bf16 in pairs, or as floats: what this processor does not take
PAIRS = pytest.param(
    "avx512",
    marks=(
        needs_avx512,
        pytest.mark.skipif("avx512_bf16" not in processor_flags(), reason="this processor has no AVX512_BF16"),
        pytest.mark.thorough,
    ),
)
# AVX2 with the integer products of processors before AVX-VNNI
PLAIN_AVX2 = pytest.param(
    "avx2 -mno-avxvnni",
    marks=(
        test_kernels.needs_kernels,
        pytest.mark.skipif("avx_vnni" not in processor_flags(), reason="this processor has no AVX-VNNI"),
        pytest.mark.thorough,
    ),
)
in_every_other_form = pytest.mark.parametrize("other", [*FASTER, SCALAR_FORM, PAIRS, PLAIN_AVX2], indirect=True)
in_every_faster_form = pytest.mark.parametrize("other", FASTER, indirect=True)


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels in another form, AMX's with pretended tiles: an instruction set, and more compiler flags."""
    name, *flags = request.param.split()
    digest = f"-DPRETENDED={zlib.crc32(HEADER.read_bytes() + SCALAR.read_bytes())}"  # another header, another library
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.INSTRUCTION_SETS, "scalar", (frozenset(), (f'-DANABRANCH_SIMD="{SCALAR}"', digest)))
        patch.setitem(build.INSTRUCTION_SETS, "amx", (frozenset(), (TILES, "-O1", "-include", str(HEADER), digest)))
        needed, own = build.INSTRUCTION_SETS[name]
        patch.setitem(build.INSTRUCTION_SETS, name, (needed, (*own, *flags)))
        patch.setattr(build, "instruction_sets", lambda: [name])
        patch.setattr(build, "processor_vendor", lambda: "" if processor_vendor() == "GenuineIntel" else "GenuineIntel")
        patch.setattr(test_kernels, "MODELS", {})
        native.forget()
        library = native.library()
        assert library.instruction_set == name
        yield name
    native.forget()


@in_every_other_form
@pytest.mark.parametrize("outputs", [1, 33, 96])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 50, 97])
@pytest.mark.parametrize("width", [32, 160, 70])
def test_products(other: str, outputs: int, rows: int, width: int) -> None:
    """Every row's product is the one that it has alone, to the bit; widths that fill no tile go without."""
    torch.manual_seed(outputs)
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((outputs, width), (outputs,), (rows, width)))
    linear = NativeLinear(weight, bias, wide=True)
    y = linear(x)
    torch.testing.assert_close(y, x.float() @ weight.float().T + bias.float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(y, torch.cat([linear(row[None]) for row in x]))


@in_every_other_form
@pytest.mark.parametrize("name", STORED_TYPES)
@pytest.mark.parametrize("rows", [1, 9])
def test_products_with_weights_as_stored(other: str, name: str, rows: int) -> None:
    test_stored.check_products(name, rows)


@in_every_other_form
@pytest.mark.parametrize("name", test_kernels.CASES)
def test_layers(other: str, name: str) -> None:
    test_kernels.test_layers_agree_with_float32(name)
    test_kernels.test_float32_agrees_with_pytorch(name)


@in_every_other_form
@pytest.mark.parametrize("form", test_kernels.FORMS)
@pytest.mark.parametrize("name", ["llama", "sliding window (mistral)", "biases (qwen2)"])
def test_a_tree_is_its_paths_to_the_bit(other: str, name: str, form: str) -> None:
    test_kernels.test_a_tree_is_its_paths_to_the_bit(name=name, form=form)


@in_every_other_form
@pytest.mark.parametrize("form", test_kernels.FORMS)
def test_a_ragged_pass_is_its_rows_to_the_bit(other: str, form: str) -> None:
    test_kernels.test_a_ragged_pass_is_its_rows_to_the_bit(name="llama", form=form)
    test_kernels.test_streams_of_some_rows_trail_to_the_bit(test_kernels.ADAPTERS[-1], form)


@in_every_faster_form
@pytest.mark.parametrize(
    ("rows", "form"),
    [
        pytest.param(rows, form, marks=() if (rows, form) in {(1, "bfloat16"), (3, "int4")} else pytest.mark.thorough)
        for rows, form in product((1, 3), test_kernels.FORMS)
    ],
)
def test_speculation_gives_the_same_tokens(other: str, rows: int, form: str) -> None:
    test_kernels.test_speculation_gives_the_same_tokens("llama", rows, form)


@in_every_other_form
@pytest.mark.parametrize("shape", test_kernels.ADAPTERS, ids=str)
def test_streams_trail(other: str, shape: dict[str, object]) -> None:
    test_kernels.test_streams_trail_as_in_pytorch("llama", shape)


@pytest.mark.thorough  # as everything in this form, whose library takes long to compile
@needs_avx512
@pytest.mark.parametrize("other", ["amx"], indirect=True)
def test_tiles_are_used(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even and odd values are added up apart, which other products do not do: these are other bits."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    inside = NativeLinear(weight, None, wide=True)(x)
    native.forget()
    monkeypatch.setattr(build, "instruction_sets", lambda: ["avx512"])
    outside = NativeLinear(weight, None, wide=True)(x)
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-3)
    assert not torch.equal(inside, outside)


@pytest.mark.thorough
@needs_avx512
@pytest.mark.parametrize(
    "flaw",
    [
        pytest.param("#error unknown", id="a compiler that does not know them"),
        pytest.param("#undef _tile_dpbf16ps\n#define _tile_dpbf16ps(to, a, b) (void)0", id="wrong products"),
        pytest.param("#undef _tile_release\n#define _tile_release() __builtin_trap()", id="a fault"),
    ],
)
def test_without_tiles_where_they_fail(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiles are tried in another process first: if that fails, the kernels run without them."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # compiled sooner
    broken = tmp_path / "broken.h"
    broken.write_text(f'#include "{HEADER}"\n{flaw}\n')
    flags = (TILES, "-include", str(broken))
    monkeypatch.setitem(build.INSTRUCTION_SETS, "amx", (frozenset(), flags))
    monkeypatch.setattr(build, "instruction_sets", lambda: ["amx", "avx512"])
    native.forget()
    try:
        library = native.library()
        assert library.instruction_set == "avx512"
        with pytest.raises(build.BuildError):
            build.opened((*build.FLAGS, *flags))
    finally:
        native.forget()


def test_instruction_sets_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without something, and whoever asks to do without it."""
    needs = {name: needed for name, (needed, _) in build.INSTRUCTION_SETS.items()}
    monkeypatch.delenv("ANABRANCH_NATIVE", raising=False)
    monkeypatch.setattr(build, "processor_flags", lambda: needs["avx2"])
    assert build.instruction_sets() == ["avx2"]
    monkeypatch.setattr(build, "processor_flags", lambda: needs["avx2"] - {"fma"})
    assert build.instruction_sets() == []
    lacking = build.unfit()
    assert "fma" in lacking.why
    monkeypatch.setattr(build, "processor_flags", lambda: needs["avx2"] | needs["amx"])
    monkeypatch.setenv("ANABRANCH_NATIVE", "avx512")
    assert build.instruction_sets() == ["avx512", "avx2"]
    monkeypatch.setenv("ANABRANCH_NATIVE", "avx2")
    assert build.instruction_sets() == ["avx2"]
    monkeypatch.setenv("ANABRANCH_NATIVE", "1")
    assert build.instruction_sets()[-2:] == ["avx512", "avx2"]
    monkeypatch.setenv("ANABRANCH_NATIVE", "avx1024")
    with pytest.raises(InputError, match=r"0 \(no native kernels\), 1, or one of amx, avx512, avx2, got 'avx1024'"):
        build.instruction_sets()
