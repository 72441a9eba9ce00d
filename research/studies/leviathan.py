"""Leviathan et al. 2023, section 4: acceptance rates, predicted and measured speedup, and operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.analysis.theory import expected_operations, expected_tokens, optimal_gamma, speedup
from anabranch.errors import InputError
from anabranch.learning.examples import Example
from anabranch.methods import make_drafter
from anabranch.methods.draft_model.load import load_draft
from anabranch.methods.ngram.entry import NGramDrafter
from anabranch.methods.prompt_lookup import Index
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source, begun
from anabranch.model.inputs import Inputs
from anabranch.options import Keywords
from studies.base import Chart, Line, Result, Setup, Study, Table
from studies.rates import in_words, measured_rates
from studies.speed import PLAIN, alone, by_name, facts

__all__ = ["DRAFT", "STUDY", "T5", "TRANSLATION", "best", "overlap", "pass_ms"]

MODES: dict[str, Keywords] = {"0": {}, "1": {"temperature": 1.0, "seed": 0}}
GAMMAS = (1, 2, 3, 5, 7)
DRAFT, LOOKUP = "draft model", "lookup"
LONGEST = 3  # tokens of a match
ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
PASSES = 60  # timed of each model, alternating
Probs = Callable[[Example], Tensor]  # the distribution of each token of a completion [T, V]


def _placed(config: ModelConfig, example: Example) -> tuple[list[int], int, Source | None]:
    """The tokens before the last one of a completion, the place of the one before it, and the source."""
    begin, source = begun(config, example.prompt_ids)
    return [*begin, *example.answer_ids[:-1]], len(begin) - 1, source


def text_probs(decoder: Decoder, example: Example, temperature: float) -> Tensor:
    """A model's distribution of each token of a completion [T, V]."""
    tokens, first, source = _placed(decoder.config, example)
    cache = Cache(decoder.config, rows=1, capacity=len(tokens), dtype=decoder.dtype, device=decoder.device)
    with torch.inference_mode(), decoder.decoding():
        cache.add_row(len(tokens), None if source is None else decoder.encode(source))
        hidden_MD = decoder(Inputs.of_chains(np.asarray([tokens], np.int64)), cache, need="hidden").hidden_MD
        z_TV = decoder.logits(hidden_MD[first:]).float()
    return _best(z_TV) if temperature == 0 else (z_TV / temperature).softmax(dim=1)


def _best(z_TV: Tensor) -> Tensor:
    """All on the best token."""
    return torch.zeros_like(z_TV).scatter_(1, z_TV.argmax(dim=1, keepdim=True), 1.0)


def overlap(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) at each place [T]: the estimator of alpha (corollary 3.6)."""
    width = min(p_TV.shape[1], q_TV.shape[1])  # rows that pad a vocabulary are never drawn
    return torch.minimum(p_TV[:, :width], q_TV[:, :width]).sum(dim=1)


def _acceptance(
    target: Decoder, drafts: Mapping[str, Probs], texts: Sequence[Example], temperature: float
) -> dict[str, float]:
    """alpha of each draft over the completions, which the target wrote at this temperature."""
    found: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for example in texts:
        p_TV = text_probs(target, example, temperature)
        for name, probs in drafts.items():
            found[name].append(overlap(p_TV, probs(example)))
    return {name: round(float(torch.cat(each).mean()), 4) for name, each in found.items()}


def pass_ms(decoders: Mapping[str, Decoder], context: int) -> dict[str, float]:
    """Median milliseconds of a pass of one token behind ``context`` others, the models taking turns."""
    caches: dict[str, Cache] = {}
    for name, decoder in decoders.items():
        cache = Cache(decoder.config, rows=1, capacity=context + 1, dtype=decoder.dtype, device=decoder.device)
        with torch.inference_mode(), decoder.decoding():
            encoder = decoder.encoder
            cache.add_row(context + 1, None if encoder is None else decoder.encode(encoder.some(context)))
            decoder(Inputs.of_chains(np.full((1, context), 1, np.int64)), cache, need="hidden")
        cache.commit([range(context)])
        caches[name] = cache
    one, times = Inputs.of_chains(np.full((1, 1), 1, np.int64)), {name: list[float]() for name in decoders}
    for turn in range(PASSES + 5):
        for name, decoder in decoders.items():
            began = time.perf_counter()
            with torch.inference_mode(), decoder.decoding():
                decoder(one, caches[name], need="tokens")
            if turn >= 5:
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: round(statistics.median(each), 4) for name, each in times.items()}


def _parameters(decoder: Decoder) -> int:
    """Weights that a pass multiplies by: the layers' and the head's. A source's keys and values are computed once."""
    config = decoder.config
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    across = 0 if config.encoder is None else 2 * config.head_dim * config.num_heads
    layer = config.hidden_size * (heads + across + (3 if config.gated_mlp else 2) * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _measure(setup: Setup) -> dict[str, Any]:
    if not (setup.draft and setup.table):
        raise InputError("the study needs a smaller model and a table of n-grams: --draft MODEL --table FOLDER")
    loaded = setup.load()
    target, draft = loaded.target.decoder, load_draft(setup.draft, loaded.target.decoder)
    times = setup.part("passes", partial(pass_ms, {"target": target, "draft": draft}, context=256))
    by_temperature = {}

    def of(temperature: str, sampling: Keywords) -> dict[str, Any]:
        drafts: dict[str, Probs] = {DRAFT: partial(text_probs, draft, temperature=float(temperature))}
        drafts[LOOKUP] = partial(_looked_up, target.config)
        for name, order in ORDERS.items():
            drafts[name] = _counted(target, f"ngram:data={setup.table},order={order}", float(temperature))
        setup.report(f"temperature {temperature}: acceptance rates")
        texts = setup.answers(temperature=float(temperature))
        alphas = _acceptance(target, drafts, texts, float(temperature))
        specs = {f"{DRAFT}, {n}": f"draft_model:model={setup.draft},tree=chain,tokens={n}" for n in GAMMAS}
        specs |= {f"trigram, {n}": f"ngram:data={setup.table},tree=chain,nodes={n + 1}" for n in GAMMAS[:3]}
        rejected = tuple(specs) if temperature != "0" else ()
        specs |= {f"{LOOKUP}, {n}": f"prompt_lookup:tokens={n},ngram={LONGEST}" for n in GAMMAS[:3]}
        records = alone(setup, loaded, specs, sampling=sampling, rejection=rejected)
        positions = sum(len(example.answer_ids) for example in texts)
        return {"alpha": alphas, "positions": positions, "records": records}

    for temperature, sampling in MODES.items():
        by_temperature[temperature] = setup.part(f"temperature {temperature}", partial(of, temperature, sampling))
    return {
        "draft": setup.shown_draft,
        "pass_ms": times,
        "c": round(times["draft"] / times["target"], 4),
        "c_operations": round(_parameters(draft) / _parameters(target), 4),
        "by_temperature": by_temperature,
        **facts(setup, loaded),
    }


def _looked_up(config: ModelConfig, example: Example) -> Tensor:
    """All on the token that prompt lookup proposes, nothing where it proposes none [T, V]."""
    tokens, first, source = _placed(config, example)
    before = [] if source is None else list(source.tokens)
    text, index = [*before, *tokens], Index(LONGEST)
    q_TV = torch.zeros(len(tokens) - first, config.vocab_size)
    for row, end in enumerate(range(len(before) + first + 1, len(text) + 1)):
        index.extend(text[:end], end)
        if (match := index.match(text, end)) is not None:
            q_TV[row, text[match[0]]] = 1.0
    return q_TV


def _counted(target: Decoder, spec: str, temperature: float) -> Probs:
    drafter = make_drafter(spec, target)
    assert isinstance(drafter, NGramDrafter)
    model = drafter.model

    def probs(example: Example) -> Tensor:
        tokens, first, _ = _placed(target.config, example)
        q_TV = model.probs([tokens[max(0, place - 1) : place + 1] for place in range(first, len(tokens))])
        return _best(q_TV) if temperature == 0 else q_TV

    return probs


def _cases(result: Result) -> list[dict[str, Any]]:
    """A measured speedup and the prediction beside it, for each temperature, draft and gamma."""
    cases = []
    for temperature, found in result["by_temperature"].items():
        for name, record in by_name(found["records"]).items():
            if name == PLAIN:
                continue
            draft, gamma = name.rsplit(", ", 1)
            alpha, c = found["alpha"][draft], result["c"] if draft == DRAFT else 0.0
            operations = result["c_operations"] if draft == DRAFT else 0.0
            cases.append(
                {
                    "temperature": temperature,
                    "draft": draft,
                    "gamma": int(gamma),
                    "alpha": alpha,
                    "c": c,
                    "expected": expected_tokens(alpha, int(gamma)),
                    "length": record["mean_acceptance_length"],
                    "predicted": speedup(alpha, int(gamma), c),
                    "measured": record["speedup_quartiles"][1],
                    "step": record["relative_step"],
                    "operations": expected_operations(alpha, int(gamma), operations),
                }
            )
    return cases


def _of_draft(result: Result, temperature: str) -> list[dict[str, Any]]:
    """The cases of the draft model at a temperature, by gamma."""
    return [case for case in _cases(result) if (case["temperature"], case["draft"]) == (temperature, DRAFT)]


def best(result: Result, temperature: str) -> dict[str, Any]:
    """The case of the draft model that was measured to be fastest at a temperature."""
    return max(_of_draft(result, temperature), key=lambda case: float(case["measured"]))


def _ours(result: Result) -> str:
    texts = [f"c is {result['c']:.2f} in time and {result['c_operations']:.2f} in operations"]
    for temperature, found in result["by_temperature"].items():
        alpha, fastest = found["alpha"][DRAFT], best(result, temperature)
        theory = optimal_gamma(alpha, result["c"], most=max(GAMMAS))
        texts.append(
            f"T = {temperature}: alpha {alpha:.2f} over {found['positions']:,} tokens, best gamma {theory} by theorem "
            f"3.8 ({speedup(alpha, theory, result['c']):.2f}x), {fastest['gamma']} measured "
            f"({fastest['measured']:.2f}x)"
        )
        others = [name for name in (LOOKUP, *ORDERS) if name in found["alpha"]]
        texts.append("alpha of " + ", ".join(f"{name} {found['alpha'][name]:.2f}" for name in others))
    return "; ".join(texts)


def _table(result: Result) -> Table:
    keys = ("alpha", "c", "expected", "length", "predicted", "measured", "step", "operations")
    rows = [
        [case["temperature"], case["draft"], case["gamma"], *(f"{case[key]:.2f}" for key in keys)]
        for case in _cases(result)
    ]
    return (
        "temperature",
        "draft",
        "gamma",
        "alpha",
        "c",
        "expected tokens (eq. 1)",
        "mean acceptance length",
        "predicted speedup (theorem 3.8)",
        "measured",
        "a step over a plain one",
        "operations (theorem 3.11)",
    ), rows


def _chart(result: Result) -> Chart:
    lines = []
    for temperature in result["by_temperature"]:
        mine = _of_draft(result, temperature)
        for kind in ("predicted", "measured"):
            x, y = [case["gamma"] for case in mine], [case[kind] for case in mine]
            lines.append(Line(f"T = {temperature}, {kind}", x, y, faint=kind == "predicted"))
    return Chart("Predicted and measured speedup of a draft model", "gamma", "times plain decoding", lines)


STUDY = Study(
    name="leviathan",
    papers="Leviathan et al. section 4, table 2",
    title="Acceptance rates, predicted and measured speedup",
    measures="alpha is the mean of sum min(p, q) over the target's own completions at that temperature (their "
    "estimator), for a smaller model of the family and for n-gram models counted from its text; c is the time of a "
    "pass of the draft model over one of the target, in turns. Speedups are of chains of gamma tokens, verified by "
    "rejection at temperature 1. The prediction takes a pass of gamma + 1 tokens for as dear as one of one; the column "
    "before the last says what a step really costs.",
    paper="T5-XXL by T5-small: alpha 0.75 and 3.4x (EnDe, T = 0, gamma 7), 0.62 and 2.6x (T = 1); unigrams "
    "and bigrams alpha 0.03 to 0.23",
    differs="two models of one family at 1.5 and 0.5 billion parameters, so c is far above T5-small's 0.02; "
    "4-bit weights; a CPU",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
    command="python research/study.py leviathan --model TARGET --draft MODEL --table FOLDER --data DIR "
    "--out benchmarks/study-leviathan-DATE.json",
    whole=True,
)


def _measure_t5(setup: Setup) -> dict[str, Any]:
    rates = measured_rates(setup, setup.load())
    return {**_measure(setup), "rates": rates}


T5 = replace(
    STUDY,
    name="leviathan_t5",
    measure=_measure_t5,
    ours=lambda result: f"{_ours(result)}; {in_words(result['rates'])}",
    title="The same with encoder-decoder models",
    differs="a T5 of 6 layers and one of 2, trained in seven minutes on a shared NVIDIA H200 for restaurant "
    "descriptions and translation (research/train_t5.py) instead of T5-XXL and T5-small; descriptions here; matching "
    "for lookup at temperature 1; a CPU",
    command="python research/study.py leviathan_t5 --model T5/target --draft T5/draft --table T5/ngrams "
    "--suite T5/e2e.jsonl --dtype float32 --out benchmarks/study-leviathan_t5-DATE.json",
)
TRANSLATION = replace(
    T5,
    name="leviathan_t5_translation",
    title="The same with encoder-decoder models that translate",
    differs=T5.differs.replace("descriptions here", "translation to Romanian here, learned from 1,999 sentences"),
    command=T5.command.replace("leviathan_t5", "leviathan_t5_translation").replace("e2e.jsonl", "wmt.jsonl"),
)
