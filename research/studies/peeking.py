"""ACL figure 4: the next token, predicted with the next gamma true tokens after it in sight (eq. 7).

    p(y[t+1] | y[..t], y[t+2 .. t+1+gamma])

Two masks. In the *leak-free* one, the row that predicts y[t+1] has future rows of its own, which see the text up to t
and the future rows before them, but never y[t+1]. The *literal* one only lets row t attend to rows t+2 ... t+1+gamma of
the same pass, as a modified attention mask does. These rows have themselves attended to y[t+1], so from the second
layer on the answer is in sight.

T text length, P predicting positions, G = gamma, R rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.learning.examples import Example
from anabranch.methods.terms import terms_of
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.prompts import chat_ids
from anabranch.support.jsonfiles import read_rows
from anabranch.support.table import percent, signed_percent
from anabranch.tasks import METRICS
from studies.base import Chart, Line, Result, Setup, Study, Table
from studies.forward import Earlier, causal, rows_pass
from task_scores import Columns, compared

__all__ = ["STUDY", "leak_free_rows", "literal_mask", "predictions", "written"]

Mask = Literal["leak-free", "literal"]
GAMMAS = (0, 1, 2, 4)
RANK, LR, BATCH = 8, 1e-3, 4
MOST = 24  # predicting positions of a text
ROWS = 16  # texts that are written side by side
ASK = "Describe this restaurant in one or two sentences: "


def leak_free_rows(length: int, positions_P: Tensor, gamma: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the leak-free pass: their places in the text [R], their mask [R, R], and the predicting rows [P].

    Rows are the text, then gamma future rows per position, then one predicting row per position. T = 4, t = 1, G = 1:

        row           0  1  2  3 | 4: future, at 3 | 5: predicts y[2], at 1
        future sees   x  x       | x               |
        predicts, sees x         | x               | x
    """
    p, t = len(positions_P), length
    future_PG = positions_P[:, None] + 2 + torch.arange(gamma)
    inside = future_PG < length
    places = torch.cat((torch.arange(t), future_PG.clamp(max=length - 1).flatten(), positions_P))
    visible = torch.zeros(len(places), len(places), dtype=torch.bool)
    visible[:t, :t] = causal(t)
    for index, position in enumerate(positions_P.tolist()):
        first, own = t + index * gamma, t + p * gamma + index
        last = first + int(inside[index].sum())
        # rows past the end of the text see only themselves, and nothing sees them
        visible[range(first, first + gamma), range(first, first + gamma)] = True
        visible[first:last, : position + 1] = True
        visible[first:last, first:last] = causal(last - first)
        visible[own, :position] = True
        visible[own, own] = True
        visible[own, first:last] = True
    return places, visible, torch.arange(t + p * gamma, len(places))


def literal_mask(length: int, gamma: int) -> Tensor:
    """The mask [T, T] in which row t also sees rows t + 2 ... t + 1 + gamma."""
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    return (ahead <= 0) | ((ahead >= 2) & (ahead <= 1 + gamma))


def predictions(
    target: Decoder, tokens_T: Tensor, positions_P: Tensor, gamma: int, mask: Mask, terms: nn.ModuleList | None = None
) -> Tensor:
    """Logits of the token after each position [P, V], with gamma true tokens beyond it in sight."""
    sides: Any = terms
    if mask == "literal":
        everywhere = torch.arange(len(tokens_T))
        rows = rows_pass(target, tokens_T, everywhere, literal_mask(len(tokens_T), gamma), sides)
        return target.logits(rows.hidden_1RD[0, positions_P])
    places_R, visible_RR, main_P = leak_free_rows(len(tokens_T), positions_P, gamma)
    rows = rows_pass(target, tokens_T[places_R], places_R, visible_RR, sides)
    return target.logits(rows.hidden_1RD[0, main_P])


def _asked(example: Example) -> tuple[Tensor, Tensor]:
    """The text [T], and the positions that predict a token of its completion [P]."""
    first = len(example.prompt_ids) - 1
    positions = torch.arange(first, min(len(example) - 1, first + MOST))
    return torch.tensor((*example.prompt_ids, *example.answer_ids)), positions


@torch.no_grad()
def _evaluate(
    target: Decoder, examples: Sequence[Example], gamma: int, mask: Mask, terms: nn.ModuleList
) -> dict[str, float]:
    loss, right, count = 0.0, 0, 0
    for example in examples:
        tokens_T, positions_P = _asked(example)
        logits = predictions(target, tokens_T, positions_P, gamma, mask, terms).float()
        wanted = tokens_T[positions_P + 1]
        loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        count += len(wanted)
    return {"loss": round(loss / count, 4), "accuracy": round(right / count, 4)}


@torch.no_grad()
def written(
    target: Decoder, examples: Sequence[Example], gamma: int, end: int, terms: nn.ModuleList | None = None
) -> list[list[int]]:
    """Greedy completions [at most MOST each], each token with the reference's next gamma tokens beyond it in sight.

    All texts are written side by side. Their keys and values are kept; those of the other rows are dropped.
    """
    sides: Any = terms
    texts, found = [list(example.prompt_ids) for example in examples], [list[int]() for _ in examples]
    kept, owners_C = None, torch.empty(0, dtype=torch.long)
    while unfinished := [index for index, one in enumerate(found) if len(one) < MOST and end not in one]:
        blocks, owners, of_text = [], [], []
        for index in unfinished:
            first, length = int((owners_C == index).sum()), len(texts[index])
            ahead = examples[index].answer_ids[len(found[index]) + 1 :][:gamma]
            # no row that runs sees the token before those in sight
            tokens = torch.tensor([*texts[index], end, *ahead] if ahead else texts[index])
            places_R, visible_RR, _ = leak_free_rows(len(tokens), torch.tensor([length - 1]), gamma)
            run = torch.tensor([*range(first, length), *range(len(tokens), len(places_R))])
            blocks.append((tokens[places_R[run]], places_R[run], visible_RR[run][:, run]))
            owners += [index] * len(run)
            of_text += [True] * (length - first) + [False] * (len(run) - length + first)
        tokens_R, positions_R = (torch.cat([block[part] for block in blocks]) for part in (0, 1))
        owners_R, text_R = torch.tensor(owners), torch.tensor(of_text)
        visible_RL = torch.cat((owners_R[:, None] == owners_C, torch.block_diag(*(mask for *_, mask in blocks))), 1)
        rows = rows_pass(target, tokens_R, positions_R, visible_RL, sides, kept)
        last = torch.tensor([len(block[0]) for block in blocks]).cumsum(0) - 1
        for index, token in zip(unfinished, target.logits(rows.hidden_1RD[0, last]).argmax(-1).tolist(), strict=True):
            found[index].append(token)
            texts[index].append(token)
        going = torch.cat((torch.ones(len(owners_C), dtype=torch.bool), text_R))
        positions_L = positions_R if kept is None else torch.cat((kept.positions_C, positions_R))
        kept = Earlier(positions_L[going], [(k[:, :, going], v[:, :, going]) for k, v in rows.keys_values])
        owners_C = torch.cat((owners_C, owners_R))[going]
    return [[token for token in one if token != end] for one in found]


def _scores(target: Target, decoder: Decoder, examples: Sequence[Example], gamma: int, terms: nn.ModuleList) -> Columns:
    """ROUGE of greedy completions, over the references' first MOST tokens, by column and text."""
    end, metric = target.config.eos_token_ids[0], METRICS["rouge"]
    scores = []
    texts = [
        text
        for first in range(0, len(examples), ROWS)
        for text in written(decoder, examples[first : first + ROWS], gamma, end, terms)
    ]
    for example, tokens in zip(examples, texts, strict=True):
        text = target.tokenizer.decode(tokens)
        reference = target.tokenizer.decode([token for token in example.answer_ids[:MOST] if token != end])
        scores.append(metric.score(text, (reference,), {}))
    return {key: list(by_text) for key, by_text in zip(metric.columns, zip(*scores, strict=True), strict=True)}


def _train(
    target: Decoder, examples: Sequence[Example], gamma: int, mask: Mask, terms: nn.ModuleList, steps: int
) -> None:
    """Low-rank terms on all linear layers, on the same batches for every gamma and mask."""
    optimizer = torch.optim.AdamW(terms.parameters(), lr=LR, weight_decay=0.0)
    order = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / max(1, steps // 10)) * (1 - step / steps)
        optimizer.zero_grad()
        for example in order.sample(examples, min(BATCH, len(examples))):
            tokens_T, positions_P = _asked(example)
            logits = predictions(target, tokens_T, positions_P, gamma, mask, terms).float()
            (F.cross_entropy(logits, tokens_T[positions_P + 1]) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(terms.parameters(), 1.0)
        optimizer.step()


def texts(setup: Setup, target: Target, split: str, count: int) -> list[Example]:
    """Descriptions of restaurants written by people (E2E NLG), the first of each."""
    if setup.data is None:
        raise InputError("the study needs texts by people; give a folder with e2e_nlg/ in it with --data")
    end = target.config.eos_token_ids[:1]
    found: list[Example] = []
    for prompt, completion in _pairs(setup, split):
        if len(found) == count:
            break
        ids = chat_ids(target.tokenizer, ASK + prompt, model=target.name)
        answer = target.tokenizer.encode(completion, add_special_tokens=False)
        found.append(Example(tuple(ids), (*answer, *end)))
    return found


def _pairs(setup: Setup, split: str) -> Iterator[tuple[str, str]]:
    assert setup.data is not None
    for _, row in read_rows(setup.data / "e2e_nlg" / f"{split}.jsonl.gz"):
        yield row["meaning_representation"], row.get("human_reference") or row["references"][0]


def _measure(setup: Setup) -> dict[str, Any]:
    target = setup.target(pack=False, dtype="float32")
    decoder = target.decoder.requires_grad_(False)
    training = texts(setup, target, "train", max(BATCH, min(setup.steps * BATCH, 2000)))
    held_out = texts(setup, target, "test", setup.limit)
    records, first = [], None
    cases: list[tuple[Mask, int]] = [("leak-free", gamma) for gamma in GAMMAS]
    cases += [("literal", gamma) for gamma in GAMMAS[1:]]
    for mask, gamma in cases:
        name = f"{mask}, gamma {gamma}"
        setup.report(name)
        with torch.autocast("cpu", enabled=decoder.dtype != torch.float32):  # terms are float32
            case = partial(_case, target, decoder, training, held_out, mask, gamma, setup.steps)
            record = dict(setup.part(name, case))
        if scores := record.pop("scores", None):
            first = first or scores
            record |= compared(scores, first)
        records.append(record)
    return {"records": records, "steps": setup.steps, "batch": BATCH, "rank": RANK, "texts": len(held_out)}


def _case(
    target: Target,
    decoder: Decoder,
    training: Sequence[Example],
    held_out: Sequence[Example],
    mask: Mask,
    gamma: int,
    steps: int,
) -> dict[str, Any]:
    """Tune for a mask, and measure before and after."""
    torch.manual_seed(0)
    terms = terms_of(target.config, RANK)
    assert terms is not None
    untrained = _evaluate(decoder, held_out, gamma, mask, terms)  # terms begin at zero
    _train(decoder, training, gamma, mask, terms, steps)
    tuned = _evaluate(decoder, held_out, gamma, mask, terms)
    record: dict[str, Any] = {"mask": mask, "gamma": gamma, "untrained": untrained, "tuned": tuned}
    if mask == "leak-free":  # what is generated is not there for the rows in sight to have seen
        record["scores"] = _scores(target, decoder, held_out, gamma, terms)
    return record


def _of(result: Result, mask: Mask) -> list[Any]:
    """The records of a mask; without peeking both masks are the same."""
    return [record for record in result["records"] if record["mask"] == mask or record["gamma"] == 0]


def _ours(result: Result) -> str:
    told = []
    for mask in ("leak-free", "literal"):
        first, *_, last = _of(result, mask)
        gain = f"{first['tuned']['accuracy']:.1%} to {last['tuned']['accuracy']:.1%}"
        told.append(f"{mask}: accuracy {gain} with {last['gamma']} tokens in sight")
    first, *_, last = _of(result, "leak-free")
    rouge = " and ".join(percent(record["quality"]["rouge1"]) for record in (first, last))
    gain = signed_percent(last["difference"]["rouge1"])
    told.append(
        f"ROUGE-1 of generated texts with 0 and {last['gamma']} in sight: {rouge}, a difference of {gain} points"
    )
    return "; ".join(told)


def _table(result: Result) -> Table:
    columns = METRICS["rouge"].columns
    rows: list[list[object]] = []
    for record in result["records"]:
        numbers = []
        for stage in ("untrained", "tuned"):
            numbers += [f"{record[stage]['loss']:.3f}", f"{record[stage]['accuracy']:.1%}"]
        for key in columns:
            if "quality" in record:
                numbers += [percent(record["quality"][key]), signed_percent(record["difference"][key])]
            else:
                numbers += ["-", "-"]  # no texts are generated with the literal mask
        rows.append([record["mask"], record["gamma"], *numbers])
    titles = ("mask", "gamma", "loss untuned", "accuracy untuned", "loss tuned", "accuracy tuned")
    for title in columns.values():
        titles += (f"{title}, %", "difference from gamma 0")
    return titles, rows


def _chart(result: Result) -> Chart:
    lines = []
    for mask in ("leak-free", "literal"):
        records = _of(result, mask)
        lines.append(Line(mask, [r["gamma"] for r in records], [r["tuned"]["accuracy"] for r in records]))
    return Chart("Next token with true tokens beyond it in sight", "gamma", "accuracy of the next token", lines)


STUDY = Study(
    name="peeking",
    papers="ACL figure 4",
    title="Peeking at future tokens",
    measures="Loss and accuracy of the next token of texts by people (E2E NLG), where the row that predicts it also "
    "attends to the gamma true tokens behind that token: untuned, and after a short LoRA tuning (rank 8, all linear "
    "layers, the same batches for all). With the *leak-free* mask, the rows in sight have not seen the next token. "
    "With the *literal* one they have, as when only the attention mask is changed, so part of the gain is the answer "
    "itself. Texts are generated with the leak-free mask, after the tuning: each token of a greedy text of at most 24 "
    "tokens is chosen with the reference's next gamma tokens in sight, and ROUGE compares the text with the reference.",
    paper="no values in the text; the generation metrics of Phi-3, trained so, rise substantially",
    differs="a small target, a few tuning steps; the paper does not say whether the tokens "
    "in sight have attended to the next one",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    limit=128,
    command="python research/study.py peeking --dtype bfloat16 --data DIR --out benchmarks/study-peeking-DATE.json",
)
