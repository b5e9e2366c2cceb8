"""What is under way, read at any time."""

import pytest

from realhf.base.doing import Doing


def test_nested_things_are_told_from_the_outermost_in_and_forgotten_when_they_end() -> None:
    doing = Doing()
    assert str(doing) == ""
    with doing.at("a call"), doing.at(3):
        assert str(doing) == "a call, 3"
    with pytest.raises(ZeroDivisionError), doing.at("a mistake"):
        raise ZeroDivisionError
    assert str(doing) == ""
