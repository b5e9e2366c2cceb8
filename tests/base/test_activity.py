"""Nested activities."""

import pytest

from realhf.base.activity import ActivityStack


def test_nested_activities_are_listed_outermost_first_and_removed_at_exit() -> None:
    stack = ActivityStack()
    assert str(stack) == ""
    with stack.enter("a call"), stack.enter(3):
        assert str(stack) == "a call, 3"
    with pytest.raises(ZeroDivisionError), stack.enter("a failure"):
        raise ZeroDivisionError
    assert str(stack) == ""
