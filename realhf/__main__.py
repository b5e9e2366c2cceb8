"""``python -m realhf`` is the command ``realhf``."""

from realhf.apps.main import console

console()
