"""Metrics of quality: exact match, execution equivalence of SQL, and ROUGE. Scores lie between 0 and 1."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from anabranch.errors import CapabilityError
from anabranch.tasks.sql import equivalent

__all__ = ["METRICS", "Metric", "check_metrics", "difference", "exact_match", "execution", "rouge", "spread"]

Z = 1.959964  # of a two-sided 95 % interval
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Metric:
    """A metric of one answer.

    columns  what it reports: key in result files -> title in tables
    score    (answer, references, fields of the row) -> a score per column; None where the row cannot be scored
    needs    fields that a row must have besides those of the prompt and the completion
    check    raises CapabilityError if a library is missing
    """

    columns: Mapping[str, str]
    score: Callable[[str, Sequence[str], Mapping[str, Any]], tuple[float | None, ...]]
    needs: tuple[str, ...] = ()
    check: Callable[[], object] = lambda: None


def collapsed(text: str) -> str:
    """``text`` with every run of white space as one space, and none at the ends."""
    return " ".join(text.split())


def exact_match(answer: str, references: Sequence[str], row: Mapping[str, Any]) -> tuple[float]:
    """1 if the answer equals a reference after white space is collapsed; upper and lower case differ."""
    return (float(collapsed(answer) in map(collapsed, references)),)


def execution(answer: str, references: Sequence[str], row: Mapping[str, Any]) -> tuple[float | None]:
    """1 if the answer, as SQL, gives the results of a reference on small made-up tables (``tasks.sql``).

    The row's field ``context`` has the CREATE TABLE statements. None if no reference runs on them in SQLite.
    """
    found = [equivalent(answer, reference, str(row["context"])) for reference in references]
    known = [same for same in found if same is not None]
    return (float(any(known)) if known else None,)


def rouge(answer: str, references: Sequence[str], row: Mapping[str, Any]) -> tuple[float, float]:
    """ROUGE-1 and ROUGE-Lsum (F1, stemmed), each with the best reference; every sentence is a line for ROUGE-Lsum."""
    scorer = _rouge_scorer()
    found = scorer.score_multi([*map(_lines, references)], _lines(answer))
    return float(found["rouge1"].fmeasure), float(found["rougeLsum"].fmeasure)


def _lines(text: str) -> str:
    return "\n".join(SENTENCE_END.split(text.strip()))


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise CapabilityError(
            "ROUGE needs rouge-score; install it with pip install 'anabranch[tasks]', or choose another --metric"
        ) from error
    return RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)


METRICS: dict[str, Metric] = {
    "exact_match": Metric({"exact_match": "exact match"}, exact_match),
    "execution": Metric({"execution": "same results"}, execution, needs=("context",)),
    "rouge": Metric({"rouge1": "ROUGE-1", "rougeLsum": "ROUGE-Lsum"}, rouge, check=_rouge_scorer),
}


def check_metrics(names: Iterable[str]) -> None:
    """Raise CapabilityError for a metric whose library is missing, before anything is loaded."""
    for name in names:
        METRICS[name].check()


def difference(scores: Sequence[float | None], others: Sequence[float | None]) -> dict[str, Any]:
    """The mean of ``scores`` minus ``others`` over the rows that both have, and its 95 % interval by the normal
    approximation; without such rows, the mean is None.
    """
    found = [a - b for a, b in zip(scores, others, strict=True) if a is not None and b is not None]
    if not found:
        return {"mean": None, "low": None, "high": None, "rows": 0}
    mean = statistics.fmean(found)
    half = Z * statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 1.0
    return {
        "mean": round(mean, 6),
        "low": round(mean - half, 6),
        "high": round(mean + half, 6),
        "rows": len(found),
    }


def spread(scores: Sequence[float | None]) -> dict[str, Any]:
    """Mean and 95 % interval over rows: Wilson's for scores that are all 0 or 1, else the normal approximation.

    ``rows`` counts the scores that are not None; without any, the mean is None.
    """
    known = [score for score in scores if score is not None]
    count = len(known)
    if not count:
        return {"mean": None, "low": None, "high": None, "rows": 0}
    mean = statistics.fmean(known)
    if set(known) <= {0.0, 1.0}:
        middle = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
        half = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    else:
        middle = mean
        half = Z * statistics.stdev(known) / math.sqrt(count) if count > 1 else 1.0
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return {"mean": round(mean, 6), "low": round(low, 6), "high": round(high, 6), "rows": count}
