"""A mixed speed equals the profile's on one node and the file's on links; shards that were not measured are scaled."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.config import Recompute
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.machines.mixed_speed import Links, MixedSpeed, ProfiledClusterLinks, TieredLinks
from realhf.plan.machines.profile import (
    Fit,
    Profile,
    ProfiledMachine,
    ProfiledSpeed,
    decode_counts,
    message_counts,
    pass_counts,
    shape_of,
    traffic_counts,
)
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from tests.plan.search.planners import LLAMA, TOY

NODE_SIZE = TOY.node_size
FILE = Roofline(TOY)
SEEDS = st.integers(0, 2**32)
WORKS = st.lists(st.integers(1, 300), min_size=1, max_size=8).map(Work.of)
NBYTES = st.integers(1, 1 << 26)
KINDS = st.sampled_from(CollectiveKind)
TRAFFIC = st.builds(Traffic, local=st.integers(0, 10**8), node=st.integers(0, 10**8), n_parts=st.integers(1, 500),
                    copied=st.integers(0, 10**9))  # fmt: skip
ACROSS = (0, 1, 4, 5)
"""Ranks on two nodes."""


def shard(tp: int = 1, n_blocks: int = 4, first: bool = True, last: bool = True) -> StageShard:
    return StageShard(LLAMA, tp, n_blocks, first, last, bf16=False)


def profile_of(seed: int, degrees: tuple[int, ...] = (1, 2), cluster: tuple[str, ...] = ()) -> Profile:
    """Return a profile of one node with made-up coefficients, and of groups between nodes of the sizes ``cluster``."""

    def fit(counts: dict[str, float], scale: float) -> Fit:
        return Fit({name: scale * (1 + (seed * 31 + i * 7) % 11) for i, name in enumerate(counts)}, ())

    passes, shape = pass_counts(shard(), Work.of([1])), shape_of(LLAMA, False)
    fits: dict[str, Fit] = {f"{shape}/optimizer": fit({"update": 1, "parameter": 1}, 1e-9)}
    for tp in degrees:
        names = ("forward", "train_forward", "train_backward", "train_bytes", "kept_bytes", "forward_bytes")
        fits |= {f"{shape}/t{tp}/{name}": fit(passes, (i + 2) * 1e-6 / tp) for i, name in enumerate(names)}
        fits[f"{shape}/t{tp}/decode"] = fit(decode_counts(shard(), 1, 1), 1e-6 / tp)
    message, exchange = fit(message_counts(1.0), 1e-11), fit(traffic_counts(Traffic(node=1)), 1e-8)
    fits |= {f"{kind.value}/{NODE_SIZE}": message for kind in CollectiveKind}
    fits |= {"send": message, "host_copy": message, "exchange": exchange, "call": fit({"call": 1, "row": 1}, 1e-5)}
    slower = fit(message_counts(1.0), 3e-10)
    fits |= {f"cluster_{kind.value}/{size}": slower for kind in CollectiveKind for size in cluster}
    if cluster:
        fits |= {"cluster_send": slower, "cluster_exchange": fit(traffic_counts(Traffic(node=1)), 5e-8)}
    return Profile(ProfiledMachine("cpu", "abacus", 2, 1), 1e8, fits)


def mixed(profile: Profile, cluster: Links = FILE) -> MixedSpeed:
    measured = ProfiledSpeed(profile)
    links = TieredLinks(measured, cluster, NODE_SIZE)
    return MixedSpeed(measured, links, FILE, AnalyticMemory("cpu"), NODE_SIZE)


@given(SEEDS, WORKS, st.sampled_from([1, 2]), st.booleans(), st.integers(1, 64), st.floats(0, 5000))
def test_measured_shards_within_a_node_have_the_times_of_the_profile(
    seed: int, work: Work, tp: int, last: bool, rows: int, context: float
) -> None:
    speed, part, ranks = mixed(profile_of(seed)), shard(tp, last=last), range(4, 4 + tp)
    measured = speed.measured
    assert speed.forward(part, work, ranks) == measured.forward(part, work, ranks)
    for recompute in (None, *Recompute):
        some = replace(part, recompute=recompute)
        assert speed.train(some, work, ranks) == measured.train(some, work, ranks)
    assert speed.decode(part, rows, context, ranks) == measured.decode(part, rows, context, ranks)
    assert speed.train_bytes(part, work) == measured.train_bytes(part, work)
    assert speed.forward_bytes(part, work) == measured.forward_bytes(part, work)
    assert speed.optimizer(part, rows) == measured.optimizer(part, rows) and speed.call == measured.call


@given(SEEDS, KINDS, NBYTES, TRAFFIC)
def test_links_within_a_node_are_measured_and_links_between_nodes_are_of_the_file(
    seed: int, kind: CollectiveKind, nbytes: int, traffic: Traffic
) -> None:
    speed = mixed(profile_of(seed))
    measured = speed.measured
    assert speed.collective(kind, nbytes, (4, 5, 7)) == measured.collective(kind, nbytes, (4, 5, 7))
    assert speed.collective(kind, nbytes, ACROSS) == FILE.collective(kind, nbytes, ACROSS)
    assert speed.collective(kind, nbytes, (6,)) == 0.0
    assert speed.send(nbytes, 5, 6) == measured.send(nbytes, 5, 6) and speed.send(nbytes, 5, 5) == 0.0
    assert speed.send(nbytes, 3, 4) == FILE.send(nbytes, 3, 4)
    assert speed.exchange(traffic) == measured.exchange(traffic)
    assert speed.host_copy(nbytes) == measured.host_copy(nbytes)
    far = speed.exchange(replace(traffic, cluster=nbytes)) - speed.exchange(traffic)
    n_parts = -(-traffic.n_parts * nbytes // (nbytes + traffic.node + traffic.local))
    assert far == pytest.approx(FILE.exchange(Traffic(cluster=nbytes, n_parts=n_parts)), rel=1e-3, abs=1e-6)


@given(SEEDS, WORKS, st.sampled_from([2, 4]), st.integers(1, 64), st.floats(0, 5000))
def test_a_degree_that_was_not_measured_divides_the_work_and_adds_collectives(
    seed: int, work: Work, tp: int, rows: int, context: float
) -> None:
    speed, whole, part, ranks = mixed(profile_of(seed, degrees=(1,))), shard(), shard(tp), range(tp)

    def reduces(tokens: int) -> float:
        nbytes = tokens * LLAMA.hidden * 4
        return 2 * 4 * speed.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks)

    pairs = [(speed.forward(part, work, ranks) - reduces(work.tokens), speed.forward(whole, work, (0,)))]
    pairs.append((speed.decode(part, rows, context, ranks) - reduces(rows), speed.decode(whole, rows, context, (0,))))
    together = zip(speed.train(part, work, ranks), speed.train(whole, work, (0,)), strict=True)
    pairs += [(seconds - reduces(work.tokens), alone) for seconds, alone in together]
    pairs.append((speed.forward_bytes(part, work), speed.forward_bytes(whole, work)))
    for seconds, alone in pairs:
        assert alone / tp * (1 - 1e-6) <= seconds <= alone * (1 + 1e-6)


def test_recomputed_blocks_repeat_their_collectives() -> None:
    speed, work, ranks = mixed(profile_of(1, degrees=(1,))), Work.of([100, 50]), range(2)
    reduces = 2 * 4 * speed.collective(CollectiveKind.ALL_REDUCE, 150 * LLAMA.hidden * 4, ranks)
    part = replace(shard(2), recompute=Recompute.full)
    slower = mixed(profile_of(1, degrees=(1,)), FILE)
    free = replace(slower, links=Roofline(replace(TOY, node=replace(TOY.node, bandwidth=1e30, latency=0.0))))
    added = [a - b for a, b in zip(speed.train(part, work, ranks), free.train(part, work, ranks), strict=True)]
    assert added == pytest.approx([reduces, 2 * reduces])


def test_measured_shards_between_nodes_pay_the_difference_of_links() -> None:
    speed, work = mixed(profile_of(3)), Work.of([64] * 4)
    nbytes = work.tokens * LLAMA.hidden * 4
    within, across = speed.forward(shard(2), work, (2, 3)), speed.forward(shard(2), work, (3, 4))
    node, file = (speed.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks) for ranks in ((2, 3), (3, 4)))
    assert across - within == pytest.approx(2 * 4 * max(0.0, file - node)) and file > node


def test_a_stage_without_work_takes_no_time() -> None:
    speed = mixed(profile_of(1, degrees=(1,)))
    inner = shard(4, n_blocks=0, first=False, last=False)
    assert speed.decode(inner, 3, 0, range(4)) == speed.measured.decode(replace(inner, tp=1), 3, 0, (0,))


@given(SEEDS, KINDS, NBYTES)
def test_measured_links_between_nodes_replace_those_of_the_file(seed: int, kind: CollectiveKind, nbytes: int) -> None:
    profile = profile_of(seed, cluster=("2x1", "2x2"))
    speed = mixed(profile, ProfiledClusterLinks(profile, FILE, NODE_SIZE))
    measured = profile.fits[f"cluster_{kind.value}/2x2"](message_counts(nbytes))
    assert profile.cluster_sizes == ((2, 1), (2, 2)) and profile.n_workers == NODE_SIZE
    assert speed.collective(kind, nbytes, ACROSS) == speed.collective(kind, nbytes, (8, 9, 14, 15)) == measured
    eight = (0, 1, 4, 5, 8, 9, 12, 13)
    ratio = FILE.collective(kind, nbytes, eight) / FILE.collective(kind, nbytes, ACROSS)
    assert speed.collective(kind, nbytes, eight) == pytest.approx(ratio * measured)
    assert speed.send(nbytes, 3, 4) == profile.fits["cluster_send"](message_counts(nbytes))
    traffic = Traffic(node=100, cluster=nbytes, n_parts=4, copied=100 + nbytes)
    far = speed.exchange(traffic) - speed.exchange(replace(traffic, cluster=0))
    per_part = profile.fits["cluster_exchange"]
    counts = {"rendezvous": 1, "sent part": -(-4 * nbytes // (nbytes + 100)), "sent byte": nbytes}
    assert far == pytest.approx(per_part(counts))


def test_missing_measurements_between_nodes_are_reported_with_a_command() -> None:
    links = ProfiledClusterLinks(profile_of(1), FILE, NODE_SIZE)
    with pytest.raises(ValueError, match=r"cluster_all_reduce/2x1; run 'realhf profile n_nodes=2 n_gpus_per_node=4"):
        links.collective(CollectiveKind.ALL_REDUCE, 8, ACROSS)
    with pytest.raises(ValueError, match="no measurements of cluster_send"):
        links.send(8, 3, 4)
    with pytest.raises(ValueError, match="no measurements of cluster_exchange"):
        links.exchange(Traffic(cluster=8))
    assert links.exchange(Traffic()) == 0.0
