"""The cores next to a PCI device."""

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def local_cores(domain: int, bus: int, device: int, devices: Path = PCI_DEVICES) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; empty if the system does not know them."""
    file = devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "local_cpulist"
    return parse_cores(file.read_text()) if file.is_file() else set()


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores as in ``/sys``: ``0-2,8`` is 0, 1, 2 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
