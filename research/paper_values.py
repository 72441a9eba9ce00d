"""Our values for the papers' tables and figures, in a few words, each from the newest result file of its kind."""

from __future__ import annotations

from functools import cache
from typing import Any

from anabranch.analysis.theory import expected_tokens, parity, speedup
from anabranch.support.table import percent, signed_percent
from comparison_tables import alone, newest_of_each
from generated import Result, newest, results
from intervals import speedup_interval, task_cell
from studies import branching, gradients, leviathan, long_context, quantization, roofline
from studies.speed import PLAIN, by_name

__all__ = [
    "batches",
    "branching_speeds",
    "closed_form",
    "cosine",
    "counted",
    "draft_model_latency",
    "early_exit",
    "eq_10",
    "example_texts",
    "first_version",
    "gradients_below",
    "intensity",
    "leviathan_alphas",
    "leviathan_speeds",
    "long_contexts",
    "mt_bench_lengths",
    "mt_bench_speed",
    "other_tasks",
    "peeking",
    "quantised",
    "roof",
    "rotation",
    "scored",
    "spec_bench_speeds",
    "sql",
    "staged",
    "stream_layers",
    "top_k",
    "traced_passes",
    "traced_text",
]

TREE = "streams:tree=8"
TASKS = {"sql": "SQL", "e2e": "E2E", "dialogsum": "DialogSum"}


@cache
def latest(pattern: str) -> Result:
    """The newest result whose name matches."""
    found = newest(pattern)
    assert found is not None, f"no benchmarks/{pattern}"
    return found[1]


def _study(name: str) -> Result:
    return latest(f"study-{name}-*.json")


def _named(records: Any, **wanted: str) -> Any:
    """The one record with these values."""
    (found,) = [record for record in records if all(record[key] == value for key, value in wanted.items())]
    return found


def _times(record: Any) -> str:
    return f"{record['speedup_quartiles'][1]:.2f}x"


def _tokens(record: Any) -> str:
    return f"{record['mean_acceptance_length']:.2f}"


# -- Speculative Streaming: tables ----------------------------------------------------------------------------------
def mt_bench_speed() -> str:
    found = latest("qwen2.5-coder-0.5b-spec-bench-xeon-amx-*.json")
    record, plain = (_named(found["contenders"], name=name) for name in (TREE, PLAIN))
    tasks = [prompt["task"] for prompt in found["prompts"]]
    of = record["by_task"]["mt_bench"]
    return (
        f"streams of the 0.5B with AMX: {task_cell(record, plain, tasks, 'mt_bench')} times plain decoding, "
        f"{_tokens(of)} tokens ({of['prompts']} prompts)"
    )


def spec_bench_speeds() -> str:
    texts = []
    for size in ("0.5b", "1.5b"):
        found = latest(f"qwen2.5-coder-{size}-spec-bench-xeon-amx-*.json")
        record, plain = (_named(found["contenders"], name=name) for name in (TREE, PLAIN))
        times, low, high = speedup_interval(record, plain, range(len(found["prompts"]))) or (0.0, 0.0, 0.0)
        tasks = [of["speedup_total"] for of in record["by_task"].values()]
        texts.append(
            f"streams of the {size.upper()}, 8 nodes, AMX: {times:.2f}x ({low:.2f}-{high:.2f}; by task "
            f"{min(tasks):.2f}x to {max(tasks):.2f}x; {record['prompts']} prompts), {_tokens(record)} tokens"
        )
    return "; ".join(texts)


def sql() -> str:
    found = latest("application-sql-qwen2.5-coder-0.5b-*.json")
    form = _named(found["forms"], form="paper")
    parts = [
        f"{name} {_times(record)}, {_tokens(record)} tokens"
        for name, record in (
            ("0.5B, 8 nodes:", _named(found["contenders"], name="paper 8")),
            ("16 nodes:", _named(found["contenders"], name="paper 16")),
            ("Medusa", _named(found["contenders"], name="medusa 16")),
        )
    ]
    return f"{'; '.join(parts)}; {form['extra_parameters']:,} parameters; {found['rows']} rows"


def scored() -> Result:
    """Quality of the 0.5B's SQL targets on many rows."""
    found: Result = latest("application-sql-qwen2.5-coder-0.5b-*.json")["scored"]
    return found


def other_tasks() -> str:
    rows = scored()
    paper, lora = (_named(rows["targets"], target=name) for name in ("paper", "lora"))
    texts = [
        f"SQL, 0.5B: exact match {100 * paper['quality']['exact_match']['mean']:.1f} (LoRA "
        f"{100 * lora['quality']['exact_match']['mean']:.1f}; {signed_percent(paper['difference']['exact_match'])}, "
        f"{rows['rows']:,} rows)"
    ]
    found = latest("application-e2e-qwen2.5-coder-0.5b-*.json")
    streams, medusa = (_named(found["contenders"], name=name) for name in ("paper 16", "medusa 16"))
    paper, lora = (_named(found["scored"]["targets"], target=name) for name in ("paper", "lora"))
    texts.append(
        f"E2E, 0.5B: {_times(streams)}, {_tokens(streams)} tokens, Medusa {_times(medusa)}, {_tokens(medusa)}; ROUGE-1 "
        f"{100 * paper['quality']['rouge1']['mean']:.1f} (LoRA {100 * lora['quality']['rouge1']['mean']:.1f}; "
        f"{signed_percent(paper['difference']['rouge1'])}, {found['scored']['rows']} rows)"
    )
    record = _named(_application("dialogsum")["contenders"], name="paper 16")
    texts.append(
        f"DialogSum, default model: {_times(record)}, {_tokens(record)} tokens, ROUGE-1 "
        f"{signed_percent(record['difference']['rouge1'])}"
    )
    return "; ".join(texts)


def _application(task: str) -> Result:
    """The result of the default model."""
    return latest(f"application-{task}-epyc-*.json")


def first_version() -> str:
    texts = []
    for task, title in TASKS.items():
        found = _application(task)
        record = _named(found["contenders"], name="paper-v1 16")
        key = next(iter(found["columns"]))
        texts.append(
            f"{title} {_times(record)}, {_tokens(record)} tokens, {found['columns'][key]} "
            f"{100 * record['quality'][key]['mean']:.1f}"
        )
    form = _named(_application("sql")["forms"], form="paper-v1")
    return f"default model: {'; '.join(texts)}; {form['extra_parameters']:,} parameters"


def quantised() -> str:
    return quantization.STUDY.ours(_study("quantization"))


def draft_model_latency() -> str:
    texts, streams = [], _named(_application("sql")["contenders"], name="streams 16")
    for task, title in TASKS.items():
        records = _application(task)["contenders"]
        draft, paper = (_named(records, name=name) for name in ("draft_model 16", "paper 16"))
        ms = " / ".join(f"{record['sample_ms_quartiles'][1]:.0f}" for record in (draft, paper))
        texts.append(f"{title} {ms} ms, {_times(draft)} / {_times(paper)} of plain LoRA")
    return f"{'; '.join(texts)}; streams trained afterwards, SQL: {streams['sample_ms_quartiles'][1]:.0f} ms, " + (
        _times(streams)
    )


def mt_bench_lengths() -> str:
    names = {
        "streams": "our streams",
        "hydra": "Hydra",
        "eagle": "EAGLE",
        "medusa-paper:tree=sparse": "Medusa-1",
        "paper-lossless:placement=ride": "lossless form",
    }
    compared = newest_of_each(results("methods-qwen2.5-coder-0.5b-*2cores-*.json"))
    methods = {method["name"]: method for *_, method in compared}
    lengths = []
    for name, title in names.items():
        of = _named(alone(methods[name]), name="8 nodes")["by_task"]["mt_bench"]
        lengths.append(f"{title} {_tokens(of)} ({of['prompts']} prompts)")
    more = latest("qwen2.5-coder-0.5b-mt-bench-*.json")
    return (
        f"0.5B, 8 nodes: {', '.join(lengths)}"
        f"; our streams on {more['run']['prompts']} prompts of {more['run']['max_new_tokens']} tokens "
        + _tokens(_named(more["contenders"], name=TREE))
    )


# -- Speculative Streaming: figures ---------------------------------------------------------------------------------
def peeking() -> str:
    records = [record for record in _study("peeking")["records"] if record["mask"] == "leak-free"]
    first, last = records[0], records[-1]
    return (
        f"gamma 0 to {last['gamma']}: accuracy {first['tuned']['accuracy']:.1%} to {last['tuned']['accuracy']:.1%}, "
        f"ROUGE-1 {signed_percent(last['difference']['rouge1'])} points"
    )


def cosine() -> str:
    result = _study("cosine")
    riding = result["cosine"]["riding streams"]
    heads = result["heads"]["medusa"]
    return (
        f"after the last norm, first two streams {riding[0][-1]:.2f}, {riding[1][-1]:.2f}; Medusa's heads "
        f"{heads[0]:.2f}, {heads[1]:.2f}"
    )


def gradients_below() -> str:
    return gradients.STUDY.ours(_study("gradients"))


def example_texts() -> str:
    rows = scored()
    paper = _named(rows["targets"], target="paper")
    return (
        f"of {rows['rows']:,} rows, {paper['right_alone']} right with shared streams alone, {paper['wrong_alone']} "
        "with plain LoRA alone"
    )


def counted() -> str:
    drafts = _study("overhead")["drafts"]
    streams, medusa = drafts["streams, optimised"], drafts["medusa"]
    return (
        f"streams {streams['parameters']:,} parameters, {medusa['parameters'] / streams['parameters']:,.0f} times "
        f"fewer than Medusa; {streams['bytes'] / 1e6:.2f} MB against {medusa['bytes'] / 1e6:,.0f}; 10⁹ operations: "
        + ", ".join(
            f"{name} {drafts[key]['operations'] / 1e9:.2f}"
            for name, key in (("streams", "streams, optimised"), ("EAGLE", "eagle"), ("Medusa", "medusa"))
        )
    )


def branching_speeds() -> str:
    return branching.STUDY.ours(_study("branching"))


def _forms(name: str) -> str:
    texts = []
    for record in _study(name)["records"]:
        exact = percent(record["quality"]["exact_match"])
        texts.append(f"{record['label']}: exact match {exact} %, {_tokens(record)} tokens")
    return "; ".join(texts)


def stream_layers() -> str:
    return f"layers {_forms('layers')}"


def rotation() -> str:
    angle = max(record["rotation_step"] for record in _study("rotation")["records"])
    return f"{_forms('rotation')}; angle {angle:.5f}"


TOP_K = (
    ("streams, chain by rejection", "streams, chain, rejection"),
    ("streams, tree", "streams"),
    ("Medusa, tree", "medusa"),
)


def top_k() -> str:
    by_top = _study("sampling")["by_top"]
    few, many = (by_name(by_top[top]) for top in (min(by_top, key=int), max(by_top, key=int)))
    texts = [
        f"{title} {_tokens(few[name])} to {_tokens(many[name])} tokens, {_times(few[name])} to {_times(many[name])}"
        for title, name in TOP_K
    ]
    return f"k = {min(by_top, key=int)} to {max(by_top, key=int)}: {'; '.join(texts)}"


def early_exit() -> str:
    found = by_name(_study("pruning")["records"])
    names = ("chain of 3", "tree, k = 3", "pruned tree, k = 3, 16 nodes", "pruned tree, k = 3, 8 nodes")
    return "; ".join(
        f"{name}: {_tokens(found[name])} tokens, {found[name]['relative_step']:.2f} plain steps, {_times(found[name])}"
        for name in names
    )


def intensity() -> str:
    steps = _study("overhead")["steps"]
    numbers = ", ".join(f"{name.removesuffix(', optimised')} {step['intensity']:.1f}" for name, step in steps.items())
    return f"operations a byte, counted: {numbers}"


def batches() -> str:
    texts = []
    for name in ("streams, chain", "streams, size by load"):
        ratios = {r["rows"]: r["ratio"][1] for r in _study("batches")["records"] if r["name"] == name}
        texts.append(f"{name}: " + ", ".join(f"{ratio:.2f}x" for ratio in ratios.values()))
    return f"{', '.join(map(str, ratios))} rows: {'; '.join(texts)}"


def eq_10() -> str:
    return f"parity at ζ = {parity(4, 10):.1f} β"


def long_contexts() -> str:
    result = latest("long-context-trained-*.json")
    by_context = long_context.ratios(result)["streams:tree=product,depth=3,k=4"]
    numbers = ", ".join(f"{ratio:.2f}x ({context:,} tokens)" for context, ratio in by_context.items())
    return f"k = 4: {numbers}; {long_context.STUDY.ours(result)}; {result['passages']} passages"


# -- Leviathan et al. -----------------------------------------------------------------------------------------------
def closed_form() -> str:
    return f"{expected_tokens(0.8, 5):.2f}, {speedup(0.75, 7, 0.02):.2f}x, {expected_tokens(0.2, 30):.2f}x"


def leviathan_speeds() -> str:
    texts = []
    for title, name in (("1.5B by 0.5B", "leviathan"), ("our T5", "leviathan_t5")):
        result = _study(name)
        for temperature in result["by_temperature"]:
            best = leviathan.best(result, temperature)
            texts.append(
                f"{title}, T = {temperature}: alpha {best['alpha']:.2f}, gamma {best['gamma']}, {best['measured']:.2f}x"
            )
    return "; ".join(texts)


def leviathan_alphas() -> str:
    found = _study("leviathan")["by_temperature"]
    texts = []
    for name in (leviathan.DRAFT, "bigram", "unigram"):
        texts.append(f"{name} " + ", ".join(f"{of['alpha'][name]:.2f}" for of in found.values()))
    return f"T = {', '.join(found)}: {'; '.join(texts)}"


def _traced() -> dict[str, tuple[float, float, float]]:
    """Tokens, passes of the target and milliseconds by way of decoding."""
    found = {}
    for name, steps in _study("trace")["steps"].items():
        drafting, passes, rest, tokens, _, mine, *_ = (sum(column) for column in zip(*steps, strict=True))
        found[name] = (tokens, mine, drafting + passes + rest)
    return found


def traced_text() -> str:
    tokens, passes, _ = _traced()["draft model, gamma 7"]
    return f"{tokens:.0f} tokens in {passes:.0f} passes of the target, gamma 7"


def traced_passes() -> str:
    texts = [f"{name}: {passes:.0f} passes, {ms:,.0f} ms" for name, (_, passes, ms) in _traced().items()]
    return "; ".join(texts)


# -- Spector and Ré -------------------------------------------------------------------------------------------------
def roof() -> str:
    plain = [point for point in roofline.points(latest("passes-by-nodes-*.json")) if point["kind"] == roofline.PLAIN]
    texts = [f"{point['intensity']:.1f} ({point['rate'] / point['matrix']:.0%})" for point in plain]
    return f"operations a byte with one row (share of the arithmetic): {', '.join(texts)}"


def staged() -> str:
    result, texts = _study("staged"), []
    names = (PLAIN, "draft model, chain", "draft model, tree", "staged")
    for mode, records in result["by_mode"].items():
        found = by_name(records)
        rates = ", ".join(f"{found[name]['tokens_per_second']:.1f}" for name in names)
        read = [found[name]["mb_read_per_token"] / found[PLAIN]["mb_read_per_token"] for name in names]
        texts.append(f"{mode} {rates} tokens/s, {', '.join(f'{share:.3f}' for share in read)} of the bytes")
    return f"plain, chain, tree, staged: {'; '.join(texts)}; {result['prompts']} prompts"
