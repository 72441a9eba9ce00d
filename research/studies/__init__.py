"""The studies of the papers; ``research/study.py`` runs them."""

from __future__ import annotations

from studies import (
    adapters,
    batches,
    branching,
    cosine,
    gradients,
    learning,
    leviathan,
    long_context,
    lossless,
    overhead,
    peeking,
    pruning,
    quantization,
    riding,
    roofline,
    sampling,
    staged,
    trace,
)
from studies.base import Study

__all__ = ["STUDIES"]

# in the order of the papers' figures; those of the other papers follow
STUDIES: tuple[Study, ...] = (
    peeking.STUDY,
    cosine.STUDY,
    gradients.STUDY,
    lossless.STUDY,
    learning.STUDY,
    learning.LARGER,
    learning.COMPARED,
    learning.ADDED,
    learning.STORED,
    learning.PARTS,
    overhead.STUDY,
    branching.STUDY,
    adapters.LAYERS,
    adapters.ROTATION,
    sampling.STUDY,
    pruning.STUDY,
    riding.STUDY,
    riding.LARGER,
    batches.STUDY,
    quantization.STUDY,
    long_context.STUDY,
    leviathan.STUDY,
    leviathan.T5,
    leviathan.TRANSLATION,
    trace.STUDY,
    roofline.STUDY,
    staged.STUDY,
)
