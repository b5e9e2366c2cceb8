"""Who is blamed when a run breaks."""

import time
from pathlib import Path

import pytest

from realhf.api.messages import Failed, Heartbeat, Hello, Ready, ToMaster
from realhf.base.errors import RunFailed, WorkerTimeout
from realhf.system.transport.channel import deadline
from realhf.system.transport.heartbeat import HeartbeatMonitor
from realhf.system.transport.reply_receiver import NodeLostError, ReplyReceiver, last_lines, listed


class Script:
    """A channel that says what is written down; None is a pause. Workers in ``deaths`` are dead from the start."""

    def __init__(self, *messages: ToMaster | None, deaths: dict[int, str] | None = None) -> None:
        self.messages, self.deaths = list(messages), deaths or {}
        self.late = (0.0, dict[int, str]())  # when more deaths are heard of, and which

    def receive(self, timeout_s: float) -> ToMaster | None:
        return self.messages.pop(0) if self.messages else None

    def mailbox(self, **patience: float) -> ReplyReceiver:
        return ReplyReceiver(self, self.watch, "task {}".format, "{}.log".format, settle_s=0.05, **patience)

    def watch(self) -> dict[int, str]:
        when, deaths = self.late
        return self.deaths | (deaths if time.monotonic() >= when else {})


def lost_peer(rank: int) -> Failed:
    return Failed(rank, "actor_train of step 3", "RuntimeError: connection closed by peer", "Traceback: gloo\n")


def verdict(script: Script, **patience: float) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        script.mailbox(**patience).receive(deadline(5.0), lambda: "too late", tuple)
    return caught.value


def test_messages_pass() -> None:
    mailbox = Script(None, Ready(1), Ready(0)).mailbox()
    assert [mailbox.receive(deadline(5.0), str, tuple) for _ in range(2)] == [Ready(1), Ready(0)]


def test_a_death_is_named_with_what_the_worker_was_doing() -> None:
    assert str(verdict(Script(deaths={2: "was ended by SIGKILL"}))) == (
        "worker 2 was ended by SIGKILL while doing task 2; see 2.log"
    )


@pytest.mark.parametrize("before", [(), (None, None)])
def test_a_silent_death_is_worse_than_the_complaints_of_its_peers(before: tuple) -> None:
    deaths = {0: "exited with code 1", 1: "was ended by SIGKILL"}
    for pause in ((), (None,)):
        script = Script(*before, lost_peer(0), *pause, lost_peer(2), deaths=deaths)
        error = verdict(script)
        assert str(error).startswith("worker 1 was ended by SIGKILL") and error.lost == (1,)


def test_a_worker_that_went_with_its_node_is_the_cause_whatever_it_said() -> None:
    lost = {2: NodeLostError("was lost with its node n1"), 3: NodeLostError("was lost with its node n1")}
    deaths = {0: "exited with code 1", 1: "was ended by SIGKILL", **lost}
    error = verdict(Script(lost_peer(3), lost_peer(0), lost_peer(2), deaths=deaths))
    assert str(error).startswith("worker 2 was lost with its node n1 while doing task 2; ")
    assert error.lost == (2, 3, 1)


def test_where_a_node_may_be_the_cause_word_of_it_is_waited_for() -> None:
    for patience, blamed in ((0.0, "worker 1 failed during"), (5.0, "worker 3 was lost with its node n1")):
        script = Script(lost_peer(1))
        script.late = (time.monotonic() + 0.3, {3: NodeLostError("was lost with its node n1")})
        assert str(verdict(script, nodes_settle_s=patience)).startswith(blamed)


def test_who_dies_after_speaking_is_not_silent() -> None:
    error = verdict(Script(None, lost_peer(1), deaths={1: "exited with code 1"}))
    assert str(error) == (
        "worker 1 failed during actor_train of step 3: RuntimeError: connection closed by peer\nsee 1.log"
    )
    assert error.traceback_text == "Traceback: gloo\n" and error.lost == ()  # its device is there


def test_the_first_to_fail_is_blamed_but_a_user_error_before_all() -> None:
    assert str(verdict(Script(lost_peer(3), lost_peer(0)))).startswith("worker 3 failed")
    user = Failed(1, "reading prompts 0 to 3", "data.jsonl: row 7 is broken", "Traceback: long\n", user_error=True)
    error = verdict(Script(lost_peer(3), user))
    assert "worker 1 failed during reading prompts 0 to 3: data.jsonl: row 7 is broken" in str(error)
    assert error.traceback_text == ""


def test_every_wait_ends() -> None:
    with pytest.raises(RunFailed, match="too late"):
        Script().mailbox().receive(deadline(0.02), lambda: "too late", tuple)
    hello = [Hello(rank, 1, "here", 0) for rank in (2, 0)]
    with pytest.raises(RunFailed, match="waited 0 s for worker 1, 3 to come up"):
        Script(*hello).mailbox().receive_all(Hello, range(4), 0.05, "to come up")


def test_a_silent_worker_is_blamed_though_others_beat() -> None:
    """Beats do not reach the master's logic; the wait ends before its deadline."""
    script = Script(Heartbeat(0, 10, "a", "all_reduce"), Heartbeat(1, 11, "b", "gen/Compute"), Ready(0), None)
    seconds = iter(range(100))
    mailbox = ReplyReceiver(script, dict, str, str, pulses=HeartbeatMonitor(2.5, lambda: float(next(seconds))))
    assert mailbox.receive(deadline(5.0), str, tuple) == Ready(0)
    script.messages.append(Heartbeat(0, 10, "a", "all_reduce"))
    with pytest.raises(
        WorkerTimeout, match="worker 1 .host b, process 11. gives no sign of life .* it was at gen/Compute"
    ) as hung:
        mailbox.receive(deadline(5.0), str, tuple)
    assert hung.value.ranks == (1,) == hung.value.lost


def test_who_is_awaited_in_vain_is_told_with_what_it_is_at() -> None:
    mailbox = Script(Heartbeat(3, 9, "a", "gen/Compute, 7 bytes from rank 2")).mailbox()
    with pytest.raises(WorkerTimeout) as hung:
        mailbox.receive(deadline(0.05), lambda: "too late", lambda: (3, 4))
    assert str(hung.value) == "too late\n  worker 3 (host a, process 9) is at gen/Compute, 7 bytes from rank 2"
    assert hung.value.ranks == (3, 4) and hung.value.lost == ()  # it is only late


def test_who_died_without_a_word_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {i}\n" for i in range(5000)))
    mailbox = ReplyReceiver(Script(), lambda: {0: "exited with code 1"}, str, lambda rank: log, settle_s=0.05)
    with pytest.raises(RunFailed) as caught:
        mailbox.receive(deadline(5.0), str, tuple)
    lines = str(caught.value).splitlines()
    assert lines[1] == "its last lines:" and lines[2:] == [f"  line {i}" for i in range(4980, 5000)]
    log.write_text("")
    assert last_lines(log) == "" == last_lines(tmp_path / "none")


def test_many_ranks_are_listed_briefly() -> None:
    assert listed({3, 1}) == "1, 3" and listed(range(16)) == ", ".join(map(str, range(16)))
    assert listed(range(100)) == ", ".join(map(str, range(16))) + " and 84 more"


def test_one_message_from_everybody() -> None:
    script = Script(Ready(1), None, Ready(0), Ready(2))
    assert script.mailbox().receive_all(Ready, range(3), 5.0, "to build") == {r: Ready(r) for r in range(3)}
