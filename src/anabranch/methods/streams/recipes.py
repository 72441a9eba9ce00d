"""Training of stream adapters: shape, weights of the loss, recipes, and the values that users can override.

default-adapter  the adapter shipped for the default model: twelve layers, frozen MLP with deltas, conditioned on the
                 root and on the path
small            a first adapter in minutes, to check that everything works: four layers, scores conditioned on the
                 parent token
paper-lossless   ACL section 2, lossless mode with gamma = 4, N_s = 4: stream adapters of rank 8 in place of the MLP, no
                 conditioning, no distillation, equal weights for all streams
shared           the target and its streams tuned together on the data, starting from the shipped adapter; main rows do
                 not attend to streams. The target is tuned as ``train lora`` tunes it, on its own loss: in a joint loss
                 at the paper's weights, the part of the streams outweighs the main rows' after a few dozen steps, and
                 the terms of the target's layers follow it
paper-shared     ACL section 2, shared mode, gamma = 4, N_s = 4, alpha_0 = 1, alpha_j = 0.1: (gamma + 16) h parameters
                 beside the terms of the target's layers, which the streams run through
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from anabranch.errors import InputError
from anabranch.learning.recipe import (
    COMMON,
    MOST_RANK,
    MOST_WIDTH,
    RECOMPUTE,
    LossWeights,
    Option,
    Recipe,
    Shape,
    Training,
    TrainOptions,
)
from anabranch.support.jsonfiles import is_number, shown

__all__ = ["MOST_STREAMS", "TRAINING", "LossOptions", "StreamConfig"]

# Maximum number of streams, which reach as many positions past the text; rotary tables cover four times as many.
MOST_STREAMS = 256


@dataclass(frozen=True)
class StreamConfig(Shape):
    """The configuration of a stream adapter (ACL section 2). The defaults are the paper's lossless mode.

    num_streams        gamma: stream j of position t predicts token t + 1 + j
    num_stream_layers  N_s: the streams run through the top N_s layers
    stream_mlp         "adapter" replaces the MLP for stream rows (the paper); "mlp+adapter" adds to the frozen MLP
    adapter_rank       R_s, rank of the stream adapter; 0: none, with "mlp+adapter" only
    attention_rank     rank of the deltas on q, k, v and o of stream rows; 0: none (the paper)
    mlp_rank           rank of the deltas on the frozen MLP's products for stream rows, with "mlp+adapter" only; 0: none
    init_rank          eta of f in ``S = f(M) + P`` (ACL eq. 4); 0: identity (the paper)
    position           "embedding": stream embeddings P_j; "rotation": value rotation instead (ACL eq. 8)
    rotation_step      epsilon of eq. 8, radians per stream; 0 in a recipe: the paper's largest, pi / 2N, where N is the
                       target's context length plus the number of streams
    pruning_rank       rank of the early-exit adapter o (ACL section 2.3); 0: none
    context_top        stream rows attend only to this many context positions, those with the largest weights for the
                       main row (ACL appendix H.1, p = 64); 0: all
    conditioning       how a child's score depends on the tokens of its path: "none" (the paper); "parent": the bilinear
                       term (E[parent] U)(W head[c]); "path": a gated state along the path from the root
    conditioning_rank  width of this term
    root_width         width of the gated term that conditions trailing streams on the token emitted at their node, the
                       root of the next tree; 0: none (the paper, whose streams ride in the pass)
    mode               "lossless": the target is frozen; "shared": it is tuned together with the streams (ACL figure 2b)
    main_attends       what a main row attends to besides the main stream in the top layers, in shared mode: "own": the
                       streams of its own node (ACL eq. 3), which are then part of the model; "none" (v1 of the paper)
    lora_rank          rank of the terms that tune all linear layers of the target, for main rows and streams alike; in
                       training only: an adapter has 0, since the terms are merged into a target of its own
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {
        "num_streams": (1, MOST_STREAMS),
        "num_stream_layers": (1, 1 << 12),
        "adapter_rank": (0, MOST_WIDTH),
        "attention_rank": (0, MOST_WIDTH),
        "mlp_rank": (0, MOST_WIDTH),
        "init_rank": (0, MOST_WIDTH),
        "pruning_rank": (0, MOST_WIDTH),
        "context_top": (0, (1 << 31) - 1),
        "conditioning_rank": (0, MOST_WIDTH),
        "root_width": (0, MOST_WIDTH),
        "lora_rank": (0, MOST_RANK),
    }
    num_streams: int = 4
    num_stream_layers: int = 4
    stream_mlp: Literal["adapter", "mlp+adapter"] = "adapter"
    adapter_rank: int = 8
    attention_rank: int = 0
    mlp_rank: int = 0
    init_rank: int = 0
    position: Literal["embedding", "rotation"] = "embedding"
    rotation_step: float = 0.0
    pruning_rank: int = 8
    context_top: int = 0
    conditioning: Literal["none", "parent", "path"] = "none"
    conditioning_rank: int = 0
    root_width: int = 0
    mode: Literal["lossless", "shared"] = "lossless"
    main_attends: Literal["none", "own"] = "none"
    lora_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rotation_step, -math.pi, math.pi):
            raise InputError(f"rotation_step must be an angle from -pi to pi, got {shown(self.rotation_step)}")
        if not self.adapter_rank and self.stream_mlp == "adapter":
            raise InputError("adapter_rank 0 leaves stream rows without an MLP; use stream_mlp 'mlp+adapter'")
        if self.mlp_rank and self.stream_mlp == "adapter":
            raise InputError(
                f"mlp_rank is {self.mlp_rank}, but stream_mlp 'adapter' leaves stream rows without the MLP; use "
                "'mlp+adapter'"
            )
        if (self.conditioning == "none") != (self.conditioning_rank == 0):
            raise InputError("conditioning and conditioning_rank go together: give both, or 'none' and 0")
        if self.mode == "lossless" and (self.main_attends != "none" or self.lora_rank):
            raise InputError(
                "main_attends 'own' and lora_rank change the target, and mode 'lossless' keeps it as it is; use mode "
                "'shared'"
            )
        if self.main_attends == "own" and self.root_width:
            raise InputError(
                f"root_width is {self.root_width}, but streams that main rows attend to are computed before the next "
                "token is known; use root_width 0, or main_attends 'none'"
            )


@dataclass(frozen=True)
class LossOptions(LossWeights):
    """Weights of the loss.

    main            alpha_0: weight of the main rows' next token, in shared mode
    streams         alpha_1: weight of the streams beside it, in shared mode
    detach          the streams' loss trains streams only, and the terms of the target learn from the main rows alone,
                    as in plain LoRA training; in shared mode, if main rows do not attend to their streams
    decay           alpha_j = alpha_1 * decay ** (j - 1)
    soft            weight of the target's own distribution in the training target (distillation); the rest is its token
    unconditioned   weight of the loss of the streams without conditioning, if the adapter has conditioning
    pruning         weight of the early-exit adapter's next-token loss (ACL section 2.4)
    pruning_stride  compute that loss at every n-th position only
    rounding        in every other step, and in evaluations, round the weights that streams read to four bits, as the
                    native kernels do, in lossless mode
    """

    least = (("unconditioned", 0), ("pruning", 0), ("pruning_stride", 1), ("main", 0))
    decay: float = 0.8
    soft: float = 0.5
    unconditioned: float = 0.1
    pruning: float = 1.0
    pruning_stride: int = 8
    main: float = 0.0
    streams: float = 1.0
    detach: bool = False
    rounding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.streams > 0:
            raise InputError(f"streams must be greater than 0, got {self.streams}")


_DEFAULT = StreamConfig(
    num_streams=5,
    num_stream_layers=12,
    stream_mlp="mlp+adapter",
    adapter_rank=32,
    attention_rank=64,
    mlp_rank=64,
    conditioning="path",
    conditioning_rank=512,
    root_width=512,
)
_RECIPES = {
    "default-adapter": Recipe(
        _DEFAULT,
        LossOptions(),
        TrainOptions(epochs=3.0, lr=1.5e-3, batch_tokens=2048, keep_states="exact"),
        draft_vocabulary=8192,
    ),
    "small": Recipe(
        StreamConfig(
            stream_mlp="mlp+adapter", adapter_rank=16, attention_rank=16, conditioning="parent", conditioning_rank=64
        ),
        LossOptions(),
        TrainOptions(epochs=1.0),
        draft_vocabulary=4096,
        max_tokens=512,
    ),
    "paper-lossless": Recipe(
        StreamConfig(),
        LossOptions(decay=1.0, soft=0.0, unconditioned=0.0),
        TrainOptions(epochs=3.0, lr=5e-4, schedule="linear"),
    ),
    "shared": Recipe(
        replace(_DEFAULT, attention_rank=16, mlp_rank=13, mode="shared", lora_rank=16),
        LossOptions(main=1.0, detach=True),
        TrainOptions(epochs=3.0, lr=1e-3, batch_tokens=1024, schedule="linear"),
        draft_vocabulary=8192,
        init="shipped",
    ),
    "paper-shared": Recipe(
        StreamConfig(stream_mlp="mlp+adapter", adapter_rank=0, mode="shared", main_attends="own", lora_rank=32),
        LossOptions(main=1.0, streams=0.1, decay=1.0, soft=0.0, unconditioned=0.0),
        TrainOptions(epochs=3.0, lr=5e-4, schedule="linear"),
    ),
}
_OPTIONS: dict[str, Option] = {
    "num_streams": Option(int, "tokens drafted beyond the next one (gamma)", "config"),
    "stream_layers": Option(int, "top layers that streams run through (N_s)", "config", "num_stream_layers"),
    "stream_mlp": Option(str, "adapter (the paper) or mlp+adapter", "config"),
    "adapter_rank": Option(int, "rank of the stream adapters (R_s)", "config"),
    "attention_rank": Option(int, "rank of the deltas on q, k, v and o; 0: none", "config"),
    "mlp_rank": Option(int, "rank of the deltas on the MLP's products, with mlp+adapter; 0: none", "config"),
    "init_rank": Option(int, "rank of the term added to the main row where streams start (eta); 0: none", "config"),
    "position": Option(str, "what tells streams apart: embedding (the paper) or rotation (of values, eq. 8)", "config"),
    "rotation_step": Option(float, "angle of eq. 8 a stream, in radians; 0: the paper's largest, pi / 2N", "config"),
    "context_top": Option(int, "streams attend to this many positions, the main row's top ones; 0: all", "config"),
    "conditioning": Option(str, "what scores are conditioned on: none, parent or path", "config"),
    "conditioning_rank": Option(int, "width of the conditioning term", "config"),
    "root_width": Option(int, "width of the term that conditions streams on the root; 0: none", "config"),
    "pruning_rank": Option(int, "rank of the early-exit pruning layer; 0: none", "config"),
    "lora_rank": Option(int, "rank of the terms that tune the target, in shared mode", "config"),
    "main_attends": Option(
        str, "what main rows attend to besides, in shared mode: own (their streams) or none", "config"
    ),
    "main": Option(float, "weight of the target's own next token, in shared mode", "loss"),
    "streams": Option(float, "weight of the streams beside it, in shared mode", "loss"),
    "detach": Option(
        bool, "tune the target on its own next token alone, as train lora does, and streams on theirs", "loss"
    ),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "unconditioned": Option(float, "weight of the loss without conditioning", "loss"),
    "decay": Option(float, "weight of stream j is decay ** (j - 1)", "loss"),
    "rounding": Option(bool, "round weights in every other step as drafting on a CPU does, to four bits", "loss"),
    **COMMON,
    **RECOMPUTE,
}


def _adjusted(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values that follow from others."""
    if given.get("conditioning") == "none":
        given = {"conditioning_rank": 0, **given}
    if given.get("main_attends") == "own":
        # such streams are computed before the next token is known, and are part of the target
        given = {"root_width": 0, "detach": False, **given}
    if given.get("context_top"):
        given = {"root_width": 0, **given}  # such streams ride, so the next token is never known
    return given


TRAINING = Training("Speculative Streaming", _OPTIONS, _RECIPES, _adjusted)
