"""SPACE: learned mask tokens behind the text predict the next tokens (Yi et al. 2024)."""
