"""Models that are another model without an adapter, since their main rows attend to rows of it (``Decoder.rider``).

Their config.json, and the adapter_config.json of a LoRA that makes one, have the key ``KEY`` with the adapter's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["KEY", "needed"]

KEY = "anabranch_needs"


def needed(record: Mapping[str, Any]) -> str:
    """The method whose adapter a model or LoRA with this config needs; empty: none."""
    found = record.get(KEY, "")
    return found if isinstance(found, str) else ""
