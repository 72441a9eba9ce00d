"""Copying: the continuation of the longest earlier match is mixed into the distribution of a node's children.

Texts repeat themselves: names, phrases of the question, lines of code. Streams learn some of that, and prompt lookup
(``methods.prompt_lookup``) knows nothing else, so a union of their trees counts the same evidence twice. Here a node's
children have the probabilities

    (1 - w) q + w c

where q is the stream's distribution, and c that of the tokens after the longest match of what ends with the node: up to
``LONGEST`` tokens of its path and the text, at the ``MOST`` newest places where they occurred before. w depends on the
length of the match. Such a mixture is called a cache language model (Kuhn and De Mori 1990); with a single match it is
a pointer (Merity et al. 2016). Below the last stream, children are copied only, with the probability that a match of
this length goes on as it did before, times c.

If fewer copied tokens were accepted in this text than expected, both are lowered in proportion. The native kernels
compute the mixture (``draft.h``). ``research/fit_copying.py`` fits both tables.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ALONE", "COPIED", "LONGEST", "MIXED", "MOST", "PRIOR", "continuations"]

COPIED = "copy"  # label of the sources of tokens that are copied
LONGEST = 8  # tokens of a match that count
PRIOR = 1.0  # weight of the tables, in accepted tokens of a text
MOST = 32  # places of the longest match that are looked at, the newest ones
# by the length of a match, from 1 token on: w, and the probability of what is copied below the last stream
MIXED = (0.08, 0.26, 0.41, 0.50, 0.56, 0.61, 0.70, 0.83)
ALONE = (0.19, 0.49, 0.64, 0.71, 0.77, 0.81, 0.85, 0.92)


def continuations(text: Sequence[int], path: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The length of the longest match, and the share of its places that each token followed; 0 and nothing if none.

    path  the tokens after ``text``, up to the node whose children are asked for

    >>> continuations([1, 2, 3, 1, 2, 4, 1, 2], [])
    (2, {4: 0.5, 3: 0.5})
    """
    ends = [*text[-LONGEST:], *path][-LONGEST:]
    longest, copied = 0, list[int]()
    for at in range(len(text) - 2, -1, -1):
        length = 0
        while length < min(len(ends), at + 1) and text[at - length] == ends[-1 - length]:
            length += 1
        if length > longest:
            longest, copied = length, []
        if length and length == longest and len(copied) < MOST:
            copied.append(text[at + 1])
    return longest, {token: copied.count(token) / len(copied) for token in dict.fromkeys(copied)}
