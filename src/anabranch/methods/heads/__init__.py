"""Draft heads on the target's last hidden state: what Medusa and Hydra share. No method of its own."""
