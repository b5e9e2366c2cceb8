"""The instructions of a program. Workers execute them; the simulator prices them."""

from dataclasses import dataclass

from realhf.api.layout import Layout


@dataclass(frozen=True)
class Transfer:
    """Send the MFC's input rows from their producers to the data-parallel heads of ``layout``."""

    keys: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class Reallocate:
    """Copy the weights of ``role`` in layout ``src`` to ``target`` in layout ``dst``.

    For ``eta`` < 1 the target becomes the moving average eta * source + (1 - eta) * target.
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
    """Free the temporary copy of the weights in layout ``dst``."""

    role: str
    dst: Layout


@dataclass(frozen=True)
class Load:
    """Load a role's offloaded weights from host memory."""

    role: str
    layout: Layout


@dataclass(frozen=True)
class Offload:
    """Move a role's weights to host memory."""

    role: str
    layout: Layout


Instruction = Transfer | Reallocate | Compute | Release | Load | Offload
Program = dict[str, tuple[Instruction, ...]]
