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
import test_loras
import test_stored_weights
import torch

from anabranch.errors import InputError
from anabranch.model.native_linear import NativeLinear
from anabranch.native import build, features, recipe, selection
from anabranch.native import library as native
from anabranch.native.arguments import FLOATS, STORED_TYPES
from anabranch.native.features import Processor

HEADER, SCALAR = Path(__file__).with_name("pretended_tiles.h"), Path(__file__).with_name("scalar.h")
SETS = recipe.INSTRUCTION_SETS
HERE = features.processor().features

needs_avx512 = pytest.mark.skipif(
    native.library() is None or "avx512" not in selection.instruction_sets(), reason="this processor has no AVX-512"
)
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
FASTER = [
    pytest.param("avx2", marks=needs_avx512),
    pytest.param("amx", marks=(needs_avx512, needs_compiler, pytest.mark.thorough)),
]
SCALAR_FORM = pytest.param("scalar", marks=(test_kernels.needs_kernels, needs_compiler, pytest.mark.thorough))
# what this processor would not take: without integer products, without pairs of bf16, or with them
SLOWER = [
    pytest.param(
        name,
        marks=(
            test_kernels.needs_kernels,
            pytest.mark.skipif(not SETS[name][0] <= HERE, reason="this processor lacks its instructions"),
            pytest.mark.thorough,
        ),
    )
    for name in ("avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")
]
in_every_other_form = pytest.mark.parametrize("other", [*FASTER, SCALAR_FORM, *SLOWER], indirect=True)
in_every_faster_form = pytest.mark.parametrize("other", FASTER, indirect=True)


def pretended(*flags: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """AMX for this processor, whose tiles are in plain C++."""
    own = recipe.machine_flags(HERE & SETS["avx512_bf16"][0])
    return frozenset(), (*own, *(flag for flag in SETS["amx"][1] if flag.startswith("-D")), *flags)


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels in another form, AMX's with pretended tiles: an instruction set."""
    name = request.param
    digest = f"-DPRETENDED={zlib.crc32(HEADER.read_bytes() + SCALAR.read_bytes())}"  # another header, another library
    with pytest.MonkeyPatch.context() as patch:
        scalar = (
            *recipe.machine_flags(SETS["avx2"][0]),
            "-O1",  # plain loops, which take long to compile otherwise
            f'-DANABRANCH_SIMD="{SCALAR}"',
            '-DANABRANCH_KERNELS="scalar"',
        )
        patch.setitem(SETS, "scalar", (frozenset(), (*scalar, digest)))
        patch.setitem(SETS, "amx", pretended("-O1", "-include", str(HEADER), digest))
        patch.setattr(selection, "instruction_sets", lambda: [name])
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
    test_stored_weights.check_products(name, rows)


@in_every_other_form
@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("rows", [1, 9, 45])
def test_products_with_floats_as_stored(other: str, name: str, rows: int) -> None:
    test_stored_weights.check_products(name, rows, "floats")


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
@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_a_quantized_cache(other: str, form: str) -> None:
    for name in ("llama", "three vectors a head"):
        test_kernels.test_a_tree_is_its_paths_to_the_bit(name=name, form=form + test_kernels.CACHED)
    plain, quantized = (
        test_kernels.prompt_and_tree(test_kernels.packed(test_kernels.BASE, name)).float()
        for name in (form, form + test_kernels.CACHED)
    )
    assert 0 < (quantized - plain).abs().mean() < 0.04 * plain.std()


@in_every_other_form
@pytest.mark.parametrize("form", test_kernels.FORMS)
def test_a_ragged_pass_is_its_rows_to_the_bit(other: str, form: str) -> None:
    test_kernels.test_a_ragged_pass_is_its_rows_to_the_bit(name="llama", form=form)
    test_kernels.test_streams_of_some_rows_trail_to_the_bit(test_kernels.ADAPTERS[-1], form)


@in_every_other_form
@pytest.mark.parametrize("form", test_kernels.FORMS)
def test_loras_by_row(other: str, form: str) -> None:
    test_loras.test_rows_are_those_of_a_pass_of_their_own_to_the_bit("biases (qwen2)", form)


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
@needs_compiler
@pytest.mark.parametrize("other", ["amx"], indirect=True)
def test_tiles_are_used(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even and odd values are added up apart, which other products do not do: these are other bits."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    inside = NativeLinear(weight, None, wide=True)(x)
    native.forget()
    monkeypatch.setattr(selection, "instruction_sets", lambda: ["avx512"])
    outside = NativeLinear(weight, None, wide=True)(x)
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-3)
    assert not torch.equal(inside, outside)


@pytest.mark.thorough
@pytest.mark.skipif("amx" not in selection.instruction_sets(), reason="this processor has no AMX, or grants no tiles")
@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 1e-20], ids=["usual", "products that are not normal"])
def test_pretended_tiles_are_the_processors(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cases = []
    for rows, width in product((1, 5, 16, 17, 32, 50), (32, 160, 1536)):
        weight, x = (scale * torch.randn(count, width) for count in (96, rows))
        cases.append((weight.bfloat16(), x.bfloat16()))

    def found() -> list[torch.Tensor]:
        native.forget()
        library = native.library()
        assert library is not None
        assert library.instruction_set == "amx"
        return [NativeLinear(weight, None, wide=True)(x) for weight, x in cases]

    try:
        real = found()
        monkeypatch.setitem(SETS, "amx", pretended("-O1", "-include", str(HEADER)))
        for ours, theirs in zip(real, found(), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        native.forget()


@pytest.mark.thorough
@needs_avx512
@needs_compiler
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
    monkeypatch.setitem(SETS, "amx", pretended("-include", str(broken)))
    monkeypatch.setattr(selection, "instruction_sets", lambda: ["amx", "avx512"])
    native.forget()
    try:
        library = native.library()
        assert library.instruction_set == "avx512"
        with pytest.raises(build.BuildError):
            build.opened(build.compiler_flags("amx"), tiles=True)
    finally:
        native.forget()


def test_instruction_sets_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest first; one that is required is taken alone, or refused."""

    def on(*names: str, vendor: str = "AuthenticAMD", without: str = "") -> None:
        found = frozenset().union(*(SETS[name][0] for name in names)) - {without}
        monkeypatch.setattr(selection, "processor", lambda: Processor(vendor, found))

    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    on("avx2")
    assert selection.instruction_sets() == ["avx2"]
    on("avx2", without="fma")
    assert selection.instruction_sets() == []
    assert "fma" in selection.unfit().why
    on("avx512_bf16", "avx2_vnni")
    assert selection.instruction_sets() == ["avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"]
    on("avx512_bf16", vendor="GenuineIntel")
    assert selection.instruction_sets() == ["avx512_vnni", "avx512", "avx2"]
    for name in ("avx512_bf16", "avx2"):
        monkeypatch.setenv("ANABRANCH_KERNELS", name)
        assert selection.instruction_sets() == [name]
        assert selection.shortfall_of(name, {}, "").accepted
    monkeypatch.setenv("ANABRANCH_KERNELS", "amx")
    said = "ANABRANCH_KERNELS is amx, but this machine lacks amx_bf16, amx_tile; use one of avx512_bf16, avx512_vnni"
    with pytest.raises(InputError, match=said):
        selection.instruction_sets()
    on("avx2", without="fma")
    monkeypatch.setenv("ANABRANCH_KERNELS", "avx2")
    with pytest.raises(InputError, match="this processor lacks fma; unset it"):
        selection.unfit()
    monkeypatch.setenv("ANABRANCH_KERNELS", "avx1024")
    with pytest.raises(InputError, match=r"must be none or one of amx, avx512_bf16, .*, avx2, got 'avx1024'"):
        selection.instruction_sets()


@pytest.mark.parametrize(
    ("processor", "vendor", "libraries"),
    [
        ("avx2", "AuthenticAMD", ("avx2",)),
        ("avx2_vnni", "GenuineIntel", ("avx2_vnni", "avx2")),
        ("avx512", "GenuineIntel", ("avx512", "avx2")),
        ("avx512_bf16", "AuthenticAMD", ("avx512_bf16", "avx2")),
        ("avx512_bf16", "GenuineIntel", ("avx512_vnni", "avx2")),
        ("amx", "GenuineIntel", ("avx512_bf16", "avx512_vnni", "avx2")),
    ],
)
def test_libraries_that_a_wheel_has_for_a_processor(processor: str, vendor: str, libraries: tuple[str, ...]) -> None:
    """The one that is chosen there, the next where the system may refuse AMX tiles, and avx2's."""
    assert recipe.libraries_for({"sse2", *SETS[processor][0]}, vendor) == libraries
    assert recipe.libraries_for({"sse2"}, vendor) == recipe.PACKAGED, "nothing is known of where it will run"


def test_tiles_that_the_system_does_not_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    monkeypatch.setattr(selection, "processor", lambda: Processor("GenuineIntel", SETS["amx"][0]))
    monkeypatch.setattr(selection, "_tiles_granted", lambda: False)
    assert selection.instruction_sets() == ["avx512_vnni", "avx512", "avx2"]
    found = selection.shortfall_of("avx512_vnni", {}, "")
    assert "does not grant AMX tiles" in found.why
    assert not found.accepted
