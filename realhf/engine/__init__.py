"""Floor 5: backends. Each puts one role's model behind the ``Engine`` protocol; ``ENGINES`` names them."""

from collections.abc import Callable

from realhf.api.config import Backend
from realhf.engine.native import NativeEngine, build_engine

ENGINES: dict[Backend, Callable[..., NativeEngine]] = {Backend.native: build_engine}
