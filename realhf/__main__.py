"""``python -m realhf`` is the command ``realhf``."""

import sys

from realhf.apps.main import run

sys.exit(run(sys.argv[1:]))
