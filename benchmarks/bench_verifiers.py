"""Rollouts of realhf's command line in an environment of verifiers against verifiers' own with vLLM's server, on CPU.

    make vllm; python benchmarks/bench_verifiers.py --vllm PYTHON --trl PYTHON [--rounds N] [--seconds 0,0.01]

16 tasks with 8 episodes each, of 4 replies of 12 tokens; the environment waits for ``--seconds`` before each message,
and counts the replies that are right. The model is that of bench_turns.py: both sample the same replies. verifiers 0.4
runs all episodes at once in one process, with a harness that starts no program, by chat completions without
log-probabilities, which realhf computes. Seconds are those of the rollout, medians over steps without the first; both
run in turns. The model has one thread.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_turns import (
    CALL,
    N_PROMPTS,
    N_RESPONSES,
    N_TURNS,
    REPOSITORY,
    WORDS,
    make_model,
    make_tokenizer,
    template_of,
)

STEPS, MAX_TOKENS, START_S = 3, 100, 300
GAME = """
import asyncio
import functools
import sys
import uuid

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["GameEnv", "GameHarness", "GameTaskset"]
RIGHT, N_TASKS, N_TURNS = {constants!r}


class GameTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for number in range(N_TASKS):
            yield vf.Task(vf.TaskData(prompt=f"play {{number}}"), self.config.task)


class GameConfig(vf.EnvConfig):
    seconds: float = 0.0
    player: vf.AgentConfig = vf.AgentConfig()


class GameEnv(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            n_right = int(segment.last_reply == RIGHT)
            for _ in range(N_TURNS - 1):
                await asyncio.sleep(self.config.seconds)
                segment = await interaction.turn("ok")
                n_right += segment.last_reply == RIGHT
        interaction.trace.record_reward("right", float(n_right))


@functools.cache
def web_session():
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))


async def ask(url, body, headers):
    async with web_session().post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        await response.read()


class GameHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        prompt = data.prompt
        start = [{{"role": "user", "content": prompt}}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        body = {{"model": ctx.model, "messages": [*start]}}
        headers = {{"Authorization": f"Bearer {{secret}}", "Idempotency-Key": uuid.uuid4().hex}}
        for attempt in range(5):  # OpenAI's client also tries again
            try:
                await ask(f"{{endpoint}}/chat/completions", body, headers)
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            except aiohttp.ClientError as error:
                print(f"attempt {{attempt + 1}} failed: {{error!r}}", file=sys.stderr)
                await asyncio.sleep(0.1)
        return vf.ProgramResult(exit_code=1, stdout="", stderr="5 attempts failed")
"""
SERVER = [
    "--served-model-name=policy", "--dtype=float32", "--max-model-len=1024",
    f"--max-num-seqs={N_PROMPTS * N_RESPONSES}", "--disable-uvicorn-access-log",
]  # fmt: skip
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def ours(folder: Path, seconds: float) -> float:
    """Return the seconds of a rollout; all replies must be right."""
    with tempfile.TemporaryDirectory() as root:
        words = [
            f"fileroot={root}", "experiment_name=b", "trial_name=t", "device=cpu", "threads_per_worker=1",
            f"actor.path={folder}/model", f"dataset.path={folder}/rows.jsonl", f"dataset.train_bs_n_seqs={N_PROMPTS}",
            f"ppo.group_size={N_RESPONSES}", "ppo.kl_in=none", "actor.optimizer.lr=0",
            "env.cls=realhf.environments.adapters.verifiers_env:VerifiersEnv", "env.options.id=game",
            f"env.options.config={{seconds: {seconds}}}", f"env.max_turns={N_TURNS}", "env.tool_format=mistral",
            f"ppo.gen.max_new_tokens={MAX_TOKENS}", "env.max_episode_len=800", "ppo.gen.max_num_seqs=128",
            "env.max_concurrency=128", "env.workers=1", "env.timeout=600",
            f"exp_ctrl.total_train_steps={STEPS}", "exp_ctrl.total_train_epochs=100", "tensorboard.enabled=False",
        ]  # fmt: skip
        command = [sys.executable, "-m", "realhf", "quickstart", "grpo", *words]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=900, env=environment)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        lines = [json.loads(line) for line in (Path(root) / "b" / "t" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["env/turns"] == line["reward/mean"] == N_TURNS for line in lines), lines[-1]
    return statistics.median(line["time/actor_gen_s"] for line in lines[1:])


def theirs(folder: Path, seconds: float, url: str) -> float:
    """Return the seconds of a rollout; all replies must be right."""
    command = [sys.executable, __file__, "--play", json.dumps([seconds, url])]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replies"] == found["right"] == [N_TURNS], found
    return statistics.median(found["seconds"][1:])


async def play(seconds: float, url: str) -> dict[str, Any]:
    """Return the seconds of each rollout of verifiers, and the episodes' numbers of replies and of right ones."""
    import verifiers.v1 as vf

    player = {"runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "game"}, "seconds": seconds, "player": player}))
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS)
    context = vf.ModelContext(model="policy", client=client, sampling=sampling)
    timings, replies, right = list[float](), set[float](), set[float]()
    async with env.serving():
        for _ in range(STEPS):
            slots = [slot for task in env.taskset for slot in env.slots(task, N_RESPONSES)]
            began = time.perf_counter()
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
            timings.append(time.perf_counter() - began)
            traces = [trace for episode in episodes for trace in episode.traces]
            if bad := [error for one in (*traces, *episodes) for error in one.errors]:
                raise SystemExit(f"{len(bad)} errors of verifiers, such as: {bad[0]}")
            replies |= {float(trace.num_turns) for trace in traces}
            right |= {trace.reward for trace in traces}
    return {"seconds": timings, "replies": sorted(replies), "right": sorted(right)}


@contextmanager
def vllm_server(python: str, folder: Path, options: list[str]) -> Iterator[str]:
    """Run vLLM's server and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}/model", f"--port={port}"]
    more = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with log.open("w") as stream:
        outputs: dict[str, Any] = {"stdout": stream, "stderr": stream, "start_new_session": True, "cwd": folder}
        environment = {**os.environ, **ONE_THREAD, **more}
        server = subprocess.Popen([*command, *SERVER, *options], env=environment, **outputs)
    try:
        deadline = time.monotonic() + START_S
        while not is_up(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM's server did not start: {log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def write_inputs(size: str, trl: str, folder: Path) -> None:
    """Save the model, its tokenizer, the rows and the module of the environment."""
    make_model(size, make_tokenizer(template_of(trl), folder / "model"), folder / "model")
    (folder / "game.py").write_text(GAME.format(constants=("".join(WORDS) + CALL, N_PROMPTS, N_TURNS)))
    rows = [{"prompt": f"play {k}", "index": k} for k in range(N_PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    if sys.argv[1:2] == ["--play"]:
        print(json.dumps(asyncio.run(play(*json.loads(sys.argv[2])))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=str(REPOSITORY / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--trl", default=str(REPOSITORY / ".venv-peer" / "bin" / "python"), help="for its template")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--seconds", default="0,0.01")
    parser.add_argument("--compile", action="store_true", help="vLLM compiles the model (default: eager)")
    args = parser.parse_args()
    for size in args.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_inputs(size, args.trl, folder)
            with vllm_server(args.vllm, folder, [] if args.compile else ["--enforce-eager"]) as url:
                theirs(folder, 0.0, url)  # warm-up
                for seconds in map(float, args.seconds.split(",")):
                    pairs = [(ours(folder, seconds), theirs(folder, seconds, url)) for _ in range(args.rounds)]
                    mine, other = (statistics.median(times) for times in zip(*pairs, strict=True))
                    case, ratio = f"{size}, environment of {seconds * 1e3:g} ms", other / mine
                    print(
                        f"{case}: realhf {mine:.2f} s, verifiers with vLLM {other:.2f} s, ratio {ratio:.1f}", flush=True
                    )


if __name__ == "__main__":
    main()
