"""The decoding loop, its scheduler, and text.

engine      the loop
batch       sequences that join, read their prompts and leave
scores      the target's tokens or logits at each node, and the path that it accepts
scheduler   the order of requests
stats       counts and rates
generation  chunks of text and results
scoring     log probabilities of given texts
"""
