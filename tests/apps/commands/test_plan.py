"""``realhf plan`` from the command line: output, files and exit codes, without weights, data or GPUs."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from realhf.apps.commands.plan import USAGE
from realhf.apps.main import run
from tests.apps.commands.plan_command import MFCS, SVG, Command, write_model
from tests.conftest import TIMEOUT_S

MARGIN = "9% free for the expected error of 10%"


@pytest.mark.slow
def test_ppo_on_128_gpus_without_a_gpu(tmp_path: Path) -> None:
    write_model(tmp_path / "7b")
    words = ["plan", "ppo", "actor.path=7b", "rew.path=7b", "device=cuda", "planner.hardware=h100", "n_nodes=16",
             "n_gpus_per_node=8", "allocation_mode=search", "--out", "plan.json"]  # fmt: skip
    code = "import sys; from realhf.apps.main import run; code = run(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())["modes"]["search"]
    assert found["fits"] and found["plan"]["n_workers"] == 128 and set(found["plan"]["placements"]) == set(MFCS)
    workers = [rank for some in found["memory"] for rank in some["workers"]]
    assert sorted(workers) == list(range(128)) and found["peak_bytes"] < 80e9


def test_a_config_alone_is_a_model(plan: Command) -> None:
    by_path = plan.ppo("allocation_mode=d2t2p2")
    machine = ("device=cuda", "planner.hardware=h100", "n_gpus_per_node=8", "dataset.train_bs_n_seqs=32")
    models = ("actor.config=7b", "rew.config=7b/config.json", "actor.bf16=True", "critic.bf16=True", "rew.bf16=True")
    assert plan("ppo", *models, *machine, "allocation_mode=d2t2p2") == by_path
    both = plan("ppo", *models, *machine, "actor.path=7b")
    assert "7b is not read: actor.path has a configuration of its own" in both.err and both.code == 2


def test_tables(plan: Command) -> None:
    result = plan.ppo("allocation_mode=d2t2p2", "--out", "p.json")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("ppo: maximum-length sequences, 8 x cuda, bounded by the limits of h100\n")
    stored = json.loads((plan.folder / "p.json").read_text())["modes"]["d2t2p2"]
    head, *rows = result.table("allocation")
    assert head == ["call", "kind", "role", "layout", "tokens/mb", "seconds, at least", "moves"]
    assert tuple(row[0] for row in rows) == MFCS and {row[3] for row in rows} == {"d2t2p2@0-7"}
    for name, *_, seconds, moves in rows:
        assert float(seconds) == pytest.approx(stored["calls"][name]["compute_s"], rel=0.01)
        assert (0.0 if moves == "-" else float(moves)) == pytest.approx(stored["calls"][name]["moves_s"], rel=0.01)
    instructions = result.table("instructions")
    assert instructions[0] == ["actor_gen", "Transfer", "prompts, row to d2t2p2@0-7"]
    assert instructions[1] == ["Compute", "actor on d2t2p2@0-7, outputs tokens, prompt_mask, logprobs, truncated"]
    (_, (worker, needs, has, parts)) = result.table("memory")
    assert worker == "0-7" and has == "72.7 GB" and parts.startswith("optimizer 20.2 GB, weights 13.5 GB, gradients ")
    assert float(needs.split()[0]) == pytest.approx(stored["peak_bytes"] / 1e9, rel=0.01)
    step = dict(row for row in result.table("step"))
    assert float(step["at least"].split()[0]) == pytest.approx(stored["step_s"], rel=1e-3)
    assert step["at least"].endswith(f" s \u00b1 {stored['step_error']:.0%}") and 0.1 < stored["step_error"] < 0.25
    assert step["memory"] == f"peak {needs} \u00b1 10%; a worker has 80 GB, of which plans leave {MARGIN}"
    assert "actor_gen" in step["critical path"]
    rate, per_gpu = re.fullmatch(r"at most (\S+) trained tokens/s, (\S+) per GPU", step["throughput"]).groups()
    tokens = 32 * (1024 + 256)
    assert float(rate.replace(",", "")) == pytest.approx(tokens / stored["step_s"], rel=1e-3)
    assert float(per_gpu.replace(",", "")) == pytest.approx(tokens / stored["step_s"] / 8, rel=1e-3)
    assert 0 < float(step["MFU"].removeprefix("at most ").rstrip("%")) == pytest.approx(100 * stored["mfu"], rel=0.01)
    hours = 8 * stored["step_s"] / 3600
    assert step["cost"].startswith(
        f"at least {hours:.3g} GPU-hours per step, {1000 * hours:,.4g} per 1,000 steps (plan"
    )
    assert step["assumed"] == "32 prompts per step; prompts of 1,024 tokens; responses of 256 tokens"
    assert "search" not in step and result.out.count("allocation_mode='d2t2p2'\n") == 1
    priced = plan.ppo("allocation_mode=d2t2p2", "planner.dollars_per_gpu_hour=2").table("step")
    assert f"${2 * hours:.3g} per step, ${2000 * hours:,.2f} per 1,000 steps" in dict(priced)["cost"]


def test_instructions_for_reallocation_offload_and_ema(plan: Command) -> None:
    moving = plan.ppo("allocation_mode=actor_gen:d8,ref_inf:d4,*:d2t2p2", "ref.path=7b", "ref.offload=True").out
    assert re.search(r"Reallocate +actor from d2t2p2@0-7 to d8t1p1@0-7\n", moving)
    assert re.search(r"Release +actor on d8t1p1@0-7\n", moving)
    assert re.search(r"ref_inf +Transfer .*\n +Load +ref on d4t1p1@0-3\n +Compute .*\n +Offload +ref on d4", moving)
    following = plan.ppo("allocation_mode=d2t2p2", "ppo.ref_ema_eta=0.25").out
    assert re.search(
        r"Reallocate +actor from d2t2p2@0-7 to d2t2p2@0-7, EMA update of ref with weight 0.25\n", following
    )


def test_svg_is_well_formed_and_shows_every_call(plan: Command) -> None:
    assert "wrote p.svg" in plan.ppo("allocation_mode=d2t4", "--out", "p.svg").out
    root = ET.parse(plan.folder / "p.svg").getroot()
    assert root.tag == f"{SVG}svg"
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert re.fullmatch(r"ppo, d2t4: \S+ s per step", words[0] or "") and set(MFCS) <= set(words) and "0-7" in words
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert all(any(title.startswith(f"{name} Compute, step 2") for title in titles) for name in MFCS)


def test_page_is_well_formed_and_complete(plan: Command) -> None:
    result = plan.ppo("allocation_mode=d2t4", "--out=new/p.html", "--why")
    assert result.code == 0
    root = ET.parse(plan.folder / "new" / "p.html").getroot()
    heads = [head.text for head in root.iter("h2")]
    assert heads == ["allocation", "instructions", "memory", "step", "why"] and len(list(root.iter(f"{SVG}svg"))) == 1
    cells = {cell.text for cell in root.iter("td")}
    assert {"d2t4p1@0-7", "72.7 GB", "actor_train"} <= cells
    for table in root.iter("table"):
        assert len({len(row) for row in table.iter("tr")}) == 1


def test_comparison_of_modes(plan: Command) -> None:
    modes = ["heuristic", "search", "actor_gen:d8,*:d2t2p2", "t8"]
    result = plan.ppo("--compare", ",".join(modes), "--out", "c.svg")
    assert result.code == 0 and "allocation\n" not in result.out
    title = next(line for line in result.out.splitlines() if line.startswith("comparison"))
    head, *rows = result.table(title)
    rows = [row for row in rows if len(row) == len(head)]  # layouts may wrap
    assert head == ["allocation_mode", "step, at least", "relative", "busy", "peak memory", "layouts"]
    assert [row[0] for row in rows] == modes and rows[3][5] == "d1t8p1@0-7"
    assert rows[2][5].startswith("d8t1p1@0-7: actor_gen; d2t2p2@0-7: rew_inf, ref_inf")
    shares = [float(row[2]) for row in rows]
    assert min(shares) == shares[1] == 1.0  # search is never worse
    assert all(re.fullmatch(r"[\d.]+ s \u00b1 \d+%", row[1]) for row in rows)
    images = [svg for svg in ET.parse(plan.folder / "c.svg").getroot() if svg.tag == f"{SVG}svg"]
    tops = [float(svg.attrib["y"]) for svg in images]
    bottoms = [top + float(svg.attrib["height"]) for top, svg in zip(tops, images, strict=True)]
    assert tops == [0.0, *bottoms[:-1]] and len(images) == 4


def test_comparison_with_manual_meshes(plan: Command) -> None:
    calls = [f"{name}.parallel.data_parallel_size=4" for name in MFCS]
    result = plan.ppo("--compare", "manual,heuristic", *calls, *(f"{name}.device_mesh=0-3" for name in MFCS))
    assert result.code == 0 and "d4t1p1@0-3" in result.out
    alone = plan.ppo("allocation_mode=heuristic", *calls)
    assert alone.code == 2 and "set allocation_mode=manual" in alone.err


def test_why_shows_the_next_best_layouts(plan: Command) -> None:
    result = plan.ppo("allocation_mode=d1t8p1", "--why")
    head, *rows = result.table("why")
    assert head[-2:] == ["step time", "what decides"] and sorted(row[0] for row in rows) == sorted(MFCS)
    assert all(row[1] == "d1t8p1@0-7" != row[2] for row in rows)
    assert all(re.fullmatch(r"[+-]\d+\.\d%( \(equal within the error\))?", row[3]) for row in rows)
    part = r"(compute|moves|other calls|waiting) [+-][\d.e-]+ s|peak memory [+-][\d.]+ GB"
    assert all(re.fullmatch(rf"({part})(, ({part}))*", row[4]) for row in rows)


def test_plan_that_does_not_fit_with_the_suggested_fix(plan: Command) -> None:
    result = plan.ppo("allocation_mode=d1t8p1", "planner.memory_gb=36")
    assert result.code == 1 and "allocation\n" in result.out
    pattern = (r"error: worker \d would need \d+\.?\d* GB \((\w.*)\), it has 36, of which plans leave " + MARGIN +
               r"; it fits with (.*)\n")  # fmt: skip
    found = re.search(pattern, result.err)
    assert found, result.err
    assert found[1].startswith("optimizer 20, activations ") and "gradients 6.67" in found[1]
    words = found[2].split(" ")
    fixed = plan.ppo("allocation_mode=d1t8p1", "planner.memory_gb=36", *words)
    assert fixed.code == 0, f"{words}: {fixed.err}"
    hopeless = plan.ppo("n_gpus_per_node=1", "planner.memory_gb=10")
    assert hopeless.code == 1 and "it has 10" in hopeless.err


def test_one_of_the_compared_modes_must_fit(plan: Command) -> None:
    result = plan.ppo("--compare", "d8,d1t8p1", "planner.memory_gb=64")
    assert result.code == 0 and ", too large" in result.out
    none = plan.ppo("--compare", "d8,d4t2", "planner.memory_gb=64")
    assert none.code == 1 and f"it has 64, of which plans leave {MARGIN}; it fits with" in none.err
    assert re.search(r" allocation_mode=\w+\n$", none.err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "usage: realhf plan"),
        (("--why",), "missing EXPERIMENT"),
        (("ppo", "--ouf", "x.svg"), "unknown flag --ouf  did you mean --out ?"),
        (("ppo", "--out"), "--out needs a value"),
        (("ppo", "--out", "x.png"), "--out x.png: the suffix must be .svg, .html or .json"),
        (("ppo", "--compare", "heuristic,nonsense", *(f"{r}.path=7b" for r in ("actor", "rew"))), "nonsense"),
        (("poo",), "unknown experiment 'poo'"),
        (("ppo", "actr.path=7b"), "unknown option actr.path  did you mean actor.path ?"),
        (("ppo", "actor.path=7b", "rew.path=7c"), "rew.path=7c: there is no such folder"),
        (("ppo", "n_nodes=many"), "n_nodes=many: expected int"),
        (("ppo", "actor.path=7b", "rew.path=7b", "planner.hardware=h10"), "planner.hardware=h10: no such machine"),
        (("ppo", "actor.path=7b", "rew.path=7b", "planner.memory_gb=-1"), "planner.memory_gb=-1.0: must be > 0"),
        (("ppo", "actor.path=7b", "rew.path=7b", "planner.memory_gb=0.1"), "needs 0.35 GB without any model"),
        (("ppo", "actor.path=7b", "rew.path=7b", "n_gpus_per_node=0"), "n_gpus_per_node=0: must be >= 1"),
        (("ppo", "actor.path=7b", "rew.path=7b", "n_gpus_per_node=-2", "n_nodes=-1"), "n_nodes=-1: must be >= 1"),
        (("ppo", "actor.path=7b", "rew.path=7b", "dataset.train_bs_n_seqs=0"), "train_bs_n_seqs=0: must be >= 1"),
        (("ppo", "actor.path=7b", "rew.path=7b", "planner.profile=none.json"), "there is no such file; make it with"),
        (("ppo", "actor.path=7b", "rew.path=7b", "dataset.path=none.jsonl"), "none.jsonl: there is no such file"),
        (("ppo", "actor.path=7b", "rew.path=7b", "allocation_mode=t3", "n_gpus_per_node=3"), "nearest legal: d3t1p1"),
    ],
)
def test_invalid_input_exits_with_2(words: tuple[str, ...], message: str, plan: Command) -> None:
    result = plan(*words)
    assert (result.code == 2 and message in result.err) or (not words and result.code == 0 and message in result.out)


def test_out_file_that_cannot_be_written(plan: Command) -> None:
    (plan.folder / "file").write_text("")
    result = plan.ppo("allocation_mode=t8", "--out", "file/p.svg")
    assert result.code == 2 and "error: --out file/p.svg: " in result.err


def test_help(plan: Command) -> None:
    for words in (("--help",), ("-h",)):
        result = plan(*words)
        assert result.code == 0 and result.out.strip() == USAGE
    assert "exit code 0: the plan can run; 1: it cannot" in USAGE
    result = plan("ppo", "--help")
    assert result.code == 0 and "actor.path" in result.out and "planner.memory_gb" not in result.out
    assert (
        "planner.memory_gb" in plan("ppo", "--help", "memory").out
        and "planner.memory_gb" in plan("ppo", "-h", "all").out
    )


WRONG = '''
from dataclasses import dataclass, replace
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.experiments.ppo import PPOExperiment

@dataclass
class Wrong(PPOExperiment):
    """PPO with mistakes."""

    def graph(self):
        known = {m.name: m for m in super().graph().mfcs}
        known["rew_inf"] = replace(known["rew_inf"], inputs=("tokens", "masks"))
        known["critic_inf"] = replace(known["critic_inf"], outputs=("values", "ref_logprobs"))
        known["ref_inf"] = replace(known["ref_inf"], role="reference", inputs=("tokens", "late"))
        known["actor_train"] = replace(known["actor_train"], outputs=("late",), batch_size=0)
        return Graph(tuple(known.values()), (Sync("actor_trian", "actor", "reference", 0.5),))

@dataclass
class Extra(PPOExperiment):
    """PPO with a call that has no options, and with unused keys and an unused model."""

    def graph(self):
        known = {m.name: m for m in super().graph().mfcs}
        known["rew_inf"] = replace(known["rew_inf"], outputs=("rewards", "details"))
        more = MFC("judge", "rew", Kind.INFERENCE, InterfaceSpec("paired_rw"), ("tokens", "prompt_mask"), (), 4)
        return Graph((*known.values(), more) if self.seed == 2 else tuple(known.values()))

    def roles(self):
        return {**super().roles(), "spare": super().roles()["rew"]}
'''


def test_all_errors_in_a_graph_are_reported(plan: Command) -> None:
    (plan.folder / "mine.py").write_text(WRONG)
    words = ("mine.py:Wrong", "actor.path=7b", "rew.path=7b", "device=cpu")
    result = plan(*words)
    assert result.code == 1 and result.err.splitlines() == [
        "error: 6 problems; nothing was launched",
        "  1. MFC actor_train: batch_size must be positive, got 0",
        "  2. key 'ref_logprobs' is produced by ref_inf and critic_inf",
        "  3. role 'reference' is synced with 'actor' after unknown MFC 'actor_trian'",
        "  4. MFCs form a cycle: actor_train -> ref_inf -> actor_train",
        "  5. rew_inf needs 'masks': no MFC produces it, and prompt data has only prompts, row",
        "  6. MFC ref_inf: role 'reference' has no model (roles with one: actor, ref, rew, critic)",
    ]
    invalid = plan(*words, "ppo.gen.min_new_tokens=999")
    assert invalid.code == 2 and "ppo.gen.min_new_tokens=999 is larger" in invalid.err and "'masks'" in invalid.err
    assert run(["quickstart", *words, "dataset.path=none.jsonl"]) == 2


def test_unused_keys_and_roles_are_notes(plan: Command) -> None:
    (plan.folder / "mine.py").write_text(WRONG)
    write_model(plan.folder / "tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    words = ("mine.py:Extra", "actor.path=tiny", "rew.path=tiny", "device=cpu", "dataset.train_bs_n_seqs=4")
    result = plan(*words)
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("note")] == [
        "note: no MFC reads details of rew_inf",
        "note: no MFC uses the model of role 'spare'",
    ]
    more = plan(*words, "seed=2")
    assert more.code == 1 and more.err == "error: MFC judge: placements() has no options for it\n"


@pytest.mark.parametrize("experiment", ["sft", "rw", "dpo", "gen", "ppo-math"])
def test_every_experiment_has_a_plan_without_notes(experiment: str, plan: Command) -> None:
    write_model(plan.folder / "tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    role = "actor" if experiment in ("dpo", "ppo-math") else "model"
    result = plan(experiment, f"{role}.path=tiny", "device=cpu", "n_gpus_per_node=2", "dataset.train_bs_n_seqs=4")
    assert result.code == 0 and "note:" not in result.out


def test_judges_that_are_enough(plan: Command) -> None:
    words = ("ppo-math", "actor.path=7b", "device=cuda", "planner.hardware=h100", "n_gpus_per_node=8",
             "dataset.train_bs_n_seqs=32")  # fmt: skip
    shown = plan(*words, "planner.reward_latency=0.1", "reward.processes=3")
    assert shown.code == 0, shown.err
    title = re.search(r"judges \((\d+) processes are enough\)", shown.out)
    assert title is not None
    (_, *rows) = shown.table(title[0])
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]  # each worker has four responses
    assert [float(row[1]) for row in rows] == [0.4, 0.2, pytest.approx(0.4 / 3, rel=0.01), 0.1]
    steps = [float(row[2]) for row in rows]
    assert steps == sorted(steps, reverse=True) and steps[0] - steps[-1] == pytest.approx(0.3, abs=0.01)
    assert title[1] == "4" and f"{steps[2]:.4g} s" in shown.out
    assert "judges" not in plan(*words).out and "judges" not in plan.ppo("planner.reward_latency=0.1").out
