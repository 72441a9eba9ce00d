"""Tuning of a target by itself (LoRA, Hu et al. 2022). The tuned target is another model; nothing here drafts."""
