"""The language model as judge against a real local endpoint: faults, hostile replies, cache and budget."""

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.batch_meta import RowId
from realhf.api.config import LLMJudgeConfig, RewardConfig
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.rewards.group.scorer import GroupScorer
from realhf.rewards.llm_judge import chat_client
from realhf.rewards.llm_judge.judge import LLMJudge
from realhf.rewards.verdict import ResponseGroup, Status, Verdict
from tests.rewards.llm_judge.endpoint import Endpoint, Faults, served

PRICES = {"price_in": 2.0, "price_out": 8.0}
GROUPS = [ResponseGroup(f"prompt {i}", tuple(f"{i} {'1' * j}" for j in range(4)), {}, i, 3) for i in range(12)]
BAD_REPLIES = {  # status and body, and the failure
    "<html>502</html>": (200, "<html>sign in</html>", "the reply is not a chat completion: '<html>sign in</html>'"),
    "no object": (200, "[]", "the reply is not a chat completion"),
    "no choices": (200, '{"choices": []}', "the reply is not a chat completion"),
    "no text": (200, '{"choices": [{"message": {"content": null}}]}', "the reply is not a chat completion"),
    "nested": (200, "[" * 100_000, "the reply is not a chat completion"),
    "huge": (200, "x" * (chat_client.MAX_REPLY_BYTES + 1), "the reply is longer than 4194304 bytes"),
    "no usage": (200, '{"choices": [{"message": {"content": "Score: 5"}}]}', "the reply has no valid 'usage'"),
    "negative": (200, '{"choices": [{"message": {"content": "Score: 5"}}], "usage": {"prompt_tokens": -5, '
                      '"completion_tokens": 1}}', "the reply has no valid 'usage'"),
    "many": (200, '{"choices": [{"message": {"content": "Score: 5"}}], "usage": {"prompt_tokens": 1e30, '
                  '"completion_tokens": 1}}', "the reply has no valid 'usage'"),
    "refused": (400, '{"error": "context too long"}', 'HTTP status 400: {"error": "context too long"}'),
    "moved": (302, "", "HTTP status 302"),
    "down": (503, "overloaded", "HTTP status 503: overloaded"),
}  # fmt: skip


def judge_at(endpoint: Endpoint, folder: Path, preset: str = "rubric", **options: object) -> LLMJudge:
    config = LLMJudgeConfig(base_url=endpoint.url, model="m", **PRICES)  # type: ignore[arg-type]
    return LLMJudge(preset, replace(config, **options), folder)  # type: ignore[arg-type]


def cost(endpoint: Endpoint) -> float:
    return (endpoint.tokens_in * PRICES["price_in"] + endpoint.tokens_out * PRICES["price_out"]) / 1e6


@pytest.mark.parametrize("preset", ["rubric", "pairwise"])
def test_faults_do_not_change_scores(preset: str, tmp_path: Path) -> None:
    """Slow, 5 % of connections reset, 2 % nonsense, 3 % busy, 2 % errors: the same scores, and every token counted."""
    with served(Endpoint()) as good:
        expected = judge_at(good, tmp_path / "good", preset).judge_groups(GROUPS)
    faults = Faults(dropped=0.05, nonsense=0.02, busy=0.03, broken=0.02, seconds=0.01, seed=1)
    with served(Endpoint(faults=faults)) as endpoint:
        judge = judge_at(endpoint, tmp_path / "bad", preset, timeout=20.0)
        assert judge.judge_groups(GROUPS) == expected
        n, usage = len(endpoint.bodies), judge.usage
        assert usage.retries == sum(endpoint.counts.get(name, 0) for name in ("dropped", "busy", "broken")) > 0
        assert usage.requests == endpoint.counts["answered"] + endpoint.counts.get("nonsense", 0)
        assert usage.usd == pytest.approx(cost(endpoint)) == judge.spending.total() and usage.failures == 0
        again = judge_at(endpoint, tmp_path / "bad", preset)
        assert again.judge_groups(GROUPS) == expected and len(endpoint.bodies) == n  # no request
        assert again.usage == usage and again.spending.total() == pytest.approx(cost(endpoint))


def test_requests_are_concurrent_up_to_a_limit(tmp_path: Path) -> None:
    with served(Endpoint(faults=Faults(seconds=0.05))) as endpoint:
        judge_at(endpoint, tmp_path, max_concurrency=6).judge_groups(GROUPS)
        assert endpoint.most_at_once == 6


def test_a_request_has_the_model_the_parameters_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with served(Endpoint()) as endpoint:
        judge = judge_at(endpoint, tmp_path, api_key_env="MY_KEY", max_tokens=None, temperature=0.5)
        judge.judge_groups(GROUPS[:1])
        assert endpoint.headers[0]["Authorization"] == "Bearer sk-secret"
        assert {k: v for k, v in endpoint.bodies[0].items() if k != "messages"} == {
            "model": "m", "seed": 0, "temperature": 0.5}  # fmt: skip
        endpoint.answer = lambda text: (401, "Incorrect API key provided: sk-secret")
        (verdict, *_), *_ = judge.judge_groups([replace(GROUPS[0], prompt="other")])
        assert "HTTP status 401: Incorrect API key provided: ***" in verdict.detail
        endpoint.answer = lambda text: (200, "<html>sk-secret</html>")
        judge.config.retries = 0
        (verdict, *_), *_ = judge.judge_groups([replace(GROUPS[0], prompt="another")])
        assert "not a chat completion: '<html>***</html>'" in verdict.detail


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_replies_without_a_score_are_failures(name: str, tmp_path: Path) -> None:
    status, body, message = BAD_REPLIES[name]
    with served(Endpoint(answer=lambda text: (status, body))) as endpoint:
        judge = judge_at(endpoint, tmp_path, retries=0)
        ((verdict,),) = judge.judge_groups([ResponseGroup("q", ("a",), {})])
    assert verdict.status is Status.error and message in verdict.detail
    assert judge.usage.failures == 1 and judge.usage.usd == 0.0 and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("answer", ["Score: 1e999", '{"score": NaN}', "", "Score: 11"])
def test_an_answer_without_a_score_is_asked_for_again_and_paid(answer: str, tmp_path: Path) -> None:
    with served(Endpoint(answer=lambda text: answer)) as endpoint:
        judge = judge_at(endpoint, tmp_path, retries=2)
        for _ in range(2):  # the second time from the cache
            ((verdict,),) = judge.judge_groups([ResponseGroup("q", ("a",), {})])
            assert verdict.detail == f"no score in 3 answers; the last ends with {answer!r}"
            assert (judge.usage.requests, judge.usage.failures) == (3, 1)
            assert len(endpoint.bodies) == 3 and judge.usage.usd == pytest.approx(cost(endpoint))
        texts = [body["messages"][0]["content"] for body in endpoint.bodies]
        assert texts[1].startswith(texts[0]) and "(Attempt 2: an earlier answer had no score" in texts[1]
        assert [body["seed"] for body in endpoint.bodies] == [0, 1, 2]


def test_an_endpoint_that_does_not_reply_or_exist(tmp_path: Path) -> None:
    with served(Endpoint(faults=Faults(seconds=1.0))) as endpoint:
        judge = judge_at(endpoint, tmp_path, retries=1, timeout=0.1)
        ((verdict,),) = judge.judge_groups([ResponseGroup("q", ("a",), {})])
        url = f"{endpoint.url}/chat/completions"
        assert verdict.detail.endswith(f": no reply from {url} within 0.1 s (reward.judge.timeout)")
        assert verdict.detail.startswith("no reply after 1 attempt (reward.judge.retries=1); the next is due in 1 s")
    judge = judge_at(endpoint, tmp_path, retries=0)
    ((verdict,),) = judge.judge_groups([ResponseGroup("q", ("a",), {})])
    assert "ConnectionRefusedError" in verdict.detail or "Connection refused" in verdict.detail


def test_requests_stop_when_many_have_failed(tmp_path: Path) -> None:
    many = [replace(group, prompt=f"{n} {group.prompt}") for n in range(4) for group in GROUPS]
    with served(Endpoint(answer=lambda text: (404, "no such model"))) as endpoint:
        verdicts = judge_at(endpoint, tmp_path, max_concurrency=2).judge_groups(many)
        assert 16 <= len(endpoint.bodies) <= 18
    assert any("not sent: " in verdict.detail for group in verdicts for verdict in group)


@pytest.mark.parametrize("header", ["30", "1e99", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_the_pause_that_the_endpoint_asks_for(header: str) -> None:
    assert chat_client.retry_after(header) >= 30.0


@pytest.mark.parametrize("header", ["", "-3", "nan", "inf", "soon", "Wed, 21 Oct 1999 07:28:00 GMT", "1" * 999])
def test_invalid_pauses_are_ignored(header: str) -> None:
    assert chat_client.retry_after(header) == 0.0


def test_the_budget_is_that_of_the_whole_run(tmp_path: Path) -> None:
    with served(Endpoint()) as endpoint:
        judge_at(endpoint, tmp_path).judge_groups(GROUPS[:6])
        spent, n = cost(endpoint), len(endpoint.bodies)
        enough = judge_at(endpoint, tmp_path, budget=spent * 1.5, max_concurrency=1)
        assert enough.judge_groups(GROUPS[:6]) and len(endpoint.bodies) == n
        message = re.escape(f"the limit is reward.judge.budget={spent * 1.5:g}; to go further, resume the run with a")
        with pytest.raises(UserError, match=message):
            enough.judge_groups(GROUPS)
        assert spent * 1.499 <= cost(endpoint) <= spent * 1.6 and n < len(endpoint.bodies)
        assert judge_at(endpoint, tmp_path).spending.total() == pytest.approx(cost(endpoint))
        more = judge_at(endpoint, tmp_path, budget=spent * 3).judge_groups(GROUPS)
        assert {verdict.status for group in more for verdict in group} == {Status.ok}
        assert len(endpoint.bodies) == 48  # no answer was paid twice


def test_two_runs_share_a_cache_and_each_has_its_own_cost(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with served(Endpoint()) as endpoint:
        first = judge_at(endpoint, tmp_path / "one", cache=str(cache))
        second = judge_at(endpoint, tmp_path / "two", cache=str(cache))
        assert first.judge_groups(GROUPS[:6]) == second.judge_groups(GROUPS[:6])
        assert (second.usage.cached, second.usage.requests, second.usage.usd) == (24, 0, 0.0)
        assert second.spending.total() == 0.0
        second.judge_groups(GROUPS)
        assert second.usage.requests == 24 and second.spending.total() == pytest.approx(second.usage.usd)
        assert len(endpoint.bodies) == 48


@pytest.mark.parametrize("damage", [b"", b'{"key": "', b"[]", b'{"key": 1}', b"\xff\xfe", b"[" * 100_000, None])
def test_damaged_files_of_the_cache_are_asked_again(damage: bytes | None, tmp_path: Path) -> None:
    group = ResponseGroup("q", ("a 1",), {})
    with served(Endpoint()) as endpoint:
        judge = judge_at(endpoint, tmp_path)
        expected = judge.judge_groups([group])
        (file,) = tmp_path.rglob("*.json")
        stored = json.loads(file.read_bytes())
        stored["reply"]["tokens_in"] = "many"
        file.write_bytes(json.dumps(stored).encode() if damage is None else damage)
        assert judge.judge_groups([group]) == expected and len(endpoint.bodies) == 2
        assert judge.judge_groups([group]) == expected and len(endpoint.bodies) == 2
        (spent,) = tmp_path.glob("spent_*.jsonl")
        spent.write_bytes(spent.read_bytes()[:-4])  # a killed process leaves an incomplete line
        assert judge_at(endpoint, tmp_path).spending.total() == pytest.approx(cost(endpoint) / 2)


def test_equal_requests_of_a_call_are_sent_once(tmp_path: Path) -> None:
    with served(Endpoint(faults=Faults(seconds=0.02))) as endpoint:
        judge = judge_at(endpoint, tmp_path)
        groups = [ResponseGroup("q", ("a", "a", "b"), {}, i) for i in range(3)]
        first, *others = judge.judge_groups(groups)
        assert others == [first, first] and len(endpoint.bodies) == 2
        assert (judge.usage.requests, judge.usage.cached) == (2, 7)


def test_an_invalid_rubric_fails_the_responses_of_its_row_only(tmp_path: Path) -> None:
    with served(Endpoint()) as endpoint:
        bad, good = judge_at(endpoint, tmp_path).judge_groups([replace(GROUPS[0], row={"rubric": 3}), GROUPS[1]])
    assert {(v.status, v.detail) for v in bad} == {
        (Status.error, "row['rubric'] is 3, it must be a text or a list of texts")
    }
    assert {v.status for v in good} == {Status.ok}


def test_unicode_and_unpaired_surrogates(tmp_path: Path) -> None:
    group = ResponseGroup("\ud800 \u00e9", ("\U0001f600 1", "\udc00"), {})
    with served(Endpoint(answer=lambda text: "\U0001f600 \ud800\nScore: 5")) as endpoint:
        assert judge_at(endpoint, tmp_path).judge_groups([group]) == [[Verdict(0.5, Status.ok)] * 2]
        assert judge_at(endpoint, tmp_path).judge_groups([group]) == [[Verdict(0.5, Status.ok)] * 2]
        assert len(endpoint.bodies) == 2


def test_a_judge_that_prefers_the_first_position_prefers_no_sample(tmp_path: Path) -> None:
    ids = [RowId(prompt, sample) for prompt in range(40) for sample in range(4)]
    items = [(f"q{row.prompt}", f"{row.prompt} {row.sample}", {}) for row in ids]
    with served(Endpoint(answer=lambda text: "Winner: A")) as endpoint:
        for both, tolerance in ((False, 0.15), (True, 1e-9)):
            judge = judge_at(endpoint, tmp_path, both_orders=both).config
            reward = RewardConfig(group_fn="pairwise", judge=judge)
            verdicts, _ = GroupScorer(reward, 1, RunDir(tmp_path)).score(ids, items)
            means = [sum(verdicts[i].score for i in range(s, 160, 4)) / 40 for s in range(4)]
            assert means == pytest.approx([0.5] * 4, abs=tolerance)
            if not both:
                first = ResponseGroup("q", ("a", "b", "c", "d"), {}, 0, 1)
                shares = [verdict.score for verdict in LLMJudge("pairwise", judge, tmp_path).judge_groups([first])[0]]
                assert sorted(shares) != [0.5] * 4  # a single prompt has the preference


def test_a_cache_that_cannot_be_written_stops_the_run_and_keeps_the_cost(tmp_path: Path) -> None:
    (tmp_path / "replies").write_text("a file instead of the folder")
    with served(Endpoint()) as endpoint:
        judge = judge_at(endpoint, tmp_path)
        with pytest.raises(OSError, match="replies"):
            judge.judge_groups(GROUPS[:1])
        assert 0 < judge.spending.total() == pytest.approx(cost(endpoint))


def judge_in_process(port: int, folder: str) -> list[list[float]]:
    judge = judge_at(Endpoint(port=port), Path(folder))
    return [[verdict.score for verdict in group] for group in judge.judge_groups(GROUPS * 3)]


def test_two_processes_use_one_folder_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with served(Endpoint()) as endpoint, context.Pool(2) as pool:
        found = pool.starmap(judge_in_process, [(endpoint.port, str(tmp_path))] * 2)
        assert found[0] == found[1] and 48 <= len(endpoint.bodies) <= 96
        n, judge = len(endpoint.bodies), judge_at(endpoint, tmp_path)
        scores = [[verdict.score for verdict in group] for group in judge.judge_groups(GROUPS * 3)]
        assert scores == found[0] and len(endpoint.bodies) == n
        assert judge.spending.total() == pytest.approx(cost(endpoint)) and not list(tmp_path.rglob("*.unfinished"))
