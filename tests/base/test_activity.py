"""What is under way, read at any time."""

import pytest

from realhf.base.activity import ActivityStack


def test_nested_things_are_told_from_the_outermost_in_and_forgotten_when_they_end() -> None:
    doing = ActivityStack()
    assert str(doing) == ""
    with doing.enter("a call"), doing.enter(3):
        assert str(doing) == "a call, 3"
    with pytest.raises(ZeroDivisionError), doing.enter("a mistake"):
        raise ZeroDivisionError
    assert str(doing) == ""
