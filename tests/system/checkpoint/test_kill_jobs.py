"""The jobs of ``make kill`` have every feature whose state a checkpoint must contain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_jobs import JOBS, Job
from realhf.api.experiment import Experiment
from realhf.apps.prepare.options import updated
from realhf.experiments import experiment_class

FEATURES: dict[str, Callable[[Any], bool]] = {
    "staleness": lambda c: c.max_staleness > 1,
    "resamples": lambda c: c.ppo.dynamic_sampling,
    "ensemble": lambda c: len(c.ensemble.members) > 1,
    "best of n with EMA": lambda c: (c.ppo.generation_size or 0) > (c.ppo.group_size or 1) and c.ppo.ref_ema_eta > 0,
    "keep_best": lambda c: bool(c.exp_ctrl.keep_best) and c.dataset.eval_fraction > 0 and hasattr(c, "ppo"),
    "critic": lambda c: c.critic.init_from_scratch and c.ppo.use_adaptive_kl_ctl,
    "VinePPO": lambda c: c.vine.n_rollouts > 1,
    "tensor parallelism": lambda c: "t2" in c.allocation_mode,
    "pipeline parallelism": lambda c: "p2" in c.allocation_mode,
    "environments": lambda c: c.env.cls and c.dataset.eval_fraction > 0 and c.n_gpus_per_node > 1,
    "partial rollouts": lambda c: c.env.partial_tokens > 1,
    "agents": lambda c: c.env.cls.endswith("AgentProgram") and c.env.retries > 0,
    "partial rollouts of agents": lambda c: c.env.cls.endswith("AgentProgram") and c.env.partial_tokens > 1,
}


def config_of(job: Job) -> Experiment:
    """Return the options of a job, as its command line gives them."""
    command = job.command(Path("/folder/experiment/trial"))
    words = command[command.index(job.experiment) + 1 :]
    return updated(experiment_class(job.experiment)(), words)


def has(feature: str, config: Any) -> bool:
    try:
        return FEATURES[feature](config)
    except (AttributeError, TypeError):  # an experiment without these options, or without their values
        return False


def test_every_job_is_valid_and_has_its_own_name() -> None:
    assert all(config_of(job) for job in JOBS) and len({job.name for job in JOBS}) == len(JOBS)
    assert {"dpo", "sft", "ppo"} <= {job.experiment for job in JOBS}
    assert any(job.layouts for job in JOBS)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_job_has_the_feature(feature: str) -> None:
    assert any(has(feature, config_of(job)) for job in JOBS)


@pytest.mark.parametrize("fault, option", [("environment", "env.cls="), ("agent", "AgentProgram")])
def test_jobs_with_children_have_their_faults(fault: str, option: str) -> None:
    assert all((fault in job.faults) == (option in job.words) for job in JOBS)
    assert sum(fault in job.faults for job in JOBS) > 1
