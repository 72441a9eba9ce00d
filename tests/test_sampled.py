"""A run of all tests takes one case in six of each parametrised test, the thorough tests the others."""

from __future__ import annotations

from itertools import product

import pytest

from sampled import SHARE, left_out


@pytest.mark.parametrize("count", [1, SHARE, SHARE + 1, 40])
def test_every_case_is_in_one_run_and_each_test_in_the_quick_one(count: int) -> None:
    cases = [f"test_it[{n}]" for n in range(count)]
    thorough = left_out(cases, str)
    quick = [case for case in cases if case not in thorough]
    assert len(quick) == -(-count // SHARE)
    assert len(set(thorough)) == len(thorough) == count - len(quick)
    assert set(left_out(cases[::-1], str)) == set(thorough), "in whatever order they are collected"


def test_what_remains_varies_in_every_parameter() -> None:
    cases = [f"test_it[{family}-{dtype}-{rows}]" for family, dtype, rows in product("abcdefgh", "xyz", "1234")]
    kept = set(cases) - set(left_out(cases, str))
    for place in (0, 1, 2):
        values = {case[:-1].split("[")[1].split("-")[place] for case in cases}
        assert {case[:-1].split("[")[1].split("-")[place] for case in kept} == values
