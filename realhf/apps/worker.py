"""Entry of a model worker process: ``python -m realhf.apps.worker RUN_DIR RANK ADDRESS``.

RANK may be the name of an environment variable that holds it.
"""

import os
import sys
import threading
from pathlib import Path


def main(root: str, rank: int, address: str) -> None:
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    from realhf.api.messages import Stop
    from realhf.apps.quickstart import read_run
    from realhf.base.logging import open_log
    from realhf.launch.network import address_towards, host_of, interface_of
    from realhf.system.channel import ZmqWorker
    from realhf.system.worker import ModelWorker

    here = "127.0.0.1"
    if master := host_of(address):
        here = address_towards(master)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(here))  # gloo trusts the host's name, which may lie
    run = read_run(Path(root))
    channel = ZmqWorker(address, rank)
    worker = ModelWorker(run, rank, channel.send, open_log(run.paths.log(f"worker-{rank}"), f"worker-{rank}"))
    try:
        worker.hello(here)
        while not isinstance(message := channel.receive(), Stop):
            worker.handle(message)
        worker.close()
    finally:
        channel.close()


def _leave_with_launcher() -> None:
    """Exit when standard input ends: only the launcher holds its other side."""
    os.read(0, 1)
    os._exit(3)


if __name__ == "__main__":
    rank = sys.argv[2] if sys.argv[2].isdigit() else os.environ[sys.argv[2]]
    main(sys.argv[1], int(rank), sys.argv[3])
