"""A SLURM cluster of virtual nodes on the loopback interface, without systemd: munge, slurmctld and slurmd.

Missing Debian packages are installed with apt, which needs root, like the daemons.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S
from tests.debian import why_missing

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldTimeout=30
SlurmdTimeout=300
MessageTimeout=60
KillWait=3
InactiveLimit=0
SlurmdParameters=config_overrides
{nodes}
PartitionName=dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Install missing packages; return the reason why no cluster can run, or an empty string."""
    if os.getuid() != 0:
        return "the daemons of SLURM need root"
    return why_missing(DAEMONS, ("slurm-wlm", "munge"))


class SlurmCluster:
    """Nodes ``n0`` ... of two cores each. ``environment`` is for its client programs."""

    def __init__(self, root: Path, n_nodes: int) -> None:
        self.root, self.n_nodes = root, n_nodes
        self.configuration = root / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        for folder in ("state", "spool"):
            (self.root / folder).mkdir(parents=True)
        controller, *ports = free_ports(1 + self.n_nodes)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for i, port in enumerate(ports)
        )
        self.configuration.write_text(CONFIGURATION.format(host=host, port=controller, root=self.root, nodes=nodes))
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.root.chmod(0o755)  # all users connect to munge
        self.run("munged", "--force", f"--key-file={key}", f"--socket={self.root}/munge.socket",
                 f"--pid-file={self.root}/munged.pid", f"--log-file={self.root}/munged.log",
                 f"--seed-file={self.root}/munge.seed")  # fmt: skip
        self.run("slurmctld", "-f", str(self.configuration), "-c")
        for i in range(self.n_nodes):
            self.start_node(i)
        self.wait_until_idle()

    def start_node(self, i: int) -> None:
        self.run("slurmd", "-f", str(self.configuration), "-N", f"n{i}")

    @contextlib.contextmanager
    def without_node(self, i: int) -> Iterator[None]:
        """Kill a node's daemon and mark the node as down; start it again at the end."""
        os.kill(int((self.root / f"n{i}.pid").read_text()), signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName=n{i}", "State=DOWN", "Reason=killed")
        try:
            yield
        finally:
            self.start_node(i)
            self.wait_until_idle()

    def wait_until_idle(self) -> None:
        end = time.monotonic() + TIMEOUT_S
        while set(self.run("sinfo", "-h", "-N", "-o", "%t").split()) != {"idle"}:
            assert time.monotonic() < end, self.run("sinfo", "-N", "-l")
            time.sleep(0.2)

    def run(self, *command: str) -> str:
        """Run a SLURM program and return its output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """Stop jobs, then daemons, and wait until they have exited."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--state=RUNNING", "--state=PENDING", "-u", "root")
        pids = [int(file.read_text()) for file in self.root.glob("*.pid") if file.read_text().strip()]
        for number, timeout_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            end = time.monotonic() + timeout_s
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
                time.sleep(0.05)


@contextlib.contextmanager
def running_cluster(root: Path, n_nodes: int, without: str) -> Iterator[SlurmCluster]:
    """Run a cluster of nodes with two cores, to which ``SLURM_CONF`` points; skip with ``without`` if none can run."""
    if reason := why_not():
        pytest.skip(f"{without}: {reason}")
    cluster = SlurmCluster(root, n_nodes)
    try:
        cluster.start()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SLURM_CONF", str(cluster.configuration))
            yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
