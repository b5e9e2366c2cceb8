"""Comparison of calls with recorded signatures."""

import ast
from collections.abc import Mapping

from tests.signatures.parameters import parsed
from tests.signatures.uses import Arguments, Use

Record = Mapping[str, list[str] | None]
"""The signatures of dotted names in one release: [] if there are none to check, None if the name does not exist."""


def mismatch(use: Use, release: str, record: Record) -> str | None:
    """Return why a release does not have a name or does not accept its arguments, or None."""
    if use.name not in record:
        return f"{use.where}: {use.name} is not recorded for {release}: python -m tests.signatures.record {release}"
    signatures = record[use.name]
    if signatures is None:
        return f"{use.where}: {release} has no {use.name}"
    if use.arguments is None or not signatures:
        return None
    problems = [problem(parsed(one), use.arguments) for one in signatures]
    if None in problems:
        return None
    reasons = "; or ".join(dict.fromkeys(one for one in problems if one))
    return f"{use.where}: {use.name}{use.arguments} in {release}: {reasons}"


def problem(signature: ast.arguments, call: Arguments) -> str | None:
    """Return why a call does not match a signature, or None."""
    positional = [one.arg for one in (*signature.posonlyargs, *signature.args)]
    n_only, n_given = len(signature.posonlyargs), call.n_positional
    if n_given > len(positional) and not signature.vararg:
        return f"takes {len(positional)} positional arguments, {n_given} are given"
    named = {*positional[n_only:], *(one.arg for one in signature.kwonlyargs)}
    for keyword in call.keywords:
        if keyword in positional[:n_given] and keyword in named:
            return f"parameter '{keyword}' is given twice"
        if keyword not in named and not signature.kwarg:
            return f"has no parameter '{keyword}'"
    given = {*positional[:n_given], *call.keywords}
    n_required = len(positional) - len(signature.defaults)
    required = set[str]() if call.more_positional else set(positional[:n_required])
    required |= {
        one.arg for one, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if not default
    }
    if not call.more_keywords and (missing := sorted(required - given)):
        return f"needs parameter '{missing[0]}'"
    return None
