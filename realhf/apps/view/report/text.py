"""Texts of the page: characters that HTML or UTF-8 cannot contain, long texts, numbers, durations and sizes."""

import re
from math import isfinite, isnan

UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
CONTROL_PICTURES = 0x2400


def clean(text: str) -> str:
    """Replace characters that a page cannot contain: control characters by their symbols, others by U+FFFD."""
    return UNSAFE.sub(lambda match: _symbol(ord(match[0])), text.replace("\r\n", "\n"))


def _symbol(code: int) -> str:
    return chr(CONTROL_PICTURES + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"


def shortened(text: str, limit: int) -> tuple[str, int]:
    """Return the first characters of a text, and the number of omitted ones."""
    return (text, 0) if len(text) <= limit else (text[:limit], len(text) - limit)


def number_text(value: float) -> str:
    """Format a number with four significant digits, and thousands separators."""
    if not isfinite(value):
        return "NaN" if isnan(value) else "infinite" if value > 0 else "-infinite"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """Format seconds, such as ``3.2 s``, ``4 min 10 s`` or ``2 h 5 min``."""
    if not isfinite(seconds):
        return "unknown"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size_text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
