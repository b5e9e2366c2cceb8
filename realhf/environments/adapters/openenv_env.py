"""Client of an OpenEnv server: one WebSocket session per episode."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.adapters.common import final_turn, observation_turn, optional_library
from realhf.environments.types import Reply, Turn

MAX_MESSAGE_BYTES = 1 << 24
ACTION_TYPES = ("text", "integer", "json")


class OpenEnvClient:
    """An environment of an OpenEnv server at ``base_url``, ``http://...`` or ``ws://...``.

    The reply's text becomes ``action_field`` of the action, as ``action_type``: text, integer, or json (a whole action
    without ``action_field``). ``action`` has constant fields of it. The next turn is ``observation_field`` of the
    observation, or all of its fields, one per line. An action that the server rejects takes a turn, with the
    reward ``invalid_reward``. ``reset`` of a row has arguments of reset. ``timeout`` is in seconds, per request.
    """

    def __init__(
        self,
        base_url: str,
        action_field: str = "message",
        action_type: str = "text",
        action: Mapping[str, Any] | None = None,
        observation_field: str = "",
        invalid_reward: float = -0.1,
        instruction: str = "",
        timeout: float = 30.0,
        chat: bool = True,
    ) -> None:
        scheme, found, address = base_url.rstrip("/").partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if not found or scheme not in schemes:
            raise UserError(f"env.options.base_url={base_url!r} must start with http://, https://, ws:// or wss://")
        if action_type not in ACTION_TYPES:
            raise UserError(f"env.options.action_type={action_type!r} must be one of {', '.join(ACTION_TYPES)}")
        self.url, self.action_field, self.action_type = f"{schemes[scheme]}://{address}/ws", action_field, action_type
        self.action, self.observation_field = dict(action or {}), observation_field
        self.invalid_reward, self.instruction = invalid_reward, instruction
        self.timeout, self.chat = timeout, chat
        self._socket: Any = None
        self._n_invalid = 0

    async def reset(self, row: dict[str, Any], seed: int) -> Turn:
        with optional_library("websockets", "openenv", "OpenEnvClient"):
            from websockets.asyncio.client import connect

        await self.close()
        self._n_invalid = 0
        try:
            self._socket = await connect(self.url, open_timeout=self.timeout, max_size=MAX_MESSAGE_BYTES)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise UserError(
                f"env.options.base_url: no OpenEnv server answers at {self.url}: {error or 'timeout'}"
            ) from error
        answer = await self._ask("reset", {"seed": abs(seed), **(row.get("reset") or {})})
        if answer["type"] != "observation":
            raise RuntimeError(f"the OpenEnv server cannot reset: {answer.get('data')!r:.500}")
        text = self._text(answer["data"])
        return observation_turn(f"{self.instruction}\n{text}" if self.instruction else text, self.chat)

    async def step(self, reply: Reply) -> Turn:
        try:
            action = self._action(reply.text.strip())
        except ValueError:
            return self._invalid(f"This is not a valid action: write {self._expected()}.")
        answer = await self._ask("step", action)
        data = answer["data"]
        if answer["type"] == "error" and data.get("code") == "VALIDATION_ERROR":
            problems = "; ".join(str(one.get("msg", one)) for one in data.get("errors", ()))
            return self._invalid(f"This is not a valid action: {problems or data.get('message')}")
        if answer["type"] != "observation":
            raise RuntimeError(f"the OpenEnv server cannot step: {data!r:.500}")
        turn = final_turn if data.get("done") else observation_turn
        info = {"invalid_actions": self._n_invalid}
        return turn(self._text(data), self.chat, float(data.get("reward") or 0.0), info)

    async def close(self) -> None:
        """End the session; it may be closed twice."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await asyncio.wait_for(socket.close(), self.timeout)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await asyncio.wait_for(self._socket.recv(True), self.timeout))
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise RuntimeError(f"env.options.base_url: {self.url} is no OpenEnv server: it sent {answer!r:.200}")
        return {"type": "", **answer}

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action of a reply; ValueError for an invalid text."""
        if self.action_type == "text":
            return {**self.action, self.action_field: text}
        if self.action_type == "integer":
            if len(text) > 18:
                raise ValueError("no action is as large")
            return {**self.action, self.action_field: int(text)}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("an action is a JSON object")
        return {**self.action, **action}

    def _expected(self) -> str:
        return "an integer" if self.action_type == "integer" else "a JSON object"

    def _invalid(self, text: str) -> Turn:
        self._n_invalid += 1
        return observation_turn(text, self.chat, self.invalid_reward, {"invalid_actions": self._n_invalid})

    def _text(self, data: dict[str, Any]) -> str:
        observation = data.get("observation", {})
        if self.observation_field:
            if self.observation_field not in observation:
                raise UserError(
                    f"env.options.observation_field={self.observation_field!r}: the observation has "
                    f"{', '.join(sorted(observation)) or 'no fields'}"
                )
            return as_text(observation[self.observation_field])
        hidden = ("done", "reward", "metadata")
        shown = {key: value for key, value in observation.items() if key not in hidden and value is not None}
        return "\n".join(f"{key}: {as_text(value)}" for key, value in shown.items())


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
