"""Early stopping: the best evaluation on held-out examples so far, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Best"]


@dataclass
class Best:
    """The best evaluation of a run that stops after ``patience`` evaluations without gain; 0: it never stops.

    step     the updates before that evaluation
    length   its predicted mean acceptance length ("tree")
    waited   evaluations since then
    seen     the updates before the last evaluation
    weights  the module's state then; empty without patience
    """

    patience: int
    step: int = 0
    length: float = 0.0
    waited: int = 0
    seen: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def exhausted(self) -> bool:
        """True if the run is to stop."""
        return 0 < self.patience <= self.waited

    def see(self, step: int, evaluation: Mapping[str, Any], module: nn.Module) -> None:
        """Count an evaluation, and keep the weights if it is the best."""
        if not self.patience:
            return
        self.seen = step
        if self.weights and evaluation["tree"] <= self.length:
            self.waited += 1
            return
        self.step, self.length, self.waited = step, float(evaluation["tree"]), 0
        self.weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    def put_back(self, module: nn.Module) -> None:
        """Give ``module`` the best weights, if there are any."""
        if self.weights:
            module.load_state_dict(self.weights)

    def record(self) -> dict[str, Any]:
        """Everything but the weights, for a checkpoint."""
        return {"step": self.step, "length": self.length, "waited": self.waited, "seen": self.seen}

    @staticmethod
    def restored(patience: int, record: Mapping[str, Any] | None, weights: dict[str, Tensor]) -> Best:
        """From a checkpoint; without weights there, or without patience, nothing was evaluated yet."""
        if not (patience and record and weights):
            return Best(patience)
        whole = {name: int(record[name]) for name in ("step", "waited", "seen")}
        return Best(patience, length=float(record["length"]), weights=weights, **whole)
