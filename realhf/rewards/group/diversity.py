"""Diversity as a reward: how little a response has in common with the other responses."""

import re
from collections.abc import Sequence
from math import fsum

MAX_N = 3
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+?(?=[\u3040-\u30ff\u3400-\u9fff]|\b)|[^\w\s]")
"""A word, a character of a script without spaces, or a sign."""


def diversity(prompt: str, responses: Sequence[str], row: dict) -> list[float]:
    """Return 1 minus the mean Jaccard similarity of each response's n-grams to those of every other response.

    The similarity is the resemblance of Broder 1997 ("On the resemblance and containment of documents"), of the
    distinct n-grams (Li et al. 2016, arXiv 1510.03055) of 1 to MAX_N words. Mean similarity to the other samples is
    the measure of Zhu et al. 2018 (arXiv 1802.01886), there with BLEU. A response without words, or without others,
    gets 0.
    """
    grams = [n_grams(response) for response in responses]
    others = max(len(responses) - 1, 1)
    return [
        fsum(1 - similarity(mine, theirs) for j, theirs in enumerate(grams) if j != i) / others if mine else 0.0
        for i, mine in enumerate(grams)
    ]


def n_grams(text: str) -> frozenset[tuple[str, ...]]:
    """Return the distinct n-grams of 1 to MAX_N words of a text in lower case."""
    words = WORD.findall(text.lower())
    return frozenset(tuple(words[i : i + n]) for n in range(1, MAX_N + 1) for i in range(len(words) - n + 1))


def similarity(a: frozenset, b: frozenset) -> float:
    """Return the Jaccard similarity of two sets, of which one is not empty."""
    return len(a & b) / len(a | b)
