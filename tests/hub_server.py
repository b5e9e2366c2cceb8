"""A hub on loopback for the real client: ``python -m tests.hub_server --model ORG/NAME=FOLDER`` prints its address.

It speaks the requests of ``huggingface_hub`` for models and data sets: revisions, trees, files with redirects and
ranges, tokens, creation, and commits with files stored by hash. Failures are set by the attributes of ``Hub``.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(/(?P<what>\w+)(/(?P<rest>.+))?)?")
FILE = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
LFS = (".safetensors", ".parquet", ".gz", ".zst", ".arrow")
USER = "tester"


@dataclass(frozen=True)
class Asked:
    """A request that the hub has received."""

    method: str
    path: str
    range: str
    token: str


@dataclass
class Failure:
    """Answers to requests that match: a status with headers, a connection closed after some bytes, or silence."""

    pattern: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    break_after: int = -1
    stalls: bool = False
    times: int = 1 << 30


@dataclass
class Hub:
    """The repositories by ``models/ORG/NAME`` or ``datasets/ORG/NAME``: branch to commit, and commit to files."""

    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    history: dict[str, set[str]] = field(default_factory=dict)
    blobs: Files = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    """Token that a repository needs."""
    gated: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    tokens: set[str] = field(default_factory=lambda: {"hf_write"})
    url: str = ""
    cdn: str = ""
    """Address of the stored files: another host than the hub's, as with the real one."""

    def add(self, repo: str, files: Files, branch: str = "main") -> str:
        """Commit files to a branch and return the hash."""
        parts = [f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in sorted(files.items())]
        commit = hashlib.sha1("\n".join([repo, *parts]).encode()).hexdigest()
        self.history.setdefault(repo, set()).add(commit)
        self.branches.setdefault(repo, {})[branch] = commit
        self.commits[commit] = dict(files)
        return commit

    def add_folder(self, repo: str, folder: Path, branch: str = "main") -> str:
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return self.add(repo, files, branch)

    def commit_of(self, repo: str, revision: str) -> str | None:
        return self.branches[repo].get(revision, revision if revision in self.history[repo] else None)

    def failure(self, method: str, path: str) -> Failure | None:
        for failure in self.failures:
            if failure.times > 0 and re.search(failure.pattern, f"{method} {path}"):
                failure.times -= 1
                return failure
        return None


@contextlib.contextmanager
def served(hub: Hub, port: int = 0) -> Iterator[Hub]:
    """Serve a hub on loopback in a thread."""
    handler = type("BoundHandler", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    hub.url, hub.cdn = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class HubHandler(BaseHTTPRequestHandler):
    """One connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(self.command, path, self.headers.get("Range") or "", self.token))
        self.broken_after = -1
        if failure := self.hub.failure(self.command, path):
            if failure.stalls:
                time.sleep(3600)
            if failure.status:
                return self._send(failure.status, b"{}", failure.headers)
            self.broken_after = failure.break_after
        if path.startswith("/cdn/"):
            return self._send_file(self.hub.blobs[path.removeprefix("/cdn/")], {})
        if match := FILE.fullmatch(path):
            return self._file(match)
        if self.command in ("POST", "PUT") or path == "/api/whoami-v2":
            return self._write(path)
        if match := API.fullmatch(path):
            return self._info(match)
        self._error(404, "EntryNotFound")

    def _allowed(self, repo: str) -> bool:
        """Answer requests for repositories that are missing, private, gated or renamed."""
        if repo in self.hub.moved:
            old, new = repo.removeprefix("models/"), self.hub.moved[repo].removeprefix("models/")
            self._send(307, b"", {"Location": self.path.replace(old, new, 1)})
        elif repo not in self.hub.branches or self.hub.private.get(repo, self.token) != self.token:
            self._error(401, "RepoNotFound")  # private and missing ones cannot be told apart
        elif repo in self.hub.gated:
            self._error(403, "GatedRepo")
        else:
            return True
        return False

    def _info(self, match: re.Match[str]) -> None:
        repo = f"{match['kind']}/{match['repo']}"
        if not self._allowed(repo):
            return
        revision = match["rest"] or "main"
        commit = self.hub.commit_of(repo, revision)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        files = self.hub.commits[commit]
        if match["what"] == "tree":
            return self._json([self._entry(name, data) for name, data in sorted(files.items())])
        self._json({"id": match["repo"], "modelId": match["repo"], "sha": commit, "private": False, "gated": False,
                    "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                    "siblings": [{"rfilename": name} for name in sorted(files)]})  # fmt: skip

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LFS):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def _file(self, match: re.Match[str]) -> None:
        repo = f"{match['kind'] or 'models/'}{match['repo']}"
        if not self._allowed(repo):
            return
        commit = self.hub.commit_of(repo, match["revision"])
        if commit is None:
            return self._error(404, "RevisionNotFound")
        data = self.hub.commits[commit].get(match["file"])
        if data is None:
            return self._error(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if not match["file"].endswith(LFS):
            return self._send_file(data, headers)
        digest = hashlib.sha256(data).hexdigest()
        self.hub.blobs[digest] = data
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        self._send(302, b"", {**headers, **linked, "Location": f"{self.hub.cdn}/cdn/{digest}"})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {**headers, "Accept-Ranges": "bytes"}
        if not (wanted := self.headers.get("Range")):
            return self._send(200, data, headers)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
        part = data[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(part) - 1
        self._send(206, part, {**headers, "Content-Range": f"bytes {first}-{end}/{len(data)}"})

    def _write(self, path: str) -> None:
        if path.startswith("/lfs/"):
            self.hub.blobs[path.removeprefix("/lfs/")] = self.body
            return self._json({})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.token not in self.hub.tokens:
            return self._error(401, "")
        if path == "/api/whoami-v2":
            return self._json({"type": "user", "name": USER, "orgs": [{"name": "lab"}], "auth": {}})
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        if path == "/api/repos/create":
            return self._create(lines[0])
        if path.endswith(".git/info/lfs/objects/batch"):
            upload = [{**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
                      for o in lines[0]["objects"]]  # fmt: skip
            return self._json({"transfer": "basic", "objects": upload})
        match = API.fullmatch(path)
        if match and match["what"] == "preupload":
            files = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular",
                      "shouldIgnore": False} for f in lines[0]["files"]]  # fmt: skip
            return self._json({"files": files})
        if match and match["what"] == "commit":
            return self._commit(f"{match['kind']}/{match['repo']}", match["rest"], lines)
        self._error(404, "EntryNotFound")

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        exists = f"models/{name}" in self.hub.branches
        if not exists:
            self.hub.add(f"models/{name}", {})
            if asked.get("private"):
                self.hub.private[f"models/{name}"] = self.token
        self._json({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)

    def _commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.commits[self.hub.branches[repo][branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        commit = self.hub.add(repo, files, branch)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit}"})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if 0 <= self.broken_after < len(data):
            data, self.close_connection = data[: self.broken_after], True
        self.wfile.write(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], metavar="ORG/NAME=FOLDER")
    parser.add_argument("--dataset", action="append", default=[], metavar="ORG/NAME=FOLDER")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    hub = Hub()
    for kind, given in (("models", options.model), ("datasets", options.dataset)):
        for name, _, folder in (word.partition("=") for word in given):
            hub.add_folder(f"{kind}/{name}", Path(folder))
    with served(hub, options.port):
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        threading.Event().wait()
