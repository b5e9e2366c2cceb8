"""``realhf.run`` and ``realhf.plan``: the commands ``quickstart`` and ``plan`` as functions.

A run has the processes and checks of the command line: ``run`` starts ``realhf quickstart`` and follows its files.
"""

import inspect
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import leaves
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.apps.commands.plan import Planned, planned
from realhf.apps.commands.quickstart import read_words
from realhf.apps.function_source import module_source, reference
from realhf.apps.run_handle import STARTED_BY_RUN, Run
from realhf.base.atomic_io import atomic_write
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.experiments import FILE_MODULE, experiment_class

Named = str | type[ExperimentConfig]


def run(experiment: Named, *words: str, wait: bool = True, quiet: bool = False, **options: Any) -> Run:
    """Check and start a run as ``realhf quickstart`` does, and return it.

    Options are nested keywords, ``ppo=dict(group_size=8)``, or words of the command line, ``"ppo.group_size=8"``.
    ``actor="FOLDER"`` is short for ``actor=dict(path="FOLDER")``, as for all sections with a path. ``dataset`` (or its
    ``path`` or ``eval_path``) may be rows: an iterable of mappings of JSON types. ``reward`` may be a function
    ``fn(prompt, answer, row) -> float`` that a script or notebook defines, the value of ``reward.fn``, or a list.

    With ``wait``, return at the end of the run; else after its checks: iterating over the result then yields the
    metrics of each step as they come. With ``quiet``, print nothing (see ``Run.output``).

    Raises ``UserError`` for invalid options (nothing was launched) and ``RunFailed`` for a run that fails.
    """
    if os.environ.get(STARTED_BY_RUN) or getattr(experiment, "__module__", "").startswith(FILE_MODULE):
        raise RuntimeError("realhf.run() in a file that a run loads: call it under if __name__ == '__main__'")
    name = _name(experiment)
    with tempfile.TemporaryDirectory(prefix="realhf-") as folder:
        given = {"trial_name": f"run{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}", **options}
        arguments = [*_config_file(name, given, Path(folder)), *words]
        parsed, paths = _read(name, arguments)
        result = Run(["quickstart", name, *arguments], paths, isinstance(parsed, MultiStageExperiment), quiet)
        result.wait_for_checks()
    return result.wait() if wait else result


def plan(experiment: Named, *words: str, **options: Any) -> Planned:
    """Return what ``realhf plan`` shows: the plan of a run, its predicted step time and memory; launch nothing.

    The arguments are those of ``run``. Raises ``UserError`` for invalid options.
    """
    name = _name(experiment)
    with tempfile.TemporaryDirectory(prefix="realhf-") as folder:
        parsed, _ = _read(name, [*_config_file(name, options, Path(folder)), *words])
        return planned(name, parsed)


def _read(name: str, arguments: list[str]) -> tuple[Experiment, RunDir]:
    """Return the options and the run directory; problems do not mention the temporary file."""
    try:
        return read_words(name, arguments)
    except UserError as error:
        raise UserError(problem.replace(f" ({arguments[1]})", "") for problem in error.problems) from None


def _name(experiment: Named) -> str:
    return experiment if isinstance(experiment, str) else f"{inspect.getfile(experiment)}:{experiment.__name__}"


def _config_file(name: str, options: Mapping[str, Any], folder: Path) -> list[str]:
    """Write options to a file (JSON is YAML), and rows and functions to ``fileroot/inputs``; return the words."""
    inputs = Path(options.get("fileroot") or "runs") / "inputs"
    cls = experiment_class(name)
    known = {key for key, *_ in leaves(cls())}
    tree: dict[str, Any] = {}
    for key, value in _flat(options, known):
        if key not in known and f"{key}.path" in known:
            key = f"{key}.path"
        elif key == "reward":
            key = "reward.fns" if isinstance(value, list | tuple) else "reward.fn"
        tree[key] = _plain(value, inputs, key)
    file = folder / "options.yaml"
    file.write_text(json.dumps(_nested(tree), indent=1))
    return ["--config", str(file)]


def _flat(options: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from _flat(value, known, f"{key}.")
        else:
            yield key, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree


def _plain(value: Any, inputs: Path, key: str) -> Any:
    """Return a value of JSON for an option; functions and rows are written to files in ``inputs``."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int | float | Mapping):
        return value
    if callable(value):
        return reference(value) or f"{_stored(module_source(value), inputs, '.py')}:{value.__name__}"
    if key.startswith("dataset.") and key.endswith("path"):
        return str(_stored(_lines(value, key), inputs, ".jsonl"))
    if isinstance(value, list | tuple):
        return [_plain(item, inputs, key) for item in value]
    raise UserError(f"{key}: expected a value of JSON, got a {type(value).__name__}")


def _lines(rows: Any, key: str) -> str:
    """Return rows in the JSONL format. A pandas data frame is a table of rows."""
    to_dict: Callable[[str], Any] | None = getattr(rows, "to_dict", None) if hasattr(rows, "columns") else None
    try:
        return "".join(json.dumps(dict(row)) + "\n"
                       for row in (to_dict("records") if to_dict else rows))  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: expected rows, an iterable of mappings of JSON types: {error}") from error


def _stored(text: str, inputs: Path, suffix: str) -> Path:
    """Write a file that is named after its content, which a resumed run finds again; return its absolute path."""
    data = text.encode()
    path = inputs.absolute() / f"{sha256(data).hexdigest()[:16]}{suffix}"
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(path, text)
    return path
