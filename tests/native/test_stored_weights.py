"""Weights in the formats of GGUF files: the same values in packed blocks, and products of rows in int8 with these."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from test_kernels import needs_kernels, quantized_rows

from anabranch.native import library as native
from anabranch.native import structs
from anabranch.native.arguments import FLOATS, STORED_TYPES
from stored_rows import HALVES, raw_rows, values_of

pytestmark = needs_kernels

WIDTH = 512
in_every_format = pytest.mark.parametrize("name", STORED_TYPES)


def library() -> native.Library:
    kernels = native.library()
    assert kernels is not None
    return kernels


def stored(
    name: str, outputs: int, *, seed: int = 0, kind: str = "stored"
) -> tuple[structs.Packed, torch.Tensor, torch.Tensor]:
    """A packed weight, its memory, and its values [outputs, WIDTH]."""
    raw = raw_rows(name, outputs, WIDTH, seed)
    packed, memory = library().stored([STORED_TYPES[name]] * -(-outputs // 32), outputs, WIDTH, kind=kind)
    assert library().pack_stored(packed, 0, STORED_TYPES[name], raw)
    return packed, memory, values_of(name, raw)


def test_all_formats_of_halves_are_known() -> None:
    assert set(HALVES) == set(STORED_TYPES)


@in_every_format
def test_values_are_those_of_the_file(name: str) -> None:
    kind, raw = STORED_TYPES[name], raw_rows(name, 50, WIDTH)
    values, order = values_of(name, raw), np.random.default_rng(1).permutation(50)
    assert torch.equal(library().raw_rows(kind, raw, WIDTH, order), values[order])
    packed, memory = library().stored([kind, kind], 50, WIDTH)
    assert library().pack_stored(packed, 0, kind, raw, order)
    assert torch.equal(library().unpack_stored(packed), values[order])
    assert torch.equal(library().unpack_stored(packed, np.array([49, 3])), values[order[[49, 3]]])
    assert memory.numel() < 1.2 * 64 / 50 * raw.nbytes + 64


def check_products(name: str, rows: int, kind: str = "stored") -> None:
    packed, memory, values = stored(name, 70, kind=kind)
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH).bfloat16()
    x[:, :32] *= 30  # a group of its own scale
    x[0, 64:] = 0
    y = library().linear(x, packed, None)
    exact = (quantized_rows(x) if kind == "stored" else x.float()) @ values.T
    assert (y - exact).abs().max() < 1e-4 * exact.abs().max()
    assert torch.equal(y, torch.cat([library().linear(x[i : i + 1], packed, None) for i in range(rows)]))
    assert memory.numel() > 0  # alive to here


@in_every_format
@pytest.mark.parametrize("rows", [1, 5, 8, 19, 45])
def test_products(name: str, rows: int) -> None:
    """Rows are rounded to int8 and nothing else, and a row's product does not depend on the others, to the bit."""
    check_products(name, rows)


@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("rows", [1, 8, 19, 45])
def test_rows_of_floats_are_not_rounded(name: str, rows: int) -> None:
    """Beside floats alone; rows in float32 are multiplied as they are."""
    check_products(name, rows, "floats")
    packed, memory, values = stored(name, 70, kind="floats")
    x = torch.randn(rows, WIDTH)
    torch.testing.assert_close(library().linear(x, packed, None), x @ values.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(library().unpack_stored(library().adopt(memory, 70, WIDTH, kind="floats")), values)


def test_a_weight_of_floats_has_no_blocks_of_integers() -> None:
    with pytest.raises(AssertionError, match="a block of integers"):
        library().stored([STORED_TYPES["F16"], STORED_TYPES["Q8_0"]], 64, WIDTH, kind="floats")
    _, memory, _ = stored("Q8_0", 64)
    with pytest.raises(AssertionError, match="a block of integers"):
        library().adopt(memory, 64, WIDTH, kind="floats")


def test_a_weight_of_several_formats() -> None:
    """Each block has its own format; every second block may be another tensor's, as gate and up are."""
    gate, up = raw_rows("Q4_K", 64, WIDTH), raw_rows("Q6_K", 64, WIDTH)
    kinds = [STORED_TYPES["Q4_K"], STORED_TYPES["Q6_K"]]
    packed, _ = library().stored(kinds * 2, 128, WIDTH)
    for block, (kind, raw) in enumerate(zip(kinds, (gate, up), strict=True)):
        assert library().pack_stored(packed, block, kind, raw, every=2)
    wanted = torch.stack([values_of("Q4_K", gate).view(2, 32, -1), values_of("Q6_K", up).view(2, 32, -1)], dim=1)
    assert torch.equal(library().unpack_stored(packed), wanted.view(128, -1))
    with pytest.raises(AssertionError, match="another format"):
        library().pack_stored(packed, 1, STORED_TYPES["Q4_K"], gate)
    with pytest.raises(AssertionError, match="no room"):
        library().pack_stored(packed, 2, STORED_TYPES["Q4_K"], gate, every=2)


@in_every_format
def test_selected_outputs(name: str) -> None:
    packed, memory, values = stored(name, 70)
    room, more = library().room(packed, 40)
    chosen = np.random.default_rng(0).permutation(70)[:33]
    library().copy_outputs(packed, chosen, room, 5)
    assert torch.equal(library().unpack_stored(room, np.arange(5, 38)), values[chosen])
    assert more.numel() < memory.numel()


@pytest.mark.parametrize("name", [name for name in STORED_TYPES if HALVES[name]])
def test_scales_that_are_not_finite_are_reported(name: str) -> None:
    raw = raw_rows(name, 32, WIDTH)
    for at in HALVES[name]:
        for bad in (np.nan, np.inf):
            broken = raw.copy()
            broken[7, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
            packed, _ = library().stored([STORED_TYPES[name]], 32, WIDTH)
            assert not library().pack_stored(packed, 0, STORED_TYPES[name], broken)


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_floats_that_are_not_finite_are_reported(name: str) -> None:
    for bad in (np.nan, np.inf):
        values = np.ones((32, WIDTH), np.float32)
        values[7, 300] = bad
        raw = np.ascontiguousarray(quantize(values, GGMLQuantizationType[name])).view(np.uint8)
        packed, _ = library().stored([STORED_TYPES[name]], 32, WIDTH)
        assert not library().pack_stored(packed, 0, STORED_TYPES[name], raw)


def test_memory_of_a_file_is_checked() -> None:
    packed, memory, values = stored("Q5_K", 70)
    kept = torch.empty(memory.numel(), dtype=torch.uint8).copy_(memory)
    assert torch.equal(library().unpack_stored(library().adopt(kept, 70, WIDTH)), values)
    for change in (lambda m: m[:-64], lambda m: m[:32]):
        with pytest.raises(AssertionError):
            library().adopt(change(kept).clone(), 70, WIDTH)
    for at in (0, 8, 16):
        damaged = kept.clone()
        damaged[at] += 1
        with pytest.raises(AssertionError):
            library().adopt(damaged, 70, WIDTH)
    with pytest.raises(AssertionError):
        library().adopt(kept, 70, 2 * WIDTH)
    assert packed.outputs == 70


def test_rows_that_do_not_fit_are_rejected() -> None:
    raw = raw_rows("Q4_K", 32, WIDTH)
    packed, _ = library().stored([STORED_TYPES["Q4_K"]], 32, WIDTH)
    with pytest.raises(AssertionError, match="bytes"):
        library().pack_stored(packed, 0, STORED_TYPES["Q4_K"], raw[:, :-1].copy())
    with pytest.raises(AssertionError, match="not in the tensor"):
        library().pack_stored(packed, 0, STORED_TYPES["Q4_K"], raw, np.array([32]))
    with pytest.raises(AssertionError, match="not a multiple"):
        library().stored([STORED_TYPES["Q4_K"]], 32, 96)
    with pytest.raises(AssertionError, match="unknown format"):
        library().stored([9], 32, 96)
