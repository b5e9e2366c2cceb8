"""What is under way, read at any time."""

import pytest

from realhf.base.activity import ActivityStack


def test_nested_things_are_told_from_the_outermost_in_and_forgotten_when_they_end() -> None:
    activity = ActivityStack()
    assert str(activity) == ""
    with activity.enter("a call"), activity.enter(3):
        assert str(activity) == "a call, 3"
    with pytest.raises(ZeroDivisionError), activity.enter("a mistake"):
        raise ZeroDivisionError
    assert str(activity) == ""
