"""Options of verifiers and reward functions."""

from dataclasses import dataclass

from realhf.api.config.option import COUNT, FILE, FINITE, FRACTION, NATURAL, SECONDS, Range, opt


@dataclass
class RewardConfig:
    fn: str = opt("math", "math, code, my_file.py:function, format:REGEX, or http://host:port/path", FILE)
    fns: list[str] = opt(list, "several rewards instead of fn, combined as a weighted sum", FILE)
    weights: list[float] = opt(list, "weights of fns (default: 1 each)", FINITE)
    timeout: float = opt(
        20.0, "timeout per response in seconds; then it is wrong (math, code) or scoring fails", SECONDS
    )
    test_timeout: float = opt(6.0, "timeout per test of a program in seconds (code)", SECONDS)
    processes: int = opt(1, "judge processes per worker; for a service, concurrent requests", Range(1, 1024))
    max_concurrency: int = opt(16, "concurrent calls per judge process of an async def function", COUNT)
    right_reward: float = opt(1.0, "score of a correct response (math, code)", FINITE)
    wrong_reward: float = opt(-1.0, "score of an incorrect response (math, code)", FINITE)
    format_reward: str = opt("", "regular expression that a response must match completely (math, code)")
    wrong_formatted_reward: float = opt(-0.8, "score of an incorrect response that matches format_reward", FINITE)
    right_unformatted_reward: float | None = opt(None, "score of a correct response that does not match format_reward "
                                                       "(default: right_reward)", FINITE)  # fmt: skip
    retries: int = opt(3, "number of retries of a failed request to a service", NATURAL)
    token_env: str = opt("", "environment variable with the bearer token of a service")
    max_failures: float = opt(0.05, "stop the run when scoring fails for more than this fraction of a step's responses",
                              FRACTION)  # fmt: skip
    check_verifier_status: bool = opt(False, "stop the run when all responses of a step are judged incorrect")
