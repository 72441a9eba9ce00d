"""Fused operations of a decoding step on a GPU, and the layers that are made of them."""
