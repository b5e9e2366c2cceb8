"""NCCL's ordering rules on small programs: what blocks, and what does not."""

import itertools

import pytest

from tests.gpu_emulated.nccl.rules import P2P, Collective, Communicator, Event, Machine, OrderError, Post, Wait

PAIR: Communicator = ("0", (0, 1))
ALL: Communicator = ("0", (0, 1, 2))


def send(peer: int, nbytes: int = 4) -> P2P:
    return P2P(True, peer, nbytes)


def receive(peer: int, nbytes: int = 4) -> P2P:
    return P2P(False, peer, nbytes)


def program(*steps: tuple[Communicator, tuple[P2P | Collective, ...]] | int) -> list[Event]:
    """Number the posts; an integer waits for the post of this number."""
    numbers = itertools.count()
    return [Wait(step) if isinstance(step, int) else Post(next(numbers), *step) for step in steps]


def blocks(*programs: list[Event]) -> str:
    with pytest.raises(OrderError) as caught:
        Machine(programs).run()
    return str(caught.value)


def test_a_send_and_its_receive_complete_together() -> None:
    machine = Machine([program((PAIR, (send(1),)), 0), program((PAIR, (receive(0),)), 0)])
    machine.run()
    assert machine.pairs == {(0, 1)}


def test_two_sends_block_one_another_unless_they_are_batches_or_have_communicators() -> None:
    both = [program((PAIR, (send(1 - r),)), (PAIR, (receive(1 - r),)), 0, 1) for r in range(2)]
    assert blocks(*both) == (
        "ranks block one another:\n"
        "rank 0 waits for send to 1 of 4 bytes (group 0, ranks 0, 1)\n"
        "rank 1 waits for send to 0 of 4 bytes (group 0, ranks 0, 1)"
    )
    Machine([program((PAIR, (send(1 - r), receive(1 - r))), 0) for r in range(2)]).run()
    up, down = ("up", (0, 1)), ("down", (0, 1))
    first = program((up, (send(1),)), (down, (receive(1),)), 0, 1)
    Machine([first, program((up, (receive(0),)), (down, (send(0),)), 0, 1)]).run()


def test_creating_two_communicators_in_different_orders_blocks() -> None:
    up, down = ("up", (0, 1)), ("down", (0, 1))
    first = program((up, (send(1),)), (down, (receive(1),)))
    message = blocks(first, program((down, (send(0),)), (up, (receive(0),))))
    assert "rank 0 creates the communicator of send to 1" in message and "rank 1 creates" in message


def test_the_head_of_a_queue_holds_back_what_follows() -> None:
    waiting = program((PAIR, (receive(1, 8),)), (PAIR, (send(1),)), 1)
    assert "rank 0 waits for send to 1 of 4 bytes (group 0, ranks 0, 1), behind receive from 1 of 8 bytes" in blocks(
        waiting, program((PAIR, (receive(0),)), 0, (PAIR, (send(0, 8),)))
    )


def test_a_batch_completes_as_a_whole() -> None:
    batch = program((ALL, (send(1), send(2))), 0)
    Machine([batch, program((ALL, (receive(0),)), 0), program((ALL, (receive(0),)), 0)]).run()
    assert "rank 0 waits" in blocks(batch, program((ALL, (receive(0),)), 0), program((ALL, (send(1),))))


def test_collectives_need_all_members_in_one_order() -> None:
    reduce, gather = (ALL, (Collective("all_reduce", 8),)), (ALL, (Collective("all_gather", 8),))
    Machine([program(reduce, 0, gather, 1)] * 3).run()
    assert "call different collectives" in blocks(program(reduce, gather), program(gather, reduce), program(reduce))
    assert "never completed" in blocks(program(reduce, gather), program(reduce), program(reduce, gather))
    smaller = program((ALL, (Collective("all_reduce", 4),)))
    assert "call different collectives" in blocks(program(reduce), program(reduce), smaller)


def test_collectives_of_crossing_groups_block() -> None:
    a, b = (("a", (0, 1)), (Collective("all_reduce", 8),)), (("b", (0, 1)), (Collective("all_reduce", 8),))
    Machine([program(a, 0, b, 1), program(a, 0, b, 1)]).run()
    start = [a, 0, b, 1]  # the communicators exist
    assert "block" in blocks(program(*start, a, 2, b, 3), program(*start, b, 2, a, 3))
    Machine([program(*start, a, b, 2, 3), program(*start, b, a, 2, 3)]).run()  # both are posted before the waits


def test_sizes_and_missing_messages() -> None:
    assert "rank 0 has send to 1 of 4 bytes" in blocks(program((PAIR, (send(1),))), program((PAIR, (receive(0, 8),))))
    posted = program((PAIR, (send(1),)), (PAIR, (send(1),)))
    assert "never completed" in blocks(posted, program((PAIR, (receive(0),)), 0))
    assert "rank 1 creates" in blocks(program(), program((PAIR, (send(0),)), 0))
