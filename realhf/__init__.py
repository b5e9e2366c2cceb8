"""A distributed dataflow system for RLHF and RL of language models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realhf.api.config import ExperimentConfig

from realhf.base.version import __version__ as __version__


def quickstart(experiment: "type[ExperimentConfig]") -> None:
    """Run the command line for a user's own experiment; call it at the end of the file that defines the class."""
    import inspect
    import sys

    if experiment.__module__ != "__main__":
        return  # the file is being read by the run that it started

    from realhf.apps.main import console

    name = f"{inspect.getfile(experiment)}:{experiment.__name__}"
    console(["quickstart", name, *sys.argv[1:]])
