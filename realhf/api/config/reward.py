"""Options of verifiers and reward functions."""

from dataclasses import dataclass

from realhf.api.config.option import (
    COUNT,
    FILE,
    FINITE,
    FOLDER,
    FRACTION,
    NATURAL,
    NON_NEGATIVE,
    POSITIVE,
    SECONDS,
    Range,
    opt,
)


@dataclass
class LLMJudgeConfig:
    """A language model as judge, behind an endpoint with the chat completions of OpenAI's API."""

    base_url: str = opt("", "address of the endpoint, such as http://host:8000/v1")
    model: str = opt("", "name of the model at the endpoint")
    api_key_env: str = opt("", "environment variable with the API key")
    prompt: str = opt("", "file (.txt or .md) with the text of a request (default: a text for each preset)", FILE)
    rubric: str = opt("", "criteria of the scores; a row of the data with a key 'rubric' has its own")
    min_score: float = opt(0.0, "lowest score that the judge may give (rubric)", FINITE)
    max_score: float = opt(10.0, "highest score that the judge may give (rubric); scores are scaled to [0, 1]", FINITE)
    comparisons: int = opt(0, "comparisons of each response with others, 0 for all of the prompt (pairwise)", NATURAL)
    both_orders: bool = opt(False, "ask about each pair in both orders instead of a random one (pairwise)")
    temperature: float | None = opt(0.0, "sampling temperature (null: the endpoint's default)", NON_NEGATIVE)
    max_tokens: int | None = opt(1024, "maximum number of tokens of an answer (null: the endpoint's default)", COUNT)
    max_concurrency: int = opt(16, "concurrent requests per worker", Range(1, 4096))
    retries: int = opt(
        5, "retries of a failed request, and repetitions of one whose answer has no score", Range(0, 100)
    )
    timeout: float = opt(60.0, "timeout of one attempt of a request in seconds", SECONDS)
    cache: str = opt("", "existing folder with answers, which runs may share (default: in the run directory)", FOLDER)
    price_in: float = opt(0.0, "price of a million input tokens in USD", NON_NEGATIVE)
    price_out: float = opt(0.0, "price of a million output tokens in USD", NON_NEGATIVE)
    budget: float | None = opt(None, "stop the run when its requests have cost so many USD (default: no limit)",
                               POSITIVE)  # fmt: skip


@dataclass
class RewardConfig:
    fn: str = opt("math", "math, code, none, my_file.py:function, format:REGEX, or http://host:port/path", FILE)
    fns: list[str] = opt(list, "several rewards instead of fn, combined as a weighted sum", FILE)
    weights: list[float] = opt(list, "weights of fns (default: 1 each)", FINITE)
    group_fn: str = opt("", "reward of all responses to a prompt together: self_consistency, diversity, pairwise, "
                            "rubric, or my_file.py:function; in addition to fn", FILE)  # fmt: skip
    group_weight: float = opt(1.0, "weight of group_fn", FINITE)
    judge: LLMJudgeConfig = opt(LLMJudgeConfig, "the language model that judges (group_fn=pairwise or rubric)")
    timeout: float = opt(20.0, "timeout in seconds per response, of group_fn per prompt; then it is wrong (math, code) "
                               "or scoring fails", SECONDS)  # fmt: skip
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
