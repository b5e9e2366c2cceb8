"""``realhf plan`` ends with tables for any experiment on any cluster."""

import json
from pathlib import Path
from random import Random

import pytest

from realhf.api.config import Device, ModelSpec
from realhf.api.experiment import Experiment
from realhf.apps.commands.plan import planned
from realhf.base.errors import UserError
from realhf.experiments import experiment_class
from tests.plan.search.random_planners import NAMES
from tests.scaling import examples

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 120, "max_position_embeddings": 4096}  # fmt: skip
MODELS = {"llama": {}, "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2}}
MODES = ("search", "heuristic", "megatron", "real", "split", "pipe_model")


def random_run(random: Random, name: str, root: Path) -> Experiment:
    """Return an experiment on a cluster; workers may have too little memory."""
    experiment = experiment_class(name)()
    experiment.fileroot = str(root)
    for family, more in MODELS.items():
        (root / family).mkdir(exist_ok=True)
        (root / family / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **more}))
    path = str(root / random.choice([*MODELS]))
    for role in experiment.roles():
        setattr(experiment, role, ModelSpec(path=path, bf16=random.random() < 0.5))
    experiment.n_nodes, experiment.n_gpus_per_node = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 4, 8))
    experiment.device = random.choice((Device.cpu, Device.cuda))
    experiment.planner.memory_gb = random.choice((None, 5.0))
    experiment.planner.budget_s = random.choice((0.01, 2.0))
    experiment.dataset.train_bs_n_seqs, experiment.max_staleness = random.randint(4, 9), random.choice((0, 0, 1))
    experiment.allocation_mode = random.choice(MODES)
    return experiment


def check(name: str, seed: int, root: Path) -> None:
    random = Random(f"{name} {seed}")
    try:
        result = planned(name, random_run(random, name, root), why=random.random() < 0.5)
    except UserError as error:  # options that exclude each other are not the planner's
        assert "allocation_mode" not in str(error), error
        return
    assert result.seconds > 0 and "step" in str(result) and set(result.layouts) == set(result.report.plan.placements)


@pytest.mark.parametrize("name", ["ppo", "dpo", "vineppo"])
def test_a_random_cluster(name: str, tmp_path: Path) -> None:
    check(name, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_random_clusters(name: str, tmp_path: Path) -> None:
    for seed in range(1, examples(6)):
        check(name, seed, tmp_path)
