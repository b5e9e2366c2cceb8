"""A deterministic environment of several turns, and the same conversation as a program that asks an endpoint.

    python kill_episodes.py < ROW

The program reads a row as JSON, and writes its reward as the last line. It imports the standard library only, so that
most of its time is the conversation.
"""

import http.client
import json
import os
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_TURNS = 4
WAIT_S = 0.03
"""Seconds per turn, so that a process that is killed has requests in progress."""


@dataclass(frozen=True)
class Hint:
    """What follows a reply: a text, the reward of the reply, and whether the episode ends."""

    text: str
    reward: float
    done: bool


def hint(prompt: str, said: list[str]) -> Hint:
    """Return a function of the prompt and all replies."""
    time.sleep(WAIT_S)
    number = zlib.crc32("|".join([prompt, *said]).encode())
    return Hint(f"{number % 97}\n", number % 7 / 7, len(said) == MAX_TURNS or number % 5 == 0)


class Hints:
    """Takes any text as a reply. Its state is all replies of the episode."""

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        from realhf.environments import Turn

        self.prompt, self.said = f"{row['prompt']}{seed % 10}\n", list[str]()
        return Turn(text=self.prompt)

    def step(self, reply: Any) -> Any:
        from realhf.environments import Turn

        self.said.append(reply.text)
        found = hint(self.prompt, self.said)
        text = None if found.done else found.text
        return Turn(text=text, reward=found.reward, done=found.done, info={"turns": len(self.said)})


def ask(connection: http.client.HTTPConnection, path: str, messages: list[dict[str, str]]) -> str:
    """Return the model's reply to a conversation."""
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", f"{path}/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {answer.decode()}")
    content: str = json.loads(answer)["choices"][0]["message"]["content"]
    return content


def main() -> None:
    prompt = json.load(sys.stdin)["prompt"]
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc)
    messages, said, reward = [{"role": "user", "content": prompt}], list[str](), 0.0
    while True:
        said.append(ask(connection, url.path, messages))
        found = hint(prompt, said)
        reward += found.reward
        if found.done:
            break
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": found.text}]
    print(json.dumps({"reward": reward, "turns": len(said)}))


if __name__ == "__main__":
    main()
