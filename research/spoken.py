"""Speech that espeak-ng makes from the texts of a data set, as WAV files: sounds to transcribe and to train on.

    python research/spoken.py TEXTS.jsonl.gz FOLDER --lines 200

TEXTS has a field ``text`` in each row. FOLDER gets NUMBER.wav for the beginning of each row; voices and speeds take
turns.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import subprocess
from pathlib import Path

__all__ = ["speak"]

WORDS = 60  # about 25 s
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3", "en-us+f5", "en-gb-scotland")
SPEEDS = (150, 165, 140)  # words a minute


def speak(texts: Path, folder: Path, lines: int, words: int = WORDS, *, varied: bool = False) -> list[tuple[Path, str]]:
    """Speak the first words of the first rows; returns files and their texts. ``varied``: with several voices."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with gzip.open(texts, "rt", encoding="utf-8") as rows:
        for number, row in enumerate(itertools.islice(rows, lines)):
            text, file = " ".join(json.loads(row)["text"].split()[:words]), folder / f"{number:04}.wav"
            voice = ["-v", VOICES[number % len(VOICES)]] if varied else []
            speed = SPEEDS[number % len(SPEEDS)] if varied else SPEEDS[0]
            subprocess.run(["espeak-ng", *voice, "-s", str(speed), "-w", str(file), "--", text], check=True)
            made.append((file, text))
    return made


def main() -> None:
    """Write the sounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int, required=True)
    parser.add_argument("--words", type=int, default=150, help="words of each text (default 150)")
    given = parser.parse_args()
    made = speak(given.texts, given.folder, given.lines, given.words, varied=True)
    print(f"{len(made)} sounds in {given.folder}")


if __name__ == "__main__":
    main()
