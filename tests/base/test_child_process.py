"""Errors of users' code in the formats that carry them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from realhf.base.child_process import describe, error_reply


@given(st.text(st.characters(exclude_categories=[])))  # with surrogates
def test_an_error_has_a_text(text: str) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return text[1:] if text else text[0]

    reply = error_reply(Odd())
    json.dumps(reply, ensure_ascii=False).encode()
    assert describe(Odd()).startswith("Odd: ")
