"""Rotary position embeddings and their variants for long contexts.

Frequencies follow the paper of each variant, in float32 and in transformers' order of operations, so that the tables
match those of training bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import ModelError, one_line
from anabranch.model.config import RopeConfig

__all__ = ["MARGIN", "ROPE_VARIANTS", "Rope", "check_rope", "rope_frequencies", "rotate"]

# Positions that a table holds beyond the planned length: draft nodes and a rider's rows reach past the last token.
MARGIN = 1024
# Cached tables: the variant "dynamic" needs one for each planned length, of which a server sees many.
_KEPT_TABLES = 4


class Rope:
    """cos and sin tables, computed once up to the longest requested position.

    Variants whose frequencies depend on the sequence length (dynamic, longrope) use the *planned* length of the row:
    its prompt and new tokens. A token's rotation therefore does not depend on how decoding was stepped.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._tables: dict[int, Tensor] = {}

    def __call__(self, positions: Tensor, planned: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [..., dim] float32, for integer ``positions`` [...] below ``planned`` + 1024."""
        cos, sin = self.table(planned)[:, positions]
        return cos, sin

    def table(self, planned: int) -> Tensor:
        """cos and sin [2, length, dim] for at least ``planned`` + 1024 positions."""
        key = _variant_key(self.config, planned)
        table = self._tables.get(key)
        if table is None or table.shape[1] < planned + MARGIN:
            table = self._table(planned)
            # the oldest is evicted; a table that grew replaces itself
            if key not in self._tables and len(self._tables) >= _KEPT_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = table
        return table

    def _table(self, planned: int) -> Tensor:
        """cos and sin of every position, stacked [2, length, dim] so that one lookup per step fetches both."""
        inv_freq, factor = rope_frequencies(self.config, planned)
        length = -(-(planned + MARGIN) // MARGIN) * MARGIN
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (torch.stack((angles.cos(), angles.sin())) * factor).to(self.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``dim`` channels of x [B, R, heads, E] by cos and sin [B, R, dim], pairing the two halves."""
    cos, sin = cos[:, :, None, :].to(x.dtype), sin[:, :, None, :].to(x.dtype)
    dim = cos.shape[-1]
    rotated = x[..., :dim]
    left, right = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-right, left), dim=-1) * sin
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def rope_frequencies(config: RopeConfig, planned: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2], float32 on the CPU, and the factor that scales cos and sin."""
    scaling = config.scaling or {}
    return ROPE_VARIANTS[_kind(config)](config, scaling, planned)


def check_rope(config: RopeConfig) -> None:
    """Check at load that a config has all parameters of its rotary variant. Raises ModelError."""
    named = f"rotary variant {_kind(config)!r}"
    try:
        for planned in (1, config.max_positions + 1):
            with torch.device("cpu"):  # not the device that a decoder is being built on
                inv_freq, factor = rope_frequencies(config, planned)
            if not (bool(inv_freq.isfinite().all()) and math.isfinite(factor)):
                raise ValueError("its frequencies are not finite numbers")
    except KeyError as error:
        raise ModelError(f"{named} needs {error.args[0]!r}; fetch config.json again") from None
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{named} cannot be computed ({one_line(error)}); fetch config.json again") from error


def _kind(config: RopeConfig) -> str:
    return "default" if config.scaling is None else str(config.scaling.get("rope_type", "default"))


def _variant_key(config: RopeConfig, planned: int) -> int:
    """A key that is equal for planned lengths with the same frequencies; 0 if the length does not matter."""
    kind = _kind(config)
    if kind == "dynamic":
        return max(planned, config.max_positions)
    if kind == "longrope":
        return int(planned > _original(config))
    return 0


def _original(config: RopeConfig) -> int:
    """The context length before it was extended."""
    return config.max_positions if config.original_max_positions is None else config.original_max_positions


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim


def _default(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """Su et al. 2021."""
    return 1.0 / config.theta ** _exponents(config), 1.0


def _linear(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023)."""
    return _default(config, scaling, planned)[0] / scaling["factor"], 1.0


def _dynamic(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """NTK-aware base that grows with the length of the sequence."""
    factor, longest = scaling["factor"], config.max_positions
    stretch = factor * max(planned, longest) / longest - (factor - 1)
    base = config.theta * stretch ** (config.dim / (config.dim - 2))
    return 1.0 / base ** _exponents(config), 1.0


def _llama3(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those in between interpolated."""
    inv_freq = _default(config, scaling, planned)[0]
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = _original(config)
    wave = 2 * math.pi / inv_freq
    stretched = torch.where(wave > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wave - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wave >= original / high) & (wave <= original / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate low frequencies, keep high ones, scale the attention."""
    original = _original(config)
    factor = scaling.get("factor") or config.max_positions / original

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(over) / mscale(under) if over and under else mscale(1.0)

    def channel(rotations: float) -> float:
        """The channel that makes ``rotations`` full rotations over the original length."""
        return config.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = config.theta ** _exponents(config)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _longrope(config: RopeConfig, scaling: dict[str, Any], planned: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): one factor per frequency, in a set for short and one for long sequences."""
    original = _original(config)
    factor = scaling.get("factor") or config.max_positions / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = scaling["long_factor" if planned > original else "short_factor"]
    if len(factors) != config.dim // 2:
        raise ValueError(f"{len(factors)} factors for {config.dim // 2} frequencies")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta ** _exponents(config)), float(attention)


ROPE_VARIANTS: dict[str, Callable[[RopeConfig, dict[str, Any], int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
