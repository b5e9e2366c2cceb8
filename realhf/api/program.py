"""All the doing, in order: a closed union of instructions. The worker executes them, the simulator prices them."""

from dataclasses import dataclass

from realhf.api.layout import Layout


@dataclass(frozen=True)
class Transfer:
    """Bring the MFC's input rows from where they were produced to the data-parallel heads of ``layout``."""

    keys: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class Reallocate:
    """Fill the role's empty shards in layout ``dst`` from its weights in layout ``src``."""

    role: str
    src: Layout
    dst: Layout


@dataclass(frozen=True)
class Compute:
    """Run the MFC's interface on the engine of ``role`` in ``layout``."""

    mfc: str
    role: str | None
    layout: Layout


@dataclass(frozen=True)
class Release:
    """Free the weights that were borrowed for layout ``dst``."""

    role: str
    dst: Layout


Instruction = Transfer | Reallocate | Compute | Release
Program = dict[str, tuple[Instruction, ...]]
