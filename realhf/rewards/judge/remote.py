"""Judges responses by an HTTP service: batches of JSON with a deadline, retried after temporary failures.

A request is ``{"items": [{"prompt": ..., "answer": ..., "row": {...}}, ...]}``, its reply ``{"results": [...]}`` with
``{"score": x}``, ``{"error": text}`` or ``{"timeout": true}`` per item, as served by ``realhf verifier serve``.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from realhf.base.errors import UserError
from realhf.rewards.verdict import Item, Status, Verdict

BATCH = 16  # items per request
MAX_REPLY_BYTES = 16 * 2**20
FIRST_PAUSE_S = 0.2  # before the second attempt; each further pause is twice as long
LATE = "no result within the deadline (reward.timeout for each response)"
RETRIED_STATUSES = (408, 425, 429, 500, 502, 503, 504)


class ServiceError(Exception):
    """The service replied with an error or an invalid reply; retries are used up or pointless."""


@dataclass(frozen=True)
class RemoteJudge:
    """Judges by the service at ``url``, with up to ``connections`` concurrent requests.

    A request of n items has ``timeout`` * n seconds for its first attempt and up to ``retries`` more. The bearer
    ``token`` is sent and never shown. If a request fails or is late, which no response can cause, all its items get an
    error.
    """

    url: str
    timeout: float
    connections: int = 1
    retries: int = 3
    token: str = field(default="", repr=False)

    def spawn(self) -> None:
        """The service runs already."""

    def self_test(self) -> None:
        """Send an empty request; UserError if the service cannot be reached or rejects it."""
        (outcome,) = asyncio.run(self._post_all([[]]))
        if isinstance(outcome, Exception):
            raise UserError(f"reward.fn={self.url!r}: {describe(outcome)}")

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """Return the verdicts on the items, in order."""
        batches = [items[i : i + BATCH] for i in range(0, len(items), BATCH)]
        verdicts: list[Verdict] = []
        for batch, outcome in zip(batches, asyncio.run(self._post_all(batches)), strict=True):
            if isinstance(outcome, Exception):
                verdicts += [Verdict(0.0, Status.error, f"{self.url}: {describe(outcome)}")] * len(batch)
            else:
                verdicts += map(read_verdict, outcome)
        return verdicts

    def close(self) -> None:
        """Do nothing: connections are closed after each call."""

    async def _post_all(self, batches: Sequence[Sequence[Item]]) -> list[list | Exception]:
        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        if self.token:
            headers[b"Authorization"] = f"Bearer {self.token}".encode("latin-1")
        slots = asyncio.Semaphore(self.connections)
        limits = httpx.Limits(max_keepalive_connections=0)
        tls = ssl.create_default_context()
        client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=tls, trust_env=False)
        async with client:

            async def post(batch: Sequence[Item]) -> list | Exception:
                seconds = self.timeout * max(len(batch), 1)
                async with slots:
                    try:
                        return await asyncio.wait_for(self._results(client, batch, time.monotonic() + seconds), seconds)
                    except asyncio.TimeoutError:
                        return TimeoutError(LATE)
                    except (httpx.HTTPError, httpx.InvalidURL, ServiceError) as error:
                        return error

            return await asyncio.gather(*map(post, batches))

    async def _results(self, client: httpx.AsyncClient, items: Sequence[Item], deadline: float) -> list:
        """Return one result per item; network errors and RETRIED_STATUSES are retried while time is left."""
        body = json.dumps({"items": [{"prompt": p, "answer": a, "row": row} for p, a, row in items]}).encode()
        for attempt in range(self.retries + 1):
            pause = FIRST_PAUSE_S * 2**attempt
            try:
                status, reply = await self._post(client, body)
            except httpx.HTTPError:
                if attempt == self.retries or time.monotonic() + pause >= deadline:
                    raise
            else:
                if status == 200:
                    return check_results(reply, len(items))
                if status not in RETRIED_STATUSES or attempt == self.retries:
                    raise ServiceError(f"HTTP status {status}: {reply[:300].decode(errors='replace')}")
                if time.monotonic() + pause >= deadline:
                    raise asyncio.TimeoutError
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> tuple[int, bytes]:
        reply = bytearray()
        async with client.stream("POST", self.url, content=body) as response:
            async for chunk in response.aiter_raw():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    raise ServiceError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
            return response.status_code, bytes(reply)


def check_results(reply: bytes, count: int) -> list:
    """Return the results in a reply; ServiceError unless there are exactly ``count``."""
    try:
        results = json.loads(reply)["results"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = reply[:200].decode(errors="replace")
        raise ServiceError(f"the reply is not a JSON object with 'results': {text!r}") from None
    if not isinstance(results, list) or len(results) != count:
        raise ServiceError(f"'results' must be a list of {count}, got {results!r:.200}")
    return results


def read_verdict(result: object) -> Verdict:
    """Return the verdict in one of the results; an invalid result is an error."""
    match result:
        case {"score": bool()}:
            pass
        case {"score": int() | float() as score, **others} if abs(score) < 1e300:
            return Verdict(float(score), Status.ok, str(others.get("reason", ""))[:1000])
        case {"timeout": _}:
            return Verdict(0.0, Status.timeout, "the service reported a timeout for this response")
        case {"error": str() as text}:
            return Verdict(0.0, Status.error, text[:1000])
    return Verdict(0.0, Status.error, f"the service's result {result!r:.200} has no finite 'score'")


def describe(error: Exception) -> str:
    """Return the message of an error, for a network error that of the OSError that caused it."""
    if isinstance(error, ServiceError | TimeoutError):
        return str(error)
    root, cause = error, error.__cause__ or error.__context__
    while isinstance(cause, Exception):
        root = cause if isinstance(cause, OSError) else root
        cause = cause.__cause__ or cause.__context__
    return f"{type(root).__name__}: {root}"
