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
    """Bring the weights of ``role`` in layout ``src`` to ``target`` in layout ``dst``.

    With ``eta`` 1 the target is overwritten; below, it moves towards the source: eta * source + (1 - eta) * target.
    """

    role: str
    src: Layout
    target: str
    dst: Layout
    eta: float = 1.0


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


@dataclass(frozen=True)
class Load:
    """Bring a role's weights back from host memory."""

    role: str
    layout: Layout


@dataclass(frozen=True)
class Offload:
    """Move a role's weights to host memory and free the device's."""

    role: str
    layout: Layout


Instruction = Transfer | Reallocate | Compute | Release | Load | Offload
Program = dict[str, tuple[Instruction, ...]]
