"""Every numbered table and figure of the papers: what they print, what we have, and how it compares.

``verdict`` is one of VERDICTS. ``theirs`` is copied from the papers; ``ours`` reads result files (paper_values.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import paper_values as values

__all__ = ["ITEMS", "V1", "VERDICTS", "Item", "nothing"]

VERDICTS = ("reproduced", "differs", "inconclusive", "needs a GPU")
ACL, V1, LEVIATHAN, STAGED = "ACL", "v1", "Leviathan et al.", "Spector and Ré"
NOTHING = "-"


def nothing() -> str:
    """No value of ours."""
    return NOTHING


class Item(NamedTuple):
    """A table or figure.

    paper, number  where it stands
    shows          its subject
    verdict        one of VERDICTS
    why            the reason of the verdict, with a link to the measurement
    theirs         the values that the paper prints
    ours           returns our values
    note           a longer text, below the table
    v1             the table or figure of the first version with the same content
    """

    paper: str
    number: str
    shows: str
    verdict: str
    why: str
    theirs: str = NOTHING
    ours: Callable[[], str] = nothing
    note: str = ""
    v1: str = ""


TABLE_1 = """The models have 7 to 33 billion parameters, which two cores cannot train. In the 16 bits of the paper the
methods are trained and compared on a GPU by

```console
anabranch train answers --model FOLDER --prompts PROMPTS.jsonl --out answers.jsonl
MODEL=FOLDER research/train_methods answers.jsonl ADAPTERS paper-lossless medusa-paper hydra-paper eagle-1
python research/compare_methods.py --model FOLDER --data DIR --suite mt_bench --limit 80 --weights none \\
  --adapter paper-lossless:tree=product,k=3,prune=32,placement=ride=ADAPTERS/paper-lossless \\
  --adapter medusa-paper:tree=sparse=ADAPTERS/medusa-paper --adapter hydra-paper=ADAPTERS/hydra-paper \\
  --adapter eagle-1:tree=static=ADAPTERS/eagle-1 --method draft_model:model=DRAFT --method lookahead --out RESULT.json
```

where FOLDER has Vicuna or Llama-2, DRAFT has Llama-68m and PROMPTS.jsonl has prompts of ShareGPT. They have not been
run at this size. For shared mode, `anabranch train streams --recipe paper-shared
--task rows.jsonl` takes conversations. GPT-4's
scores are lacking: no code here asks a judge. In lossless mode the scores are those of plain decoding, since the tokens
are."""

TABLE_2 = """Streams decode faster than plain decoding on every task, as in the paper, but by less: the paper's targets
have 7 to 33 billion parameters, and ran on an A100. Mathematical reasoning is the fastest task there and here.
Retrieval augmented generation is the slowest here and the second fastest there. A step of 8 nodes takes 1.7 to 1.8
plain ones with AMX, its draft included (the length over the speedup). The other methods were not run on that machine.

With AVX-512 and without AMX, the 0.5B's streams of 8 nodes decode at 1.58 (1.51-1.67) times plain decoding, Medusa-1 at
1.07 (1.03-1.12) and the paper's lossless form at 1.01 (0.97-1.05), on 120 prompts ([by
task](comparison.md#times-plain-decoding-by-task)). So the paper's form does not decode faster than Medusa-1 here.

On two cores with AVX2, a step of 8 nodes costs 2.8 to 3.8 plain ones with trained methods, REST and n-grams, and 1.6 to
1.7 with lookups; a step of lookahead costs 16.8
([comparison](comparison.md#qwen25-coder-05b-instruct-q4_k_m-on-two-cores-avx2)). There the order by
acceptance is not that by speed: sized by the controller, streams of the 0.5B have 1.05 and other trained methods 0.93
to 1.00. On an H200, where a pass of 8 nodes costs 1.2 plain ones, [streams of the
0.5B](gpu.md#methods-on-a-real-model) decode at 1.20 times plain decoding, and other trained methods below it."""

TABLE_3 = """Speed and length of the paper's form are reproduced on one task of three, SQL, on Qwen2.5-Coder-0.5B
([measurement](applications.md#the-papers-form-on-half-a-billion-parameters)). The quality gain of the paper is absent
there: exact match is below plain LoRA's, and the interval includes 0. The budget was 3,000 of some 60 thousand training
rows, one epoch and 44 minutes on two cores, with a learning rate of 1e-3; the paper has all rows, five epochs and 5e-4.
The held-out length was still rising at the end (2.79, 3.38, 3.62 and 3.76 with 16 nodes after 80, 160, 240 and 320 of
374 steps, [log](log.md#applications)). On E2E the 0.5B's form saw 1,500 of 42 thousand rows, once. It decodes faster
than plain LoRA there, but is behind Medusa, and its texts are worse than plain LoRA's, which the paper's are not.
DialogSum was tuned on the default model of 135 million parameters alone, with 239 rows
([results](applications.md#results)). There the form neither reaches the paper's length nor decodes faster than plain
LoRA. EAGLE was not trained for the 0.5B's targets.
[Parameters](comparison.md#parameters-on-the-papers-targets) are reproduced but one."""

V1_TABLE = """v1 has other models than the ACL paper, and main rows that do not attend to streams. `paper-v1` in
[applications](applications.md#results) has these main rows, but not v1's depth: v1 lets streams run through a sixth of
the layers for SQL and through half of them for the other tasks (N_s / N), ours run through 4 of 30 for all. It saw
1,200, 600 and 239 rows for one epoch; v1 trains for five. No larger model was tuned in this form."""

TABLE_4 = """The target is the 0.5B with the LoRA and the streams of `examples/sql-qwen2.5-coder-0.5b`, which were
tuned over int8 weights on 900 rows, for one epoch. From bf16 to int4, exact match on 1,000 rows falls by 0.2 points
(-1.7 to 2.1), the length from 2.73 to 2.55, and the speedup by 16 %; the paper's fall by 2.4 points and 8 %. A step
takes 2.7 plain ones with bf16 weights and 3.3 with int4: a node brings four stream rows along, whose arithmetic
two cores with AVX2 cannot hide. With AMX, the same form of rank 32 decodes bf16 weights at [2.5
times](applications.md#the-papers-form-on-half-a-billion-parameters) plain decoding; int8 and int4 were not measured
there."""

TABLE_5 = """[All forms and tasks](applications.md#results), on the default model of 135 million parameters. OPT's
weights were not at hand, so the draft model is one of 7 million parameters, trained for minutes. The paper's literal
form, `paper`, is slower than plain LoRA on all three tasks, and slower than the draft model: every node brings four
stream rows into the pass, which two cores compute for longer than they read weights. Streams of our own form, trained
afterwards for the tuned target, are faster than the draft model in SQL, by about the paper's factor; they were not
measured on the other two tasks. On the 0.5B with AMX, `paper` decodes SQL [faster than plain
LoRA](applications.md#the-papers-form-on-half-a-billion-parameters), but no draft model was measured there."""

TABLE_6 = """[Lengths by task](comparison.md#mean-acceptance-length-by-task) of streams, Medusa-1 and the lossless form
come from 120 prompts of 128 new tokens, of which 20 are MT-Bench's; those of Hydra and EAGLE come from 18 prompts of
64. On held-out completions with 16 nodes, the [0.5B](#the-same-on-a-target-of-05-billion-parameters) yields 1.51 for
the lossless form with 75 thousand parameters, 2.06 for Medusa-1 with 33 million, 2.47 for Hydra in our form, and 3.57
for our streams. Of these, only the lossless form gains nothing in the last fifth of its training. On the [default
model](#the-papers-recipes-on-the-same-completions), trained on 1.0 million tokens of its own, the lossless form yields
1.66, Medusa-1 1.85 and Hydra++ 2.38, with completions of other prompts held out. The lossless form is level there too.
Trained on completions of one collection of prompts, it yields 1.65 on the [default
model](#trainings-of-the-comparison-on-the-default-model) and on the
[0.5B](#trainings-of-the-comparison-on-05-billion-parameters), Medusa-1 1.81 and 1.87. On Spec-Bench with 8 nodes, both
are 0.14 tokens longer on the 0.5B. So 0.5 billion parameters lengthen the paper's form by little, if at all. What it
would do at 7 billion was not measured."""

FIGURE_5 = """The paper's streams are not conditioned on the token emitted at their node, so the row quotes ours without
this condition (riding streams), which come from an adapter that was trained with both. With it, the first two have 0.79
and 0.65. Streams without it are ahead of Medusa's heads, as in the paper. Their similarity rises with the layers, from
0.68 to 0.82 for the first, and falls at the last norm, after which the heads are compared."""

FIGURE_7 = """The paper has one text, in which access to the future leads to a better choice of a class in Python. Ours
are queries of SQL. Shared streams alone are right on fewer rows than plain LoRA alone, so texts of the paper's kind
exist, and at least as many of the opposite kind."""

FIGURE_10 = """As in the paper, the speedup rises from one child to two and then falls. Pruning to 16 nodes makes
steps faster (3.7 plain steps against 4.1 with three children, 4.7 against 5.6 with four, 6.2 against 8.2 with five)
and costs as much acceptance, so that the speed stays: 0.74, 0.56 and 0.41 either way. Best-first trees of 8 and 16
nodes have 1.68 and 1.67. The whole tree has to run through the lower layers before it is pruned, and two cores have
no idle arithmetic for that. Streams that ride have longer steps than those that trail, since every node takes its
streams along."""

FIGURE_12A = """Equation 8 allows an angle of at most π/2N, where N counts the tokens of the longest sequence and
the streams. Here N is 256, which no row reaches: 0.006 radians a stream, above the relative precision of bf16 (0.004).
Without `--rotation-step`, N is the longest sequence of the model; for 8,192 tokens the angle is 0.0002, which bf16 does
not resolve. Rotation has 0.15 tokens a pass less than stream embeddings, and 3.3 points (0.3 to 6.2) less of SQL with
the same results; exact match is 2.6 points lower, with an interval that includes 0 (-0.4 to 5.6). Rotation with 16
layers, which the paper finds above embeddings with 4, was not trained. Each form was trained once."""

FIGURE_12B = """The target is Qwen2.5-Coder-1.5B as stored, on two cores with AMX. Streams draft chains that are
verified by rejection, the paper's rule, and trees of 8 nodes that are verified by matching, as Medusa's are. Both are
ahead of Medusa by length and by speed for every k, as in the paper. That speeds fall as k grows is not shown: six
prompts are too few. The adapters are not equals, since Medusa saw 0.13 million tokens of completions twice, and the
streams, which are our own form, 1.7 million in four trainings."""

FIGURE_13 = """Lengths rise from the chain to the tree, as in the paper, and fall with pruning. A tree of 37 nodes
costs 4.2 plain steps on two cores, so it loses what it accepts; cut to 16 nodes it costs 3.7 and has 0.75 of plain
decoding's speed, against 0.73. The paper's own shape, a tree over four streams cut to 32 nodes, costs 6.4 plain
steps, and 8.4 where its streams ride. A threshold of 0.05 keeps too little here: 1.61 tokens a pass."""

FIGURES_17_19 = """The complete command for the passes over time, the bytes that they read and their arithmetic is

```console
python research/study.py trace --model OPT_1_3B --draft OPT_125M --adapter ADAPTER --data DIR --out RESULT.json
```

with folders of OPT-1.3B, of OPT-125M and of streams trained for the former. It has not been run with these models.
The figures' own quantities, kernel and memory utilisation, are lacking: nothing here reads a GPU's counters."""

FIGURE_21 = """The length rises with k at each context, and the speed falls from k = 2 on at 512 and 2,048 tokens, and
from k = 1 on at 8,000. With k = 4 a step takes 7.3 plain ones at 512 tokens, 6.7 at 2,048 and 9.4 at 8,000. It is about
as expensive at 512 tokens as at 2,048: the cost is the arithmetic of 85 nodes, and attention to the text adds to it
only at 8,000. The paper ran on a GPU whose arithmetic is idle at this width. All values are of three passages."""

PASSES = """No text of ours is written pass by pass with its rejected tokens. `anabranch generate --show-drafts` colours
the accepted tokens by who proposed them:

![The answer with its tokens coloured by who proposed them](pictures/drafts.svg)

These are 80 tokens in 25 passes of the default model, by streams, prompt lookup and a 4-bit copy of the target, which
has the name *lead* there."""

LEVIATHAN_2 = """With two models of one family, alpha is near T5-XXL's by T5-small, but the draft costs 0.39 of a pass
where theirs costs 0.02. On two cores with AMX the best gamma is 2, as theorem 3.8 predicts for greedy decoding; the
predicted 1.29 times are 1.14, with 2.17 tokens a pass where 2.30 are predicted. At temperature 1 no gamma is faster
than plain decoding. On small T5s of our own, with AVX2, c is 0.20 and a step of gamma 3 takes 2.6 plain ones, so the
predicted 1.76 times are 0.96. T5-XXL's rows are [predicted](theory.md#closed-forms) from the paper's alpha, gamma and
c."""

STAGED_1 = """On two cores with AMX, a chain of 4 tokens by the draft model decodes code at 1.20 times plain decoding
(median) and the tree of 8 nodes at 1.13; with a Katz trigram below the draft model it is 1.12, and with prompt lookup
1.17. With top-k 50, only the chain is as fast as plain decoding. On two cores with AVX2 all of them were slower. The
draft has a third of the target's parameters, where theirs has a nineteenth. The n-gram model was counted on 0.31
million tokens that the draft model wrote, a four-hundredth of the paper's, and saves too few of its passes to be
seen."""

ITEMS = (
    Item(
        *(ACL, "figure 1", "draft model against streams, drawn", "reproduced", "[both](methods.md) run on one loop"),
        v1="figure 1",
    ),
    Item(ACL, "figure 2", "shared and lossless mode, drawn", "reproduced", "[both modes](methods/streams.md)"),
    Item(
        *(ACL, "figure 3", "the architecture, drawn", "reproduced"),
        "streams ride in the pass or trail it, with the [same drafts](derivations.md#why-riding-and-trailing-agree)",
        v1="figure 2",
    ),
    Item(
        *(ACL, "table 1", "speedup and score on MT-Bench, Llama and Vicuna", "needs a GPU"),
        "the models are 7B to 33B",
        "SS-Lossless 2.93x to 3.24x, SS-Shared 3.05x to 3.35x, EAGLE 2.78x to 3.07x, Hydra 2.50x to 2.70x, Medusa "
        "1.98x to 2.33x; score 6.17 to 7.12, SS-Shared 6.21 to 7.22",
        *(values.mt_bench_speed, TABLE_1),
    ),
    Item(
        *(ACL, "table 2", "speedup by task of Spec-Bench", "differs"),
        "faster on every task, as there, but by less ([by task](comparison.md#from-05-to-15-billion-parameters))",
        "SS-Lossless 2.11x to 3.45x by task and model, mathematical reasoning 2.89x to 3.45x; EAGLE 1.96x to 2.99x",
        *(values.spec_bench_speeds, TABLE_2),
    ),
    Item(
        *(ACL, "table 3", "shared mode on SQL: speedup, length, parameters", "reproduced"),
        "length and speedup on [a 0.5B](applications.md#the-papers-form-on-half-a-billion-parameters), after 5 % of "
        "the rows and one epoch",
        "Mistral-7B 2.93x, 3.67 tokens, 8.2E4 parameters; Medusa 2.74x, 3.16; EAGLE 2.75x, 3.58",
        *(values.sql, TABLE_3),
    ),
    Item(
        *(ACL, "table 3", "shared mode: quality, E2E and DialogSum", "differs"),
        "no gain in quality; E2E after 151 steps, where Medusa is ahead; DialogSum on [135M](applications.md#results) "
        "alone ([more](#acl-table-3))",
        "Mistral-7B: SQL exact match 84.50 (LoRA 84.16); E2E 2.93x, 3.67 tokens, Medusa 2.74x, 3.16, ROUGE-1 68.37 "
        "(67.82); DialogSum 2.04x, 2.96, 44.89 (44.74)",
        values.other_tasks,
    ),
    Item(
        *(V1, "table 1", "`paper-v1`'s form on SQL, DialogSum and E2E", "differs"),
        "`paper-v1` on [135M](applications.md#results), with fewer layers of streams and little training",
        "OPT-1.3b: SQL 2.39x, 3.57 tokens, exact match 87.40 (LoRA 84.98); DialogSum 1.94x, 2.62; E2E 2.45x, 3.72; "
        "4.096E4 parameters. OpenLlama-7b: SQL 3.14x, 4.13; Phi-1.3b: SQL 2.62x, 3.53",
        *(values.first_version, V1_TABLE),
    ),
    Item(
        *(ACL, "table 4", "quantised targets", "differs"),
        "[here](#quantised-targets): exact match hardly falls, and the speedup falls with the weights' bits, as there; "
        "the speedups are small on two cores with AVX2",
        "2.92x (FP16), 2.84x (INT8), 2.68x (INT4); exact match 84.50, 83.89, 82.11",
        *(values.quantised, TABLE_4),
    ),
    Item(
        *(ACL, "table 5", "latency beside a draft model (OPT-125m)", "differs"),
        "the literal form on [135M](applications.md#results) is slower than the draft model",
        "draft model / streams, ms a sample: SQL 269 / 133 (OPT-1.3b), 301 / 157 (6.7b); DialogSum 494 / 248, 556 / "
        "445; E2E 346 / 164, 412 / 245. v1 differs for OPT-6.7b: DialogSum 443, E2E 244",
        *(values.draft_model_latency, TABLE_5, "table 2"),
    ),
    Item(
        *(ACL, "table 6", "mean accepted tokens on MT-Bench", "differs"),
        "all are shorter, and the lossless form is last",
        "Vicuna-7B: SS-Lossless 3.52, SS-Shared 3.68, EAGLE 3.94, Hydra 3.70, Medusa 2.67",
        *(values.mt_bench_lengths, TABLE_6),
    ),
    Item(
        *(ACL, "figure 4", "quality with future tokens in sight", "reproduced"),
        "[here](#peeking-at-future-tokens), after a short LoRA tuning",
        ours=values.peeking,
    ),
    Item(
        *(ACL, "figure 5", "similarity of stream states to true states", "reproduced"),
        "[here](#cosine-similarity-of-stream-states-to-true-future-states), of streams without conditioning",
        ours=values.cosine,
        note=FIGURE_5,
    ),
    Item(
        *(ACL, "figure 6", "gradient norms by layer", "reproduced", "[here](#gradient-norms-by-layer)"),
        ours=values.gradients_below,
    ),
    Item(
        *(ACL, "figure 7", "a text where seeing the future helps", "differs"),
        "as many texts of the opposite kind ([one of the first kind](#a-text-where-seeing-the-future-helps))",
        *("one text", values.example_texts, FIGURE_7),
    ),
    Item(
        *(ACL, "figures 8 and 9", "parameters, memory and operations of a draft (Llama-13B)", "differs"),
        "[counted](theory.md#what-a-draft-costs): fewest parameters and reads as there; operations are above Medusa's "
        "and EAGLE's on one path",
        "over 1,000 times fewer parameters than Medusa; v1 (shared): 10,000 times",
        values.counted,
    ),
    Item(
        *(ACL, "figure 10", "children per node, with pruning", "differs"),
        "[here](#children-per-node-with-and-without-pruning): rises, then falls, as there; pruning does not help",
        ours=values.branching_speeds,
        note=FIGURE_10,
        v1="figure 5",
    ),
    Item(
        *(ACL, "figure 11", "number of stream layers", "reproduced"),
        "[here](#number-of-stream-layers), with 2 and 8 layers: SQL with the same results rises by 4.3 points (1.0 to "
        "7.6), exact match by 3.2 (-0.2 to 6.6)",
        "2 to 8 layers recommended, 4 used",
        values.stream_layers,
        v1="figure 6",
    ),
    Item(
        *(ACL, "figure 12a", "value rotation", "reproduced"),
        "[here](#value-rotation-in-place-of-stream-embeddings): below stream embeddings, by 3.3 points (0.3 to 6.2) of "
        "SQL with the same results",
        "v1 has Phi-1.3b where ACL has OPT-1.3B",
        *(values.rotation, FIGURE_12A, "figure 9a"),
    ),
    Item(
        *(ACL, "figure 12b", "top-k sampling", "reproduced"),
        "[here](#top-k-sampling-at-temperature-1): streams stay ahead of Medusa by length and by speed for every k, as "
        "there",
        ours=values.top_k,
        note=FIGURE_12B,
        v1="figure 9b",
    ),
    Item(
        *(ACL, "figure 13", "chain, tree, pruned tree", "differs"),
        "[here](#chain-tree-pruned-tree): wide trees cost more than they accept on two cores",
        ours=values.early_exit,
        note=FIGURE_13,
    ),
    Item(
        *(ACL, "figure 14", "pruning, drawn", "reproduced"),
        "by the early-exit layer's scores against a threshold (`prune_threshold=`), or by number (`prune=`): "
        "[settings](settings.md#drafters)",
        v1="figure 7",
    ),
    Item(
        *(ACL, "figure 15", "the mask of a tree, drawn", "reproduced"),
        "`anabranch.tree.mask_of`; tested node by node",
        v1="figure 8",
    ),
    Item(
        *(ACL, "figure 16", "segment attention, drawn", "reproduced"),
        "`--segment`, with its [memory](benchmarks/training.md#segment-attention)",
    ),
    Item(
        *(ACL, "figure 17", "kernel utilisation over time", "needs a GPU"),
        "of two cores there is a [trace](#a-trace-of-passes-over-time) with the bytes and the arithmetic of passes",
        ours=values.traced_passes,
        note=FIGURES_17_19,
        v1="figure 10",
    ),
    Item(
        *(ACL, "figure 18", "batch sizes", "differs"),
        "[here](#batch-sizes-from-1-to-16): two cores have no idle arithmetic from two rows on",
        *("above 2x at every size", values.batches),
    ),
    Item(
        *(ACL, "figure 19", "kernel and memory utilisation on an A100", "needs a GPU"),
        "[counted](#parameters-memory-traffic-arithmetic-and-utilisation) from shapes; [what is "
        "lacking](#acl-figure-17)",
        ours=values.intensity,
        v1="figure 3",
    ),
    Item(
        *(ACL, "figure 20", "streams against a draft model, by equation 10", "reproduced"),
        "[theory](theory.md#closed-forms); `research/theory_figures.py` draws it",
        "parity at ζ = 1.4 β (gamma 4, target / draft 10)",
        values.eq_10,
        v1="figure 4",
    ),
    Item(
        *(ACL, "figure 21", "long contexts", "differs"),
        "[here](#long-contexts), gamma = 3: a tree of 85 nodes is 7 to 9 plain steps of arithmetic on two cores",
        *("k = 4: 2.64x", values.long_contexts, FIGURE_21),
    ),
    Item(
        *(ACL, "figures 22 and 23", "texts pass by pass", "differs"),
        "ours are [coloured by proposer](#acl-figures-22-and-23), without rejected tokens",
        note=PASSES,
        v1="figures 11 and 12",
    ),
    Item(
        *(LEVIATHAN, "figure 1", "an example, iteration by iteration", "differs"),
        "passes of a text are [counted](#a-trace-of-passes-over-time); no text is shown with its rejected tokens",
        *("38 tokens in 9 passes of the target", values.traced_text),
    ),
    Item(
        *(LEVIATHAN, "table 1, figures 2 to 4", "the closed forms", "reproduced"),
        "[computed](#closed-forms-of-leviathan-et-al) by `anabranch.analysis.theory`, not drawn",
        "3.69 tokens (alpha 0.8, gamma 5), 3.16x (0.75, 7, c 0.02), 1.25x (0.2, c 0)",
        values.closed_form,
    ),
    Item(
        *(LEVIATHAN, "table 2", "T5-XXL: alpha, gamma, speedup", "differs"),
        "alpha and, for greedy decoding, the best gamma are as predicted; the "
        "[draft](#acceptance-rates-predicted-and-measured-speedup) is a third of the target, so it gains little or "
        "nothing",
        "alpha 0.53 to 0.82, 1.4x to 3.4x; EnDe by T5-small: T = 0: 0.75, gamma 7, 3.4x; T = 1: 0.62, gamma 7, 2.6x",
        *(values.leviathan_speeds, LEVIATHAN_2),
    ),
    Item(
        *(LEVIATHAN, "table 3", "alpha of draft models, bigrams and unigrams", "reproduced"),
        "[the same study](#acceptance-rates-predicted-and-measured-speedup), on one target; other targets are "
        "[T5s of our own](#the-same-with-encoder-decoder-models)",
        "draft models 0.5 to 0.9; unigrams and bigrams 0.03 to 0.23",
        values.leviathan_alphas,
    ),
    Item(
        *(LEVIATHAN, "figure 5", "a trace over time", "differs"),
        "[here](#a-trace-of-passes-over-time): fewer passes of the target for gamma 7 than for 3, as there, but the "
        "draft model has a third of the target's parameters, so its own passes take most of the time",
        ours=values.traced_passes,
    ),
    Item(
        *(STAGED, "figure 1", "roofline of small batches", "reproduced"),
        "[here](#small-batches-under-the-roofs-of-memory-and-arithmetic): one row lies under the roof of memory; from "
        "eight rows on, arithmetic is the roof",
        "about 1 operation a byte, 0.13 % of the arithmetic",
        values.roof,
    ),
    Item(
        *(STAGED, "tables 1 and 2, figure 2", "bandwidth, tokens/s and their spread", "differs"),
        "[here](#staged-speculative-decoding): a draft of a third of the target saves less; greedy decoding gains, by "
        "less than there; stages gain nothing over the tree",
        "plain, chain, staged: greedy 150, 350, 475 tokens/s, 1.00, 0.31, 0.23 of the bytes; top-k 150, 219, 298, "
        "1.00, 0.48, 0.35; 164 prompts",
        *(values.staged, STAGED_1),
    ),
    Item(
        *(STAGED, "figure 3", "the origin of each token", "differs"),
        "ours are [coloured by proposer](#acl-figures-22-and-23), of streams and lookup; no staged text is shown",
    ),
)
