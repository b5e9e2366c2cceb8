"""Time of a call that judges responses in processes, or by concurrent requests to a service."""

from realhf.api.machine import Cost, RewardLoad


def judging_cost(load: RewardLoad, n_rows: int) -> Cost:
    """Return the cost of judging ``n_rows`` responses on one worker: all judges are busy until none is left.

    At least one response's latency. Local judges use a core each.
    """
    if not n_rows:
        return Cost(0.0, 0.0)
    n_judges = min(load.concurrency, n_rows)
    return Cost(load.latency * n_rows / n_judges, load.latency * n_rows if load.uses_cores else 0.0)
