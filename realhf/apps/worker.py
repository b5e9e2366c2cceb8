"""Entry of a model worker process: ``python -m realhf.apps.worker RUN_DIR RANK ADDRESS``.

RANK may be the name of an environment variable that holds it. The worker exits with 0 after a Stop, 1 after an error,
3 when its launcher or its master is gone. SIGUSR1 writes the stacks of all its threads to standard error: its log.
"""

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

EXIT_ALONE = 3


def main(root: str, rank: int, address: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    from realhf.api.messages import Shutdown
    from realhf.apps.prepare.launching import read_run
    from realhf.base.logging import open_log
    from realhf.launch.network import address_towards, host_of, interface_of
    from realhf.system.transport.channel import ZmqWorker
    from realhf.system.transport.heartbeat import HeartbeatSender
    from realhf.system.worker import ModelWorker

    here = "127.0.0.1"
    if master := host_of(address):
        here = address_towards(master)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(here))  # gloo trusts the host's name, which may lie
    run = read_run(Path(root))
    channel = ZmqWorker(address, rank, run.paths.key.read_bytes(), on_master_lost=_leave)
    worker = ModelWorker(run, rank, channel.send, open_log(run.paths.log(f"worker-{rank}"), f"worker-{rank}"))
    heart = HeartbeatSender(channel, rank, run.config.heartbeat_timeout, worker.activity_text)
    try:
        worker.hello(here)
        while not isinstance(message := channel.receive(), Shutdown):
            worker.handle(message)
        worker.close()
    finally:
        heart.stop()
        channel.close()


def _leave_with_launcher() -> None:
    """Exit when standard input ends: only the launcher holds its other side."""
    os.read(0, 1)
    _leave()


def _leave() -> None:
    os._exit(EXIT_ALONE)  # whatever the other threads wait for


if __name__ == "__main__":
    rank = sys.argv[2] if sys.argv[2].isdigit() else os.environ[sys.argv[2]]
    main(sys.argv[1], int(rank), sys.argv[3])
