"""Options of calls, and types of weights that are measured, before the launch."""

import pytest

from realhf.api.config import Mode
from realhf.apps.prepare import backends
from realhf.apps.prepare.preflight import preflight
from realhf.base.paths import RunDir
from realhf.experiments.ppo_math import PPOMathExperiment
from tests.apps.prepare.test_preflight import one, paths, ppo, problems  # noqa: F401


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


@pytest.mark.parametrize(("seconds", "chosen"), [((1.0, 0.7), True), ((1.0, 0.9), False), ((1.0, 20.0), False)])
def test_the_faster_type_is_chosen_and_stored(
    seconds: tuple[float, float], chosen: bool, ppo: PPOMathExperiment, paths: RunDir,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    asked = []
    monkeypatch.setattr(backends, "product_seconds", lambda *shape: asked.append(shape) or seconds)
    ppo.actor.bf16 = ppo.critic.bf16 = "auto"
    run = preflight("ppo-math", ppo, paths)
    assert {name: spec.spec.bf16 for name, spec in run.roles.items()} == {"actor": chosen, "critic": chosen,
                                                                          "ref": chosen}  # fmt: skip
    assert asked == [(run.models["actor"].hidden, run.models["actor"].intermediate, 1)]
    assert ("bfloat16;" if chosen else "float32;") in capsys.readouterr().out
    asked.clear()
    assert preflight("ppo-math", run.config, paths).roles["actor"].spec.bf16 is chosen and not asked


def test_a_type_for_other_machines_is_not_measured_here(ppo: PPOMathExperiment, paths: RunDir) -> None:  # noqa: F811
    ppo.actor.bf16, ppo.mode = "auto", Mode.slurm
    assert any(
        "actor.bf16=auto measures this machine, but the run is on others" in line for line in problems(ppo, paths)
    )
    ppo.actor.bf16, ppo.mode = "half", Mode.local
    assert one(ppo, paths) == "actor.bf16=half: must be True, False or auto"


def test_the_products_of_this_machine_are_measured() -> None:
    float32, bfloat16 = backends.product_seconds(64, 176, 1)
    assert 0 < float32 < 1 and 0 < bfloat16 < 10


@pytest.mark.parametrize(("has_instructions", "bf16"), [(True, True), (False, False), (False, True)])
def test_a_slow_type_gives_a_warning(
    has_instructions: bool, bf16: bool, ppo: PPOMathExperiment, paths: RunDir, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(backends, "has_bf16_products", lambda: has_instructions)
    ppo.actor.bf16 = ppo.critic.bf16 = bf16
    lines = [line for line in backends.run_warnings(preflight("ppo-math", ppo, paths)) if "bfloat16" in line]
    assert [line.split(":")[0] for line in lines] == ([] if has_instructions or not bf16 else ["actor.bf16=True"])
