"""Values and clusters of sweeps."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.config import Device
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.sweep import Sweep, SweepPoint, cluster_words, parse_sweep, smaller_clusters, swept
from realhf.base.errors import UserError
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.sft import SFTExperiment
from tests.apps.commands.plan_command import write_model


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n_gpus=16,32,64", (16, 32, 64)),
        ("n_gpus=8..128", (8, 16, 32, 64, 128)),
        ("n_gpus=8..100", (8, 16, 32, 64, 100)),
        ("n_gpus=8..8", (8,)),
        ("n_gpus=2..8..2", (2, 4, 6, 8)),
        ("n_gpus=2..7..3", (2, 5)),
        ("n_gpus=64, 8..16,1", (1, 8, 16, 64)),
    ],
)
def test_values(text: str, values: tuple[int, ...]) -> None:
    assert parse_sweep(text) == Sweep("n_gpus", values)


@given(st.text(alphabet="n_gpus=0123456789.,-x ", max_size=25))
def test_any_text_has_positive_ascending_values_or_a_clear_error(text: str) -> None:
    try:
        values = parse_sweep(text).values
    except UserError as error:
        assert str(error).startswith(f"--sweep {text}: ") and "write --sweep n_gpus=16,32,64" in str(error)
    else:
        assert 1 <= len(values) <= 64 and list(values) == sorted(set(values)) and values[0] > 0


def swept_ppo(folder: Path, text: str, *words: str) -> list[SweepPoint]:
    """Return the plans of PPO with two small models, whose searches end at once, for several sizes."""
    write_model(folder / "tiny", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
    options = [f"{role}.path={folder / 'tiny'}" for role in ("actor", "rew")]
    options += ["device=cuda", "planner.hardware=h100", "dataset.train_bs_n_seqs=4", "ppo.gen.max_new_tokens=8",
                "allocation_mode=search", "planner.budget_s=0.0001", *words]  # fmt: skip
    return swept("ppo", lambda more: updated(PPOExperiment(), [*options, *more]), parse_sweep(text))


@pytest.mark.parametrize("text", ["n_gpus=1..16", "n_nodes=1..4"])
def test_a_larger_cluster_is_not_slower(text: str, tmp_path: Path) -> None:
    points = swept_ppo(tmp_path, text)
    assert all(point.report.fits for point in points) and len({point.n_workers for point in points}) == len(points)
    seconds = [point.report.prediction.seconds for point in points]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(seconds)), seconds


def test_other_options_do_not_start_from_each_other(tmp_path: Path) -> None:
    points = swept_ppo(tmp_path, "dataset.train_bs_n_seqs=4,8", "n_gpus_per_node=2")
    assert [point.n_workers for point in points] == [2, 2]


def experiment(n_nodes: int = 1, n_gpus: int = 1, device: str = "cuda", hardware: str = "h100") -> SFTExperiment:
    words = [f"n_nodes={n_nodes}", f"n_gpus_per_node={n_gpus}", f"device={device}", f"planner.hardware={hardware}"]
    return updated(SFTExperiment(), words)


def test_clusters_have_full_nodes() -> None:
    assert cluster_words(4, experiment()) == ["n_nodes=1", "n_gpus_per_node=4"]
    assert cluster_words(64, experiment()) == ["n_nodes=8", "n_gpus_per_node=8"]
    assert cluster_words(64, experiment(2, 4)) == ["n_nodes=16", "n_gpus_per_node=4"]
    assert cluster_words(3, experiment(4)) == ["n_nodes=3", "n_gpus_per_node=1"]
    with pytest.raises(UserError, match="not a multiple of 4 GPUs per node; nearest: 8 or 12"):
        cluster_words(10, experiment(2, 4))
    cpu = experiment(device="cpu", hardware="cpu")
    assert cpu.device is Device.cpu and cluster_words(64, cpu) == ["n_nodes=1", "n_gpus_per_node=64"]


@given(st.integers(1, 40), st.integers(1, 16))
def test_smaller_clusters_can_be_made_of_the_same_nodes(n_nodes: int, n_gpus: int) -> None:
    given_cluster = experiment(n_nodes, n_gpus)
    sizes = smaller_clusters(given_cluster).values
    assert sizes[-1] == n_nodes * n_gpus and sizes[0] == 1
    for size in sizes:
        nodes, per_node = (int(word.partition("=")[2]) for word in cluster_words(size, given_cluster))
        assert nodes * per_node == size and nodes <= n_nodes and per_node <= max(n_gpus, 1)
