"""Workers as one step of a SLURM allocation, started by ``srun``; its output contains how they end."""

import os
import re
import shutil
import signal
import subprocess
import time

from realhf.api.config import ExperimentConfig
from realhf.base.paths import RunDir
from realhf.launch.local import DUMP_S, STOP_S, describe_exit, start_worker, worker_command
from realhf.launch.network import address_for
from realhf.system.transport.reply_receiver import NodeLoss

RANK = "SLURM_PROCID"
REPLY_S = 60.0
TASKS_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
NODES_FAILED = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)


class SlurmLauncher:
    """Must run inside the allocation."""

    def __init__(self, paths: RunDir, config: ExperimentConfig, device: str) -> None:
        self.paths, self.config, self.device = paths, config, device
        self.nodes = nodes_of_job()[: config.n_nodes]
        self.log = paths.log("srun")
        self.process: subprocess.Popen | None = None
        self._log_start = 0  # offset of this launch in the log

    def prepare(self) -> str:
        return f"tcp://{address_for(self.nodes)}:*"

    def start(self, address: str) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        threads = self.config.threads_per_worker or self.config.slurm.cpus_per_worker
        command = step_command(self.paths, self.config, self.device, address)
        self.process = start_worker(command, threads, self.log)

    def dead(self) -> dict[int, str]:
        code = self.process.poll() if self.process else None
        output = self._output()
        exits = parse_exits(output, self.nodes, self.config.n_gpus_per_node)
        lost: dict[int, str] = {rank: how for rank, how in exits.items() if isinstance(how, NodeLoss)}
        if lost:
            return lost  # srun has terminated the others as a consequence
        if code is not None:
            last = output.strip().rpartition("\n")[2]
            how = describe_exit(code) if not code else f"ended with srun, which {describe_exit(code)} ({last})"
            exits = dict.fromkeys(range(len(self.nodes) * self.config.n_gpus_per_node), how) | exits
        return exits

    def n_nodes(self) -> int:
        return min(self.config.n_nodes, len(nodes_of_job()))

    def state(self, rank: int) -> str:
        return ""  # unknown to SLURM

    def dump_stacks(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # srun forwards it to all tasks, but not SIGCONT
            subprocess.run(["scancel", "--signal=CONT", os.environ["SLURM_JOB_ID"]], stderr=subprocess.DEVNULL)
            time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        assert self.process is not None, "started before"
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exits = parse_exits(self._output(), self.nodes, self.config.n_gpus_per_node)
            return {0: "or another is still running"} | exits
        return self.dead() if code else {}

    def stop(self) -> None:
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):  # either ends all tasks of the step
            if self.process is not None and self.process.poll() is None:
                end(self.process)
                self.wait(2 * STOP_S)
        if self.process is not None and self.process.stdin:
            self.process.stdin.close()

    def _output(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


def step_command(paths: RunDir, config: ExperimentConfig, device: str, address: str) -> list[str]:
    """Return the ``srun`` command that starts all workers."""
    options = config.slurm
    command = [
        "srun",
        "--overlap",  # allow an interactive step
        "--export=ALL",
        "--mpi=none",
        "--kill-on-bad-exit=0",  # the master finds the root cause, then terminates the other workers
        "--wait=0",
        f"--nodes={config.n_nodes}",
        f"--ntasks={config.n_nodes * config.n_gpus_per_node}",
        f"--ntasks-per-node={config.n_gpus_per_node}",
        f"--cpus-per-task={options.cpus_per_worker}",
        "--distribution=block",
        f"--output={paths.log('worker-%t').resolve()}",
        "--open-mode=append",
    ]
    if device == "cuda":  # every worker sees all GPUs of its node, for NCCL
        command += [f"--gres={gpus(config)}", "--gpu-bind=none"]
    if options.container_image:
        command.append(f"--container-image={options.container_image}")
    if options.container_mounts:
        command.append(f"--container-mounts={options.container_mounts}")
    return command + worker_command(paths, RANK, address, options.python)


def gpus(config: ExperimentConfig) -> str:
    """Return the GPUs of a node as a value of ``--gres``."""
    return f"{config.slurm.gpu}:{config.n_gpus_per_node}"


def parse_exits(output: str, nodes: list[str], per_node: int) -> dict[int, str]:
    """Return the workers that ended, and how, from the output of ``srun``."""
    exits: dict[int, str] = {}
    for node, tasks, how in TASKS_ENDED.findall(output):
        for rank in map(int, expand_hostlist(f"[{tasks}]")):
            exits.setdefault(rank, f"on node {node} ended: {how.lower()}")
    for failed in NODES_FAILED.findall(output):
        for node in set(expand_hostlist(failed)) & set(nodes):
            first = nodes.index(node) * per_node
            exits |= dict.fromkeys(range(first, first + per_node), NodeLoss(f"was lost with its node {node}"))
    return exits


def expand_hostlist(hostlist: str) -> list[str]:
    """Expand a SLURM hostlist: ``n[08-10],m1`` is n08, n09, n10 and m1."""
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist):
        prefix, bracket, rest = item.partition("[")
        ranges, _, suffix = rest.partition("]")
        for numbers in ranges.split(",") if bracket else []:
            first, _, last = numbers.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts += [f"{prefix}{number:0{len(first)}}{end}" for end in expand_hostlist(suffix) or [""]]
        if not bracket:
            hosts.append(item)
    return hosts


def nodes_of_job() -> list[str]:
    """Return the remaining nodes of this job: with --no-kill, a job continues after node failures."""
    command = ["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=REPLY_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""  # use the initial allocation
    match = re.search(r"\bNodeList=(\S+)", output)
    return expand_hostlist(match[1] if match else os.environ["SLURM_JOB_NODELIST"])


def in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def problems(config: ExperimentConfig) -> list[str]:
    """Return the problems with the options of mode=slurm."""
    options, problems = config.slurm, []
    problems += [f"slurm.extra: '{word}' is not an option of sbatch; write --name=value"
                 for word in options.extra if not re.fullmatch(r"--?\w.*", word)]  # fmt: skip
    for name in ("partition", "account", "qos", "time", "constraint", "mem_per_node", "gpu"):
        if re.search(r"\s", value := str(vars(options)[name])):
            problems.append(f"slurm.{name}='{value}' contains whitespace")
    if len(set(options.array_seeds)) < len(options.array_seeds):
        problems.append(f"slurm.array_seeds={options.array_seeds} has a duplicate seed")
    if in_allocation():
        n_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if n_nodes < config.n_nodes:
            problems.append(f"n_nodes={config.n_nodes}, but this allocation has {n_nodes}")
        if options.array_seeds:
            problems.append("slurm.array_seeds submits jobs, but this is inside a job; omit it, or launch from outside")
    return problems


def missing() -> list[str]:
    """Return the problem that SLURM's programs are not on this machine, if so."""
    needed = ("srun",) if in_allocation() else ("sbatch", "scontrol", "scancel")
    lacking = [name for name in needed if not shutil.which(name)]
    return [f"mode=slurm: {', '.join(lacking)} not found on this machine; launch on a SLURM node, or add --dry-run to "
            "show the script"] if lacking else []  # fmt: skip
