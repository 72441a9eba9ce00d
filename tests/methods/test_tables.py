"""Methods that draft from tables: decoding, the folder format, its failures, and the verbs that build it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting import tables
from anabranch.drafting.tables import ArrayWriter, checksum, default_folder, find_tables
from anabranch.errors import CapabilityError, FileError
from anabranch.methods import Drafter, Row, make_drafter
from anabranch.model.decoder import Decoder
from anabranch.model.text import fingerprint
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams
from anabranch.train.documents import read_documents
from small import CASES, LLAMA, VOCABULARY, as_target, decode, randomise, request, small
from toy_distribution import assert_pairs_from, pair_probs
from toy_tables import TOY, method, opened, write
from toy_text import ToyFolders, byte_tokenizer
from verbs import Anabranch

NAMES = ("ngram", "rest")
RAGGED = [request(n, n, new) for n, new in ((9, 18), (1, 5), (14, 18), (4, 11), (7, 18), (2, 13))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tables of what the toy itself says, greedy and sampled, so that drafts are accepted."""
    home = tmp_path_factory.mktemp("tables")
    sampled = [replace(r, sampling=SamplingParams(temperature=1.0, seed=i)) for i, r in enumerate(RAGGED)]
    said, _ = decode(small(), [*RAGGED, *sampled], rows=4)
    texts = [[*asked.prompt_ids, *tokens] for asked, tokens in zip([*RAGGED, *sampled], said, strict=True)]
    for name in NAMES:
        write(name, texts, home / name)
    return {name: home / name for name in NAMES}


SPECS = {
    "ngram": "ngram:data={ngram}",
    "bigram": "ngram:order=2,tree=5,data={ngram}",
    "unigram": "ngram:order=1,data={ngram}",
    "chain": "ngram:tree=chain,nodes=5,data={ngram}",
    "rest": "rest:data={rest}",
    "short": "rest:ngram=2,depth=3,matches=4,tree=6,data={rest}",
    "combined": "ngram:data={ngram},tree=10+rest:data={rest}+prompt_lookup",
}


def made(spec: str, folders: dict[str, Path], target: Decoder) -> Drafter:
    return make_drafter(SPECS.get(spec, spec).format(**folders), target)


# -- decoding --------------------------------------------------------------------------------------------------------
# every kind of table on one family, and all of them at once on the others: they read tokens, not states
DECODED = [(case, spec) for case in sorted(CASES) for spec in SPECS if case == "llama" or spec == "combined"]


@pytest.mark.parametrize(("case", "spec"), DECODED)
def test_the_text_is_plain_decodings(case: str, spec: str, folders: dict[str, Path]) -> None:
    target = small(case)
    sampled = [
        replace(r, sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=i)) if i % 2 else r
        for i, r in enumerate(RAGGED)
    ]
    for asked in (RAGGED, sampled):
        wanted, _ = decode(target, asked)
        drafter = made(spec, folders, target)
        found, steps = decode(target, asked, drafter, rows=4)
        assert found == wanted
        assert all(step.tree.size <= drafter.max_nodes for row in steps for step in row)
        if case == "llama" and asked is RAGGED and spec != "unigram":
            assert sum(map(len, steps)) < sum(map(len, wanted)), "drafts from its own text are accepted"


@pytest.mark.parametrize("spec", ["ngram:tree=auto,data={ngram}", "rest:tree=auto,data={rest}+ngram:data={ngram}"])
def test_the_load_sizes_the_trees(spec: str, folders: dict[str, Path]) -> None:
    target = small()
    drafter = made(spec, folders, target)
    assert drafter.adaptive
    wanted, _ = decode(target, RAGGED)
    costs = Costs(PassCosts(StepCosts.parse("1:10/16:11/17:40/512:400")))
    scheduler = Scheduler(target, rows=4, controller=Controller(costs, ragged=target.ragged), prefix_bytes=0)
    tickets = [scheduler.submit(each, drafter) for each in RAGGED]
    while scheduler.busy:
        scheduler.tick()
    assert [ticket.emitted for ticket in tickets] == wanted


@pytest.mark.thorough  # test_enumerated.py computes the same distribution exactly
def test_rejection_of_sampled_chains_keeps_the_joint_distribution_of_two_tokens(tmp_path: Path) -> None:
    words, count, text = 5, 1600, [1, 4, 2]
    target = build_decoder(replace(LLAMA, vocab_size=words, num_layers=2), device="cpu")
    randomise(target, seed=3, scale=0.2)
    write("ngram", [[1, 4, 2, 0, 3, 3, 4, 2, 1, 0, 2, 2, 4]], tmp_path / "t", vocab_size=words)
    drafter = make_drafter(f"ngram:tree=chain,nodes=3,data={tmp_path / 't'}", target)
    asked = [Request(text, 4, SamplingParams(temperature=1.0, seed=seed), rule="rejection") for seed in range(count)]
    found, steps = decode(target, asked, drafter, rows=64)
    assert_pairs_from([(second, third) for _, second, third, _ in found], pair_probs(target, text, skipped=1))
    assert 0.2 < np.mean([row[1].verdict.accepted > 0 for row in steps]) < 1.0  # drafts were judged both ways


# -- the folder ------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_any_content_cost_acceptance_alone(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    target = small()
    record = json.loads((folders[name] / "tables.json").read_text())
    asked = [*RAGGED[:2], replace(RAGGED[2], sampling=SamplingParams(temperature=1.0, seed=1))]
    wanted, _ = decode(target, asked)
    for trial in range(8):
        folder = tmp_path / str(trial)
        folder.mkdir()
        for array, described in record["arrays"].items():
            bits = random.integers(
                256, size=described["length"] * np.dtype(described["dtype"]).itemsize, dtype=np.uint8
            )
            values = bits.view(described["dtype"])
            if trial % 2 and described["dtype"] != "<f4":
                values = random.integers(40, size=len(values)).astype(described["dtype"])
            with ArrayWriter(folder, array, described["dtype"]) as out:
                out.append(values)
            described["sample_sha256"] = checksum(folder / f"{array}.npy")
        (folder / "tables.json").write_text(json.dumps(record))
        for spec in ("ngram:data={}", "ngram:tree=chain,data={}") if name == "ngram" else ("rest:data={}",):
            with np.errstate(all="ignore"):
                assert decode(target, asked, make_drafter(spec.format(folder), target), rows=2)[0] == wanted


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / "tables.json").read_text())
        change(record)
        (folder / "tables.json").write_text(json.dumps(record))

    return apply


def largest(folder: Path) -> Path:
    return max(folder.glob("*.npy"), key=lambda path: path.stat().st_size)


def truncated(folder: Path) -> None:
    os.truncate(largest(folder), largest(folder).stat().st_size - 4)


def flipped(folder: Path) -> None:
    data = bytearray(largest(folder).read_bytes())
    data[-3] ^= 255
    largest(folder).write_bytes(data)


def emptied(folder: Path) -> None:
    """One that the record's checksum is made to fit."""
    path = largest(folder)
    path.write_bytes(b"")
    edit(lambda record: record["arrays"][path.stem].update(sample_sha256=checksum(path)))(folder)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "record": (lambda f: (f / "tables.json").unlink(), "has no tables.json"),
    "json": (lambda f: (f / "tables.json").write_text("{"), "is not JSON"),
    "format": (edit(lambda r: r.update(format="other")), "has the format 'other' version 1"),
    "version": (edit(lambda r: r.update(version=9)), "version 9, and this anabranch reads"),
    "method": (edit(lambda r: r.update(method="other")), "are for the drafter 'other'"),
    "tokenizer": (
        edit(lambda r: r["tokenizer"].update(name="gpt", vocab_size=9)),
        "built with the tokenizer of 'gpt', which is not this target's",
    ),
    "fingerprint": (edit(lambda r: r["tokenizer"].update(fingerprint="0" * 64)), "is not this target's"),
    "facts": (edit(lambda r: r.update(facts=3)), "lacks 'tokenizer', 'facts' or 'arrays'"),
    "missing": (lambda f: largest(f).unlink(), "its copy is incomplete"),
    "truncated": (truncated, "is truncated or was changed since it was built"),
    "flipped": (flipped, "is truncated or was changed since it was built"),
    "length": (edit(lambda r: [a.update(length=1) for a in r["arrays"].values()]), "truncated or was changed"),
    "empty": (emptied, "cannot be read"),
    "described": (edit(lambda r: [a.update(length="x") for a in r["arrays"].values()]), "does not describe"),
    "array": (edit(lambda r: r["arrays"].popitem()), "lack an array"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_one_sentence(
    name: str, damage: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders[name], tmp_path / "copy")
    apply, words = DAMAGE[damage]
    apply(folder)
    monkeypatch.setattr(tables, "_identity", lambda target: TOY.fingerprint)
    with pytest.raises(FileError, match=words) as caught:
        make_drafter(f"{name}:data={folder}", small())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    with pytest.raises(FileError, match="does not exist; give data="):
        make_drafter(f"{name}:data={tmp_path / 'no'}", small())
    entry = method(name)
    assert entry.tables is not None
    with pytest.raises(CapabilityError, match=f"there is none; build it with 'anabranch train {entry.tables.command}"):
        make_drafter(name, small())
    # what was built without naming a folder is found by the tokenizer
    write(name, [[1, 2, 3]], default_folder(entry.tables.command, TOY.fingerprint))
    monkeypatch.setattr(tables, "_identity", lambda target: TOY.fingerprint)
    assert find_tables(entry.tables, small(), "").facts["tokens"] == 3
    assert make_drafter(name, small()).name == name


@pytest.mark.parametrize("name", NAMES)
def test_what_fails_leaves_nothing_and_what_was_there_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "home" / "tables"
    write(name, [[1, 2, 3, 1, 2]], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    append, written = ArrayWriter.append, 0

    def full(self: ArrayWriter, values: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(28, "No space left on device")
        append(self, values)

    with monkeypatch.context() as patched:
        patched.setattr(ArrayWriter, "append", full)
        with pytest.raises(FileError, match=r"cannot be written to .* \(No space left on device\); free some space"):
            write(name, [[1, 2, 3]], folder)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied")))
        with pytest.raises(FileError, match="Permission denied"):
            write(name, [[1, 2, 3]], folder)

    def interrupted() -> Iterator[list[int]]:
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(name, interrupted(), folder)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list((tmp_path / "home").iterdir()) == [folder]
    write(name, [[4, 5]], folder)
    assert opened(name, folder).facts["tokens"] == 2, "replaced as a whole"
    assert list((tmp_path / "home").iterdir()) == [folder]


def test_a_checksum_notices_changes_anywhere_in_small_files_and_lengths_of_large_ones(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for size in (1000, 1 << 20):
        path.write_bytes(bytes(size))
        known = checksum(path)
        for place in (0, size - 1) if size > 1 << 18 else (0, 500, size - 1):
            data = bytearray(size)
            data[place] = 1
            path.write_bytes(data)
            assert checksum(path) != known
        path.write_bytes(bytes(size + 1))
        assert checksum(path) != known


# -- texts and verbs -------------------------------------------------------------------------------------------------
class Bytes:
    """A tokenizer that is not a fast one."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) % VOCABULARY for c in text]


def texts(path: Path, **options: Any) -> list[list[int]]:
    target = replace(as_target(small()), tokenizer=options.pop("tokenizer", Bytes()))
    return [ids.tolist() for ids in read_documents(target, **{options.pop("kind", "text"): path})]


def test_texts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.train import documents

    lines = [f"line {n}\n" for n in range(50)]
    (tmp_path / "t.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "t.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in lines).encode())
    )
    whole = [ord(c) % VOCABULARY for c in "".join(lines)]
    assert texts(tmp_path / "t.txt") == [whole]
    monkeypatch.setattr(documents, "PIECE", 20)
    monkeypatch.setattr(documents, "TOGETHER", 2)
    pieces = texts(tmp_path / "t.txt")
    assert len(pieces) > 5
    assert [token for piece in pieces for token in piece] == whole
    assert texts(tmp_path / "t.jsonl.gz") == [[ord(c) % VOCABULARY for c in line] for line in lines]
    fast = byte_tokenizer()
    assert texts(tmp_path / "t.jsonl.gz", tokenizer=fast) == [fast.encode(t) for t in lines]


def test_completions_have_the_end_of_their_prompts_before_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_ids": list(range(12)), "answer_ids": [3, 4]}) + "\n")
    assert texts(path, kind="answers") == [[*range(4, 12), 3, 4]]
    for bad in (
        {"prompt_ids": [1]},
        {"prompt_ids": [1], "answer_ids": [VOCABULARY]},
        {"prompt_ids": 1, "answer_ids": []},
    ):
        path.write_text(json.dumps(bad) + "\n")
        with pytest.raises(FileError, match=r"line 1 of .* (is not a JSON object with lists|has token ids outside)"):
            texts(path, kind="answers")
    (tmp_path / "a.jsonl.settings.json").write_text("{}")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"text": 3}\n', "has no|field 'text'"),
        (b'{"text": "\\ud800"}\n', "unpaired surrogate"),
        (b"{", "is not JSON"),
    ],
)
def test_lines_that_are_no_text(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(FileError, match=words):
        texts(tmp_path / "t.jsonl")
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(FileError, match="cannot be read as UTF-8 text"):
        texts(tmp_path / "t.txt")
    with pytest.raises(FileError, match="there is no file"):
        texts(tmp_path / "no.txt")


@pytest.mark.parametrize("name", NAMES)
def test_from_a_text_to_a_drafter(
    name: str, toys: ToyFolders, tmp_path: Path, anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    entry = method(name)
    assert entry.tables is not None
    (tmp_path / "t.txt").write_text("the thing that the other thing is\n" * 50, encoding="utf-8")
    base = ("train", entry.tables.command, "--model", toys.model, "--text", tmp_path / "t.txt")
    out = tmp_path / "out"
    done = anabranch(*base, "--out", out, "--memory", 1, "--licence", "CC0-1.0", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["facts"]["tokens"] > 500
    assert record["made"]["licence"] == "CC0-1.0"
    assert record["tokenizer"]["fingerprint"] == fingerprint(byte_tokenizer())
    assert record["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    prompts = ("generate", "the thing", "--model", toys.model, "-n", 12, "--raw", "--dtype", "float32", "--json")
    drafted = anabranch(*prompts, "--drafter", f"{name}:data={out}")
    assert drafted.code == 0, drafted.err
    plain = anabranch(*prompts, "--drafter", "none")
    assert json.loads(drafted.out)["text"] == json.loads(plain.out)["text"]
    # refused: replacing without being asked to, other people's folders, both kinds of text
    assert "holds tables already" in anabranch(*base, "--out", out).err
    assert "holds other files" in anabranch(*base, "--out", tmp_path).err
    assert "is a file" in anabranch(*base, "--out", tmp_path / "t.txt").err
    assert "give either a file of completions" in anabranch(*base, "--answers", tmp_path / "t.txt").err
    # without a folder, the drafter finds them by itself
    missing = anabranch(*prompts, "--drafter", name)
    assert missing.code != 0
    assert f"anabranch train {entry.tables.command}" in missing.err
    done = anabranch(*base)
    assert done.code == 0, done.err
    assert done.out.endswith(f"--drafter {name}\n")
    found = anabranch(*prompts, "--drafter", name)
    assert json.loads(found.out)["text"] == json.loads(plain.out)["text"]


def test_rows_without_any_tokens_of_context_are_drafted_for(folders: dict[str, Path]) -> None:
    for name in NAMES:
        drafter = made(SPECS[name], folders, small())
        row = Row([3], 1, SamplingParams(), max_depth=4)
        drafter.join(row)
        (tree,) = drafter.draft([row], 8)
        assert tree.size > 1
