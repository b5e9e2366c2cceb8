"""``realhf verifier serve``: scores responses over HTTP, for runs on other machines and for other programs.

``POST /judge?fn=math`` takes ``{"items": [{"prompt", "answer", "row"}, ...]}`` and returns ``{"results": [...]}`` as
described in `realhf.rewards.judge.remote`; ``GET /health`` lists the rewards. Only rewards in option ``fn`` are served.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import resource
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.api.config import RewardConfig
from realhf.api.config.option import COUNT, SECONDS, Range, opt
from realhf.apps.prepare.option_help import options_help
from realhf.apps.prepare.options import read_options
from realhf.base.errors import UserError, did_you_mean
from realhf.base.version import __version__
from realhf.experiments.options.checks import unmet
from realhf.rewards.judge.pool import Judge, judge_once, open_judge
from realhf.rewards.registry import VERIFIERS, check_fn, is_remote, names_of
from realhf.rewards.verdict import Item, Status, Verdict

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

USAGE = "usage: realhf verifier serve [key=value ...]\n\nServes built-in verifiers and reward functions over HTTP.\n"
BODY_TIMEOUT_S = 60.0


@dataclass
class ServeOptions:
    fn: str = opt("math", "comma-separated rewards: math, code, my_file.py:function (requested by the name function)")
    host: str = opt("127.0.0.1", "address to listen on; token_env is required unless it is a loopback address")
    port: int = opt(8320, "port, 0 for any free one", Range(0, 2**16 - 1))
    timeout: float = opt(20.0, "seconds per response", SECONDS)
    test_timeout: float = opt(6.0, "seconds per test of a program (code)", SECONDS)
    processes: int = opt(2, "judge processes per reward", COUNT)
    max_concurrency: int = opt(16, "concurrent responses per judge process of an async def function", COUNT)
    token_env: str = opt("", "environment variable with the bearer token that requests must send")
    max_connections: int = opt(256, "most open connections; a new one replaces the oldest one without a request", COUNT)
    max_client_connections: int = opt(64, "most open connections of one address, likewise", COUNT)
    max_body_mb: float = opt(64.0, "largest request, in MiB", Range(0, 10**6, low_open=True))
    max_items: int = opt(1024, "most responses per request", COUNT)
    wait_s: float = opt(60.0, "seconds a request waits while the judges are busy before it gets status 503", SECONDS)


class Rejected(Exception):
    """An HTTP error status and a message: the answer to a request."""


@dataclass
class ServedReward:
    """One reward; it judges one request at a time."""

    judge: Judge
    lock: threading.Lock

    def results(self, items: list[Item], wait_s: float) -> list[dict[str, object]]:
        """Return a result for each item; Rejected if the judges stay busy."""
        if not self.lock.acquire(timeout=wait_s):
            raise Rejected(503, f"the judges were busy for {wait_s:g} s")
        try:
            return [result_of(verdict) for verdict in judge_once([self.judge], items)[0]]
        finally:
            self.lock.release()


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        print(options_help(ServeOptions))
        print("\nbuilt-in verifiers:")
        for name, verifier in VERIFIERS.items():
            print(f"  {name:<14} {verifier.doc}")
        return
    if not arguments or arguments[0] != "serve":
        raise UserError(USAGE.splitlines()[0])
    serve(read_options(ServeOptions, arguments[1:], option_problems))


def option_problems(options: ServeOptions) -> list[str]:
    fns = options.fn.split(",")
    names, (open_files, _) = names_of(fns), resource.getrlimit(resource.RLIMIT_NOFILE)
    problems = unmet([
        (options.max_client_connections <= options.max_connections
         and (open_files == resource.RLIM_INFINITY or options.max_connections <= open_files // 2),
         f"max_client_connections={options.max_client_connections} must be at most max_connections="
         f"{options.max_connections}, and this at most half of the limit of open files, {open_files} (ulimit -n)"),
        (len(set(names)) == len(names), f"fn={options.fn}: the names {', '.join(names)} must differ"),
        (not any(map(is_remote, fns)), f"fn={options.fn}: a remote service cannot be served again"),
        (options.token_env != "" or is_loopback(options.host),
         f"host={options.host} is not a loopback address; set token_env to a variable with a token"),
        (not options.token_env or bool(os.environ.get(options.token_env)),
         f"token_env={options.token_env}: this environment variable is not set or empty"),
    ])  # fmt: skip
    return problems + [line for fn in fns for line in check_fn(fn)]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServeOptions) -> None:
    """Start and test the judges, then answer requests until interrupted."""
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"this needs the extra 'serve': pip install 'realhf[serve]' ({error})") from None
    from realhf.apps.commands.verifier_connections import limited_connections

    fns = options.fn.split(",")
    config = RewardConfig(timeout=options.timeout, test_timeout=options.test_timeout, processes=options.processes,
                          max_concurrency=options.max_concurrency)  # fmt: skip
    judges = [open_judge(fn, config) for fn in fns]
    served = {name: ServedReward(judge, threading.Lock()) for name, judge in zip(names_of(fns), judges, strict=True)}
    token = os.environ.get(options.token_env, "") if options.token_env else ""
    with contextlib.ExitStack() as stack:
        for judge in judges:
            stack.callback(judge.close)
            judge.self_test()
        listener = stack.enter_context(listen(options.host, options.port))
        app = make_app(served, options, token)
        protocol = limited_connections(options.max_client_connections, options.max_connections)
        settings = uvicorn.Config(app, log_level="error", access_log=False, http=protocol, ws="none")
        host, port = listener.getsockname()[:2]
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"serving {', '.join(served)} on http://{netloc}/judge?fn={next(iter(served))}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; UserError if the address is invalid or in use."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"host={host} port={port}: {error.strerror or error}") from None


def make_app(served: dict[str, ServedReward], options: ServeOptions, token: str) -> "FastAPI":
    """Return the application; requests must send ``token`` unless it is empty."""
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(title="realhf verifier", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Rejected)
    @app.exception_handler(UserError)
    async def failed(request: Request, error: Rejected | UserError) -> JSONResponse:
        status, message = error.args if isinstance(error, Rejected) else (500, str(error))
        return JSONResponse({"error": message}, status)

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"status": "ok", "version": __version__, "rewards": list(served)}

    @app.post("/judge")
    async def judge(request: Request, fn: str = next(iter(served))) -> dict[str, object]:
        check_headers(request, token)
        if fn not in served:
            raise Rejected(404, f"unknown reward '{fn}'; served: {', '.join(served)}{did_you_mean(fn, served)}")
        try:
            body = await asyncio.wait_for(read_body(request, int(options.max_body_mb * 2**20)), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Rejected(408, f"the request did not arrive within {BODY_TIMEOUT_S:g} s") from None
        items = read_items(body, options.max_items)
        return {"results": await run_in_threadpool(served[fn].results, items, options.wait_s)}

    return app


def check_headers(request: "Request", token: str) -> None:
    """Reject requests without the token, and content types that a web page can send without a CORS preflight."""
    authorization = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise Rejected(401, "the request must send the bearer token of this service")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Rejected(415, f"the request must be application/json, not '{content_type}'")


async def read_body(request: "Request", limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Rejected(413, f"the request is larger than {limit} bytes (max_body_mb)")
    return bytes(body)


def read_items(body: bytes, max_items: int) -> list[Item]:
    """Return the items of a request; Rejected if it is invalid."""
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Rejected(400, f"the request is not valid JSON: {error}") from None
    items = request.get("items") if isinstance(request, dict) else None
    if not isinstance(items, list):
        raise Rejected(400, "the request must be an object with a list 'items'")
    if len(items) > max_items:
        raise Rejected(413, f"{len(items)} items, at most {max_items} are allowed (max_items)")
    return [read_item(i, item) for i, item in enumerate(items)]


def read_item(i: int, item: object) -> Item:
    match item:
        case {"answer": str() as answer, **rest}:
            prompt, row = rest.pop("prompt", ""), rest.pop("row", {})
            if isinstance(prompt, str) and isinstance(row, dict) and not rest:
                return prompt, answer, row
    raise Rejected(400, f"items[{i}] must be an object with strings 'answer' and 'prompt' and an object 'row'")


def result_of(verdict: Verdict) -> dict[str, object]:
    match verdict.status:
        case Status.ok:
            return {"score": verdict.score, **({"reason": verdict.detail} if verdict.detail else {})}
        case Status.timeout:
            return {"timeout": True}
    return {"error": verdict.detail}
