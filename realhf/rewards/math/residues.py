r"""Parses residue classes: ``n\equiv 1,4\pmod{6}``, ``4\mid n``, ``multiples of 4``, ``n=4k+1``, ``odd``."""

import math
import re
from dataclasses import dataclass

from realhf.rewards.math.normalize import split_outside

PARAMETERS = frozenset("jklmnpqrt")
MAX_MODULUS = 10_000  # of residues that are listed
INTEGER = re.compile(r"-?\d{1,300}")
OR = re.compile(r'\\lor(?![a-z])|,?\s*"?\s*\bor\b\s*"?')
CONGRUENCE = re.compile(r"(?:([a-zA-Z])\s*\\equiv(?![a-z])\s*)?([^\\].*?|\\pm\s*\d+)\s*\\pmod\{(\w+)\},?", re.DOTALL)
DIVISIBLE = re.compile(
    r"(?:(?P<divisor>\d+)\s*(?:\\mid(?![a-z])|\||\bdivides\b)\s*(?P<name>[a-z])"
    r'|(?:(?P<name_>[a-z])?\s*"?\s*(?:is\s+)?(?:a\s+|all\s+)?'
    r'(?:divisible\s+by|(?:positive\s+)?multiples?\s+of)\s*"?\s*(?P<divisor_>\d+)))'
)
PARITY = re.compile(
    r'(?:(?:all|every)\s+)?([a-z])?\s*"?\s*(?:is\s+)?(odd|even)\s*"?\s*(?:numbers?|integers?)?\s*([a-z])?'
)
MULTIPLE = re.compile(r"([a-z])\s*=\s*(?:(\d+)\s*([a-z])\s*(?:([+-])\s*(\d+))?|(\d+)\s*\+\s*(\d+)\s*([a-z]))")

MEMBERS = re.compile(r"^\\\{([^{}|:]+)(?:\\mid(?![a-z])|[|:])\s*[a-z]\s*\\in\s*\\mathbb\s*\{?\s*Z\s*\}?\s*\\\}$")


@dataclass(frozen=True)
class Residues:
    """Residues with their moduli, as text.

    ``is_stated`` is false for ``odd``, which may also describe a function, and ``n=4k+1``, which may be a line. The
    latter has a parameter, k.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    is_stated: bool = True
    parameter: str = ""


def parse_residues(text: str) -> Residues | None:
    """Return the residue classes in a text in normal notation, or None."""
    if (divisible := DIVISIBLE.fullmatch(text)) is not None:
        divisor = divisible["divisor"] or divisible["divisor_"]
        return Residues(divisible["name"] or divisible["name_"] or "", (("0", divisor),))
    if (parity := PARITY.fullmatch(text)) is not None:
        return Residues(parity[1] or parity[3] or "", (("1" if parity[2] == "odd" else "0", "2"),), is_stated=False)
    text = MEMBERS.sub(r"n=\1", text)
    if (multiple := MULTIPLE.fullmatch(text)) is not None:
        name, factor, parameter, sign, offset, first, second, last = multiple.groups()
        residue = first or (sign or "").replace("+", "") + (offset or "0")
        return Residues(name, ((residue, factor or second),), is_stated=False, parameter=parameter or last)
    names, pairs = set(), []
    for part in OR.split(text) if text.count("\\pmod") > 1 else [text]:
        if (match := CONGRUENCE.fullmatch(part.strip())) is None or "\\equiv" in match[2]:
            return None
        names |= {match[1]} - {None}
        for residue in split_outside(OR.sub(",", match[2]), ","):
            pairs += [
                (residue.replace("\\pm", sign).replace(" ", ""), match[3])
                for sign in ("", "-")[: 1 + ("\\pm" in residue)]
            ]
    return Residues("".join(names), tuple(pairs)) if len(names) < 2 else None


def integer_residues(classes: Residues, modulus: int) -> frozenset[int] | None:
    """Return the residues modulo a multiple of the moduli; None if they are not integers or too many."""
    if not all(INTEGER.fullmatch(text) for pair in classes.pairs for text in pair):
        return None
    pairs = [(int(residue), int(own)) for residue, own in classes.pairs]
    if any(own == 0 or (own != modulus and modulus > MAX_MODULUS) for _, own in pairs):
        return None
    return frozenset(value for residue, own in pairs for value in range(residue % own, modulus, own))


def common_modulus(*classes: Residues) -> int:
    """Return the least common multiple of the moduli that are positive integers."""
    moduli = [modulus for each in classes for _, modulus in each.pairs]
    return math.lcm(*(int(modulus) for modulus in moduli if INTEGER.fullmatch(modulus) and int(modulus) > 0))
