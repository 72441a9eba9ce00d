"""Kept texts: blocks that texts share, in memory and on disk, across restarts and whatever happens to the files."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from anabranch.decoding import prefix_files, prefixes, ticks
from anabranch.decoding.engine import Request
from anabranch.decoding.prefix_files import PrefixFiles
from anabranch.decoding.prefixes import Prefixes
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.drafting.kept import Family
from anabranch.errors import FileError, InputError, PerformanceWarning
from anabranch.methods.none import NoDrafter
from anabranch.model.decoder import Decoder
from small import decode, prompt, small
from toy_text import toy_model

PLAIN = NoDrafter()
FAMILY = Family(None, 0)
SYSTEM = prompt(32, 1)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 8)


def run(scheduler: Scheduler, ids: Sequence[int], new: int = 5) -> Ticket:
    """Decode one request by itself."""
    ticket = scheduler.submit(Request(list(ids), new), PLAIN)
    while scheduler.busy:
        scheduler.tick()
    assert ticket.emitted == decode(scheduler.target, [ticket.request])[0][0]
    return ticket


def kept(target: Decoder, folder: Path, *, identity: str = "toy", most: int = 2**24, memory: int = 2**24) -> Scheduler:
    scheduler = Scheduler(target)
    scheduler.keep(Prefixes(memory, PrefixFiles(folder, identity, most)))
    return scheduler


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


# -- in memory ------------------------------------------------------------------------------------------------
def test_conversations_share_their_system_prompt() -> None:
    scheduler = Scheduler(small())
    texts = [[*SYSTEM, *prompt(8, seed)] for seed in (2, 3, 4)]
    for round_ in range(2):
        for place, ids in enumerate(texts):
            ticket = run(scheduler, ids)
            assert ticket.reused >= (len(ids) - 4 if round_ else 32 if place else 0), (
                "three tokens and the last are new"
            )
            texts[place] = [*ids, *ticket.emitted, *prompt(3, place)]
    assert scheduler.engine is not None
    each = scheduler.engine.cache.token_bytes
    assert scheduler.prefixes.nbytes <= (32 + 3 * 20) * each, "the system prompt is there once"
    assert scheduler.prefixes.nbytes == sum(b.nbytes for r in scheduler.prefixes._roots.values() for b in r.below())


def test_the_ends_of_the_least_recently_used_texts_go_first() -> None:
    target = small()
    scheduler = Scheduler(target, prefix_bytes=48 * target.token_bytes)
    for seed in range(2, 8):
        run(scheduler, [*SYSTEM, *prompt(12, seed)], 1)
        assert scheduler.prefixes.nbytes <= scheduler.prefixes.most
    found = [scheduler.prefixes.find(FAMILY, [*SYSTEM, *prompt(12, seed)]) for seed in range(2, 8)]
    assert found[-1] == 44
    assert min(found) == 32, "all begin with the system prompt, which was used by each"
    assert sorted(found) == found


def test_only_blocks_of_other_texts_make_room() -> None:
    """A text that is being kept needs the blocks that it shares with earlier ones, however long ago they were used."""
    target = small()
    scheduler = Scheduler(target, prefix_bytes=64 * target.token_bytes)
    run(scheduler, SYSTEM, 1)
    run(scheduler, prompt(25, 2), 1)
    run(scheduler, [*SYSTEM, *prompt(24, 3)], 1)
    assert scheduler.prefixes.find(FAMILY, [*SYSTEM, *prompt(24, 3)]) == 56
    assert 0 < scheduler.prefixes.find(FAMILY, prompt(25, 2)) < 25
    assert [*scheduler.prefixes._recent] == [b for b in scheduler.prefixes._recent if b.stored is not None]
    assert scheduler.prefixes.nbytes == sum(block.nbytes for block in scheduler.prefixes._recent)


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    monkeypatch.setattr(ticks, "free_memory", lambda device: 2**30)
    assert ticks.kept_bytes(target, 0.25) == 2**28
    assert [ticks.kept_bytes(target, size) for size in (0, 1, 2**40, None)] == [0, 1, 2**40, 2**26]
    monkeypatch.setattr(ticks, "free_memory", lambda device: None)
    assert ticks.kept_bytes(target, 0.25) == 2**26


def test_a_text_that_does_not_fit_is_kept_as_far_as_it_fits() -> None:
    target = small()
    scheduler = Scheduler(target, prefix_bytes=20 * target.token_bytes)
    run(scheduler, SYSTEM)
    assert scheduler.prefixes.find(FAMILY, SYSTEM) == 16


# -- on disk --------------------------------------------------------------------------------------------------
def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    target = small()
    before = kept(target, tmp_path)
    ticket = run(before, SYSTEM)
    text = [*SYSTEM, *ticket.emitted]
    before.close()
    assert len(files(tmp_path)) == 5
    after = kept(target, tmp_path)
    assert run(after, [*text, *prompt(4, 9)]).reused == len(text) - 1
    after.close()
    assert len(files(tmp_path)) == 6, "the end of the first turn became part of a whole block"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    target = small()
    scheduler = kept(target, tmp_path)
    run(scheduler, SYSTEM)
    scheduler.close()
    other = kept(target, tmp_path, identity="other")
    assert run(other, SYSTEM).reused == 0
    other.close()


def test_what_memory_has_no_room_for_is_read_from_disk(tmp_path: Path) -> None:
    target = small()
    scheduler = kept(target, tmp_path, memory=40 * target.token_bytes)
    texts = [prompt(34, seed) for seed in (2, 3, 4)]
    for ids in texts:
        run(scheduler, ids)
    for ids in texts:
        assert run(scheduler, ids).reused == 33
        assert scheduler.prefixes.nbytes <= scheduler.prefixes.most
    scheduler.close()


def test_a_block_in_use_makes_no_room_for_one_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short end of the text is in memory alone, since it was not stored, and its longer beginning on disk alone."""
    target, ids = small(), prompt(20, 1)
    first = kept(target, tmp_path)
    run(first, ids[:16], 1)
    first.close()
    scheduler = kept(target, tmp_path, memory=4 * target.token_bytes)
    monkeypatch.setattr(PrefixFiles, "store", lambda self, block, stored: False)
    assert [run(scheduler, ids, 1).reused for _ in range(3)] == [16, 19, 19]
    scheduler.close()


def test_files_stay_within_their_bytes_and_the_oldest_ends_go_first(tmp_path: Path) -> None:
    target = small()
    scheduler = kept(target, tmp_path)
    run(scheduler, SYSTEM, 1)
    scheduler.close()
    size = sum(path.stat().st_size for path in files(tmp_path))
    scheduler = kept(target, tmp_path, most=2 * size)
    for seed in range(2, 7):
        run(scheduler, [*SYSTEM, *prompt(16, seed)], 1)
    scheduler.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * size
    scheduler = kept(target, tmp_path)
    assert run(scheduler, [*SYSTEM, *prompt(16, 6)], 1).reused == 47
    assert run(scheduler, [*SYSTEM, *prompt(16, 2)], 1).reused == 32
    scheduler.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Another block under this name."""
    path.write_bytes(next(each for each in files(path.parent.parent) if each != path).read_bytes())


def foreign(path: Path) -> None:
    save_file(load_file(path), path)


@pytest.mark.parametrize("spoil", [cut, flip, empty, swap, foreign])
def test_a_spoilt_file_is_ignored_with_one_warning(spoil: object, tmp_path: Path) -> None:
    target = small()
    scheduler = kept(target, tmp_path)
    run(scheduler, SYSTEM)
    scheduler.close()
    for path in files(tmp_path)[:3]:
        spoil(path)  # type: ignore[operator]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        scheduler = kept(target, tmp_path)
        assert run(scheduler, SYSTEM).reused < 31
    assert [each.category for each in heard] == [PerformanceWarning]
    assert "kept texts are ignored" in str(heard[0].message)
    assert run(scheduler, SYSTEM).reused == 31, "it was kept again"
    scheduler.close()


def test_a_file_that_another_process_deleted_is_missed_in_silence(tmp_path: Path) -> None:
    target = small()
    scheduler = kept(target, tmp_path)
    run(scheduler, SYSTEM)
    scheduler.close()
    scheduler = kept(target, tmp_path)
    for path in files(tmp_path):
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(scheduler, SYSTEM).reused == 0
    scheduler.close()


def test_a_full_disk_never_ends_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(prefix_files, "write_atomically", full)
    scheduler = kept(small(), tmp_path)
    for seed in (1, 2):
        run(scheduler, prompt(30, seed))
    assert run(scheduler, prompt(30, 1)).reused == 29, "memory has it"
    scheduler.close()
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="kept texts cannot be written to"):
        PrefixFiles(tmp_path / "file" / "below", "toy", 2**20)


# -- in the public face ---------------------------------------------------------------------------------------
def test_a_model_that_is_loaded_again_knows_its_conversations(tmp_path: Path) -> None:
    text = "the river of the thing and another of the"
    found = []
    for _ in range(2):
        with toy_model() as model:
            model.keep_prefixes(disk=2**24, folder=tmp_path)
            found.append(model.generate(text, max_new_tokens=6))
            found.append(model.generate(text, max_new_tokens=6))
    prompt_tokens = len(found[0].prompt_ids)
    assert [result.stats.cached_tokens for result in found] == [0] + [prompt_tokens - 1] * 3
    assert len({tuple(result.token_ids) for result in found}) == 1
    with toy_model() as model, pytest.raises(InputError, match="disk must be at least 0, got -1"):
        model.keep_prefixes(disk=-1)
