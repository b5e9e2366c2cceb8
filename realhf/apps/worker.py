"""Entry of a model worker process: ``python -m realhf.apps.worker RUN_DIR RANK ADDRESS``.

RANK may be the name of an environment variable. Exit codes: 0 after a ``Shutdown``, 1 after an error, 3 if the launcher
or the master is lost. SIGUSR1 dumps the stacks of all threads to standard error, which is the log.
"""

import faulthandler
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

EXIT_ORPHANED = 3
PRELOADED = (
    "realhf.apps.prepare.launching",
    "realhf.launch.network",
    "realhf.system.transport.channel",
    "realhf.system.worker",
    "realhf.algorithms.policy_gradient.ppo",
    "realhf.algorithms.policy_gradient.verifier",
    "realhf.experiments.ppo_math",
    "transformers.tokenization_utils_tokenizers",
)


def main(root: str, rank: int, address: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    from realhf.api.messages import Shutdown
    from realhf.apps.prepare.launching import read_run
    from realhf.apps.profiles.profile_job import work
    from realhf.base.logging import open_log
    from realhf.base.paths import RunDir
    from realhf.launch.cuda import cuda_environment
    from realhf.launch.network import address_towards, host_of, interface_of
    from realhf.system.transport.channel import ZmqWorker
    from realhf.system.transport.heartbeat import HeartbeatSender
    from realhf.system.worker import ModelWorker

    own_address = "127.0.0.1"
    if master := host_of(address):
        own_address = address_towards(master)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_address))  # the host name may resolve wrongly
    if RunDir(Path(root)).profile_job.is_file():
        return work(RunDir(Path(root)), rank, address)
    run = read_run(Path(root))
    if run.device == "cuda":  # before CUDA is initialized
        run.paths.nccl.mkdir(exist_ok=True)
        os.environ.update(cuda_environment(run.config, run.paths, rank))
    key, log = run.paths.key.read_bytes(), open_log(run.paths.log(f"worker-{rank}"), f"worker-{rank}")
    channel = ZmqWorker(address, rank, key, on_master_lost=_exit)
    worker = ModelWorker(run, rank, channel.send, log, own_address, key)
    heartbeat = HeartbeatSender(channel, rank, run.config.heartbeat_timeout, worker.activity_text)
    try:
        worker.hello()
        while not isinstance(message := channel.receive(), Shutdown):
            worker.handle(message)
        worker.close()
    finally:
        heartbeat.stop()
        channel.close()


def _exit_with_launcher() -> None:
    """Exit when the launcher closes its end of standard input."""
    os.read(0, 1)
    _exit()


def _exit() -> None:
    os._exit(EXIT_ORPHANED)  # other threads may block


def preload() -> None:
    """Import the modules of a worker, for a fork server."""
    for module in PRELOADED:
        importlib.import_module(module)


def run(arguments: Sequence[str]) -> None:
    root, rank, address = arguments
    main(root, int(rank if rank.isdigit() else os.environ[rank]), address)


if __name__ == "__main__":
    run(sys.argv[1:])
