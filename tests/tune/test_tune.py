"""Fitting drafts to a machine, on toys: what is found is consistent, is kept, and is what "auto" means."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from anabranch.tune.latency import Measured, measure_steps
from click.testing import Result
from typer.testing import CliRunner

from anabranch import api, profiles
from anabranch import costs as drafter_costs
from anabranch.adapters.folder import LoadedAdapter
from anabranch.analysis.simulate import Cut, Latency
from anabranch.cli import app
from anabranch.costs import PassCosts
from anabranch.engine import Request
from anabranch.errors import FileError, InputError
from anabranch.methods import StepCosts, check_spec, make_drafter, with_costs
from anabranch.model import load
from anabranch.model.load import Target
from anabranch.profiles import Situation, find_profile, resolve, save_profile
from anabranch.tune.fit import BUDGETS, Candidate, Fit, candidates, fit
from small import as_target, decode, prompt, small, small_adapter


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small(), name="default")


@pytest.fixture(scope="module")
def adapter(target: Target) -> LoadedAdapter:
    return LoadedAdapter(small_adapter(target.decoder), {"sha256": "a" * 64})


PROMPTS = [prompt(5 + n, n) for n in range(3)]


def test_fit_chooses_what_it_predicts_to_be_fastest(target: Target, adapter: LoadedAdapter) -> None:
    heard: list[str] = []
    found = fit(
        target, adapter.adapter, PROMPTS, max_new_tokens=16, report=lambda what, done, total: heard.append(what)
    )
    rates = {candidate.spec: rate for candidate, _, rate in found.tried}
    assert rates[found.chosen.spec] == max(rates.values()) == found.prediction
    assert found.interval[0] <= found.prediction <= found.interval[1] or found.interval[0] == found.interval[1]
    assert found.plain > 0
    assert found.measured > 0
    assert {"step times", "replays", "check"} <= set(heard)
    # plain decoding takes one step a token, and trees of more nodes accept no less
    by_spec = {candidate.spec: prediction for candidate, prediction, _ in found.tried}
    assert by_spec["none"].mean_acceptance_length == 1.0
    lengths = [by_spec[f"streams:tree={nodes}"].mean_acceptance_length for nodes in BUDGETS]
    assert all(a <= b + 1e-9 for a, b in pairwise(lengths))
    # the chosen drafter can be had again by its name, and more nodes cost no less
    assert found.spec.startswith(found.chosen.spec.split("+")[0])
    check_spec(found.spec)
    for table in (*found.latency.rest.values(), *found.latency.drafts.values()):
        assert list(table.ms) == sorted(table.ms)
    assert set(found.costs) == {"streams", "streams+prompt_lookup"}


def test_a_step_costs_what_it_verifies_and_what_it_drafts() -> None:
    rest = {"none": Latency((1, 8), (5.0, 6.0)), "streams": Latency((1, 8), (7.0, 8.0))}
    drafts = {
        "none": Latency((1,), (0.1,)),
        "prompt_lookup": Latency((1,), (0.2,)),
        "streams": Latency((4, 8), (1.0, 2.0)),
        "merged": Latency((4, 8), (1.5, 2.5)),
    }
    measured = Measured(rest, drafts)
    assert measured.table("none").ms == pytest.approx((5.1, 6.1))
    assert measured.table("prompt_lookup").ms == pytest.approx((5.2, 6.2))
    assert measured.table("streams", 6).ms == pytest.approx((8.5, 9.5))
    assert measured.table("streams+prompt_lookup", 8, merged=True).ms == pytest.approx((9.5, 10.5))
    auto = Candidate("streams:tree=auto,nodes=8", "streams", Cut(nodes=8), most=8, auto=True)
    assert auto.full_spec(measured) == "streams:tree=auto,nodes=8,costs=1:9.5/8:10.5"


def test_predicted_acceptance_is_decoded_acceptance(target: Target, adapter: LoadedAdapter) -> None:
    """What a candidate is said to accept is what decoding with its drafter accepts."""
    found = fit(target, adapter.adapter, PROMPTS, max_new_tokens=24)
    asked = [Request(ids, 24, stop_ids=frozenset(target.config.eos_token_ids)) for ids in PROMPTS]
    exact = {
        "prompt_lookup:tokens=3",
        "streams:tree=8",
        "streams:tree=16,threshold=0.05",
        "streams:tree=32+prompt_lookup",
        "streams:tree=auto,nodes=16",
        "streams:tree=auto,nodes=32+prompt_lookup",
    }
    for candidate, prediction, _ in found.tried:
        if candidate.spec not in exact:
            continue
        exact.remove(candidate.spec)
        spec = candidate.full_spec(found.latency)
        said, steps = decode(target.decoder, asked, make_drafter(spec, target.decoder, adapter.adapter))
        counted = (sum(map(len, said)), sum(map(len, steps)))
        assert (prediction.tokens, prediction.steps) == counted, candidate.spec
    assert not exact


def test_without_an_adapter_streams_are_not_tried(target: Target) -> None:
    assert {candidate.method for candidate in candidates(streams=False)} == {"none", "prompt_lookup"}
    found = fit(target, None, PROMPTS[:1], max_new_tokens=8)
    assert list(found.latency.rest) == ["none"]
    assert found.chosen.spec == "none" or found.chosen.spec.startswith("prompt_lookup")


def test_bad_measurements_are_refused(target: Target) -> None:
    with pytest.raises(InputError, match="at least one prompt"):
        fit(target, None, [])
    with pytest.raises(InputError, match="2 rounds"):
        measure_steps(target, None, PROMPTS[0], rounds=1)


def test_auto_is_the_profile_or_the_usual(target: Target, adapter: LoadedAdapter) -> None:
    assert resolve("streams:tree=8", target, adapter) == "streams:tree=8"
    usual = resolve("auto", target, adapter)
    assert usual in profiles.USUAL
    assert "streams" not in resolve("auto", target, None)
    path = save_profile(Situation.of(target, adapter), "streams:tree=6", {"speedup": 2.0})
    assert resolve("auto", target, adapter) == "streams:tree=6"
    assert resolve("auto", target, None) != "streams:tree=6", "another adapter is another situation"
    costs = StepCosts((1, 16), (9.0, 12.0))
    fitted = "streams:tree=auto,nodes=20+prompt_lookup"
    assert resolve(fitted, target, adapter) == fitted
    save_profile(Situation.of(target, adapter), "none", {"costs": {"streams+prompt_lookup": str(costs)}})
    assert resolve(fitted, target, adapter) == with_costs(fitted, costs) != fitted
    assert resolve("streams:tree=auto", target, adapter) == "streams:tree=auto"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match="delete it"):
        find_profile(Situation.of(target, adapter))


def test_another_machine_has_another_profile(
    target: Target, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(Situation.of(target, adapter), "streams:tree=7", {})
    assert resolve("auto", target, adapter) == "streams:tree=7"
    monkeypatch.setattr(profiles, "processor_name", lambda: "another")
    assert resolve("auto", target, adapter) in profiles.USUAL


# milliseconds of passes, and what pays there
USUAL = {
    "1:6.6/8:7/12:7.5/16:10/24:13": "streams:tree=12+prompt_lookup",  # arithmetic hides behind the memory
    "1:7.1/5:8.7/6:9.1/8:9.8/12:12.4/24:22": "streams:tree=6+prompt_lookup",  # up to a point
    "1:10/3:10.5/8:30/16:60": "prompt_lookup:tokens=2",  # up to three rows
    "1:10/3:30/8:80": "none",  # not at all
    "1:10/24:10": "streams:tree=24+prompt_lookup",
}


@pytest.mark.parametrize("costs", USUAL)
def test_what_is_usual_follows_what_passes_cost(target: Target, costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafter_costs._known, target.decoder, PassCosts(StepCosts.parse(costs)))
    monkeypatch.setattr(drafter_costs, "UNPACKED", 0.3)
    assert profiles.usual(target.decoder, streams=True) == USUAL[costs]
    assert "streams" not in profiles.usual(target.decoder, streams=False)
    for spec in profiles.USUAL:
        check_spec(spec)


def test_the_command(target: Target, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(api, "load_target", lambda *_, **__: target)
    monkeypatch.setattr("anabranch.cli.models.fetch_default", lambda: None)
    monkeypatch.setattr("anabranch.adapters.folder.find_adapter", lambda *_: adapter)
    monkeypatch.setattr(api, "find_adapter", lambda *_: adapter)
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": " ".join(f"w{i}" for i in ids)}) + "\n" for ids in PROMPTS), encoding="utf-8"
    )
    asked = ["tune", "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8", "--raw"]
    result = CliRunner().invoke(app, [*asked, "--json", "--force"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert Path(record["profile"]).is_file()
    assert api.load("default").drafter == record["drafter"]
    shown = CliRunner().invoke(app, [*asked, "--dry"])
    assert shown.exit_code == 0
    assert "plain decoding" in shown.stdout
    refused = CliRunner().invoke(app, [*asked, "--figure", "x.pdf"])
    assert isinstance(refused.exception, InputError)


def run_tune(found: Fit, target: Target, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """The command, with a measurement that was made before."""
    monkeypatch.setattr(load, "load_target", lambda *_, **__: target)
    monkeypatch.setattr("anabranch.cli.models.fetch_default", lambda: None)
    monkeypatch.setattr("anabranch.adapters.folder.find_adapter", lambda *_: None)
    monkeypatch.setattr("anabranch.tune.fit.fit", lambda *_, **__: found)
    file = Path(os.environ["ANABRANCH_HOME"]).parent / "asked.jsonl"
    file.write_text('{"request": "w1 w2"}\n', encoding="utf-8")
    given = ["--prompts", str(file), "--field", "request", "--max-new-tokens", "8", "--raw", *options]
    return CliRunner().invoke(app, ["tune", *given])


def rested(found: Fit) -> Fit:
    """As measured on a machine at rest."""
    return replace(found, predicted_plain=found.plain, latency=replace(found.latency, busy=False))


@pytest.fixture(scope="module")
def fitted(target: Target, adapter: LoadedAdapter) -> Fit:
    return rested(fit(target, adapter.adapter, PROMPTS[:1], max_new_tokens=8))


def test_the_result_comes_first_and_fits_60_columns(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = next(c for c, _, _ in fitted.tried if c.spec == "streams:tree=auto,nodes=32+prompt_lookup")
    result = run_tune(replace(fitted, chosen=chosen), target, monkeypatch, "--dry")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{fitted.speedup:.2f}x with {chosen.spec}"
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith(("verify ", "draft ")) for line in lines) == 6


@pytest.mark.parametrize("why", ["drift", "busy"])
def test_a_doubtful_profile_is_not_written(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    path = Situation.of(target, None).path()
    found = replace(fitted, predicted_plain=fitted.plain / 0.8)
    if why == "busy":
        found = replace(fitted, latency=replace(fitted.latency, busy=True))
    refused = run_tune(found, target, monkeypatch)
    assert refused.exit_code == 1
    assert refused.stdout.splitlines()[0].endswith(f"x with {found.chosen.spec}")
    assert ("0.80 times as fast" if why == "drift" else "the machine was busy") in refused.stderr
    assert "no profile was written" in refused.stderr
    assert not path.exists()
    assert run_tune(found, target, monkeypatch, "--dry").exit_code == 0
    assert run_tune(found, target, monkeypatch, "--force").exit_code == 0
    assert path.is_file()
    path.unlink()
    assert run_tune(fitted, target, monkeypatch).exit_code == 0
    assert path.is_file()


def test_a_figure_is_not_replaced_without_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(load, "load_target", lambda *_, **__: 1 / 0)
    (tmp_path / "x.png").write_text("", encoding="utf-8")
    refused = CliRunner().invoke(app, ["tune", "--figure", str(tmp_path / "x.png")])
    assert isinstance(refused.exception, FileError)
    assert "--force" in str(refused.exception)


def test_a_figure_that_could_not_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(load, "load_target", lambda *_, **__: 1 / 0)
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["tune", "--figure", str(tmp_path / "file" / "x.png")])
    assert isinstance(refused.exception, FileError)
    assert "the figure cannot be written to" in str(refused.exception)
    assert "choose another --figure" in str(refused.exception)


def test_results_are_told_before_the_figure_is_drawn(
    target: Target, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    found = rested(fit(target, adapter.adapter, PROMPTS[:1], max_new_tokens=8))
    long = "streams:tree=20,threshold=0.0123456789,nodes=20+prompt_lookup:tokens=10"
    found.tried.append((replace(found.chosen, spec=long), found.tried[0][1], 12345.6))
    monkeypatch.setattr("anabranch.tune.figure.draw", lambda *_: 1 / 0)
    result = run_tune(found, target, monkeypatch, "--dry", "--figure", str(tmp_path / "x.png"))
    assert isinstance(result.exception, ZeroDivisionError)
    assert "plain decoding" in result.stdout
    row = next(line for line in result.stdout.splitlines() if long in line)
    assert "12345.6" in row


def test_the_figure(target: Target, adapter: LoadedAdapter, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from anabranch.tune.figure import draw

    found = fit(target, adapter.adapter, PROMPTS[:1], max_new_tokens=8)
    found.chosen = Candidate("streams:tree=8", "streams", Cut(nodes=8))
    draw(found, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").startswith("<?xml")
