"""Rotary position embeddings and their variants for long contexts.

Frequencies follow the paper of each variant, in float32 and in transformers' order of operations, so that the tables
match those of training bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.errors import ModelError, one_line
from anabranch.model.config import RopeConfig

__all__ = [
    "MARGIN",
    "ROPE_VARIANTS",
    "UNLIMITED",
    "Rope",
    "Rotations",
    "check_rope",
    "context_length",
    "rope_frequencies",
    "rotate",
]

MARGIN = 1024  # positions of a table beyond the cache: a rider's rows reach past the last token
UNLIMITED = 2**30  # the context length of the variant "dynamic"
_KEPT_TABLES = 4  # the variant "dynamic" needs one for each length of a prompt


class Rotations(NamedTuple):
    """cos and sin of every position.

    table     [2, rows, dim] float32
    starts_B  the row of ``table`` that is position 0 of each batch row; None: 0 for all of them
    """

    table: Tensor
    starts_B: Sequence[int] | None = None


class Rope:
    """cos and sin tables, computed once up to the longest requested position.

    The frequencies of two variants (dynamic, longrope) depend on the length of the text. As in transformers with a KV
    cache, the rotation of a token is fixed when it is read: tokens of a prompt are rotated for the length of the
    prompt, a later token for its own position + 1. So a rotation depends on the token's position and on the length of
    the prompt, but not on how decoding is stepped. If the config ``rereads``, a text that outgrows the original length
    is read again as a whole, like a prompt.

    sliding        rotations of the layers with a sliding window, in further columns of each table
    query_scaling  the factors of queries (``ModelConfig.query_scaling``): a copy of all columns, scaled, comes last
    """

    def __init__(
        self,
        config: RopeConfig,
        device: torch.device,
        *,
        sliding: RopeConfig | None = None,
        query_scaling: tuple[float, int] | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self._sliding, self._query_scaling = sliding, query_scaling
        self.varies = _kind(config) in ("dynamic", "longrope")
        self._tables: dict[int, Tensor] = {}

    @property
    def columns(self) -> int:
        """The width of the tables."""
        dims = self.config.dim + (0 if self._sliding is None else self._sliding.dim)
        return dims if self._query_scaling is None else 2 * dims

    @property
    def reread_after(self) -> int | None:
        """The length beyond which a text is read again, as a prompt of its own; None: never."""
        return _original(self.config) if self.varies and self.config.rereads else None

    def prompt(self, prompt: int, length: int) -> int:
        """The length for which the tokens of a prompt are rotated when its text has ``length`` tokens."""
        limit = self.reread_after
        return prompt if limit is None or length <= limit else max(prompt, limit + 1)

    def key(self, prompt: int) -> int:
        """A key of the rotations of texts with this length of prompt; 0 if they depend on positions only."""
        kind = _kind(self.config)
        if kind == "dynamic":
            return prompt if prompt > self.config.max_positions else 0
        if kind == "longrope":
            return _original(self.config) + 1 if prompt > _original(self.config) else 0
        return 0

    def __call__(self, positions: Tensor, longest: int, prompts_B: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, each [..., dim] float32, for integer ``positions`` [...] below ``longest`` + 1024.

        prompts_B  the length of the prompt of each row of ``positions`` [B, ...]; empty: 0
        """
        table, starts_B = self.rotations(longest, prompts_B)
        if starts_B is not None:
            starts = torch.tensor(starts_B, device=positions.device)
            positions = positions + starts.view(-1, *(1 for _ in positions.shape[1:]))
        cos, sin = table[:, positions]
        return cos, sin

    def rotations(self, longest: int, prompts_B: Sequence[int] = ()) -> Rotations:
        """The tables of batch rows with prompts of these lengths, for at least ``longest`` + 1024 positions."""
        keys = [self.key(prompt) for prompt in prompts_B] if self.varies else []
        if not any(keys):
            return Rotations(self._of(0, longest))
        tables = {key: self._of(key, longest) for key in keys}
        if len(tables) == 1:
            return Rotations(tables[keys[0]])
        starts = dict(zip(tables, accumulate((table.shape[1] for table in tables.values()), initial=0), strict=False))
        return Rotations(torch.cat(list(tables.values()), dim=1), [starts[key] for key in keys])

    def _of(self, key: int, longest: int) -> Tensor:
        """The table of prompts with this ``key``."""
        table = self._tables.get(key)
        if table is None or table.shape[1] < longest + MARGIN:
            table = self._table(key, -(-(longest + MARGIN) // MARGIN) * MARGIN)
            # the oldest is evicted; a table that grew replaces itself
            if key not in self._tables and len(self._tables) >= _KEPT_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = table
        return table

    def _table(self, prompt: int, rows: int) -> Tensor:
        """cos and sin of every position, stacked [2, rows, dim] so that one lookup per step fetches both."""
        positions = torch.arange(rows, device="cpu")
        lengths = (positions + 1).clamp(min=prompt)
        tables = [_turns(self.config, positions, lengths if self.varies else lengths[:1])]
        if self._sliding is not None:
            tables.append(_turns(self._sliding, positions, lengths[:1]))
        if self._query_scaling is not None:
            beta, length = self._query_scaling
            factors = 1 + beta * torch.log(1 + torch.floor(positions / length))
            tables += [table * factors[:, None] for table in tables]
        return torch.cat(tables, dim=-1).to(self.device)


def _turns(config: RopeConfig, positions_T: Tensor, lengths_T: Tensor) -> Tensor:
    """cos and sin of some positions [2, T, dim]; ``lengths_T`` as in ``rope_frequencies``."""
    inv_freq, factor = rope_frequencies(config, lengths_T)
    angles = positions_T[:, None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())) * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``dim`` channels of x [B, R, heads, E] by cos and sin [B, R, dim], pairing the two halves."""
    cos, sin = cos[:, :, None, :].to(x.dtype), sin[:, :, None, :].to(x.dtype)
    dim = cos.shape[-1]
    rotated = x[..., :dim]
    left, right = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-right, left), dim=-1) * sin
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def rope_frequencies(config: RopeConfig, lengths_T: Tensor) -> tuple[Tensor, float]:
    """Inverse frequencies [T, dim / 2] of texts of these lengths, float32 on the CPU, and the factor of cos and sin.

    [1, dim / 2] if the length does not matter.
    """
    with torch.device("cpu"):  # not the device that a decoder is being built on
        if config.stated is not None:
            return torch.tensor(config.stated[0])[None], config.stated[1]
        frequencies, factor = ROPE_VARIANTS[_kind(config)](config, config.scaling or {}, lengths_T)
    return frequencies if frequencies.dim() == 2 else frequencies[None], factor


def context_length(config: RopeConfig) -> int:
    """The context length of a model: the length in its config, stretched by the factor.

    Some configs state the length before scaling (published ones of linear scaling, and those edited by a user as a
    model card says), others the length after it, with the original one beside it.
    """
    factor = (config.scaling or {}).get("factor") or 1.0
    kind = _kind(config)
    if kind == "dynamic":
        return UNLIMITED
    if kind == "default":
        return config.max_positions
    return max(config.max_positions, int(_original(config) * factor))


def check_rope(config: RopeConfig) -> None:
    """Check at load that a config has all parameters of its rotary variant. Raises ModelError."""
    named = f"rotary variant {_kind(config)!r}"
    try:
        inv_freq, factor = rope_frequencies(config, torch.tensor([1, config.max_positions + 1], device="cpu"))
        if not (bool(inv_freq.isfinite().all()) and math.isfinite(factor)):
            raise ValueError("its frequencies are not finite numbers")
    except KeyError as error:
        raise ModelError(f"{named} needs {error.args[0]!r}; fetch config.json again") from None
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{named} cannot be computed ({one_line(error)}); fetch config.json again") from error


def _kind(config: RopeConfig) -> str:
    return "default" if config.scaling is None else str(config.scaling.get("rope_type", "default"))


def _original(config: RopeConfig) -> int:
    """The context length before it was extended."""
    return config.max_positions if config.original_max_positions is None else config.original_max_positions


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim


def _default(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
    """Su et al. 2021."""
    return 1.0 / config.theta ** _exponents(config), 1.0


def _linear(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023)."""
    return _default(config, scaling, lengths_T)[0] / scaling["factor"], 1.0


def _dynamic(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with the length of the sequence."""
    factor, longest = scaling["factor"], config.max_positions
    stretch_T = factor * lengths_T.clamp(min=longest).float() / longest - (factor - 1)
    base_T = config.theta * stretch_T ** (config.dim / (config.dim - 2))
    stretched = 1.0 / base_T[:, None] ** _exponents(config)
    return torch.where(lengths_T[:, None] > longest, stretched, _default(config, scaling, lengths_T)[0]), 1.0


def _llama3(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those in between interpolated."""
    inv_freq = _default(config, scaling, lengths_T)[0]
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = _original(config)
    wave = 2 * math.pi / inv_freq
    stretched = torch.where(wave > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wave - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wave >= original / high) & (wave <= original / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
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


def _longrope(config: RopeConfig, scaling: dict[str, Any], lengths_T: Tensor) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): one factor per frequency, in a set for short and one for long sequences."""
    original = _original(config)
    factor = scaling.get("factor") or config.max_positions / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (torch.tensor(scaling[name], dtype=torch.float32) for name in ("short_factor", "long_factor"))
    for factors in (short, long):
        if factors.shape != (config.dim // 2,):
            raise ValueError(f"{len(factors)} factors for {config.dim // 2} frequencies")
    factors_T = torch.where(lengths_T[:, None] > original, long, short)
    return 1.0 / (factors_T * config.theta ** _exponents(config)), float(attention)


ROPE_VARIANTS: dict[str, Callable[[RopeConfig, dict[str, Any], Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
