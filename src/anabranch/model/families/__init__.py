"""The supported model families: how their Hugging Face configs are read and how their weights are named.

A family is an entry of the table (``table.py``): a function from ``config.json`` to ``ModelConfig`` (``configs.py``),
and for each of our modules the Hugging Face modules that it is assembled from. A new family needs only an entry, the
fields of its config (``model/fields.py``), and a parity test.
"""

from anabranch.model.families.reading import model_config, module_rows, weight_source
from anabranch.model.families.table import FAMILIES, UNSUPPORTED, Family, Layout, Source

__all__ = ["FAMILIES", "UNSUPPORTED", "Family", "Layout", "Source", "model_config", "module_rows", "weight_source"]
