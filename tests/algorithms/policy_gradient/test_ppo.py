"""PPO steps on a table of logits, against plain loops over rows and tokens."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from realhf.algorithms import build_interface
from realhf.algorithms.distillation.options import Distillation, DistillConfig
from realhf.algorithms.distillation.teacher import Teacher, TeacherConfig
from realhf.algorithms.policy_gradient.config import LengthPenalty, PolicyLoss, PolicyLossOptions, PPOConfig
from realhf.algorithms.policy_gradient.losses.policy_losses import ClipCovOptions, KLCovOptions
from realhf.algorithms.policy_gradient.ppo import PPOActor, PPOCritic
from realhf.api.batch_meta import RowId
from realhf.api.codec import to_plain
from realhf.api.config import GenerationConfig
from realhf.api.graph import InterfaceSpec
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext
from tests.algorithms.conftest import Table, TableEngine

CONTEXT = InterfaceContext(seed=5, tokenizer=None, run_root=Path("."))
CONFIG = PPOConfig(ppo_n_minibatches=2, kl_ctl=0.2, discount=0.9, gae_lambda=0.8, max_reward_clip=2.0)
COLUMNS = ("tokens", "prompt_mask", "logprobs", "ref_logprobs", "values")


def plain_rows(batch, config):
    """Return each row as a dict of lists, with advantages and returns."""
    rows = []
    for i, row_id in enumerate(batch.ids):
        row = {key: batch.columns[key].rows()[i].tolist() for key in COLUMNS}
        row.update({key: batch[key][i].item() for key in ("truncated", "rewards", "minibatch")}, id=row_id)
        n, truncated = len(row["tokens"]), row["truncated"]
        response = [t for t in range(1, n) if not row["prompt_mask"][t]]
        score = max(-config.max_reward_clip, min(config.max_reward_clip, row["rewards"]))
        score = 0.0 if truncated and config.mask_no_eos_with_zero else score
        kl = {t: row["logprobs"][t] - row["ref_logprobs"][t] for t in response}
        v = [0.0] * n if config.disable_value else row["values"]
        adv, ret, gae = {}, {}, 0.0
        for t in reversed(response):
            reward = -config.kl_ctl * kl[t] + (score if t == n - 1 else 0.0)
            after = v[t] if t < n - 1 or truncated else 0.0
            delta = reward + config.discount * after - v[t - 1]
            gae = delta + config.discount * config.gae_lambda * gae
            adv[t], ret[t] = gae, gae + v[t - 1]
        row.update(response=response, kl=kl, v=v, adv=adv, ret=ret)
        row["trained"] = [] if truncated and config.mask_too_long else response
        rows.append(row)
    return rows


def plain_normalise(rows, groups):
    """Normalised advantages: {(row, token): value}, with statistics per group of rows."""
    result = {}
    for group in groups:
        values = [rows[i]["adv"][t] for i in group for t in rows[i]["trained"]]
        mean = sum(values) / max(len(values), 1)
        std = math.sqrt(sum((a - mean) ** 2 for a in values) / max(len(values), 1))
        result.update({(i, t): (rows[i]["adv"][t] - mean) / (std + 1e-5) for i in group for t in rows[i]["trained"]})
    return result


def plain_actor(rows, adv, logits, config, temperature=1.0):
    """One SGD step of learning rate 1 per mini-batch on the bigram table."""
    for k in range(config.ppo_n_minibatches):
        logits = logits.detach().clone().requires_grad_()
        losses = []
        for i, row in enumerate(rows):
            for t in row["trained"] if row["minibatch"] == k else []:
                logp = torch.log_softmax(logits[row["tokens"][t - 1]] / temperature, 0)[row["tokens"][t]]
                r = (logp - row["logprobs"][t]).exp()
                losses.append(torch.maximum(-adv[i, t] * r, -adv[i, t] * r.clamp(0.8, 1.2)))
        if losses:
            logits = logits - torch.autograd.grad(sum(losses) / len(losses), logits)[0]
    return logits.detach()


def one_group(rows):
    return [range(len(rows))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_no_eos_with_zero": True},
        {"mask_too_long": True},
        {"disable_value": True},
        {"gen": GenerationConfig(temperature=0.7)},
        {"gen": GenerationConfig(temperature=0.7, greedy=True)},
    ],
)
def test_actor_step(table_engine, make_rollouts, options):
    config, batch, engine = replace(CONFIG, **options), make_rollouts(), table_engine()
    start, before = engine.logits.detach().clone(), {k: c.data.clone() for k, c in batch.columns.items()}
    given = batch.only([k for k in batch.columns if k != "values"]) if config.disable_value else batch
    stats, state = PPOActor(config, CONTEXT).train_step(engine, given, {})
    rows = plain_rows(batch, config)
    temperature = 0.7 if "gen" in options and not config.gen.greedy else 1.0
    want = plain_actor(rows, plain_normalise(rows, one_group(rows)), start, config, temperature)
    assert torch.allclose(engine.logits.detach(), want, atol=1e-10)
    assert all(torch.equal(batch[k], data) for k, data in before.items())
    assert state == {"kl_coef": 0.2} and stats["kl_coef"] == (0.2, 1.0) and stats["step_skipped"] == (0.0, 2.0)
    kl = [x for row in rows for x in row["kl"].values()]
    assert stats["kl"] == pytest.approx((sum(kl), len(kl))) and stats["kl_per_response"] == pytest.approx((sum(kl), 8))
    adv = [row["adv"][t] for row in rows for t in row["trained"]]
    assert stats["advantage"] == pytest.approx((sum(adv), len(adv)))
    assert stats["advantage_sq"] == pytest.approx((sum(a * a for a in adv), len(adv)))
    assert stats["reward"] == pytest.approx((sum(row["rewards"] for row in rows), 8))
    assert stats["importance_ratio"][1] == stats["actor_loss"][1] == len(adv)


def test_group_normalisation_and_none(table_engine, make_rollouts):
    batch = make_rollouts()
    for options, groups in (({"group_adv_norm": True}, [(0, 1), (2, 3), (4, 5), (6, 7)]), ({"adv_norm": False}, None)):
        config, engine = replace(CONFIG, **options), table_engine()
        start, rows = engine.logits.detach().clone(), plain_rows(batch, replace(CONFIG, **options))
        raw = {(i, t): a for i, row in enumerate(rows) for t, a in row["adv"].items()}
        adv = plain_normalise(rows, groups) if groups else raw
        PPOActor(config, CONTEXT).train_step(engine, batch, {})
        assert torch.allclose(engine.logits.detach(), plain_actor(rows, adv, start, config), atol=1e-10)


def test_critic_step_without_normalisation(table_engine, make_rollouts):
    config, batch, engine = replace(CONFIG, value_norm=False), make_rollouts(), table_engine()
    scores = engine.scores.detach().clone()
    _, state = PPOCritic(config, CONTEXT).train_step(engine, batch, {})
    rows = plain_rows(batch, config)
    assert state == {"kl_coef": 0.2}
    assert torch.allclose(engine.scores.detach(), plain_critic(rows, scores, config, 0.0, 1.0, 0.0, 1.0))


def plain_critic(rows, scores, config, old_mean, old_std, mean, std):
    clip = 5.0 if config.value_norm else math.inf
    for k in range(config.ppo_n_minibatches):
        scores = scores.detach().clone().requires_grad_()
        losses = []
        for row in rows:
            for t in row["trained"] if row["minibatch"] == k else []:
                value = scores[row["tokens"][t - 1]]
                old = (row["v"][t - 1] - old_mean) / old_std
                target = max(-clip, min(clip, (row["ret"][t] - mean) / std))
                clipped = old + (value - old).clamp(-0.2, 0.2)
                losses.append(torch.maximum(0.5 * (value - target) ** 2, 0.5 * (clipped - target) ** 2))
        if losses:
            scores = scores - torch.autograd.grad(sum(losses) / len(losses), scores)[0]
    return scores.detach()


def test_critic_predicts_normalised_returns(table_engine, make_rollouts):
    config, batch, engine = replace(CONFIG, mask_too_long=True), make_rollouts(), table_engine()
    scores, critic = engine.scores.detach().clone(), PPOCritic(config, CONTEXT)
    near = scores[batch["tokens"]] * math.sqrt(12) + 2 + 0.3 * batch["values"]  # near the clip range
    batch = batch.with_tokenwise("values", near)
    seen = {"first": 1e-4, "second": 8e-4, "weight": 5e-5}  # mean 2, std sqrt(12), the weight of this batch
    stats, state = critic.train_step(engine, batch, {"value_norm": seen})
    rows = plain_rows(batch, config)
    returns = [row["ret"][t] for row in rows for t in row["trained"]]
    beta, n = config.value_norm_beta, len(returns)
    weight = beta * 5e-5 + 1 - beta
    mean = (beta * 1e-4 + (1 - beta) * sum(returns) / n) / weight
    std = math.sqrt((beta * 8e-4 + (1 - beta) * sum(r * r for r in returns) / n) / weight - mean**2)
    assert state["value_norm"]["first"] / state["value_norm"]["weight"] == pytest.approx(mean)
    assert stats["return"] == pytest.approx((sum(returns), n))
    assert stats["value"] == pytest.approx((sum(r["v"][t - 1] for r in rows for t in r["trained"]), n))
    want = plain_critic(rows, scores, config, 2.0, math.sqrt(12), mean, std)
    assert torch.allclose(engine.scores.detach(), want, atol=1e-9)


def test_values_are_in_units_of_rewards(table_engine, make_rollouts):
    batch, engine = make_rollouts(), table_engine()
    state = {"value_norm": {"first": 1.0, "second": 8.0, "weight": 0.5}}
    out, _ = PPOCritic(CONFIG, CONTEXT).inference(engine, batch, state)
    assert out.ids == batch.ids and out.lengths("values") == batch.lengths("tokens")
    assert torch.allclose(out["values"], engine.scores.detach()[batch["tokens"]] * math.sqrt(12) + 2)
    raw, _ = PPOCritic(replace(CONFIG, value_norm=False), CONTEXT).inference(engine, batch, state)
    assert torch.equal(raw["values"], engine.scores.detach()[batch["tokens"]])


def test_reference_logprobs_are_at_the_temperature_of_generation(table_engine, make_rollouts):
    batch, engine = make_rollouts(), table_engine()
    for gen, temperature in ((GenerationConfig(temperature=0.5), 0.5), (GenerationConfig(temperature=0.0), 1.0)):
        out, _ = PPOActor(replace(CONFIG, gen=gen), CONTEXT).inference(engine, batch, {})
        row, tokens, prompt = (columns.rows()[2] for columns in (
            out.columns["ref_logprobs"], batch.columns["tokens"], batch.columns["prompt_mask"]
        ))  # fmt: skip
        want = (engine.logits.detach() / temperature).log_softmax(-1)[tokens[:-1], tokens[1:]]
        assert row[0] == 0 and torch.allclose(row[1:], want * (prompt[1:] == 0))
        everywhere, _ = PPOActor(replace(CONFIG, gen=gen), CONTEXT).inference(engine, batch.only(("tokens",)), {})
        assert torch.allclose(everywhere.columns["ref_logprobs"].rows()[2][1:], want)


COV = {"clip_cov": ClipCovOptions(share=0.3, low=-1.0, high=1.0), "kl_cov": KLCovOptions(share=0.4)}
WHOLE_BATCH = {  # options that read the batch of all ranks, or more of the distribution than the sampled tokens
    "adaptive": {"use_adaptive_kl_ctl": True, "early_stop_kl": 50.0},
    "clip_cov": {"policy_loss": PolicyLoss["clip_cov"], "losses": PolicyLossOptions(**COV)},
    "kl_cov": {"policy_loss": PolicyLoss["kl_cov"], "losses": PolicyLossOptions(**COV)},
    "entropy": {"entropy_coef": 0.3, "length_penalty": LengthPenalty["group_sigmoid"], "gae_lambda_alpha": 0.9},
    **{f"distill {objective.name}": {"distill": DistillConfig(objective, coef=0.7, top_k=3)}
       for objective in Distillation},
}  # fmt: skip


def with_teacher(batch, config):
    """Add the column of the teacher that the objective reads."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    engine = SimpleNamespace(
        config=TableEngine.config, forward=lambda some, fn: fn(Table(logits, torch.zeros(7), some), some)
    )
    context = replace(CONTEXT, tokenizer=range(6))
    teacher, _ = Teacher(TeacherConfig(config.distill), context).inference(engine, batch, {})
    return batch.with_columns(**teacher.columns)


@pytest.mark.parametrize(("cls", "name"), [*((PPOActor, name) for name in WHOLE_BATCH), (PPOCritic, "adaptive")])
def test_results_do_not_depend_on_ranks_order_or_empty_shares(ranks, make_rollouts, cls, name):
    config = replace(CONFIG, ppo_n_minibatches=3, **WHOLE_BATCH[name])
    batch = make_rollouts(n_minibatches=2)  # the third mini-batch is empty everywhere
    batch = with_teacher(batch, config) if "distill" in name else batch
    interface = cls(config, CONTEXT)
    state = {"kl_coef": 0.3}

    def on(*parts):
        return ranks(
            [lambda engine, part=part: interface.train_step(engine, batch.select(part), state) for part in parts]
        )

    (alone,), [(stats, after)] = on(range(8))
    spread, results = on([6, 7, 1, 0], [], [5, 3, 2, 4])
    for engine in spread:
        assert torch.allclose(engine.logits, alone.logits, atol=1e-12)
        assert torch.allclose(engine.scores, alone.scores, atol=1e-12)
        assert len(engine.calls) == 3
    for _, part_after in results:
        assert part_after["kl_coef"] == pytest.approx(after["kl_coef"], rel=1e-14)
        assert (part_after["kl_coef"] == CONFIG.kl_ctl) == (name != "adaptive") and part_after["kl_coef"] != 0.3
    for name in stats.keys() - {"step_skipped", "kl_coef"}:
        whole = [sum(part[name][i] for part, _ in results if name in part) for i in range(2)]
        assert whole == pytest.approx(list(stats[name])), name


def test_actor_and_critic_have_the_same_kl_coefficient(table_engine, make_rollouts):
    config = replace(CONFIG, use_adaptive_kl_ctl=True, adaptive_kl_target=0.01, adaptive_kl_horizon=100.0)
    batch = make_rollouts()
    moved = batch.with_columns(ref_logprobs=Column(batch["logprobs"] - 1.0, batch.lengths("tokens")))
    for columns, factor in (
        (moved, 1 + 0.2 * 8 / 100),
        (batch.with_columns(ref_logprobs=batch.columns["logprobs"]), 1 - 0.2 * 8 / 100),
    ):
        _, actor = PPOActor(config, CONTEXT).train_step(table_engine(), columns, {})
        _, critic = PPOCritic(config, CONTEXT).train_step(table_engine(), columns, {})
        assert actor["kl_coef"] == critic["kl_coef"] == pytest.approx(0.2 * factor)


def test_early_stop_skips_minibatches_above_the_limit(table_engine, make_rollouts):
    batch = make_rollouts()
    far = (batch["minibatch"] == 1).repeat_interleave(torch.tensor(batch.lengths("tokens")))
    off = batch.with_columns(logprobs=Column(batch["logprobs"] - 3.0 * far, batch.lengths("tokens")))
    for limits in ({"early_stop_imp_ratio": 9.0}, {"early_stop_imp_ratio": None, "early_stop_kl": 6.0}):
        engine = table_engine()
        stats, _ = PPOActor(replace(CONFIG, **limits), CONTEXT).train_step(engine, off, {})
        assert stats["step_skipped"] == (1.0, 2.0)
    free = table_engine()
    stats, _ = PPOActor(replace(CONFIG, early_stop_imp_ratio=None), CONTEXT).train_step(free, off, {})
    assert stats["step_skipped"] == (0.0, 2.0) and not torch.equal(free.logits, engine.logits)


def test_minibatch_numbers_out_of_range(table_engine, make_rollouts):
    with pytest.raises(ValueError, match="ppo_n_minibatches=2"):
        PPOActor(CONFIG, CONTEXT).train_step(table_engine(), make_rollouts(n_minibatches=3), {})


def test_invalid_critic_options():
    with pytest.raises(ValueError, match="no critic"):
        PPOCritic(PPOConfig(disable_value=True), CONTEXT)


class RepeatEngine:
    """Repeats the first prompt token sample + 1 times; the last sample is truncated."""

    def generate(self, prompts, config, n, seed, record_experts=False):
        assert set(prompts.columns) == {"prompts"} and seed == 5
        ids = tuple(RowId(p.prompt, s) for p in prompts.ids for s in range(n))
        rows = [(row, s + 1) for row in prompts.columns["prompts"].rows() for s in range(n)]
        columns = {
            "tokens": Column.of([torch.cat([row, row[:1].expand(k)]) for row, k in rows]),
            "prompt_mask": Column.of([torch.cat([torch.ones(len(row)), torch.zeros(k)]).byte() for row, k in rows]),
            "truncated": Column.scalars(torch.tensor([k == n for _, k in rows]).byte()),
        }
        return SequenceBatch(ids, columns)


@pytest.mark.parametrize(
    ("name", "config", "n"),
    [
        ("ppo_actor", PPOConfig(group_size=2, generation_size=3), 3),
        ("ppo_actor", PPOConfig(group_size=2), 2),
        ("generation", GenerationConfig(n=4), 4),
    ],
)
def test_generate(name, config, n):
    interface = build_interface(InterfaceSpec(name, to_plain(config)), CONTEXT)
    prompts = Column.of([torch.tensor([3, 4]), torch.tensor([5])])
    batch = SequenceBatch((RowId(8, -1), RowId(2, -1)), {"prompts": prompts, "row": prompts})
    responses, stats = interface.generate(RepeatEngine(), batch, {})
    assert responses.ids == tuple(RowId(p, s) for p in (8, 2) for s in range(n))
    assert stats == {
        "response_length": (n * (n + 1), 2 * n),
        "truncated": (2.0, 2 * n),
        "prompt_length": (3.0, 2.0),
    }
