"""What decides between two plans that differ in one call."""

from realhf.plan.search.timeline import Prediction

SHARE = 0.1  # of the largest difference in time; smaller ones are not mentioned
MEMORY_SHARE = 0.05  # of the peak


def deciding_differences(mfc: str, chosen: Prediction, other: Prediction) -> list[tuple[str, float]]:
    """Return (name, seconds) by which the ``other`` plan's step is longer, the largest differences first.

    Names are the call's computation, its moves (rows and weights), the moves of other calls, and waiting: what the
    calls' own times do not explain, because calls overlap differently.
    """
    compute, moves = (b - a for a, b in zip(chosen.call_seconds[mfc], other.call_seconds[mfc], strict=True))
    rest = sum(sum(seconds) - sum(chosen.call_seconds[name])
               for name, seconds in other.call_seconds.items() if name != mfc)  # fmt: skip
    waiting = other.seconds - chosen.seconds - compute - moves - rest
    found = {"compute": compute, "moves": moves, "other calls": rest, "waiting": waiting}
    largest = max(map(abs, found.values()))
    ordered = sorted(found.items(), key=lambda item: -abs(item[1]))
    return [(name, seconds) for name, seconds in ordered if abs(seconds) > SHARE * largest]


def decision_text(mfc: str, chosen: Prediction, other: Prediction) -> str:
    """Return what decides between the plans in one line: differences of the other plan in seconds and peak memory."""
    parts = [f"{name} {seconds:+.3g} s" for name, seconds in deciding_differences(mfc, chosen, other)]
    growth = other.peak - chosen.peak
    if abs(growth) > MEMORY_SHARE * chosen.peak:
        parts.append(f"peak memory {growth / 1e9:+.3g} GB")
    return ", ".join(parts) or "no difference"
