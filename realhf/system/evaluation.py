"""An evaluation on held-out rows while it is in progress."""

from collections.abc import Mapping
from pathlib import Path

from realhf.api.messages import State
from realhf.plan.compile.schedule import Action, MasterState, RowsReady
from realhf.plan.run_spec import RunSpec


class Evaluation:
    """The scheduler of an evaluation with the weights after ``step`` steps.

    ``saved`` are models of this step that are complete: roles and folders. They get the results of the evaluation.
    """

    def __init__(self, run: RunSpec, step: int, states: Mapping[str, State]) -> None:
        """``states`` are those of the interfaces after the step."""
        self.step, self.saved = step, list[tuple[str, Path]]()
        self._updated = run.updated_roles
        self._keeps_best = bool(run.config.exp_ctrl.keep_best)
        self._scheduler = MasterState(run.graph.eval_graph, run.plan, run.eval_schedule)
        self._scheduler.states |= {name: states[name] for name in self._scheduler.states.keys() & states.keys()}

    def start(self) -> list[Action]:
        return self._scheduler.start()

    def handle(self, event: RowsReady) -> list[Action]:
        return self._scheduler.handle(event)

    @property
    def is_over(self) -> bool:
        return self._scheduler.is_over

    @property
    def allows_training(self) -> bool:
        """Return True if weights may change, because no further call reads them and they will not be saved.

        Workers execute their calls in order, so calls that have started need not be over.
        """
        return self.is_over or (not self._keeps_best and self._scheduler.has_started(self._updated))
