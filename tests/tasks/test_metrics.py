"""Metrics of quality, each against values known beforehand."""

from __future__ import annotations

import sys

import pytest

from anabranch.errors import CapabilityError
from anabranch.tasks import METRICS, check_metrics, difference, metrics, spread, sql
from anabranch.tasks.sql import equivalent, query_in

BOATS = "CREATE TABLE boats (name VARCHAR, colour VARCHAR, seats INTEGER)"
OWNERS = BOATS + "; CREATE TABLE owners (boat VARCHAR, person VARCHAR)"


def score(name: str, answer: str, *references: str, context: str = BOATS) -> tuple[float | None, ...]:
    return METRICS[name].score(answer, references, {"context": context})


def test_exact_match_collapses_white_space_and_keeps_case() -> None:
    assert score("exact_match", " SELECT\n a  FROM b ", "other", "SELECT a FROM b") == (1.0,)
    assert score("exact_match", "select a from b", "SELECT a FROM b") == (0.0,)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("SELECT name FROM boats WHERE seats > 4", "SELECT name FROM boats WHERE seats >= 5"),
        ("```sql\nselect name from boats where colour = 'red';\n```", 'SELECT name FROM boats WHERE colour = "red"'),
        ("SELECT T.name FROM boats AS T WHERE T.colour LIKE 're%'", "SELECT name FROM boats WHERE colour LIKE 're%'"),
        ("SELECT COUNT(name) FROM boats", "SELECT COUNT(*) FROM boats"),
        ("SELECT SUM(seats) * 1.0 / COUNT(*) FROM boats", "SELECT AVG(seats) FROM boats"),
        ("SELECT name FROM boats ORDER BY seats", "SELECT name FROM boats"),
        (
            "SELECT person FROM owners, boats WHERE boat = name AND seats = 2",
            "SELECT T2.person FROM boats AS T1 JOIN owners AS T2 ON T1.name = T2.boat WHERE T1.seats = 2",
        ),
        ("SELECT name FROM boats WHERE name = 'O''Hara'", 'SELECT name FROM boats WHERE name = "O\'Hara"'),
    ],
)
def test_queries_with_the_same_results(answer: str, reference: str) -> None:
    assert equivalent(answer, reference, OWNERS) is True


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("SELECT name FROM boats WHERE seats >= 4", "SELECT name FROM boats WHERE seats > 4"),
        ("SELECT name FROM boats WHERE seats < 4", "SELECT name FROM boats WHERE seats > 4"),
        ("SELECT name FROM boats", "SELECT name FROM boats WHERE colour <> 'red'"),
        ("SELECT name FROM boats WHERE colour = 'Red'", "SELECT name FROM boats WHERE colour = 'red'"),
        (
            "SELECT name FROM boats WHERE colour = 'red' OR seats = 7",
            "SELECT name FROM boats WHERE colour = 'red' AND seats = 7",
        ),
        ("SELECT COUNT(DISTINCT colour) FROM boats", "SELECT COUNT(colour) FROM boats"),
        ("SELECT name, seats FROM boats", "SELECT seats, name FROM boats"),
        ("SELECT name FROM boats", "SELECT name FROM boats ORDER BY seats DESC"),
        ("SELECT MIN(seats) FROM boats", "SELECT MAX(seats) FROM boats"),
        ("SELECT nothing FROM boats", "SELECT name FROM boats"),
        ("", "SELECT name FROM boats"),
        ("I do not know.", "SELECT name FROM boats"),
        ("SELECT name FROM boats; SELECT 1", "SELECT name FROM boats"),
        ("SELECT '\ud800'", "SELECT name FROM boats"),
        ("SELECT name FROM boats WHERE name = ?", "SELECT name FROM boats"),
        ("SELECT name FROM boats WHERE name = '\0'", "SELECT name FROM boats"),
        pytest.param(f"SELECT name FROM boats WHERE seats = {'9' * 5000}", "SELECT name FROM boats", id="digits"),
    ],
)
def test_queries_with_other_results_and_failures(answer: str, reference: str) -> None:
    assert equivalent(answer, reference, BOATS) is False


@pytest.mark.parametrize(
    "answer",
    [
        "ATTACH DATABASE '{path}' AS x",
        "CREATE TABLE more (a)",
        "DELETE FROM boats",
        "INSERT INTO boats VALUES ('a', 'b', 1)",
        "PRAGMA writable_schema = 1",
        "VACUUM INTO '{path}'",
        "SELECT load_extension('x')",
        "SELECT hex(zeroblob(500000000))",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT COUNT(*) FROM boats a, boats b, boats c, boats d, boats e, boats f, boats g, boats h, boats i",
        "SELECT a.name FROM boats a, boats b, boats c, boats d",
    ],
)
def test_a_query_can_do_no_harm(answer: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("sql") / "made.db"
    answer = answer.format(path=path)
    assert equivalent(answer, "SELECT name FROM boats", BOATS) is False
    assert equivalent("SELECT name FROM boats", answer, BOATS) is None
    assert not path.exists()
    assert equivalent("SELECT name FROM boats", "SELECT name FROM boats", answer) is None
    assert not path.exists()


def test_answers_that_cannot_be_scored() -> None:
    for context, reference in (
        ("CREATE TABLE boats (order VARCHAR)", "SELECT order FROM boats"),
        (BOATS, "SELECT nothing FROM boats"),
        (BOATS, "SELECT name FROM boats WHERE seats > 5 AND seats < 2"),
        (BOATS, "SELECT COUNT(*) FROM boats WHERE seats > 5 AND seats < 2"),
    ):
        assert equivalent(reference, reference, context) is None
        assert score("execution", reference, reference, context=context) == (None,)
    assert score("execution", "SELECT name FROM boats", "SELECT x FROM boats", "SELECT name FROM boats") == (1.0,)
    assert score("execution", "SELECT name FROM boats", "SELECT seats FROM boats") == (0.0,)


def test_texts_in_double_quotes_are_texts_in_every_build_of_sqlite() -> None:
    written = 'SELECT "Name" FROM boats WHERE colour = "dark "" red" AND name <> \'a "b" c\''
    wanted = 'SELECT "Name" FROM boats WHERE colour = \'dark " red\' AND name <> \'a "b" c\''
    assert sql._single_quoted(written, {"name", "colour"}) == wanted
    assert equivalent(written, wanted, BOATS) is True


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT 1;", "SELECT 1"),
        ("Sure:\n```sql\nSELECT 1;\n```\nDone.", "SELECT 1"),
        ("```\nSELECT 1", "SELECT 1"),
        ("```SELECT 1```", "SELECT 1"),
        ("", ""),
    ],
)
def test_the_query_in_an_answer(text: str, query: str) -> None:
    assert query_in(text) == query


def test_rouge_takes_the_best_reference_and_sentences_as_lines() -> None:
    assert score("rouge", "the boats are red", "nothing in common", "the boat is red") == pytest.approx((0.75, 0.75))
    one, lsum = score("rouge", "Ann has a boat. Bob rows.", "Bob rows. Ann has a boat.")
    assert one == 1.0
    assert lsum == 1.0, "sentences may change places"
    assert score("rouge", "", "a boat") == (0.0, 0.0)


def test_rouge_without_its_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics._rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(CapabilityError, match=r"install it with pip install 'anabranch\[tasks\]', or choose another"):
        check_metrics(["exact_match", "rouge"])
    check_metrics(["exact_match", "execution"])


def test_differences_are_taken_row_by_row() -> None:
    half = 1.959964 * 0.2 / 3**0.5
    gap = difference([0.9, 0.5, None, 0.5], [0.5, 0.5, 1.0, 0.3])
    assert (gap["mean"], gap["rows"]) == (0.2, 3)
    assert (gap["low"], gap["high"]) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-6)
    assert difference([None], [1.0]) == {"mean": None, "low": None, "high": None, "rows": 0}
    assert difference([1.0], [0.0])["low"] == 0.0, "one row says nothing of others"


def test_spread_of_shares_and_of_means() -> None:
    # Wilson's interval of 8 in 10: 0.490 to 0.943
    interval = spread([1.0] * 8 + [0.0] * 2)
    assert (interval["mean"], interval["rows"]) == (0.8, 10)
    assert (interval["low"], interval["high"]) == pytest.approx((0.490, 0.943), abs=1e-3)
    assert spread([1.0] * 5)["low"] < 0.6
    interval = spread([0.2, 0.4, None, 0.6])
    half = 1.959964 * 0.2 / 3**0.5
    assert interval == {"mean": 0.4, "low": pytest.approx(0.4 - half), "high": pytest.approx(0.4 + half), "rows": 3}
    assert spread([0.5]) == {"mean": 0.5, "low": 0.0, "high": 1.0, "rows": 1}
    assert spread([None]) == {"mean": None, "low": None, "high": None, "rows": 0}
