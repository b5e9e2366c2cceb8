"""Rows that are longer than the positions of a model, in which rotary embeddings may depend on the length of a row."""

from dataclasses import replace

import numpy as np

from realhf.api.config import ModelSpec
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.preflight import size_problems
from realhf.data.encode import EncodedRow, EncodedRows
from realhf.experiments.ppo_math import PPOMathExperiment

MODEL = ModelConfig("llama", 2, 32, 4, 4, 8, 48, 67, max_positions=20)
DYNAMIC = replace(MODEL, rotary_scaling=(("rope_type", "dynamic"), ("factor", 2.0)))


def test_rotary_length_is_named_for_models_that_have_it() -> None:
    experiment = PPOMathExperiment(actor=ModelSpec(path="folder", rotary_length=21))
    experiment.dataset.train_bs_n_seqs, experiment.ppo.gen.max_new_tokens = 1, 16
    rows = EncodedRows([EncodedRow(np.arange(5, dtype=np.int32), ())], ())
    problem = "the model has 20 positions, the longest prompt and 16 new tokens need 21; lower max_new_tokens or "
    problem += "dataset.max_prompt_len"
    assert size_problems(experiment, rows, rows, {"actor": MODEL, "ref": MODEL}) == [f"actor, ref: {problem}"]
    models = {"actor": MODEL, "ref": DYNAMIC, "critic": replace(DYNAMIC, rotary_length=21)}
    assert size_problems(experiment, rows, rows, models) == [
        f"actor: {problem}",
        f"ref: {problem} or set rotary_length=21 or more: all rows get the rotary embeddings of such rows",
    ]
    assert {role.spec.rotary_length for role in experiment.roles().values()} == {21}
