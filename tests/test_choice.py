"""The drafter of a row where several are trained: choices from given yields, rows of all kinds, what is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from anabranch.adapters.folder import LoadedAdapter
from anabranch.api import Model
from anabranch.control import profiles
from anabranch.control.choice import SAMPLE, Choice
from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.control.profiles import Situation, keep_tuned, settle
from anabranch.decoding.engine import Engine
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting.combined import ChoiceDrafter, CombinedDrafter
from anabranch.drafting.trained import TrainedModule
from anabranch.methods import make_drafter, parse_spec, resolve_spec
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.methods.medusa import entry as medusa
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.methods.none import NoDrafter
from anabranch.methods.space.module import MaskConfig, MaskModule
from anabranch.methods.streams import entry as streams
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.model.weights import build_decoder, fingerprint
from anabranch.sampling import SamplingParams
from small import as_target, decode, randomise, request, small, small_adapter
from toy_text import CONFIG, byte_tokenizer

FREE = "prompt_lookup:tokens=auto"


def trained(target: Decoder) -> list[TrainedModule]:
    """A module of each of four methods, with random weights."""
    made: list[TrainedModule] = [
        MedusaModule(target.config, MedusaConfig(num_heads=3)),
        EagleModule(target.config, EagleConfig()),
        MaskModule(target.config, MaskConfig(3)),
    ]
    for seed, module in enumerate(made):
        randomise(module, seed, scale=0.1)
    return [small_adapter(target), *(module.eval().requires_grad_(False) for module in made)]


def controller(
    target: Decoder, choice: Choice | None = None, cards: Mapping[str, Mapping[int, float]] | None = None
) -> Controller:
    costs = Costs(PassCosts(StepCosts((1, 512), (10.0, 10.0))))
    return Controller(costs, ragged=target.ragged, choice=choice, cards=cards)


# -- what is chosen -------------------------------------------------------------------------------------------------
def chosen(
    choice: Choice, speedups: Mapping[str, float], prompts: int, *, rows: int = 1, seed: int = 0, spread: float = 0.25
) -> list[str]:
    """The choices for prompts of 128 tokens that differ as real ones do, one at a time; all are predicted alike."""
    noise, found = np.random.default_rng(seed), []
    for _ in range(prompts):
        picked = choice.choose(dict.fromkeys(speedups, 1.5), rows)
        speedup = speedups[picked] * float(np.exp(spread * noise.standard_normal()))
        for _ in range(8):
            choice.saw(picked, rows, 16.0, 16.0 / speedup)
        found.append(picked)
    return found


def test_each_arm_is_tried_and_the_best_one_wins() -> None:
    speedups = {"slow": 0.8, "good": 1.5, "best": 1.75}
    for seed in range(5):
        found = chosen(Choice(), speedups, 400, seed=seed)
        counts = Counter(found[100:])
        assert set(found[:20]) == set(speedups), "each is tried soon"
        assert counts["best"] > 0.8 * 300
        assert 0 < counts["good"] < 0.2 * 300, "what is nearly as good is tried now and then"
        assert Counter(found)["slow"] <= 0.02 * 400, "what is far behind hardly ever"


def test_a_choice_follows_the_text() -> None:
    choice = Choice()
    before = chosen(choice, {"one": 2.0, "other": 1.5}, 60)
    after = chosen(choice, {"one": 1.2, "other": 1.5}, 120, seed=1)
    assert Counter(before[20:])["one"] > 30
    assert Counter(after[60:])["other"] > 45


def test_each_load_has_its_own_choice() -> None:
    choice = Choice()
    alone, many = {"wide": 2.0, "cheap": 1.5}, {"wide": 0.8, "cheap": 1.1}
    for seed in range(20):
        found = chosen(choice, alone, 2, seed=seed), chosen(choice, many, 2, rows=16, seed=seed)
    assert [set(each) for each in found] == [{"wide"}, {"cheap"}]
    assert sorted(choice.yields()) == [1, 16]


def test_what_has_faded_is_not_kept() -> None:
    choice = Choice()
    choice.saw("old", 1, 2.0, 1.0)
    choice.saw("new", 1, 16.0, 10.0)
    again = Choice.from_dict(json.loads(json.dumps(choice.to_dict())))
    assert again.to_dict() == choice.to_dict()
    assert set(again.yields()[1]) == {"old", "new"}
    for _ in range(2000):
        choice.saw("new", 1, 16.0, 10.0)
    assert list(choice.to_dict()["1"]) == ["new"]
    assert list(Choice.from_dict(choice.to_dict()).yields()[1]) == ["new"]


def test_a_prediction_says_where_to_begin() -> None:
    expected = {"one": 1.2, "other": 1.6, "third": 1.4}
    choice = Choice()
    assert choice.choose(expected, 1) == "other"
    for _ in range(40):
        choice.saw("other", 1, 16.0, 10.0)
    assert choice.choose(expected, 1) == "third", "the second best comes next"


def test_rows_in_use_keep_their_arm_for_a_while() -> None:
    choice, expected = Choice(), {"one": 1.5, "other": 1.5}
    assert choice.choose(expected, 4) == "one"
    for _ in range(4):
        assert choice.choose(expected, 4, using="one") == "one"
        choice.saw("one", 4, SAMPLE, 0.9 * SAMPLE)
    assert choice.choose(expected, 4, using="one") == "other"
    assert choice.choose(expected, 4, using="other") == "other", "and now this one"
    assert choice.choose({"one": 1.5}, 4) == "one", "where it is the only one that is possible"


def test_predicted_acceptance_and_costs_rank_drafters_before_they_were_tried() -> None:
    target = small()
    drafter = make_drafter("auto", target, *trained(target))
    assert isinstance(drafter, ChoiceDrafter)
    names = [f"{name}+prompt_lookup" for name in ("streams", "medusa", "eagle", "space")]
    assert [each.name for each in drafter.drafters] == names
    cards = {name.split("+")[0]: {16: length} for name, length in zip(names, (2.0, 2.4, 3.1, 2.2), strict=True)}
    made = controller(target, cards=cards)
    assert made.choose_drafter(drafter.drafters, 1, 0.0, using=None).name == names[2]
    made.costs.drafts = {names[2]: 30.0}
    made = Controller(made.costs, ragged=True, cards=cards)
    assert made.choose_drafter(drafter.drafters, 1, 0.0, using=None).name == names[1], "its drafts take too long"


# -- specifications -------------------------------------------------------------------------------------------------
def test_several_modules_are_arms_and_one_is_none() -> None:
    target = small()
    modules = trained(target)
    spec = resolve_spec("auto", *modules)
    drafters = ("streams:tree=auto,copy=yes", *(f"{name}:tree=auto" for name in ("medusa", "eagle", "space")))
    assert [str(picked) for picked in spec.choices] == [f"{drafter}+{FREE}" for drafter in drafters]
    assert str(spec) == "auto"
    assert resolve_spec(str(spec), *modules) == spec == resolve_spec(spec)
    assert parse_spec(spec) is spec
    for module, drafter in zip(modules, drafters, strict=True):
        alone = resolve_spec("auto", None, module)
        assert (str(alone), alone.choices) == (f"{drafter}+{FREE}", ())
    made = make_drafter(spec, target, *modules)
    assert isinstance(made, ChoiceDrafter)
    assert [picked.spec for picked in made.drafters] == list(map(str, spec.choices))
    parts = [picked.parts[-1] for picked in made.drafters if isinstance(picked, CombinedDrafter)]
    assert len(parts) == 4
    assert len(set(map(id, parts))) == 1, "what needs no module is shared"


# -- rows ----------------------------------------------------------------------------------------------------------
class Shuffled(Choice):
    """Any drafter that is possible, in turns."""

    turn = 0

    def choose(self, expected: Mapping[str, float], rows: int, *, using: str | None = None) -> str:
        self.turn += 1
        return sorted(expected)[self.turn % len(expected)]


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_all_arms_join_and_leave_and_decode_as_alone(rows: int) -> None:
    target = small()
    drafter = make_drafter("auto", target, *trained(target))
    requests = [
        request(5 + n, n, 6 + 2 * n, sampling=SamplingParams(temperature=0.9 * (n % 2), seed=n)) for n in range(9)
    ]
    wanted, _ = decode(target, requests)
    made = controller(target, Shuffled())
    scheduler = Scheduler(target, rows=rows, controller=made, prefix_bytes=0)
    tickets = [scheduler.submit(each, drafter) for each in requests]
    together = 0
    while scheduler.busy:
        together = max(together, len({ticket.used for ticket, _ in scheduler.tick()}))
    assert [ticket.emitted for ticket in tickets] == wanted
    assert {ticket.used for ticket in tickets} == set(drafter.drafters)
    assert (together > 1) == (rows > 1), "rows of several choices share a pass"


def test_rows_that_ride_are_those_of_one_arm() -> None:
    target = small()
    modules = trained(target)
    texts = ("streams:tree=auto,placement=ride", "space:tree=auto,placement=ride", "medusa:tree=auto")
    drafter = ChoiceDrafter([make_drafter(text, target, *modules) for text in texts])
    requests = [request(4 + n, n, 8 + n) for n in range(8)]
    made = controller(target, Shuffled())
    scheduler = Scheduler(target, rows=3, controller=made, prefix_bytes=0)
    tickets = [scheduler.submit(each, drafter) for each in requests]
    plain = scheduler.submit(request(4, 20, 8), NoDrafter())  # a row of another drafter
    while scheduler.busy:
        stepped = [ticket for ticket, _ in scheduler.tick()]
        assert len({None if ticket.used is None else ticket.used.needs.rider for ticket in stepped}) <= 1
    assert [ticket.emitted for ticket in (*tickets, plain)] == decode(target, [t.request for t in (*tickets, plain)])[0]


def test_steps_are_measured_where_all_rows_use_one_arm() -> None:
    target = small()
    drafter = make_drafter("auto", target, *trained(target)[:2])
    made = controller(target)
    engine = Engine(target, drafter, rows=2, capacity=96, controller=made)
    for seed in range(2):
        engine.add(request(5, seed, 30))
    (picked,) = {member.drafter for member in engine._members}
    assert sum(len(step.tokens) for step in engine.run()) == 60
    assert made.choice is not None
    assert list(made.choice.yields()) in ([2], [1, 2])
    (seen,) = {spec for yields in made.choice.yields().values() for spec in yields}
    assert seen == picked.spec
    assert 0 < made.choice.yields()[2][seen].tokens <= 30, "tokens a row"


def test_one_arm_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("choose", "saw"):
        monkeypatch.setattr(Choice, name, lambda *_, **__: 1 / 0)
    target = small()
    adapter = small_adapter(target)
    drafter = make_drafter("auto", target, adapter)
    assert not isinstance(drafter, ChoiceDrafter)
    made = controller(target)
    engine = Engine(target, drafter, rows=2, capacity=96, controller=made)
    for seed in range(2):
        engine.add(request(5, seed, 12))
    assert {member.drafter for member in engine._members} == {drafter}
    list(engine.run())
    assert made.choice is None


# -- what is kept --------------------------------------------------------------------------------------------------
@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def adapters(target: Decoder) -> tuple[LoadedAdapter, LoadedAdapter]:
    first, second, *_ = trained(target)
    lengths = {"predicted mean acceptance length": {"16 nodes": 2.5}}
    return (
        LoadedAdapter(first, {"sha256": "1" * 64, "measured": {}}, streams.METHOD),
        LoadedAdapter(second, {"sha256": "2" * 64, "measured": lengths}, medusa.METHOD),
    )


def model(drafter: str = "auto") -> Model:
    decoder = build_decoder(CONFIG, device="cpu")
    randomise(decoder, seed=1)
    config = replace(CONFIG, eos_token_ids=(CONFIG.vocab_size - 1,))
    target = Target(decoder, byte_tokenizer(), config, "toy", None, fingerprint(decoder))
    return Model(target, adapters(decoder), drafter)


def test_what_was_learned_is_kept_for_the_next_load(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.api.SECONDS", 3600.0)  # between two files, however slow the machine is
    with model() as first:
        out = first.generate("the cat sat on the mat", max_new_tokens=20)
        assert first.drafter == "auto"
        assert out.drafter in {str(picked) for picked in first.spec.choices}
        assert out.token_ids == first.generate("the cat sat on the mat", max_new_tokens=20, drafter="none").token_ids
        assert first.known is not None
        assert first.known.choice is not None
        seen = first.known.choice.to_dict()
        (path,) = (home / "yields").iterdir()
        assert json.loads(path.read_text(encoding="utf-8"))["yields"] == seen
        tokens = [len(first.generate("the dog", max_new_tokens=20, seed=n).token_ids) for n in range(3)]
        assert tokens == [20] * 3
        assert json.loads(path.read_text(encoding="utf-8"))["yields"] == seen, "not written every time"
        assert first.known.choice.changed
    again = model().known
    assert again is not None
    assert again.choice is not None
    assert again.choice.to_dict() == json.loads(path.read_text(encoding="utf-8"))["yields"] != seen, "closing writes it"
    assert again.cards["medusa"] == {16: 2.5}, "what the cards say is read too"
    made = again.controller(model().target.decoder)
    assert (made.costs, made.choice, made.cards) == (again.costs, again.choice, again.cards)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"yields": 3, "date": "2026-01-01"}', '{"yields": {}, "date": 5}'),
        '{"yields": {"1": {"one": [1]}}, "date": "2026-01-01"}',
        '{"yields": {"0": {"one": [1, 2]}}, "date": "2026-01-01"}',
        '{"yields": {"1": {"one": [-1, 2]}}, "date": "2026-01-01"}',
        '{"yields": {"1": {"one": [NaN, 2]}}, "date": "2026-01-01"}',
        '{"yields": {"one": {"one": [1, 2]}}, "date": "2026-01-01"}',
        '{"yields": {"1": []}, "date": "2026-01-01"}',
    ],
)
def test_a_file_that_is_damaged_counts_as_missing(home: Path, text: str) -> None:
    target = as_target(small())
    known = adapters(target.decoder)
    path = Situation.of(target, known).path("yields")
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    choice = settle(target, known).choice
    assert choice is not None
    assert not choice.yields()


def test_what_is_old_or_of_other_adapters_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = as_target(small())
    known = adapters(target.decoder)
    assert settle(target).choice is None
    assert settle(target, known[:1]).choice is None, "there is no choice"
    situation = Situation.of(target, known)
    keep_tuned(situation, {"one": 1.5, "other": 2.0})
    choice = settle(target, known).choice
    assert choice is not None
    assert choice.choose({"one": 1.5, "other": 1.5}, 1) == "other", "what tune measured is used"
    speedups = {name: found.speedup for name, found in choice.yields()[1].items()}
    assert speedups == pytest.approx({"one": 1.5, "other": 2.0}, rel=1e-4)
    record = json.loads(situation.path("yields").read_text(encoding="utf-8"))
    record["date"] = (date.today() - timedelta(days=profiles.DAYS + 1)).isoformat()
    situation.path("yields").write_text(json.dumps(record), encoding="utf-8")
    choice = settle(target, known).choice
    assert choice is not None
    assert not choice.yields()
    monkeypatch.setattr(profiles, "processor_name", lambda: "another")
    assert Situation.of(target, known).path("yields") != situation.path("yields")


def test_a_cache_folder_that_cannot_be_written_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.parent / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ANABRANCH_HOME", str(home.parent / "file"))
    with model() as made:
        assert made.generate("the", max_new_tokens=8).drafter


def test_a_call_names_its_own_drafter(home: Path) -> None:
    with model("prompt_lookup") as made:
        assert made.generate("the the the", max_new_tokens=4).drafter == "prompt_lookup"
        out = made.generate(["the", "cat"], max_new_tokens=4, drafter="medusa:tree=5")
        assert [each.drafter for each in out] == ["medusa:nodes=5"] * 2
        assert not (home / "yields").exists(), "nothing was chosen"
