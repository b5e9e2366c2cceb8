"""Multi-turn generation by vLLM: turns are requests, whose history is in the prefix cache."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from realhf.api.config import GenerationConfig
from realhf.base.seeds import stable_seed
from realhf.data.turns import EpisodeKey, TurnDriver, TurnOutput
from realhf.models.engine.vllm_process import VllmServer


def play_turns(
    server: VllmServer, version: int, driver: TurnDriver, config: GenerationConfig, seed: int, stop_ids: Sequence[int]
) -> bytes:
    """Sample turns until the driver ends the rollout; return its result."""
    histories, counts = defaultdict[EpisodeKey, list[int]](list), Counter[EpisodeKey]()
    running, outputs = dict[str, EpisodeKey](), list[TurnOutput]()
    while True:
        request = driver.next(outputs, is_idle=not running)
        if request.done:
            break
        for key in request.closed:
            histories.pop(key, None)
        rows = []
        for turn in request.inputs:
            prompt, sample = turn.key
            if turn.key not in histories:
                counts[turn.key] = turn.count
            histories[turn.key] += turn.tokens
            sampling = sampling_options(config, turn.limit, stop_ids, turn_seed(seed, turn.key, counts[turn.key]))
            name = f"{prompt}-{sample}-{counts[turn.key]}"
            running[name] = turn.key
            rows.append({"id": name, "tokens": histories[turn.key], "sampling": sampling})
        outputs = []
        if not running:
            continue
        for turn_reply in server.call("sample_turns", version=version, rows=rows)["turns"]:
            key, tokens, logprobs = running.pop(turn_reply["id"]), turn_reply["tokens"], turn_reply["logprobs"]
            check_logprobs(key, logprobs)
            histories[key] += tokens
            counts[key] += len(tokens)
            outputs.append(TurnOutput(key, tokens, logprobs, logprobs, tokens[-1] in stop_ids))
    server.call("end_turns")
    server.end_call()
    return driver.result()


def check_logprobs(key: EpisodeKey, logprobs: Sequence[float]) -> None:
    """Raise ValueError for log-probabilities that are not finite: vLLM samples from logits that are NaN."""
    if not all(abs(one) < float("inf") for one in logprobs):
        prompt, sample = key
        raise ValueError(f"vLLM's log-probabilities of prompt {prompt}, sample {sample} are not finite; lower the "
                         "learning rate, or check the model and the temperature")  # fmt: skip


def turn_seed(seed: int, key: EpisodeKey, count: int) -> int:
    """Return the seed of a turn after ``count`` sampled tokens; that of a first turn equals that of a response."""
    return stable_seed(seed, *key, *([count] if count else [])) >> 1


def sampling_options(config: GenerationConfig, limit: int, stop_ids: Sequence[int], seed: int) -> dict[str, Any]:
    greedy = config.greedy or config.temperature == 0
    return {
        "temperature": 0.0 if greedy else config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "min_tokens": config.min_new_tokens,
        "max_tokens": limit,
        "stop_token_ids": list(stop_ids),
        "seed": seed,
    }
