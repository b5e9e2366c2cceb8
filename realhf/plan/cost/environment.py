"""Time of multi-turn rollouts whose episodes wait for environments."""

from realhf.api.machine import EnvironmentLoad


def rollout_seconds(load: EnvironmentLoad, n_episodes: int, n_slots: int, decode_seconds: float) -> float:
    """Return the seconds of ``n_episodes`` on a replica that would sample their tokens in ``decode_seconds``.

    The largest of three bounds of a closed network of waiting customers: the generator is never idle; the environments
    never are; and an open episode alternates between the two, where it shares the generator with ``n_slots`` others.
    """
    n_open = load.n_open(n_episodes)
    calls = n_episodes * load.turns
    waves = n_episodes / n_open
    alternating = waves * load.turns * load.latency + decode_seconds * min(1.0, n_slots / n_open)
    return max(decode_seconds, calls * load.latency / min(load.concurrency, n_open), alternating)
