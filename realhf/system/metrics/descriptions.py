"""Names, units and meanings of the keys of metrics.jsonl and evaluation.jsonl.

Contains no values. A key that an interface outside the package reports has no description.
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

GROUPS = ("time", "tokens", "flops", "memory", "mfu", "mbu", "predicted", "limit", "prompts", "reward", "env", "kl",
          "length", "eval")  # fmt: skip
PLACEHOLDERS = {
    "call": rf"(?!(?:{'|'.join(GROUPS)})/)(?!(?:step|move|eval)_(?:s|share)$)[A-Za-z0-9]\w*?",
    "estimator": r"k\d",
    "reason": r"[a-z_]+",
    "member": r"\d+",
    "fn": r"(?!sq$).+",
    "source": r".+",
}
"""Regular expressions of the variable parts of keys. Groups of metrics are not calls."""


class MetricInfo(NamedTuple):
    """A short name, a unit (empty: a number without unit) and the meaning of one key."""

    name: str
    unit: str
    text: str


@dataclass(frozen=True)
class MetricPattern:
    """Keys of one form, such as ``time/{call}_s``. ``name`` may contain the placeholders of ``key``."""

    key: str
    name: str
    unit: str
    text: str
    example: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", self.key)  # literal text, placeholder, literal text, ...
        groups = [f"(?P<{part}>{PLACEHOLDERS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts)]
        return re.compile("".join(groups))

    @property
    def example_key(self) -> str:
        return self.example or self.key

    def match(self, key: str) -> MetricInfo | None:
        """Return the description of ``key`` if it has this form."""
        found = self.regex.fullmatch(key)
        return MetricInfo(self.name.format(**found.groupdict()), self.unit, self.text) if found else None


STEP = (
    MetricPattern("step", "step", "", "number of completed steps; 0 is the evaluation before the first step"),
    MetricPattern("time/step_s", "time of a step", "s",
                  "wall-clock time from the end of the previous step, without evaluation"),
    MetricPattern("time/{call}_s", "time of {call}", "s",
                  "compute time of the call, on the worker with the largest", "time/actor_gen_s"),
    MetricPattern("time/move_s", "time of transfers", "s",
                  "time of row transfers and reallocations, on the worker with the largest"),
    MetricPattern("time/eval_s", "time of evaluation", "s", "wall-clock time of the evaluation after the step"),
    MetricPattern("time/{call}_share", "share of {call}", "fraction",
                  "share of the time of all workers that the call computes; the shares add up to at most 1",
                  "time/actor_gen_share"),
    MetricPattern("time/move_share", "share of transfers", "fraction",
                  "share of the time of all workers in row transfers and reallocations"),
    MetricPattern("tokens/generated", "generated tokens", "tokens", "sampled tokens, including resampled prompts"),
    MetricPattern("tokens/trained", "trained tokens", "tokens",
                  "tokens of prompts and responses in the largest training call"),
    MetricPattern("tokens/per_s", "throughput", "tokens/s",
                  "trained tokens (without training: generated tokens) per second of the step"),
    MetricPattern("flops/model_per_s", "model FLOP/s", "FLOP/s",
                  "floating-point operations that the models need per second; recomputation does not count"),
    MetricPattern("memory/worker_gb", "memory of a worker", "GB",
                  "resident host memory after a call, on the worker with the largest"),
    MetricPattern("memory/worker_peak_gb", "peak memory of a worker", "GB",
                  "largest resident host memory since the start, on the worker with the largest"),
    MetricPattern("mfu/{call}", "MFU of {call}", "fraction",
                  "model FLOP/s of the call relative to the peak of the data sheet", "mfu/actor_train"),
    MetricPattern("mbu/{call}", "MBU of {call}", "fraction",
                  "necessary memory traffic of generation per second relative to the peak bandwidth of the data sheet",
                  "mbu/actor_gen"),
    MetricPattern("predicted/step_s", "predicted time of a step", "s", "the planner's prediction, with a profile"),
    MetricPattern("predicted/{call}_s", "predicted time of {call}", "s",
                  "the planner's prediction of the call, with a profile", "predicted/actor_gen_s"),
    MetricPattern("limit/step_s", "lower bound of a step", "s",
                  "lower bound of the step time from the data sheet, without a profile"),
    MetricPattern("limit/{call}_s", "lower bound of {call}", "s",
                  "lower bound of the call's time from the data sheet, without a profile", "limit/actor_gen_s"),
    MetricPattern("prompts/sampled", "sampled prompts", "prompts", "prompts of the step, with resamples"),
    MetricPattern("prompts/used", "used prompts", "prompts", "prompts that the filter call keeps"),
    MetricPattern("prompts/active", "active prompts", "prompts",
                  "prompts of the current epoch of every source with a positive weight"),
    MetricPattern("prompts/left_out", "prompts left out", "prompts",
                  "prompts whose pass rate leaves them out of the current epoch (`dataset.curriculum`)"),
    MetricPattern("prompts/filtered", "filtered prompts", "prompts",
                  "prompts that have left the data (`dataset_max_filter_percentage`)"),
    MetricPattern("prompts/unseen", "unseen prompts", "prompts", "prompts without a result so far"),
    MetricPattern("prompts/pass_rate", "remembered pass rate", "fraction",
                  "mean of the last pass rates of all prompts that have a result"),
    MetricPattern("prompts/all_right", "solved prompts", "fraction",
                  "fraction of the step's prompts whose responses all pass"),
    MetricPattern("prompts/all_wrong", "failed prompts", "fraction",
                  "fraction of the step's prompts of which no response passes"),
    MetricPattern("prompts/source_{source}", "share of {source}", "fraction",
                  "fraction of the step's prompts from this source, without resampled ones (`dataset.paths`)",
                  "prompts/source_gsm8k"),
)  # fmt: skip
SUMMARY = (
    MetricPattern("reward/mean", "reward", "", "`rew_inf/reward`"),
    MetricPattern("reward/accuracy", "accuracy", "fraction", "`rew_inf/accuracy`"),
    MetricPattern("reward/failed", "failed rewards", "fraction", "`rew_inf/failed` or `gold_inf/failed`"),
    MetricPattern("env/turns", "turns", "turns", "`actor_gen/turns`"),
    MetricPattern("env/failed", "failed episodes", "fraction", "`actor_gen/failed`"),
    MetricPattern("tokens/drifted", "drifted tokens", "fraction", "`actor_gen/drifted`"),
    MetricPattern("kl/ref", "KL to the reference", "nats", "`actor_train/kl`"),
    MetricPattern("length/response", "response length", "tokens",
                  "`actor_gen/response_length` or `gen/response_length`"),
    MetricPattern("loss", "loss", "", "the loss of the trained model; for policy gradients that of the actor"),
    MetricPattern("eval/accuracy", "held-out accuracy", "fraction", "accuracy of the evaluation on held-out rows"),
    MetricPattern("eval/reward", "held-out reward", "", "mean reward of responses to held-out prompts"),
    MetricPattern("eval/failed", "failed rewards on held-out rows", "fraction",
                  "fraction of responses to held-out prompts without a reward"),
    MetricPattern("eval/loss", "held-out loss", "", "loss on held-out rows"),
    MetricPattern("eval/response_length", "held-out response length", "tokens",
                  "mean length of responses to held-out prompts"),
    MetricPattern("eval/truncated", "truncated held-out responses", "fraction",
                  "fraction of responses to held-out prompts without a stop token"),
    MetricPattern("eval/prompts", "held-out prompts", "prompts", "number of held-out rows"),
)  # fmt: skip
GENERATION = (
    MetricPattern("{call}/response_length", "response length", "tokens",
                  "mean number of tokens of a response, with the stop token", "actor_gen/response_length"),
    MetricPattern("{call}/prompt_length", "prompt length", "tokens", "mean number of tokens of a prompt",
                  "actor_gen/prompt_length"),
    MetricPattern("{call}/truncated", "truncated responses", "fraction", "fraction of responses without a stop token",
                  "actor_gen/truncated"),
    MetricPattern("{call}/turns", "turns", "turns", "mean number of replies of the model per episode",
                  "actor_gen/turns"),
    MetricPattern("{call}/sampled_tokens", "sampled tokens", "tokens",
                  "tokens of episodes that the model has sampled in this step, per prompt of the batch",
                  "actor_gen/sampled_tokens"),
    MetricPattern("{call}/retried", "episodes played again", "episodes", "mean number of retries per episode",
                  "actor_gen/retried"),
    MetricPattern("{call}/rows", "rows per episode", "rows", "mean number of conversations of an agent per episode",
                  "actor_gen/rows"),
    MetricPattern("{call}/carried", "unfinished prompts", "prompts",
                  "prompts whose episodes go on in the next step, per prompt of the batch (`env.partial_tokens`)",
                  "actor_gen/carried"),
    MetricPattern("{call}/token_age", "age of tokens", "steps",
                  "mean number of steps since the weights that have sampled a token (`env.partial_tokens`)",
                  "actor_gen/token_age"),
    MetricPattern("{call}/drifted", "drifted tokens", "fraction",
                  "fraction of sampled tokens that are trained in another context than they were sampled in",
                  "actor_gen/drifted"),
    MetricPattern("{call}/episode_length", "episode length", "tokens",
                  "mean number of tokens of an episode, with those of the environment", "actor_gen/episode_length"),
    MetricPattern("{call}/env_step_s", "environment step", "s", "mean time of a call of an environment",
                  "actor_gen/env_step_s"),
    MetricPattern("{call}/env_step_p99_s", "environment step, 99th percentile", "s",
                  "99th percentile of the time of a call of an environment, mean over workers",
                  "actor_gen/env_step_p99_s"),
    MetricPattern("{call}/info_{fn}", "{fn}", "", "mean over episodes of the number `Turn.info` of the last turn",
                  "actor_gen/info_right"),
    MetricPattern("{call}/states", "states per response", "states",
                  "intermediate states per response from which VinePPO samples", "value_gen/states"),
    MetricPattern("{call}/shared_states", "shared states", "fraction",
                  "fraction of states that equal a state of another response to the prompt", "value_gen/shared_states"),
    MetricPattern("{call}/rollout_length", "rollout length", "tokens", "mean length of a response from a state",
                  "value_gen/rollout_length"),
)  # fmt: skip
REWARDS = (
    MetricPattern("{call}/reward", "reward", "",
                  "mean reward (score - `reward_output_bias`) x `reward_output_scaling`, without penalties; "
                  "in `*_train` of the rows trained on, else of all responses with a reward", "rew_inf/reward"),
    MetricPattern("{call}/reward_sq", "squared reward", "", "mean of the squared rewards", "rew_inf/reward_sq"),
    MetricPattern("{call}/failed", "failed rewards", "fraction", "fraction of responses without a finite reward",
                  "rew_inf/failed"),
    MetricPattern("{call}/verifier_error", "failures of the verifier", "fraction",
                  "fraction of verdicts that are errors of the verifier or reward function", "rew_inf/verifier_error"),
    MetricPattern("{call}/verifier_timeout", "timeouts of the verifier", "fraction",
                  "fraction of verdicts that exceed `reward.timeout`", "rew_inf/verifier_timeout"),
    MetricPattern("{call}/format_ok", "format", "fraction",
                  "fraction of responses in the format of `reward.format_reward`", "rew_inf/format_ok"),
    MetricPattern("{call}/score_{fn}", "score of {fn}", "", "mean score of one of several reward functions",
                  "rew_inf/score_math"),
    MetricPattern("{call}/judge_requests", "requests to the judge", "requests",
                  "answers of the language model of `reward.judge` that the rewards needed and the run paid for, with "
                  "repetitions because of answers without a score", "rew_inf/judge_requests"),
    MetricPattern("{call}/judge_cached", "cached answers of the judge", "fraction",
                  "fraction of answers that an equal request of another prompt or run had got before, at no cost",
                  "rew_inf/judge_cached"),
    MetricPattern("{call}/judge_retries", "retries of the judge", "requests",
                  "requests sent again after errors of the network or endpoint, before `judge_requests` succeeded",
                  "rew_inf/judge_retries"),
    MetricPattern("{call}/judge_failures", "failed judgements", "judgements",
                  "questions to the judge without an answer that has a score, after all retries",
                  "rew_inf/judge_failures"),
    MetricPattern("{call}/judge_tokens_in", "input tokens of the judge", "tokens",
                  "input tokens of `judge_requests`, as the endpoint reports them", "rew_inf/judge_tokens_in"),
    MetricPattern("{call}/judge_tokens_out", "output tokens of the judge", "tokens",
                  "output tokens of `judge_requests`, as the endpoint reports them", "rew_inf/judge_tokens_out"),
    MetricPattern("{call}/judge_usd", "cost of the judge", "USD",
                  "cost of `judge_requests` at `reward.judge.price_in` and `price_out`; the sum over steps is that of "
                  "the run", "rew_inf/judge_usd"),
    MetricPattern("{call}/verdict_{reason}", "verdict {reason}", "fraction",
                  "fraction of programs that end in this way", "rew_inf/verdict_ok"),
    MetricPattern("{call}/variance", "variance of the ensemble", "", "mean variance of the scores of the members",
                  "rew_inf/variance"),
    MetricPattern("{call}/lowest_{member}", "lowest by member {member}", "fraction",
                  "fraction of responses that this member scores lowest", "rew_inf/lowest_0"),
    MetricPattern("{call}/accuracy", "accuracy", "fraction",
                  "fraction of correct responses (verifier), or of pairs, labels or steps classified correctly "
                  "(`rw`, `dpo`)", "rew_inf/accuracy"),
)  # fmt: skip
POLICY_GRADIENT = (
    MetricPattern("{call}/actor_loss", "policy loss", "", "mean policy loss per token, without the KL penalty",
                  "actor_train/actor_loss"),
    MetricPattern("{call}/importance_ratio", "importance ratio", "",
                  "mean ratio of new to old probability of a token", "actor_train/importance_ratio"),
    MetricPattern("{call}/clip_fraction", "clipped tokens", "fraction",
                  "fraction of tokens whose policy loss has no gradient because of clipping",
                  "actor_train/clip_fraction"),
    MetricPattern("{call}/approx_kl", "KL of the update", "nats",
                  "estimate r - 1 - log r of KL(old, new policy) per token", "actor_train/approx_kl"),
    MetricPattern("{call}/logprob_diff", "trainer-generator difference", "nats",
                  "mean absolute difference of the log-probabilities of trainer and generator, before the first update",
                  "actor_train/logprob_diff"),
    MetricPattern("{call}/is_weight", "importance weight", "",
                  "mean importance weight of a token (`ppo.recompute_logprobs`, `ppo.importance`)",
                  "actor_train/is_weight"),
    MetricPattern("{call}/is_rejected", "tokens without training", "",
                  "fraction of sampled tokens that are not trained: rejected by `ppo.importance`, or of truncated "
                  "responses (`ppo.mask_too_long`)", "actor_train/is_rejected"),
    MetricPattern("{call}/kl", "KL to the reference", "nats",
                  "policy gradients: KL(policy, reference) per token; `dpo`: mean log-probability of a response "
                  "minus that of the reference", "actor_train/kl"),
    MetricPattern("{call}/kl_per_response", "KL per response", "nats", "KL(policy, reference) summed over a response",
                  "actor_train/kl_per_response"),
    MetricPattern("{call}/kl_{estimator}", "KL to the reference by {estimator}", "nats",
                  "the estimator of `ppo.kl_monitor`, per token", "actor_train/kl_k3"),
    MetricPattern("{call}/kl_{estimator}_per_response", "KL per response by {estimator}", "nats",
                  "the estimator of `ppo.kl_monitor`, summed over a response", "actor_train/kl_k3_per_response"),
    MetricPattern("{call}/kl_coef", "KL coefficient", "", "coefficient of the KL penalty in this step",
                  "actor_train/kl_coef"),
    MetricPattern("{call}/kl_loss", "KL penalty", "nats",
                  "mean KL penalty per token before its coefficient (`kl_in=loss`)", "actor_train/kl_loss"),
    MetricPattern("{call}/entropy", "entropy", "nats",
                  "mean entropy of the policy at a sampled token: exact with `ppo.entropy_coef` or `forward_kl`, else "
                  "estimated by the mean of -log p of the sampled tokens", "actor_train/entropy"),
    MetricPattern("{call}/teacher_kl", "KL to the teacher", "nats",
                  "estimate of KL(policy, teacher) per sampled token, before the update", "actor_train/teacher_kl"),
    MetricPattern("{call}/distill_loss", "distillation loss", "nats",
                  "mean distillation loss per token before its coefficient (`ppo.distill`)",
                  "actor_train/distill_loss"),
    MetricPattern("{call}/advantage", "advantage", "", "mean advantage of a token before normalisation",
                  "actor_train/advantage"),
    MetricPattern("{call}/advantage_sq", "squared advantage", "",
                  "mean squared advantage of a token before normalisation", "actor_train/advantage_sq"),
    MetricPattern("{call}/return", "return", "", "mean return of a token", "actor_train/return"),
    MetricPattern("{call}/critic_loss", "value loss", "", "mean value loss per state", "critic_train/critic_loss"),
    MetricPattern("{call}/value_clip_fraction", "clipped values", "fraction",
                  "fraction of states whose value loss has no gradient because of clipping",
                  "critic_train/value_clip_fraction"),
    MetricPattern("{call}/value", "value", "", "mean predicted value of a state", "critic_train/value"),
)  # fmt: skip
SUPERVISED = (
    MetricPattern("{call}/loss", "loss", "",
                  "`sft`: per token (`seq_mean`: per response); `rw`: per prompt or label; `dpo`: per pair "
                  "(`kto`: per response)", "sft_train/loss"),
    MetricPattern("{call}/nll", "negative log-likelihood", "nats", "per token of the responses", "sft_train/nll"),
    MetricPattern("{call}/n_tokens", "tokens per response", "tokens", "mean number of response tokens of a row",
                  "sft_train/n_tokens"),
    MetricPattern("{call}/margin", "margin", "", "mean difference of the scores or implicit rewards of a pair",
                  "rw_train/margin"),
    MetricPattern("{call}/chosen_score", "score of chosen responses", "", "mean score of the better responses",
                  "rw_train/chosen_score"),
    MetricPattern("{call}/rejected_score", "score of rejected responses", "", "mean score of the worse responses",
                  "rw_train/rejected_score"),
    MetricPattern("{call}/right_score", "score of right labels", "probability",
                  "mean probability where the label is above 1/2", "rw_train/right_score"),
    MetricPattern("{call}/wrong_score", "score of wrong labels", "probability",
                  "mean probability where the label is below 1/2", "rw_train/wrong_score"),
    MetricPattern("{call}/score", "score", "", "mean score of held-out responses or steps", "rw_eval/score"),
    MetricPattern("{call}/score_sq", "squared score", "", "mean squared score of held-out responses or steps",
                  "rw_eval/score_sq"),
    MetricPattern("{call}/chosen_reward", "implicit reward of chosen responses", "",
                  "mean implicit reward of the better responses (`dpo`)", "actor_train/chosen_reward"),
    MetricPattern("{call}/rejected_reward", "implicit reward of rejected responses", "",
                  "mean implicit reward of the worse responses (`dpo`)", "actor_train/rejected_reward"),
    MetricPattern("{call}/kl_reference", "reference point of KTO", "nats",
                  "mean log-ratio of mismatched responses, at least 0", "actor_train/kl_reference"),
)  # fmt: skip
OPTIMIZER = (
    MetricPattern("{call}/grad_norm", "gradient norm", "", "global norm of the gradient before clipping",
                  "actor_train/grad_norm"),
    MetricPattern("{call}/lr", "learning rate", "", "learning rate of the step", "actor_train/lr"),
    MetricPattern("{call}/step_skipped", "skipped updates", "fraction",
                  "fraction of updates that early stopping skips", "actor_train/step_skipped"),
    MetricPattern("{call}/router_balance_loss", "balance loss of the router", "",
                  "load-balancing loss of routed experts per token, before its coefficient",
                  "actor_train/router_balance_loss"),
    MetricPattern("{call}/router_z_loss", "z-loss of the router", "",
                  "squared log-partition of the router per token, before its coefficient",
                  "actor_train/router_z_loss"),
    MetricPattern("{call}/router_max_load", "largest load of an expert", "",
                  "tokens of the expert with most of them over the mean, 1 if balanced; mean of routed layers",
                  "actor_train/router_max_load"),
    MetricPattern("{call}/router_max_rank_load", "largest load of a rank", "",
                  "with expert parallelism, tokens of the rank with most of them over the mean; mean of routed layers",
                  "actor_train/router_max_rank_load"),
)  # fmt: skip
SECTIONS = {
    "Every step": STEP,
    "Summary": SUMMARY,
    "Generating calls": GENERATION,
    "Rewards": REWARDS,
    "Policy gradients": POLICY_GRADIENT,
    "Supervised and preference training": SUPERVISED,
    "Optimizer": OPTIMIZER,
}
"""All patterns, by the sections of the reference."""


@lru_cache(maxsize=4096)
def describe(key: str) -> MetricInfo | None:
    """Return the description of a key, or None if the package does not report it."""
    found = (pattern.match(key) for patterns in SECTIONS.values() for pattern in patterns)
    return next((info for info in found if info), None)
