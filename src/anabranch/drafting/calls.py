"""Forward passes that a drafter runs itself: the record in which it reports them, and how rows count them."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Call", "Kind"]

# target   the target's own pass over the draft tree
# copy     all layers of a quantised copy of the target
# partial  some of the target's layers (trailing streams), or a layer like them (EAGLE, Hydra++)
# draft    a draft model
# heads    draft heads, or the vocabulary head alone over the states of streams that rode in the target's pass
# inner    a draft of an inner drafter (staged), which reads no weights
Kind: TypeAlias = Literal["target", "copy", "partial", "draft", "heads", "inner"]


class Call(NamedTuple):
    """One pass, as a row counts it: each of the rows that share a pass counts it as one and its bytes in equal parts.

    layers  decoder layers that it runs, out of the ``of`` layers of the target or, if it is one, the draft model
    read    bytes of weights that it reads, that of a vocabulary head that scores tokens included, the KV cache not
    """

    kind: Kind
    layers: int = 0
    of: int = 0
    read: float = 0.0

    @property
    def name(self) -> tuple[Kind, int, int]:
        """Key of the count: kind, layers run, layers in total."""
        return self.kind, self.layers, self.of

    def shared(self, rows: int) -> Call:
        """Each row's share of a pass over this many rows."""
        return self if rows == 1 else self._replace(read=self.read / rows)
