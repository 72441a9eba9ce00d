"""The shape of Speculative Streaming: a frozen record that is stored with the adapter's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from anabranch.errors import InputError
from anabranch.learning.shape import MOST_RANK, MOST_WIDTH, Shape
from anabranch.support.jsonfiles import is_number, shown

__all__ = ["MOST_STREAMS", "StreamConfig"]

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

    @property
    def bare(self) -> bool:
        """Return whether embeddings alone tell streams apart."""
        # an adapter in the MLP's place reads the same states for all of them
        own = (self.attention_rank, self.mlp_rank, self.root_width, self.stream_mlp != "adapter" and self.adapter_rank)
        return not any(own) and self.position == "embedding"
