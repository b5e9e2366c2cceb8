"""Root causes of failed runs."""

import time
from pathlib import Path

import pytest

from realhf.api.messages import Failed, Heartbeat, Hello, Ready, ToMaster
from realhf.base.errors import RunFailed, WorkerTimeout
from realhf.system.transport.channel import deadline
from realhf.system.transport.heartbeat import HeartbeatMonitor
from realhf.system.transport.reply_receiver import NodeLoss, ReplyReceiver, format_ranks, log_tail


class Script:
    """A channel that returns given messages; None is a timeout. Workers in ``deaths`` are dead from the start."""

    def __init__(self, *messages: ToMaster | None, deaths: dict[int, str] | None = None) -> None:
        self.messages, self.deaths = list(messages), deaths or {}
        self.late = (0.0, dict[int, str]())  # further deaths, and their time

    def receive(self, timeout_s: float) -> ToMaster | None:
        return self.messages.pop(0) if self.messages else None

    def receiver(self, **grace: float) -> ReplyReceiver:
        return ReplyReceiver(self, self.dead, "task {}".format, "{}.log".format, grace_s=0.05, **grace)

    def dead(self) -> dict[int, str]:
        when, deaths = self.late
        return self.deaths | (deaths if time.monotonic() >= when else {})


def lost_peer(rank: int) -> Failed:
    return Failed(rank, "actor_train of step 3", "RuntimeError: connection closed by peer", "Traceback: gloo\n")


def failure(script: Script, **grace: float) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        script.receiver(**grace).receive(deadline(5.0), lambda: "too late", tuple)
    return caught.value


def test_messages_are_returned() -> None:
    receiver = Script(None, Ready(1), Ready(0)).receiver()
    assert [receiver.receive(deadline(5.0), str, tuple) for _ in range(2)] == [Ready(1), Ready(0)]


def test_a_death_is_reported_with_the_requested_activity() -> None:
    assert str(failure(Script(deaths={2: "was ended by SIGKILL"}))) == (
        "worker 2 was ended by SIGKILL during task 2; see 2.log"
    )


@pytest.mark.parametrize("before", [(), (None, None)])
def test_a_silent_death_is_the_cause_of_its_peers_failures(before: tuple) -> None:
    deaths = {0: "exited with code 1", 1: "was ended by SIGKILL"}
    for pause in ((), (None,)):
        script = Script(*before, lost_peer(0), *pause, lost_peer(2), deaths=deaths)
        error = failure(script)
        assert str(error).startswith("worker 1 was ended by SIGKILL") and error.lost == (1,)


def test_a_lost_node_is_the_cause_even_after_a_report() -> None:
    lost = {2: NodeLoss("was lost with its node n1"), 3: NodeLoss("was lost with its node n1")}
    deaths = {0: "exited with code 1", 1: "was ended by SIGKILL", **lost}
    error = failure(Script(lost_peer(3), lost_peer(0), lost_peer(2), deaths=deaths))
    assert str(error).startswith("worker 2 was lost with its node n1 during task 2; ")
    assert error.lost == (2, 3, 1)


def test_on_several_nodes_a_lost_node_is_awaited() -> None:
    for grace_s, message in ((0.0, "worker 1 failed during"), (5.0, "worker 3 was lost with its node n1")):
        script = Script(lost_peer(1))
        script.late = (time.monotonic() + 0.3, {3: NodeLoss("was lost with its node n1")})
        assert str(failure(script, node_grace_s=grace_s)).startswith(message)


def test_a_death_after_a_report_is_not_silent() -> None:
    error = failure(Script(None, lost_peer(1), deaths={1: "exited with code 1"}))
    assert str(error) == (
        "worker 1 failed during actor_train of step 3: RuntimeError: connection closed by peer\nsee 1.log"
    )
    assert error.traceback_text == "Traceback: gloo\n" and error.lost == ()  # its device is not lost


def test_a_user_error_is_the_cause_before_the_first_failure() -> None:
    assert str(failure(Script(lost_peer(3), lost_peer(0)))).startswith("worker 3 failed")
    user = Failed(1, "reading prompts 0 to 3", "data.jsonl: row 7 is broken", "Traceback: long\n", user_error=True)
    error = failure(Script(lost_peer(3), user))
    assert "worker 1 failed during reading prompts 0 to 3: data.jsonl: row 7 is broken" in str(error)
    assert error.traceback_text == ""


def test_every_wait_has_a_deadline() -> None:
    with pytest.raises(RunFailed, match="too late"):
        Script().receiver().receive(deadline(0.02), lambda: "too late", tuple)
    hello = [Hello(rank, 1, "here", 0) for rank in (2, 0)]
    with pytest.raises(RunFailed, match="waited 0 s for worker 1, 3 to come up"):
        Script(*hello).receiver().receive_all(Hello, range(4), 0.05, "to come up")


def test_a_silent_worker_is_reported_while_others_send_heartbeats() -> None:
    """Heartbeats are not returned; the wait ends before its deadline."""
    script = Script(Heartbeat(0, 10, "a", "all_reduce"), Heartbeat(1, 11, "b", "gen/Compute"), Ready(0), None)
    seconds = iter(range(100))
    receiver = ReplyReceiver(script, dict, str, str, heartbeats=HeartbeatMonitor(2.5, lambda: float(next(seconds))))
    assert receiver.receive(deadline(5.0), str, tuple) == Ready(0)
    script.messages.append(Heartbeat(0, 10, "a", "all_reduce"))
    with pytest.raises(
        WorkerTimeout, match="worker 1 .host b, process 11.: no heartbeat for .* last activity: gen/Compute"
    ) as caught:
        receiver.receive(deadline(5.0), str, tuple)
    assert caught.value.ranks == (1,) == caught.value.lost


def test_awaited_workers_are_reported_with_their_activity() -> None:
    receiver = Script(Heartbeat(3, 9, "a", "gen/Compute, 7 bytes from rank 2")).receiver()
    with pytest.raises(WorkerTimeout) as caught:
        receiver.receive(deadline(0.05), lambda: "too late", lambda: (3, 4))
    assert str(caught.value) == "too late\n  worker 3 (host a, process 9): gen/Compute, 7 bytes from rank 2"
    assert caught.value.ranks == (3, 4) and caught.value.lost == ()  # it is late, not lost


def test_a_silent_death_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {i}\n" for i in range(5000)))
    receiver = ReplyReceiver(Script(), lambda: {0: "exited with code 1"}, str, lambda rank: log, grace_s=0.05)
    with pytest.raises(RunFailed) as caught:
        receiver.receive(deadline(5.0), str, tuple)
    lines = str(caught.value).splitlines()
    assert lines[1] == "its last lines:" and lines[2:] == [f"  line {i}" for i in range(4980, 5000)]
    log.write_text("")
    assert log_tail(log) == "" == log_tail(tmp_path / "none")


WATCHDOG = (
    "[rank1]:[E1124 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600096 milliseconds "
    "before timing out.\n"
)


def test_a_timeout_of_nccl_names_the_operation_and_its_record(tmp_path: Path) -> None:
    log, record = tmp_path / "worker.log", tmp_path / "rank_1"
    log.write_text(WATCHDOG.format(3) + "restarted\n" + WATCHDOG.format(78) + "frame #0: stack\n" * 900)
    receiver = ReplyReceiver(Script(), lambda: {1: "was ended by SIGABRT"}, str, lambda _: log, lambda _: record, 0.05)
    operation = "SeqNum=78, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000"
    for where in ("", f", flight record {record} (torchfrtrace reads it)"):
        with pytest.raises(RunFailed) as caught:
            receiver.receive(deadline(5.0), str, tuple)
        lines = str(caught.value).splitlines()
        assert lines[0] == f"worker 1 was ended by SIGABRT during 1; see {log}"
        assert lines[1] == f"the NCCL operation {operation} exceeded its deadline{where}"
        record.touch()


def test_long_lists_of_ranks_are_shortened() -> None:
    assert format_ranks({3, 1}) == "1, 3" and format_ranks(range(16)) == ", ".join(map(str, range(16)))
    assert format_ranks(range(100)) == ", ".join(map(str, range(16))) + " and 84 more"


def test_one_message_from_every_rank() -> None:
    script = Script(Ready(1), None, Ready(0), Ready(2))
    assert script.receiver().receive_all(Ready, range(3), 5.0, "to build") == {r: Ready(r) for r in range(3)}
