"""Options of verifiers and reward functions."""

from dataclasses import dataclass

from realhf.api.config.option import opt


@dataclass
class RewardConfig:
    """Where rewards come from when no reward model is used."""

    fn: str = opt("math", "math, code, my_file.py:function (def or async def), format:REGEX, or http://host:port/path")
    fns: list[str] = opt(list, "several of them instead of fn; the reward is their weighted sum")
    weights: list[float] = opt(list, "one number for each of fns (default: 1)")
    timeout: float = opt(10.0, "seconds for one answer; then the judge is killed and the answer counted as failed")
    processes: int = opt(1, "judge processes per worker; for a service, requests at a time")
    max_concurrency: int = opt(16, "answers at a time in one judge process, where the function is async def")
    right_reward: float = opt(1.0, "score of a right answer (math, code)")
    wrong_reward: float = opt(-1.0, "score of a wrong answer (math, code), and of one whose judge failed")
    format_reward: str = opt("", "regular expression that all of an answer must match to be well formed (math, code)")
    wrong_formatted_reward: float = opt(-0.8, "with format_reward: score of a wrong answer that is well formed")
    right_unformatted_reward: float | None = opt(
        None, "with format_reward: score of a right answer that is not well formed (default: right_reward)"
    )
    retries: int = opt(3, "further tries of a request to a service that fails")
    token_env: str = opt("", "environment variable with the bearer token of a service")
    check_verifier_status: bool = opt(False, "stop the run when every answer of a step is judged wrong")
