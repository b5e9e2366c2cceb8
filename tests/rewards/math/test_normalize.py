"""Normal notation of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.math.normalize import is_wrapped, normalize, split_outside, strip_spaces


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" **$x+1$**. ", "x+1"),
        ("\\( \\dfrac12 \\)", "\\frac{1}{2}"),
        ("\\frac1{x}", "\\frac{1}{x}"),
        ("\\left( 1,\\, 2 \\right]", "( 1, 2 ]"),
        ("10{,}000", "10000"),
        ("10\\,000", "10000"),
        ("\\sqrt2 + sqrt(x)", "\\sqrt{2} + \\sqrt{x}"),
        ("5\\text{ m}", '5 "m"'),
        ("5\\mathbf{j}", "5j"),
        ("\\text{(A)}", "(A)"),
        ("x=1 \\text{ or } x=2", "x=1 or x=2"),
        ("45^{\\circ}", '45 "degree"'),
        ("20^\\circ C", '20 "degree celsius"'),
        ("50 percent", "50%"),
        ("\u22125\u00d72", "-5\\times 2"),
        ("x \\leqslant 3", "x \\le 3"),
        ("x**2", "x^2"),
        ("negative 5", "-5"),
        ("0.1\\overline{6}", "\\frac{15}{90}"),
        ("{5}", "5"),
        (".5", ".5"),
        ("n!", "n!"),
    ],
)
def test_normalize(text: str, wanted: str) -> None:
    assert normalize(text) == wanted


@given(st.text(alphabet="\\{}()[]$ .,^_-+/0123456789abcfrtxq\u2212\u00bd", max_size=30))
def test_normal_form_is_ascii(text: str) -> None:
    assert normalize(text).isascii()


def test_spaces_between_digits_are_kept() -> None:
    assert strip_spaces("3 1/3 + x ") == "3 1/3+x"


def test_brackets() -> None:
    assert is_wrapped("(1,(2)]", "([", ")]") and not is_wrapped("(1),(2)", "([", ")]") and not is_wrapped("(", "(", ")")
    assert split_outside("a,(b,c),{d,e}", ",") == ["a", "(b,c)", "{d,e}"]
