"""Whole runs of the programs in the documents, with small models and data in place of theirs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.conftest import ROW, StandIns
from tests.docs.test_code_blocks import starts_run
from tests.integration.conftest import run

pytestmark = [pytest.mark.slow, pytest.mark.dist]
BLOCKS = list(blocks())
SMALL = ["dataset.train_bs_n_seqs=8", "exp_ctrl.total_train_steps=1", "tensorboard.enabled=False"]
OWN = {"own_reward.md": ["ppo.gen.max_new_tokens=8"], "own_loss.md": ["ppo.gen.max_new_tokens=8"],
       "own_experiment.md": []}  # fmt: skip


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "python" and starts_run(b)], ids=str)
def test_python_that_starts_a_run(block: Block, stand_ins: StandIns, tmp_path: Path) -> None:
    few = tmp_path / "train.jsonl"
    few.write_text((json.dumps(ROW) + "\n") * 8)
    text = block.text.replace("/models/Qwen2.5-0.5B", str(stand_ins.model)).replace(
        "n_gpus_per_node=4", "n_gpus_per_node=2"
    )
    text = text.replace('"train.jsonl"', f"dict(path={str(few)!r}, train_bs_n_seqs=8)")
    (tmp_path / "program.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/**/metrics.jsonl"))


@pytest.mark.parametrize("page", OWN)
def test_own_code_trains(page: str, stand_ins: StandIns, tmp_path: Path) -> None:
    of_page = [block for block in BLOCKS if block.page == ROOT / "docs" / "howto" / page]
    for block in of_page:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    (words,) = (words for block in of_page if block.kind == "commands" for words in block.commands())
    absolute = [re.sub(r"(\w+\.py:)", rf"{tmp_path}/\1", stand_ins.replace(word)) for word in words[2:]]
    finished = run(absolute[0], tmp_path / "run", [*absolute[1:], *SMALL, *OWN[page]])
    assert [line["step"] for line in finished.metrics] == [1]
