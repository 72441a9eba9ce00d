"""The decoding loop and what stands around it.

batch        rows that join, read their prompts, and leave
scores       what the target says at each node, and which path it accepts
engine       the loop
speculation  how much is drafted and verified
scheduler    who decodes when
stats        what a decoding yielded
generation   text
"""
