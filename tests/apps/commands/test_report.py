"""Arguments of the report, and the runs of directories."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from realhf.apps.commands.report import main, parse
from realhf.base.errors import UserError
from tests.conftest import TIMEOUT_S


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "missing RUN_DIR"),
        (["r", "--ot", "x.html"], "unknown flag --ot  did you mean --out"),
        (["r", "--out"], "--out needs a value"),
        (["r", "--follow", "--out", "x"], "--follow writes no file"),
        (["r", "--port", "80"], "--port needs --follow"),
        (["r", "--follow", "--port=70000"], "not a number from 0 to 65535"),
        (["r", "--follow", "--port", "\u0663"], "not a number"),
    ],
)
def test_invalid_arguments(words: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse(words)


def test_arguments() -> None:
    asked = parse(["a", "b", "--follow", "--port=8080"])
    assert (asked.roots, asked.follow, asked.port, asked.out) == ([Path("a"), Path("b")], True, 8080, None)
    assert parse(["a", "--out=x.html"]).out == Path("x.html")


def prepared(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"config_yaml": ""},
        {"plan_json": "{", "config_yaml": "a: [", "metrics_jsonl": "{}\n"},
        {"metrics_jsonl": '{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "trace_json": '[\n{"na'},
        {"plan_json": "\x00", "config_yaml": "\x00", "trace_json": "\x00", "metrics_jsonl": "\x00\n"},
    ],
)
def test_damaged_directories_have_a_page_that_names_what_is_missing(tmp_path: Path, files: dict[str, str]) -> None:
    root = prepared(tmp_path / 'a "b" <c>', **files)
    main([str(root)])
    page = (root / "report.html").read_text()
    assert "Missing on this page" in page and "a &#34;b&#34; &lt;c&gt;" in page and "<c>" not in page
    assert ("plan.json" in page.split("Missing on this page")[1]) and "Traceback" not in page


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    root = prepared(tmp_path / "r", metrics_jsonl=json.dumps({"step": 1, "loss": 1}) + "\n")
    with pytest.raises(UserError, match="--out /proc/none/x.html"):
        main([str(root), "--out=/proc/none/x.html"])


def test_the_served_page_ends_with_control_c(tmp_path: Path) -> None:
    root = prepared(tmp_path / "r", metrics_jsonl=json.dumps({"step": 1, "loss": 1}) + "\n")
    command = [sys.executable, "-m", "realhf", "report", str(root), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            assert b"Time" in answer.read() and url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and output == "the report is no longer served\n"
