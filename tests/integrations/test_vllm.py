"""The proposer for vLLM, driven as vLLM 0.32 drives a custom class; scripts/check_vllm.py runs it in vLLM itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.integrations.vllm import Proposer
from toy_tables import write

WORDS, LONGEST = 19, 64


def config(drafter: str | None = "suffix", *, tokens: int = 4, longest: int = LONGEST, options: Any = None) -> Any:
    """The parts of a VllmConfig that the proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: WORDS, tokenizer="toy"),
        additional_config=options if drafter is None else {"anabranch_drafter": drafter},
    )


def following(text: Sequence[int]) -> int:
    """The target: a cycle through the words whose step depends on the second last one."""
    return (text[-1] + (3 if len(text) > 1 and text[-2] % 2 else 2)) % WORDS


@dataclass
class Engine:
    """The parts of vLLM's model runner around a proposer: a batch without holes, and greedy verification of chains."""

    proposer: Proposer
    target: Callable[[Sequence[int]], int] = following
    texts: list[list[int]] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # steps until each prompt is read
    drafts: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def add(self, name: int, prompt: list[int], chunks: int = 0) -> None:
        self.names.append(name)
        self.texts.append(list(prompt))
        self.waiting.append(chunks)
        self.drafts.append([])

    def remove(self, place: int) -> None:
        """A request ends; the last one takes its place."""
        for column in (self.names, self.texts, self.waiting, self.drafts):
            column[place] = column[-1]
            column.pop()

    def step(self) -> None:
        sampled = []
        for place, text in enumerate(self.texts):
            new: list[int] = []
            if self.waiting[place]:
                self.waiting[place] -= 1
            else:
                for token in (*self.drafts[place], None):
                    new.append(self.target([*text, *new]))
                    if new[-1] != token:
                        break
                self.drafted += len(self.drafts[place])
                self.accepted += len(new) - 1
            text += new
            sampled.append(new)
        ids = np.full((len(self.texts) + 2, LONGEST), -1, np.int32)  # vLLM's arrays have more rows than requests
        lengths = np.zeros(len(ids), np.int32)
        for place, text in enumerate(self.texts):
            ids[place, : len(text)] = text
            lengths[place] = len(text)
        self.drafts = self.proposer.propose(sampled, lengths, ids, slot_mappings=None)
        assert len(self.drafts) == len(self.texts)


def plain(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(following(text))
    return text


@pytest.mark.parametrize("drafter", ["auto", "suffix", "prompt_lookup:matches=2", "prompt_lookup:tokens=auto+suffix"])
def test_requests_come_move_and_go(drafter: str) -> None:
    engine = Engine(Proposer(config(drafter)))
    prompts = {name: [name, name + 5, (2 * name) % WORDS] for name in range(6)}
    ends = {name: 20 + 6 * name for name in prompts}
    drafts: dict[int, list[int]] = {}
    names = iter(prompts)
    for step in range(200):
        if step % 3 == 0 and (name := next(names, None)) is not None:
            engine.add(name, prompts[name], chunks=name % 3)
        engine.step()
        for place in range(len(engine.texts) - 1, -1, -1):
            if len(engine.texts[place]) >= ends[engine.names[place]]:
                drafts[engine.names[place]] = engine.texts[place][: ends[engine.names[place]]]
                engine.remove(place)
    assert drafts == {name: plain(prompts[name], ends[name]) for name in prompts}
    assert engine.accepted > engine.drafted / 4
    assert not engine.proposer._requests, "what vLLM no longer decodes is forgotten"


def test_a_request_keeps_its_row() -> None:
    proposer = Proposer(config("suffix"))
    engine = Engine(proposer)
    for name in range(3):
        engine.add(name, [name, name + 5, 7])
    engine.step()
    rows = {name: proposer._requests[place].row for place, name in enumerate(engine.names)}
    engine.remove(0)
    engine.step()
    assert [proposer._requests[place].row for place in (0, 1)] == [rows[2], rows[1]]
    assert rows[2].prompt_length == 3
    assert rows[2].tokens == engine.texts[0]


def test_equal_texts_side_by_side() -> None:
    engine = Engine(Proposer(config("suffix")))
    for name in range(3):
        engine.add(name, [1, 2, 3])
    for _ in range(12):
        engine.step()
        assert len(engine.proposer._requests) == 3
    assert all(text == plain([1, 2, 3], len(text)) for text in engine.texts)


@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_drafts_end_at_their_limits(tokens: int) -> None:
    engine = Engine(Proposer(config("prompt_lookup:tokens=10", tokens=tokens, longest=30)))
    engine.add(0, [1, 2, 3])
    longest = 0
    while len(engine.texts[0]) < 30:
        engine.step()
        longest = max(longest, len(engine.drafts[0]))
        assert len(engine.texts[0]) + len(engine.drafts[0]) + 1 <= 30 or not engine.drafts[0]
    assert longest == tokens


def test_the_path_with_the_most_expected_tokens() -> None:
    from anabranch.integrations.vllm import _best_path
    from anabranch.tree import DraftTree

    tree = DraftTree(
        np.array([9, 1, 2, 3, 4, 5]),
        np.array([-1, 0, 0, 2, 3, 4]),
        sources=("target", *["x"] * 5),
        log_probs=np.log([1.0, 0.5, 0.4, 0.3, 0.2, 0.1]).astype(np.float32),
    )
    assert _best_path(tree, 3).tokens.tolist() == [9, 2, 3, 4]
    assert _best_path(tree, 1).tokens.tolist() == [9, 1]


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    named: list[str] = []
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: named.append(name))
    text = plain([1, 2, 3], 400)
    for name in ("ngram", "rest"):
        write(name, [text], tmp_path / name)
        engine = Engine(Proposer(config(f"{name}:data={tmp_path / name}")))
        engine.add(0, [1, 2, 3])
        for _ in range(6):
            engine.step()
        assert engine.texts[0] == plain([1, 2, 3], len(engine.texts[0]))
        assert engine.accepted > 6
    assert named == ["toy", "toy"]
    write("rest", [[1, 2, 3]], tmp_path / "other", vocab_size=WORDS + 1)
    with pytest.raises(FileError, match="not this target's"):
        Proposer(config(f"rest:data={tmp_path / 'other'}"))


def test_a_subclass_names_its_drafter() -> None:
    class Mine(Proposer):
        drafter = "suffix:depth=2"

    for options in (None, {}, {"other": 1}):
        assert Mine(config(None, options=options))._drafter.name == "suffix"


@pytest.mark.parametrize(
    ("drafter", "error", "words"),
    [
        ("streams", CapabilityError, "'streams' needs more of the target than its text"),
        ("lookahead", CapabilityError, "use prompt_lookup, suffix, ngram, rest"),
        ("draft_model:model=x", CapabilityError, "'draft_model'"),
        ("ouija", InputError, "there is no drafter 'ouija'"),
        ("rest", CapabilityError, "needs a datastore"),
    ],
)
def test_drafters_that_vllm_cannot_run_are_refused(
    drafter: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: None)
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    with pytest.raises(error, match=words):
        Proposer(config(drafter))
