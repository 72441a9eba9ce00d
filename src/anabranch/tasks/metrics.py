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

    columns  its scores: key in result files -> title in tables
    score    (answer, references, fields of the row) -> a score per column; None if the row cannot be scored
    needs    required fields of a row besides those of the prompt and the completion
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
    results = [equivalent(answer, reference, str(row["context"])) for reference in references]
    known = [same for same in results if same is not None]
    return (float(any(known)) if known else None,)


def rouge(answer: str, references: Sequence[str], row: Mapping[str, Any]) -> tuple[float, float]:
    """ROUGE-1 and ROUGE-Lsum (F1, stemmed), each with the best reference; every sentence is a line for ROUGE-Lsum."""
    scores = _rouge_scorer().score_multi([*map(_lines, references)], _lines(answer))
    return float(scores["rouge1"].fmeasure), float(scores["rougeLsum"].fmeasure)


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
    """The mean of ``scores`` - ``others`` over rows with both, and its 95 % interval by the normal approximation."""
    pairs = [a - b for a, b in zip(scores, others, strict=True) if a is not None and b is not None]
    if not pairs:
        return _interval(None, 0.0, 0.0, 0)
    mean = statistics.fmean(pairs)
    half = _half_width(pairs)
    return _interval(mean, mean - half, mean + half, len(pairs))


def spread(scores: Sequence[float | None]) -> dict[str, Any]:
    """Mean and 95 % interval over rows: Wilson's for scores that are all 0 or 1, else the normal approximation.

    ``rows`` counts the scores that are not None; without any, the mean is None.
    """
    known = [score for score in scores if score is not None]
    count = len(known)
    if not count:
        return _interval(None, 0.0, 0.0, 0)
    mean = middle = statistics.fmean(known)
    if set(known) <= {0.0, 1.0}:
        middle = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
        half = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    else:
        half = _half_width(known)
    return _interval(mean, max(0.0, middle - half), min(1.0, middle + half), count)


def _half_width(values: Sequence[float]) -> float:
    return Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 1.0


def _interval(mean: float | None, low: float, high: float, rows: int) -> dict[str, Any]:
    ends = {"mean": mean, "low": low, "high": high}
    return {name: None if mean is None else round(value or 0.0, 6) for name, value in ends.items()} | {"rows": rows}
