"""Self-consistency as a reward: agreement of a response's final answer with those of the other responses."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from realhf.rewards.math.equality import same_answer
from realhf.rewards.math.extract import extract_answer
from realhf.rewards.math.symbolic import TIME_LIMIT


def self_consistency(prompt: str, responses: Sequence[str], row: dict) -> list[float]:
    """Return for each response the fraction of responses whose final answer equals its own, itself included.

    Responses without an answer get 0. Wang et al. 2022 (arXiv 2203.11171) vote among answers; as a reward without
    solutions: Zuo et al. 2025 (arXiv 2504.16084), who give 1 to the majority. Answers are extracted and compared as by
    the verifier ``math``; the order of the responses has no influence.
    """
    answers = [extract_answer(response) for response in responses]
    counts = Counter(answer for answer in answers if answer)
    votes = Counter(counts)
    for one, other in combinations(sorted(counts), 2):
        with TIME_LIMIT.shared():
            is_same = same_answer(one, other) or same_answer(other, one)  # not symmetric: the second is a solution
        if is_same:
            votes[one] += counts[other]
            votes[other] += counts[one]
    return [votes[answer] / len(responses) if answer else 0.0 for answer in answers]
