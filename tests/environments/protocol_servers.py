"""A server for the tests with the published protocols of OpenEnv and NeMo Gym; it writes its port to stdout."""

import json
import socket
from itertools import count
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket

app = FastAPI()
sessions: dict[str, dict[str, Any]] = {}
numbers = count()


@app.websocket("/ws")
async def openenv(websocket: WebSocket) -> None:
    """Guess a number from 0 to 9 that comes from the seed."""
    await websocket.accept()
    secret, data = 0, {}
    async for text in websocket.iter_text():
        request = json.loads(text)
        data = request["data"]
        answer: dict[str, Any] = {"type": "observation"}
        if request["type"] == "reset":
            secret = data["seed"] % 10
            answer["data"] = {"observation": {"hint": "guess", "range": [0, 9]}, "reward": None, "done": False}
        elif not isinstance(data.get("guess"), int) or not 0 <= data["guess"] <= 9:
            problem = {"msg": "guess must be from 0 to 9"}
            answer = {
                "type": "error",
                "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [problem]},
            }
        elif data["guess"] == 9:
            answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "the game is broken"}}
        else:
            right = data["guess"] == secret
            observation = {"hint": "right" if right else "wrong", "range": [0, 9]}
            answer["data"] = {"observation": observation, "reward": 1.0 if right else -0.5, "done": right}
        await websocket.send_text(json.dumps(answer))


@app.post("/seed_session")
async def seed_session(body: dict[str, Any], response: Response) -> dict[str, Any]:
    name = str(next(numbers))
    sessions[name] = {"values": body["values"], "calls": 0}
    response.set_cookie("session", name)
    return {}


@app.post("/lookup")
async def lookup(body: dict[str, Any], request: Request, response: Response) -> dict[str, Any]:
    session = sessions[request.cookies["session"]]
    session["calls"] += 1
    if body.get("key") not in session["values"]:
        response.status_code = 422
        return {"error": "no such key"}
    return {"value": session["values"][body["key"]], "done": session["calls"] == 3}


@app.post("/verify")
async def verify(body: dict[str, Any], request: Request) -> dict[str, Any]:
    session, output = sessions.pop(request.cookies["session"]), body["response"]["output"]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    outputs = [item for item in output if item["type"] == "function_call_output"]
    calls = [item for item in output if item["type"] == "function_call"]
    assert [one["call_id"] for one in calls] == [one["call_id"] for one in outputs]
    right = bool(texts) and texts[-1] == body["expected"]
    if texts[-1:] == ["break"]:
        return {**body, "reward": 0.0, "mask_sample": True, "failure_reason": "no sandbox"}
    return {**body, "reward": float(right), "calls": session["calls"], "tool_outputs": len(outputs)}


if __name__ == "__main__":
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
