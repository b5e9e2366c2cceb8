"""Client of a NeMo Gym resources server: its tools between the replies, and its verification at the end."""

import json
import time
from collections.abc import Mapping
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.adapters.common import final_turn
from realhf.environments.types import Reply, ToolCall, Turn

Json = dict[str, Any]
PARAMETERS = "responses_create_params"


class NemoGymEnv:
    """A resources server at ``base_url``. A row is one of its data set, with ``responses_create_params``.

    Reset posts the row to ``/seed_session``. Tool calls of a reply are posted to ``/NAME`` of the tool, and their
    outputs are the next turn. A reply without tool calls, one cut at its length limit, or reply ``max_steps`` ends the
    episode: all outputs are posted to ``/verify``, whose ``reward`` is the reward. With ``done_flag`` a tool's
    output ``{"done": true}`` ends it, too. ``timeout`` is in seconds, per request; ``headers`` are of each request.
    """

    def __init__(
        self,
        base_url: str,
        max_steps: int = 0,
        done_flag: bool = False,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"env.options.base_url={base_url!r} must start with http:// or https://")
        self.base_url, self.max_steps, self.done_flag = base_url.rstrip("/"), max_steps, done_flag
        self.headers, self.timeout = dict(headers or {}), timeout
        self._client: Any = None
        self._row: Json = {}
        self._outputs: list[Json] = []
        self._n_steps = 0

    async def reset(self, row: Json, seed: int) -> Turn:
        import httpx

        parameters = row.get(PARAMETERS)
        if not isinstance(parameters, dict) or "input" not in parameters:
            raise UserError(f"a row for {type(self).__name__} needs {PARAMETERS!r} with 'input'; it has {sorted(row)}")
        await self.close()
        self._client = httpx.AsyncClient(base_url=self.base_url, headers=self.headers, timeout=self.timeout)
        self._row, self._outputs, self._n_steps = row, [], 0
        try:
            await self._post("/seed_session", row)
        except httpx.TransportError as error:
            raise UserError(
                f"env.options.base_url: no resources server answers at {self.base_url}: {error or 'timeout'}"
            ) from error
        tools = tuple(map(chat_tool, parameters.get("tools") or ()))
        return Turn(messages=chat_messages(parameters), tools=tools)

    async def step(self, reply: Reply) -> Turn:
        self._n_steps += 1
        calls = [one for one in reply.tool_calls if not one.error]
        invalid = [one for one in reply.tool_calls if one.error]
        if reply.text or not calls:
            self._outputs.append(self._message(reply))
        messages, done = list[Json](), False
        for call in calls:
            call_id = f"call_{len(self._outputs)}"
            self._outputs.append(function_call(call, call_id))
            output = await self._post_tool(call)
            self._outputs.append({"type": "function_call_output", "call_id": call_id, "output": output})
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call_id, "content": output})
            done |= self.done_flag and is_done(output)
        messages += [{"role": "tool", "name": one.name, "content": f"invalid call: {one.error}"} for one in invalid]
        finished = not messages or reply.stop == "length" or done
        if finished or (self.max_steps and self._n_steps >= self.max_steps):
            return await self._verify()
        return Turn(messages=messages)

    async def close(self) -> None:
        """Close the connection; it may be closed twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _post(self, path: str, body: Json) -> Any:
        """Post JSON with the cookies of the session; RuntimeError for an error of the server."""
        response = await self._client.post(path, json=body)
        if response.is_error:
            raise RuntimeError(f"{self.base_url}{path}: status {response.status_code}: {response.text:.500}")
        return response.json()

    async def _post_tool(self, call: ToolCall) -> str:
        """Return the text of a tool's answer; the model sees an error of the server, as in NeMo Gym's own agent."""
        tools = {tool.get("name") for tool in self._row[PARAMETERS].get("tools") or ()}
        if call.name not in tools:
            return json.dumps({"error": f"there is no tool {call.name!r:.100}"})  # never /verify or another path
        response = await self._client.post(f"/{call.name}", json=call.arguments)
        return str(response.text)

    async def _verify(self) -> Turn:
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": time.time(),
            "model": str(self._row[PARAMETERS].get("model") or "policy"),
            "output": self._outputs,
            "parallel_tool_calls": True,
            "tool_choice": self._row[PARAMETERS].get("tool_choice", "auto"),
            "tools": self._row[PARAMETERS].get("tools") or [],
        }
        answer = await self._post("/verify", {**self._row, "response": response})
        if not isinstance(answer, dict) or "reward" not in answer:
            raise RuntimeError(f"{self.base_url}/verify returned no reward: {answer!r:.200}")
        if answer.get("mask_sample"):
            raise RuntimeError(
                f"{self.base_url}/verify: the reward is not valid: {answer.get('failure_reason')!s:.500}"
            )
        new = {key: value for key, value in answer.items() if key not in self._row and key != "reward"}
        numbers = {key: float(value) for key, value in new.items() if isinstance(value, bool | int | float)}
        return final_turn("", True, float(answer["reward"]), numbers)

    def _message(self, reply: Reply) -> Json:
        content = {"type": "output_text", "text": reply.text, "annotations": []}
        number = len(self._outputs)
        return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed",
                "content": [content]}  # fmt: skip


def function_call(call: ToolCall, call_id: str) -> Json:
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": call.name,
            "arguments": json.dumps(call.arguments), "status": "completed"}  # fmt: skip


def chat_tool(tool: Json) -> Json:
    """Return a tool of the Responses API as one of a chat template."""
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def chat_messages(parameters: Json) -> list[Json]:
    """Return the input of a request as chat messages; UserError for other items than messages."""
    messages = list[Json]()
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    given = parameters["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        content = item.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or "role" not in item:
            raise UserError(f"'{PARAMETERS}.input' has {item!r:.200}; it must be messages with 'role' and 'content'")
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": content})
    return messages


def is_done(output: str) -> bool:
    try:
        parsed = json.loads(output)
    except ValueError:
        return False
    return isinstance(parsed, dict) and bool(parsed.get("done"))
