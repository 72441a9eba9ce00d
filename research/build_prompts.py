"""Write the prompt file that the shipped adapter's training answers were made from.

Reads permissively licensed data sets (see docs/adapter.md for the licences) from a folder of gzip'd
JSON lines and writes one JSON object a line: {"id", "source", "prompt", "chat"}. ``chat`` says whether
the prompt is wrapped in the model's chat template before it is answered.

    python research/build_prompts.py --data DIR --german de_gsd-ud-dev.conllu de_gsd-ud-test.conllu --out prompts.jsonl

The German sentences are those of Universal Dependencies' UD_German-GSD (CC BY-SA 4.0) and UD_German-PUD (CC BY-SA 3.0),
or of XQuAD (CC BY-SA 4.0), whose English paragraphs are asked about. With --without, prompts that earlier files hold
are left out and numbers go on behind them:

    python research/build_prompts.py --data DIR --german de_pud-ud-test.conllu --seed 1 --scale 0.6 \\
        --without prompts.jsonl --out more.jsonl
    python research/build_prompts.py --data DIR --xquad xquad.en.json xquad.de.json --seed 2 --scale 0.6 \\
        --without prompts.jsonl more.jsonl --out third.jsonl
    python research/build_prompts.py --data DIR --german de_gsd-ud-dev.conllu de_gsd-ud-test.conllu \\
        de_pud-ud-test.conllu --xquad xquad.en.json xquad.de.json --seed 3 \\
        --without prompts.jsonl more.jsonl third.jsonl --out fourth.jsonl

--questions adds questions that people asked a search engine, from Natural Questions' EfficientQA files (CC BY-SA 3.0).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anabranch.support.jsonfiles import read_rows

PASSAGE = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following passage in a few sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Read the passage and say who appears in it and what happens.\n\n{text}",
    "{text}\n\nAsk and answer three questions about the text above.",
)
ABOUT = (
    "What is {title}?",
    "When did {title} begin?",
    "Who is known for {title}?",
    "Where is {title} from?",
    "What happened to {title} in the end?",
    "Why is {title} important?",
    "How many people were involved in {title}?",
    "Who was {title}?",
)
TRANSLATE = (
    "Translate German to English: {text}",
    "Translate German to English: {text}",
    "Translate German to English: {text}",
    "Translate this into English:\n{text}",
    "What does this German sentence mean? {text}",
)
SQL = (
    "{context}\n\nWrite a SQL query: {question}",
    "Given the table below, answer with SQL only.\n{context}\nQuestion: {question}",
)
READ = (
    "{text}\n{question}",
    "{text}\n{question}",
    "{text}\n\nQuestion: {question}",
    "Answer the question with the help of this text.\n\n{text}\n\n{question}",
)
E2E = (
    "Write a sentence about a restaurant from these facts: {meaning_representation}",
    "Turn this data into a short description: {meaning_representation}",
)


def rows(data: Path, name: str) -> Iterator[dict[str, Any]]:
    for _, row in read_rows(data / f"{name}.jsonl.gz"):
        yield row


def article(text: str) -> tuple[str, str]:
    """Title and running text of a tokenised WikiText article, its spacing put back."""
    title, _, body = text.strip().partition("\n")
    body = "\n".join(line for line in body.split("\n") if not line.strip().startswith("="))
    for source in (0, 1):
        part = (title, body)[source]
        part = part.replace("<unk>", "it").replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
        part = re.sub(r" ([.,;:!?)\]'%])", r"\1", part)
        part = re.sub(r"([(\[$]) ", r"\1", part)
        part = re.sub(r'" ([^"]*) "', r'"\1"', part)
        title, body = (part.strip(" ="), body) if source == 0 else (title, part)
    return title, body


def cut(text: str, rng: random.Random) -> str:
    """A stretch of 600 to 3,200 characters that begins at a sentence."""
    start = rng.randrange(max(1, len(text) - 3200))
    start = text.find(". ", start) + 2 if start else 0
    return text[start : start + rng.randint(600, 3200)].strip()


def corpus(path: Path) -> str:
    """de_gsd-ud-dev.conllu -> ud_german_gsd."""
    return f"ud_german_{path.name.removeprefix('de_').split('-')[0]}"


def sentences(path: Path) -> list[str]:
    """The sentences of a CoNLL-U file that are long enough to be worth translating."""
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    return [text for text in texts if len(text) >= 40]


def articles(path: Path) -> list[list[dict[str, Any]]]:
    """The paragraphs of each article of a SQuAD file: {"context", "qas": [{"question"}]}."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [article["paragraphs"] for article in found]


def reading(english: Path, german: Path, rng: random.Random) -> list[tuple[str, str]]:
    """Questions on one to four paragraphs, questions alone, summaries, and translations, in a random order."""
    prompts = []
    for paragraphs in articles(english):
        for at, paragraph in enumerate(paragraphs):
            for asked in paragraph["qas"]:
                first = rng.randint(max(0, at - 2), at)
                text = "\n".join(p["context"] for p in paragraphs[first : rng.randint(at, at + 1) + 1])
                prompts.append(("xquad_en", rng.choice(READ).format(text=text, question=asked["question"].strip())))
                if rng.random() < 0.4:
                    prompts.append(("xquad_en", asked["question"].strip()))
            prompts.append(("xquad_en", rng.choice(PASSAGE).format(text=paragraph["context"])))
    for paragraphs in articles(german):
        for paragraph in paragraphs:
            lines = re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜ„])", paragraph["context"])
            lines += [asked["question"].strip() for asked in paragraph["qas"] if rng.random() < 0.4]
            prompts += [("xquad_de", rng.choice(TRANSLATE).format(text=line)) for line in lines if len(line) >= 40]
    rng.shuffle(prompts)
    return prompts


def collect(
    data: Path, rng: random.Random, scale: float, german: Sequence[Path], known: frozenset[str]
) -> list[tuple[str, str]]:
    """(source, prompt) pairs in a random order, none of which is in ``known``."""

    def pick(name: str, count: int) -> list[dict[str, Any]]:
        found = list(rows(data, name))
        rng.shuffle(found)
        return found[: max(1, round(count * scale))]

    prompts: list[tuple[str, str]] = []
    asked = [r["prompt"] for r in pick("oasst1_en/train", 3600)]
    asked = [prompt for prompt in asked if prompt not in known]
    if missing := max(1, round(3600 * scale)) - len(asked):
        # the pairs are used up: messages that a classifier calls the user's
        more = [r["text"] for r in rows(data, "oasst1_en/messages") if r["p_prompter"] > 0.9]
        rng.shuffle(more)
        asked += [text for text in more if text not in known][:missing]
    prompts += [("oasst1_en", prompt) for prompt in asked]
    prompts += [("gsm8k", r["question"]) for r in pick("gsm8k/train", 1300)]
    for r in pick("self_instruct_seed/train", 175):
        prompts.append(("self_instruct_seed", "\n\n".join(x for x in (r["instruction"], r.get("input")) if x)))
    prompts += [("e2e_nlg", rng.choice(E2E).format(**r)) for r in pick("e2e_nlg/train", 150)]
    prompts += [("sql_create_context", rng.choice(SQL).format(**r)) for r in pick("sql_create_context/train", 200)]
    prompts += [("sql_create_context", r["question"]) for r in pick("sql_create_context/train", 600)]
    for r in pick("gutenberg/train", 350):
        passage = cut(" ".join(r["text"].split()), rng)
        prompts.append(("gutenberg", rng.choice(PASSAGE).format(text=passage)))
    for r in 3 * pick("wikitext2/train", 606):
        title, text = article(r["text"])
        about = rng.choice(ABOUT).format(title=title)
        kind = rng.random()
        if kind < 0.5:
            prompts.append(("wikitext2", rng.choice(PASSAGE).format(text=cut(text, rng))))
        elif kind < 0.85:
            prompts.append(("wikitext2", f"{cut(text, rng)}\n{about}"))
        else:
            prompts.append(("wikitext2", about))
    found = [(corpus(path), line) for path in german for line in sentences(path)]
    rng.shuffle(found)
    prompts += [(source, rng.choice(TRANSLATE).format(text=text)) for source, text in found[: round(1700 * scale)]]
    rng.shuffle(prompts)
    return unknown(prompts, known)


def searched(paths: Sequence[Path], rng: random.Random, scale: float) -> list[tuple[str, str]]:
    """Questions to a search engine, most of them as a person would write them."""
    asked = [row["question"].strip() for path in paths for _, row in read_rows(path)]
    rng.shuffle(asked)
    written = (q if rng.random() < 0.3 else f"{q[:1].upper()}{q[1:]}?" for q in asked[: round(1700 * scale)])
    return [("natural_questions", question) for question in written]


def unknown(prompts: Sequence[tuple[str, str]], known: frozenset[str]) -> list[tuple[str, str]]:
    """The prompts that are not ``known``, cut to what a context holds."""
    return [(source, prompt[:4200]) for source, prompt in prompts if prompt[:4200] not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--german", type=Path, nargs="*", default=[], help="CoNLL-U files of UD_German-GSD")
    parser.add_argument(
        "--xquad", type=Path, nargs=2, metavar=("ENGLISH", "GERMAN"), help="xquad.en.json xquad.de.json"
    )
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="JSONL files of EfficientQA")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each source to take")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="earlier prompt files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    earlier = [json.loads(line) for path in args.without for line in path.read_text(encoding="utf-8").splitlines()]
    rng, known = random.Random(args.seed), frozenset(prompt["prompt"] for prompt in earlier)
    found = collect(args.data, rng, args.scale, args.german, known)
    if args.xquad:
        found += unknown(reading(*args.xquad, rng), known)
    if args.questions:
        found += unknown(searched(args.questions, rng, args.scale), known)
    if args.xquad or args.questions:
        rng.shuffle(found)
    prompts = [
        {"id": len(earlier) + i, "source": source, "prompt": prompt, "chat": rng.random() < 0.94}
        for i, (source, prompt) in enumerate(found)
    ]
    args.out.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    print(f"{len(prompts)} prompts -> {args.out}")


if __name__ == "__main__":
    main()
