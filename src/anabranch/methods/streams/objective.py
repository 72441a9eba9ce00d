"""What the streams learn: ``sum_j alpha_j * CE(stream j)`` on completion tokens (ACL eq. 6 with alpha_0 = 0).

The target is frozen: its forward pass runs once per batch, without gradients. The streams then trail it over all
completion positions at once, segment by segment (ACL appendix I): no streams on prompt tokens, and peak memory grows
with ``segment``, not with gamma times the length of the text.

B rows, T text length, P positions of a segment, S streams, D width, M scored (position, stream) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, VocabularyLoss
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.replay import Accuracy, Replay, evaluation, hits_by_predictor, walk
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions, RowVocabulary, StreamDraft
from anabranch.methods.streams.prune import early_exit_logits
from anabranch.methods.streams.rider import trail
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, Inputs
