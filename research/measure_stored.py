"""How near a GGUF file's model as it is decoded here, and by llama.cpp, is to the file's own values in float32.

Passages of wikitext2 are read by the dequantised model in float32, which is the reference, and then by each form. For
every form: the perplexity of the passages; how often the likeliest token is the reference's; and the mean divergence
KL(reference, form) of the distributions over the reference's 64 likeliest tokens and the rest taken as one, in nats.
llama.cpp is asked for one position in ``--every``, by a server of the wheel xllamacpp in another interpreter; the last
two columns count these positions only, for every form.

    python research/measure_stored.py FILE.gguf --data DIR [--llama PYTHON] --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.bench.report import environment
from anabranch.loading import LoadConfig, load
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.support.files import shown_command, write_atomically

FORMS = (
    ("float32", {"dtype": "float32", "quantize": "none"}),
    ("as stored", {}),
    ("dequantised to bf16", {"quantize": "none"}),
    ("int8", {"quantize": "int8"}),
    ("int4", {"quantize": "int4"}),
)
LIKELIEST = 64
CHUNK = 64  # tokens of a pass
LLAMA = """
import json, sys
from http.client import HTTPConnection
from urllib.parse import urlsplit
import xllamacpp
asked = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = asked["model"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.n_ctx, params.n_parallel, params.n_gpu_layers = 2048, 1, 0
server = xllamacpp.Server(params)
address = urlsplit(server.listening_address)
answers = []
for ids, ends in asked["passages"]:
    for end in ends:
        body = {"prompt": ids[:end], "n_predict": 1, "temperature": 0, "n_probs": 2000, "cache_prompt": True}
        connection = HTTPConnection(address.hostname, address.port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        reply = json.loads(connection.getresponse().read())
        (first,) = reply["completion_probabilities"]
        answers.append({each["id"]: each["logprob"] for each in first["top_logprobs"]})
        connection.close()
json.dump(answers, open(asked["out"], "w"))
"""


def main() -> None:
    """Measure the forms of one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each passage")
    parser.add_argument("--every", type=int, default=8, help="llama.cpp is asked for every so many positions")
    parser.add_argument("--llama", help="a Python interpreter with xllamacpp")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    reference: list[Tensor] = []
    passages: list[list[int]] = []
    rows = []
    for label, options in FORMS:
        loaded = load(LoadConfig(model=args.model, **options))
        if not passages:
            passages = read_passages(args.data, loaded.target.tokenizer, args.passages, args.tokens)
        found = [log_probs_of(loaded.target.decoder, ids) for ids in passages]
        reference = reference or found
        rows.append({"form": label, **compared(reference, found, passages, args.every)})
        print(json.dumps(rows[-1]), flush=True)
        del loaded, found
    if args.llama:
        asked = asked_of(passages, args.every)
        rows.append(
            {"form": "llama.cpp", **beside(reference, by_llama(args.llama, args.model, asked), passages, asked)}
        )
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": shown_command("python", "research/measure_stored.py", *sys.argv[1:], hidden=("--data", "--llama")),
        "environment": environment(torch.device("cpu")),
        "model": Path(args.model).name,
        "passages": len(passages),
        "tokens": args.tokens,
        "forms": rows,
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")


def read_passages(data: Path, tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """The beginnings of the first texts that are long enough."""
    passages = []
    with gzip.open(data / "wikitext2" / "test.jsonl.gz", "rt") as file:
        for line in file:
            ids = tokenizer(json.loads(line)["text"][: 12 * tokens])["input_ids"][:tokens]
            if len(ids) == tokens:
                passages.append(ids)
            if len(passages) == count:
                return passages
    raise SystemExit(f"there are only {len(passages)} passages of {tokens} tokens; ask for fewer")


def log_probs_of(target: Decoder, ids: list[int]) -> Tensor:
    """The log probabilities [len(ids) - 1, V] of the tokens after each but the last, in half precision."""
    parts = []
    with target.inference():
        cache = target.new_cache(1, len(ids))
        cache.add_row(target.rope().prompt(len(ids), len(ids)))
        for start in range(0, len(ids) - 1, CHUNK):
            chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
            result = target.forward(Inputs.of_prompt(chunk), cache, loras=(None,), need="logits")
            cache.commit([range(len(chunk))])
            assert result.logits_MV is not None
            parts.append(result.logits_MV.float().log_softmax(-1).half())
    return torch.cat(parts)


def asked_of(passages: list[list[int]], every: int) -> list[tuple[list[int], list[int]]]:
    """The positions of each passage, as lengths of its beginnings, that llama.cpp is asked for."""
    return [(ids, list(range(every, len(ids), every))) for ids in passages]


def by_llama(python: str, model: str, asked: list[tuple[list[int], list[int]]]) -> list[dict[int, float]]:
    """llama.cpp's 2,000 largest log probabilities at each position."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.json"
        request = json.dumps({"model": str(Path(model).expanduser().resolve()), "passages": asked, "out": str(out)})
        subprocess.run([python, "-c", LLAMA], input=request, text=True, check=True, stdout=subprocess.DEVNULL)
        return [{int(key): value for key, value in each.items()} for each in json.loads(out.read_text())]


def compared(reference: list[Tensor], found: list[Tensor], passages: list[list[int]], every: int) -> dict[str, Any]:
    """The figures of a form that gives all log probabilities."""
    total = count = 0
    for ids, ours in zip(passages, found, strict=True):
        after = torch.tensor(ids[1:])[:, None]
        total, count = total - float(ours.float().gather(1, after).sum()), count + len(after)
    picked = [
        {int(i): float(ours[end - 1, i]) for i in theirs[end - 1].topk(LIKELIEST).indices} | best(ours[end - 1])
        for (_, ends), theirs, ours in zip(asked_of(passages, every), reference, found, strict=True)
        for end in ends
    ]
    return {
        "perplexity": round(math.exp(total / count), 4),
        **beside(reference, picked, passages, asked_of(passages, every)),
    }


def best(row: Tensor) -> dict[int, float]:
    """The likeliest token of a row, and its log probability."""
    return {int(row.argmax()): float(row.max())}


def beside(
    reference: list[Tensor],
    picked: list[dict[int, float]],
    passages: list[list[int]],
    asked: list[tuple[list[int], list[int]]],
) -> dict[str, Any]:
    """The agreement and the divergence at some positions, given some log probabilities of each."""
    rows = [theirs[end - 1].float() for (_, ends), theirs in zip(asked, reference, strict=True) for end in ends]
    agreed, divergence = 0, []
    for row, ours in zip(rows, picked, strict=True):
        agreed += max(ours, key=lambda token: ours[token]) == int(row.argmax())
        top = row.topk(LIKELIEST).indices.tolist()
        p = [math.exp(float(row[token])) for token in top]
        q = [math.exp(ours.get(token, -30.0)) for token in top]
        p.append(max(1e-9, 1 - math.fsum(p)))
        q.append(max(1e-9, 1 - math.fsum(q)))
        divergence.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    return {
        "positions": len(rows),
        "agreement": round(agreed / len(rows), 4),
        "divergence": round(math.fsum(divergence) / len(rows), 5),
    }


if __name__ == "__main__":
    main()
