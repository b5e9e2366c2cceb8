"""An OpenAI-compatible server on loopback, in the process of the environments: an agent's requests become turns.

``/NAME/v1/chat/completions`` and ``/NAME/v1/completions``, whose prompt is token ids, belong to the episode that has
opened ``NAME``; without ``/NAME``, the header ``EPISODE_HEADER`` has it, so that a client can serve many episodes. An
episode has one request at a time: later ones wait until the earlier ones have their replies.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from realhf.base.child_process import clean_text
from realhf.base.errors import UserError
from realhf.environments.types import Reply, Turn, plain_value

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

Json = dict[str, Any]
MODEL = "policy"
EPISODE_HEADER = "X-RealHF-Episode"
MAX_INT = 2**31 - 1
UNSUPPORTED = {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "stop": [], "response_format": {"type": "text"}}
"""Parameters of requests, and the only value they may have; sampling has the options of the run."""
TOO_LONG = {"message": "the episode has reached its limit of turns or tokens", "type": "invalid_request_error",
            "param": None, "code": "context_length_exceeded"}  # fmt: skip


class InvalidRequest(ValueError):
    """A request that is answered with status 400."""


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for a reply; ``tokens`` is the prompt of a completion, None for a chat."""

    body: Json
    tokens: list[int] | None
    reply: asyncio.Future[Json] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def max_tokens(self) -> int | None:
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        return min(limit, MAX_INT) if limit else None


class AgentEndpoint:
    """The requests of one episode, in order of arrival."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: asyncio.Queue[PendingRequest] = asyncio.Queue()
        self._current: PendingRequest | None = None
        self._sent: list[Json] = []  # messages of the model
        self._refusal: Json | None = None

    async def next_turn(self) -> Turn:
        """Wait for the next request whose client still waits, and return it as a turn."""
        while True:
            self._current = await self._waiting.get()
            if not self._current.reply.done():
                return self._turn(self._current)

    def _turn(self, request: PendingRequest) -> Turn:
        if request.tokens is not None:
            return Turn(tokens=request.tokens, whole=True, max_tokens=request.max_tokens)
        messages = tuple(self._known(plain_message(one)) for one in request.body["messages"])
        tools = tuple(request.body.get("tools") or ())
        return Turn(messages=messages, tools=tools, whole=True, max_tokens=request.max_tokens)

    def _known(self, message: Json) -> Json:
        """Return a message of the model as its text, which includes its calls; others as they are."""
        calls = call_values(message)
        for one in self._sent:
            if message["content"] == one["content"] and calls in ([], call_values(one)):
                return {"role": message["role"], "content": message["content"]}
        return message

    def answer(self, reply: Reply) -> None:
        """Send the model's reply to the request of the last turn."""
        request, self._current = self._current, None
        if request is None:
            raise RuntimeError("no request waits for a reply")
        number = len(self._sent)
        message: Json = {"role": "assistant", "content": reply.text}
        calls = [
            {"id": f"call_{number}_{k}", "type": "function",
             "function": {"name": call.name, "arguments": "" if call.error else json.dumps(call.arguments)}}
            for k, call in enumerate(reply.tool_calls) if call.name
        ]  # fmt: skip
        if calls:
            message["tool_calls"] = calls
        self._sent.append(message)
        if not request.reply.done():  # the client may have gone
            request.reply.set_result(response(request, message, reply, f"{self.name}-{number}"))

    def refuse(self, error: Json = TOO_LONG) -> None:
        """Answer this and all later requests with an error of status 400."""
        self._refusal = error
        waiting = [self._current] if self._current else []
        while not self._waiting.empty():
            waiting.append(self._waiting.get_nowait())
        for request in waiting:
            if not request.reply.done():
                request.reply.set_result({"error": error})
        self._current = None

    async def complete(self, body: Json, is_chat: bool) -> Json:
        """Return the response to a request, or ``{"error": ...}``; InvalidRequest."""
        check_request(body, is_chat)
        if self._refusal is not None:
            return {"error": self._refusal}
        request = PendingRequest(body, None if is_chat else body["prompt"])
        self._waiting.put_nowait(request)
        return await request.reply


class EndpointServer:
    """The HTTP server of a process, shared by the episodes of its event loop."""

    def __init__(self) -> None:
        self._endpoints: dict[str, AgentEndpoint] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[str] | None = None

    async def open(self) -> tuple[AgentEndpoint, str]:
        """Return a new endpoint and its base URL."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.set_result(await self._start())
        endpoint = AgentEndpoint(secrets.token_hex(8))
        self._endpoints[endpoint.name] = endpoint
        return endpoint, f"{await self._ready}/{endpoint.name}/v1"

    def close(self, endpoint: AgentEndpoint) -> None:
        endpoint.refuse()
        self._endpoints.pop(endpoint.name, None)

    async def _start(self) -> str:
        try:
            import uvicorn
        except ModuleNotFoundError as error:
            raise UserError("agents need the packages fastapi and uvicorn: pip install 'realhf[serve]'") from error

        class QuietServer(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals belong to the process of the environments

        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        settings = uvicorn.Config(make_app(self._endpoints), log_level="error", access_log=False, ws="none",
                                  lifespan="off", timeout_keep_alive=600)  # fmt: skip
        self._task = asyncio.create_task(QuietServer(settings).serve(sockets=[listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def make_app(endpoints: Mapping[str, AgentEndpoint]) -> "FastAPI":
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse

    app = FastAPI(title="realhf agents", docs_url=None, redoc_url=None, openapi_url=None)

    async def complete(name: str, request: Request, is_chat: bool) -> "Response":
        endpoint = endpoints.get(name)
        if endpoint is None:
            return JSONResponse({"error": {**TOO_LONG, "message": "the episode has ended"}}, 404)
        try:
            body = json.loads(await request.body())
            result = await until_disconnect(request, endpoint.complete(body, is_chat))
        except (ValueError, RecursionError) as error:
            problem = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": problem}, 400)
        if "error" in result:
            return JSONResponse(result, 400)
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(chunks(result, usage), media_type="text/event-stream")
        return JSONResponse(result)

    @app.post("/{name}/v1/chat/completions")
    async def chat(name: str, request: Request) -> "Response":
        return await complete(name, request, is_chat=True)

    @app.post("/v1/chat/completions")
    async def chat_of_header(request: Request) -> "Response":
        return await complete(request.headers.get(EPISODE_HEADER, ""), request, is_chat=True)

    @app.post("/{name}/v1/completions")
    async def completion(name: str, request: Request) -> "Response":
        return await complete(name, request, is_chat=False)

    @app.get("/{name}/v1/models")
    async def models(name: str) -> Json:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "realhf"}]}

    return app


async def until_disconnect(request: "Request", work: Any) -> Json:
    """Return the result of ``work``, which is cancelled if the client goes."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else {"error": TOO_LONG}
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_request(body: Any, is_chat: bool) -> None:
    """Raise InvalidRequest for a body that is no request, or has parameters that change how tokens are sampled."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for key, only in UNSUPPORTED.items():
        if body.get(key) not in (None, only):
            raise InvalidRequest(f"{key}={body[key]!r:.80} is not supported; it must be {only!r}")
    if not isinstance(body.get("stream_options"), dict | None):
        raise InvalidRequest("stream_options must be an object")
    for key in ("max_tokens", "max_completion_tokens"):
        limit = body.get(key)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise InvalidRequest(f"{key} is {limit!r:.80}; it must be an integer >= 1")
    if not is_chat:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t <= MAX_INT for t in prompt):
            raise InvalidRequest("prompt must be a list of token ids; use chat/completions for texts")
        return
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message")
    for message in messages:
        plain_message(message)
    plain_value(messages)
    tools = plain_value(body.get("tools"))
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InvalidRequest("tools must be a list of objects")


def plain_message(message: Any) -> Json:
    """Return a message with a text as its content and without empty fields; InvalidRequest for other contents."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message is an object with a 'role' and a 'content', not {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise InvalidRequest("the parts of a message must be texts")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"the content of a message is {content!r:.80}; it must be a text")
    for call in message.get("tool_calls") or ():
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise InvalidRequest(f"a tool call is {call!r:.80}; it must be an object with a 'function'")
    kept = ("role", "tool_calls", "tool_call_id", "name")
    return {key: message[key] for key in kept if message.get(key)} | {"content": content or ""}


def call_values(message: Json) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's tool calls."""
    values = list[tuple[str, Any]]()
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        values.append((str(call["function"].get("name")), arguments))
    return values


def response(request: PendingRequest, message: Json, reply: Reply, name: str) -> Json:
    """Return the body of a response, with ``logprobs`` and ``token_ids`` if they were requested."""
    wants_logprobs = request.body.get("logprobs") not in (None, False)
    texts = [f"token_id:{token}" for token in reply.tokens]
    extra: Json = {"token_ids": reply.tokens} if request.body.get("return_token_ids") else {}
    calls = "tool_calls" in message
    n, n_prompt = len(reply.tokens), reply.n_prompt_tokens
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
    model = clean_text(str(request.body.get("model") or MODEL))
    whole: Json = {"id": name, "created": int(time.time()), "model": model, "usage": usage}
    if request.tokens is not None:
        logprobs = {"tokens": texts, "token_logprobs": reply.logprobs, "top_logprobs": None, "text_offset": []}
        choice = {"index": 0, "text": reply.text, "finish_reason": reply.stop,
                  "logprobs": logprobs if wants_logprobs else None, **extra}  # fmt: skip
        return {**whole, "object": "text_completion", "choices": [choice]}
    content: list[Json] = [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}
               for text, logprob in zip(texts, reply.logprobs, strict=False)]  # fmt: skip
    reason = "length" if reply.stop == "length" else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason,
              "logprobs": {"content": content} if wants_logprobs else None, **extra}  # fmt: skip
    return {**whole, "object": "chat.completion", "choices": [choice]}


async def chunks(result: Json, with_usage: bool) -> AsyncIterator[str]:
    """Yield a response as the events of a stream: the whole message, and its end."""
    choice = result["choices"][0]
    shared = {key: result[key] for key in ("id", "created", "model")}
    kind = result["object"] if "text" in choice else "chat.completion.chunk"
    first = {key: value for key, value in choice.items() if key != "message"} | {"finish_reason": None}
    if "message" in choice:
        first["delta"] = dict(choice["message"])
        if calls := choice["message"].get("tool_calls"):
            first["delta"]["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
    last: Json = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    last["text" if "text" in choice else "delta"] = "" if "text" in choice else {}
    events: list[Json] = [{"choices": [first]}, {"choices": [last]}]
    if with_usage:
        events.append({"choices": [], "usage": result["usage"]})
    for event in events:
        yield f"data: {json.dumps({**shared, 'object': kind, **event})}\n\n"
    yield "data: [DONE]\n\n"
