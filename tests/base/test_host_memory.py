"""The memory that processes can use, by the files of cgroups."""

import os
from pathlib import Path

import pytest

from realhf.base.host_memory import host_bytes

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "own, limits, expected",
    [
        ("0::/a/b", {"a/b/memory.max": "1000"}, 1000),
        ("0::/a/b", {"a/memory.max": "900", "a/b/memory.max": "max"}, 900),
        ("0::/a/b", {"memory.max": "800"}, 800),  # a container that sees its group as the root
        ("0::/", {"memory.max": "max"}, TOTAL),
        ("3:cpu:/a\n7:memory:/a/b", {"memory/a/b/memory.limit_in_bytes": "700"}, 700),
        ("7:memory:/a", {"memory/memory.limit_in_bytes": "9223372036854771712"}, TOTAL),
        ("", {}, TOTAL),
    ],
)
def test_the_smallest_limit_counts(own: str, limits: dict[str, str], expected: int, tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(own)
    for name, text in limits.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert host_bytes(tmp_path) == expected


def test_this_host() -> None:
    assert 0 < host_bytes() <= TOTAL
