"""Workers on a Ray cluster: a node's share is one bundle of a placement group, every worker has an actor that keeps it.

Ray is an extra, and loaded only by a launch. Only the actor's class and plain words travel through it.
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
from realhf.base.paths import RunDir
from realhf.launch.command import how_it_ended, python_path, shared_environment, worker_command
from realhf.launch.local import DUMP_S, STOP_S, ask_for_stacks, start_worker, state_of
from realhf.system.transport.reply_receiver import NodeLostError

NOTICE_S = 15.0
"""How long Ray may take to notice that a node has died."""


class RayLauncher:
    def __init__(self, paths: RunDir, config: ExperimentConfig, device: str) -> None:
        self.paths, self.config, self.device = paths, config, device
        self.n_workers = config.n_nodes * config.n_gpus_per_node
        self.keepers: list[Any] = []
        self.places: list[str] = []
        self._kept: dict[int, Any] = {}  # by rank: what becomes the exit code
        self._ended: dict[int, str] = {}
        self._group: Any = None

    def prepare(self) -> str:
        import ray

        before = signal.getsignal(signal.SIGTERM)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": self.config.ray.address}
        if not self.config.ray.address:
            cores = self.n_workers * self.config.ray.cpus_per_worker
            options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR,
                     runtime_env={"env_vars": {"PYTHONPATH": python_path()}})  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"ray.address={self.config.ray.address or 'local'}: {error}") from error
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray puts one of its own in its place
        return f"tcp://{ray.util.get_node_ip_address()}:*"

    def start(self, address: str) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each, per_node = self.config.ray.cpus_per_worker, self.config.n_gpus_per_node
        on_gpu, share = int(self.device == "cuda"), self._share()
        strategy = "STRICT_SPREAD" if self.config.n_nodes > 1 else "STRICT_PACK"
        self._group = placement_group([share] * self.config.n_nodes, strategy=strategy)
        if not self._group.wait(self.config.startup_timeout):
            raise RunFailed(f"waited {self.config.startup_timeout:.0f} s for {self.config.n_nodes} nodes with {share} "
                            f"each; free in all of the cluster: {free(ray.available_resources())}")  # fmt: skip
        for rank in range(self.n_workers):
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank // per_node)
            keeper: Any = ray.remote(NodeActor)
            needs = {"num_cpus": each, "num_gpus": on_gpu, "max_concurrency": 2}
            self.keepers.append(keeper.options(**needs, scheduling_strategy=bundle).remote())
        threads = self.config.threads_per_worker or each
        root = str(self.paths.root.resolve())
        self._kept = {rank: k.keep.remote(root, rank, address, threads) for rank, k in enumerate(self.keepers)}
        self.places = ray.get([keeper.place.remote() for keeper in self.keepers])

    def _share(self) -> dict[str, int]:
        """Return what the workers of a node are given."""
        per_node = self.config.n_gpus_per_node
        gpus = {"GPU": per_node} if self.device == "cuda" else {}
        return {"CPU": self.config.ray.cpus_per_worker * per_node, **gpus}

    def n_nodes(self) -> int:
        """Give Ray time to notice: peers of a worker speak of its death before the cluster knows of its node's."""
        end = time.monotonic() + (NOTICE_S if self.config.n_nodes > 1 else 0.0)
        while (found := self._able()) >= self.config.n_nodes and time.monotonic() < end:
            time.sleep(0.2)
        return min(self.config.n_nodes, found)

    def _able(self) -> int:
        """Return how many living nodes are large enough for a share."""
        import ray

        share = self._share()
        try:
            living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except Exception:  # of whatever kind: a cluster without its head says nothing more
            return 0
        return sum(all(has.get(kind, 0) >= needed for kind, needed in share.items()) for has in living)

    def dead(self) -> dict[int, str]:
        self._look(0.0)
        return dict(self._ended)

    def state(self, rank: int) -> str:
        import ray

        try:
            return ray.get(self.keepers[rank].state.remote(), timeout=STOP_S)
        except ray.exceptions.RayError:
            return ""  # a node that does not answer

    def dump_stacks(self) -> None:
        for rank in [rank for rank in self._kept if rank not in self._ended]:
            self.keepers[rank].dump_stacks.remote()
        time.sleep(DUMP_S)

    def wait(self, timeout_s: float) -> dict[int, str]:
        self._look(timeout_s)
        late = {rank: "is still there" for rank in self._kept if rank not in self._ended}
        return late | {rank: how for rank, how in self._ended.items() if how != how_it_ended(0)}

    def stop(self) -> None:
        import ray

        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in [rank for rank in self._kept if rank not in self._ended]:
                self.keepers[rank].end.remote(number)
            self._look(STOP_S)
        for keeper in self.keepers:
            ray.kill(keeper)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _look(self, timeout_s: float) -> None:
        """See who has ended, waiting for all up to ``timeout_s``."""
        import ray

        left = {ref: rank for rank, ref in self._kept.items() if rank not in self._ended}
        done = ray.wait(list(left), num_returns=len(left), timeout=timeout_s)[0] if left else []
        for ref in done:
            try:
                self._ended[left[ref]] = how_it_ended(ray.get(ref))
            except ray.exceptions.RayError as error:
                place = self.places[left[ref]] if self.places else "unknown"
                words = f"was lost with its actor on node {place}: {reason(str(error))}"
                self._ended[left[ref]] = NodeLostError(words)


class NodeActor:
    """The actor of a worker, which is a process of its own: it leaves when the actor goes."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def place(self) -> str:
        return socket.gethostname()

    def keep(self, root: str, rank: int, address: str, threads: int) -> int:
        """Start the worker and return its exit code when it has ended."""
        paths = RunDir(Path(root))
        command = worker_command(paths, rank, address)
        self.process = start_worker(command, shared_environment(threads), paths.log(f"worker-{rank}"))
        return self.process.wait()

    def state(self) -> str:
        return state_of(self.process) if self.process is not None else ""

    def dump_stacks(self) -> None:
        if self.process is not None:
            ask_for_stacks(self.process)

    def end(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


def reason(words: str) -> str:
    """Return why an actor died, out of all that Ray says about it."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("The actor")), lines[0] if lines else "no reason")


def free(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def problems(config: ExperimentConfig) -> list[str]:
    """Say which options Ray cannot be asked with."""
    found = []
    if config.ray.cpus_per_worker < 1:
        found.append(f"ray.cpus_per_worker must be positive, got {config.ray.cpus_per_worker}")
    if not config.ray.address and config.n_nodes != 1:
        found.append(f"mode=ray without ray.address runs on this machine only; set n_nodes=1 (got {config.n_nodes})")
    if config.ray.address.startswith("ray://"):
        found.append(f"ray.address={config.ray.address}: the master is part of the cluster; launch on a node of it")
    return found


def missing() -> list[str]:
    """Say that the extra is not there."""
    return [] if importlib.util.find_spec("ray") else ["mode=ray needs the extra: pip install 'realhf[ray]'"]
