"""``realhf plan`` from the command line: output, files and exit codes, without weights, data or GPUs."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

from realhf.apps.commands.plan import USAGE
from realhf.apps.main import run
from tests.conftest import TIMEOUT_S

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
MFCS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def table(self, title: str) -> list[list[str]]:
        """Return the rows of a table, split at two or more spaces."""
        lines = self.out.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
        return [re.split(r"\s{2,}", line.strip()) for line in lines]


class Command:
    """Runs ``realhf plan`` in a folder that contains only ``7b/config.json``."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str) -> Result:
        code = run(["plan", *words])
        return Result(code, *self.capsys.readouterr())

    def ppo(self, *words: str) -> Result:
        """PPO of LLaMA-7B on eight H100."""
        models = ("actor.path=7b", "rew.path=7b", "actor.bf16=True", "critic.bf16=True", "rew.bf16=True")
        machine = ("device=cuda", "planner.hardware=h100", "n_gpus_per_node=8", "dataset.train_bs_n_seqs=32")
        return self("ppo", *models, *machine, *words)


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    write_model(tmp_path / "7b")
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys)


def write_model(folder: Path, **changes: int) -> None:
    """Write the config of a Llama, by default the 7B one, without weights."""
    rest = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu",
            "rms_norm_eps": 1e-5}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**rest, **SIZES, **changes}))


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
    assert worker == "0-7" and has == "76 GB" and parts.startswith("optimizer 20.2 GB, weights 13.5 GB, gradients ")
    assert float(needs.split()[0]) == pytest.approx(stored["peak_bytes"] / 1e9, rel=0.01)
    step = dict(row for row in result.table("step"))
    assert float(step["at least"].split()[0]) == pytest.approx(stored["step_s"], rel=1e-3)
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
    assert f"${2 * hours:,.4g} per step, ${2000 * hours:,.6g} per 1,000 steps" in dict(priced)["cost"]


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
    assert {"d2t4p1@0-7", "76 GB", "actor_train"} <= cells
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
    assert all(re.fullmatch(r"[+-]\d+\.\d%", row[3]) for row in rows)
    part = r"(compute|moves|other calls|waiting) [+-][\d.e-]+ s|peak memory [+-][\d.]+ GB"
    assert all(re.fullmatch(rf"({part})(, ({part}))*", row[4]) for row in rows)


def test_plan_that_does_not_fit_with_the_suggested_fix(plan: Command) -> None:
    result = plan.ppo("allocation_mode=d1t8p1", "planner.memory_gb=36")
    assert result.code == 1 and "allocation\n" in result.out
    pattern = (r"error: worker \d would need \d+\.?\d* GB \((\w.*)\), it has 36, of which plans leave 5% free; "
               r"it fits with (.*)\n")  # fmt: skip
    found = re.search(pattern, result.err)
    assert found, result.err
    assert found[1].startswith("optimizer 20, activations ") and "gradients 6.67" in found[1]
    words = found[2].split(" ")
    fixed = plan.ppo("allocation_mode=d1t8p1", "planner.memory_gb=36", *words)
    assert fixed.code == 0, f"{words}: {fixed.err}"
    hopeless = plan.ppo("n_gpus_per_node=1", "planner.memory_gb=10")
    assert hopeless.code == 1 and "it has 10" in hopeless.err


@pytest.mark.slow
def test_four_models_of_405b_on_64_gpus_get_a_remedy(plan: Command) -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    write_model(plan.folder / "405b", **sizes)
    words = ("ppo", "actor.path=405b", "rew.path=405b", "device=cuda", "planner.hardware=h100", "n_gpus_per_node=8")
    result = plan(*words, "n_nodes=8")
    found = re.search(r"it has 80, .*; it fits with (.* n_nodes=(\d+) .*)\n", result.err)
    assert result.code == 1 and found, result.err
    assert 8 < int(found[2]) <= 64
    fixed = plan(*words, *found[1].split(" "))
    assert fixed.code == 0, fixed.err
    assert plan(*words, *found[1].replace(f"n_nodes={found[2]}", "n_nodes=8").split(" ")).code == 1


def test_one_of_the_compared_modes_must_fit(plan: Command) -> None:
    result = plan.ppo("--compare", "d8,d1t8p1", "planner.memory_gb=64")
    assert result.code == 0 and ", too large" in result.out
    none = plan.ppo("--compare", "d8,d4t2", "planner.memory_gb=64")
    assert none.code == 1 and "it has 64, of which plans leave 5% free; it fits with" in none.err
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


TEXT = re.compile(r"^to run this plan: (.*) allocation_mode='(.*)'$", re.MULTILINE)


def test_printed_and_saved_plans_are_those_that_were_found(plan: Command) -> None:
    found = plan.ppo("allocation_mode=search", "--save", "a.json", "--out", "out.json")
    assert found.code == 0
    size, text = TEXT.findall(found.out)[0]
    assert size == "n_nodes=1 n_gpus_per_node=8"
    step = dict(found.table("step"))["search"]
    assert re.fullmatch(
        r"(converged|evaluations exhausted) after [\d,]+ evaluations, [\d.]+ s; the last .* [\d,]+", step
    )
    stored = (plan.folder / "a.json").read_text()
    assert json.loads(stored) == json.loads((plan.folder / "out.json").read_text())["modes"]["search"]["plan"]
    for mode in (text, "a.json"):
        again = plan.ppo(f"allocation_mode={mode}", "--save", "b.json")
        assert again.code == 0 and (plan.folder / "b.json").read_text() == stored
        assert again.table("memory") == found.table("memory") and TEXT.findall(again.out) == [(size, text)]


def test_a_search_reports_that_the_clock_stopped_it(plan: Command) -> None:
    step = dict(plan.ppo("allocation_mode=search", "planner.budget_s=0.001").table("step"))
    assert step["search"].startswith("stopped by the clock (planner.budget_s) after ")


@pytest.mark.parametrize("name", ["grpo", "reinforce-pp", "rloo", "remax", "ppo-math", "dpo", "sft", "rw", "gen"])
def test_all_experiments_print_plans_that_can_be_run(name: str, plan: Command) -> None:
    role = {"sft": "model", "rw": "model", "gen": "model"}.get(name, "actor")
    words = [name, f"{role}.path=7b", "device=cuda", "planner.hardware=h100", "n_gpus_per_node=4"]
    found = plan(*words, "allocation_mode=real", "--save", "a.json")
    assert found.code == 0, found.err
    step = dict(found.table("step"))
    word = "generated" if name == "gen" else "trained"
    assert f" {word} tokens/s" in step["throughput"] and "GPU-hours per step" in step["cost"] and step["assumed"]
    again = plan(*words, f"allocation_mode={TEXT.findall(found.out)[0][1]}", "--save", "b.json")
    assert again.code == 0, again.err
    assert (plan.folder / "a.json").read_text() == (plan.folder / "b.json").read_text()


def test_sweep(plan: Command) -> None:
    words = ("actor.path=7b", "rew.path=7b", "device=cuda", "planner.hardware=h100")
    result = plan("ppo", *words, "--sweep", "n_gpus=1,4..16", "--out", "s.svg")
    assert result.code == 0, result.err
    title = next(line for line in result.out.splitlines() if line.startswith("sweep"))
    head, *rows = result.table(title)
    assert head[:4] == ["n_gpus", "step, at least", "tokens/s", "GPU-hours per 1,000 steps"]
    assert [row[0] for row in rows] == ["1", "4", "8", "16"] and rows[0][4].endswith("too large")
    for row in rows:
        seconds, hours = float(row[1].split()[0]), float(row[3].replace(",", ""))
        assert hours == pytest.approx(1000 * int(row[0]) * seconds / 3600, rel=2e-3)
    assert rows[1][5] == "100%"  # relative to the first that fits
    root = ET.parse(plan.folder / "s.svg").getroot()
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * len(rows)
    hints = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert hints[0].startswith("GPUs 1: ") and hints[0].endswith("does not fit") and "worker-hours" in hints[-1]
    none = plan("ppo", *words, "--sweep=n_gpus=1,2", "--out=s.json")
    assert none.code == 1 and "it fits with" in none.err
    assert [point["n_gpus"] for point in json.loads((plan.folder / "s.json").read_text())] == [1, 2]
    batch = plan("sft", "model.path=7b", "device=cuda", "n_gpus_per_node=8", "--sweep", "dataset.train_bs_n_seqs=8,64",
                 "--out", "s.html")  # fmt: skip
    assert batch.code == 0 and re.search(r"^ +64 +8 ", batch.out, re.MULTILINE), batch.out
    assert len(list(ET.parse(plan.folder / "s.html").getroot().iter(f"{SVG}svg"))) == 1


def test_goals(plan: Command) -> None:
    fast = plan.ppo("--goal", "step", "--out", "fast.json")
    small = plan.ppo("--goal", "memory", "--out", "small.json")
    cheap = plan.ppo("--goal", "cost", "--out", "cheap.json")
    assert [result.code for result in (fast, small, cheap)] == [0, 0, 0]
    found = {name: json.loads((plan.folder / f"{name}.json").read_text())["modes"]["search"]
             for name in ("fast", "small", "cheap")}  # fmt: skip
    assert found["small"]["peak_bytes"] < 0.9 * found["fast"]["peak_bytes"]
    assert found["small"]["step_s"] >= found["fast"]["step_s"]
    assert found["cheap"]["worker_hours"] <= found["fast"]["worker_hours"]
    title = next(line for line in cheap.out.splitlines() if line.startswith("sweep"))
    fitting = [row for row in cheap.table(title)[1:] if "too large" not in row[4]]
    best = min(fitting, key=lambda row: float(row[3]))
    assert f"n_nodes=1 n_gpus_per_node={best[0]} allocation_mode='" in cheap.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sweep", "n_gpus=2,x"), "'x' is not a positive number or an ascending range; write --sweep n_gpus=16,32"),
        (("--sweep", "n_gpus=8..2"), "'8..2' is not a positive number or an ascending range"),
        (("--sweep", "n_gpus=0"), "'0' is not a positive number"),
        (("--sweep", "n_gpus="), "'' is not a positive number"),
        (("--sweep", "16"), "there are no values"),
        (("--sweep", "n_nodes=1..999..1"), "values are more than 64"),
        (("--sweep", "n_gpu=2"), "--sweep n_gpu: the option is unknown  did you mean n_gpus ?"),
        (("--sweep", "planner.memory_gb=2"), "--sweep planner.memory_gb: the option is not a whole number"),
        (("--sweep", "n_gpus=12"), "n_gpus=12: not a multiple of 8 GPUs per node; nearest: 8 or 16"),
        (("--sweep", "n_gpus=8,16", "allocation_mode=d8"), "allocation_mode=d8 is for one number of workers"),
        (("--sweep", "n_gpus=8", "--why"), "--sweep and --why cannot be combined"),
        (("--goal", "speed"), "--goal speed: use step, cost, memory"),
        (("--goal", "memory", "allocation_mode=d8"), "--goal memory: allocation_mode=d8 leaves no choice"),
        (("--compare", "d8,t8", "--goal", "memory"), "--compare and --goal cannot be combined"),
        (("--save", "plan.yaml"), "--save plan.yaml: the suffix must be .json"),
        (("allocation_mode=none.json",), "allocation_mode=none.json: there is no such file"),
    ],
)
def test_invalid_sweeps_and_goals(words: tuple[str, ...], message: str, plan: Command) -> None:
    result = plan.ppo(*words)
    assert result.code == 2 and message in result.err, result.err
