"""Medusa: heads on the target's last hidden state draft (Cai et al. 2024)."""
