"""Prompts to summarise dialogues and news, which the model writes itself: training data of kinds that no free set has.

python research/build_dialogues.py ask --out asked.jsonl          (--news: news articles)
anabranch train answers --prompts asked.jsonl --temperature 0.8 --top-p 0.95 --out dialogues.jsonl
python research/build_dialogues.py summarise dialogues.jsonl --out prompts.jsonl
anabranch train answers --prompts prompts.jsonl --out summaries.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabranch.model.load import load_target
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import read_rows

NAMES = (
    "Maria",
    "Tom",
    "Chen",
    "Aisha",
    "David",
    "Lena",
    "Omar",
    "Julia",
    "Peter",
    "Sofia",
    "Ravi",
    "Emma",
    "Lucas",
    "Nina",
    "Ben",
    "Carla",
    "Ivan",
    "Mei",
    "Jack",
    "Olga",
    "Sam",
    "Fatima",
    "Leo",
    "Hannah",
)
TOPICS = (
    "a delayed train",
    "planning a birthday party",
    "a job interview",
    "returning a broken phone",
    "booking a hotel room",
    "a doctor's appointment",
    "choosing a new laptop",
    "moving to another city",
    "a lost wallet",
    "learning to drive",
    "a school project",
    "dinner at a restaurant",
    "a noisy neighbour",
    "buying a used car",
    "a holiday in Italy",
    "joining a gym",
    "a missed deadline at work",
    "adopting a dog",
    "renting an apartment",
    "a flight cancellation",
    "learning Spanish",
    "a wedding invitation",
    "a parking ticket",
    "fixing a computer",
    "a bank loan",
    "changing a university course",
    "a film they saw",
    "cooking a new recipe",
    "a camping trip",
    "a salary raise",
    "a bus tour of the city",
    "opening a small shop",
    "a sports injury",
    "gardening tips",
    "a surprise visit",
    "a music festival",
    "saving money",
    "a library card",
    "an insurance claim",
    "painting the living room",
    "a business meeting",
    "exam stress",
    "buying a gift",
    "a broken washing machine",
    "healthy eating",
    "a computer course",
    "volunteering",
    "a new colleague",
    "online shopping",
    "a visa application",
)
TEMPLATES = (
    "Summarize the following dialogue.\n\n{text}\n\nSummary:",
    "Summarize this conversation in one or two sentences:\n\n{text}",
    "{text}\n\nWhat is the conversation above about? Summarize it briefly.",
    "Write a short summary of this dialogue:\n{text}",
    "Dialogue:\n{text}\n\nSummarize the dialogue.",
)
EVENTS = (
    "a fire in an apartment building",
    "the arrest of a suspect after a robbery",
    "a football match that was decided in the last minute",
    "the election of a new mayor",
    "a storm that cut off the power",
    "a court's decision about a company",
    "a plane that had to land early",
    "a scientific discovery",
    "a celebrity's wedding",
    "a strike of bus drivers",
    "a rescue in the mountains",
    "the sale of a famous painting",
    "a new law about schools",
    "a missing child who was found",
    "a company that cuts jobs",
    "a hospital that opened a new wing",
    "a traffic accident on a motorway",
    "a flood after days of rain",
    "a minister's resignation",
    "a record at an athletics meeting",
    "an animal that escaped from a zoo",
    "a protest against a new road",
    "a fraud at a bank",
    "the first day of a music festival",
    "a survey about health",
    "a visit of a head of state",
    "a film that won an award",
    "the discovery of a shipwreck",
    "rising house prices",
    "a charity run by a ten-year-old",
)
PLACES = (
    "Ohio",
    "London",
    "Sydney",
    "Texas",
    "Glasgow",
    "Florida",
    "Mumbai",
    "Toronto",
    "Nairobi",
    "Berlin",
    "California",
    "Manchester",
    "New York",
    "Cape Town",
    "Dublin",
    "Tokyo",
    "Chicago",
    "Rome",
)
NEWS = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following article in three sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "What happened, according to this article?\n\n{text}",
)
LEAST_LINES = 4
LEAST_WORDS = 80  # of an article
NUMBERED = 0.6  # share of dialogues whose speakers are numbered instead of named


def asked(count: int) -> Iterator[dict[str, Any]]:
    """Prompts for dialogues."""
    chance = random.Random(1)
    for number in range(count):
        one, other = chance.sample(NAMES, 2)
        topic, lines = chance.choice(TOPICS), chance.choice((6, 8, 10, 12))
        text = (
            f"Write a realistic dialogue of {lines} short lines between {one} and {other} about {topic}. Begin each "
            "line with the speaker's name and a colon. Write nothing else."
        )
        yield {"id": number, "source": "dialogue", "prompt": text}


def asked_news(count: int) -> Iterator[dict[str, Any]]:
    """Prompts for news articles."""
    chance = random.Random(3)
    for number in range(count):
        one, other = chance.sample(NAMES, 2)
        event, place, words = chance.choice(EVENTS), chance.choice(PLACES), chance.choice((150, 250, 350))
        text = (
            f"Write a newspaper article of about {words} words about {event} in {place}. Mention {one} and {other} "
            "with their last names, quote one of them, and give details such as dates and numbers. Write no headline."
        )
        yield {"id": f"news {number}", "source": "news", "prompt": text}


def news_to_summarise(articles: Path, model: str) -> Iterator[dict[str, Any]]:
    """Prompts with the articles among the completions, for their summaries."""
    chance, tokenizer = random.Random(4), load_target(model).tokenizer
    for _, row in read_rows(articles):
        text = tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
        text = " ".join(text.replace("*", "").split())
        if len(text.split()) >= LEAST_WORDS:
            text = text[: text.rfind(".") + 1] or text  # the last sentence may be cut
            yield {"id": row["id"], "source": "news summaries", "prompt": chance.choice(NEWS).format(text=text)}


def to_summarise(dialogues: Path, model: str) -> Iterator[dict[str, Any]]:
    """Prompts with the dialogues among the completions, for their summaries."""
    chance, tokenizer = random.Random(2), load_target(model).tokenizer
    for _, row in read_rows(dialogues):
        said = tokenizer.decode(row["answer_ids"], skip_special_tokens=True).splitlines()
        lines = [line.strip() for line in said if ":" in line]
        if len(lines) < LEAST_LINES:
            continue
        speakers = list(dict.fromkeys(line.split(":")[0].strip("* ") for line in lines))
        if len(speakers) == 2 and chance.random() < NUMBERED:
            names = {name: f"#Person{number}#" for number, name in enumerate(speakers, 1)}
            lines = [_renamed(line, names) for line in lines]
        text = chance.choice(TEMPLATES).format(text="\n".join(lines))
        yield {"id": row["id"], "source": "dialogue summaries", "prompt": text}


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"^[* ]*([^:*]+?)[* ]*:", lambda found: f"{names.get(found[1], found[1])}:", line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    ask = parts.add_parser("ask", help="write prompts for dialogues, or for news articles")
    ask.add_argument("--count", type=int, default=260)
    summarise = parts.add_parser("summarise", help="write prompts to summarise what is in completions")
    summarise.add_argument("dialogues", type=Path)
    summarise.add_argument("--model", default="default")
    for part in (ask, summarise):
        part.add_argument("--news", action="store_true", help="news articles instead of dialogues")
        part.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.part == "ask":
        rows = list((asked_news if args.news else asked)(args.count))
    else:
        rows = list((news_to_summarise if args.news else to_summarise)(args.dialogues, args.model))
    write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts -> {args.out}")


if __name__ == "__main__":
    main()
