"""Extra parameters of the papers' methods on the papers' targets: ours, counted from module shapes, and as printed.

``PRINTED`` has the parameter columns of the Speculative Streaming papers: table 1 of arXiv 2402.11131 (v1) and table 3
of the ACL version. Its tables 1 and 2 and figure 8 print no parameters. ``research/comparison_page.py`` writes the
table, and ``tests/analysis/test_cost.py`` compares all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.analysis.cost import costs, target
from anabranch.drafting.counting import DraftShape
from anabranch.methods.hydra.module import HydraConfig, HydraModule

__all__ = ["MODELS", "PRINTED", "Printed", "counted", "parameter_rows", "printed"]

MODELS = ("OPT-1.3b", "Phi-1.3b", "Phi-3", "Llama-2-7B", "Mistral-7B")
SHARED, LOSSLESS = "Speculative Streaming, shared", "Speculative Streaming, lossless"
PRUNING_RANK = 8


@dataclass(frozen=True)
class Printed:
    """A number of parameters as a paper prints it."""

    paper: str
    model: str
    method: str
    text: str

    def agrees(self, found: int) -> bool:
        """Return whether ``found`` is printed like this, rounded or cut off after its digits, as the papers do."""
        digits, _, power = self.text.partition("E")
        unit = 10 ** int(power) / 10 ** len(digits.partition(".")[2])
        value = round(float(self.text) / unit)
        return value in (int(found / unit), round(found / unit))


V1, ACL = "v1, table 1", "ACL, table 3"
PRINTED = (
    Printed(V1, "OPT-1.3b", "Medusa", "4.28E8"),
    Printed(V1, "OPT-1.3b", SHARED, "4.096E4"),
    Printed(V1, "Phi-1.3b", "Medusa", "4.36E8"),
    Printed(V1, "Phi-1.3b", SHARED, "4.096E4"),
    Printed(V1, "Llama-2-7B", "Medusa", "5.91E8"),  # OpenLlama-7b there, of the same shape
    Printed(V1, "Llama-2-7B", SHARED, "8.19E4"),
    Printed(ACL, "Mistral-7B", "Medusa", "5.9E8"),
    Printed(ACL, "Mistral-7B", "EAGLE", "2.4E8"),
    Printed(ACL, "Mistral-7B", SHARED, "8.2E4"),
    Printed(ACL, "Phi-3", "Medusa", "4.3E8"),
    Printed(ACL, "Phi-3", "EAGLE", "1.3E8"),
    Printed(ACL, "Phi-3", SHARED, "6.1E4"),
    Printed(ACL, "Llama-2-7B", "Medusa", "5.9E8"),
    Printed(ACL, "Llama-2-7B", "EAGLE", "2.4E8"),
    Printed(ACL, "Llama-2-7B", SHARED, "8.2E4"),
)


def counted(model: str) -> dict[str, int]:
    """Extra parameters of each method for a target, in the papers' settings: four tokens, heads of their own."""
    shape = DraftShape()
    found = costs(model, shape)
    config = target(model).config
    lossless = found["streams, optimised"].parameters
    with torch.device("meta"):
        deeper = HydraModule(config, HydraConfig(head="own", num_layers=4, prefix=True)).num_parameters()
    counts = {
        SHARED: lossless - shape.layers * 2 * shape.rank * config.hidden_size,  # without the adapters of its layers
        LOSSLESS: lossless,
        "SPACE": found["space"].parameters,
        "Medusa": found["medusa"].parameters,
        "Hydra": found["hydra"].parameters,
        "Hydra++": deeper,
        "EAGLE": found["eagle"].parameters,
        "lookahead": found["lookahead"].parameters,
    }
    # the papers' draft models: OPT-125m, and Llama-68m for Llama's vocabulary
    return counts | ({"draft model": found["draft model"].parameters} if model in ("OPT-1.3b", "Llama-2-7B") else {})


def printed(model: str, method: str) -> list[Printed]:
    """The papers' number for a method and target."""
    return [each for each in PRINTED if (each.model, each.method) == (model, method)]


def parameter_rows() -> list[list[str]]:
    """A row per method: its name, and for each of ``MODELS`` our count, with the printed values in brackets."""
    counts = {model: counted(model) for model in MODELS}
    return [[name, *(_cell(model, name, counts[model].get(name)) for model in MODELS)] for name in counts["OPT-1.3b"]]


def _cell(model: str, method: str, count: int | None) -> str:
    if count is None:
        return "-"
    shown = ", ".join(each.text if each.agrees(count) else f"**{each.text}**" for each in printed(model, method))
    ours = "0" if count == 0 else f"{count:.3e}".replace("e+0", "e")
    return f"{ours} ({shown})" if shown else ours
