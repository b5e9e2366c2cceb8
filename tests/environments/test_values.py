"""Values of turns in the formats that carry them."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.environments.types import MAX_DEPTH, plain_value

TEXTS = st.text(st.characters(exclude_categories=[]))  # with surrogates
SCALARS = st.none() | st.booleans() | st.floats() | TEXTS | st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(SCALARS, lambda of: st.lists(of) | st.dictionaries(TEXTS, of) | st.tuples(of), max_leaves=20)


@given(VALUES)
def test_a_plain_value_is_one_of_all_formats(value: Any) -> None:
    plain = plain_value(value)
    text = json.dumps(plain, ensure_ascii=False).encode()
    assert plain_value(plain) == plain or "NaN" in text.decode()
    msgspec.msgpack.encode(plain)


@given(st.integers().filter(lambda n: not -(2**63) <= n < 2**63) | st.binary() | st.sets(st.integers()))
def test_other_values_are_refused(value: Any) -> None:
    for one in (value, [value], {"a": [value]}):
        with pytest.raises((TypeError, ValueError), match=r"bits is too large|no JSON value"):
            plain_value(one)


def test_the_depth_is_limited() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    plain_value(value)
    with pytest.raises(ValueError, match="nested more than"):
        plain_value([value])
