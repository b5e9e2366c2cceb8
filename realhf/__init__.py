"""A distributed dataflow system for RLHF and RL of language models."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from realhf.base.version import __version__ as __version__

if TYPE_CHECKING:
    from realhf.api.config import ExperimentConfig
    from realhf.apps.python_api import plan as plan
    from realhf.apps.python_api import run as run
else:
    from realhf import plan

    class _Planner(ModuleType):
        """The package ``realhf.plan``, which can be called as the function of the same name."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            from realhf.apps import python_api

            return python_api.plan(*args, **options)

    plan.__class__ = _Planner


def __getattr__(name: str) -> Any:
    """Import ``run`` on demand, which keeps the command line fast."""
    if name != "run":
        raise AttributeError(f"module 'realhf' has no attribute '{name}'")
    from realhf.apps.python_api import run

    return run


def quickstart(experiment: "type[ExperimentConfig]") -> None:
    """Run the command line for a user's own experiment; call it at the end of the file that defines the class."""
    import inspect
    import sys

    if experiment.__module__ != "__main__":
        return  # the file is being read by the run that it started

    from realhf.apps.main import console

    name = f"{inspect.getfile(experiment)}:{experiment.__name__}"
    console(["quickstart", name, *sys.argv[1:]])
