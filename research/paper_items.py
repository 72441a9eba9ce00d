"""Every numbered table and figure of the papers: where ours is, and how it compares.

``verdict`` is one of VERDICTS. A study's own row has the values; here is the reason, with the place of its numbers.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ITEMS", "VERDICTS", "Item"]

VERDICTS = ("reproduced", "differs", "inconclusive", "needs a GPU")
ACL, LEVIATHAN, STAGED = "ACL", "Leviathan et al.", "Spector and Ré"


class Item(NamedTuple):
    """A table or figure: its ``paper``, ``number`` there, what it ``shows``, the ``verdict`` and ``why``."""

    paper: str
    number: str
    shows: str
    verdict: str
    why: str


GPU = "`python scripts/check_gpu.py` and `anabranch bench` with a folder of the model are ready"
BOUND = (
    "on two cores with AVX2 a step of 8 nodes costs 2.8 to 3.8 plain ones with every method except lookups ([cost of a "
    "step](comparison.md#cost-of-a-step))"
)
ITEMS = (
    Item(ACL, "figure 1", "draft model against streams, drawn", "reproduced", "[both](methods.md) run on one loop"),
    Item(ACL, "figure 2", "shared and lossless mode, drawn", "reproduced", "[both modes](methods/streams.md)"),
    Item(
        *(ACL, "figure 3", "the architecture, drawn", "reproduced"),
        "streams ride in the pass or trail it, with the [same drafts](derivations.md#why-riding-and-trailing-agree)",
    ),
    Item(
        *(ACL, "table 1", "speedup and score on MT-Bench, Llama and Vicuna", "needs a GPU"),
        f"the models are 7B to 33B; {GPU}. On the 0.5B, {BOUND}, so the order of methods by acceptance is not that by "
        "speed. Scores are those of plain decoding in lossless mode, since the tokens are",
    ),
    Item(
        *(ACL, "table 2", "speedup by task of Spec-Bench", "differs"),
        f"[times plain decoding by task](comparison.md#times-plain-decoding-by-task): {BOUND}; sized by the "
        "controller, streams of the 0.5B have 1.05, other trained methods 0.93 to 1.00. On an H200, where a pass of 8 "
        "nodes costs 1.2 plain ones, [streams of the 0.5B](gpu.md#methods-on-a-real-model) decode at 1.20 times plain "
        "decoding, other trained methods below it",
    ),
    Item(
        *(
            ACL,
            "table 3",
            "shared mode on SQL, E2E and DialogSum: speedup, length, parameters, quality",
            "reproduced",
        ),
        "for SQL, [on a 0.5B](applications.md#the-papers-form-on-half-a-billion-parameters): 3.69 tokens a pass and "
        "2.4 to 2.6 times plain LoRA's decoding (the paper's Mistral-7B: 3.67 and 2.93), Medusa 2.58 and 2.0 (3.16 "
        "and 2.74). The streams have 17,920 parameters, Medusa's heads 33 million. Exact match differs from plain "
        "LoRA's by -4.4 to +0.8 points on 1,000 rows (+0.3 there). Training used 3,000 rows and one epoch, where the "
        "paper has all rows and five. E2E "
        "and DialogSum were tuned on the default model alone, with [shorter drafts](applications.md#results): 1.59 "
        "and 1.61. Parameters are [reproduced](comparison.md#parameters-on-the-papers-targets) but one",
    ),
    Item(
        *(ACL, "table 4", "quantised targets", "differs"),
        "[here](#quantised-targets): the speedup falls with the weights' bits, since arithmetic grows beside memory",
    ),
    Item(
        *(ACL, "table 5", "latency beside a draft model (OPT-125m)", "differs"),
        "[SQL and E2E](applications.md#results): for SQL, streams trained afterwards have 1.99 times plain decoding, a "
        "draft model 0.97; OPT's weights are not at hand",
    ),
    Item(
        *(ACL, "table 6", "mean accepted tokens on MT-Bench", "differs"),
        "[by task](comparison.md#mean-acceptance-length-by-task), on the 0.5B with 8 nodes: streams 2.09, Hydra 1.59, "
        "EAGLE, Medusa and Medusa-1 1.37, the lossless form 1.26. On held-out completions with 16, at the end of "
        "[each training](#the-same-on-a-target-of-05-billion-parameters): the lossless form 1.51 with 75 thousand "
        "parameters, Medusa-1 2.06 with 33 million, Hydra in our form 2.47; our streams 3.57. The lossless form has "
        "1.50 on the [default model](#the-papers-recipes-on-the-same-completions), so a larger target did not help",
    ),
    Item(
        *(ACL, "figure 4", "quality with future tokens in sight", "reproduced"),
        "[here](#peeking-at-future-tokens), with 4 true tokens in sight, after a short LoRA tuning: accuracy rises "
        "from 67.1 to 72.5 %, and ROUGE-1 of 128 texts generated in this way by 4.6 points (2.0 to 7.2)",
    ),
    Item(
        *(ACL, "figure 5", "similarity of stream states to true states", "reproduced"),
        "[here](#cosine-similarity-of-stream-states-to-true-future-states): 0.79 and 0.65 for the first two streams of "
        "the 0.5B after the last norm, 0.49 and 0.41 for Medusa's heads, which learned from the same completions",
    ),
    Item(ACL, "figure 6", "gradient norms by layer", "reproduced", "[here](#gradient-norms-by-layer)"),
    Item(
        *(ACL, "figure 7", "a text where seeing the future helps", "differs"),
        "the paper has one example. Of 1,000 rows of SQL, [the shared form]"
        "(applications.md#the-papers-form-on-half-a-billion-parameters) alone has 76 right and plain LoRA alone 94: "
        "there are such texts, and as many of the opposite kind",
    ),
    Item(
        *(ACL, "figures 8 and 9", "parameters, memory and operations of a draft (Llama-13B)", "differs"),
        "[counted](theory.md#what-a-draft-costs): fewest parameters and reads as there; operations are above Medusa's "
        "and EAGLE's on one path",
    ),
    Item(
        *(ACL, "figure 10", "children per node, with pruning", "differs"),
        "[here](#children-per-node-with-and-without-pruning): the speedup falls from two children on, since "
        "arithmetic limits a pass of 13 nodes already",
    ),
    Item(
        *(ACL, "figure 11", "number of stream layers", "reproduced"),
        "[here](#number-of-stream-layers), with 2 and 8 layers: SQL with the same results rises by 4.3 points (1.0 to "
        "7.6) of 500 rows, exact match by 3.2 (-0.2 to 6.6), and the length from 1.91 to 2.42",
    ),
    Item(
        *(ACL, "figure 12a", "value rotation", "reproduced"),
        "[here](#value-rotation-in-place-of-stream-embeddings), with 2 stream layers: rotation stays below embeddings. "
        "SQL with the same results falls by 3.5 points (0.6 to 6.3) of 489 rows, exact match by 3.4 (0.5 to 6.3) of "
        "500, and the length from 1.91 to 1.77. But the largest angle that the paper allows is 0.0002 here, below the "
        "precision of bf16, so the streams hardly differ. Rotation with 16 layers was not trained",
    ),
    Item(
        *(ACL, "figure 12b", "top-k sampling", "differs"),
        "[here](#top-k-sampling-at-temperature-1): with the paper's rule, chains of streams yield 2.37 tokens a pass "
        "at k = 1 and 1.84 at k = 50. Medusa's heads on the same target yield 1.44 and 1.42, so streams are ahead, as "
        "there. But on two cores with AVX2, trees of 8 nodes are [slower than plain "
        "decoding](comparison.md#times-plain-decoding-by-task). Other programs were running during the study, so its "
        "speeds are not used",
    ),
    Item(
        *(ACL, "figure 13", "chain, tree, pruned tree", "differs"),
        "[here](#chain-tree-pruned-tree): a tree of 37 nodes costs 3.8 plain steps on two cores, so it loses what it "
        "accepts; lengths rise as there",
    ),
    Item(
        *(ACL, "figure 14", "pruning, drawn", "reproduced"),
        "by the early-exit layer's scores against a threshold (`prune_threshold=`), or by number (`prune=`): "
        "[settings](settings.md#drafters)",
    ),
    Item(ACL, "figure 15", "the mask of a tree, drawn", "reproduced", "`anabranch.tree.mask_of`; tested node by node"),
    Item(
        *(ACL, "figure 16", "segment attention, drawn", "reproduced"),
        "`--segment`, with its [memory](benchmarks/training.md#segment-attention)",
    ),
    Item(
        *(ACL, "figures 17 and 19", "utilisation over time and on an A100", "needs a GPU"),
        "[counted](#parameters-memory-traffic-arithmetic-and-utilisation) from shapes; of two cores there is a "
        "[trace](#a-trace-of-passes-over-time) with the bytes and the arithmetic of drafts and passes",
    ),
    Item(
        *(ACL, "figure 18", "batch sizes", "differs"),
        "[here](#batch-sizes-from-1-to-16): two cores have no idle arithmetic from two rows on",
    ),
    Item(
        *(ACL, "figure 20", "streams against a draft model, by equation 10", "reproduced"),
        "[theory](theory.md#closed-forms); `research/theory_figures.py` draws it",
    ),
    Item(
        *(ACL, "figure 21", "long contexts", "differs"),
        "[here](#long-contexts), gamma = 3, after training on passages of 2,048 tokens: from k = 1 to 4 the length "
        "rises from 2.13 to 2.82 tokens with 2,048 tokens of context, and from 2.64 to 3.24 with 8,000. The speed is "
        "0.88, 0.96, 0.58 and 0.42 times plain decoding's with 2,048 tokens, and 1.01, 0.90, 0.58 and 0.35 with 8,000: "
        "on two cores a tree of 85 nodes takes 7 to 9 plain steps, since attention to a long text is arithmetic for "
        "every node",
    ),
    Item(
        *(ACL, "figures 22 and 23", "texts pass by pass", "reproduced"),
        "`anabranch generate --show-drafts` ([terminal](terminal.md#generate))",
    ),
    Item(
        *(LEVIATHAN, "figure 1", "an example, iteration by iteration", "reproduced"),
        "`anabranch generate --show-drafts` with `draft_model`",
    ),
    Item(
        *(LEVIATHAN, "table 1, figures 2 to 4", "the closed forms", "reproduced"),
        "[theory](theory.md#closed-forms)",
    ),
    Item(
        *(LEVIATHAN, "table 2", "T5-XXL: alpha, gamma, speedup", "differs"),
        "[two models of one family](#acceptance-rates-predicted-and-measured-speedup): alpha is 0.79 and 0.69 at "
        "temperatures 0 and 1 (T5-XXL by T5-small: 0.75 and 0.62), but c is 0.45 in place of at most 0.04, and on two "
        "cores with AVX2 a step of gamma 3 takes 2.9 plain ones: 0.81 times plain decoding. On [small T5s of our "
        "own](#the-same-with-encoder-decoder-models) alpha is 0.78 and 0.74, c 0.20 and a step of gamma 3 takes 2.6 "
        "plain ones, so the predicted 1.76 times are 0.96; T5-XXL's rows are [predicted](theory.md#closed-forms)",
    ),
    Item(
        *(LEVIATHAN, "table 3", "alpha of draft models, bigrams and unigrams", "reproduced"),
        "[the same study](#acceptance-rates-predicted-and-measured-speedup), on one target: 0.79 and 0.69 for a draft "
        "model (theirs 0.5 to 0.9), 0.02 to 0.12 for n-grams counted on 172,533 tokens of code (0.03 to 0.23); "
        "descriptions of restaurants, which repeat themselves, give [a "
        "trigram](#the-same-with-encoder-decoder-models) 0.62 and 1.54 times plain decoding",
    ),
    Item(
        *(LEVIATHAN, "figure 5", "a trace over time", "differs"),
        "[here](#a-trace-of-passes-over-time): fewer passes of the target for gamma 7 than for 3, as there, but the "
        "draft model has a third of the target's parameters, so its own passes take most of the time",
    ),
    Item(
        *(STAGED, "figure 1", "roofline of small batches", "reproduced"),
        "[here](#small-batches-under-the-roofs-of-memory-and-arithmetic): one row lies under the roof of memory, and "
        "uses 13 % (0.5B) and 17 % (1.5B) of the arithmetic of two cores, where theirs uses 0.13 %; from eight rows "
        "on, arithmetic is the roof",
    ),
    Item(
        *(STAGED, "tables 1 and 2, figure 2", "bandwidth, tokens/s and their spread", "differs"),
        "[here](#staged-speculative-decoding): 0.64 of plain decoding's bytes a token with a draft model and 0.61 with "
        "stages, greedy (theirs 0.31 and 0.23), since the draft has a third of the target's parameters, where theirs "
        "has a nineteenth; and a step of 8 nodes takes 7 plain ones on two cores with AVX2, so all lose",
    ),
    Item(
        *(STAGED, "figure 3", "the origin of each token", "reproduced"),
        "`anabranch generate --show-drafts` colours each token by its source ([terminal](terminal.md#generate))",
    ),
)
