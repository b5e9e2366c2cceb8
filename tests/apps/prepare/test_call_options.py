"""Options of calls that are checked before the launch."""

from realhf.apps.prepare.preflight import preflight
from realhf.base.paths import RunDir
from realhf.experiments.ppo_math import PPOMathExperiment
from tests.apps.prepare.test_preflight import paths, ppo, problems  # noqa: F401


def test_prompts_per_call(ppo: PPOMathExperiment, paths: RunDir) -> None:  # noqa: F811
    n_prompts = ppo.dataset.train_bs_n_seqs
    ppo.actor_gen.prompts_per_call, ppo.ref_inf.prompts_per_call = 2, n_prompts
    sizes = {mfc.name: mfc.batch_size for mfc in preflight("ppo-math", ppo, paths).graph.mfcs}
    assert sizes.pop("actor_gen") == 2 and {*sizes.values()} == {n_prompts}
    ppo.actor_train.prompts_per_call, ppo.rew_inf.prompts_per_call = 2, n_prompts + 1
    assert problems(ppo, paths) == [
        f"rew_inf.prompts_per_call={n_prompts + 1}: a step has {n_prompts} prompts",
        "actor_train.prompts_per_call=2: training takes all prompts of a step",
    ]
