"""Agents for the tests: all but ``Chat`` are written against OpenAI's client alone."""

import asyncio
import json
import os
import signal
import sys
import zlib
from pathlib import Path

ODD = ["🙂🙂", "<|im_end|>", "<|im_start|>assistant\n", "\ufffd", "é\u202e", "</s>", "  \n\n"]


def answer(content: str) -> str:
    """Return what the user says next: a function of the model's words, with odd characters."""
    number = zlib.crc32(content.encode())
    return f"{number % 10} {ODD[number % len(ODD)]}"


def reward_of(contents: list[str]) -> float:
    return zlib.crc32("".join(contents).encode()) % 7 / 7


def die_once(folder: str | None, key: str) -> None:
    """Kill this process the first time that a key is seen in a folder: for a third of the keys, up to about 8."""
    number = zlib.crc32(key.encode())
    if not folder or number % 3 or len(os.listdir(folder)) >= 8:
        return
    try:
        Path(folder, f"{number}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def program(deaths: str | None = None, n_turns: int = 3) -> None:
    from openai import OpenAI

    row = json.load(sys.stdin)
    client = OpenAI()
    messages = [{"role": "user", "content": row["question"]}]
    said = []
    for _ in range(n_turns):
        message = client.chat.completions.create(model="policy", messages=messages, temperature=1.0).choices[0].message
        said.append(message.content)
        die_once(deaths, f"{row} {said}")
        messages += [message, {"role": "user", "content": answer(message.content)}]
    assert os.environ["REALHF_SEED"]
    print("it is done", flush=True)
    print(json.dumps({"reward": reward_of(said), "turns": n_turns}))


async def chat(row: dict, base_url: str, seed: int, deaths: str | None = None, n_turns: int = 3) -> dict:
    """The same conversation as an async function."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": row["question"]}]
    said = []
    for _ in range(n_turns):
        message = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        said.append(message.content)
        die_once(deaths, f"{row} {said}")
        messages += [message.model_dump(), {"role": "user", "content": answer(message.content)}]
    return {"reward": reward_of(said), "turns": n_turns}


async def forgetful(row: dict, base_url: str) -> float:
    """Drops its oldest exchange before the third request, goes back to the first, and asks a sub-agent."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    said = []

    async def ask(messages: list[dict]) -> dict:
        content = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
        said.append(content)
        return {"role": "assistant", "content": content}

    first = [{"role": "user", "content": row["question"]}]
    first.append(await ask(first))
    longer = [*first, {"role": "user", "content": answer(said[-1])}]
    longer.append(await ask(longer))
    await ask([*longer[2:], {"role": "user", "content": "what was it?"}])  # without its start
    await ask([*first, {"role": "user", "content": "another way"}])  # a fork
    await ask([{"role": "system", "content": "you are a helper"}, {"role": "user", "content": "help"}])
    await ask([*longer, {"role": "user", "content": "go on"}])  # back to the longest
    return reward_of(said)


async def crowd(row: dict, base_url: str) -> float:
    """Four requests at a time."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    chats = [[{"role": "user", "content": f"{row['question']} {k}"}] for k in range(4)]
    replies = await asyncio.gather(
        *(client.chat.completions.create(model="policy", messages=messages, max_tokens=3) for messages in chats)
    )
    return reward_of([reply.choices[0].message.content for reply in replies])


class Chat:
    """The conversation of ``chat`` as an environment."""

    def reset(self, row, seed):
        from realhf.environments import Turn

        self.said = []
        return Turn(messages=[{"role": "user", "content": row["question"]}])

    def step(self, reply):
        from realhf.environments import Turn

        self.said.append(reply.text)
        if len(self.said) == 3:
            return Turn(reward=reward_of(self.said), done=True, info={"turns": 3})
        return Turn(messages=[{"role": "user", "content": answer(reply.text)}])


if __name__ == "__main__":
    program(*sys.argv[1:])
