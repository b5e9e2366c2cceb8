"""Adapters that are clients of servers: OpenEnv and NeMo Gym, over loopback."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from realhf.base.errors import UserError
from realhf.environments import Reply, ToolCall
from realhf.environments.adapters.nemo_gym_env import NemoGymEnv, chat_messages
from realhf.environments.adapters.openenv_env import OpenEnvClient
from tests.conftest import TIMEOUT_S
from tests.environments.episodes import play, rewards, script, shown

FOLDER = Path(__file__).parent


@contextmanager
def server(*command: str) -> Iterator[str]:
    """Run a server that writes its port; yield its address."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                httpx.get(address, timeout=5.0)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def protocols() -> Iterator[str]:
    with server(str(FOLDER / "protocol_servers.py")) as address:
        yield address


def test_openenv_protocol(protocols: str) -> None:
    pytest.importorskip("websockets")
    options = {"base_url": protocols, "action_field": "guess", "action_type": "integer", "instruction": "Play."}
    episodes = play("OpenEnvClient", options, script("1", "a lot", "77", "3"), n_episodes=3)
    assert episodes[0] == episodes[1] == episodes[2]
    assert shown(episodes[0][0]) == "Play.\nhint: guess\nrange: [0, 9]" and rewards(episodes[0]) == [
        0,
        -0.5,
        -0.1,
        -0.1,
        1,
    ]
    assert "write an integer" in shown(episodes[0][2]) and "from 0 to 9" in shown(episodes[0][3])
    assert episodes[0][-1].done and episodes[0][-1].info == {"invalid_actions": 2}
    options = {"base_url": protocols, "action_type": "json", "observation_field": "hint", "chat": False}
    (turns,) = play("OpenEnvClient", options, script('{"guess": 2}', "[]", '{"guess": 4}'), {"reset": {"seed": 14}})
    assert [turn.text for turn in turns[:2]] == ["guess", "wrong"] and rewards(turns) == [0, -0.5, -0.1, 1]
    with pytest.raises(RuntimeError, match="the game is broken"):
        play("OpenEnvClient", options, script('{"guess": 9}'))
    with pytest.raises(RuntimeError, match="env.options.observation_field='x'"):
        play("OpenEnvClient", {**options, "observation_field": "x"}, script(""))


def test_clients_without_a_server() -> None:
    pytest.importorskip("websockets")
    with pytest.raises(RuntimeError, match="no OpenEnv server answers at ws://127.0.0.1:9/ws"):
        play("OpenEnvClient", {"base_url": "http://127.0.0.1:9"}, script(""))
    row = {"responses_create_params": {"input": "x"}}
    with pytest.raises(RuntimeError, match="no resources server answers at http://127.0.0.1:9"):
        play("NemoGymEnv", {"base_url": "http://127.0.0.1:9"}, script(""), row)
    with pytest.raises(UserError, match="env.options.base_url='127.0.0.1'"):
        OpenEnvClient("127.0.0.1")
    with pytest.raises(UserError, match="env.options.base_url='127.0.0.1'"):
        NemoGymEnv("127.0.0.1")
    with pytest.raises(UserError, match="env.options.action_type='float'"):
        OpenEnvClient("http://127.0.0.1", action_type="float")


@pytest.mark.slow
def test_openenv_game_and_template(tmp_path: Path) -> None:
    """OpenEnv's own server: a game, and the environment of ``openenv init`` as it is."""
    pytest.importorskip("openenv.core.env_server.http_server", reason="openenv-core is not installed")
    app = str(FOLDER / "openenv_app.py")
    with server(app) as address:
        options = {"base_url": address, "action_field": "guess", "action_type": "integer"}
        low_first = script("0", "ten", "1", "2")
        episodes = play("OpenEnvClient", options, low_first, n_episodes=3)
        assert episodes[0] == episodes[1] == episodes[2] and "higher" in shown(episodes[0][1])
        (turns,) = play("OpenEnvClient", {**options, "action_type": "text"}, script("one", "5"))
        assert turns[1].reward == -0.1 and "not a valid action" in shown(turns[1])
    subprocess.run([str(Path(sys.executable)), "-m", "openenv.cli", "init", "my_echo"], cwd=tmp_path, check=True)
    with server(app, str(tmp_path / "my_echo")) as address:
        (turns,) = play("OpenEnvClient", {"base_url": address}, script("hello"), max_turns=3)
        assert shown(turns[1]) == "echoed_message: hello\nmessage_length: 5" and not turns[-1].done
        assert rewards(turns) == pytest.approx([0.0, 0.5, 0.5])


TOOL = {"type": "function", "name": "lookup", "description": "Look up.", "parameters": {"type": "object"}}


def nemo_row() -> dict[str, Any]:
    given = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}]
    parameters = {"input": [*given, {"role": "user", "content": "What is a?"}], "tools": [TOOL]}
    return {"responses_create_params": parameters, "values": {"a": "17"}, "expected": "17"}


def test_nemo_gym_protocol(protocols: str) -> None:
    def call(**arguments: object) -> Reply:
        return Reply("look", [1], [ToolCall("lookup", arguments)])

    forged = Reply("", [1], [ToolCall("verify", {}), ToolCall("lookup", {}, "not JSON")])
    replies = script(call(key="a"), call(key="b"), forged, "17")
    episodes = play("NemoGymEnv", {"base_url": protocols}, replies, nemo_row(), n_episodes=2)
    assert episodes[0] == episodes[1] and rewards(episodes[0]) == [0, 0, 0, 0, 1]
    first, found, missing, refused, last = episodes[0]
    assert [one["role"] for one in first.messages] == ["system", "user"] and shown(first) == "Be brief.\nWhat is a?"
    assert (
        first.tools[0]["function"]["name"] == "lookup" and found.messages[0]["content"] == '{"value":"17","done":false}'
    )
    assert "no such key" in shown(missing) and "there is no tool 'verify'" in shown(refused)
    assert "invalid call: not JSON" in shown(refused)
    assert last.info == {"calls": 2, "tool_outputs": 3}
    for options, n_turns in (({"max_steps": 2}, 3), ({"done_flag": True}, 4)):
        (turns,) = play("NemoGymEnv", {"base_url": protocols, **options}, script(call(key="a")), nemo_row())
        assert turns[-1].reward == 0 and len(turns) == n_turns
    (turns,) = play("NemoGymEnv", {"base_url": protocols}, script(Reply("17", [1], stop="length")), nemo_row())
    assert rewards(turns) == [0, 1]
    with pytest.raises(RuntimeError, match="the reward is not valid: no sandbox"):
        play("NemoGymEnv", {"base_url": protocols}, script("break"), nemo_row())
    with pytest.raises(RuntimeError, match="needs 'responses_create_params'"):
        play("NemoGymEnv", {"base_url": protocols}, script(""), {"prompt": "x"})
    assert chat_messages({"instructions": "i", "input": "x"})[0] == {"role": "system", "content": "i"}
