"""Products in AMX's tiles, on pretended ones: what the other kernels promise holds with them, and what cannot use them
does without.

The real instructions cannot be tested on a processor without them; ``pretended_tiles.h`` follows their definition.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_kernels
import torch

from anabranch.model.stack import NativeLinear
from anabranch.native import library as native

HEADER = Path(__file__).with_name("pretended_tiles.h")

needs_kernels = test_kernels.needs_kernels


@pytest.fixture
def tiles() -> Iterator[None]:
    """The kernels with pretended tiles."""
    with pytest.MonkeyPatch.context() as patch:
        digest = f"-DPRETENDED={zlib.crc32(HEADER.read_bytes())}"  # another header, another library
        patch.setattr(native, "FLAGS", (*native.FLAGS, "-O1", native.TILES[0], "-include", str(HEADER), digest))
        native.library.cache_clear()
        yield
    native.library.cache_clear()


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("outputs", [1, 33, 96])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 50, 97])
@pytest.mark.parametrize("width", [32, 160, 70])
def test_products(outputs: int, rows: int, width: int) -> None:
    """Every row's product is the one that it has alone, to the bit; widths that fill no tile go without."""
    torch.manual_seed(outputs)
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((outputs, width), (outputs,), (rows, width)))
    linear = NativeLinear(weight, bias, wide=True)
    y = linear(x)
    torch.testing.assert_close(y, x.float() @ weight.float().T + bias.float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(y, torch.cat([linear(row[None]) for row in x]))


@needs_kernels
def test_tiles_are_used(tiles: None) -> None:
    """Even and odd values are added up apart, which other products do not do: these are other bits."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    inside = NativeLinear(weight, None, wide=True)(x)
    native.library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", tuple(flag for flag in native.FLAGS if flag != native.TILES[0]))
        outside = NativeLinear(weight, None, wide=True)(x)
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-3)
    assert not torch.equal(inside, outside)


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", test_kernels.CASES)
def test_layers(name: str) -> None:
    test_kernels.test_layers_agree_with_float32(name)


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["llama", "sliding window (mistral)", "biases (qwen2)"])
def test_a_tree_is_its_paths_to_the_bit(name: str) -> None:
    test_kernels.test_a_tree_is_its_paths_to_the_bit(name=name, form="bfloat16")  # type: ignore[call-arg]


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rows", [1, 3])
def test_speculation_says_the_same(rows: int) -> None:
    test_kernels.test_speculation_says_the_same("llama", rows, "bfloat16")


@needs_kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("shape", test_kernels.ADAPTERS, ids=str)
def test_streams_trail(shape: dict[str, object]) -> None:
    test_kernels.test_streams_trail_as_in_pytorch("llama", shape)


@needs_kernels
@pytest.mark.parametrize(
    "flaw",
    [
        pytest.param("#error unknown", id="a compiler that does not know them"),
        pytest.param("#undef _tile_dpbf16ps\n#define _tile_dpbf16ps(to, a, b) (void)0", id="wrong products"),
        pytest.param("#undef _tile_release\n#define _tile_release() __builtin_trap()", id="a fault"),
    ],
)
def test_without_tiles_where_they_fail(flaw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is tried in a process of its own first cannot hurt: the kernels do without tiles."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_tiles", lambda: True)
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))  # compiled sooner
    broken = tmp_path / "broken.h"
    broken.write_text(f'#include "{HEADER}"\n{flaw}\n')
    monkeypatch.setattr(native, "TILES", (native.TILES[0], "-include", str(broken)))
    native.library.cache_clear()
    try:
        assert native.library() is not None
        with pytest.raises(subprocess.SubprocessError):
            native._compiled((*native.FLAGS, *native.TILES))
    finally:
        native.library.cache_clear()


def test_who_may_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without them, and whoever asks to do without."""
    monkeypatch.setattr(native, "_processor_flags", lambda: frozenset(native.NEEDED))
    assert not native._tiles()
    monkeypatch.setattr(native, "_processor_flags", lambda: frozenset((*native.NEEDED, "amx_tile", "amx_bf16")))
    monkeypatch.setenv("ANABRANCH_NATIVE", "avx512")
    assert not native._tiles()
