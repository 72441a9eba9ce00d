"""Whisper: real-time factor, tokens a pass and word errors of drafters, beside faster-whisper and transformers.

    python research/transcription.py MODEL --sounds FILE.wav ... --text FILE.jsonl.gz --out benchmarks/NAME.json

MODEL is a folder in CTranslate2's layout, which all of them can load. All transcribe the same files; rounds alternate,
and times are medians. ``--text`` is a data set whose texts espeak-ng speaks, so that word errors have a reference;
those of other sounds are counted against our plain decoding, of which drafts must have none. At 4 rows, files are cut
at pauses (``parallel``), and by faster-whisper's pipeline by its own detector. ``suffix`` is measured without its
store of earlier outputs, which would have the transcripts of the rounds before.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anabranch
from anabranch.bench.report import environment
from anabranch.decoding.stats import Stats
from anabranch.errors import one_line
from anabranch.model.encoder import Source
from anabranch.model.kernel_use import kernels_of
from anabranch.model.load import base_name
from anabranch.speech.audio import RATE, Samples, log_mel, read_audio, window
from anabranch.speech.vocabulary import Vocabulary
from anabranch.support.files import shown_command, write_atomically
from spoken import speak

Run = Callable[[Sequence[Samples]], tuple[list[str], dict[str, Any]]]
WINDOW = 3000  # frames


@dataclass
class Contender:
    """A way to transcribe sounds: ``run`` returns their texts, and what it counted."""

    name: str
    run: Run


def ours(model: anabranch.Model, drafter: str, rows: int) -> Contender:
    """Our decoding with a drafter: window after window, or ``rows`` windows of files that are cut at pauses."""

    def run(sounds: Sequence[Samples]) -> tuple[list[str], dict[str, Any]]:
        if rows == 1:
            found = [model.transcribe(sound, language="en", drafter=drafter, rows=1) for sound in sounds]
        else:
            found = model.transcribe(list(sounds), language="en", drafter=drafter, rows=rows, parallel=True)
        stats = Stats.merged(each.stats for each in found)
        counted = {
            "tokens": stats.tokens,
            "target_passes": stats.steps,
            "tokens_per_pass": round(stats.mean_acceptance_length, 4),
            "seconds_by_part": {part: round(seconds, 3) for part, seconds in stats.parts.items()},
            "tokens_of_segments": [[segment.tokens for segment in each.segments] for each in found],
        }
        return [each.text for each in found], counted

    return Contender(f"anabranch {drafter}, {rows} row{'s' if rows > 1 else ''}", run)


def faster_whisper(folder: Path, rows: int) -> Contender:
    """faster-whisper with int8 weights, greedy; its pipeline of batches where there are several rows."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    loaded = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=torch.get_num_threads())
    pipeline = BatchedInferencePipeline(loaded) if rows > 1 else None

    def run(sounds: Sequence[Samples]) -> tuple[list[str], dict[str, Any]]:
        texts, tokens = [], 0
        for sound in sounds:
            given: Any = {"language": "en", "beam_size": 1}
            found, _ = (
                loaded.transcribe(sound, **given)
                if pipeline is None
                else pipeline.transcribe(sound, batch_size=rows, without_timestamps=False, **given)
            )
            segments = list(found)
            texts.append("".join(segment.text for segment in segments).strip())
            tokens += sum(len(segment.tokens) for segment in segments)
        return texts, {"tokens": tokens}

    return Contender(f"faster-whisper int8, {rows} row{'s' if rows > 1 else ''}", run)


def transformers_model(folder: Path, vocabulary: Vocabulary, dtype: torch.dtype) -> tuple[Any, Any]:
    """transformers' model of a folder in CTranslate2's layout, and its tokenizer."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    from anabranch.model.ctranslate2 import read_ctranslate2

    contents = read_ctranslate2(folder)
    suppressed = {name: contents.config.pop(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
    model = WhisperForConditionalGeneration(WhisperConfig(**contents.config)).eval()
    model.load_state_dict({name: value.float() for name, value in contents.tensors.items()}, strict=False)
    model.tie_weights()
    languages = {f"<|{code}|>": number for code, number in vocabulary.languages.items()}
    more = {"lang_to_id": languages, "task_to_id": vocabulary.tasks} if languages else {}
    model.generation_config = GenerationConfig(
        **suppressed,
        **more,
        **dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), vocabulary.end),
        decoder_start_token_id=vocabulary.start,
        no_timestamps_token_id=vocabulary.no_timestamps,
        prev_sot_token_id=vocabulary.previous,
        is_multilingual=bool(languages),
        max_initial_timestamp_index=50,
        return_timestamps=True,
        max_length=model.config.max_target_positions,
    )
    return model.to(dtype), contents.tokenizer


def transformers(loaded: Any, tokenizer: Any, vocabulary: Vocabulary, name: str, **options: Any) -> Contender:
    """transformers' own loop over windows at batch 1, greedy, with or without its speculation."""
    speaks: Any = {"language": "en", "task": "transcribe"} if vocabulary.languages else {}

    def run(sounds: Sequence[Samples]) -> tuple[list[str], dict[str, Any]]:
        texts = []
        for sound in sounds:
            features = log_mel(sound, loaded.config.num_mel_bins)
            features = window(features, 0, WINDOW, WINDOW) if features.shape[1] < WINDOW else features
            mask = torch.ones(1, features.shape[1], dtype=torch.long)
            with torch.inference_mode():
                made = loaded.generate(
                    features[None].to(loaded.dtype),
                    attention_mask=mask,
                    return_timestamps=True,
                    return_segments=True,
                    condition_on_prev_tokens=True,
                    temperature=0.0,
                    **speaks,
                    **options,
                )
            tokens = [token for segment in made["segments"][0] for token in segment["tokens"].tolist()]
            texts.append(tokenizer.decode(vocabulary.text(tokens)).strip())
        return texts, {}

    return Contender(f"transformers {name}", run)


def word_errors(reference: str, text: str) -> tuple[int, int]:
    """Insertions, deletions and substitutions of words from the reference to a text, and the words of the reference."""
    wanted, found = (re.sub(r"[^\w\s']", " ", each.lower()).split() for each in (reference, text))
    row = np.arange(len(found) + 1)
    for place, word in enumerate(wanted, 1):
        changed = row[:-1] + np.array([word != other for other in found], int)
        best = np.concatenate([[place], np.minimum(changed, row[1:] + 1)])
        row = np.minimum.accumulate(best - np.arange(len(best))) + np.arange(len(best))
    return int(row[-1]), len(wanted)


def measured(contenders: Sequence[Contender], sounds: Sequence[Samples], rounds: int) -> dict[str, dict[str, Any]]:
    """The texts, the counts, and the seconds of each round of all contenders, in turn; one that fails has an error."""
    results: dict[str, dict[str, Any]] = {each.name: {"seconds": []} for each in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            result = results[contender.name]
            if "error" in result:
                continue
            began = time.perf_counter()
            try:
                result["texts"], counted = contender.run(sounds)
            except Exception as error:  # of another library; a failed run is no timing
                result["error"] = f"{type(error).__name__}: {one_line(error)}"
                continue
            if number:  # the first round warms up
                result["seconds"].append(time.perf_counter() - began)
            result.update(counted)
            print(f"round {number}: {contender.name}: {time.perf_counter() - began:.2f} s", file=sys.stderr, flush=True)
    return results


def encoder_seconds(model: anabranch.Model, sounds: Sequence[Samples]) -> float:
    """Seconds of the encoder for one window: the median of five."""
    features = window(log_mel(sounds[0], model.target.config.encoder.channels), 0, WINDOW, WINDOW)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        with model.target.decoder.inference():
            model.target.decoder.encode(Source(features=features))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def record(results: dict[str, dict[str, Any]], duration: float, references: Sequence[str | None]) -> dict[str, Any]:
    """The results with real-time factors, word errors, and whether drafts changed a token."""
    rows = {}
    for name, result in results.items():
        if "error" in result:
            rows[name] = result
            continue
        plain = results[f"anabranch none, {name.split(', ')[1]}" if ", " in name else "anabranch none, 1 row"]
        seconds, counts = statistics.median(result["seconds"]), {True: [0, 0], False: [0, 0]}
        for text, base, reference in zip(result["texts"], plain["texts"], references, strict=True):
            for place, count in enumerate(word_errors(base if reference is None else reference, text)):
                counts[reference is not None][place] += count
        tokens, same = result.pop("tokens_of_segments", None), None
        if tokens is not None:
            result["kept"] = tokens
            same = tokens == plain.get("kept", tokens)
        rows[name] = {
            **{key: value for key, value in result.items() if key not in ("texts", "kept")},
            "median_seconds": round(seconds, 3),
            "real_time_factor": round(seconds / duration, 4),
            "word_error_rate_of_spoken_text": round(counts[True][0] / counts[True][1], 4) if counts[True][1] else None,
            "words_differing_from_plain": counts[False][0],
            "tokens_equal_plain": same,
        }
    return rows


def main() -> None:
    """Transcribe with all contenders and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sounds", type=Path, nargs="*", default=[])
    parser.add_argument("--text", type=Path, help="texts for espeak-ng: a .jsonl.gz file with a field text")
    parser.add_argument("--lines", type=int, default=8, help="rows of the texts (default 8)")
    parser.add_argument("--adapter", type=Path, action="append", help="load this adapter; repeatable")
    parser.add_argument("--drafters", nargs="*", default=["prompt_lookup", "suffix:store=0", "auto"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="auto", help="round our weights: int8 or int4, beside bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="leave out faster-whisper and transformers")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    sounds: list[Samples] = [read_audio(path) for path in given.sounds]
    references: list[str | None] = [None] * len(sounds)
    if given.text is not None:
        with tempfile.TemporaryDirectory() as folder:
            said = speak(given.text, Path(folder), given.lines)
            sounds += [read_audio(path) for path, _ in said]
        references += [text for _, text in said]
    if not sounds:
        parser.error("give --sounds or --text")
    model = anabranch.load(
        given.model, drafter="none", dtype=given.dtype, quantize=given.quantize, adapter=given.adapter
    )
    vocabulary = Vocabulary.of(model.tokenizer, model.target.config.vocab_size)
    contenders = [ours(model, drafter, rows) for rows in given.rows for drafter in ("none", *given.drafters)]
    if not given.no_peers:
        contenders += [faster_whisper(given.model, rows) for rows in given.rows]
        hf, tokenizer = transformers_model(given.model, vocabulary, torch.float32)
        contenders.append(transformers(hf, tokenizer, vocabulary, "float32"))
        contenders.append(
            transformers(hf, tokenizer, vocabulary, "float32 with prompt lookup", prompt_lookup_num_tokens=10)
        )
    duration = sum(map(len, sounds)) / RATE
    results = measured(contenders, sounds, given.rounds)
    report = {
        "command": shown_command("python", *sys.argv),
        "model": base_name(model.target),
        "environment": environment(model.target.decoder.device),
        "dtype": str(model.target.decoder.dtype).removeprefix("torch."),
        "quantize": given.quantize,
        "kernels": kernels_of(model.target.decoder).name,
        "sounds": len(sounds),
        "duration_seconds": round(duration, 2),
        "encoder_seconds_per_window": round(encoder_seconds(model, sounds), 4),
        "results": record(results, duration, references),
    }
    write_atomically(given.out, json.dumps(report, indent=1) + "\n")
    for name, row in report["results"].items():
        print(name, row.get("error") or f"real-time factor {row['real_time_factor']}", row.get("tokens_per_pass", ""))


if __name__ == "__main__":
    main()
