"""Fitting speculation to a machine, on toys: what is found is consistent, is kept, and "auto" starts from it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from anabranch.adapters.folder import LoadedAdapter
from anabranch.api import Model
from anabranch.cli import app
from anabranch.control import profiles
from anabranch.control.costs import StepCosts
from anabranch.control.profiles import Situation, find_profile, save_profile, settle, tuned_drafter
from anabranch.decoding.engine import Request
from anabranch.drafting.settings import Settings
from anabranch.errors import FileError, InputError
from anabranch.loading import Loaded
from anabranch.methods import Drafter, Method, Row, make_drafter, parse_spec, register, resolve_spec
from anabranch.methods import registry as methods
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.model.load import Target
from anabranch.tree import DraftTree
from anabranch.tune import fit as fitting
from anabranch.tune.candidates import MOST, find_candidates
from anabranch.tune.fit import Fit, Tried, fit
from anabranch.tune.timing import DraftTimes, measure_times
from small import as_target, decode, prompt, randomise, small, small_adapter


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small(), name="default")


@pytest.fixture(scope="module")
def adapter(target: Target) -> LoadedAdapter:
    return LoadedAdapter(small_adapter(target.decoder), {"sha256": "a" * 64}, methods.streams.METHOD)


PROMPTS = [prompt(5 + n, n) for n in range(3)]


@pytest.fixture(scope="module")
def found(target: Target, adapter: LoadedAdapter) -> Fit:
    """With a few steps timed, since no test depends on how well: they are most of the time that tuning takes."""
    with mock.patch.object(fitting, "measure_times", partial(measure_times, rounds=2, steps=1)):
        return fit(target, [adapter.module], PROMPTS, max_new_tokens=24)


@pytest.mark.thorough
def test_what_is_predicted_to_be_fastest_is_checked(found: Fit) -> None:
    rates = {str(one.candidate.spec): one.rate for one in found.tried}
    assert rates[str(found.predicted.spec)] == max(rates.values()) == found.prediction
    assert found.interval[0] <= found.interval[1]
    assert min(found.plain, found.auto, found.measured) > 0
    assert found.speedup == max(found.plain, found.auto, found.measured) / found.plain
    # plain decoding takes one step a token, and trees of more nodes accept no less
    by_spec = {str(one.candidate.spec): one.prediction for one in found.tried}
    assert by_spec["none"].mean_acceptance_length == 1.0
    sized = [f"streams:nodes={nodes}" for nodes in methods.streams.BUDGETS]
    lengths = [by_spec[str(parse_spec(spec))].mean_acceptance_length for spec in sized]
    assert all(a <= b + 1e-9 for a, b in pairwise(lengths))
    # every specification can be read again
    for spec in rates:
        assert str(parse_spec(spec)) == spec


@pytest.mark.thorough
def test_larger_drafts_and_wider_passes_cost_no_less(found: Fit) -> None:
    for times in found.times.groups.values():
        for table in (times.passes, times.draft, times.prepare):
            assert table is None or list(table.ms) == sorted(table.ms)
    assert set(found.costs) == {"pass", "draft", "prepare"}
    for text in found.costs.values():
        StepCosts.parse(text)
    assert found.times.groups["none"].draft is None


def test_a_step_costs_what_it_verifies_drafts_and_prepares() -> None:
    times = DraftTimes(StepCosts((1, 8), (5.0, 6.4)), StepCosts((4, 8), (1.0, 2.0)), StepCosts((1, 3), (0.5, 0.7)))
    assert times.step_ms(1, 4, 1) == pytest.approx(5.0 + 1.0 + 0.5)
    assert times.step_ms(8, 6, 2) == pytest.approx(6.4 + 1.5 + 0.6)
    assert DraftTimes(times.passes).step_ms(8, 1, 0) == pytest.approx(6.4)
    assert times.to_dict() == {"pass": "1:5/8:6.4", "draft": "4:1/8:2", "prepare": "1:0.5/3:0.7"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spec",
    [
        "prompt_lookup:tokens=3",
        "streams:nodes=8",
        "streams:nodes=20",
        "streams:nodes=5,copy=yes+prompt_lookup",
        "streams:nodes=32,copy=yes+prompt_lookup",
    ],
)
def test_predicted_acceptance_is_decoded_acceptance(
    found: Fit, target: Target, adapter: LoadedAdapter, spec: str
) -> None:
    """The predicted acceptance of a candidate is that of decoding with its drafter."""
    (prediction,) = (one.prediction for one in found.tried if one.candidate.spec == parse_spec(spec))
    asked = [Request(ids, 24, stop_ids=frozenset(target.config.eos_token_ids)) for ids in PROMPTS]
    tokens, steps = decode(target.decoder, asked, make_drafter(spec, target.decoder, adapter.module))
    assert (prediction.tokens, prediction.steps) == (sum(map(len, tokens)), sum(map(len, steps)))


def test_candidates_are_those_of_the_registry(target: Target, adapter: LoadedAdapter) -> None:
    # the toy has no tables and one trained module: no draft model, whose drafter "staged" needs too
    here = [m for m in methods.methods() if m.tables is None and (m.trained is None or m.name == "streams")]
    here = [m for m in here if m.name != "staged"]
    alone = {method.name for method in here if next(iter(method.candidates(MOST)), None) is not None}
    with_adapter = find_candidates(target.decoder, [adapter.module])
    groups = {candidate.group for candidate in with_adapter.tried}
    assert groups == {"none", *alone, "streams,copy+prompt_lookup"}
    (auto,) = with_adapter.choices
    assert auto.spec == resolve_spec("auto", adapter.module)
    assert auto.adaptive
    assert set(with_adapter.recorded) == {*alone, "streams,copy"}
    without = find_candidates(target.decoder, [])
    trained = {method.name for method in methods.methods() if method.trained is not None}
    assert {candidate.group for candidate in without.tried} == {"none", *alone} - trained
    assert [each.spec for each in without.choices] == [resolve_spec("auto")]


@pytest.mark.thorough
def test_each_arm_of_auto_is_measured(
    target: Target, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heads = MedusaModule(target.config, MedusaConfig(num_heads=2))
    randomise(heads, seed=3, scale=0.1)
    other = LoadedAdapter(
        heads.eval().requires_grad_(False), {"sha256": "b" * 64, "measured": {}}, methods.medusa.METHOD
    )
    both = (replace(adapter, record={**adapter.record, "measured": {}}), other)
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_: Loaded(target, both))
    (tmp_path / "p.jsonl").write_text('{"prompt": "w5 w6 w5"}\n', encoding="utf-8")
    asked = ["tune", "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8", "--raw", "--force"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    choices = [str(each) for each in resolve_spec("auto", adapter.module, heads).choices]
    assert all(f"tokens/s measured with {each}" in result.stdout for each in choices)
    profile = find_profile(Situation.of(target, both))
    assert profile is not None
    assert list(profile["choices"]) == choices
    assert set(profile["times"]) >= {"streams,copy+prompt_lookup", "medusa+prompt_lookup"}
    known = settle(target, both)
    assert known.origin == "tuned"
    assert known.choice is not None
    found = known.choice.yields()[1]
    best = max(found, key=lambda each: found[each].speedup)
    assert best == max(choices, key=profile["choices"].__getitem__)
    assert found[best].speedup == pytest.approx(profile["choices"][best] / profile["plain_tokens_per_second"], rel=0.01)


@dataclass(frozen=True)
class RepeatSettings(Settings):
    nodes: int = 4

    @property
    def budget(self) -> int:
        return self.nodes


class RepeatDrafter(Drafter):
    """Proposes the last token again and again."""

    name = "repeat"

    def __init__(self, nodes: int) -> None:
        self.max_nodes = nodes

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        counts = [max(0, min(budget - 1, self.max_nodes - 1, row.max_depth)) for row in rows]
        return [
            DraftTree.chain(
                row.root, [row.root] * n, source="repeat", log_probs=list(np.log(0.5) * np.arange(1, n + 1))
            )
            for row, n in zip(rows, counts, strict=True)
        ]


@pytest.mark.thorough
def test_a_method_of_ones_own_is_tuned(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registry", methods.methods())
    register(
        Method(
            name="repeat",
            summary="the last token again",
            settings=RepeatSettings,
            build=lambda target, settings, module: RepeatDrafter(settings.nodes),
            candidates=lambda nodes: (RepeatSettings(n) for n in (2, 4) if n <= nodes),
            default=True,
        )
    )
    found = fit(target, [], PROMPTS[:1], max_new_tokens=8)
    tried = {str(one.candidate.spec) for one in found.tried}
    assert {"repeat:nodes=2", "repeat", "prompt_lookup+repeat"} <= tried
    assert found.auto_spec == resolve_spec("auto")


def test_bad_measurements_are_refused(target: Target) -> None:
    with pytest.raises(InputError, match="at least one prompt"):
        fit(target, [], [])
    with pytest.raises(InputError, match="at least 2 rounds"):
        measure_times(target.decoder, {"none": make_drafter("none", target.decoder)}, PROMPTS[0], rounds=1)


def test_auto_starts_from_the_profile(target: Target, adapter: LoadedAdapter) -> None:
    costs = {"pass": "1:9/16:12", "draft": "12:0.5", "prepare": "4:1.5"}
    path = save_profile(Situation.of(target, [adapter]), costs=costs, drafter="none", record={"speedup": 2.0})
    known = settle(target, [adapter])
    assert known.origin == "tuned"
    assert known.costs.pass_ms(16, 1, 0.0) == pytest.approx(12.0)
    assert settle(target).origin != "tuned", "another adapter is another situation"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match="delete it"):
        find_profile(Situation.of(target, [adapter]))


def test_another_machine_has_another_profile(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(Situation.of(target), costs={"pass": "1:9"}, drafter="none", record={})
    assert settle(target).origin == "tuned"
    monkeypatch.setattr(profiles, "processor_name", lambda: "another")
    assert settle(target).origin != "tuned"


@pytest.mark.thorough
def test_the_command(target: Target, adapter: LoadedAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_: Loaded(target, (adapter,)))
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": " ".join(f"w{i}" for i in ids)}) + "\n" for ids in PROMPTS), encoding="utf-8"
    )
    asked = ["tune", "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8", "--raw"]
    result = CliRunner().invoke(app, [*asked, "--json", "--force"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert Path(record["profile"]).is_file()
    profile = find_profile(Situation.of(target, [adapter]))
    assert profile is not None
    assert profile["costs"] == record["costs"]
    assert profile["drafter"] == record["drafter"]
    refused = CliRunner().invoke(app, [*asked, "--figure", "x.pdf"])
    assert isinstance(refused.exception, InputError)


def run_tune(found: Fit, target: Target, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """The command, with a measurement that was made before."""
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_: Loaded(target, ()))
    monkeypatch.setattr("anabranch.tune.fit.fit", lambda *_, **__: found)
    file = Path(os.environ["ANABRANCH_HOME"]).parent / "asked.jsonl"
    file.write_text('{"request": "w1 w2"}\n', encoding="utf-8")
    given = ["--prompts", str(file), "--field", "request", "--max-new-tokens", "8", "--raw", *options]
    return CliRunner().invoke(app, ["tune", *given])


@pytest.fixture
def fitted(found: Fit) -> Fit:
    """As measured on a machine at rest."""
    return replace(found, predicted_plain=found.plain, times=replace(found.times, busy=False))


def test_the_result_comes_first_and_fits_60_columns(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    faster = replace(fitted, choices={fitted.auto_spec: 2 * fitted.plain}, measured=fitted.plain)
    result = run_tune(faster, target, monkeypatch, "--dry")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"2.00x with {fitted.auto_spec}"
    assert [line for line in lines if "measured with plain decoding" in line]
    assert max(len(line) for line in lines if "prompt_lookup" not in line) <= 60


def test_a_drafter_that_is_clearly_faster_than_auto_becomes_the_default(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For single prompts where no drafter is named, until the profile is deleted."""
    fixed = next(
        c for c in (one.candidate for one in fitted.tried) if c.methods == ("prompt_lookup",) and not c.adaptive
    )
    name = str(fixed.spec)
    for factor, default in ((1.02, "auto"), (1.25, name)):
        rates = {"measured": factor * fitted.plain, "choices": {fitted.auto_spec: fitted.plain}}
        result = run_tune(replace(fitted, predicted=fixed, **rates), target, monkeypatch)  # type: ignore[arg-type]
        assert result.exit_code == 0, result.output
        assert tuned_drafter(target) == default
        assert (f"auto was 20 % slower than {name}" in result.stderr) == (default != "auto")
    with Model(target) as model:
        assert model.drafter == name
        (found, *_), alone = (
            model.generate([[3, 4], [4, 5]], max_new_tokens=2),
            model.generate([3, 4], max_new_tokens=2),
        )
        assert alone.drafter == name
        assert found.drafter == str(resolve_spec("auto")), "what was tuned with one prompt does not follow the load"
        assert model.generate([3, 4], max_new_tokens=2, drafter="auto").drafter == found.drafter
    with Model(target, drafter="auto") as model:
        assert model.drafter == str(resolve_spec("auto"))
    assert "deleted" in run_tune(fitted, target, monkeypatch, "--forget").stdout
    assert "no profile" in run_tune(fitted, target, monkeypatch, "--forget").stdout
    assert tuned_drafter(target) == "auto"


@pytest.mark.parametrize("why", ["drift", "busy"])
def test_a_doubtful_profile_is_not_written(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    path = Situation.of(target).path()
    found = replace(fitted, predicted_plain=fitted.plain / 0.8)
    if why == "busy":
        found = replace(fitted, times=replace(fitted.times, busy=True))
    refused = run_tune(found, target, monkeypatch)
    assert refused.exit_code == 1
    assert refused.stdout.splitlines()[0].endswith(f"x with {found.spec}")
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
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_: 1 / 0)
    (tmp_path / "x.png").write_text("", encoding="utf-8")
    refused = CliRunner().invoke(app, ["tune", "--figure", str(tmp_path / "x.png")])
    assert isinstance(refused.exception, FileError)
    assert "--force" in str(refused.exception)


def test_a_figure_that_could_not_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_: 1 / 0)
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["tune", "--figure", str(tmp_path / "file" / "x.png")])
    assert isinstance(refused.exception, FileError)
    assert "the figure cannot be written to" in str(refused.exception)
    assert "choose another --figure" in str(refused.exception)


def test_results_are_printed_before_the_figure_is_drawn(
    target: Target, fitted: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    first = fitted.tried[0]
    long = replace(first.candidate, spec=parse_spec("streams:nodes=20,k=11,threshold=0.0125,placement=trail"))
    tried = [*fitted.tried, Tried(long, first.prediction, 12345.6)]
    monkeypatch.setattr("anabranch.tune.figure.draw", lambda *_: 1 / 0)
    figure = ("--figure", str(tmp_path / "x.png"))
    result = run_tune(replace(fitted, tried=tried), target, monkeypatch, "--dry", *figure)
    assert isinstance(result.exception, ZeroDivisionError)
    assert "plain decoding" in result.stdout
    row = next(line for line in result.stdout.splitlines() if str(long.spec) in line)
    assert "12345.6" in row


def test_the_figure(found: Fit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from anabranch.tune.figure import draw

    draw(replace(found, predicted=found.tried[-1].candidate), tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").startswith("<?xml")
