"""The sequences that decode together: requests join, their prompts are read in chunks, and finished rows leave.

``engine`` decodes them; ``scheduler`` decides when each joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anabranch.drafting.combined import ChoiceDrafter
from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.expected import Expected
from anabranch.errors import CapabilityError, InputError, OutOfMemoryError
from anabranch.methods.none import NoDrafter
from anabranch.model.cache import room_for, shared_length
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.inputs import Inputs
from anabranch.model.passes import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.verify import Rule

__all__ = ["CHUNK", "Batch", "FinishReason", "Member", "Request", "check_tokens", "takes_loras"]

FinishReason = Literal["stop", "length"]
CHUNK = 512  # tokens of a prompt that one pass reads


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    stop_ids   end it, and are emitted
    rule       how drafts are verified
    log_probs  whether steps carry the target's raw log probability of each token
    top_log_probs  of how many of the most probable tokens steps carry the raw log probabilities
    on_prompt  called as on_prompt(done, total) after each chunk of the prompt; what it raises cancels the request
    emitted    how many of the last prompt tokens an earlier request emitted, which this one continues; a target with
               rows of its own (``Decoder.rider``) has them at these tokens too
    lora       the name of the LoRA that its row decodes with; None: the target as it is
    prediction  tokens that the new text is expected to resemble, for drafts
    source      the input of an encoder-decoder model; the prompt is then what the decoder begins with
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    rule: Rule = "match"
    log_probs: bool = False
    on_prompt: Callable[[int, int], None] | None = field(default=None, compare=False)
    emitted: int = 0
    lora: str | None = None
    top_log_probs: int = 0
    prediction: Sequence[int] = ()
    source: Source | None = None


class Member:
    """A row of the batch with its request and drafter.

    limit  the length at which its text ends
    begin  where its new text begins
    expected  drafts from the text that is expected of it; None: none is
    greedy  its tokens follow from the most probable ones, which its constraint may correct (``Scores``)
    rides  whether the pass of its first step may read the end of its prompt
    ready  whether it takes part in steps
    encoded  whether the encoder has read its source, if it has one
    """

    def __init__(self, request: Request, drafter: Drafter, limit: int, *, rides: bool = False) -> None:
        self.request, self.drafter, self.limit, self.rides = request, drafter, limit, rides
        self.ready, self.encoded = False, request.source is None
        prompt = [int(t) for t in request.prompt_ids]
        sampling = request.sampling.unconstrained
        self.row = Row(prompt, len(prompt), sampling, request.rule, source=request.source, lora=request.lora)
        self.begin = len(prompt) - request.emitted
        self.expected = Expected(request.prediction) if request.prediction else None
        self.read = 0  # prompt tokens in the cache
        self.finish: FinishReason | None = None
        self.constraint = request.sampling.constraint
        self.greedy = (
            sampling.greedy and not sampling.needs_history and not (request.log_probs or request.top_log_probs)
        )

    @property
    def guided(self) -> bool:
        """Return whether something is known of its text that makes drafts (``guided``)."""
        return self.constraint is not None or self.expected is not None

    @property
    def unread(self) -> int:
        """Prompt tokens that are not in the cache yet, but for the last one, which is the first root."""
        return max(0, self.row.prompt_length - 1 - self.read)


def check_tokens(tokens: Sequence[int], vocabulary: int, what: str) -> None:
    """Raise InputError for a token id that the vocabulary does not have."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InputError(f"{what} has the token id {wrong}, but the vocabulary ends at {vocabulary - 1}")


def takes_loras(drafter: Drafter) -> bool:
    """Return whether rows with a LoRA of their own may use a drafter: one that adds no rows to the target's pass."""
    return drafter.needs.rider is None or not drafter.needs.rider.rides


class Batch:
    """Up to ``rows`` sequences of at most ``longest`` tokens each, prompts included, in one KV cache.

    drafter   that of rows that name none; None: plain decoding
    capacity  the tokens that the cache has room for at first
    longest   None: ``capacity``. The cache grows up to that (``make_room``)
    margin    cache positions behind a row's tokens that the drafters of rows will need, if they are known
    on_leave  called with each row and its cache slot before it leaves, while its keys and values are still there
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None = None,
        *,
        rows: int = 1,
        capacity: int = 2048,
        longest: int | None = None,
        margin: int = 1,
        on_leave: Callable[[Member, int], None] | None = None,
    ) -> None:
        if rows < 1 or capacity < 2:
            raise InputError(f"an engine needs at least 1 row and 2 tokens, got {rows} and {capacity}")
        self.target, self.drafter = target, drafter or NoDrafter()
        self.longest = min(capacity if longest is None else longest, target.config.max_positions)
        positions = min(capacity, self.longest) + self._room(self.drafter, margin)
        self.cache = target.new_cache(rows, positions if longest is None else room_for(positions))
        self._on_leave = on_leave
        self._members: list[Member] = []  # of the cache's slots, in order; those whose prompts are being read are last
        self._ready = 0  # rows that take part in steps
        self.tokens_read = 0  # of prompts, by passes of their own
        self.at_fault: int | None = None  # the row whose own functions or numbers ended the last read or step

    @property
    def rows(self) -> int:
        """Rows that the cache has room for."""
        return self.cache.rows

    @property
    def active(self) -> int:
        """Rows in use."""
        return len(self._members)

    @property
    def reading(self) -> list[int]:
        """The ids of the rows whose prompts are being read."""
        return [member.row.id for member in self._members[self._ready :]]

    @property
    def unread(self) -> int:
        """Prompt tokens that the pass of the next step reads."""
        return sum(member.unread for member in self._members[: self._ready])

    def left(self, key: int) -> int:
        """Return how many tokens of a row's source and prompt are to be read."""
        member = self._members[self._slot(key)]
        return member.unread + (0 if member.encoded else self.target.source_size(member.request.source))

    def add(self, request: Request, drafter: Drafter | None = None) -> int:
        """Take a row and read its prompt; returns the row's id. Raises for what cannot be served."""
        self.check(request, drafter)
        key = self.join(request, drafter)
        while self.read(key):
            pass
        return key

    def join(self, request: Request, drafter: Drafter | None = None, *, known: int = 0, rides: bool = False) -> int:
        """Take a row whose prompt is still to be read, of a request that was checked; returns its id.

        known  how many tokens of the prompt are in the cache slot already (``cache.fork``)
        rides  whether the pass of the first step may read the end of the prompt, which saves a pass. Not where rows
               ride in the pass, the drafter sees prompts, or there is an ``on_prompt``

        Raises InputError where all rows are in use or this one cannot share their pass (``fits``).
        """
        drafter = drafter or self.drafter
        if not self.fits(drafter):
            raise InputError("the request cannot share a pass with the rows in use; wait for them to finish")
        assert not known or self.has_room(self.cache.rows, len(request.prompt_ids) + 1, drafter), "known would be lost"
        self.reserve(self.cache.rows, len(request.prompt_ids) + 1, drafter)
        if self.rider_of(drafter) is not None or drafter.needs.prompt or request.on_prompt is not None:
            rides = False
        limit = min(len(request.prompt_ids) + request.max_new_tokens, self.longest)
        member = Member(request, drafter, limit, rides=rides)
        slot = self.cache.add_row(self.rotated_for(request))
        assert known < member.row.prompt_length
        self.cache.lengths[slot] = member.read = known
        self._members.append(member)
        drafter.join(member.row)
        if member.encoded and not member.unread:
            self._begin(slot)
        return member.row.id

    def read(self, key: int, tokens: int = CHUNK) -> int:
        """Read at most ``tokens`` of a row's prompt in a pass of its own, or leave its end to that of its first step.

        A source comes first, as a whole. Returns how many there were; 0 once the row takes part in steps. Where that
        fails, the row leaves.
        """
        slot = self._slot(key)
        member = self._members[slot]
        if member.ready:
            return 0
        if not member.encoded:
            return self._encode(slot)
        if member.rides and member.unread <= tokens:
            self._begin(slot)
            return member.unread
        start, total = member.read, member.row.prompt_length - 1
        self.at_fault = None
        try:
            with self.target.inference():
                result = self._read(slot, total, tokens)
                member.read = self.cache.lengths[slot]
                member.drafter.read(member.row, result, start)
                member.row.calls.clear()  # passes over prompts are not counted, neither the target's nor drafters'
                if member.request.on_prompt is not None:
                    self.at_fault = member.row.id
                    member.request.on_prompt(member.read, total)
                    self.at_fault = None
        except BaseException:
            self._drop(slot, failed=True)
            raise
        if not member.unread:
            self._begin(slot)
        return member.read - start

    def _encode(self, slot: int) -> int:
        """Run the encoder over a row's source; returns the positions that it read. Where that fails, the row leaves."""
        member = self._members[slot]
        assert member.request.source is not None
        self.at_fault = None
        try:
            with self.target.inference():
                self.cache.memories[slot] = self.target.encode(member.request.source)
        except BaseException:
            self._drop(slot, failed=True)
            raise
        member.encoded = True
        if not member.unread:
            self._begin(slot)
        return self.target.source_size(member.request.source)

    def _slot(self, key: int) -> int:
        return next(slot for slot, member in enumerate(self._members) if member.row.id == key)

    def _begin(self, slot: int) -> None:
        """Let a row take part in steps."""
        self._members[slot].ready = True
        self._swap(slot, self._ready)
        self._ready += 1

    def _postpone(self, slot: int) -> None:
        """Let a row that takes part in steps read the rest of its prompt by itself first."""
        member = self._members[slot]
        member.ready = member.rides = False
        self._ready -= 1
        self._swap(slot, self._ready)

    def _swap(self, one: int, other: int) -> None:
        self.cache.swap(one, other)
        self._members[one], self._members[other] = self._members[other], self._members[one]

    def _read(self, slot: int, end: int, chunk: int) -> PassResult:
        """A pass over the next ``chunk`` tokens of a row's text before ``end``, whose keys and values are kept."""
        member, start, rider = self._members[slot], self.cache.lengths[slot], None
        bare, needs = self._bare(member), member.drafter.needs
        if start >= bare:  # as many nodes as the cache has room for
            rider, chunk = self.target.rider, min(chunk, member.drafter.margin)
        else:
            end = min(end, bare)
        tokens = member.row.tokens[start : min(start + chunk, end)]
        result: PassResult = self.target(
            *(Inputs.of_prompt(tokens), self.cache),
            slots=slice(slot, slot + 1),
            taps=needs.layers if needs.prompt else (),
            rider=rider,
            need="hidden" if needs.prompt else "keys",
            loras=(member.request.lora,),
        )
        self.cache.commit([range(len(tokens))])
        self.tokens_read += len(tokens)
        return result

    def _read_again(self, slot: int) -> None:
        """Read a text that has outgrown the original length of its rotations once more, as a prompt (``Rope``)."""
        text = self._members[slot].row.tokens
        self.cache.prompts[slot] = self.target.rope().prompt(self.cache.prompts[slot], len(text))
        self.cache.rewind(slot, 0)
        while self.cache.lengths[slot] < len(text) - 1:
            self._read(slot, len(text) - 1, CHUNK)

    def rotated_for(self, request: Request) -> int:
        """The length for which the prompt of a request is rotated; what an earlier request emitted is none of it."""
        length = len(request.prompt_ids)
        return self.target.rope().prompt(length - request.emitted, length)

    @staticmethod
    def refuse(target: Decoder, request: Request, drafter: Drafter) -> None:
        """Raise InputError or CapabilityError if ``request`` cannot be served at all."""
        prompt = request.prompt_ids
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        check_tokens(prompt, target.config.vocab_size, "the prompt")
        if target.encoder is not None:
            target.encoder.check(request.source)
        elif request.source is not None:
            raise InputError("this model has no encoder, so a request has no source; give a prompt alone")
        longest = target.config.max_positions
        if len(prompt) >= longest:
            raise InputError(f"the prompt has {len(prompt)} tokens, but the model's limit is {longest}; shorten it")
        own, rider = target.rider, drafter.needs.rider
        if own is not None and rider is not None and rider.alters is not own.alters:
            raise CapabilityError(
                f"the drafter {drafter.name!r} adds rows to the pass, but this target's passes have the streams of its "
                "own adapter already; use placement=trail, or drafter='streams'"
            )
        if request.lora is not None:
            target.loras.check(request.lora)
            if own is not None:
                raise CapabilityError(
                    "rows of this target attend to streams of their own adapter, which was trained without a LoRA per "
                    "request; leave lora out, or load the original model"
                )
            each = drafter.drafters if isinstance(drafter, ChoiceDrafter) else (drafter,)
            if target.rider is not None or not any(map(takes_loras, each)):
                raise CapabilityError(
                    f"rows of the drafter {drafter.name!r} ride in the target's pass, which takes no LoRA per request; "
                    "use another drafter or placement, or merge the LoRA (lora=)"
                )
        if request.prediction:
            check_tokens(request.prediction, target.config.vocab_size, "the prediction")
            if request.rule != "match":
                raise CapabilityError(
                    f"a prediction is no sample, so rule={request.rule!r} would not be exact; use rule='match', or "
                    "leave the prediction out"
                )
            if isinstance(drafter, NoDrafter):
                raise CapabilityError(
                    "drafter='none' drafts nothing, not even a prediction; use another drafter, such as "
                    "'prompt_lookup', or leave the prediction out"
                )
        drafter.check(request.sampling.unconstrained, request.rule, request.source)

    def _bare(self, member: Member) -> int:
        """Return how many of a row's first tokens are read without rows of the target's own."""
        return member.row.prompt_length - 1 - (0 if self.target.rider is None else member.request.emitted)

    def sharable(self, slot: int) -> int:
        """Return how many of a row's first cached tokens another row may copy, if its prompt begins with them.

        If the target has rows of its own, the keys and values of completion tokens depend on these, and a prompt's do
        not.
        """
        if self.cache.states is not None or self.target.encoder is not None:
            return 0  # the state is that of the whole text; keys and values depend on the source
        length = self.cache.lengths[slot]
        return length if self.target.rider is None else min(length, self._bare(self._members[slot]))

    def rider_of(self, drafter: Drafter) -> Rider | None:
        """The rider of a pass over a drafter's rows: its own, which includes the target's, or else the target's."""
        return drafter.needs.rider or self.target.rider

    def _room(self, drafter: Drafter, margin: int = 1) -> int:
        """Cache positions that a step needs behind a row's tokens, for at least ``margin`` nodes."""
        nodes, rider = max(margin, drafter.margin), self.rider_of(drafter)
        return nodes if rider is None else rider.positions(nodes)

    def check(self, request: Request, drafter: Drafter | None = None) -> None:
        """Raise InputError or CapabilityError if ``request`` cannot be served here."""
        self.refuse(self.target, request, drafter or self.drafter)
        if len(request.prompt_ids) >= self.longest:
            raise InputError(
                f"the prompt has {len(request.prompt_ids)} tokens, but the cache holds {self.longest}; shorten it"
            )

    def longest_shared(self, tokens: Sequence[int], lora: str | None = None, rotations: int = 0) -> tuple[int, int]:
        """The length of the longest beginning of ``tokens`` in the cache of a row with this LoRA, and its slot.

        rotations  the key of their rotations (``Rope.key``)
        """
        best, slot, rope = 0, 0, self.target.rope()
        for place, member in enumerate(self._members):
            if member.request.lora != lora or rope.key(self.cache.prompts[place]) != rotations:
                continue
            count = shared_length(member.row.tokens[: self.sharable(place)], tokens)
            if count > best:
                best, slot = count, place
        return best, slot

    def fits(self, drafter: Drafter | None = None) -> bool:
        """Return whether rows of a drafter can share a pass with those in use: a pass has at most one rider."""
        rider = self.rider_of(drafter or self.drafter)
        return not self._members or self.rider_of(self._members[0].drafter) is rider

    def reserve(self, rows: int, tokens: int, drafter: Drafter | None = None) -> None:
        """Make room for so many rows of so many tokens now; rows in use keep what they have.

        Raises OutOfMemoryError.
        """
        if not self.has_room(rows, tokens, drafter):
            positions = max(room_for(self._positions(tokens, drafter)), self.cache.capacity)
            self.cache = self.cache.resized(max(rows, self.cache.rows), positions)

    def has_room(self, rows: int, tokens: int, drafter: Drafter | None = None) -> bool:
        """Return whether the cache has room for so many rows of so many tokens."""
        return rows <= self.cache.rows and self._positions(tokens, drafter) <= self.cache.capacity

    def _positions(self, tokens: int, drafter: Drafter | None) -> int:
        """The positions of a cache for rows of so many tokens."""
        return min(tokens, self.longest) + self._room(drafter or self.drafter)

    def make_room(self) -> None:
        """Let the cache grow to what the next step may write, with fewer free rows where memory does not suffice.

        Raises OutOfMemoryError; the rows in use are as before then.
        """
        if not self._members:
            return
        room = max(self._room(member.drafter) for member in self._members)
        positions = max(len(member.row.tokens) for member in self._members) + room
        if positions <= self.cache.capacity:
            return
        try:
            self.cache = self.cache.resized(self.cache.rows, room_for(positions))
        except OutOfMemoryError:
            if self.active == self.cache.rows:
                raise
            self.cache = self.cache.resized(self.active, room_for(positions))

    def withdraw(self) -> int:
        """Let the newest row go before it is done; returns its id."""
        key = max(member.row.id for member in self._members)
        self._drop(self._slot(key), failed=True)
        return key

    def remove(self, key: int) -> None:
        """Cancel a row; one that has left already is ignored."""
        slot = next((i for i, member in enumerate(self._members) if member.row.id == key), None)
        if slot is not None:
            self._drop(slot)

    def clear(self) -> None:
        """Cancel all rows, without ``on_leave``: after an error their cache is not to be trusted."""
        while self._members:
            self._drop(len(self._members) - 1, failed=True)

    def _drop(self, slot: int, *, failed: bool = False) -> None:
        member = self._members[slot]
        if self._on_leave is not None and not failed:
            self._on_leave(member, slot)
        if slot < self._ready:  # the last ready row takes the place, and one that is being read that row's place
            self._ready -= 1
            if slot < self._ready:
                self._swap(slot, self._ready)
                slot = self._ready
        self.cache.remove_row(slot)
        self._members[slot] = self._members[-1]
        self._members.pop()
        member.drafter.leave(member.row)
