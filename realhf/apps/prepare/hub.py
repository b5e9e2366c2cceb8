"""Names on the Hugging Face hub as values of options: resolved once, before planning, to snapshots in the local cache.

Only the launcher downloads. ``plan.json`` maps each name to its snapshot, whose path contains the hash of the commit.
"""

import contextlib
import errno
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import DATA, MODEL, leaves
from realhf.base.data_files import CARD, data_format, select_files, split_selection
from realhf.base.errors import UserError

E = TypeVar("E", bound=ExperimentConfig)
T = TypeVar("T")
KINDS: dict[Any, str] = {MODEL: "model", DATA: "dataset"}
NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@:\s]+))?(?P<selection>(:[^:@\s]*){0,2})")
MODEL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # of the top folder; no pickles, no code
WEIGHTS = ["model*.safetensors", "adapter_model.safetensors"]
CONVERTED = "refs/convert/parquet"  # the branch with the Parquet files that the hub makes of every public dataset
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
           errno.EEXIST, errno.ENAMETOOLONG, errno.EIO}  # fmt: skip
"""Errors of the file system in which the cache is."""
SILENCE = 6
"""Longest silence of the hub, in units of the client's time limit for metadata (``HF_HUB_ETAG_TIMEOUT``, 10 s)."""
RETRY_S = 120.0
"""Time to wait for a hub that limits requests."""
DEFAULT_PAUSE_S = 5.0
"""Pause if the hub names none."""


class HubName(NamedTuple):
    """A name in the option ``key``; ``text`` is how it is recorded."""

    key: str
    kind: str
    name: str

    @property
    def text(self) -> str:
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name


class HubBusyError(Exception):
    """The hub asks for a pause of ``seconds`` before the next request."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class HubSilentError(Exception):
    """The hub has answered no request for a while."""


class AnswerMonitor:
    """Gives every request a time limit, and ends their repetition if the hub answers none. Hooks of the HTTP client."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.waits_since: float | None = None

    def sends(self, request: Any) -> None:
        limits = request.extensions.get("timeout", {})  # some requests of the client switch the client's limit off
        request.extensions["timeout"] = {kind: limit or self.limit_s for kind, limit in limits.items()}
        now = time.monotonic()
        if self.waits_since is None:
            self.waits_since = now
        elif now - self.waits_since >= self.limit_s:
            raise HubSilentError(f"{request.url.host} has not answered for {now - self.waits_since:.0f} s")

    def receives(self, _response: Any) -> None:
        self.waits_since = None


def with_snapshots(experiment: E, pinned: Mapping[str, str] = MappingProxyType({}), weights: bool = True) -> E:
    """Return the experiment with local snapshots as values of the options that are names on the hub.

    ``pinned`` are the snapshots of an earlier launch, which are used again, or downloaded again at the same commit.
    UserError lists the names that cannot be resolved.
    """
    found, problems = dict(experiment.snapshots), []
    for hub_name in hub_names(experiment):
        before = pinned.get(hub_name.text, "")
        if before and os.path.exists(split_selection(before)[0]):
            found[hub_name.text] = before
            continue
        try:
            needs_weights = weights and not hub_name.key.endswith((".config", ".tokenizer"))
            commit = split_selection(os.path.basename(before))[0]
            found[hub_name.text] = _resolve(hub_name.kind, hub_name.name, commit, needs_weights)
        except (ValueError, UserError) as problem:
            what = "folder" if hub_name.kind == "model" else "file"
            problems.append(f"{hub_name.key}={hub_name.name}: there is no such {what}, and {problem}")
    if problems:
        raise UserError(problems)
    return located(experiment, found)


def hub_names(config: ExperimentConfig) -> Iterator[HubName]:
    """Yield the values of options for models and data that are names on the hub: no such file or folder exists."""
    for key, option, value in leaves(config):
        if kind := KINDS.get(option.metadata.get("domain")):
            for text in value if isinstance(value, list) else [value]:
                match = NAME.fullmatch(text or "")
                if match is None or data_format(match["repo"]) or (kind == "model" and match["selection"]):
                    continue
                if not option.metadata["domain"](text):  # a file or folder of that name has priority
                    yield HubName(key, kind, text)


def located(experiment: E, snapshots: Mapping[str, str]) -> E:
    """Return the experiment with the local ``snapshots`` of names as values of options; it keeps the names as texts."""
    names = [name for name in hub_names(experiment) if name.text in snapshots]
    if not names:
        return experiment
    copy, texts = deepcopy(experiment), {(name.key, name.name): snapshots[name.text] for name in names}
    for key in dict.fromkeys(key for key, _ in texts):
        *parents, last = key.split(".")
        parent = reduce(getattr, parents, copy)
        value = getattr(parent, last)
        new = [texts.get((key, v), v) for v in value] if isinstance(value, list) else texts[key, value]
        text = copy.unresolved().get(key, value)
        setattr(parent, last, new)
        copy.interpolations = {**copy.interpolations, key: (text, new)}
    copy.snapshots = dict(snapshots)
    return copy


@cache
def _resolve(kind: str, name: str, commit: str, weights: bool) -> str:
    """Download what a run needs and return its local path; ValueError states why that is impossible."""
    match = NAME.fullmatch(name)
    assert match, "checked by hub_names"
    repo, revision = match["repo"], commit or match["revision"] or "main"
    if kind == "model":
        folder = path = _snapshot(kind, repo, revision, MODEL_FILES + WEIGHTS * weights, ["*/*"])
    else:
        config, split = [*match["selection"].split(":")[1:], "", ""][:2]
        is_fixed = bool(commit or match["revision"])
        folder = _split_snapshot(repo, revision, config, split, fallback="" if is_fixed else CONVERTED)
        path = f"{folder}:{config}:{split or 'train'}"
    if not os.path.isdir(folder):
        raise ValueError(f"the {kind} {repo} on the hub has none of the files {', '.join(MODEL_FILES + WEIGHTS)}")
    print(f"hub     {name}: commit {os.path.basename(folder)}", flush=True)
    return path


def _split_snapshot(repo: str, revision: str, config: str, split: str, fallback: str) -> str:
    """Download the files of a split; from the branch ``fallback`` if the repository has only a loading script."""
    folder = _snapshot("dataset", repo, revision, [CARD])
    names, card = _listing(repo, folder), Path(folder, CARD)
    if fallback and not any(map(data_format, names)):
        return _split_snapshot(repo, fallback, config, split, "")
    try:
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        chosen = select_files(names, text, config, split)
    except ValueError as problem:
        raise ValueError(f"in the dataset {repo} on the hub: {problem}") from problem
    escaped = [re.sub(r"([*?[])", r"[\1]", name) for name in [*chosen, CARD]]
    return _snapshot("dataset", repo, os.path.basename(folder), escaped)


def _listing(repo: str, folder: str) -> list[str]:
    """Return all files of a dataset's commit; those in the cache if the hub does not list them."""
    from huggingface_hub import list_repo_files

    commit = os.path.basename(folder)
    try:
        return requested(partial(list_repo_files, repo, repo_type="dataset", revision=commit), "dataset", repo, commit)
    except ValueError:
        cached = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
        if not any(map(data_format, cached)):
            raise
        return cached


def _snapshot(kind: str, repo: str, revision: str, patterns: list[str], ignore: Sequence[str] = ()) -> str:
    """Download the matching files and return the folder of the commit; the cached one if the hub is unreachable."""
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, repo, repo_type=kind, revision=revision, allow_patterns=patterns,
                       ignore_patterns=list(ignore))  # fmt: skip
    try:
        return requested(download, kind, repo, revision)
    except ValueError as problem:
        if not isinstance(problem.__cause__, HubSilentError):  # the client uses its cache for other failures
            raise
        with contextlib.suppress(Exception):
            return download(local_files_only=True)
        raise


def requested(call: Callable[[], T], kind: str, repo: str, revision: str) -> T:
    """Return the result of a request, repeated while the hub limits requests; ValueError states a problem."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging

    set_client_factory(_client)
    logging.set_verbosity_error()  # its warnings repeat what the error of the last attempt states
    warnings.filterwarnings("ignore", module="huggingface_hub")
    if not sys.stderr.isatty():
        disable_progress_bars()
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return call()
        except HubBusyError as busy:
            if time.monotonic() + busy.seconds > deadline:
                raise ValueError(f"the hub limits requests (429 or 503, retry after {busy.seconds:g} s): repeat the "
                                 "command later, or set HF_TOKEN, which has higher limits") from busy  # fmt: skip
            print(f"hub     {repo}: the hub limits requests, retrying in {busy.seconds:g} s", flush=True)
            time.sleep(busy.seconds)
        except Exception as error:  # of the client, of its HTTP library, and of the file system
            raise ValueError(hub_problem(error, kind, repo, revision)) from error


def _client() -> Any:
    """Return the HTTP client of huggingface_hub, with time limits, and without unlimited waiting for busy hubs."""
    from huggingface_hub import constants
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    monitor = AnswerMonitor(SILENCE * constants.HF_HUB_ETAG_TIMEOUT)
    hooks = client.event_hooks
    client.event_hooks = {"request": [*hooks["request"], monitor.sends],
                          "response": [*hooks["response"], monitor.receives, _raise_if_busy]}  # fmt: skip
    return client


def _raise_if_busy(response: Any) -> None:
    if response.status_code in (429, 503):
        after = response.headers.get("Retry-After", "")
        raise HubBusyError(float(after) if after.isdigit() else DEFAULT_PAUSE_S)


def hub_problem(error: BaseException, kind: str, repo: str, revision: str) -> str:
    """Return one line that states why a request failed and what to do."""
    from huggingface_hub import constants, errors

    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    what = f"the {kind} {repo}"
    status = next((e.response.status_code for e in causes if isinstance(e, errors.HfHubHTTPError)), 0)
    for cause in causes:
        match cause:
            case errors.LocalTokenNotFoundError():
                return "there is no token for the hub: set HF_TOKEN, or run hf auth login"
            case errors.GatedRepoError():
                return f"{what} is gated: accept its terms at {constants.ENDPOINT}/{repo} and set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                return f"{constants.ENDPOINT} has no such {kind}, or a private one: set HF_TOKEN for private ones"
            case errors.RevisionNotFoundError():
                return f"{what} on the hub has no revision '{revision}'"
            case errors.OfflineModeIsEnabled():
                return (f"{what} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids "
                        "downloads: unset it")  # fmt: skip
            case HubSilentError():
                return f"{cause}: repeat the command later, or set HF_ENDPOINT"
            case OSError(errno=int() as number) if number in STORAGE:
                return f"{what} cannot be stored in {constants.HF_HUB_CACHE} ({os.strerror(number)}): set HF_HOME"
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses access to {what} ({status}): set HF_TOKEN to a valid token"
    reason = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split())
    return f"requests to {constants.ENDPOINT} for {what} fail ({reason:.200}); check the network, or set HF_ENDPOINT"
