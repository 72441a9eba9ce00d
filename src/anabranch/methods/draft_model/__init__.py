"""A separate small model drafts (Leviathan et al. 2023)."""
