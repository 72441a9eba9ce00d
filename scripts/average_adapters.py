"""Average the weights of an adapter and of one that was trained from it.

Further training on other data gains where the new data is and may lose elsewhere; weights between the two often keep
both (Wortsman et al. 2022, robust fine-tuning by interpolation). The draft vocabulary is that of the earlier adapter:
training with ``--init`` picks a new one from the new data, and any vocabulary fits the weights. Where LATER has more
layers or higher ranks, EARLIER is given the weights that its training began with.

    python scripts/average_adapters.py EARLIER LATER --share 0.5 --answers ANSWERS --out FOLDER

With ``--answers``, the card states what the average reaches on those that LATER's training has held out of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from derived_adapters import save_derived

from anabranch.adapters.folder import load_adapter
from anabranch.drafting.trained import Trained
from anabranch.errors import InputError
from anabranch.model.load import Target, load_target


def as_begun(target: Target, trained: Trained, earlier: Any, later: Any, training: dict[str, Any]) -> Any:
    """What the training of ``later`` began with, with the draft vocabulary of ``earlier``."""
    torch.manual_seed(training["options"]["seed"])
    made = trained.make(target.config, later.config, earlier.vocabulary)
    try:
        trained.begin(made, earlier)
    except InputError as error:
        raise SystemExit(f"error: the later adapter cannot have begun with the earlier one: {error}") from error
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("earlier", type=Path, help="adapter folder; its draft vocabulary is kept")
    parser.add_argument("later", type=Path, help="adapter folder that was trained with --init EARLIER")
    parser.add_argument("--share", type=float, default=0.5, help="weight of LATER in the average")
    parser.add_argument("--model", default="default", help="their target")
    parser.add_argument("--answers", type=Path, help="what LATER was trained on; its held-out part is evaluated")
    parser.add_argument("--out", type=Path, required=True, help="write the average here")
    args = parser.parse_args()
    if not 0 <= args.share <= 1:
        raise SystemExit(f"error: --share must be from 0 to 1, got {args.share}")
    target = load_target(args.model)
    earlier, later = (load_adapter(folder, target) for folder in (args.earlier, args.later))
    if earlier.method.name != later.method.name or earlier.method.trained is None:
        raise SystemExit(f"error: {args.earlier} and {args.later} are adapters of other methods")
    made = as_begun(target, earlier.method.trained, earlier.module, later.module, later.record["training"])
    ours, theirs = dict(made.named_parameters()), dict(later.module.named_parameters())
    with torch.no_grad():
        for name, weight in ours.items():
            weight.copy_(torch.lerp(weight.float(), theirs[name].float(), args.share))
    averaged = {
        "earlier": earlier.record["sha256"],
        "later": later.record["sha256"],
        "share_of_later": args.share,
        "draft_vocabulary_of": "earlier",
    }
    words = ("scripts/average_adapters.py", args.earlier.name, args.later.name, "--share", str(args.share))
    save_derived(args.out, made, later, target, words, args.answers, averaged=averaged)


if __name__ == "__main__":
    main()
