"""Workers as one step of a SLURM allocation: ``srun`` starts them, and what it says tells how they end."""

import os
import re
import shutil
import signal
import subprocess
import time

from realhf.api.config import ExperimentConfig
from realhf.base.paths import RunDir
from realhf.launch.command import how_it_ended, shared_environment, worker_command
from realhf.launch.local import DUMP_S, STOP_S, start_worker
from realhf.launch.network import address_for
from realhf.system.transport.reply_receiver import NodeLostError

RANK = "SLURM_PROCID"
ANSWER_S = 60.0
TASKS_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
NODES_FAILED = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)


class SlurmLauncher:
    """This process must be inside the allocation."""

    def __init__(self, paths: RunDir, config: ExperimentConfig, device: str) -> None:
        self.paths, self.config, self.device = paths, config, device
        self.nodes = nodes_of_job()[: config.n_nodes]
        self.log = paths.log("srun")
        self.process: subprocess.Popen | None = None
        self._begins = 0  # where in the log this launch begins

    def prepare(self) -> str:
        return f"tcp://{address_for(self.nodes)}:*"

    def start(self, address: str) -> None:
        self._begins = self.log.stat().st_size if self.log.exists() else 0
        threads = self.config.threads_per_worker or self.config.slurm.cpus_per_worker
        command = step_command(self.paths, self.config, self.device, address)
        self.process = start_worker(command, shared_environment(threads), self.log)

    def dead(self) -> dict[int, str]:
        code = self.process.poll() if self.process else None
        said = self._said()
        found = ended(said, self.nodes, self.config.n_gpus_per_node)
        lost: dict[int, str] = {rank: how for rank, how in found.items() if isinstance(how, NodeLostError)}
        if lost:
            return lost  # srun has ended the others for it
        if code is not None:
            last = said.strip().rpartition("\n")[2]
            how = how_it_ended(code) if not code else f"ended with srun, which {how_it_ended(code)} ({last})"
            found = dict.fromkeys(range(len(self.nodes) * self.config.n_gpus_per_node), how) | found
        return found

    def n_nodes(self) -> int:
        return min(self.config.n_nodes, len(nodes_of_job()))

    def state(self, rank: int) -> str:
        return ""  # SLURM knows nothing of it

    def dump_stacks(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # which srun hands on to all tasks, but not the next
            subprocess.run(["scancel", "--signal=CONT", os.environ["SLURM_JOB_ID"]], stderr=subprocess.DEVNULL)
            time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        assert self.process is not None, "started before"
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return {0: "or another is still there"} | ended(self._said(), self.nodes, self.config.n_gpus_per_node)
        return self.dead() if code else {}

    def stop(self) -> None:
        for request in (subprocess.Popen.terminate, subprocess.Popen.kill):  # either ends all tasks of the step
            if self.process is not None and self.process.poll() is None:
                request(self.process)
                self.wait(2 * STOP_S)
        if self.process is not None and self.process.stdin:
            self.process.stdin.close()

    def _said(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")


def step_command(paths: RunDir, config: ExperimentConfig, device: str, address: str) -> list[str]:
    """Return the ``srun`` that starts all workers, by rank along the nodes."""
    options = config.slurm
    command = [
        "srun",
        "--overlap",  # with a shell that srun has opened, too
        "--export=ALL",
        "--mpi=none",
        "--kill-on-bad-exit=0",  # the master says who died first, and then ends the others
        "--wait=0",
        f"--nodes={config.n_nodes}",
        f"--ntasks={config.n_nodes * config.n_gpus_per_node}",
        f"--ntasks-per-node={config.n_gpus_per_node}",
        f"--cpus-per-task={options.cpus_per_worker}",
        "--distribution=block",
        f"--output={paths.log('worker-%t').resolve()}",
        "--open-mode=append",
    ]
    if device == "cuda":  # every worker sees all of its node's: NCCL wants to
        command += [f"--gres={gpus(config)}", "--gpu-bind=none"]
    if options.container_image:
        command.append(f"--container-image={options.container_image}")
    if options.container_mounts:
        command.append(f"--container-mounts={options.container_mounts}")
    return command + worker_command(paths, RANK, address, options.python)


def gpus(config: ExperimentConfig) -> str:
    """Return the GPUs of a node in words of ``--gres``."""
    return f"{config.slurm.gpu}:{config.n_gpus_per_node}"


def ended(said: str, nodes: list[str], per_node: int) -> dict[int, str]:
    """Return the workers that ended by what ``srun`` said, with the words for how."""
    found: dict[int, str] = {}
    for node, tasks, how in TASKS_ENDED.findall(said):
        for rank in map(int, expand(f"[{tasks}]")):
            found.setdefault(rank, f"on node {node} ended: {how.lower()}")
    for failed in NODES_FAILED.findall(said):
        for node in set(expand(failed)) & set(nodes):
            first = nodes.index(node) * per_node
            for rank in range(first, first + per_node):
                found[rank] = NodeLostError(f"was lost with its node {node}")
    return found


def expand(names: str) -> list[str]:
    """Return what SLURM's short form stands for: ``n[08-10],m1`` is n08, n09, n10 and m1."""
    found = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        head, bracket, rest = name.partition("[")
        inside, _, tail = rest.partition("]")
        for numbers in inside.split(",") if bracket else []:
            first, _, last = numbers.partition("-")
            for number in range(int(first), int(last or first) + 1):
                found += [f"{head}{number:0{len(first)}}{end}" for end in expand(tail) or [""]]
        if not bracket:
            found.append(name)
    return found


def nodes_of_job() -> list[str]:
    """Return the nodes that the job of this process still has: with --no-kill it goes on without those that failed."""
    command = ["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""  # what it was given is the best that is known
    found = re.search(r"\bNodeList=(\S+)", said)
    return expand(found[1] if found else os.environ["SLURM_JOB_NODELIST"])


def in_allocation() -> bool:
    """Tell whether this process belongs to a job."""
    return "SLURM_JOB_ID" in os.environ


def problems(config: ExperimentConfig) -> list[str]:
    """Say which options SLURM cannot be asked with."""
    options, found = config.slurm, []
    if options.cpus_per_worker < 1:
        found.append(f"slurm.cpus_per_worker must be positive, got {options.cpus_per_worker}")
    found += [f"slurm.extra: '{word}' is no option of sbatch; write --name=value"
              for word in options.extra if not re.fullmatch(r"--?\w.*", word)]  # fmt: skip
    for name in ("partition", "account", "qos", "time", "constraint", "mem_per_node", "gpu"):
        if re.search(r"\s", value := str(vars(options)[name])):
            found.append(f"slurm.{name}='{value}' has blanks")
    if len(set(options.array_seeds)) < len(options.array_seeds):
        found.append(f"slurm.array_seeds={options.array_seeds} names a seed twice")
    if in_allocation():
        has = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if has < config.n_nodes:
            found.append(f"n_nodes={config.n_nodes}, but this allocation has {has}")
        if options.array_seeds:
            found.append("slurm.array_seeds makes jobs, and this is inside one; leave it out, or launch from outside")
    return found


def missing() -> list[str]:
    """Say which programs of SLURM are not here."""
    needed = ("srun",) if in_allocation() else ("sbatch", "scontrol", "scancel")
    lacks = [name for name in needed if not shutil.which(name)]
    return [f"mode=slurm: {', '.join(lacks)} not found on this machine; launch where SLURM is, or add --dry-run to see "
            "the script"] if lacks else []  # fmt: skip
