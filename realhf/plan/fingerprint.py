"""What determines the numbers of a run besides its options: code and files, as digests that a checkpoint records."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from realhf.api.experiment import Experiment, RoleSpec
from realhf.api.graph import Graph
from realhf.base.atomic_io import sha256
from realhf.base.data_files import data_files
from realhf.base.version import __version__
from realhf.plan.learning_rate import learning_rate

Fingerprint = dict[str, dict[str, str]]
"""The digest of every file, or the version of every package, by part."""
LR_SCHEDULE = "lr_schedule"
ACCEPTABLE = ("code", "data", "eval_data", "reward_file", "models", LR_SCHEDULE)
"""Values of ``resume.accept``: the parts, and changes of the learning-rate curve."""
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "math-verify", "latex2sympy2-extended", "vllm")
SOURCE = Path(__file__).parents[1]
USER_FILE = re.compile(r"(.+\.py):\w+")
TEXT_FILE = re.compile(r"/.+\.(?:txt|md)")  # of an option in an interface, such as reward.judge.prompt
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")  # of a model folder: weights, config, tokenizer
BLOCK, N_BLOCKS = 1 << 20, 64
N_NAMED = 3  # changed files that a message names


def take_fingerprint(name: str, experiment: Experiment, graph: Graph, roles: Mapping[str, RoleSpec]) -> Fingerprint:
    """Return the digests of code, data, reward files and models; that of a missing file is empty."""
    mfcs = (*graph.mfcs, *graph.evaluation)
    code = {f"realhf/{path.relative_to(SOURCE).as_posix()}": sha256(path)
            for path in sorted(SOURCE.rglob("*")) if path.suffix in (".py", ".so")}  # fmt: skip
    packages = {"realhf": __version__} | {package: _version(package) for package in PACKAGES}
    sources = {source for role in roles.values() for source in
               (role.spec.path, role.spec.config, role.spec.tokenizer, role.spec.lora.init_from) if source}  # fmt: skip
    data, texts = experiment.dataset, [text for mfc in mfcs for text in _strings(mfc.interface.config)]
    return {
        "code": packages | code | _user_files([name, *(mfc.interface.name for mfc in mfcs)]),
        "data": _sources(data.sources),
        "eval_data": _data("dataset.eval_path", data.eval_path) if data.eval_path else {},
        "reward_file": _user_files(texts) | {text: _digest(Path(text)) for text in texts if TEXT_FILE.fullmatch(text)},
        "models": {
            str(Path(experiment.portable(source), file.relative_to(source))): sampled_sha256(file)
            for source in sorted(sources)
            for file in _model_files(Path(source))
        },
    }


def fingerprint_changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """Return the parts that differ, and a description of each difference."""
    changes = {}
    for part in sorted({*before, *now}):
        old, new = before.get(part, {}), now.get(part, {})
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if names:
            shown = (f"{n}: {_short(old.get(n))} at the checkpoint, {_short(new.get(n))} now" for n in names[:N_NAMED])
            more = f"; and {len(names) - N_NAMED} more files" if len(names) > N_NAMED else ""
            changes[part] = f"{part} has changed ({'; '.join(shown)}{more})"
    return changes


def lr_changes(roles: Mapping[str, RoleSpec], step: int, before: int, now: int) -> list[str]:
    """Return the roles whose learning rate after ``step`` steps differs between ``before`` and ``now`` steps in all."""
    steps = range(step, max(before, now))
    return [
        f"{role} ({role_spec.spec.optimizer.lr_scheduler_type.value})"
        for role, role_spec in roles.items()
        if any(
            learning_rate(role_spec.spec.optimizer, s, before) != learning_rate(role_spec.spec.optimizer, s, now)
            for s in steps
        )  # fmt: skip
    ]


def sampled_sha256(path: Path) -> str:
    """Return the SHA-256 of size and content; of a file above 64 MiB, of 64 blocks of 1 MiB at equal distances.

    Training changes every tensor, and so every block. Reading all weights at every launch would take minutes.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, max(BLOCK, size // N_BLOCKS)):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _data(option: str, path: str) -> dict[str, str]:
    """Return the digests of the files of a data path; without a folder, the only one has the name of the option."""
    try:
        files = data_files(path)
    except ValueError:
        files = []
    return {option if len(files) < 2 else f"{option}/{file.name}": _digest(file) for file in files or [Path(path)]}


def _sources(paths: Sequence[str]) -> dict[str, str]:
    if len(paths) == 1:
        return _data("dataset.path", paths[0])
    numbered = (_data(f"dataset.paths.{i}", path) for i, path in enumerate(paths))
    return {key: digest for one in numbered for key, digest in one.items()}


def _digest(path: Path) -> str:
    return sha256(path) if path.is_file() else ""


def _short(digest: str | None) -> str:
    return (digest or "missing")[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _model_files(source: Path) -> Sequence[Path]:
    if source.is_dir():
        return sorted(path for path in source.iterdir() if path.suffix in MODEL_FILES and path.is_file())
    return [source] if source.is_file() else []


def _user_files(names: Iterator[str] | Sequence[str]) -> dict[str, str]:
    """Return the digests of the files in ``file.py:name``, and of the modules beside them that they import."""
    files = {Path(match[1]) for name in names if (match := USER_FILE.fullmatch(name))}
    return {str(path): _digest(path) for file in sorted(files) for path in (file, *_imported(file))}


def _imported(file: Path) -> list[Path]:
    """Return the modules of a file's folder that it imports, directly or indirectly."""
    finder = ModuleFinder([str(file.parent)], excludes=["realhf"])
    try:
        finder.run_script(str(file))
    except (OSError, SyntaxError, ValueError):  # reported when the file is loaded
        return []
    modules = (vars(module)["__file__"] for module in finder.modules.values())
    return sorted(Path(path) for path in modules if path)  # None: a package without __init__.py


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _strings(value)
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from _strings(value)
