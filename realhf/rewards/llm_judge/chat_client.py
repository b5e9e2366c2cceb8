"""Requests to an OpenAI-compatible endpoint: concurrent, with deadlines, retries, a cache on disk and a budget."""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cached_property
from math import inf
from typing import Any

import httpx

from realhf.api.config import LLMJudgeConfig
from realhf.base.errors import UserError
from realhf.base.seeds import stable_seed
from realhf.rewards.judge.remote import describe
from realhf.rewards.llm_judge.reply_cache import MAX_TOKENS, ChatReply, ReplyCache, Spending, request_key

MAX_REPLY_BYTES = 4 * 2**20
MAX_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.5  # before the second attempt; each further pause is twice as long, up to MAX_PAUSE_S
RETRIED = (408, 409, 425, 429)  # and all 5xx
MAX_FAILURES_IN_ROW = 16  # of judgements, each with all retries; then a call sends no further requests


class ChatError(Exception):
    """A request has no reply: the endpoint refuses it, or retries or time are used up."""


class TemporaryError(Exception):
    """An attempt has failed; another may succeed after ``pause`` seconds."""

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass
class ChatUsage:
    """What the judgements of a call needed; requests that the cache had answered before are ``cached`` and free."""

    price_in: float
    price_out: float
    requests: int = 0
    cached: int = 0
    retries: int = 0
    failures: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def usd(self) -> float:
        return (self.tokens_in * self.price_in + self.tokens_out * self.price_out) / 1e6


@dataclass
class ChatClient:
    """Sends requests with at most ``max_concurrency`` at a time. Of one event loop: make one for every call.

    A reply is written to the cache and its cost to ``spending`` before it is used. ``usage`` counts a cached reply as
    a request if ``asked_by`` is that of this request: a repeated step of a resumed run has the numbers of the first.
    """

    config: LLMJudgeConfig
    cache: ReplyCache
    spending: Spending
    api_key: str = field(default="", repr=False)
    _pending: dict[str, asyncio.Task[ChatReply]] = field(default_factory=dict)
    _failed_in_row: int = 0

    def __post_init__(self) -> None:
        self.usage = ChatUsage(self.config.price_in, self.config.price_out)

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.config.max_concurrency)

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=self.config.max_concurrency)
        tls = ssl.create_default_context()
        return httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=tls, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def value(self, question: str, read: Callable[[str], float | None], again: str, asked_by: str) -> float:
        """Return what ``read`` finds in the answer; ChatError without a reply, or if no answer has a value.

        An answer without a value is asked for again up to ``retries`` times, with the text ``again`` added, where
        ``{n}`` is the number of the attempt. UserError if the budget is exhausted.
        """
        try:
            value = await self._first_value(question, read, again, asked_by)
        except ChatError:
            self.usage.failures += 1
            self._failed_in_row += 1
            raise
        self._failed_in_row = 0
        return value

    async def _first_value(
        self, question: str, read: Callable[[str], float | None], again: str, asked_by: str
    ) -> float:
        reply = None
        for attempt in range(self.config.retries + 1):
            text = question + (again.replace("{n}", str(attempt + 1)) if attempt else "")
            reply = await self.reply(self._body(text, attempt), asked_by)
            if (value := read(reply.text)) is not None:
                return value
        assert reply is not None
        cut = "; it was cut at reward.judge.max_tokens" if reply.finish == "length" else ""
        raise ChatError(f"no score in {self.config.retries + 1} answers; the last ends with {reply.text[-200:]!r}{cut}")

    def _body(self, text: str, attempt: int) -> dict[str, Any]:
        """Return a request. Endpoints that support seeds give another answer at another attempt."""
        given = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        optional = {name: value for name, value in given.items() if value is not None}
        message = {"role": "user", "content": text}
        return {"model": self.config.model, "messages": [message], "seed": attempt, **optional}

    async def reply(self, body: dict[str, Any], asked_by: str) -> ChatReply:
        """Return the reply to a request; equal requests of one call are sent once."""
        key = request_key(body)
        if (task := self._pending.get(key)) is not None:
            reply = await asyncio.shield(task)
            self.usage.cached += 1
            return reply
        self._pending[key] = task = asyncio.create_task(self._cached_reply(key, body, asked_by))
        reply = await task
        usage = self.usage
        if reply.asked_by != asked_by:
            usage.cached += 1
            return reply
        usage.requests += 1
        usage.retries += reply.retries
        usage.tokens_in += reply.tokens_in
        usage.tokens_out += reply.tokens_out
        return reply

    async def _cached_reply(self, key: str, body: dict[str, Any], asked_by: str) -> ChatReply:
        if (known := self.cache.get(key)) is not None:
            return known
        async with self._slots:
            self._check_budget()
            if self._failed_in_row >= MAX_FAILURES_IN_ROW:
                raise ChatError(f"not sent: {self._failed_in_row} judgements in a row have failed")
            reply = await self._ask(key, json.dumps(body).encode(), asked_by)
        paid = replace(self.usage, tokens_in=reply.tokens_in, tokens_out=reply.tokens_out).usd
        self.spending.add(paid, reply.tokens_in, reply.tokens_out)
        self.cache.put(key, reply)
        return reply

    def _check_budget(self) -> None:
        if self.config.budget is not None and (spent := self.spending.total()) >= self.config.budget:
            raise UserError(f"the judge's requests have cost {spent:.4g} USD, the limit is reward.judge.budget="
                            f"{self.config.budget:g}; to go further, resume the run with a larger one")  # fmt: skip

    async def _ask(self, key: str, content: bytes, asked_by: str) -> ChatReply:
        """Return the reply of the endpoint after up to ``retries`` temporary errors; ChatError without one."""
        config = self.config
        deadline = time.monotonic() + config.timeout * (config.retries + 1)
        for attempt in range(config.retries + 1):
            try:
                return await self._attempt(content, attempt, asked_by)
            except TemporaryError as error:
                pause = max(_backoff(key, attempt), error.pause)
                n = f"{attempt + 1} attempt{'s' if attempt else ''}"
                tried = f"no reply after {n} (reward.judge.retries={config.retries})"
                if attempt == config.retries:
                    raise ChatError(f"{tried}: {error}") from None
                if time.monotonic() + pause >= deadline:
                    raise ChatError(
                        f"{tried}; the next is due in {pause:.0f} s, after the deadline of "
                        f"{config.timeout:g} s (reward.judge.timeout) for each: {error}"
                    ) from None
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, content: bytes, attempt: int, asked_by: str) -> ChatReply:
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        try:
            status, wait, data = await asyncio.wait_for(self._post(url, content), self.config.timeout)
        except asyncio.TimeoutError:
            seconds = f"{self.config.timeout:g} s (reward.judge.timeout)"
            raise TemporaryError(f"no reply from {url} within {seconds}") from None
        except httpx.InvalidURL as error:
            raise ChatError(f"{url}: {error}") from None
        except httpx.HTTPError as error:
            raise TemporaryError(f"{url}: {describe(error)}") from None
        if status == 200:
            return self._read(data, attempt, asked_by)
        message = f"{url}: HTTP status {status}: {self._shown(data)}"
        if status in RETRIED or status >= 500:
            raise TemporaryError(message, wait)
        raise ChatError(message)

    async def _post(self, url: str, content: bytes) -> tuple[int, float, bytes]:
        """Return the status, the seconds of ``Retry-After`` and the body of a reply."""
        data = bytearray()
        async with self._http.stream("POST", url, content=content) as response:
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > MAX_REPLY_BYTES:
                    raise TemporaryError(f"{url}: the reply is longer than {MAX_REPLY_BYTES} bytes")
            return response.status_code, retry_after(response.headers.get("Retry-After", "")), bytes(data)

    def _shown(self, data: bytes) -> str:
        """Return the beginning of a body for a message, without the key."""
        text = data[:2000].decode(errors="replace")
        return (text.replace(self.api_key, "***") if self.api_key else text)[:300]

    def _read(self, data: bytes, retries: int, asked_by: str) -> ChatReply:
        """Return the completion in a body; TemporaryError if it is none, ChatError if its cost is unknown."""
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        match reply:
            case {"choices": [{"message": {"content": str() as text}, **choice}, *_], **others}:
                pass
            case _:
                raise TemporaryError(f"the reply is not a chat completion: {self._shown(data)!r}")
        match others.get("usage"):
            case {"prompt_tokens": int() as tokens_in, "completion_tokens": int() as tokens_out} if (
                0 <= tokens_in <= MAX_TOKENS and 0 <= tokens_out <= MAX_TOKENS
            ):
                pass
            case _ if self.config.price_in or self.config.price_out:
                raise ChatError("the reply has no valid 'usage', so its cost is unknown; without a budget set "
                                "reward.judge.price_in=0 reward.judge.price_out=0")  # fmt: skip
            case _:
                tokens_in = tokens_out = 0
        return ChatReply(text, str(choice.get("finish_reason")), tokens_in, tokens_out, retries, asked_by)


def _backoff(key: str, attempt: int) -> float:
    """Return the seconds before the next attempt: doubled each time, and up to twice as long by the request's key."""
    jitter = stable_seed("pause", key, attempt) / 2.0**63
    return min(FIRST_PAUSE_S * 2.0**attempt, MAX_PAUSE_S) * (1 + jitter)


def retry_after(text: str) -> float:
    """Return the seconds in a header ``Retry-After``, a number or a date; 0 if there is none or it is invalid."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return 0.0
        seconds = (date - datetime.now(date.tzinfo or timezone.utc)).total_seconds() if date.tzinfo else 0.0
    return min(seconds, 10.0**6) if 0 < seconds < inf else 0.0
