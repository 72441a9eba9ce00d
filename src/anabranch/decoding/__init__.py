"""The decoding loop, its scheduler, and text.

engine      the loop
batch       sequences that join, read their prompts and leave
scores      the target's tokens or logits at each node, and the path that it accepts
scheduler   requests of all threads, and who runs the ticks
ticks       what is read and decoded next, in which memory
order       whose prompt is read next: priority, fairness, length
prefixes    keys and values of texts that ended
stats       counts and rates
generation  chunks of text and results
scoring     log probabilities of given texts
"""
