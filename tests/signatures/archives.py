"""Python files inside wheels and source archives on PyPI. A wheel is read by HTTP range requests, never as a whole."""

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import httpx

INDEX = "https://pypi.org/simple/{}/"
INDEX_TYPE = "application/vnd.pypi.simple.v1+json"
BLOCK = 1 << 17
MAX_SDIST_BYTES = 20 << 20
ATTEMPTS = 3
WHEEL_TAGS = re.compile(r"-(cp312-cp312|cp\d+-abi3)-manylinux\w*_x86_64.*\.whl$|-none-any\.whl$")

MOVED = {"hopper/flash_attn_interface.py": "flash_attn_interface.py"}
"""Files that a source archive has elsewhere than an installation. This one is the module of FlashAttention 3."""

Sources = Mapping[str, Callable[[], str]]
"""Paths of Python files in an archive, relative to the folder of packages, and functions that read them."""


class RemoteFile(io.RawIOBase):
    """A file on a server as a seekable stream. Blocks that were read are kept."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.client, self.url, self.position = client, url, 0
        self.size = int(client.head(url).raise_for_status().headers["content-length"])
        self.blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start, end = self.position, min(self.size, self.position + len(buffer))
        if start >= end:
            return 0
        first, last = start // BLOCK, (end - 1) // BLOCK
        missing = [index for index in range(first, last + 1) if index not in self.blocks]
        if missing:
            self._fetch(missing[0], missing[-1])
        whole = b"".join(self.blocks[index] for index in range(first, last + 1))
        buffer[: end - start] = whole[start - first * BLOCK : end - first * BLOCK]
        self.position = end
        return end - start

    def _fetch(self, first: int, last: int) -> None:
        start, end = first * BLOCK, min(self.size, (last + 1) * BLOCK)
        reply = self.client.get(self.url, headers={"Range": f"bytes={start}-{end - 1}"})
        if reply.status_code != httpx.codes.PARTIAL_CONTENT:
            raise httpx.HTTPError(f"{self.url}: status {reply.status_code} for a range request")
        for index in range(first, last + 1):
            offset = (index - first) * BLOCK
            self.blocks[index] = reply.content[offset : offset + BLOCK]


def make_client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=60, transport=httpx.HTTPTransport(retries=ATTEMPTS))


def open_release(client: httpx.Client, package: str, version: str) -> Sources:
    """Return the Python files of a release: of its wheel for Python 3.12 on x86-64 Linux, or else of its sdist."""
    reply = client.get(INDEX.format(package), headers={"Accept": INDEX_TYPE}).raise_for_status()
    prefix = f"{package.replace('-', '_')}-{version}"
    files = {file["filename"]: file["url"] for file in reply.json()["files"] if file["filename"].startswith(prefix)}
    for name, url in sorted(files.items()):
        if name.startswith(f"{prefix}-") and WHEEL_TAGS.search(name):
            return wheel_sources(RemoteFile(client, url))
    for name, url in files.items():
        if name == f"{prefix}.tar.gz":
            return sdist_sources(client, url)
    raise ValueError(f"{package}=={version} has no wheel for Python 3.12 on x86-64 Linux and no sdist on PyPI")


def is_source(path: str) -> bool:
    return path.endswith((".py", ".pyi"))


def wheel_sources(stream: io.RawIOBase) -> Sources:
    archive = zipfile.ZipFile(stream)  # type: ignore[arg-type]

    def reader(path: str) -> Callable[[], str]:
        return lambda: archive.read(path).decode()

    return {path: reader(path) for path in archive.namelist() if is_source(path)}


def sdist_sources(client: httpx.Client, url: str) -> Sources:
    size = int(client.head(url).raise_for_status().headers["content-length"])
    if size > MAX_SDIST_BYTES:
        raise ValueError(f"{url} has {size >> 20} MiB, more than {MAX_SDIST_BYTES >> 20}")
    data = client.get(url).raise_for_status().content
    texts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if is_source(member.name) and (file := archive.extractfile(member)):
                path = str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
                texts[MOVED.get(path, path)] = file.read()
    return {path: text.decode for path, text in texts.items()}
