"""Parts that all methods share: the interface of drafters, tree growth, draft heads, probabilities, settings."""
