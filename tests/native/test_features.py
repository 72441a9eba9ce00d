"""The processor's features, by CPUID and XGETBV."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path

import pytest

from anabranch.native import build, features, recipe
from anabranch.native.recipe import INSTRUCTION_SETS
from anabranch.support.processor import processor_flags, processor_vendor

AMD = (0x68747541, 0x444D4163, 0x69746E65)  # "AuthenticAMD" in EBX, ECX and EDX
SAVED = 0x602E7  # x87, SSE, AVX, AVX-512 and tiles


def answers(*, highest: int = 0x10, last: int = 1, leaf1_ecx: int = 0xFFFFFFFF) -> features.Cpuid:
    """A processor with every feature of its leaves."""
    everything = 0xFFFFFFFF

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        if leaf == 0:
            return highest, *AMD
        if leaf == 1:
            return 0, 0, leaf1_ecx, 0
        return (last if subleaf == 0 else everything), everything, everything, everything

    return cpuid


def test_every_feature_of_a_processor_with_all_of_them() -> None:
    found = features.decoded(answers(), lambda: SAVED)
    assert found == features.Processor("AuthenticAMD", frozenset(features.BITS))
    assert frozenset().union(*(needed for needed, _ in INSTRUCTION_SETS.values())) <= found.features


@pytest.mark.parametrize(
    ("processor", "saved", "missing"),
    [
        (answers(), 0x7, {"avx512f", "avx512_vnni", "amx_tile"}),  # the system saves no registers of AVX-512
        (answers(), 0xE7, {"amx_tile", "amx_bf16"}),
        (answers(), 0x3, {"avx2", "fma", "f16c", "avx_vnni"}),
        (answers(last=0), SAVED, {"avx_vnni", "avx512_bf16"}),
        (answers(highest=6), SAVED, {"avx2", "bmi2", "avx512f"}),
        (answers(leaf1_ecx=0xFFFFFFFF & ~(1 << 12)), SAVED, {"fma"}),
    ],
)
def test_features_that_processor_or_system_lack(processor: features.Cpuid, saved: int, missing: set[str]) -> None:
    assert not missing & features.decoded(processor, lambda: saved).features


def test_a_system_without_xgetbv_is_not_asked() -> None:
    """The instruction would end the process."""

    def fault() -> int:
        raise AssertionError("XGETBV")

    found = features.decoded(answers(leaf1_ecx=0xFFFFFFFF & ~(1 << features.OSXSAVE)), fault)
    assert found.features == {"bmi1", "bmi2"}


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64") or build.compiler() is None,
    reason="needs x86-64 Linux and a compiler",
)
def test_this_processor_as_linux_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.so"
    subprocess.run([*build.compiler(), "-x", "c", "-shared", "-fPIC", str(recipe.PROBE), "-o", str(made)], check=True)
    name = f"processor-{recipe.probe_key()}-{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
    monkeypatch.setattr(recipe, "PACKED", tmp_path)
    made.rename(tmp_path / name)
    try:
        features.processor.cache_clear()
        assert features._probe() is not None
        asked = features.processor()
    finally:
        monkeypatch.undo()
        features.processor.cache_clear()
    assert asked == features.Processor(processor_vendor(), processor_flags() & features.BITS.keys())


def test_a_damaged_library_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"processor-{recipe.probe_key()}-{'0' * 64}.so").write_bytes(b"cut")
    monkeypatch.setattr(recipe, "PACKED", tmp_path)
    assert features._probe() is None
