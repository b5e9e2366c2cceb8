"""Agents that use the endpoint in many ways. Their reward is 1 if all they saw is right."""

import asyncio
import json

import httpx
from openai import AsyncOpenAI, BadRequestError

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
INVALID = [
    b"", b"[]", b"not json", b'"text"', b"{}", b'{"messages": []}', b'{"messages": "hello"}', b'{"messages": [3]}',
    b'{"messages": [{"content": "x"}]}', b'{"messages": [{"role": "user", "content": 3}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a"]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": 5}',
    b'{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": [[[[[', b"\x00" * 1000,
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b'{"a":' * 99 + b"1" + b"}" * 99 + b"]}",
    b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "x", "a": 1e99, "b": 1' + b"0" * 30 + b"}]}",
    b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "stream_options": 5}',
]  # fmt: skip


def client(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)


async def invalid(row, base_url):
    """Sends invalid requests, and then a valid one."""
    async with httpx.AsyncClient() as http:
        for body in INVALID:
            response = await http.post(f"{base_url}/chat/completions", content=body)
            assert response.status_code == 400 and response.json()["error"]["message"], (body, response.text)
        for prompt in ("text", [], [-1], [1.5], [True], None, [["a"]], [10**30]):
            response = await http.post(f"{base_url}/completions", json={"prompt": prompt})
            assert response.status_code == 400, prompt
        other = base_url.replace(base_url.split("/")[-2], "0" * 16)
        assert (await http.post(f"{other}/chat/completions", json={"messages": [USER]})).status_code == 404
        assert (await http.get(f"{base_url}/nothing")).status_code == 404
        odd = {"model": "\ud800", "messages": [{"role": "user", "content": "hello \udfff"}], "max_tokens": 10**30}
        response = await http.post(f"{base_url}/chat/completions", content=json.dumps(odd))
        assert response.status_code == 200 and response.json()["model"] == "\ufffd", response.text
    choice = (await client(base_url).chat.completions.create(model="m", messages=[USER])).choices[0]
    return float(choice.message.content == "reply 1")


async def everything(row, base_url):
    """Uses models, log-probabilities, token ids, parts of contents, tools, streams, and completions of tokens."""
    openai = client(base_url)
    assert [model.id async for model in openai.models.list()] == ["policy"]
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    whole = await openai.chat.completions.create(
        model="m", messages=[parts], logprobs=True, tools=[TOOL], extra_body={"return_token_ids": True}
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "add"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}
    assert [one.logprob for one in choice.logprobs.content] == [-1.0, -2.0] and choice.token_ids == [4, 5]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 2, 9)
    answer = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "2"}
    text, ends, usage = "", [], None
    stream = await openai.chat.completions.create(
        model="m", messages=[parts, choice.message, answer], stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for part in chunk.choices:
            text += part.delta.content or ""
            ends += [part.finish_reason] if part.finish_reason else []
        usage = chunk.usage or usage
    assert (text, ends, usage.total_tokens) == ("reply 1", ["stop"], 9)
    completion = await openai.completions.create(model="m", prompt=[1, 2, 3], logprobs=1, max_tokens=9)
    assert completion.choices[0].text == "reply 2" and completion.choices[0].logprobs.token_logprobs == [-1.0, -2.0]
    text = ""
    async for chunk in await openai.completions.create(model="m", prompt=[1, 2, 3, 4, 5], stream=True):
        text += chunk.choices[0].text
    return float(text == "reply 3")


async def impatient(row, base_url):
    """Leaves a request, whose reply is not read, and asks again."""
    openai = client(base_url)
    try:
        await openai.with_options(timeout=0.3).chat.completions.create(model="m", messages=[USER])
    except Exception as error:
        assert "timed out" in str(error).lower(), error
    choice = (await openai.chat.completions.create(model="m", messages=[USER])).choices[0]
    return float(choice.message.content == "reply 1")


async def crowded(row, base_url):
    openai = client(base_url)
    answers = await asyncio.gather(
        *(openai.chat.completions.create(model="m", messages=[{**USER, "content": str(k)}]) for k in range(20))
    )
    return float(sorted(one.choices[0].message.content for one in answers) == sorted(f"reply {k}" for k in range(20)))


async def brief(row, base_url):
    choice = (await client(base_url).chat.completions.create(model="m", messages=[USER])).choices[0]
    return float(choice.message.content == "yes")


async def endless(row, base_url):
    """Asks until it is refused."""
    number = 0
    try:
        while True:
            await client(base_url).chat.completions.create(model="m", messages=[USER])
            number += 1
    except BadRequestError as error:
        assert error.code == "context_length_exceeded"
    return {"reward": 0.25, "replies": number}


async def careless(row, base_url):
    while True:
        await client(base_url).chat.completions.create(model="m", messages=[USER])


async def failing(row, base_url):
    raise LookupError("the agent is lost")


async def nothing(row, base_url):
    return None


async def nan(row, base_url):
    return float("nan")


async def silent(row, base_url, reward=0.5):
    """Has no need of the model."""
    return reward


async def stuck(row, base_url):
    await asyncio.sleep(1000)


async def blocking(row, base_url):
    import time

    time.sleep(1000)


async def escaping(row, base_url):
    raise SystemExit(3)
