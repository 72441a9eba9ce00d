"""Drafters' own keys and values are kept with the target's: drafts after kept texts are those after reading them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from test_same_trees import MODULES

from anabranch.decoding import prefixes
from anabranch.decoding.engine import Request, Step
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.drafting.drafter import Drafter
from anabranch.methods import make_drafter
from anabranch.sampling import SamplingParams
from small import SAMPLINGS, decode, prompt, randomise, same_tree, small
from test_prefixes import FAMILY, cut, files, kept

CASES = [
    ("eagle", "eagle:nodes=9"),
    ("eagle taps", "eagle:nodes=9+suffix"),
    ("hydra prefix", "hydra:nodes=9"),
    ("draft", "draft_model:nodes=9"),
    ("draft", "staged:tree=chain"),
]
PROMPT = prompt(50, 1)
UNREAD = 4  # tokens at most at the end of a text that a drafter has not read yet when the text ends


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 16)


def fresh(module: Any, spec: str) -> Drafter:
    """A drafter without memory of any text."""
    return make_drafter(spec, small(), copy.deepcopy(module))


def run(
    scheduler: Scheduler, drafter: Drafter, ids: Sequence[int], wanted: Drafter, sampling: SamplingParams | None = None
) -> Ticket:
    """Decode a request: tokens, trees and passes are those of a drafter that reads the whole prompt."""
    request = Request(list(ids), 8, sampling or SamplingParams())
    ticket = scheduler.submit(request, drafter)
    while scheduler.busy:
        scheduler.tick()
    said, steps = decode(scheduler.target, [request], wanted)
    assert ticket.emitted == said[0]
    check_steps([*ticket.steps], steps[0])
    return ticket


def check_steps(found: Sequence[Step], wanted: Sequence[Step]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        same_tree(mine.tree, other.tree)
    # a prompt that rides in the first step is read by a draft model within it
    assert [step.calls for step in found[1:]] == [step.calls for step in wanted[1:]]


@pytest.mark.parametrize("sampling", ["greedy", "warm"])
@pytest.mark.parametrize(("module", "spec"), CASES)
def test_drafts_survive_a_restart(module: str, spec: str, sampling: str, tmp_path: Path) -> None:
    trained, params = MODULES[module](small()), SAMPLINGS[sampling]
    before = kept(small(), tmp_path)
    text = [*PROMPT, *run(before, fresh(trained, spec), PROMPT, fresh(trained, spec), params).emitted]
    before.close()
    after = kept(small(), tmp_path)
    for ids in (text, [*text, *prompt(3, 9)], PROMPT[:30]):
        ticket = run(after, fresh(trained, spec), ids, fresh(trained, spec), params)
        assert ticket.reused >= min(len(ids), len(text)) - 1 - UNREAD
    after.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_draft_model_does_not_read_a_kept_text_again(restart: bool, tmp_path: Path) -> None:
    trained, scheduler = MODULES["draft"](small()), kept(small(), tmp_path)
    read: list[int] = []
    for _ in range(2):
        drafter: Any = fresh(trained, "draft_model:nodes=9")
        whole = drafter.reader._read

        def spy(row: Any, tokens: Sequence[int], whole: Any = whole) -> None:
            read.append(len(tokens))
            whole(row, tokens)

        drafter.reader._read = spy
        run(scheduler, drafter, PROMPT, fresh(trained, "draft_model:nodes=9"))
        if restart:
            scheduler.close()
            scheduler = kept(small(), tmp_path)
    assert read == [len(PROMPT) - 1], "by the first drafter alone"
    scheduler.close()


@pytest.mark.parametrize(("module", "spec"), CASES[:4])
def test_what_another_module_read_is_not_used(module: str, spec: str, tmp_path: Path) -> None:
    trained, scheduler = MODULES[module](small()), kept(small(), tmp_path)
    run(scheduler, fresh(trained, spec), PROMPT, fresh(trained, spec))
    scheduler.close()
    other = copy.deepcopy(trained)
    randomise(other, 9, scale=0.1)
    scheduler = kept(small(), tmp_path)
    ticket = run(scheduler, fresh(other, spec), PROMPT, fresh(other, spec))
    assert ticket.reused == (len(PROMPT) - 1 if module == "draft" else 0), "a draft model reads the prompt by itself"
    scheduler.close()


@pytest.mark.parametrize(("module", "spec"), CASES[:4])
def test_spoilt_files_are_not_used(module: str, spec: str, tmp_path: Path) -> None:
    trained, scheduler = MODULES[module](small()), kept(small(), tmp_path)
    run(scheduler, fresh(trained, spec), PROMPT, fresh(trained, spec))
    scheduler.close()
    spoilt = 0
    for path in files(tmp_path):
        with safe_open(path, "pt") as opened:
            drafts = opened.metadata()["drafts"]
        if drafts:
            cut(path)
            spoilt += 1
    assert 2 * spoilt == len(files(tmp_path))
    scheduler = kept(small(), tmp_path)
    ticket = run(scheduler, fresh(trained, spec), PROMPT, fresh(trained, spec))
    assert ticket.reused == (len(PROMPT) - 1 if module == "draft" else 0)
    scheduler.close()


def test_the_target_comes_first_where_memory_is_short(tmp_path: Path) -> None:
    trained, target = MODULES["eagle"](small()), small()
    scheduler = kept(target, tmp_path / "unused", most=0, memory=60 * target.token_bytes)
    scheduler.prefixes.files = None
    ticket = run(scheduler, fresh(trained, "eagle"), PROMPT, fresh(trained, "eagle"))
    assert scheduler.prefixes.find(FAMILY, [*PROMPT, *ticket.emitted]) >= len(PROMPT) + 4
    assert scheduler.prefixes.nbytes <= scheduler.prefixes.most
    run(scheduler, fresh(trained, "eagle"), PROMPT, fresh(trained, "eagle"))
    assert scheduler.prefixes.nbytes <= scheduler.prefixes.most
