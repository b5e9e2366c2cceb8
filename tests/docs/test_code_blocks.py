"""Code blocks of the documents: Python is executed, commands are checked by the programs that they call.

A command with ``mode=slurm`` or ``mode=ray``, a GPU or vLLM cannot be planned on every machine; its options are read.
"""

import ast
import importlib.util
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.api.experiment import Task as DataTask
from realhf.apps.commands.profile import ProfileOptions
from realhf.apps.commands.quickstart import read_words
from realhf.apps.commands.verifier import ServeOptions
from realhf.apps.main import COMMANDS, run
from realhf.apps.prepare.options import updated
from realhf.base.errors import UserError
from realhf.data.rows import NORMALISE
from realhf.experiments.ppo_math import PPOMathExperiment
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.conftest import StandIns
from tests.test_dependencies import PROJECT

BLOCKS = list(blocks())
ELSEWHERE = re.compile(r"mode=(slurm|ray)|device=cuda|\.backend=|vllm\.")
SUITE = {"commands", "python", "rows", "output", "directive", "marked"}


def of_kind(*kinds: str) -> "pytest.MarkDecorator":
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind in kinds], ids=str)


def test_every_block_has_a_kind() -> None:
    counts = Counter(block.kind for block in BLOCKS)
    print(dict(counts))
    assert set(counts) <= SUITE
    for block in BLOCKS:
        if block.kind == "output":
            assert block.language in ("", "text"), f"{block}: mark it <!-- not run: reason -->"
            assert not re.search(r"^\s*(realhf|make|python3?|pip) ", block.text, re.MULTILINE), f"{block} is a command"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the files that the page of ``block`` defines."""
    page = request.getfixturevalue("block").page
    for other in BLOCKS:
        if other.page == page and other.file:
            n_copies = 256 if other.kind == "rows" else 1  # enough rows for a batch
            (tmp_path / other.file).write_text(other.text * n_copies)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@of_kind("commands")
def test_commands_are_accepted(
    block: Block, folder: Path, stand_ins: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = block.commands()
    assert commands, f"{block} has no command that is known here"
    for words in commands:
        check_command(words, stand_ins)
    capsys.readouterr()


def check_command(words: list[str], stand_ins: StandIns) -> None:
    program, rest = words[0], words[1:]
    if program == "realhf":
        check_realhf(rest, stand_ins)
    elif program == "make":
        rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = {target for rule in rules for target in rule.split()}
        assert {word for word in rest if "=" not in word} <= targets
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1])
    elif program == "python":
        assert (ROOT / rest[0]).is_file() or Path(rest[0]).is_file()
    elif program == "pip":
        extras = re.findall(r"realhf\[([\w,]+)\]", " ".join(rest))
        assert {name for extra in extras for name in extra.split(",")} <= set(PROJECT["optional-dependencies"])


def check_realhf(words: list[str], stand_ins: StandIns) -> None:
    command, rest = words[0], [stand_ins.replace(word) for word in words[1:]]
    assert command in COMMANDS, command
    shown = shlex.join(words)
    if command in ("quickstart", "plan") and "--help" not in rest and rest[0] != "EXPERIMENT":
        if command == "quickstart" and ELSEWHERE.search(shown):
            read_words(rest[0], [word for word in rest[1:] if word != "--dry-run"])
        else:
            flags = ["--dry-run"] if command == "quickstart" and "--dry-run" not in rest else []
            assert run([command, *rest, *flags]) == 0, shown
    elif command == "profile":
        updated(ProfileOptions(), rest)
    elif command == "verifier":
        assert rest[0] == "serve"
        updated(ServeOptions(), rest[1:])
    elif command in ("resume", "report", "stop"):
        updated(PPOMathExperiment(), [word for word in rest if "=" in word])
    else:
        assert run([command, *rest, *([] if "--help" in rest else ["--help"])]) == 0, shown


@of_kind("python")
def test_python_is_executed(
    block: Block, folder: Path, stand_ins: StandIns, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that starts a whole run is compiled here, and executed by ``test_whole_runs``."""
    if starts_run(block):
        compile(block.text, str(block), "exec")
        return
    file = folder / (block.file or "block.py")
    file.write_text(block.text)
    spec = importlib.util.spec_from_file_location(f"docs_block_{block.line}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    request.getfixturevalue("monkeypatch").setitem(sys.modules, spec.name, module)  # needed by dataclasses
    spec.loader.exec_module(module)


def starts_run(block: Block) -> bool:
    calls = (node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == "run" for call in calls)


@of_kind("rows")
def test_rows_fit_their_task(block: Block) -> None:
    rows = [json.loads(line) for line in block.text.splitlines()]
    task = re.fullmatch(r"rows of (\w+)", block.note)
    assert rows and (task or block.file)
    for number, row in enumerate(rows if task else [], 1):
        assert NORMALISE[DataTask[task[1]]](row, number, "{prompt}")


def test_a_wrong_command_is_found(stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="unknown option"):
        check_command(["realhf", "quickstart", "grpo", "mode=slurm", "ppo.grup_size=2"], stand_ins)
    with pytest.raises(AssertionError):
        check_command(["realhf", "quickstart", "grpo", "ppo.grup_size=2"], stand_ins)
    with pytest.raises(AssertionError):
        check_command(["make", "nothing"], stand_ins)
