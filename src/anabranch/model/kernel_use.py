"""The kernels that decode a target, and the reason if they are not the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from anabranch.errors import PerformanceWarning
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.quantize import QuantizedLinear
from anabranch.model.stored import dtype_name
from anabranch.native import library as native
from anabranch.native.arguments import BLOCK
from anabranch.native.selection import Shortfall
from anabranch.support.log import warn

__all__ = ["KernelUse", "kernels_of", "native_for", "near_ties", "products_for", "warn_about_kernels", "why_not_native"]


@dataclass(frozen=True)
class KernelUse:
    """The kernels that decode a target: ``name`` is "torch" or one of ``recipe.INSTRUCTION_SETS``.

    why         why faster ones do not; empty if these are the fastest on this processor
    advice      a remedy for the user; empty if there is none
    accepted    no warning is needed: the user chose these kernels, or this machine cannot run faster ones
    """

    name: str
    why: str = ""
    advice: str = ""
    accepted: bool = False


_warned: set[str] = set()  # reasons that ``warn_about_kernels`` has given


def kernels_of(target: Decoder) -> KernelUse:
    """The kernels that decode a packed target."""
    kernels = target.backend.kernels
    name = "torch" if kernels is None else kernels.instruction_set
    lacking = _lacking(target) if kernels is None else native.shortfall()
    if lacking is None and kernels is not None and target.rider is not None and not target.rider.native:
        layers = f"layers {target.rider.start + 1} to {target.config.num_layers}"
        why = (
            f"main rows attend to rows of the adapter in {layers}, so PyTorch runs these, and a near-tie of two tokens "
            "may fall otherwise with drafts than without"
        )
        return KernelUse(name, why, accepted=True)
    if lacking is None:
        return KernelUse(name)
    return KernelUse(name, lacking.why, lacking.advice, lacking.accepted)


def near_ties(target: Decoder) -> str:
    """The reason why drafts may change the choice between nearly equal tokens; empty if outputs are bit-identical."""
    if target.dtype == torch.float32:
        return ""
    use = kernels_of(target)
    if use.name != "torch":
        return use.why if target.rider is not None and not target.rider.native else ""
    kind = dtype_name(target.dtype)
    why = f" ({use.why})" if use.why else ""
    return (
        f"PyTorch runs this model{why}, so in {kind} a near-tie of two tokens may fall otherwise with drafts than "
        "without"
    )


def warn_about_kernels(target: Decoder, *, stacklevel: int = 2) -> None:
    """Issue a PerformanceWarning if a packed target is decoded by slower kernels than the machine could run.

    Warns once per reason and process; not if the user chose the kernels, nor on a GPU.
    """
    use = kernels_of(target)
    if not use.why or use.accepted or use.why in _warned:
        return
    _warned.add(use.why)
    slower = "decoding runs on PyTorch's kernels, which are slower: " if use.name == "torch" else ""
    advice = f"; {use.advice}" if use.advice else ""
    warn(f"{slower}{use.why}{advice}", PerformanceWarning, stacklevel=stacklevel + 1)


def why_not_native(target: Decoder) -> str:
    """The reason why the native kernels cannot run this target; empty if they can."""
    lacking = _lacking(target)
    return "" if lacking is None else lacking.why


def _lacking(target: Decoder) -> Shortfall | None:
    """The reason why the native kernels cannot run this target: the target itself, else the machine."""
    c = target.config
    if target.device.type != "cpu":
        return Shortfall(f"the native kernels are for CPUs, not {target.device.type}", accepted=True)
    return _lacking_type(target) or _lacking_layers(c) or _lacking_library()


def _lacking_type(target: Decoder) -> Shortfall | None:
    """The reason why the kernels cannot multiply by this target's weights."""
    if target.dtype not in (torch.bfloat16, torch.float32):
        dtype = dtype_name(target.dtype)
        return Shortfall(f"the native kernels take bfloat16 and float32, not {dtype}", "load it in bfloat16")
    if isinstance(target.head, QuantizedLinear) and target.dtype != torch.bfloat16:
        return Shortfall("the native kernels run quantised weights beside bfloat16 only", "load it in bfloat16")
    if target.loras.names and target.config.experts is not None:
        return Shortfall(
            f"LoRAs that are chosen per request run in PyTorch for {target.config.family} models, which have experts",
            "merge one of them (lora=) for the native kernels",
        )
    return None


def _lacking_layers(c: ModelConfig) -> Shortfall | None:
    """The reason why the kernels cannot run layers of this config, experts excepted."""
    other = "use a model of another family for the faster kernels"
    if c.encoder is not None and (lacking := _lacking_layers(c.encoder.layers)) is not None:
        return replace(lacking, why=f"{lacking.why} in the encoder")
    if c.recurrent is not None:
        return Shortfall(f"PyTorch runs the layers of {c.family} models: some have a recurrent state", other)
    if c.attention_sinks:
        return Shortfall(f"PyTorch runs the layers of {c.family} models: their attention has sinks", other)
    # no supported family combines these
    if c.norm == "layer" and (c.qk_norm != "none" or c.post_norms):
        return Shortfall("the native kernels have LayerNorm only before attention and MLP", other)
    if c.wiring != "sequential" and (c.post_norms or not c.pre_norms):
        return Shortfall("the native kernels run parallel attention and MLP only after norms", other)
    sizes = {"hidden_size": c.hidden_size, "head_dim": c.head_dim, "intermediate_size": c.intermediate_size}
    if c.experts is not None:
        sizes["the width of an expert"] = c.experts.width
    for name, size in sizes.items():
        if size % BLOCK:
            return Shortfall(f"the native kernels take sizes in multiples of 32, and {name} is {size}")
    if c.head_dim > 128 and c.head_dim != 256:
        return Shortfall(f"the native kernels take heads of at most 128 channels or of 256, not of {c.head_dim}")
    if c.position == "rope" and (c.rope.dim % 2 or c.rope.dim > c.head_dim):
        channels = f"{c.rope.dim} of {c.head_dim} channels"
        return Shortfall(f"the native kernels rotate an even number of a head's channels, not {channels}")
    return None


def _lacking_library() -> Shortfall | None:
    return native.shortfall() if native.library() is None else None


def native_for(target: Decoder) -> bool:
    """True if the native kernels can run this target."""
    return not why_not_native(target)


def products_for(target: Decoder) -> bool:
    """True if the kernels multiply by the weights of a target whose layers they cannot run; not of dense ones."""
    if target.config == target.config.dense() or target.device.type != "cpu":
        return False
    return not (_lacking_type(target) or _lacking_library()) and all(
        linear.in_features % BLOCK == 0 for linear in target.modules() if isinstance(linear, QuantizedLinear)
    )
