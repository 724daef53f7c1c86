"""The console in a real Chromium: every page, actions, a lost connection, many jobs, long histories."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from stoker.gateway.http.console import FILES
from stoker.operator.domain.plan import Key, Object
from testing.gateway.browser import Stage, missing_browser, stage
from testing.gateway.console_world import (
    API_KEY,
    Programs,
    deployment,
    many_jobs,
    other_jobs,
    programs,
    running_job,
    step_lines,
)
from testing.gateway.world import World

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "complete"),
    pytest.mark.xdist_group("browser"),
]
PLOTS = (FILES / "vendor" / "uPlot.esm.js").exists()
START = datetime.now(UTC) - timedelta(minutes=60)
HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'
SERVED: list[Programs] = []


@asynccontextmanager
async def prepared(found: World) -> AsyncIterator[None]:
    running_job(found, START)
    other_jobs(found)
    deployment(found, START)
    found.put_status(found.job("hostile"), phase="Pending", message=HOSTILE)
    async with programs(found) as served:
        SERVED[:] = [served]
        yield


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("console"), prepared, now=lambda: datetime.now(UTC), history=20_000) as found:
        yield found


def job(console: Stage, name: str) -> Object:
    return console.world.objects.get(Key("TrainingJob", "default", name))


async def visit(page: Page, hash_: str) -> None:
    await page.evaluate("hash => { location.hash = hash }", hash_)


async def text_of(page: Page, selector: str) -> str:
    return re.sub(r"\s+", " ", await page.locator(selector).inner_text())


def shows(page: Page, selector: str, text: str) -> Any:
    """Wait until an element shows a text."""
    return page.locator(selector).filter(has_text=text).first.wait_for()


def test_sign_in_refuses_a_wrong_token_and_takes_a_right_one(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.get_by_label("Token").fill("nonsense")
        await page.keyboard.press("Enter")
        await shows(page, "[role=alert]", "the cluster does not know this token")
        console.problems.clear()  # Chromium reports the 401
        await page.get_by_label("Token").fill("k" * 43)
        await page.keyboard.press("Enter")
        await shows(page, "h1", "Jobs")
        assert await page.title() == "Jobs · Stoker"
        await page.get_by_role("button", name="Sign out").click()
        await shows(page, "h1", "Sign in")

    console.run(story, token="")


def test_the_key_of_the_address_signs_in_and_leaves_the_address(console: Stage) -> None:
    async def story(page: Page) -> None:
        await shows(page, "h1", "Jobs")
        assert "key=" not in page.url
        assert await page.evaluate("localStorage.length") == 0, "the token is kept in this tab alone"

    console.run(story)


def test_jobs_say_their_phase_and_why_they_do_not_run(console: Stage) -> None:
    async def story(page: Page) -> None:
        row = page.locator("tr", has=page.get_by_role("link", name="waits", exact=True))
        await row.wait_for()
        assert "WaitingForGPUs 3 of 8" in await row.inner_text()
        running = await page.locator("tr", has=page.get_by_role("link", name="teach", exact=True)).inner_text()
        assert all(part in running for part in ("Running", "1,200 / 3,000", "2.18", "41,210"))
        await shows(page, ".connection", "Live")
        found = job(console, "waits")
        console.world.put_status(found, phase="Running", message="", progress={"step": 1, "totalSteps": 9})
        await row.filter(has_text="1 / 9").wait_for()
        console.world.put_status(found, phase="Pending", message="WaitingForGPUs 3 of 8", progress={})
        await row.filter(has_text="WaitingForGPUs").wait_for()
        await page.get_by_label("Filter").fill("paused")
        await shows(page, ".table-tools", "1 of ")
        assert await page.locator("tbody tr").count() == 1

    console.run(story)


def test_text_of_the_cluster_is_never_markup(console: Stage) -> None:
    async def story(page: Page) -> None:
        cell = page.locator("tr", has=page.get_by_role("link", name="hostile")).locator(".why")
        await cell.wait_for()
        assert await cell.inner_text() == HOSTILE
        assert await page.locator("main img, main b").count() == 0
        refused = await page.evaluate(
            "() => { try { document.body.innerHTML = '<i>x</i>'; return 'written' } catch (e) { return e.name } }"
        )
        assert refused == "TypeError", "the policy refuses what the code does not do"
        console.problems.clear()

    console.run(story)


def test_a_job_shows_curves_attempts_ranks_and_goodput(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/teach")
        await shows(page, "h1", "teach")
        await shows(page, ".figure", "1,200 values")
        assert "at step 1,200" in await text_of(page, ".figure >> nth=0")
        if PLOTS:
            await page.locator(".plot canvas").nth(3).wait_for()
            box = await page.locator(".plot canvas").first.bounding_box()
            assert box is not None
            assert box["width"] > 300
        await shows(page, ".timeline", "OutOfMemory rank 5 on gpu-node-3 at step 430: the container")
        attempts = await text_of(page, ".timeline")
        assert "resumed from step 400" in attempts
        assert "first step after 1 min 24 s (schedule 4 s, pull 26 s" in attempts
        assert "reaction: Retry" in attempts
        await shows(page, ".nodes", "gpu-node-4")
        assert await page.locator(".rank").all_inner_texts() == [str(rank) for rank in range(8)]
        await shows(page, ".legend", "Productive 41 min (86 %)")
        await page.get_by_role("button", name="Table").first.click()
        await page.locator(".figure tbody tr").nth(199).wait_for()

    console.run(story)


def test_a_running_job_draws_new_steps(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("live"), phase="Running", progress={"step": 5, "totalSteps": 100, "loss": "8.0"})
    pod = world.pod(found, 0, step_lines(5))

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/live")
        await shows(page, ".figure", "5 values")
        with world.folders.log("default", pod["metadata"]["name"]).open("a") as log:
            log.write(step_lines(4, first=6))
        world.put_status(found, progress={"step": 9, "totalSteps": 100, "loss": "7.5"})
        await shows(page, ".figure", "9 values")
        await shows(page, ".facts", "9 of 100")

    console.run(story)


def test_without_the_library_the_values_are_tables(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.route("**/vendor/**", lambda route: route.fulfill(status=404, body=""))
        await visit(page, "#/jobs/default/teach")
        await shows(page, ".hint", "Plots need uPlot")
        await page.locator(".figure tbody tr").nth(199).wait_for()
        assert (await page.locator(".figure tbody th").first.inner_text()) == "1,200"
        console.problems.clear()  # Chromium reports the 404

    console.run(story)


def test_actions_on_a_job_change_the_resource(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("acts"), phase="Running", progress={"step": 5, "totalSteps": 100})

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/acts")
        await page.get_by_role("button", name="Save now").click()
        await shows(page, ".notice", "Save asked for: acts-save")
        await page.get_by_role("button", name="Suspend").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Back").click()
        assert not job(console, "acts")["spec"]["run"].get("suspend")
        await page.get_by_role("button", name="Suspend").click()
        await dialog.get_by_role("button", name="Suspend").click()
        await shows(page, ".notice", "acts is being suspended")
        assert job(console, "acts")["spec"]["run"]["suspend"] is True
        world.put_status(found, phase="Suspended")
        await page.get_by_role("button", name="Resume").click()
        await dialog.get_by_role("button", name="Resume").click()
        await shows(page, ".notice", "acts is being resumed")
        assert job(console, "acts")["spec"]["run"]["suspend"] is False
        world.put_status(found, phase="Running")
        await page.get_by_role("button", name="Cancel").click()
        await dialog.get_by_role("button", name="Cancel the job").click()
        await shows(page, ".notice", "acts is being cancelled")
        assert job(console, "acts")["spec"]["run"]["cancel"] is True

    console.run(story)
    saves = [one for one in world.objects.of_kind("Checkpoint") if one["metadata"]["name"].startswith("acts-save")]
    assert len(saves) == 1


def test_an_action_has_the_callers_rights(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/teach")
        await page.get_by_role("button", name="Save now").click()
        await shows(page, ".notice[data-tone=bad]", "Not allowed")
        await page.get_by_label("Namespace").fill("team-a")
        await page.keyboard.press("Enter")
        await visit(page, "#/jobs")
        await shows(page, ".refused", "Not allowed")
        console.problems.clear()  # Chromium reports each 403

    console.run(story, token="viewer")


def test_checkpoints_show_their_line_and_are_promoted(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/checkpoints")
        chain = page.locator(".families > li", has_text="teach").first
        await chain.locator(".save").nth(6).wait_for()
        saves = [re.sub(r"\s+", " ", text) for text in await chain.locator(".chain").all_inner_texts()]
        assert ("step 200" in saves[0], "step 420" in saves[0], "step 600" in saves[1]) == (True, True, True)
        await shows(page, ".save", "continued by teach-more")
        await page.get_by_role("button", name="Promote teach-600", exact=True).click()
        dialog = page.get_by_role("dialog")
        assert await dialog.get_by_label("Deployment").input_value() == "chat"
        await dialog.get_by_role("button", name="Promote").click()
        await shows(page, ".notice", "chat moves to teach-600")
        assert await page.get_by_role("button", name="Promote teach-420").count() == 0, "a corrupt one is not offered"

    console.run(story)
    assert model_of(console)["checkpointRef"] == {"name": "teach-600"}


def model_of(console: Stage) -> dict[str, Any]:
    found: dict[str, Any] = console.world.objects.get(Key("InferenceDeployment", "default", "chat"))["spec"]["model"]
    return found


def test_a_deployment_shows_its_load_rolls_back_and_chats(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/deployments")
        await page.get_by_role("link", name="chat").click()
        await shows(page, "tr", "42 %")
        await shows(page, ".facts", "Answers since start")
        await shows(page, "tr", "18 s (pull 5 s, load 9 s, ready 4 s)")
        await page.wait_for_function(  # two answers are needed for a rate
            "() => [...document.querySelectorAll('.facts div')]"
            ".some(one => one.innerText.includes('Requests per second') && /\\d/.test(one.innerText))"
        )
        await page.get_by_role("button", name="Roll back to r6").click()
        await page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        await shows(page, ".notice", "chat goes back to teach-800")
        await page.get_by_label("Message").fill(HOSTILE)
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", f"You asked: {HOSTILE}")
        assert await page.locator(".chat img").count() == 0
        await shows(page, "tr", "FirstTokenLate: the first token takes 240 ms of 200")

    console.run(story)
    assert model_of(console)["checkpointRef"] == {"name": "teach-800"}
    assert SERVED[0].asked[-1]["model"] == "chat"


def test_a_key_of_the_deployment_is_sent_and_kept_nowhere(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/deployments")
        await page.get_by_role("link", name="chat").click()
        await page.get_by_label("Message").fill("locked?")
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", "The API key is missing or wrong")
        await page.get_by_label("API key of the deployment").fill(API_KEY)
        await page.get_by_label("Message").fill("locked?")
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", "You asked: locked?")
        kept = await page.evaluate("() => JSON.stringify([{...sessionStorage}, {...localStorage}, location.href])")
        assert API_KEY not in kept
        console.problems.clear()  # the browser noted the refusal

    console.run(story)


def test_the_cluster_shows_its_nodes(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/cluster")
        await shows(page, "tr", "local")
        await shows(page, ".facts", "GPUs")
        assert "prometheus_url" in await text_of(page, "main")

    console.run(story)


def test_a_lost_connection_is_visible_and_nothing_is_missed(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("lost"), phase="Running", progress={"step": 1, "totalSteps": 9})

    async def story(page: Page) -> None:
        row = page.locator("tr", has=page.get_by_role("link", name="lost"))
        await row.filter(has_text="1 / 9").wait_for()
        console.line.cut()
        await shows(page, ".lost", "Connection lost")
        assert "1 / 9" in await row.inner_text(), "what was there stays"
        world.put_status(found, progress={"step": 2, "totalSteps": 9})
        world.job("meanwhile")
        console.line.mend()
        await row.filter(has_text="2 / 9").wait_for()
        await page.get_by_role("link", name="meanwhile").wait_for()
        assert await page.locator(".lost").is_hidden()
        console.problems.clear()  # Chromium reports each failed request

    console.run(story)


def test_five_hundred_jobs_stay_usable(console: Stage) -> None:
    many_jobs(console.world, 500)

    async def story(page: Page) -> None:
        await page.get_by_label("Namespace").fill("many")
        await page.keyboard.press("Enter")
        await page.locator("tbody tr").nth(499).wait_for()
        await page.get_by_role("button", name="Loss").click()
        first = page.locator("tbody tr").first
        await first.filter(has_text="run-0499").wait_for()
        await page.get_by_label("Filter").fill("run-0123")
        await shows(page, ".table-tools", "1 of 500")
        found = console.world.objects.get(Key("TrainingJob", "many", "run-0123"))
        console.world.put_status(found, progress={"step": 777, "totalSteps": 1000, "loss": "1.5"})
        await first.filter(has_text="777 / 1,000").wait_for()

    console.run(story)


def test_a_long_table_lays_out_what_is_in_sight_and_offers_all_rows(console: Stage) -> None:
    for number in range(200):
        console.world.job(f"row-{number:03}", "rows")

    async def story(page: Page) -> None:
        await page.get_by_label("Namespace").fill("rows")
        await page.keyboard.press("Enter")
        await page.locator("tbody tr").nth(199).wait_for(state="attached")
        await page.wait_for_function(  # rows out of sight are skipped before a frame is drawn
            """() => [...document.querySelectorAll('tbody td')]
              .filter(one => one.checkVisibility({contentVisibilityAuto: true})).length < 1000"""
        )
        edges = await page.evaluate(
            """() => [...document.querySelectorAll('thead th, tbody tr:first-child > *')]
              .map(one => Math.round(one.getBoundingClientRect().left))"""
        )
        assert edges[:10] == edges[10:], "columns are in line with their heads"
        offered = await offered_to_screen_readers(page)
        assert {("table", "Training jobs"), *(("row", f"row-{number:03}") for number in range(200))} <= offered
        assert {("columnheader", "Phase"), ("rowheader", await first_name(page))} <= offered
        last = page.get_by_role("link", name="row-199")
        await last.focus()
        assert await last.evaluate("one => one.checkVisibility({contentVisibilityAuto: true})"), "focus scrolls to it"
        found = console.world.objects.get(Key("TrainingJob", "rows", "row-199"))
        await page.get_by_role("button", name="Step").click()
        await last.focus()
        console.world.put_status(found, progress={"step": 3, "totalSteps": 9})
        await page.locator("tbody tr").first.filter(has_text="3 / 9").wait_for(state="attached")
        assert await page.evaluate("document.activeElement.textContent") == "row-199", (
            "a row that moves keeps its focus"
        )

    console.run(story)


async def first_name(page: Page) -> str:
    return await page.locator("tbody th").first.inner_text()


async def offered_to_screen_readers(page: Page) -> set[tuple[str, str]]:
    """(role, name) of what is in Chromium's accessibility tree."""
    session = await page.context.new_cdp_session(page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    return {(one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes if not one["ignored"]}


def test_what_is_not_there_is_one_line_and_a_way_on(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/deployments/default/nothing")
        await shows(page, ".refused", "no InferenceDeployment nothing in namespace default")
        assert await page.locator(".panel").count() == 0
        await page.get_by_role("link", name="Show all").click()
        await page.get_by_role("link", name="chat").wait_for()
        console.problems.clear()  # Chromium reports the 404

    console.run(story)


def test_ages_grow_while_they_are_shown(console: Stage) -> None:
    async def story(page: Page) -> None:
        one = page.locator("tr", has=page.get_by_role("link", name="waits", exact=True)).locator("time")
        await one.wait_for()
        grown = await one.evaluate(
            """async one => {
              one.dataset.since = new Date(Date.now() - 7200000).toISOString();
              (await import('./format.js')).refreshAges();
              return one.textContent;
            }"""
        )
        assert grown == "2 h"

    console.run(story)


def test_twenty_thousand_points_stay_usable(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("long"), phase="Running", progress={"step": 20_000, "totalSteps": 30_000})
    world.pod(found, 0, step_lines(20_000))

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/long")
        await shows(page, ".figure", "20,000 values")
        if PLOTS:
            plot = page.locator(".plot canvas").first
            await plot.wait_for()
            await page.locator(".u-over").first.hover()
            drawn = (
                "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(v => v)"
            )
            assert await plot.evaluate(drawn)
        await page.get_by_role("button", name="Table").first.click()
        await page.locator(".figure tbody tr").nth(199).wait_for()

    console.run(story)


def test_everything_is_reached_by_keyboard(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.get_by_role("link", name="teach", exact=True).wait_for()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        for _ in range(60):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.textContent") == "teach":
                break
        await page.keyboard.press("Enter")
        await shows(page, "h1", "teach")
        assert await page.evaluate("document.activeElement.id") == "main", "a new page begins at its start"
        unnamed = await page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, a, [role=img], meter, progress')]
              .filter(one => one.checkVisibility() && !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
              .map(one => one.outerHTML)"""
        )
        assert unnamed == []

    console.run(story)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_readable_in_light_and_dark(console: Stage, scheme: str) -> None:
    async def story(page: Page) -> None:
        await page.get_by_role("link", name="teach", exact=True).wait_for()
        assert await page.evaluate(CONTRASTS) == []
        before = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.get_by_role("button", name="Light or dark").click()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != before

    console.run(story, color_scheme=scheme)


CONTRASTS = """() => {
  const parse = (text) => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (front, back) => front.slice(0, 3).map((v, i) => v * front[3] / 255 + back[i] * (1 - front[3] / 255));
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const backs = (one) => {
    const chain = [];
    for (let at = one; at; at = at.parentElement) chain.unshift(parse(getComputedStyle(at).backgroundColor));
    return chain.reduce((below, colour) => over(colour, below), [255, 255, 255]);
  };
  const seen = new Map();
  for (const one of document.querySelectorAll('main *, header *')) {
    const words = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!words || !one.checkVisibility() || one.closest('.unseen') || one.closest('.skip')) continue;
    const back = backs(one), front = over(parse(getComputedStyle(one).color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) seen.set(`${one.tagName}.${one.className} ${one.dataset.tone ?? ''}`, ratio.toFixed(2));
  }
  return [...seen];
}"""
