"""Truncate the deltas of a streams adapter to lower ranks, by their singular values.

Training finds more with high ranks than with low ones, and most of what it found fits into lower ranks: an adapter that
is trained at rank 64 and truncated is better than its size suggests.

    python scripts/truncate_adapter.py FOLDER --attention-rank 16 --mlp-rank 13 --answers ANSWERS --out SMALLER

With ``--answers``, the card states what is left on those that the adapter's training has held out of them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from derived_adapters import save_derived

from anabranch.adapters.folder import load_adapter
from anabranch.methods.low_rank import LowRank
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.load import load_target

RANKS = {"qkv": "attention_rank", "out": "attention_rank", "up": "mlp_rank", "down": "mlp_rank"}


def truncated(delta: LowRank, rank: int) -> dict[str, torch.Tensor]:
    """The best approximation of ``delta`` of a rank: weights of a LowRank, both scaled by the roots of the values."""
    left, upper = torch.linalg.qr(delta.up.detach().float())
    right, lower = torch.linalg.qr(delta.down.detach().float().T)
    u, values, vh = torch.linalg.svd(upper @ lower.T)
    root = values[:rank].sqrt()
    return {"up": left @ u[:, :rank] * root, "down": root[:, None] * vh[:rank] @ right.T}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("adapter", type=Path, help="adapter folder of the method streams")
    parser.add_argument("--attention-rank", type=int, required=True, help="rank of the deltas on q, k, v and o")
    parser.add_argument("--mlp-rank", type=int, required=True, help="rank of the deltas on the MLP's products")
    parser.add_argument("--model", default="default", help="its target")
    parser.add_argument("--answers", type=Path, help="what it was trained on; the held-out part is evaluated")
    parser.add_argument("--out", type=Path, required=True, help="write the smaller adapter here")
    args = parser.parse_args()
    target = load_target(args.model)
    loaded = load_adapter(args.adapter, target)
    module, trained = loaded.module, loaded.method.trained
    if not isinstance(module, StreamAdapter) or trained is None:
        raise SystemExit(f"error: {args.adapter} is an adapter of the method {loaded.method.name!r}, not of streams")
    ranks = {name: getattr(args, name) for name in set(RANKS.values())}
    for name, rank in ranks.items():
        if not 0 < rank <= getattr(module.config, name):
            raise SystemExit(f"error: {name} must be from 1 to {getattr(module.config, name)}, got {rank}")
    weights = module.state_dict()
    for index in range(module.start, target.config.num_layers):
        for name, which in RANKS.items():
            delta = module.layer(index).delta(name)
            assert delta is not None
            for half, weight in truncated(delta, ranks[which]).items():
                weights[f"layers.{index - module.start}.{name}.{half}"] = weight
    smaller = trained.make(target.config, replace(module.config, **ranks), module.vocabulary)
    smaller.load_state_dict(weights)
    words = ("--attention-rank", str(args.attention_rank), "--mlp-rank", str(args.mlp_rank))
    command = ("scripts/truncate_adapter.py", args.adapter.name, *words)
    save_derived(args.out, smaller, loaded, target, command, args.answers)


if __name__ == "__main__":
    main()
