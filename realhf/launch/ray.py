"""Workers on a Ray cluster: every node has a bundle of a placement group, every worker an actor that runs its process.

Ray is an optional dependency, imported at launch. Only the actor class and plain values pass through it.
"""

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.base.errors import RunFailed, UserError
from realhf.base.host_memory import proc_field
from realhf.base.paths import RunDir
from realhf.launch import local
from realhf.system.transport.reply_receiver import NodeLoss

NOTICE_S = 15.0
"""Time in which Ray detects a dead node."""


class RayLauncher:
    def __init__(self, paths: RunDir, config: ExperimentConfig, device: str) -> None:
        import ray

        self.ray: Any = ray
        self.paths, self.config, self.device = paths, config, device
        self.n_workers = config.n_nodes * config.n_gpus_per_node
        self.actors: list[Any] = []
        self.hosts: list[str] = []
        self._exit_codes: dict[int, Any] = {}  # by rank: object references
        self._ended: dict[int, str] = {}
        self._group: Any = None

    def prepare(self) -> str:
        before = signal.getsignal(signal.SIGTERM)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": self.config.ray.address}
        if not self.config.ray.address:
            cores = self.n_workers * self.config.ray.cpus_per_worker
            options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        try:
            self.ray.init(**options, log_to_driver=False, logging_level=logging.ERROR,
                          runtime_env={"env_vars": {"PYTHONPATH": local.python_path()}})  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"ray.address={self.config.ray.address or 'local'}: {error}") from error
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray replaces the handler
        return f"tcp://{self.ray.util.get_node_ip_address()}:*"

    def start(self, address: str) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config, bundle = self.config, self._bundle()
        strategy = "STRICT_SPREAD" if config.n_nodes > 1 else "STRICT_PACK"
        self._group = placement_group([bundle] * config.n_nodes, strategy=strategy)
        if not self._group.wait(config.startup_timeout):
            free = format_resources(self.ray.available_resources())
            n_large = self._count_nodes()
            raise RunFailed(f"waited {config.startup_timeout:.0f} s for {config.n_nodes} nodes with {bundle} each; "
                            f"{n_large} nodes are that large; free in the whole cluster: {free}")  # fmt: skip
        needs = {"num_cpus": config.ray.cpus_per_worker, "num_gpus": int(self.device == "cuda"), "max_concurrency": 2}
        actor = self.ray.remote(NodeActor)
        for rank in range(self.n_workers):
            index = rank // config.n_gpus_per_node
            placement = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            self.actors.append(actor.options(**needs, scheduling_strategy=placement).remote())
        threads = config.threads_per_worker or config.ray.cpus_per_worker
        root = str(self.paths.root.resolve())
        self._exit_codes = {
            rank: actor.run_worker.remote(root, rank, address, threads) for rank, actor in enumerate(self.actors)
        }
        self.hosts = self.ray.get([actor.host.remote() for actor in self.actors])

    def _bundle(self) -> dict[str, int]:
        per_node = self.config.n_gpus_per_node
        gpus = {"GPU": per_node} if self.device == "cuda" else {}
        return {"CPU": self.config.ray.cpus_per_worker * per_node, **gpus}

    def n_nodes(self) -> int:
        """Wait until Ray detects a dead node: the peers of its workers fail earlier."""
        end = time.monotonic() + (NOTICE_S if self.config.n_nodes > 1 else 0.0)
        while (n_nodes := self._count_nodes()) >= self.config.n_nodes and time.monotonic() < end:
            time.sleep(0.2)
        return min(self.config.n_nodes, n_nodes)

    def _count_nodes(self) -> int:
        """Return the number of nodes that are alive and large enough for a bundle."""
        bundle = self._bundle()
        try:
            alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        except Exception:  # of various types, if the head node is lost
            return 0
        return sum(all(resources.get(kind, 0) >= needed for kind, needed in bundle.items()) for resources in alive)

    def dead(self) -> dict[int, str]:
        self._poll(0.0)
        return dict(self._ended)

    def state(self, rank: int) -> str:
        try:
            return self.ray.get(self.actors[rank].state.remote(), timeout=local.STOP_S)
        except self.ray.exceptions.RayError:
            return ""  # the node does not respond

    def dump_stacks(self) -> None:
        for rank in self._running():
            self.actors[rank].dump_stacks.remote()
        time.sleep(local.DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        self._poll(timeout_s)
        late = dict.fromkeys(self._running(), "is still running")
        return late | {rank: how for rank, how in self._ended.items() if how != local.describe_exit(0)}

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._running():
                self.actors[rank].end.remote(number)
            self._poll(local.STOP_S)
        for actor in self.actors:
            self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)
        self.ray.shutdown()

    def _running(self) -> list[int]:
        return [rank for rank in self._exit_codes if rank not in self._ended]

    def _poll(self, timeout_s: float) -> None:
        """Record the workers that have ended, after waiting up to ``timeout_s`` for all of them."""
        ranks = {self._exit_codes[rank]: rank for rank in self._running()}
        done = self.ray.wait(list(ranks), num_returns=len(ranks), timeout=timeout_s)[0] if ranks else []
        for ref in done:
            try:
                self._ended[ranks[ref]] = local.describe_exit(self.ray.get(ref))
            except self.ray.exceptions.RayError as error:
                host, reason = self.hosts[ranks[ref]] if self.hosts else "unknown", death_reason(str(error))
                self._ended[ranks[ref]] = NodeLoss(f"was lost with its actor on node {host}: {reason}")


class NodeActor:
    """Runs a worker as a child process, which exits with the actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def host(self) -> str:
        return socket.gethostname()

    def run_worker(self, root: str, rank: int, address: str, threads: int) -> int:
        """Start the worker, wait for it, and return its exit code."""
        paths = RunDir(Path(root))
        command = local.worker_command(paths, rank, address)
        self.process = local.start_worker(command, threads, paths.log(f"worker-{rank}"))
        return self.process.wait()

    def state(self) -> str:
        return proc_field(f"{self.process.pid}/status", "State") if self.process is not None else ""

    def dump_stacks(self) -> None:
        if self.process is not None:
            local.request_stacks(self.process)

    def end(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


def death_reason(text: str) -> str:
    """Return the reason for an actor's death from Ray's error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("The actor")), lines[0] if lines else "no reason")


def format_resources(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def problems(config: ExperimentConfig) -> list[str]:
    """Return the problems with the options of mode=ray."""
    problems = []
    if not config.ray.address and config.n_nodes != 1:
        problems.append(f"mode=ray without ray.address is for this machine only; set n_nodes=1 (got {config.n_nodes})")
    if config.ray.address.startswith("ray://"):
        problems.append(f"ray.address={config.ray.address}: the master is part of the cluster; launch on one of its "
                        "nodes")  # fmt: skip
    return problems


def missing() -> list[str]:
    return [] if importlib.util.find_spec("ray") else ["mode=ray needs the extra: pip install 'realhf[ray]'"]
