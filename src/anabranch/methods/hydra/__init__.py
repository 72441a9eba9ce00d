"""Hydra: draft heads that also read the draft tokens before their own (Ankner et al. 2024)."""
