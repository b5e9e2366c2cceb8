"""The page in Chromium: no overflow, no console message, all controls by keyboard, readable texts, live updates."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realhf.apps.commands.report import main
from realhf.apps.view.report.run_set import RunSet
from realhf.apps.view.report.server import LivePage, ReportServer
from realhf.base.atomic_io import try_lock
from realhf.base.paths import RunDir
from tests.conftest import Task
from tests.integration.conftest import Run, run

pytest.importorskip("websockets")
from tests.apps.view.report.chromium import Tab, chromium, why_not

pytestmark = pytest.mark.slow
WIDTHS, SCHEMES = (420, 1400), (False, True)
HOSTILE = ["</script><script>document.title='broken'</script>", "<img src=x onerror=document.title='broken'>",
           "a\u2028b\u0000c \u202eright to left \u05d0\u05d1", "\ud800 lone", "x" * 20_000, "y " * 500_000]  # fmt: skip
OVERFLOW = """(() => {
  const clipped = '.scroll, pre, .prompt, .answer, nav, figcaption p, svg svg';
  return [...document.querySelectorAll('body *')]
    .filter((e) => e.getBoundingClientRect().width && !e.parentElement.closest(clipped))
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
    .map((e) => `${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`);
})()"""
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const hasText = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const texts = [...document.querySelectorAll('body *')]
    .filter((e) => e.getClientRects().length && hasText(e) && !e.matches('title, script, option'));
  const found = texts.map((e) => {
    const style = getComputedStyle(e);
    let below = background(e);
    if (e.matches('.in-cell')) {
      const cell = getComputedStyle(e.previousElementSibling);
      const [r, g, b] = rgba(cell.fill);
      below = over([r, g, b, Number(cell.fillOpacity)], below);
    }
    const ink = over(rgba(e instanceof SVGElement ? style.fill : style.color), below);
    const [high, low] = [light(ink), light(below)].sort((a, b) => b - a);
    return [(high + 0.05) / (low + 0.05), `${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`];
  });
  return { n: found.length, low: found.filter(([ratio]) => ratio < 4.5) };
})()"""
CONTROLS = """[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
  .filter((e) => e.checkVisibility() && !e.disabled).length"""


@pytest.fixture(scope="module")
def trained(task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    words = [
        f"actor.path={actor_folder}", f"dataset.path={task.train}", "dataset.train_bs_n_seqs=4", "ppo.group_size=2",
        "ppo.gen.max_new_tokens=8", "exp_ctrl.total_train_steps=12", "n_gpus_per_node=2", "ppo.disable_value=True",
        "exp_ctrl.total_train_epochs=4",
    ]  # fmt: skip
    return run("ppo-math", tmp_path_factory.mktemp("browsed"), words)


@pytest.fixture(scope="module")
def hostile(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with hostile responses and failures, in a folder with a hostile name."""
    folder = tmp_path_factory.mktemp("hostile") / "t" / "\"quoted\" <b>'name'"
    shutil.copytree(trained.root, folder)
    with (folder / "generations" / "step_12.jsonl").open("a") as file:
        for i, text in enumerate(HOSTILE):
            file.write(json.dumps({"prompt": text[:5000], "response": text, "sample": i, "rewards": 0.0}) + "\n")
    (folder / "first_failure.txt").write_text("rew_inf of step 2: <script>document.title='broken'</script>\n")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "<b>odd</b>/name": 1.0, "actor_train/grad_norm": float("nan")}) + "\n")
    return folder


@pytest.fixture(scope="module")
def new_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Tab]]:
    if reason := why_not():
        pytest.skip(reason)
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(trained: Run, hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of a page of one run, and of a comparison with hostile texts."""
    folder = tmp_path_factory.mktemp("pages")
    main([str(trained.root), "--out", str(folder / "one.html")])
    main([str(trained.root), str(hostile), "--out", str(folder / "two.html")])
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "two")}


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", SCHEMES)
def test_layout_and_contrast(
    new_tab: Callable[[], Tab], pages: dict[str, str], name: str, width: int, dark: bool
) -> None:
    tab = new_tab()
    tab.size(width, 900, dark)
    tab.open(pages[name])
    tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert tab.run("document.documentElement.scrollWidth") == width and tab.run(OVERFLOW) == []
    contrast = tab.run(CONTRAST)
    assert contrast["n"] > 300 and contrast["low"] == []
    assert tab.run("getComputedStyle(document.body).colorScheme") == "light dark"
    is_dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert is_dark == dark and tab.run("document.title") != "broken" and tab.messages == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_control_is_reached_by_the_tab_key(new_tab: Callable[[], Tab], pages: dict[str, str], width: int) -> None:
    tab = new_tab()
    tab.size(width)
    tab.open(pages["two"])
    n_controls = tab.run(CONTROLS)
    tab.run("window.reached = new Set(), addEventListener('focusin', (event) => reached.add(event.target))")
    for _ in range(n_controls + 3):
        tab.press("Tab")
    missed = f"{CONTROLS.removesuffix('.length')}.filter((e) => !reached.has(e)).map((e) => e.outerHTML.slice(0, 120))"
    assert n_controls > 30 and tab.run(missed) == [] and tab.messages == []


def test_values_at_the_cursor(new_tab: Callable[[], Tab], pages: dict[str, str], trained: Run) -> None:
    tab = new_tab()
    tab.size(1400)
    tab.open(pages["one"])
    tab.run("document.querySelector('.plot').focus()")
    tip = "document.querySelector('.tip:not([hidden])')?.textContent || ''"
    rewards = [line["reward/mean"] for line in trained.metrics]
    for key, step in (("End", 12), ("ArrowLeft", 11), ("Home", 1), ("ArrowRight", 2)):
        tab.press(key)
        text = tab.run(tip)
        assert text.startswith(f"step {step}Reward")
        assert float(text.split("Reward")[1]) == pytest.approx(rewards[step - 1], rel=1e-3, abs=1e-9)
    tab.press("Escape")
    assert tab.run(tip) == ""
    box = tab.run(
        "(() => { const b = document.querySelector('.plot').getBoundingClientRect(); return [b.right, b.y]; })()"
    )
    tab.move(box[0] - 2, box[1] + 20)
    assert tab.run(tip).startswith("step 12") and tab.messages == []


def test_smoothing_log_scale_filter_and_hidden_runs(new_tab: Callable[[], Tab], pages: dict[str, str]) -> None:
    tab = new_tab()
    tab.size(1400)
    tab.open(pages["two"])

    def change(selector: str, value: str, event: str = "input") -> None:
        found, sent = f"document.querySelector('{selector}')", f"new Event('{event}', {{ bubbles: true }})"
        key = "checked" if event == "change" else "value"
        tab.run(f"(() => {{ const e = {found}; e.{key} = {value}; e.dispatchEvent({sent}); }})()")

    title = "(e) => e.querySelector('h4').textContent === 'Time of a step'"
    steps = f"[...document.querySelectorAll('figure')].find({title})"
    line = f"{steps}.querySelector('.line:not(.raw)').getAttribute('points')"
    before = tab.run(line)
    change("#smoothing", "0.9")
    smooth = tab.run(line)
    assert smooth != before and tab.run(f"{steps}.querySelectorAll('.line.raw').length") >= 2
    change("#log-scale", "true", "change")
    assert tab.run(line) != smooth and "NaN" not in tab.run("document.getElementById('charts').innerHTML")
    n_lines = tab.run("document.querySelectorAll('.line:not(.raw)').length")
    change("#run-legend input", "false", "change")
    assert tab.run("document.querySelectorAll('.line:not(.raw)').length") < n_lines
    change("#chart-filter", "'throughput'")
    figures = "[...document.querySelectorAll('figure')].filter((e) => e.checkVisibility())"
    shown = f"{figures}.map((e) => e.querySelector('h4').textContent)"
    assert tab.run(shown) == ["Throughput"]
    tab.run("document.getElementById('metrics-1').open = true")
    tab.run("document.querySelector('[data-key=\"<b>odd</b>/name\"]').click()")
    change("#chart-filter", "'odd'")
    assert tab.run(shown) == ["<b>odd</b>/name"] and tab.messages == []


def test_responses_are_searched_and_compared(new_tab: Callable[[], Tab], pages: dict[str, str], trained: Run) -> None:
    tab = new_tab()
    tab.size(1400)
    tab.open(pages["one"])
    cards = "[...document.querySelectorAll('#response-list .response')].map((e) => e.textContent)"

    def choose(name: str, value: str) -> None:
        tab.run(f"(() => {{ const e = document.getElementById('response-{name}'); e.value = {json.dumps(value)};"
                " e.dispatchEvent(new Event(e.tagName === 'INPUT' ? 'input' : 'change')); })()")  # fmt: skip

    rows = trained.generations(3)
    choose("step", "3")
    assert len(tab.run(cards)) == len(rows) and rows[0]["prompt"].strip() in tab.run(cards)[0]
    choose("search", rows[0]["prompt"].strip().upper())
    n_found = sum(rows[0]["prompt"].strip() in row["prompt"] + row["response"] for row in rows)
    assert (
        len(tab.run(cards)) == n_found and tab.run("document.querySelectorAll('#response-list mark').length") >= n_found
    )
    choose("search", "")
    prompts = {step: {row["prompt"] for row in trained.generations(step)} for step in range(1, 13)}
    first, second = next((a, b) for a in prompts for b in prompts if a < b and prompts[a] & prompts[b])
    choose("step", str(second))
    choose("other", str(first))
    assert tab.run("document.querySelectorAll('#response-list .pair').length") >= 1
    assert tab.run("document.querySelectorAll('#response-list ins, #response-list del').length") >= 1
    choose("step", "all")
    assert "entries" in tab.run("document.getElementById('response-count').textContent")
    choose("search", "no such text anywhere")
    assert tab.run("document.getElementById('response-count').textContent") == "No responses match."
    assert tab.messages == []


def test_the_page_without_scripts_and_on_paper(new_tab: Callable[[], Tab], pages: dict[str, str]) -> None:
    tab = new_tab()
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.size(1400)
    tab.open(pages["one"])
    assert tab.run("document.querySelectorAll('.plot polyline').length") > 5, "pictures of the server"
    assert tab.run("document.querySelectorAll('.response').length") > 0 and not tab.run(
        "document.querySelector('.tip')"
    )
    tab.size(794, 1123, dark=True, media="print")
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run(OVERFLOW) == [] and tab.pdf().startswith(b"%PDF")


def test_a_served_page_follows_the_run(new_tab: Callable[[], Tab], trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("")
    progress = "document.querySelector('.value').textContent === '{}of 12'"
    with ReportServer(LivePage(RunSet([folder])), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            with try_lock(RunDir(folder).lock):
                tabs = [new_tab(), new_tab()]
                for tab in tabs:
                    tab.size(1400)
                    tab.open(server.url)
                    assert tab.run("document.querySelector('.pill').textContent") == "running"
                (folder / "metrics.jsonl").write_text("".join(lines[:5]))
                for tab in tabs:
                    tab.wait_for("document.querySelector('#charts .plot') && " + progress.format(5))
                tabs[0].run("document.getElementById('metrics-0').open = true")
                (folder / "metrics.jsonl").write_text("".join(lines))
                for tab in tabs:
                    tab.wait_for(progress.format(12))
            for tab in tabs:
                tab.wait_for("document.querySelector('.pill').textContent === 'done'")
            assert tabs[0].run("document.getElementById('metrics-0').open")
            shutil.rmtree(folder)
            tabs[0].wait_for("document.getElementById('summary').textContent.includes('no longer exists')")
        finally:
            server.shutdown()
            thread.join()
    tabs[0].wait_for("document.getElementById('live-note').textContent.includes('has ended')")
    blocked = [
        message for tab in tabs for message in tab.messages if "net::ERR_" not in message
    ]  # of the end of the server
    assert blocked == []
