"""Structured output: JSON schemas, regular expressions and grammars as constraints on the tokens of a text.

``llguidance`` (the extra ``structure``) compiles a grammar and computes its masks. ``grammar`` compiles what a call
gives, ``vocabulary`` describes a model's tokens to it, and ``matcher`` is the ``sampling.Constraint`` of one text.
"""
