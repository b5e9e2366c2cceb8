"""Classes of the tests whose methods are tools."""

import asyncio
import os
from enum import Enum
from typing import Any, Literal

from realhf.environments.tool_env import ToolEnvironment, as_environment


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Shop:
    """Sums prices; the reward is the sum."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def reset(self, row: dict, seed: int) -> str:
        self.total = self.start
        return f"Buy {row['what']}."

    def add(self, price: int, count: int = 1) -> int:
        """Add a price.

        Args:
            price: The price
                in cents
            count: How many
        """
        self.total += price * count
        return self.total

    def describe(self, colour: Colour, size: Literal["S", "M"] | None = None) -> dict:
        """Describe an article.

        Args:
            colour: Its colour
            size: Its size
        """
        return {"colour": colour.value, "size": size}

    def fail(self) -> str:
        """Raise an error."""
        raise KeyError("no such thing")

    def long(self, n: int) -> str:
        """Return n letters.

        Args:
            n: The number
        """
        return "x" * n

    def crash(self) -> None:
        """End the process."""
        os._exit(3)

    def _private(self) -> None:
        """Not a tool."""

    def get_reward(self) -> float:
        return float(self.total)


class AsyncShop:
    """Waits in its tool; the reward is that of the last reply's length."""

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: The time
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds:g}"

    def get_reward(self, reply: str) -> float:
        return float(len(reply))


def wrapped_shop(**options: Any) -> ToolEnvironment:
    return as_environment(Shop)(**options)


AsyncShopEnvironment = as_environment(AsyncShop)
