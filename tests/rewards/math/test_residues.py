"""Residue classes in several notations against sets of remainders."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from tests.scaling import examples

moduli = st.integers(2, 12)


@st.composite
def residue_classes(draw: st.DrawFn) -> tuple[int, frozenset[int], str]:
    """Draw a modulus, residues, and one notation of them that says that it is a residue class."""
    modulus = draw(moduli)
    residues = draw(st.lists(st.integers(0, modulus - 1), min_size=1, max_size=3, unique=True))
    shifted = [r + modulus * draw(st.integers(-2, 2)) for r in residues]
    forms = [
        rf"n\equiv {', '.join(map(str, shifted))}\pmod{{{modulus}}}",
        r"\text{ or }".join(rf"n \equiv {r} \pmod {modulus}" for r in shifted),
        rf"{','.join(map(str, shifted))} \bmod {modulus}",
    ]
    if residues == [0]:
        forms += [rf"{modulus}\mid n", f"{modulus} | n", rf"n \text{{ is divisible by }} {modulus}"]
        forms += [rf"\text{{all multiples of }}{modulus}", rf"n\text{{ is a multiple of }}{modulus}"]
    if {2 * r % modulus for r in residues} == {0} and len(residues) == 1 and residues[0]:
        forms += [rf"n\equiv\pm {residues[0]}\pmod{{{modulus}}}"]
    return modulus, frozenset(residues), draw(st.sampled_from(forms))


@given(residue_classes(), residue_classes())
@settings(max_examples=examples(300))
def test_notations(a: tuple[int, frozenset[int], str], b: tuple[int, frozenset[int], str]) -> None:
    period = math.lcm(a[0], b[0])
    first, second = ({n for n in range(period) if n % modulus in residues} for modulus, residues, _ in (a, b))
    assert same_answer(a[2], b[2]) is (first == second)


@given(
    residue_classes(),
    moduli,
    st.integers(-15, 15),
    st.sampled_from("kmt"),
    st.sampled_from(["", r",\ {}\in\mathbb{{Z}}"]),
)
@settings(max_examples=examples(300))
def test_multiples_of_a_parameter(
    stated: tuple[int, frozenset[int], str], factor: int, offset: int, letter: str, domain: str
) -> None:
    modulus, residues, text = stated
    period = math.lcm(modulus, factor)
    same = {n % period for n in range(offset, offset + period * factor, factor)} == {
        n for n in range(period) if n % modulus in residues
    }
    written = f"n={factor}{letter}{offset:+d}" + domain.format(letter) if offset else f"n={factor}{letter}"
    assert same_answer(written, text) is same_answer(text, written) is same


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("n odd", r"n\equiv 1\pmod 2", True),
        ("n even", r"n\equiv 1\pmod 2", False),
        ("odd", "even", False),
        (r"n\equiv 1\pmod 6\text{ and }n\equiv 4\pmod 7", r"n\equiv 1,4\pmod 6", False),
        (r"m\equiv 1\pmod 6", r"n\equiv 1\pmod 6", False),
        (r"4\mid n", "4", False),
        (r"n\mid 4", r"4\mid n", False),
        (r"x\equiv a^2\pmod p", r"x\equiv a\cdot a\pmod p", True),
        (r"x\equiv a^2\pmod p", r"x\equiv a^2\pmod q", False),
        (r"1\pmod{1000000007}", r"1000000008\pmod{1000000007}", True),
        (r"1\pmod{0}", r"2\pmod{0}", False),
    ],
)
def test_other_forms(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same
