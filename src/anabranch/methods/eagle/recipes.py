"""Training of EAGLE's head: shape, weights of the loss, recipes, and the values that users can override.

eagle    three steps on the head's own features in training, with a small weight on their distance to the target's
eagle-1  the paper's loss over all tokens: one step on the target's features with noise, weights 1 and 0.1
small    two steps, one epoch, to see that everything works

``--taps`` fuses several layers' states as EAGLE-3 does.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import InputError
from anabranch.learning.recipe import COMMON, LossWeights, Option, Recipe, Shape, Training, TrainOptions
from anabranch.support.jsonfiles import shown

__all__ = ["TRAINING", "EagleConfig", "LossOptions"]

MOST_STEPS = 16


@dataclass(frozen=True)
class EagleConfig(Shape):
    """The shape of the head. The defaults are EAGLE's, with two norms.

    taps            layers before which the target's states are taken and fused, as in 2/15/27; empty: the state after
                    the last norm. With taps, both inputs have a norm, and so have states before the target's head
    embedding_norm  whether embeddings pass a norm, since they are much smaller than features in many models; always
                    with taps, never in published EAGLE heads
    input_norm      whether the layer begins with its norm; most published EAGLE heads have none there
    bias            whether ``fc`` has a bias; published EAGLE heads have one
    """

    taps: str = ""
    embedding_norm: bool = True
    input_norm: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.taps, str) or not all(part.isdigit() for part in self.taps.split("/") if self.taps):
            raise InputError(f"taps must be numbers of layers as in 2/15/27, or empty, got {shown(self.taps)}")
        if list(self.layers) != sorted(set(self.layers)):
            raise InputError(f"taps must be different layers in ascending order, got {self.taps}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The tapped layers; none: the state after the last norm."""
        return tuple(map(int, self.taps.split("/"))) if self.taps else ()


@dataclass(frozen=True)
class LossOptions(LossWeights):
    """Weights of the loss.

    feature  weight of the Smooth-L1 distance of the features; not used with taps, where the head's features are its own
    token    weight of the cross-entropy
    soft     share of the target's distribution in the cross-entropy; the rest is the completion's token
    unroll   steps of the head on its own features; 1: the target's features only
    decay    step k (from 0) has the weight decay ** k
    noise    half the range of uniform noise added to the target's features, times their mean absolute value
    """

    least = (("feature", 0), ("token", 0), ("noise", 0))
    feature: float = 0.2
    token: float = 1.0
    soft: float = 0.9
    unroll: int = 3
    decay: float = 0.9
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.feature + self.token:
            raise InputError("feature and token are both 0, so there is nothing to learn; give one of them a weight")
        if not 1 <= self.unroll <= MOST_STEPS:
            raise InputError(f"unroll must be from 1 to {MOST_STEPS}, got {self.unroll}")


_RECIPES = {
    "eagle": Recipe(
        EagleConfig(), LossOptions(), TrainOptions(epochs=3.0, lr=1e-3, weight_decay=0.01), draft_vocabulary=8192
    ),
    "eagle-1": Recipe(
        EagleConfig(embedding_norm=False, input_norm=False, bias=True),
        LossOptions(feature=1.0, token=0.1, soft=1.0, unroll=1, noise=0.1),
        TrainOptions(epochs=3.0, lr=1e-3, clip=0.5),
    ),
    "small": Recipe(
        EagleConfig(), LossOptions(unroll=2), TrainOptions(epochs=1.0, lr=2e-3), draft_vocabulary=4096, max_tokens=512
    ),
}
_OPTIONS: dict[str, Option] = {
    "taps": Option(str, "layers whose states are fused, as in 2/15/27; empty: the state after the last norm", "config"),
    "embedding_norm": Option(bool, "normalise the embeddings; always done with taps", "config"),
    "input_norm": Option(bool, "start the layer with a norm", "config"),
    "bias": Option(bool, "add a bias to the matrix before the layer", "config"),
    "unroll": Option(int, "steps in training: the first on the target's features, others on the head's own", "loss"),
    "feature": Option(float, "weight of the Smooth-L1 distance of the features", "loss"),
    "token": Option(float, "weight of the cross-entropy", "loss"),
    "soft": Option(float, "share of the target's distribution in the cross-entropy", "loss"),
    "decay": Option(float, "weight of step k (from 0) is decay ** k", "loss"),
    "noise": Option(float, "noise on the target's features, relative to their mean size", "loss"),
    **{name: option for name, option in COMMON.items() if name != "segment"},
}
TRAINING = Training("EAGLE", _OPTIONS, _RECIPES)
