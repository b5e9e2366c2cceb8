"""Commands with mistakes of new users. ``python -m tests.apps.bad_inputs`` prints every screen, exit code and time."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import TIMEOUT_S, Task

REPOSITORY = Path(__file__).parents[2]
MAX_LINES = 15
OPTIONS = {
    "quickstart": "",
    "experiment name": "grpoo",
    "no options": "grpo",
    "name of another library": "grpo learning_rate=1",
    "word for a number": "ppo-math {all} actor.optimizer.lr=fast",
    "range": "ppo-math {all} actor.optimizer.lr=-1",
    "zero": "ppo-math {all} ppo.group_size=0",
    "no value": "ppo-math {all} ppo",
    "section": "ppo-math {all} ppo=3",
    "missing data": "ppo-math {models} dataset.path=/no/such.jsonl",
    "UTF-16": "ppo-math {models} dataset.path=utf16.jsonl",
    "no rows": "ppo-math {models} dataset.path=list.json",
    "cut gzip": "ppo-math {models} dataset.path=cut.jsonl.gz",
    "columns": "ppo-math {models} dataset.path=columns.csv",
    "invalid JSON": "ppo-math {models} dataset.path=bad.jsonl",
    "empty file": "ppo-math {models} dataset.path=empty.jsonl",
    "deep JSON": "ppo-math {models} dataset.path=deep.jsonl",
    "reward module": "ppo-math {all} reward.fn=raises.py:f fileroot=launched trial_name=module",
    "reward arguments": "ppo-math {all} reward.fn=arguments.py:f",
    "reward file": "ppo-math {all} reward.fn=none.py:f",
    "reward name": "ppo-math {all} reward.fn=mth",
    "reward service": "ppo-math {all} reward.fn=http://127.0.0.1:9/judge fileroot=launched trial_name=service",
    "no config": "ppo-math {all} --config",
    "YAML": "ppo-math {all} --config cut.yaml",
    "unknown key": "ppo-math {all} --config unknown.yaml",
    "missing model": "ppo-math {data} actor.path=/no/model",
    "model type": "ppo-math {data} actor.path=unknown_type",
    "weights": "ppo-math {data} {critic} actor.path=cut_weights",
    "heads": "ppo-math {data} {critic} {heads}",
    "layout": "ppo-math {all} allocation_mode=d3t5",
    "division": "ppo-math {all} n_gpus_per_node=2 allocation_mode=t3",
    "call name": "ppo-math {all} n_gpus_per_node=2 allocation_mode=actor_gn:d2",
    "no GPU": "ppo-math {all} device=cuda",
    "file root": "ppo-math {all} fileroot=/proc/x",
    "batch size": "ppo-math {models} {data} dataset.train_bs_n_seqs=100000",
}
COMMANDS = {
    "command name": "quikstart",
    "resume nothing": "resume /no/run",
    "resume damage": "resume damaged",
    "report no run": "report",
    "report nothing": "report /no/run",
    "stop": "stop x",
    "plan": "plan",
    "plan path": "plan ppo actor.path=/no",
    "profile": "profile model=/no",
    "shell": "completion tcsh",
    "port": "verifier serve port=99999999",
    "verifier": "verifier srve",
    "demo": "demo --dri x",
    "environment": "env x",
}


@dataclass(frozen=True)
class Screen:
    """What a command printed and how it ended."""

    code: int
    output: str
    seconds: float

    @property
    def problems(self) -> list[str]:
        n_lines = len(self.output.strip().splitlines())
        found = {"a traceback": "Traceback" in self.output, f"exit code {self.code}": self.code not in (1, 2),
                 f"{n_lines} lines": n_lines > MAX_LINES, "no output": n_lines == 0}  # fmt: skip
        return [name for name, is_found in found.items() if is_found]


def write_files(folder: Path, task: Task) -> None:
    """Write the damaged files that the commands name."""
    row = '{"prompt": "a", "solutions": ["1"]}\n'
    texts = {
        "list.json": "[1, 2, 3]",
        "columns.csv": "input,output\na,b\n",
        "bad.jsonl": row + "{oops}\n",
        "empty.jsonl": "",
        "deep.jsonl": "[" * 100_000 + "\n",
        "raises.py": "raise RuntimeError('at import')\ndef f(prompt, response, row): ...\n",
        "cut.yaml": "ppo: [1\n",
        "arguments.py": "def f(x):\n    return 1.0\n",
        "unknown.yaml": "ppo:\n  grup_size: 4\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "utf16.jsonl").write_text(row, encoding="utf-16")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(row.encode() * 999)[:-30])
    (folder / "damaged").mkdir()
    (folder / "damaged" / "plan.json").write_text("{")
    (folder / "damaged" / "config.yaml").write_text("a: 1\n")
    config = json.loads((task.model / "config.json").read_text())
    changes = {"unknown_type": {"model_type": "lama"}, "odd_heads": {"num_attention_heads": 5}, "cut_weights": {}}
    for name, change in changes.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | change))
    for file in task.tokenizer.iterdir():
        (folder / "cut_weights" / file.name).write_bytes(file.read_bytes())
    (folder / "cut_weights" / "model.safetensors").write_bytes(b'\x10\0\0\0\0\0\0\0{"a":1')


def commands(task: Task) -> dict[str, list[str]]:
    actor, critic = (
        f"{role}.init_from_scratch=True {role}.config={task.model} {role}.tokenizer={task.tokenizer}"
        for role in ("actor", "critic")
    )
    data = f"dataset.path={task.train} tensorboard.enabled=False"
    heads = f"actor.init_from_scratch=True actor.config=odd_heads actor.tokenizer={task.tokenizer}"
    fits = "dataset.train_bs_n_seqs=8 ppo.gen.max_new_tokens=8"  # nothing else is wrong
    fields = {"models": f"{actor} {critic}", "all": f"{actor} {critic} {data} {fits}", "data": data, "critic": critic}
    filled = {name: f"quickstart {text.format(heads=heads, **fields)}".split() for name, text in OPTIONS.items()}
    return filled | {name: text.split() for name, text in COMMANDS.items()}


def screen(words: list[str], folder: Path) -> Screen:
    """Run a command in the folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "realhf", *words], cwd=folder, env=env, text=True, timeout=TIMEOUT_S,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return Screen(done.returncode, done.stdout, time.monotonic() - start)


def main() -> None:
    from tests.conftest import make_task

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder / "task")
        write_files(folder, task)
        screens = {case: screen(words, folder) for case, words in commands(task).items()}
    for case, shown in screens.items():
        flags = f"  !! {', '.join(shown.problems)}" if shown.problems else ""
        print(f"\n--- {case}: exit code {shown.code}, {shown.seconds:.2f} s{flags}\n{shown.output.strip()}")
    seconds = sorted(shown.seconds for shown in screens.values())
    n_bad = sum(bool(shown.problems) for shown in screens.values())
    print(f"\n{len(screens)} inputs, {n_bad} with problems; median {seconds[len(seconds) // 2]:.2f} s, "
          f"longest {seconds[-1]:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
