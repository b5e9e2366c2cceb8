"""Warnings about the metrics of a step: signs that a run does not learn or is about to diverge."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

TRUNCATED, CUT = 0.95, 0.5  # fraction of the responses, and of the episodes with environments
KL_NATS, KL_GROWTH = 10.0, 10.0  # per token; relative to earlier steps, above 1 nat
GRAD_NORM, GRAD_GROWTH = 1.0, 100.0  # at least; relative to earlier steps, which may have had no signal
EQUAL = 1e-10  # relative variance of equal numbers, summed in float64
MIN_STEPS = 3  # before a growth is reported
WATCHED_STATISTICS = ("grad_norm", "truncated", "logprob_diff")  # of any call
WATCHED = ("kl/ref", "length/response", "reward/mean", "rew_inf/reward_sq")
Metrics = Mapping[str, float]


def step_warnings(metrics: Metrics, max_logprob_diff: float, before: Sequence[Metrics] = ()) -> dict[str, str]:
    """Return one line per problem of a step, by its kind; ``before`` are the metrics of earlier steps.

    ``max_logprob_diff`` is the option ``logprob_diff_warning``, in nats per token; 0 turns its warning off.
    """
    found = {}
    for name, value in metrics.items():
        call, _, statistic = name.rpartition("/")
        usual = _median(name, before) if statistic == "grad_norm" else None
        if not isfinite(value):
            found[f"finite {name}"] = (
                f"{name} is {value}: the weights may soon be NaN; lower the learning rate, or check rewards and data"
            )
        elif (
            statistic == "truncated"
            and value >= (CUT if (is_episode := f"{call}/turns" in metrics) else TRUNCATED)
            and not call.startswith("eval")
        ):
            percent = f"{100 * value:.3g}"
            found[f"truncated {call}"] = (
                f"{percent}% of the episodes are cut at env.max_turns or env.max_episode_len; increase it, or check "
                "that the environment ends them"
                if is_episode
                else f"{percent}% of the responses are truncated at max_new_tokens; increase it, or check that the "
                "model writes its end token"
            )
        elif usual and value > max(GRAD_NORM, GRAD_GROWTH * usual):
            found[f"gradient {call}"] = (
                f"{name} is {value:.3g}, {value / usual:.3g} times its median: the weights may soon be NaN; lower the "
                "learning rate or gradient_clipping"
            )
        elif statistic == "logprob_diff" and 0 < max_logprob_diff < value:
            found[f"logprobs {call}"] = (
                f"{name}: trainer and generator log-probs differ by {value:.3g} nats per token (limit "
                f"{max_logprob_diff:g}); ppo.recompute_logprobs=True corrects for it"
            )
    kl, usual = metrics.get("kl/ref", 0.0), _median("kl/ref", before)
    is_growth = usual is not None and kl > max(1.0, KL_GROWTH * usual)
    if "length/response" in metrics and isfinite(kl) and (kl > KL_NATS or is_growth):
        found["kl"] = (
            f"the KL to the reference is {kl:.3g} nats per token; increase ppo.kl_ctl or lower the learning rate, and "
            "check the responses in generations/"
        )
    if _equal_rewards(metrics):
        found["equal"] = (
            f"all rewards of the step are {metrics['reward/mean']:.4g}: no response is better than another; check the "
            "reward and the responses in generations/"
        )
    return found


def is_watched(name: str) -> bool:
    """Return True if ``step_warnings`` depends on a metric even if its value is finite."""
    return name.rpartition("/")[2] in WATCHED_STATISTICS or name in WATCHED


def _median(name: str, before: Sequence[Metrics]) -> float | None:
    values = [line[name] for line in before if name in line and isfinite(line[name])]
    return median(values) if len(values) >= MIN_STEPS else None


def _equal_rewards(metrics: Metrics) -> bool:
    mean, square = metrics.get("reward/mean"), metrics.get("rew_inf/reward_sq")
    return mean is not None and square is not None and square - mean * mean <= EQUAL * square
