"""The physics: what is read per token, and that what is measured is a number."""

from __future__ import annotations

import pytest
import torch

from anabranch.bench.machine import last_level_cache, measure_machine
from anabranch.model.pack import can_pack, pack_decoder, weight_bytes
from anabranch.model.weights import build_decoder
from anabranch.support.memory import forget_peak, peak_memory_mb
from small import CASES, randomise, small

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2"])
def test_a_token_reads_everything_but_the_tables_it_looks_up(case: str) -> None:
    decoder = small(case)
    tables = {"embedding.weight", "positions.weight"}
    # a tied head is the embedding's table, and is read whole as the head
    if decoder.config.tied_head:
        tables.remove("embedding.weight")
    expected = sum(p.nbytes for name, p in decoder.named_parameters() if name not in tables)
    assert weight_bytes(decoder) == expected


@pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="no packed kernels here")
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_packing_changes_nothing(case: str) -> None:
    decoder = build_decoder(CASES[case], device="cpu", dtype=torch.bfloat16)
    randomise(decoder, seed=1)
    before = weight_bytes(decoder)
    assert pack_decoder(decoder)
    assert weight_bytes(decoder) == before


def test_the_floor_is_weights_over_bandwidth() -> None:
    machine = measure_machine(small(), buffer_bytes=2**20, repeats=3)
    low, middle, high = machine.read_gb_s
    assert 0 < low <= middle <= high
    assert machine.matrix_tflop_s[1] > 0
    assert machine.floor_ms == pytest.approx(machine.weight_mb / middle)
    record = machine.to_dict()
    assert record["dtype"] == "float32"
    assert record["floor_ms"] == round(machine.floor_ms, 4)


def test_what_the_system_tells() -> None:
    assert last_level_cache(CPU) >= 0
    forget_peak(CPU)
    assert all(value > 0 for value in peak_memory_mb(CPU).values())
