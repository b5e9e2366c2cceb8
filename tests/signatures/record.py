"""Records the signatures of functions that the package calls, from the Python files of releases on PyPI.

``python -m tests.signatures.record [PACKAGE==VERSION ...]`` records the named releases, or all of ``targets.RELEASES``.
"""

import json
import sys
from pathlib import Path

from packaging.version import Version

from tests.signatures.archives import make_client, open_release
from tests.signatures.definitions import Definitions
from tests.signatures.targets import CACHED_KERNELS, FOR_LATER, KERNELS, RELEASES, distribution, forbidden_names, uses

RECORD = Path(__file__).with_name("recorded.json")
Records = dict[str, dict[str, dict[str, list[str] | None]]]
"""Signatures by package, version and dotted name."""


def names_of(package: str) -> list[str]:
    """Return the names of a package that are recorded."""
    names = {use.name for use in uses()} | {*forbidden_names(), *KERNELS, *CACHED_KERNELS, *FOR_LATER}
    return sorted(name for name in names if distribution(name) == package)


def read_records() -> Records:
    records: Records = json.loads(RECORD.read_text())
    return records


def write_records(records: Records) -> None:
    """Write the records with one name per line."""
    packages = []
    for package, versions in sorted(records.items()):
        parts = []
        for version, names in sorted(versions.items(), key=lambda one: Version(one[0])):
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(names.items()))
            parts.append(f"{json.dumps(version)}: {{\n{lines}\n}}")
        packages.append(f"{json.dumps(package)}: {{\n" + ",\n".join(parts) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(packages) + "\n}\n")


def main(releases: list[str]) -> None:
    records = read_records() if releases else {}
    wanted = [tuple(one.split("==")) for one in releases]
    wanted = wanted or [(package, version) for package, versions in RELEASES.items() for version in versions]
    with make_client() as client:
        for package, version in wanted:
            print(f"{package}=={version}", flush=True)
            found = Definitions(open_release(client, package, version))
            signatures = {name: found.signatures(name) for name in names_of(package)}
            records.setdefault(package, {})[version] = signatures
    write_records(records)


if __name__ == "__main__":
    main(sys.argv[1:])
