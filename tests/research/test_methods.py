"""Comparing methods: their drafters by budget, their facts, what is measured of each, and a run that is stopped."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import by_target
import compare_methods
import comparison_page
import comparison_tables
from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.bench.machine import measure_machine
from anabranch.bench.suites import SuitePrompt
from anabranch.capabilities import StandIn
from anabranch.errors import AdapterError, FileError, InputError
from anabranch.loading import Loaded
from anabranch.methods import Method, methods
from anabranch.methods.draft_model import entry as draft_model
from anabranch.methods.draft_model.module import DraftConfig
from anabranch.methods.spec import Part
from anabranch.model.load import Target, load_target
from case_parts import certificate, one_row, several_rows, step_costs
from cases import (
    Case,
    adapter_cases,
    contenders,
    facts,
    free_cases,
    in_folder,
    opened,
    rejection_spec,
    unique,
)
from intervals import speedup_interval, task_cell
from parts import Parts
from toy_text import ToyFolders
from verbs import Anabranch


@pytest.fixture(scope="module")
def target(toys: ToyFolders) -> Target:
    return load_target(str(toys.model))


@pytest.fixture(scope="module")
def drafts(toys: ToyFolders, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft model for the toy, which was trained for 90 seconds."""
    folder = tmp_path_factory.mktemp("drafts")
    method = draft_model.METHOD
    assert method.trained is not None
    torch.manual_seed(0)
    module = method.trained.make(target.config, DraftConfig(16, 1, 2, 32), None)
    training = {"seconds": 90.0, "answer_tokens": 1000, "data_sha256": "5" * 64, "options": {"epochs": 2.0}}
    identity = TargetIdentity.of(target)
    save_adapter(folder, module, method=method, target=identity, training=training, measured={}, dtype=torch.float32)
    return folder


def streams(toys: ToyFolders) -> Case:
    (case,) = adapter_cases([f"streams={toys.adapter}"])
    return case


def prompts(target: Target) -> list[tuple[SuitePrompt, list[int]]]:
    texts = ("the thing the thing", "other", "a the other the")
    return [(SuitePrompt(str(n), f"task{n % 2}", text), target.tokenizer.encode(text)) for n, text in enumerate(texts)]


# -- cases ---------------------------------------------------------------------------------------------------------
def test_who_reads_the_same_weights_takes_part(toys: ToyFolders, drafts: Path) -> None:
    cases = adapter_cases([f"streams={toys.adapter}", f"draft_model={drafts}", f"again={drafts}"])
    assert [case.name for case in cases] == ["streams", "draft_model", "staged", "again", "staged (again)"]
    assert [case.method.name for case in cases[1:3]] == ["draft_model", "staged"]
    assert all(case.tuned is None for case in cases)
    with pytest.raises(InputError, match="two methods are labelled 'streams'"):
        unique([*cases, cases[0]])
    assert unique(cases) == cases


def test_an_adapter_with_a_target_of_its_own(toys: ToyFolders, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter.safetensors"):
        (tmp_path / name).write_bytes((toys.adapter / name).read_bytes())
    shutil.copytree(toys.model, tmp_path / "model")
    (case,) = adapter_cases([f"joint={tmp_path}"])
    assert case.tuned == tmp_path / "model"
    weights = tmp_path / "model" / "model.safetensors"
    assert facts(case, load_target(str(toys.model)))["tuned_bytes"] == weights.stat().st_size
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    (case,) = adapter_cases([f"draft_model={tmp_path}"])
    assert case.tuned is None, "a draft model lies there as well, and is nobody's target"


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("folder", InputError, "LABEL=FOLDER"),
        ("=folder", InputError, "LABEL=FOLDER"),
        ("heads=no-such", AdapterError, "there is no adapter folder no-such"),
    ],
)
def test_adapters_that_are_refused(text: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        adapter_cases([text])


def test_all_adapters_of_a_folder(drafts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no adapter folder in"):
        in_folder(tmp_path)
    (tmp_path / "draft-model").symlink_to(drafts)
    (tmp_path / "log.txt").write_text("")
    assert in_folder(tmp_path) == [f"draft-model={tmp_path / 'draft-model'}"]
    assert [case.name for case in adapter_cases(in_folder(tmp_path))] == ["draft-model", "staged"]


def test_the_row_of_a_paper_keeps_its_settings(toys: ToyFolders) -> None:
    (case,) = adapter_cases([f"streams:tree=chain,placement=ride={toys.adapter}"])
    assert case.name == "streams:tree=chain,placement=ride"
    found = {name: str(spec) for name, spec in contenders(case, [4, 8]).items()}
    assert found == {"as given": "streams:tree=chain,placement=ride"}, "its size is fixed"
    assert [case.name for case in free_cases(["draft_model:model=toy"])] == ["draft_model:model=toy"]


def test_methods_without_an_adapter() -> None:
    named = free_cases(["prompt_lookup:ngram=2", "lookahead", "staged"])  # whose draft model may be one that ships
    assert [case.name for case in named] == ["prompt_lookup:ngram=2", "lookahead", "staged"]
    with pytest.raises(InputError, match="not combinations"):
        free_cases(["suffix+prompt_lookup"])
    for text in ("streams", "medusa"):
        with pytest.raises(InputError, match="needs an adapter"):
            free_cases([text])


def test_drafters_by_budget(toys: ToyFolders) -> None:
    def shown(case: Case) -> dict[str, str]:
        return {name: str(spec) for name, spec in contenders(case, [8, 16]).items()}

    methods_shown = shown(streams(toys))
    assert methods_shown == {"8 nodes": "streams:nodes=8", "16 nodes": "streams:nodes=16", "auto": "streams:tree=auto"}
    lookup, suffix, window, table = free_cases(["prompt_lookup:ngram=2", "suffix", "lookahead", "ngram:data=T"])
    assert shown(lookup) == {
        "8 nodes": "prompt_lookup:tokens=6,ngram=2",
        "16 nodes": "prompt_lookup:ngram=2",
        "auto": "prompt_lookup:tokens=auto,ngram=2",
    }
    # each prompt is decoded by several drafters, none of which may know its continuation from another
    assert shown(suffix)["8 nodes"] == "suffix:nodes=8,store=0"
    assert shown(window) == {"as given": "lookahead"}
    assert shown(table)["8 nodes"] == "ngram:data=T,nodes=8"


@pytest.mark.parametrize("method", [m for m in methods() if m.trained or m.reads], ids=lambda m: m.name)
def test_every_trained_method_has_the_same_budgets(method: Method) -> None:
    specs = contenders(Case("any", Part(method, method.settings())), [8, 16])
    assert list(specs) == ["8 nodes", "16 nodes", "auto"]
    stand_in = StandIn.of("cpu", "float32", "none")
    built = {name: stand_in.drafter(str(spec)) for name, spec in specs.items()}
    assert [built[name].max_nodes for name in ("8 nodes", "16 nodes")] == [8, 16]
    assert [drafter.adaptive for drafter in built.values()] == [False, False, True]


def test_rejection_needs_sampled_drafts(toys: ToyFolders, target: Target, drafts: Path) -> None:
    case = streams(toys)
    assert str(rejection_spec(case, opened(case, target))) == "streams:tree=chain"
    drafting, _ = adapter_cases([f"draft_model={drafts}"])
    assert str(rejection_spec(drafting, opened(drafting, target))) == "draft_model:tree=chain"
    (lookup,) = free_cases(["prompt_lookup"])
    assert rejection_spec(lookup, Loaded(target, ())) is None


def test_facts(toys: ToyFolders, target: Target, drafts: Path, tmp_path: Path) -> None:
    drafting, staged = adapter_cases([f"draft_model={drafts}"])
    known = facts(drafting, target)
    assert facts(staged, target) == known
    assert (known["seconds"], known["seconds_from"], known["epochs"]) == (90.0, "adapter", 2.0)
    assert known["data_sha256"] == "5" * 64
    assert known["extra_parameters"] == opened(drafting, target).adapters[0].module.num_parameters()
    assert known["bytes"] > 4 * known["extra_parameters"]
    assert known["parameter_share"] == pytest.approx(known["extra_parameters"] / target_size(target), rel=0.01)
    lookup, named = free_cases(["lookahead", f"draft_model:model={toys.model}"])
    assert facts(lookup, target)["extra_parameters"] == 0
    assert facts(named, target)["parameter_share"] == 1.0  # the target itself
    # an adapter of before: its log says how long it took
    for name in ("adapter_config.json", "adapter.safetensors"):
        (tmp_path / name).write_bytes((toys.adapter / name).read_bytes())
    (old,) = adapter_cases([f"streams={tmp_path}"])
    assert "seconds" not in facts(old, target)
    (tmp_path / "training").mkdir()
    # a second a step, but for a pause of 60 seconds between steps 10 and 20
    lines = [(10, 30.0), (20, 80.0), (30, 30.0), (40, 0.0)]
    text = "".join(
        json.dumps({"step": step, "steps": 40, "loss": 1.0, "evaluation": None, "seconds_left": left}) + "\n"
        for step, left in lines
    )
    (tmp_path / "training" / "log.jsonl").write_text(text)
    known = facts(old, target)
    assert (known["seconds"], known["seconds_from"]) == (40.0, "log")


def target_size(target: Target) -> int:
    return sum(parameter.numel() for parameter in target.decoder.parameters())


def test_facts_of_a_datastore(toys: ToyFolders, target: Target, tmp_path: Path, anabranch: Anabranch) -> None:
    text, store = tmp_path / "text.txt", tmp_path / "store"
    text.write_text("the thing the thing the other")
    anabranch("train", "datastore", "--model", toys.model, "--text", text, "--out", store)
    (case,) = free_cases([f"rest:data={store}"])
    known = facts(case, target)
    assert known["tables"]["tokens"] == len(target.tokenizer.encode(text.read_text()))
    assert known["tables"]["documents"] == 1
    headers = 3 * 128
    assert known["bytes"] == sum(path.stat().st_size for path in store.glob("*.npy")) - headers


# -- parts ---------------------------------------------------------------------------------------------------------
def test_one_prompt_at_a_time(toys: ToyFolders, target: Target) -> None:
    case, asked = streams(toys), prompts(target)
    loaded = opened(case, target)
    specs = contenders(case, [4, 8])
    plain, *drafted = one_row(loaded, specs, asked, asked[0][1], max_new_tokens=12)
    assert [record["name"] for record in drafted] == ["4 nodes", "8 nodes", "auto"]
    assert plain["relative_step"] == 1.0
    assert plain["mean_acceptance_length"] == 1.0
    for record in drafted:
        assert record["equal_outputs"] == 3
        assert record["mean_acceptance_length"] >= 1
        assert set(record["by_task"]) == {"task0", "task1"}
        assert record["relative_step"] > 0
    chain = rejection_spec(case, loaded)
    assert chain is not None
    tried = {"4 nodes": specs["4 nodes"], "rejection": chain}

    records = one_row(
        loaded, tried, asked, [1], max_new_tokens=12, sampling={"temperature": 1.0}, rejection=("rejection",)
    )
    assert records[1]["equal_outputs"] == 3
    assert "equal_outputs" not in records[2]
    refused = one_row(
        loaded, tried, asked, [1], max_new_tokens=12, sampling={"temperature": 1.0}, rejection=("4 nodes",)
    )
    assert "rejection" in refused[1]["error"]
    assert "error" not in refused[2]


def test_the_parts_of_a_step() -> None:
    plain = {"step_ms_by_part": {"draft": 0.0, "forward": 9.0, "verify": 0.5, "commit": 0.5, "prepare": 0.0}}
    drafted = {"step_ms_by_part": {"draft": 1.0, "forward": 11.0, "verify": 0.5, "commit": 0.5, "prepare": 2.0}}
    quartiles = {"step_ms_quartiles": [9.0, 10.0, 11.0]}, {"step_ms_quartiles": [14.0, 15.5, 16.0]}
    costs = step_costs(drafted | quartiles[1], plain | quartiles[0])
    assert costs == {
        "draft_ms": 3.0,
        "pass_ms": 11.0,
        "draft_share": 0.3,
        "pass_share": 1.1,
        "relative_step": 1.55,
    }
    # texts of one step have no later ones to time
    assert "relative_step" not in step_costs(drafted | {"step_ms_quartiles": None}, plain | quartiles[0])


def test_several_prompts_at_a_time_and_a_certificate(target: Target) -> None:
    (case,) = free_cases(["suffix:store=4096"])
    loaded, asked = opened(case, target), [ids for _, ids in prompts(target)]
    specs = {"as given": contenders(case, [])["as given"]}
    plain, drafted = several_rows(loaded, specs, asked, rows=2, max_new_tokens=12, repeats=2)
    assert plain["ratio"] == [1.0, 1.0, 1.0]
    assert drafted["equal_outputs"] == plain["equal_outputs"] == 3
    once = several_rows(loaded, specs, asked, rows=2, max_new_tokens=12, repeats=1)[1]
    # in the second repeat it does not know the texts of the first
    assert drafted["mean_acceptance_length"] == once["mean_acceptance_length"]
    result = certificate(loaded, specs["as given"], asked, rows=(1, 2), max_new_tokens=12)
    assert result["verdict"] == "equal"
    assert result["rows"] == {"1": {"equal": 3, "tie": 0, "BUG": 0}, "2": {"equal": 3, "tie": 0, "BUG": 0}}
    assert result["dtype"] == "float32"


# -- the result file -----------------------------------------------------------------------------------------------
def test_results_are_continued_with_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Parts.check(path, resume=False, force=False)
    with pytest.raises(InputError, match="nothing to resume"):
        Parts.check(path, resume=True, force=False)
    made = Parts(path, {"run": {"limit": 3, "command": "one"}}, [])
    made.of("streams")["parts"] = {"sampled": []}
    made.write()
    for given in ({"resume": False, "force": False}, {"resume": True, "force": True}):
        with pytest.raises(InputError):
            Parts.check(path, **given)
    again = Parts.resume(path, {"limit": 3, "command": "two"})
    assert again.of("streams")["parts"] == {"sampled": []}
    again.write(complete=True)
    assert json.loads(path.read_text())["complete"]
    with pytest.raises(InputError, match=r"another limit \(3, now 4\)"):
        Parts.resume(path, {"limit": 4, "command": "one"})
    path.write_text('{"run": 1}')
    with pytest.raises(FileError, match="not the result"):
        Parts.resume(path, {})


def test_a_result_takes_further_methods_but_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Parts(path, {"run": {"methods": [["a", "eagle"], ["b", "suffix"]]}}, [{"name": "a"}, {"name": "b"}]).write()
    more = [["c", "space"], ["a", "eagle"], ["b", "suffix"]]
    again = Parts.resume(path, {"methods": more})
    again.of("c")
    again.write()
    result = json.loads(path.read_text())
    assert result["run"]["methods"] == more
    assert [record["name"] for record in result["compared"]] == ["a", "b", "c"]
    with pytest.raises(InputError, match="another methods"):
        Parts.resume(path, {"methods": more[1:]})


# -- the scripts ---------------------------------------------------------------------------------------------------
def run_script(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *map(str, words)])
    compare_methods.main()


def test_the_scripts(toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_methods, "measure_machine", partial(measure_machine, buffer_bytes=2**20, repeats=2))
    monkeypatch.setattr("anabranch.bench.machine.SIDE", {"cpu": 64})
    suite, out = tmp_path / "suite.jsonl", tmp_path / "methods-toy.json"
    suite.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("the thing", "other")))
    words: list[Any] = ["--model", toys.model, "--dtype", "float32", "--weights", "none", "--suite", suite]
    words += ["--adapter", f"streams={toys.adapter}", "--method", "lookahead", "--budgets", 4, "--repeats", 1]
    words += ["--limit", 2, "--rows", 2, "--rows-limit", 2, "--max-new-tokens", 6]
    words += ["--certify-limit", 1, "--certify-tokens", 4, "--certify-rows", 1, "--out", out]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(compare_methods, "several_rows", stop)
        with pytest.raises(SystemExit, match="--resume continues"):
            run_script(monkeypatch, *words)
    kept = json.loads(out.read_text())
    assert not kept["complete"]
    assert list(kept["compared"][0]["parts"]) == ["1 row, none", "sampled"]
    with pytest.raises(SystemExit, match="exists already"):
        run_script(monkeypatch, *words)
    run_script(monkeypatch, *words, "--resume")
    result = json.loads(out.read_text())
    assert result["complete"]
    names = ["1 row, none", "sampled", "2 rows, none", "certificate"]
    assert [list(method["parts"]) for method in result["compared"]] == [names, names]
    assert result["compared"][0]["parts"]["sampled"] == kept["compared"][0]["parts"]["sampled"]
    assert str(tmp_path) not in out.read_text()
    text = "\n".join(comparison_page.sections(result, "###"))
    for title in ("Summary", "Mean acceptance length by task", "Cost of a step"):
        assert f"### {title}\n" in text
    assert "equal (1/1)" in text
    assert "### Not measured" not in text
    chart = comparison_page.chart(result)
    assert chart.count("<circle") == 2
    assert "streams, 4 nodes" in chart
    result["compared"][1]["parts"]["certificate"] = {"error": "no room"}
    assert "| `lookahead` | certificate |  | no room |" in comparison_page.sections(result, "###")


def test_the_page_is_that_of_the_newest_result() -> None:
    for name, text in comparison_page.outputs().items():
        assert (comparison_page.ROOT / name).read_text(encoding="utf-8") == text, name


# -- intervals ------------------------------------------------------------------------------------------------------
def rated(tokens: list[int], rates: list[float]) -> dict[str, Any]:
    return {"tokens_by_prompt": tokens, "tokens_per_second_by_prompt": rates}


def test_a_speedup_has_an_interval_over_prompts() -> None:
    plain, same, mixed = rated([10, 30], [10, 10]), rated([10, 30], [20, 20]), rated([10, 30], [10, 30])
    assert speedup_interval(same, plain, [0, 1]) == pytest.approx((2, 2, 2)), "no spread over prompts, no interval"
    assert speedup_interval(mixed, plain, [0, 1]) == pytest.approx((2, 1, 3)), "4 seconds by 2, and one prompt alone"
    assert speedup_interval(mixed, plain, [1]) == pytest.approx((3, 3, 3))
    assert speedup_interval(mixed, plain, []) is None
    assert speedup_interval({}, plain, [0]) is None
    assert [task_cell(mixed, plain, ["qa", "rag"], task) for task in (None, "rag", "other")] == [
        "2.00 (1.00-3.00)",
        "3.00 (3.00-3.00)",
        "-",
    ]


def test_the_speeds_by_task_have_intervals_where_rates_are_kept() -> None:
    by_task = {"qa": {"prompts": 1, "speedup_total": 1.0}, "rag": {"prompts": 1, "speedup_total": 3.0}}
    record = {"name": "8 nodes", "speedup_total": 2.0, "by_task": by_task, **rated([10, 30], [10, 30])}
    parts = {"1 row, none": [{"name": "none", **rated([10, 30], [10, 10])}, record]}
    result = {"run": {"tasks": ["qa", "rag"]}, "compared": [{"name": "heads", "parts": parts}]}
    assert comparison_tables.speeds(result)[-2] == (
        "| `heads` | 8 nodes | 2.00 (1.00-3.00) | 1.00 (1.00-1.00) | 3.00 (3.00-3.00) |"
    )
    assert "A cell of one task rests on 1 prompt." in comparison_tables.speeds(result)[0]
    del result["run"]["tasks"]
    assert comparison_tables.speeds(result)[-2] == "| `heads` | 8 nodes | 2.00 | 1.00 | 3.00 |"


def test_a_method_that_papers_rank_higher_has_its_reasons() -> None:
    costs = {"draft_share": 1.0, "pass_share": 2.0, "relative_step": 3.0}
    record = {"name": "16 nodes", "mean_acceptance_length": 1.5, "acceptance_by_depth": [0.4, 0.1], **costs}
    method = {"name": "eagle", "parts": {"1 row, none": [{"name": "none"}, record]}}
    (told, _) = comparison_tables.ranks({"compared": [method, {**method, "name": "streams"}]})
    assert "has 1.50 tokens a pass" in told
    assert "accepted in 40% of the steps, the second in 25% of those" in told
    assert "gain from 3.0 tokens on" in told


def test_the_last_of_several_trainings_is_marked() -> None:
    (several,) = comparison_tables.EARLIER
    shown = [
        comparison_tables.minutes({"seconds": 90.0, "adapter": "a" * 64, "init": None}),
        comparison_tables.minutes({"seconds": 90.0, "adapter": "a" * 64, "init": "b" * 64}),
        comparison_tables.minutes({"seconds": 88.0, "adapter": several, "init": "b" * 64}),
        comparison_tables.minutes({"extra_parameters": 0}),
    ]
    assert shown == ["2", "2 (the last training)", "5", "-"]


def test_acceptance_by_depth_has_the_largest_draft() -> None:
    records = [
        {"name": "none", "acceptance_by_depth": []},
        {"name": "4 nodes", "acceptance_by_depth": [0.3]},
        {"name": "8 nodes", "acceptance_by_depth": [0.5, 0.126]},
        {"name": "auto", "acceptance_by_depth": [0.9]},
    ]
    lines = comparison_tables.depths({"compared": [{"name": "heads", "parts": {"1 row, none": records}}]})
    assert lines == ["| method | draft | 1 | 2 |", "|---|---|---:|---:|", "| `heads` | 8 nodes | 50 | 13 |", ""]


# -- targets --------------------------------------------------------------------------------------------------------
def compared(budget: int, lengths: dict[str, float], *, device: str = "cpu", date: str = "2026-01-01") -> Any:
    """A result of ``compare_methods.py`` in which the speedup is half the length."""
    parts = {
        name: [{"name": f"{budget} nodes", "mean_acceptance_length": length, "speedup_total": length / 2}]
        for name, length in lengths.items()
    }
    return {
        "run": {"budgets": [budget], "limit": 12, "max_new_tokens": 64},
        "environment": {"device": device, "date": date, "kernels": "avx2"},
        "compared": [
            {"name": name, "parts": {"1 row, none": each}, "facts": {"answer_tokens": 1_000_000, "epochs": 0.5}}
            for name, each in parts.items()
        ],
    }


def test_targets_next_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_target, "contenders", list)
    small = {
        "older": compared(8, {"eagle": 9.0, "hydra": 1.0}),
        "small": compared(8, {"eagle": 2.0, "hydra": 1.0, "space": 3.0}, date="2026-01-02"),
    }
    middle = {
        "middle": compared(8, {"eagle": 1.4, "hydra": 1.6}),
        "gpu": compared(8, {"eagle": 7.0, "hydra": 7.0}, device="GPU", date="2026-01-03"),
    }
    text = "\n".join(by_target.lines(small, middle))
    assert "| `eagle` | 8 nodes | 2.00 | 1.00 | 1.40 | 0.70 | 0.5 and 0.5 |" in text
    assert "space" not in text, "it is measured on one target only"
    assert "- 0.5B with 8 nodes: `middle` (avx2 on two cores, 12 prompts, 64 new tokens)" in text
    orders = "`eagle` > `hydra` on the 135M, `hydra` > `eagle` on the 0.5B"
    assert f"By length, 8 nodes, in `small` and `middle`: {orders}." in text
    assert "16 nodes" not in text
    newer = {"newer": compared(8, {"eagle": 1.5}, date="2026-01-04"), **middle}
    assert "By length" not in "\n".join(by_target.lines(small, newer)), "the two were not measured together"
