"""The pages in a real browser: what one sees, with and without scripts, on a disk and live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from blend_tale import eventful as blended_run
from fixture_run import Story, crew, eventful
from tune_tale import TuneTale
from tune_tale import eventful as tuned_run

from talkoot.core.log import Log
from talkoot.serve.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SHADE = "cell => getComputedStyle(cell).backgroundColor"
SERVE = """
import sys
from pathlib import Path
from talkoot.serve.dashboard import serve_dashboard
serve_dashboard(Path(sys.argv[1]), ready=lambda address: print(address, flush=True))
"""
HOSTILE = "<img src=x onerror=document.title='owned'></script><script>document.title='owned'</script>"

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")


@pytest.fixture(scope="module")
def chromium() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    eventful(folder).log.close()
    return write_report(folder)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    script = str(Path(__file__).with_name("rounds_run.py"))  # the browser's driver has this process's event loop
    subprocess.run([sys.executable, script, str(folder)], check=True)
    return folder


def watched(page: playwright.Page) -> list[str]:
    """Collects whatever the browser complains about, and every request that leaves the page's own origin."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    return complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_with_scripts(chromium: playwright.Browser, report: Path, width: int, scheme: str):
    with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        complaints, requests = watched(page), []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("#loss canvas")
        page.wait_for_selector("#rate canvas")
        assert page.locator(".static-chart").is_hidden()
        assert page.locator("h1").inner_text() == "neighbours"
        page.get_by_label("time", exact=True).check()
        page.wait_for_selector("#loss canvas")
        page.get_by_label("last steps").check()
        assert page.locator("#laststeps").is_visible()
        assert page.locator("#timeline").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_of_a_run_in_rounds(chromium: playwright.Browser, rounds: Path, width: int, scheme: str):
    with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        complaints = watched(page)
        page.goto(write_report(rounds).as_uri())
        page.wait_for_selector("#loss canvas")
        assert page.locator("#mixing .tile").count() == 6
        assert page.locator("#mixing .spent").count() == 5
        assert page.locator("#routes rect.alone").count() == 5
        assert page.locator("#ways").inner_text() == "Who met whom lately"
        assert page.locator("#loss .u-series").count() == 6  # the axis, three lines, and a band between two more
        heads = page.locator("#peers thead th").all_inner_texts()
        assert {"Slot", "Rounds", "Steps", "Waits", "Tokens/s", "Held out"} <= set(heads)
        curve = page.locator(".spread .plot").bounding_box()
        assert curve["width"] > 200
        assert curve["height"] > 150
        page.get_by_label("time", exact=True).check()
        page.wait_for_selector("#loss canvas")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []


def test_the_report_of_a_run_in_rounds_without_scripts(chromium: playwright.Browser, rounds: Path):
    with chromium.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(write_report(rounds).as_uri())
        assert "Round 9 of 9: step 36 of 36" in page.locator("#progress").inner_text()
        band = page.locator("#loss .band").bounding_box()
        assert band["width"] > 300
        assert band["height"] > 20
        assert page.locator("#timeline .work").count() > 30
        assert page.locator("#rate").is_hidden()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    tuned_run(Log(folder / "log.sqlite")).log.close()
    return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_of_post_training(chromium: playwright.Browser, tuned: Path, width: int, scheme: str):
    with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        complaints = watched(page)
        page.goto(tuned.as_uri())
        page.wait_for_selector("html.js")
        assert "Round 24 of 24" in page.locator("#progress").inner_text()
        curve = page.locator("#tuned .plot").bounding_box()
        assert curve["width"] > 200
        assert curve["height"] > 200
        assert page.locator("#tuned .earned").count() == 3
        assert page.locator("#tuned .scored").count() == 4  # three lines and their sign in the key
        assert page.locator("#peers .lonely").count() == 3
        assert page.locator("#tiles .caution").inner_text().split("\n")[-1] == "3 of 72"
        assert page.locator("#loss, #rate, #routes, #mixing").locator("visible=true").count() == 0
        titles = page.locator("h2").locator("visible=true").all_inner_texts()
        assert titles[:2] == ["Reward by round", "Newest scores"]
        assert "Loss" not in titles
        page.get_by_label("last steps").check()
        assert page.locator("#laststeps .work").count() >= 9
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []


def test_the_report_of_post_training_without_scripts(chromium: playwright.Browser, tuned: Path):
    with chromium.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(tuned.as_uri())
        assert page.locator("#tuned .earned").first.is_visible()
        assert page.locator("#loss").is_hidden()
        assert page.locator("#learning tbody tr").count() > 10


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blended")
    blended_run(Log(folder / "log.sqlite")).log.close()
    return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_of_experts(chromium: playwright.Browser, blended: Path, width: int, scheme: str):
    with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
        page = context.new_page()
        complaints = watched(page)
        page.goto(blended.as_uri())
        page.wait_for_selector("html.js")
        assert "15 of 15 jobs" in page.locator("#progress").inner_text()
        curve = page.locator("#blended .plot").bounding_box()
        assert curve["width"] > 200
        assert curve["height"] > 200
        assert page.locator("#blended path.earned").count() == 3
        assert page.locator("#crossed .best.own").count() == 3
        shades = [page.locator(f"#crossed .{one}").first.evaluate(SHADE) for one in ("heat4", "heat1")]
        assert shades[0] != shades[1]
        assert page.locator("#timeline .work").count() > 10
        hidden = "#loss, #rate, #routes, #mixing, #tuned, .timed .switch"
        assert page.locator(hidden).locator("visible=true").count() == 0
        titles = page.locator("h2").locator("visible=true").all_inner_texts()
        assert titles[:4] == [
            "Training loss of each job",
            "What was made of it",
            "Who gets what",
            "Perplexity on held-out text",
        ]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []


def test_a_page_that_waits_for_its_run_becomes_one_of_post_training(chromium: playwright.Browser, tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        with chromium.new_context(viewport={"width": 1280, "height": 900}) as context:
            page = context.new_page()
            complaints = watched(page)
            page.goto(process.stdout.readline().strip())
            page.wait_for_selector("#link[data-state=live]")
            assert page.locator("#tuned").is_hidden()
            tale = TuneTale(log=Log(tmp_path / "log.sqlite"))
            tale.round()
            page.wait_for_selector("#progress :text('Round 1 of 24')")
            assert page.locator("#tuned").is_visible()
            assert page.locator("#loss").is_hidden()
            tale.lonely_round()
            tale.lose("cedar", "unplugged")
            page.wait_for_selector("#progress :text('Round 2 of 24')")
            page.wait_for_selector("#events :text('cedar was lost: unplugged')")
            assert page.locator("#peers .alone-now").count() == 2
            tale.log.close()
            assert complaints == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_by_steps_has_no_card_about_mixing(chromium: playwright.Browser, report: Path):
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(report.as_uri())
        assert page.locator(".card.mixing").is_hidden()
        assert page.locator(".card.tuned").locator("visible=true").count() == 0
        assert page.locator("#ways").inner_text() == "Routes of the last step"


def test_the_report_without_scripts(chromium: playwright.Browser, report: Path):
    with chromium.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(report.as_uri())
        assert page.locator(".world").inner_text().lower() == "simulated"
        assert "Step 120 of 120" in page.locator("#progress").inner_text()
        assert page.locator(".tile").count() == 6
        curve = page.locator(".static-chart .plot").bounding_box()
        assert curve["width"] > 300
        assert curve["height"] > 150
        assert page.locator("#timeline .work").count() > 100
        assert page.locator("#timeline").is_visible()
        page.get_by_label("last steps").check()  # needs no script either
        assert page.locator("#laststeps").is_visible()
        assert page.locator("#events li").count() > 10


def test_everything_can_be_reached_by_keyboard(chromium: playwright.Browser, report: Path):
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(report.as_uri())
        page.wait_for_selector("#loss canvas")
        seen = []
        for _ in range(9):
            page.keyboard.press("Tab")
            seen.append(
                page.evaluate("document.activeElement.name || document.activeElement.getAttribute('aria-label')")
            )
        assert {"axis", "span", "Table of peers", "Events, newest first"} <= set(seen)


def test_hostile_names_do_nothing(chromium: playwright.Browser, tmp_path: Path):
    story = Story(Log(tmp_path / "log.sqlite"), steps=5)
    story.begin(recipe={"name": HOSTILE[:40], HOSTILE: HOSTILE, "train": {"steps": 5}})
    crew(story)
    story.join("</script><script>document.title=1", 0, source=HOSTILE)
    story.commit()
    story.roll_back(0, HOSTILE)
    story.commit()
    story.log.close()
    with chromium.new_context() as context:
        page = context.new_page()
        complaints = watched(page)
        page.goto(write_report(tmp_path).as_uri())
        page.wait_for_selector("#loss canvas")
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 3
        assert page.title().startswith("<img src=x")
        assert complaints == []


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[str, Story, subprocess.Popen[str]]]:
    story = eventful(tmp_path, steps=40, finished=False)
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().strip(), story, process
    story.log.close()
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_live_page_follows_the_log(chromium: playwright.Browser, live):
    address, story, process = live
    with chromium.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        complaints = watched(page)
        page.goto(address)
        page.wait_for_selector("#link[data-state=live]")
        page.wait_for_selector("#progress :text('Step 30 of 40')")
        page.wait_for_selector("#loss canvas")
        page.evaluate("document.querySelector('.scroll').scrollTop = 40")
        page.evaluate("window.kept = document.querySelector('#loss canvas')")
        before = page.locator("#h-time").bounding_box()
        story.run_to(33)
        story.lose("gum", "unplugged")
        page.wait_for_selector("#progress :text('Step 33 of 40')")
        page.wait_for_selector("#events :text('gum was lost: unplugged')")
        assert page.locator("#peers .liveness.lost").count() == 4
        assert page.evaluate("window.kept === document.querySelector('#loss canvas')")  # redrawn in place
        assert page.evaluate("document.querySelector('.scroll').scrollTop") == 40
        assert page.locator("#h-time").bounding_box() == before  # nothing jumped
        assert complaints == []
        process.send_signal(signal.SIGINT)  # with a stream open
        process.wait(timeout=10)
        page.wait_for_selector("#link[data-state=gone]")


def test_a_stream_survives_clients_that_go_away(live):
    address, story, _ = live
    for _ in range(3):
        with urllib.request.urlopen(address + "api/events", timeout=10) as stream:
            assert stream.readline() == b"retry: 2000\n"
    with urllib.request.urlopen(address + "api/events", timeout=10) as stream:
        steps = []
        while 32 not in steps:
            line = stream.readline()
            if line.startswith(b"event: update"):
                data = stream.readline()
                steps += [step for step in range(30, 33) if b"Step %d of" % step in data]
                if 30 in steps and story.step == 30:
                    story.run_to(32)
    assert steps[0] == 30
    with urllib.request.urlopen(address + "health", timeout=10) as answer:
        assert answer.status == 200


def test_the_server_stops_at_once_when_interrupted(live):
    address, _, process = live
    with urllib.request.urlopen(address + "api/events", timeout=10) as stream:
        stream.readline()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=2.5) is not None  # sooner than clients that do not hang up are given
