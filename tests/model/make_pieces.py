"""Train two small SentencePiece models, and write what they make of hard strings to ``pieces.json``.

    pip install sentencepiece==0.2.3
    python tests/model/make_pieces.py

One has Llama's settings: a space before each text, digits apart, bytes for other characters. The other has Gemma's: no
space, and runs of spaces and line ends are words of the user's.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    *(
        "hello",
        "Hello",
        "world",
        "the",
        "tokenization",
        "don't",
        "I'm",
        "x",
        "def",
        "return",
        "==",
        "!=",
        "//",
        "{",
        "}",
    ),
    *("()", "[0]", "12345", "3.14", "0", "007", "\u00e9", "\u00df", "na\u00efve", "\u6771\u4eac", "\u65e5\u672c\u8a9e"),
    *("\u4f60\u597d", "\uc548\ub155", "\u041f\u0440\u0438\u0432\u0435\u0442", "\u05e9\u05dc\u05d5\u05dd"),
    *("\u0645\u0631\u062d\u0628\u0627", "\U0001f642", "\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "e\u0301"),
    *("\u200b", "\u00a0", "\ufb01", "\u00bd", "\ufeff", "\u2581", "\u2581\u2581", "<0x0A>", "<s>", "</s>", "<unk>"),
    *(" ", "  ", "   ", "     ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", "    return", "a" * 9, "=" * 17, "-" * 40),
    *("....", "\0"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"add_dummy_prefix": True},
    "gemma": {
        "add_dummy_prefix": False,
        "user_defined_symbols": [
            *("<start_of_turn>", "<end_of_turn>", "<table>"),
            *("▁" * count for count in range(2, 9)),
            *("\n" * count for count in range(1, 5)),
        ],
    },
}


def texts() -> list[str]:
    """Each word alone, and random sequences of them with and without spaces."""
    chance = random.Random(0)
    made = [
        ("" if chance.random() < 0.5 else " ").join(chance.choices(WORDS, k=chance.randint(2, 9))) for _ in range(120)
    ]
    return ["", *WORDS, *made]


def main() -> None:
    """Train the models on this repository's documentation and code."""
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src/anabranch/model").glob("*.py"))]
    corpus = [line for file in files for line in file.read_text().splitlines()]
    made = {}
    for name, settings in SETTINGS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=700,
            character_coverage=0.999,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            num_threads=1,
            minloglevel=2,
            **settings,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        kinds = [
            2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
            for i in range(len(pieces))
        ]
        for word in settings.get("user_defined_symbols", ()):
            kinds[pieces.piece_to_id(word)] = 4
        made[name] = {
            "pieces": [[pieces.id_to_piece(i), round(pieces.get_score(i), 4), kinds[i]] for i in range(len(pieces))],
            "texts": [[text, pieces.encode(text)] for text in texts()],
        }
    Path(__file__).with_name("pieces.json").write_text(
        json.dumps(made, ensure_ascii=True, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
