"""Names on a hub: the real client against a hub on loopback, in processes of their own."""

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S, Task
from tests.hub_server import USER, Asked, Failure, Hub, served
from tests.scaling import subset

REPOSITORY = Path(__file__).parents[3]
MODEL, DATA = "org/tiny", "org/sums"
RUN = ["device=cpu", "mode=inline", "dataset.train_bs_n_seqs=15", "exp_ctrl.total_train_steps=1", "experiment_name=t",
       "tensorboard.enabled=False"]  # fmt: skip


@dataclass
class Site:
    """A hub, and a user with a home folder who runs commands against it."""

    hub: Hub
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "",
                "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
        return subprocess.run([sys.executable, "-m", "realhf", *words], cwd=REPOSITORY, text=True, capture_output=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1", **base, **env}, timeout=TIMEOUT_S)  # fmt: skip

    def sft(self, trial: str, *words: str, model: str = MODEL, data: str = DATA, **env: str) -> tuple[int, str, Path]:
        """Run SFT for a step, and return exit code, output and directory."""
        options = [f"model.path={model}", f"dataset.path={data}", *RUN, f"trial_name={trial}", f"fileroot={self.home}"]
        done = self.command("quickstart", "sft", *options, *words, **env)
        return done.returncode, done.stdout + done.stderr, self.home / "t" / trial

    def problem(self, *words: str, model: str = MODEL, data: str = DATA, **env: str) -> str:
        """Return the only line of a refused command, which has left nothing behind."""
        code, output, root = self.sft("refused", *words, model=model, data=data, **env)
        line = output.splitlines()[-1]
        assert code == 2 and "Traceback" not in output and line.startswith("error: "), output
        assert not root.exists() and not root.with_name(".refused.lock").exists()
        return line

    def asked(self, method: str, part: str) -> list[Asked]:
        return [a for a in self.hub.asked if a.method == method and part in a.path]


@pytest.fixture
def site(actor_folder: Path, task: Task, tmp_path: Path) -> Iterator[Site]:
    hub = Hub()
    hub.add_folder(f"models/{MODEL}", actor_folder)
    hub.add(f"datasets/{DATA}", {"train.jsonl": task.sft.read_bytes(), "README.md": b"# Sums"})
    with served(hub):
        yield Site(hub, tmp_path)


def test_a_run_with_names_trains_and_resumes_at_the_same_commit(site: Site, actor_folder: Path, task: Task) -> None:
    """Also after the branch has moved, without the cache, and offline."""
    commit = site.hub.branches[f"models/{MODEL}"]["main"]
    code, output, root = site.sft("a", "exp_ctrl.ckpt_freq_steps=1")
    assert code == 0 and f"hub     {MODEL}: commit {commit}" in output, output
    data_commit = site.hub.branches[f"datasets/{DATA}"]["main"]
    assert f"data    datasets/{DATA}@{data_commit}: 40 rows" in output, output
    assert f"path: {MODEL}\n" in (root / "config.yaml").read_text(), "config.yaml keeps what the user wrote"
    snapshots = json.loads((root / "plan.json").read_text())["snapshots"]
    assert commit in snapshots[MODEL] and set(snapshots) == {MODEL, f"datasets/{DATA}"}
    fingerprint = json.loads((root / "checkpoints/step_1/manifest.json").read_text())["fingerprint"]
    assert f"{MODEL}@{commit}/model.safetensors" in fingerprint["models"]
    site.hub.add(f"models/{MODEL}", {"config.json": b"{}"})
    site.hub.add(f"datasets/{DATA}", {"train.jsonl": b'{"prompt": "a", "answer": "b"}\n'})
    more = ["resume", str(root), "exp_ctrl.total_train_steps=2", "resume.accept=[lr_schedule]"]
    done = site.command(*more, HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and f"{MODEL}: commit" not in done.stdout, done.stdout + done.stderr
    shutil.rmtree(site.home / "hf")
    done = site.command(*more[:2], "exp_ctrl.total_train_steps=3", more[3], HF_HOME=str(site.home / "elsewhere"))
    assert done.returncode == 0 and f"{MODEL}: commit {commit}" in done.stdout, done.stdout + done.stderr


def test_only_the_files_that_a_run_reads_are_downloaded(site: Site, actor_folder: Path) -> None:
    extra = dict.fromkeys(("pytorch_model.bin", "model.py", "onnx/model.safetensors", "logo.png", "training_args.bin",
                           "consolidated.safetensors", "original/params.json"), b"x")  # fmt: skip
    files = {p.name: p.read_bytes() for p in actor_folder.iterdir()}
    site.hub.add(f"models/{MODEL}", {**files, **extra})
    done = site.command("plan", "sft", f"model.path={MODEL}", "device=cpu", f"fileroot={site.home}")
    assert done.returncode == 0 and not site.asked("GET", "/cdn/"), "a plan needs no weights"
    code, output, _ = site.sft("a")
    assert code == 0 and site.asked("GET", "/cdn/"), output
    names = {a.path.rpartition("/resolve/")[2].partition("/")[2] for a in site.asked("GET", "/resolve/")}
    assert names <= {*files, "train.jsonl", "README.md"}, names


def test_offline_the_cache_is_used_and_a_missing_name_is_an_error(site: Site, task: Task) -> None:
    assert "HF_HUB_OFFLINE forbids downloads" in site.problem(data=str(task.sft), HF_HUB_OFFLINE="1")
    assert site.sft("a")[0] == 0
    n = len(site.hub.asked)
    code, output, _ = site.sft("b", HF_HUB_OFFLINE="1")
    assert code == 0 and len(site.hub.asked) == n, output
    code, output, _ = site.sft("c", HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 0, f"an unreachable hub is as good as none: {output}"


def test_an_unreachable_hub_is_an_error_without_a_cache(site: Site, task: Task) -> None:
    problem = site.problem(data=str(task.sft), HF_ENDPOINT="http://127.0.0.1:9")
    assert "requests to http://127.0.0.1:9 for the model org/tiny fail" in problem


def test_refusals_are_one_line_with_a_remedy(site: Site, actor_folder: Path, task: Task) -> None:
    hub = site.hub
    assert "has no such model, or a private one: set HF_TOKEN" in site.problem(model="org/none")
    assert "has no such dataset" in site.problem(data="org/none")
    assert f"the model {MODEL} on the hub has no revision 'v9'" in site.problem(model=f"{MODEL}@v9")
    hub.add_folder("models/org/gated", actor_folder)
    hub.gated.add("models/org/gated")
    assert "is gated: accept its terms at http" in site.problem(model="org/gated")
    hub.private["models/org/tiny"] = "hf_secret"
    refused = site.problem(HF_TOKEN="hf_wrong", HF_HOME=str(site.home / "new"))
    assert "a private one: set HF_TOKEN" in refused and "hf_wrong" not in refused
    code, output, _ = site.sft("a", HF_TOKEN="hf_secret")
    assert code == 0 and "hf_secret" not in output, output
    hub.add("models/org/empty", {"README.md": b""})
    assert "has none of the files *.json" in site.problem(model="org/empty")
    hub.add("datasets/org/script", {"load.py": b"", "README.md": b""})
    assert "no revision 'refs/convert/parquet'" in site.problem(data="org/script", HF_TOKEN="hf_secret")


def test_a_busy_hub_is_asked_again_up_to_a_deadline(site: Site) -> None:
    site.hub.failures = [Failure("GET /api/models", 429, {"Retry-After": "1"}, times=2),
                         Failure("HEAD .*/config", 503, {"Retry-After": "0"}, times=2)]  # fmt: skip
    code, output, _ = site.sft("a")
    assert code == 0 and output.count("limits requests, retrying") == 4, output
    site.hub.failures = [Failure("GET /api/datasets", 429, {"Retry-After": "3600"})]
    assert "retry after 3600 s" in site.problem(HF_HOME=str(site.home / "new"))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", subset(["/api/models", "GET /org/tiny/resolve/.*json", "/cdn/"], 1))
def test_a_hub_that_does_not_answer_is_left(site: Site, pattern: str) -> None:
    """Every request of the client, and the cache is used if it is complete."""
    limits = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    site.hub.failures = [Failure(pattern, stalls=True)]
    line = site.problem(**limits)
    assert "model.path" in line and ("has not answered for" in line or "timed out" in line), line
    site.hub.failures = []
    assert site.sft("a")[0] == 0
    site.hub.failures = [Failure(".", stalls=True)]
    code, output, _ = site.sft("b", **limits)
    assert code == 0, output


def mount(folder: Path, options: str) -> None:
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]).returncode:
        pytest.skip("mounting a file system needs root")


@pytest.mark.parametrize("options", ["ro", "size=64k"])
def test_a_cache_that_cannot_be_written_is_named(site: Site, options: str) -> None:
    cache = site.home / "hf"
    cache.mkdir()
    mount(cache, options)
    try:
        code, output, _ = site.sft("refused")
    finally:
        subprocess.run(["umount", "--lazy", str(cache)], check=True)
    assert code == 2 and f"cannot be stored in {cache}/hub" in output and "set HF_HOME" in output, output
    lines = [line for line in output.splitlines() if not line.startswith("hub ")]
    assert len(lines) <= 3, "the client's warnings do not bury the error"


@pytest.mark.parametrize("file", ["hf", "hf/hub", "hf/hub/models--org--tiny"])
def test_a_file_in_the_place_of_the_cache_is_named(site: Site, file: str) -> None:
    path = site.home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    code, output, _ = site.sft("refused")
    assert code == 2 and "cannot be stored in" in output and "Traceback" not in output, output


@pytest.mark.slow
def test_launches_at_once_share_a_cache(site: Site) -> None:
    with ThreadPoolExecutor(3) as pool:
        for code, output, _ in pool.map(site.sft, ("a", "b", "c")):
            assert code == 0, output


@pytest.mark.parametrize("seed", range(2))
def test_broken_downloads_are_resumed(site: Site, actor_folder: Path, seed: int) -> None:
    """The connection breaks a few times, at random bytes; the client keeps whole blocks of 10 MB."""
    dice = random.Random(seed)
    files = {path.name: path.read_bytes() for path in actor_folder.iterdir()}
    files["model-2.safetensors"] = dice.randbytes(33 << 20)
    site.hub.add(f"models/{MODEL}", files)
    digest = hashlib.sha256(files["model-2.safetensors"]).hexdigest()
    site.hub.failures = [Failure(f"GET /cdn/{digest}", break_after=dice.randrange(10 << 20, 11 << 20), times=1)
                         for _ in range(2)]  # fmt: skip
    code, output, root = site.sft("a")
    assert code == 0, output
    ranges = [a.range for a in site.asked("GET", f"/cdn/{digest}")]
    assert len(ranges) == 3 and all(r.startswith("bytes=") for r in ranges[1:]), ranges
    snapshots = json.loads((root / "plan.json").read_text())["snapshots"]
    assert Path(snapshots[MODEL], "model-2.safetensors").read_bytes() == files["model-2.safetensors"]


def test_renamed_repositories_are_followed(site: Site) -> None:
    site.hub.moved["models/old/name"] = f"models/{MODEL}"
    code, output, _ = site.sft("a", model="old/name")
    assert code == 0, output


def test_revisions_and_splits_are_selected(site: Site, actor_folder: Path, task: Task) -> None:
    lines = task.sft.read_bytes().splitlines(keepends=True)
    gz = [gzip.compress(b"".join(lines[i::2])) for i in range(2)]
    files = {f"main/train-0000{i}-of-00002.jsonl.gz": data for i, data in enumerate(gz)}
    site.hub.add("datasets/org/parts", {**files, "main/test-00000-of-00001.jsonl": lines[0], "other/train.jsonl": b"x"})
    assert "several of its files match" in site.problem(data="org/parts")
    assert "none of its files" in site.problem(data="org/parts:main:dev")
    commit = site.hub.add_folder(f"models/{MODEL}", actor_folder, "v1")
    site.hub.add(f"models/{MODEL}", {"config.json": b"broken"})
    code, output, _ = site.sft("a", model=f"{MODEL}@v1", data="org/parts:main")
    assert code == 0 and f"{len(lines)} rows" in output and commit in output, output
    assert not site.asked("GET", "test-00000"), "other splits are not downloaded"


def test_a_data_set_with_a_script_is_read_from_its_converted_files(site: Site, task: Task) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in task.sft.read_text().splitlines()]
    file = site.home / "0000.parquet"
    pyarrow.write_table(__import__("pyarrow").Table.from_pylist(rows), file)
    site.hub.add("datasets/org/script", {"script.py": b"raise SystemExit"})
    site.hub.add("datasets/org/script", {"default/train/0000.parquet": file.read_bytes()}, "refs/convert/parquet")
    code, output, _ = site.sft("a", data="org/script")
    assert code == 0 and f"{len(rows)} rows" in output, output


def test_a_local_folder_has_priority(site: Site, actor_folder: Path, tmp_path: Path) -> None:
    command = "import os, sys; os.chdir(sys.argv[1]); from realhf.apps.main import console; console(sys.argv[2:])"
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(actor_folder)
    env = {**os.environ, "HF_ENDPOINT": site.hub.url, "HF_HUB_OFFLINE": "0"}
    words = ["plan", "sft", f"model.path={MODEL}", "device=cpu"]
    subprocess.run([sys.executable, "-c", command, str(tmp_path), *words], cwd=REPOSITORY, env=env, check=True)
    assert site.hub.asked == []


def test_the_final_model_is_pushed_with_a_card(site: Site) -> None:
    repo = f"{USER}/result"
    assert "set HF_TOKEN" in site.problem(f"push_to_hub={repo}")
    assert "which can write to tester, lab" in site.problem("push_to_hub=other/result", HF_TOKEN="hf_write")
    assert "give ORG/NAME" in site.problem("push_to_hub=result")
    code, output, root = site.sft("a", f"push_to_hub={repo}", HF_TOKEN="hf_write")
    assert code == 0 and "pushed" in output, output
    pushed = site.hub.commits[site.hub.branches[f"models/{repo}"]["main"]]
    folder = root / "models" / "model" / "step_1"
    assert {name: data for name, data in pushed.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    card = pushed["README.md"].decode()
    for part in (f"base_model: {MODEL}", f"- {DATA}", "`sft`: Supervised", "40 rows", "| step | loss |", "| 1 | 3."):
        assert part in card, card
    assert f"model.path={MODEL}" in card and str(site.home) not in card and "hf_write" not in card


def test_a_failed_push_keeps_the_model_and_names_the_remedy(site: Site) -> None:
    site.hub.failures = [Failure("POST .*/commit/", 403)]
    code, output, root = site.sft("a", f"push_to_hub={USER}/result", HF_TOKEN="hf_write")
    model = root / "models" / "model" / "step_1"
    assert code == 1 and f"hf upload {USER}/result {model}" in output and "Traceback" not in output, output
    assert (model / "model.safetensors").is_file()
