"""Asks the OSV database about the pinned versions (pip-audit). Fails for a known vulnerability, not without a network.

python -m tests.audit
"""

import json
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).parents[1] / "constraints.txt"
TIMEOUT_S = 300.0


def verdict(answer: str, errors: str) -> tuple[int, str]:
    """Return exit code and message for the output of pip-audit: JSON, or an error."""
    try:
        found = json.loads(answer)["dependencies"]
    except ValueError:
        why = errors.strip().splitlines()
        return 0, f"NOT AUDITED: the database of vulnerabilities was not reached: {why[-1] if why else 'no answer'}"
    known = [
        f"{pin['name']} {pin['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version'}"
        for pin in found
        for hole in pin.get("vulns", ())
    ]
    passed_over = [pin["name"] for pin in found if "skip_reason" in pin]
    lines = [f"{len(found) - len(passed_over)} pinned versions were asked for, {len(known)} vulnerabilities are known"]
    if passed_over:
        lines.append(f"NOT AUDITED, the database does not know them: {', '.join(passed_over)}")
    return int(bool(known)), "\n".join([*lines, *known])


def main() -> None:
    words = ["pip_audit", "-r", str(PINS), "--no-deps", "--disable-pip", "-s", "osv", "-f", "json", "--timeout", "10"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words, "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        code, text = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        code, text = verdict("", f"no answer within {TIMEOUT_S:.0f} s")
    print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
