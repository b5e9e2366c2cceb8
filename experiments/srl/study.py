"""Rings of environments: throughput of rollouts by the number of environment processes, measured and predicted.

    python -m experiments.srl.study [FOLDER]

Runs in FOLDER (default: srl-run; finished runs are kept), writes results.json, table.md and figure.svg here. The
machine should be idle.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, verdict_of
from experiments.sums import REALHF, ROOT, StudyOptions, metrics, run
from realhf.apps.commands.quickstart import read_words
from realhf.apps.prepare.preflight import plan_report

HERE = Path(__file__).parent
HIDDEN, LAYERS, TOKENS, TURNS, LATENCY_S, EPISODES, STEPS = 256, 4, 32, 4, 0.02, 32, 3
WORKERS, RINGS, ROUNDS = (1, 2, 3, 4), (1, 2, 4), (1, 2, 3, 4, 5)
FASTER, SCALES, CLOSE = 1.5, 3.0, 0.15
CLUSTER, PER_GPU, SIMULATED_LATENCY_S = (16, 64, 256, 1024, 4096, 16384), 16, 0.1
SIMULATED_RINGS = RINGS[0], RINGS[-1]
LINEAR = 0.8
ENVIRONMENT = f"env.cls={HERE / 'slow_env.py'}:SlowEnv"
QWEN_1_5B = {"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
             "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
             "torch_dtype": "bfloat16"}  # fmt: skip
Runs = list[dict[str, float]]


def prepare(folder: Path) -> Path:
    """Create the task and the configuration of the model, and profile this machine for it."""
    task = folder / "task"
    if not (task / "profile.json").exists():
        game = [sys.executable, ROOT / "examples" / "guess_number.py", task, "--games", "10"]
        subprocess.run(game, check=True, capture_output=True)
        file = task / "model" / "config.json"
        config = json.loads(file.read_text())
        config |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
                   "num_key_value_heads": 4, "head_dim": HIDDEN // 4, "intermediate_size": 3 * HIDDEN}  # fmt: skip
        file.write_text(json.dumps(config))
        subprocess.run([*REALHF, "profile", f"model={task / 'model'}", "n_gpus_per_node=1", "threads_per_worker=1",
                        "device=cpu", f"out={task / 'profile.json'}"], check=True, capture_output=True)  # fmt: skip
    return task


def rollout_options(n_episodes: int, latency_s: float) -> list[str]:
    """Return the options of rollouts of ``TURNS`` replies of ``TOKENS`` tokens."""
    return [ENVIRONMENT, f"env.options={{seconds: {latency_s}, turns: {TURNS}}}", f"env.max_turns={TURNS}",
            f"ppo.gen.max_new_tokens={TOKENS}", "ppo.gen.greedy=True", "ppo.group_size=8",
            f"dataset.train_bs_n_seqs={n_episodes // 8}", "ppo.kl_in=none", "actor.optimizer.lr=0",
            f"planner.env_latency={latency_s}", f"planner.env_turns={TURNS}",
            f"planner.new_tokens={TURNS * TOKENS}"]  # fmt: skip


def measure(folder: Path, task: Path, workers: int, ring: int, number: int) -> dict[str, float]:
    """Return measured and predicted seconds of a rollout with ``ring`` open episodes per environment process."""
    root = run(folder, f"{workers}-{ring}-{number}", "grpo", *rollout_options(EPISODES, LATENCY_S),
               f"actor.config={task / 'model'}", "actor.init_from_scratch=True",
               f"actor.tokenizer={task / 'tokenizer'}", f"dataset.path={task / 'train.jsonl'}",
               "exp_ctrl.total_train_epochs=100", f"exp_ctrl.total_train_steps={STEPS}", "save_roles=[]",
               f"planner.profile={task / 'profile.json'}", f"env.workers={workers}",
               f"env.max_episodes={workers * ring}")  # fmt: skip
    lines = metrics(root)[1:]
    if any(line["tokens/generated"] != EPISODES * TURNS * TOKENS for line in lines):
        raise SystemExit(f"{root}: not all replies have {TOKENS} tokens")  # greedy decoding that reaches a stop token
    found = {"seconds": median(line["time/actor_gen_s"] for line in lines),
             "predicted": lines[-1]["predicted/actor_gen_s"]}  # fmt: skip
    print(f"{workers} processes, ring {ring}: {found['seconds']:.2f} s, predicted {found['predicted']:.2f}", flush=True)
    return found


def simulate(folder: Path, ring: int, workers: int) -> float:
    """Return the predicted episodes per second of a rollout on H100s with ``PER_GPU`` environment processes each."""
    n_gpus, config = workers // PER_GPU, folder / "1.5b" / "config.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps(QWEN_1_5B))
    words = [*rollout_options(64 * n_gpus, SIMULATED_LATENCY_S), f"actor.config={config.parent}",
             "actor.init_from_scratch=True", f"n_nodes={max(1, n_gpus // 8)}", f"n_gpus_per_node={min(8, n_gpus)}",
             "device=cuda", "planner.hardware=h100", f"env.workers={PER_GPU}", f"env.max_episodes={PER_GPU * ring}",
             f"allocation_mode=d{n_gpus}"]  # fmt: skip
    report = plan_report("grpo", read_words("grpo", words)[0])
    seconds, _ = report.prediction.call_seconds["actor_gen"]
    return 64 * n_gpus / seconds


def ratios(results: Results, workers: int) -> list[float]:
    """Return, for every round, how much faster the largest ring is than none."""
    alone, ring = (results["runs"][f"{workers}/{size}"] for size in (RINGS[0], RINGS[-1]))
    return [one["seconds"] / other["seconds"] for one, other in zip(alone, ring, strict=True)]


def error_of(runs: Runs) -> float:
    """Return the relative error of the prediction against the median over rounds."""
    return fmean(one["predicted"] for one in runs) / median(one["seconds"] for one in runs) - 1


def verdict(results: Results) -> Verdict:
    gains = {n: fmean(ratios(results, n)) for n in WORKERS}
    first, last = (median(one["seconds"] for one in results["runs"][f"{n}/{RINGS[-1]}"])
                   for n in (WORKERS[0], WORKERS[-1]))  # fmt: skip
    errors = [error_of(runs) for runs in results["runs"].values()]
    worst = max(errors, key=abs)
    per_process = [speed / n for n, speed in zip(CLUSTER, results["simulated"][f"{RINGS[-1]}"], strict=True)]
    share = min(per_process) / per_process[0]
    conditions = [min(gains.values()) >= FASTER, first / last >= SCALES, abs(worst) <= CLOSE, share >= LINEAR]
    figures = (f"a ring of {RINGS[-1]} is {', '.join(f'{gain:.2f}' for gain in gains.values())} times as fast with "
               f"{', '.join(map(str, WORKERS))} processes; {WORKERS[-1]} processes are {first / last:.2f} times as "
               f"fast as one; largest error of a prediction {worst:+.0%}; predicted at {CLUSTER[-1]:,} processes: "
               f"{share:.0%} of linear")  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    rows = []
    for case, runs in results["runs"].items():
        workers, ring = case.split("/")
        speeds = [EPISODES / one["seconds"] for one in runs]
        rows.append([workers, ring, cell(speeds, 2), f"{EPISODES / fmean(one['predicted'] for one in runs):.2f}",
                     f"{error_of(runs):+.0%}"])  # fmt: skip
    head = ["processes", "open episodes per process", "episodes/s", "predicted", "error of the time"]
    simulated = [[ring, *(f"{speed:,.1f}" for speed in speeds)] for ring, speeds in results["simulated"].items()]
    return (markdown(head, rows) + "\nPredicted episodes per second on H100s, by environment processes:\n\n"
            + markdown(["open per process", *(f"{n:,}" for n in CLUSTER)], simulated))  # fmt: skip


def draw(results: Results, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    for ring in RINGS:
        runs = [results["runs"][f"{n}/{ring}"] for n in WORKERS]
        means, errors = zip(
            *(mean_and_error([EPISODES / one["seconds"] for one in some]) for some in runs), strict=True
        )
        (line,) = left.plot(WORKERS, means, marker="o", label=f"{ring} open per process")
        left.errorbar(WORKERS, means, yerr=errors, fmt="none", ecolor=line.get_color())
        predicted = [EPISODES / fmean(one["predicted"] for one in some) for some in runs]
        left.plot(WORKERS, predicted, linestyle="--", color=line.get_color())
    for number, speeds in results["simulated"].items():
        right.plot(CLUSTER, speeds, marker="o", label=f"{number} open per process")
    left.set(xlabel="environment processes (dashed: predicted)", ylabel="episodes per second", ylim=(0, None))
    right.set(
        xlabel="environment processes (predicted, H100)", ylabel="episodes per second", xscale="log", yscale="log"
    )
    for panel in (left, right):
        panel.legend(fontsize=7)


def collect(options: StudyOptions) -> Results:
    task = prepare(options.folder)
    cases = [(workers, ring, number) for number in ROUNDS for workers, ring in product(WORKERS, RINGS)]
    runs: dict[str, Runs] = {}
    for workers, ring, number in cases:  # in turns
        runs.setdefault(f"{workers}/{ring}", []).append(measure(options.folder, task, workers, ring, number))
    simulated = {f"{ring}": [simulate(options.folder, ring, n) for n in CLUSTER] for ring in SIMULATED_RINGS}
    return {"runs": runs, "simulated": simulated}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (9, 3.6), jobs=1)

if __name__ == "__main__":
    STUDY.main()
