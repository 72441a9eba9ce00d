"""``anabranch bench`` as a user types it, on toy models with real contenders."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.analysis.simulate import simulate
from anabranch.analysis.trace import read_trace
from anabranch.bench.run import Ours
from anabranch.errors import InputError
from anabranch.prompts import chat_ids
from toy_text import ToyFolders, byte_tokenizer
from verbs import Anabranch, Outcome

INTERRUPTED = 130


Bench = Callable[..., Outcome]


@pytest.fixture
def bench(toys: ToyFolders, tmp_path: Path, anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the verb on a suite of three prompts."""
    (tmp_path / "suite.jsonl").write_text(
        '{"prompt": "the thing", "task": "a"}\n{"prompt": "other", "task": "b"}\n{"prompt": "third", "task": "a"}\n'
    )
    where = ["--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--raw"]
    suite = ["--suite", tmp_path / "suite.jsonl", "--max-new-tokens", 6]

    def run(*arguments: object, bare: bool = False) -> Outcome:
        command = ["bench", *([] if bare else [*where, *suite]), *arguments]
        monkeypatch.setattr("sys.argv", ["anabranch", *map(str, command)])
        return anabranch(*command)

    return run


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def test_ours_against_ourselves_and_all_that_is_written(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "made" / "result.json"
    methods = ("--method", "none", "--method", "again=none", "--method", "prompt_lookup", "--method", "streams")
    done = bench(*methods, "--out", out, "--figures", "--repeats", 2)
    assert done.code == 0, done.err
    assert "3/3 prompts" in done.err
    result = read(out)
    assert (result["schema"], result["complete"], result["prompts_done"]) == (2, True, 3)
    assert [c["name"] for c in result["contenders"]] == ["none", "again", "prompt_lookup", "streams"]
    again = result["contenders"][1]
    assert again["spec"] == "none"
    assert len(again["speedup_quartiles"]) == 3
    assert again["token_ms_quartiles"][1] > 0
    assert all(c["equal_outputs"] == 3 and c["common_prefix_median"] > 0 for c in result["contenders"])
    streams = result["contenders"][3]
    assert sum(streams["accepted_per_step"].values()) == streams["steps"]
    assert streams["mean_acceptance_length"] == round(streams["tokens"] / streams["steps"], 4)
    assert set(streams["by_task"]) == {"a", "b"}
    assert set(streams["step_ms_by_part"]) == {"draft", "forward", "verify", "commit", "prepare"}
    assert result["machine"]["floor_ms"] > 0
    assert result["run"]["command"].startswith("anabranch bench --model")
    assert {"load", "pack"} == set(result["load_seconds"])

    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| again |" in page
    assert "![result.speedup.png](result.speedup.png)" in page
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], row["task"]) for row in rows[:3]] == [("none", "all"), ("none", "a"), ("none", "b")]
    assert float(rows[0]["speedup_median"]) == 1.0
    for name in ("speedup", "acceptance", "time", "floor"):
        assert (out.parent / f"result.{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (out.parent / f"result.{name}.svg").read_text(encoding="utf-8")
    assert not list(out.parent.glob("*.partial.jsonl"))


def test_plain_decoding_always_takes_part(bench: Bench) -> None:
    done = bench("--method", "prompt_lookup", "--json", "--limit", 1, "--task", "b")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [c["name"] for c in result["contenders"]] == ["none", "prompt_lookup"]
    assert [p["task"] for p in result["prompts"]] == ["b"]


def test_quantized_weights_have_a_plain_decoding_of_their_own(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = bench("--method", "small=prompt_lookup@int8", "--method", "streams@int4", "--out", out)
    assert done.code == 0, done.err
    result = read(out)
    by_name = {c["name"]: c for c in result["contenders"]}
    assert list(by_name) == ["none", "none@int8", "none@int4", "small", "streams@int4"]
    assert [c["weights"] for c in by_name.values()] == ["none", "int8", "int4", "int8", "int4"]
    assert all(c["equal_outputs"] == 3 for c in by_name.values())
    floor = result["floor_ms"]
    assert floor["none"] > 2 * floor["int8"] > 2 * floor["int4"] > 0
    for name, base in (("small", "none@int8"), ("streams@int4", "none@int4")):
        ratio = by_name[name]["tokens_per_second"] / by_name[base]["tokens_per_second"]
        assert by_name[name]["speedup_total"] == pytest.approx(ratio, rel=1e-3)


def test_a_contender_on_every_other_prompt(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    few = ("--method", "some=prompt_lookup", "--every", "some=2", "--out", out)
    done = bench("--method", "none", *few)
    assert done.code == 0, done.err
    assert "some decoded 2 of the prompts only" in " ".join(done.out.split())
    plain, some = read(out)["contenders"]
    assert ("every" not in plain, some["every"], some["prompts"], some["equal_outputs"]) == (True, 2, 2, 2)
    assert read(out)["run"]["every"] == {"some": 2}
    same = bench("compare", out, out, bare=True)
    assert same.code == 0, same.err


def test_auto_is_what_tune_or_we_would_take(bench: Bench) -> None:
    done = bench("--method", "auto", "--json", "--limit", 1)
    assert done.code == 0, done.err
    auto = json.loads(done.out)["contenders"][1]
    assert (auto["name"], auto["equal_outputs"]) == ("auto", 1)
    assert "prompt_lookup" in auto["drafter"]


@pytest.mark.thorough  # the peer is a process with PyTorch
def test_a_peer_is_measured_beside_ours(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = bench("--method", "none", "--peer", "theirs=transformers")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line.startswith("theirs ") and "3/3" in line]
    assert [row[-1] for row in rows] == ["3/3", "6"], "five columns, then all with the common prefix"
    assert "theirs, in its own process" in done.out
    assert "Tokens/s relative to peers" in " ".join(done.out.split())  # the title is wrapped


@pytest.mark.thorough
def test_sampled_methods_emit_plain_decodings_tokens_and_peers_are_not_compared(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "result"
    sampled = ("--temperature", 1, "--seed", 5)
    done = bench("--method", "none", "--method", "streams", "--peer", "transformers", *sampled, "--out", out)
    assert done.code == 0, done.err
    none, streams, peer = read(tmp_path / "result.json")["contenders"]
    assert none["equal_outputs"] == streams["equal_outputs"] == 3
    assert "error" not in peer
    assert "equal_outputs" not in peer
    for shown in (done.out, (tmp_path / "result.md").read_text(encoding="utf-8")):
        assert "tokens are not comparable" in shown
    assert "not comparable" not in bench("--method", "none", "--limit", 1).out


def test_recordings_replay_to_what_was_measured(bench: Bench, tmp_path: Path) -> None:
    folder, out = tmp_path / "made" / "traces", tmp_path / "result"
    methods = ("--method", "none", "--method", "wide=streams:nodes=8", "--method", "streams:nodes=4+prompt_lookup")
    done = bench(*methods, "--repeats", 2, "--trace", folder, "--out", out)
    assert done.code == 0, done.err
    names = ["none.jsonl", "streams-nodes=4+prompt_lookup.jsonl", "wide.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(f"wrote {folder / name}" in done.err for name in names)
    wide = read_trace(folder / "wide.jsonl")
    assert wide.settings["drafter"] == "streams:nodes=8"
    assert wide.settings["max_new_tokens"] == 6
    record = read(tmp_path / "result.json")["contenders"][1]
    replayed = simulate(wide)
    assert 2 * replayed.steps == record["steps"]
    assert round(replayed.mean_acceptance_length, 4) == record["mean_acceptance_length"]
    assert [row.tokens for row in wide.rows()] == [row.tokens for row in read_trace(folder / "none.jsonl").rows()]

    again = bench(*methods, "--trace", folder)
    assert again.code == 1
    assert f"{folder / 'none.jsonl'} exists already; give another --trace, or --force to replace it" in again.err
    assert bench("--method", "none", "--trace", folder, "--limit", 1, "--force").code == 0
    assert len(read_trace(folder / "none.jsonl").rows()) == 1


def test_recordings_of_a_run_that_was_stopped(bench: Bench, tmp_path: Path, stopped: Callable[[int], None]) -> None:
    whole, parts, out = tmp_path / "whole", tmp_path / "parts", tmp_path / "result"
    methods = ("--method", "none", "--method", "streams")
    assert bench(*methods, "--trace", whole).code == 0
    command = (*methods, "--out", out, "--trace", parts)
    stopped(2 + 2 + 1 + 1)  # warm-ups, a prompt, half of one, and then
    assert bench(*command).code == INTERRUPTED
    assert len(read_trace(parts / "streams.jsonl").rows()) == 1
    with (parts / "none.jsonl").open("a") as file:
        file.write('{"row": 1, "at": 0, "tok')  # the power went
    elsewhere = bench(*methods, "--out", out, "--trace", tmp_path / "elsewhere", "--resume")
    assert elsewhere.code == 1
    assert "lacks some of the 1 prompts that are done" in elsewhere.err
    assert bench(*command, "--resume").code == 0
    for name in ("none.jsonl", "streams.jsonl"):
        errors = [
            [(r.row, r.at, r.decided, r.tree.sources) for r in read_trace(where / name)] for where in (whole, parts)
        ]
        assert errors[0] == errors[1]
    assert len(list(parts.iterdir())) == 2


def test_a_contender_that_cannot_be_had_is_an_error_and_the_others_go_on(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = bench("--method", "none", "--method", "bad=streams:depth=99", "--out", out)
    assert done.code == 0, done.err
    good, bad = read(tmp_path / "result.json")["contenders"]
    assert "error" not in good
    assert (bad["name"], bad["spec"]) == ("bad", "streams:depth=99")
    assert bad["error"] in " ".join(done.err.split())
    assert "bad" in done.out
    assert bad["error"] in (tmp_path / "result.md").read_text(encoding="utf-8")


def test_one_that_breaks_on_the_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, calls = Ours.serve, dict[Ours, int]()

    def breaks(self: Ours, *arguments: Any, **options: Any) -> Any:
        calls[self] = calls.get(self, 0) + 1
        if self is list(calls)[-1] and calls[self] == 3:
            raise RuntimeError("[it] broke")
        return serve(self, *arguments, **options)

    monkeypatch.setattr(Ours, "serve", breaks)
    done = bench("--method", "none", "--method", "b=none")
    assert done.code == 0, done.err
    assert "b is not measured: RuntimeError: [it] broke" in done.err
    assert "RuntimeError: [it] broke" in done.out
    monkeypatch.setattr(Ours, "serve", _fail)
    nobody = bench("--method", "none")
    assert nobody.code == 1
    assert "no contender could be measured" in nobody.err


def _fail(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("no luck")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_done_and_resume_goes_on(
    number: int, code: int, bench: Bench, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    out = tmp_path / "result"
    command = ("--method", "none", "--method", "prompt_lookup", "--out", out)
    stopped(2 + 4 + 1, number)  # warm-ups, two prompts, and then
    done = bench(*command)
    assert done.code == code
    assert "stopped after 2 of 3 prompts" in done.err
    assert "--resume" in done.err
    first = read(tmp_path / "result.json")
    assert (first["complete"], first["prompts_done"]) == (False, 2)
    assert first["contenders"][1]["prompts"] == 2
    assert "Stopped after 2 of 3" in (tmp_path / "result.md").read_text(encoding="utf-8")

    partial = tmp_path / "result.partial.jsonl"
    with partial.open("a") as file:
        file.write('{"prompt": 2, "ans')  # the power went
    assert "give --resume to continue it, or --force to replace it" in bench(*command).err
    other = bench(*command, "--resume", "--max-new-tokens", 7)
    assert other.code == 1
    assert "another max new tokens (6, now 7)" in other.err
    assert "another contenders" in bench("--method", "none", "--out", out, "--resume").err

    done = bench(*command, "--resume")
    assert done.code == 0, done.err
    assert "continuing after 2 of 3 prompts" in done.err
    whole = read(tmp_path / "result.json")
    assert whole["complete"]
    assert "--resume" not in whole["run"]["command"]
    assert whole["machine"]["read_gb_s"] == first["machine"]["read_gb_s"]
    assert "after" not in first["machine"]
    after = whole["machine"]["weight_mb"] / whole["machine"]["after"]["read_gb_s"][1]
    assert whole["machine"]["floor_ms"] == pytest.approx(min(first["machine"]["floor_ms"], after), abs=1e-4)
    assert "after it" in (tmp_path / "result.md").read_text(encoding="utf-8")
    rates = [record["contenders"][1]["tokens_per_second_by_prompt"] for record in (first, whole)]
    assert rates[1][:2] == pytest.approx(rates[0], rel=1e-3)
    assert len(rates[1]) == 3
    assert not partial.exists()
    again = bench(*command, "--resume").err
    assert "the run is complete" in again
    assert f"its result is {tmp_path / 'result.json'}" in again
    assert read(tmp_path / "result.json") == whole
    (tmp_path / "result.json").write_text(json.dumps(first))
    assert "nothing to resume" in bench(*command, "--resume").err


def test_ctrl_c_before_anything_is_done_leaves_nothing(
    bench: Bench, tmp_path: Path, stopped: Callable[[int], None]
) -> None:
    stopped(1)
    done = bench("--method", "none", "--out", tmp_path / "made" / "result")
    assert done.code == INTERRUPTED
    assert not (tmp_path / "made").exists()
    stopped(3)
    done = bench("--method", "none")
    assert done.code == INTERRUPTED
    assert "give --out FILE to be able to resume" in done.err
    assert "1 of 3 prompts" in done.out


def test_broken_journals(bench: Bench, tmp_path: Path) -> None:
    partial, command = tmp_path / "result.partial.jsonl", ("--out", tmp_path / "result", "--resume")
    partial.write_text("")
    assert "does not start with the settings of a run" in bench(*command).err
    partial.write_text('{"settings": {}}\nrubbish\n{}\n')
    assert "line 2" in bench(*command).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "magic"], "there is no drafter 'magic'"),
        (["--peer", "magic"], "there is no peer 'magic'"),
        (["--method", "none", "--method", "none"], "two contenders are named 'none'"),
        (["--method", "=none"], "must be SPEC or LABEL=SPEC"),
        (["--task", "c"], "has no task 'c'; its tasks are a, b"),
        (["--field", "text"], "no text in the field 'text'; its fields are prompt, task"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--figures"], "--figures needs --out"),
        (["--method", "none@int3"], "none, int8, int4"),
        (["--resume"], "--resume needs --out"),
        (["--method", "a=streams", "--method", "a=none"], "named 'a'; label one of them, as in again=none"),
        (["--method", "again=none@int8", "--method", "again=streams@int8"], "as in again-2=streams@int8"),
        (["--max-new-tokens", "95"], "too many for 95 more"),
        (["--method", "auto", "--every", "none=2"], "names no contender besides plain decoding: 'none=2'"),
        (["--method", "auto", "--every", "auto=x"], "LABEL=N with a whole number from 1, got 'auto=x'"),
        (["--method", "auto", "--every", "auto=2", "--trace", "steps"], "leave out --every or --trace"),
    ],
)
def test_what_is_refused_before_anything_runs(bench: Bench, arguments: list[str], words: str) -> None:
    done = bench(*arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert words in done.err


def test_results_that_could_not_be_written(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("anabranch.model.load.load_target", never)
    (tmp_path / "file").write_text("")
    done = bench("--out", tmp_path / "file" / "result")
    assert done.code == 1
    assert "results cannot be written to" in done.err
    assert "is a folder" in bench("--out", tmp_path).err
    done = bench("--trace", tmp_path / "file")
    assert done.code == 1
    assert "recordings cannot be written to" in done.err
    same = bench("--method", "a b=none", "--method", "a/b=prompt_lookup", "--trace", tmp_path / "traces")
    assert "would both be recorded in" in same.err


def test_a_peer_that_is_not_installed_is_told_before_a_model_is_loaded(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("anabranch.model.load.load_target", _fail)
    done = bench("--method", "none", "--peer", "transformers", "--peer", "x=vllm-ngram", "--out", tmp_path / "result")
    assert (done.code, done.out) == (1, "")
    assert "run 'anabranch bench peers install vllm' first" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suite.jsonl"]


def test_a_result_names_no_folders(bench: Bench, tmp_path: Path, toys: ToyFolders) -> None:
    out = tmp_path / "made" / "result"
    words = ("--method", "none", "--peer", f"transformers-assisted:assistant={tmp_path / 'gone'}", "--limit", 1)
    assert bench(*words, f"--out={out}", "--data", tmp_path).code == 0
    result, page = read(tmp_path / "made" / "result.json"), (tmp_path / "made" / "result.md").read_text("utf-8")
    command = result["run"]["command"]
    assert command.startswith(f"anabranch bench --model {Path(toys.model).name} --adapter ")
    assert "--suite suite.jsonl" in command
    assert command.endswith("--peer transformers-assisted:assistant=gone --limit 1 --out=result --data DIR")
    assert result["run"]["model"] == Path(toys.model).name
    peer = result["contenders"][1]
    assert (peer["name"], peer["spec"]) == 2 * ("transformers-assisted:assistant=gone",)
    peer.pop("error")  # a sentence for whoever ran it
    assert str(tmp_path) not in json.dumps(result)
    assert str(toys.model) not in json.dumps(result) + page


def test_a_page_links_to_nothing_that_is_not_beside_it(bench: Bench, tmp_path: Path) -> None:
    assert bench("--method", "none", "--limit", 1, "--out", tmp_path / "result").code == 0
    page = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "](" not in page
    assert "docs/metrics.md of anabranch" in page


def test_a_run_is_resumed_with_its_recordings(bench: Bench, tmp_path: Path, stopped: Callable[[int], None]) -> None:
    for first, then, words in (
        (("--trace", tmp_path / "traces"), (), "another --trace (given, now not given)"),
        ((), ("--trace", tmp_path / "others"), "another --trace (not given, now given)"),
    ):
        command = ("--method", "none", "--out", tmp_path / f"result{len(first)}")
        stopped(1 + 1 + 1)
        assert bench(*command, *first).code == INTERRUPTED
        refused = bench(*command, *then, "--resume")
        assert refused.code == 1
        assert words in refused.err
        assert bench(*command, *first, "--resume").code == 0


def test_figures_without_matplotlib(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install 'anabranch[figures]'" in bench("--out", tmp_path / "x", "--figures").err


def test_compare(bench: Bench, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for out, methods in ((a, ("--method", "none", "--method", "x=prompt_lookup")), (b, ("--method", "none"))):
        assert bench(*methods, "--out", out).code == 0
    record = json.loads(bench("compare", a, b, "--json", bare=True).out)
    assert record["warnings"] == []
    none, x = record["contenders"]
    assert len(none["ratio_quartiles"]) == 3
    assert none["ratio_total"] > 0
    assert (x["name"], x["b"]) == ("x", None)
    same = json.loads(bench("compare", a, a, "--json", bare=True).out)
    assert all(c["ratio_quartiles"] == [1.0, 1.0, 1.0] for c in same["contenders"])

    other = read(b)
    other["run"] |= {"fingerprint": "0" * 64, "prompts_sha256": "other", "dtype": "bfloat16"}
    other["environment"] |= {"processor": "another", "threads": 99}
    b.write_text(json.dumps(other))
    shown = bench("compare", a, b, bare=True).out
    for words in ("the model differs", "the dtype differs: float32 and bfloat16", "number of threads differs"):
        assert words in shown
    assert "the prompts differ: " in shown
    assert "(totals)" in shown
    assert "absent" in shown


def test_compare_takes_what_out_took(bench: Bench, tmp_path: Path) -> None:
    for name in ("a", "b.v2"):
        assert bench("--method", "none", "--limit", 1, "--out", tmp_path / name).code == 0
    wanted = bench("compare", tmp_path / "a.json", tmp_path / "b.v2.json", "--json", bare=True)
    assert wanted.code == 0
    for names in (("a", "b.v2"), ("a.csv", "b.v2.md")):
        assert bench("compare", *(tmp_path / name for name in names), "--json", bare=True).out == wanted.out


def test_results_are_replaced_by_force_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: Callable[[int], None]
) -> None:
    out = tmp_path / "result"
    command = ("--method", "none", "--limit", 1, "--out", out)
    assert bench(*command).code == 0
    first = (tmp_path / "result.json").read_text()
    with monkeypatch.context() as context:
        context.setattr("anabranch.model.load.load_target", _fail)
        for suffix in (".json", ".csv", ".md"):
            refused = bench(*command)
            assert f"{out}{suffix} exists already; give another --out, or --force to replace it" in refused.err
            (tmp_path / f"result{suffix}").unlink()
        assert "give only one of them" in bench(*command, "--resume", "--force").err
    (tmp_path / "result.json").write_text(first)
    assert bench(*command, "--force").code == 0
    again = read(tmp_path / "result.json")
    assert "--force" not in again["run"]["command"]
    stopped(1 + 1 + 1)
    assert bench("--method", "none", "--out", out, "--force").code == INTERRUPTED
    assert (tmp_path / "result.partial.jsonl").exists()
    assert bench(*command, "--force").code == 0
    assert read(tmp_path / "result.json")["complete"]
    assert not (tmp_path / "result.partial.jsonl").exists()


@pytest.mark.parametrize("columns", [60, 80])
def test_tables_fit_the_terminal(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    methods = ("--method", "none", "--method", "wide=streams:tree=best,nodes=8,k=3,depth=2+prompt_lookup:tokens=4")
    done = bench(*methods, "--out", tmp_path / "a")
    assert done.code == 0, done.err
    shown = bench("compare", tmp_path / "a", tmp_path / "a", bare=True)
    for line in (done.out + shown.out).replace(str(tmp_path), "").splitlines():
        assert len(line) <= columns, line
    for words in ("tokens/s", "speedup", "wide"):
        assert words in done.out


def test_compare_refuses_what_is_no_result(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert (
        f"there is no result {path}; 'anabranch bench --out FILE' writes one"
        in bench("compare", path, path, bare=True).err
    )
    (tmp_path / "there.json").write_text("{}")
    assert f"there is no result {path}; {tmp_path} has there.json" in bench("compare", path, path, bare=True).err
    (tmp_path / "a.partial.jsonl").write_text("")
    assert "is not finished; continue it with" in bench("compare", tmp_path / "a", path, bare=True).err
    path.write_text("{")
    assert "is not JSON" in bench("compare", path, path, bare=True).err
    path.write_text('{"schema": 1}')
    assert "schema 1, and this version reads 2" in bench("compare", path, path, bare=True).err
    path.write_text("[]")
    assert "is not a JSON object" in bench("compare", path, path, bare=True).err
    path.write_text('{"command": "anabranch bench shape toy", "timed": []}')
    assert "is a result of 'bench shape', which compare does not read" in bench("compare", path, path, bare=True).err


def test_a_chat_template_that_fails_is_one_sentence() -> None:
    """All verbs turn their prompts into ids here."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(InputError, match=r"the chat template of this model refuses this conversation: .*zero"):
        chat_ids(tokenizer, "the", raw=False)
    assert chat_ids(tokenizer, "the", raw=True) == tokenizer.encode("the")
