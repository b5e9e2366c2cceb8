"""``realhf verifier serve``: the rewards of this machine over HTTP, for runs elsewhere and for other programs.

``POST /judge?fn=math`` takes ``{"items": [{"prompt", "answer", "row"}, ...]}`` and gives ``{"results": [...]}``, as
`realhf.rewards.judge.remote` wants them; ``GET /health`` says what is served. Only the rewards named at the start can be had.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.api.config import RewardConfig, opt
from realhf.apps.prepare.options import options_of, read_options
from realhf.base.errors import UserError, did_you_mean
from realhf.base.version import __version__
from realhf.rewards.judge.pool import Item
from realhf.rewards.registry import Judge, check_fn, is_remote, judge_once, names_of, open_judge
from realhf.rewards.verdict import Status, Verdict

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

USAGE = "usage: realhf verifier serve [key=value ...]\n\nServes math, code and reward functions over HTTP.\n"
CONNECTIONS = 64  # at a time; more are told to come again
BODY_S = 60.0
"""Seconds in which a request must have arrived."""


@dataclass
class ServeOptions:
    """What can be said after ``realhf verifier serve``."""

    fn: str = opt("math", "what to serve, by commas: math, code, my_file.py:function (asked for as function)")
    host: str = opt("127.0.0.1", "address to listen on; one that others reach needs token_env")
    port: int = opt(8320, "port, 0 for any free one")
    timeout: float = opt(10.0, "seconds for one answer")
    processes: int = opt(2, "judge processes per reward")
    max_concurrency: int = opt(16, "answers at a time in one judge process, where the function is async def")
    token_env: str = opt("", "environment variable with the bearer token that requests must show")
    max_body_mb: float = opt(64.0, "largest request")
    max_items: int = opt(1024, "most answers in one request")
    wait_s: float = opt(60.0, "how long a request waits for the judges of another; then it is told to come again")


class Rejected(Exception):
    """A request that gets an HTTP status and a line that says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Served:
    """One reward: its judges answer one request at a time."""

    judge: Judge
    busy: threading.Lock

    def results(self, items: list[Item], wait_s: float) -> list[dict[str, object]]:
        """Return a result for every item; Rejected when the judges do not become free."""
        if not self.busy.acquire(timeout=wait_s):
            raise Rejected(503, f"the judges were busy for {wait_s:g} s")
        try:
            return [result_of(verdict) for verdict in judge_once([self.judge], items)[0]]
        finally:
            self.busy.release()


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        for option in options_of(ServeOptions):
            print(f"  {option.key + ': ' + option.type:<28} {option.help} [{option.default}]")
        return
    if not arguments or arguments[0] != "serve":
        raise UserError(USAGE.splitlines()[0])
    serve(read_options(ServeOptions, arguments[1:], option_problems))


def option_problems(options: ServeOptions) -> list[str]:
    fns = options.fn.split(",")
    names = names_of(fns)
    positive = ("timeout", "processes", "max_concurrency", "max_body_mb", "max_items", "wait_s")
    checks = [
        *((getattr(options, key) > 0, f"{key} must be positive, got {getattr(options, key)}") for key in positive),
        (0 <= options.port < 2**16, f"port must be 0 to 65535, got {options.port}"),
        (len(set(names)) == len(names), f"fn={options.fn}: the names {', '.join(names)} must differ"),
        (not any(map(is_remote, fns)), f"fn={options.fn}: a service of others is not served again"),
        (options.token_env != "" or is_loopback(options.host),
         f"host={options.host} can be reached by others; set token_env to a variable with a token"),
        (not options.token_env or bool(os.environ.get(options.token_env)),
         f"token_env={options.token_env}: there is no such variable in the environment, or it is empty"),
    ]  # fmt: skip
    return [line for holds, line in checks if not holds] + [line for fn in fns for line in check_fn(fn)]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServeOptions) -> None:
    """Start the judges, test them, and answer requests until interrupted."""
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"this needs the extra 'serve': pip install 'realhf[serve]' ({error})") from None
    fns = options.fn.split(",")
    config = RewardConfig(timeout=options.timeout, processes=options.processes, max_concurrency=options.max_concurrency)
    judges = [open_judge(fn, config) for fn in fns]
    served = {name: Served(judge, threading.Lock()) for name, judge in zip(names_of(fns), judges, strict=True)}
    token = os.environ.get(options.token_env, "") if options.token_env else ""
    with contextlib.ExitStack() as stack:
        for one in served.values():
            stack.callback(one.judge.close)
            one.judge.self_test()
        link = stack.enter_context(listen(options.host, options.port))
        app = make_app(served, options, token)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, limit_concurrency=CONNECTIONS)
        host, port = link.getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"serving {', '.join(served)} on http://{where}/judge?fn={next(iter(served))}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[link])


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; UserError where the address cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"host={host} port={port}: {error.strerror or error}") from None


def make_app(served: dict[str, Served], options: ServeOptions, token: str) -> "FastAPI":
    """Return the application; ``token`` is what requests must show, if it is not empty."""
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(title="realhf verifier", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Rejected)
    async def rejected(request: Request, error: Rejected) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status)

    @app.exception_handler(UserError)
    async def broken(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 500)

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"status": "ok", "version": __version__, "rewards": list(served)}

    @app.post("/judge")
    async def judge(request: Request, fn: str = next(iter(served))) -> dict[str, object]:
        check_headers(request, token)
        if fn not in served:
            raise Rejected(404, f"no reward '{fn}' is served here ({', '.join(served)}){did_you_mean(fn, served)}")
        try:
            body = await asyncio.wait_for(read_body(request, int(options.max_body_mb * 2**20)), BODY_S)
        except asyncio.TimeoutError:
            raise Rejected(408, f"the request did not arrive within {BODY_S:g} s") from None
        items = read_items(body, options.max_items)
        return {"results": await run_in_threadpool(served[fn].results, items, options.wait_s)}

    return app


def check_headers(request: "Request", token: str) -> None:
    """Refuse who shows no token, and what a web page could send without asking."""
    shown = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise Rejected(401, "the request must show the bearer token of this service")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Rejected(415, f"the request must be application/json, not '{kind}'")


async def read_body(request: "Request", limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Rejected(413, f"the request is larger than {limit} bytes (max_body_mb)")
    return bytes(body)


def read_items(body: bytes, most: int) -> list[Item]:
    """Return the items of a request; Rejected with what is wrong."""
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Rejected(400, f"the request is no JSON: {error}") from None
    items = request.get("items") if isinstance(request, dict) else None
    if not isinstance(items, list):
        raise Rejected(400, "the request must be an object with a list 'items'")
    if len(items) > most:
        raise Rejected(413, f"{len(items)} items, at most {most} are taken (max_items)")
    return [read_item(i, item) for i, item in enumerate(items)]


def read_item(i: int, item: object) -> Item:
    match item:
        case {"answer": str() as answer, **rest}:
            prompt, row = rest.pop("prompt", ""), rest.pop("row", {})
            if isinstance(prompt, str) and isinstance(row, dict) and not rest:
                return prompt, answer, row
    raise Rejected(400, f"items[{i}] must be an object with texts 'answer' and 'prompt' and an object 'row'")


def result_of(verdict: Verdict) -> dict[str, object]:
    match verdict.status:
        case Status.ok:
            return {"score": verdict.score, **({"reason": verdict.detail} if verdict.detail else {})}
        case Status.timeout:
            return {"timeout": True}
    return {"error": verdict.detail}
