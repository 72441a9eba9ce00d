"""EAGLE: one autoregressive layer on the target's features drafts (Li et al. 2024)."""
