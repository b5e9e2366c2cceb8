"""Cores next to a PCI device."""

from pathlib import Path

import pytest

from realhf.base.process import local_cores, parse_cores


@pytest.mark.parametrize(
    "text, cores", [("", set()), ("7\n", {7}), ("0-2,8", {0, 1, 2, 8}), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_the_cores_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "0001:c1:0a.0").mkdir()
    (tmp_path / "0001:c1:0a.0" / "local_cpulist").write_text("32-34\n")
    assert local_cores(1, 0xC1, 10, tmp_path) == {32, 33, 34} and local_cores(0, 0xC1, 10, tmp_path) == set()
