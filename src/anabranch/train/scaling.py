"""Growth of held-out acceptance with the amount of training data: L(n) = a - b n^-c, fitted to a run's own curve.

The curve is that of one run: acceptance on held-out examples after n answer tokens, none of which was seen before. Its
learning rate falls over the run, which raises the last points, so the predicted gain is rather too high than too low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Scaling", "fit_scaling"]

FEWEST = 4  # points for three parameters
FARTHEST = 10  # doublings of the data that are looked at
EXPONENTS = np.geomspace(0.02, 2.0, 100)


@dataclass(frozen=True)
class Scaling:
    """A fitted curve.

    a, b, c   of a - b n^-c, with n answer tokens; a is the acceptance length that no amount of data exceeds
    tokens    of the last point
    error     root mean square deviation of the points
    """

    a: float
    b: float
    c: float
    tokens: int
    error: float

    def at(self, tokens: float) -> float:
        """The predicted acceptance length after ``tokens`` answer tokens."""
        return float(self.a - self.b * tokens**-self.c)

    @property
    def doubling(self) -> float:
        """Predicted gain in mean acceptance length from twice the data."""
        return self.at(2 * self.tokens) - self.at(self.tokens)

    def pays_until(self, share: float) -> int | None:
        """The amount of data from which on doubling it brings less than ``share`` of the acceptance length.

        In doublings of ``tokens``; None if that is more than a thousand times as much.
        """
        for tokens in (self.tokens << doublings for doublings in range(FARTHEST)):
            if self.at(2 * tokens) - self.at(tokens) < share * self.at(tokens):
                return tokens
        return None


def fit_scaling(points: Sequence[tuple[float, float]]) -> Scaling | None:
    """Fit (answer tokens, acceptance length) by least squares; None for fewer than four points.

    For each exponent of a grid, a and b follow from a linear fit with b >= 0: a curve that does not rise is a constant.

    Exactly on the curve 3 - 10 n^-0.5, doubling 10,000 tokens gains 0.1 (1 - 2^-0.5) = 0.029:

    >>> round(fit_scaling([(n, 3 - 10 * n**-0.5) for n in (1e3, 3e3, 5e3, 1e4)]).doubling, 3)
    0.029
    """
    if len(points) < FEWEST:
        return None
    tokens, lengths = (np.array(values, float) for values in zip(*sorted(points), strict=True))
    best: Scaling | None = None
    for c in EXPONENTS:
        x = -((tokens / tokens[-1]) ** -c)
        spread = float(((x - x.mean()) ** 2).sum())
        slope = max(0.0, float(((x - x.mean()) * (lengths - lengths.mean())).sum()) / spread) if spread else 0.0
        a = float(lengths.mean() - slope * x.mean())
        error = float(np.sqrt(((a + slope * x - lengths) ** 2).mean()))
        if best is None or error < best.error:
            best = Scaling(a, slope * float(tokens[-1]) ** float(c), float(c), int(tokens[-1]), error)
    return best
