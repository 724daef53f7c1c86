"""The console for everyone: by keyboard, by screen reader, in light and dark, on a narrow screen, or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.operator.domain.plan import Key, Object
from testing.gateway.browser import Stage, missing_browser, shows, stage, visit
from testing.gateway.console_world import deployment, other_jobs, programs, running_job, step_lines
from testing.gateway.world import JOB_SPEC, KEY, World

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "complete"),
    pytest.mark.xdist_group("browser"),
]
START = datetime.now(UTC) - timedelta(minutes=60)
AXE = Path(__file__).parents[2] / ".venv" / "axe-core" / "axe.min.js"
"""The rules of axe-core, which `make setup` fetches where there is npm."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LONGEST = "a-name-as-long-as-the-definition-allows0"
UNBROKEN = "u" * 40
DIGEST = "blake3:" + "0a" * 32
WHY = "Unschedulable: 0/40 nodes are available, 28 have the taint {dedicated: inference}. " * 6
PAGES = (
    ("#/jobs", ".connection[data-state=live]"),
    ("#/jobs/default/teach", ".timeline .cause"),
    ("#/jobs/default/sixtyfour", ".rank"),
    (f"#/jobs/default/{LONGEST}", ".why-line"),
    (f"#/jobs/default/{UNBROKEN}", ".node"),
    ("#/checkpoints", ".save .users"),
    ("#/deployments", "tbody tr"),
    ("#/deployments/default/chat", "meter"),
    ("#/deployments/default/bare", ".chat .muted"),
    ("#/cluster", "tbody tr"),
    ("#/jobs/default/nothing", ".refused"),
)
"""(address, what shows that it was drawn)."""


@asynccontextmanager
async def prepared(found: World) -> AsyncIterator[None]:
    running_job(found, START)
    other_jobs(found)
    deployment(found, START)
    sixty_four_ranks(found)
    found.put_status(found.job(LONGEST), phase="Pending", message=WHY)
    unbroken_words(found)
    spec = {"model": {"uri": "pvc://models/small"}, "pools": [{"name": "main", "replicas": 1}]}
    body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec}
    found.objects.create({**body, "metadata": {"name": "bare", "namespace": "default"}})
    async with programs(found):
        yield


def unbroken_words(found: World) -> None:
    """A job and an imported checkpoint whose names and messages have no place to break."""
    job = found.put_status(found.job(UNBROKEN), phase="Pending", message=f"{DIGEST}{DIGEST} is not {DIGEST}")
    found.pod(job, 0, "", node="n" * 63)
    folder = {"storage": {"claimName": "claim", "path": "a"}, "folder": "step-00000001.0a1b2c3d"}
    metadata = {"name": "c" * 63, "namespace": "default"}
    body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": metadata}
    found.objects.create({**body, "spec": {"source": {"import": folder}}})


def sixty_four_ranks(found: World) -> Object:
    """A job on eight nodes of eight GPUs, one of which has failed."""
    training = {**JOB_SPEC["training"], "globalBatchSize": 64}
    job = found.job("sixtyfour", workers={"replicas": 8, "ranksPerPod": 8}, training=training)
    for number in range(8):
        phase = "Failed" if number == 3 else "Running"
        found.pod(job, number, step_lines(5) if number == 0 else "", gpus=8, node=f"gpu-node-{number}", phase=phase)
    return found.put_status(job, phase="Running", worldSize=64, progress={"step": 5, "totalSteps": 3000})


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("console"), prepared, now=lambda: datetime.now(UTC)) as found:
        yield found


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there (make setup, with npm)")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 390)])
def test_no_page_breaks_a_rule_of_accessibility(console: Stage, scheme: str, width: int) -> None:
    async def story(page: Page) -> None:
        await page.set_viewport_size({"width": width, "height": 860})
        await page.evaluate(AXE.read_text())
        broken = {"": await broken_rules(page)}
        await page.get_by_label("Token").fill(KEY)
        await page.keyboard.press("Enter")
        await shows(page, "h1", "Jobs")
        for address, sign in PAGES:
            await visit(page, address)
            await page.locator(sign).first.wait_for()
            broken[address] = await broken_rules(page)
        console.problems.clear()  # Chromium reports the 404
        assert {address: rules for address, rules in broken.items() if rules} == {}

    console.run(story, token="", color_scheme=scheme)


async def broken_rules(page: Page) -> list[str]:
    """Each broken rule with the elements that break it, and what is wider than the window."""
    found = await page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    rules = [f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}" for one in found["violations"]]
    return rules + ([f"{wide} pixels wider than the window"] if wide > 0 else [])


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there (make setup, with npm)")
def test_a_table_that_has_not_got_its_form_yet_is_no_region_that_only_a_mouse_can_scroll(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.set_viewport_size({"width": 390, "height": 860})
        await page.evaluate(AXE.read_text())
        await visit(page, "#/deployments/default/chat")
        await page.locator("meter").first.wait_for()
        await page.locator(".scroll[data-form=cards]").first.wait_for()
        await page.evaluate(WITHOUT_FORM)
        assert await broken_rules(page) == []

    console.run(story)


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there (make setup, with npm)")
def test_the_table_of_a_figure_breaks_no_rule_either(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.evaluate(AXE.read_text())
        await visit(page, "#/jobs/default/teach")
        await page.locator(".figure button", has_text="Table").first.click()
        await page.locator(".figure .scroll tbody tr").nth(199).wait_for()  # the newest step alone comes before
        assert await page.locator(".figure .scroll").first.evaluate("one => one.scrollHeight > one.clientHeight")
        assert await broken_rules(page) == []

    console.run(story)


def test_no_list_scrolls_sideways_at_any_width(console: Stage) -> None:
    async def story(page: Page) -> None:
        for address, sign in PAGES:
            await visit(page, address)
            await page.locator(sign).first.wait_for()
            for width in (1600, 1200, 1024, 800, 710, 390):
                await page.set_viewport_size({"width": width, "height": 860})
                assert await page.evaluate(SIDEWAYS, width) == [], f"{address} at {width}"
        console.problems.clear()  # Chromium reports the 404

    console.run(story)


def test_columns_that_do_not_fit_fold_below_their_row_before_rows_become_cards(console: Stage) -> None:
    async def story(page: Page) -> None:
        row = page.get_by_role("row", name=LONGEST)
        why, phase = row.locator("td", has=page.locator(".why")), row.locator("td").first
        for width, form in ((1600, "wide"), (1200, "folded"), (390, "cards"), (1600, "wide")):
            await page.set_viewport_size({"width": width, "height": 860})
            await page.locator(f".scroll[data-form={form}]").wait_for()
            below = await why.evaluate("one => one.offsetTop") > await phase.evaluate("one => one.offsetTop")
            assert below == (form != "wide"), form
            assert await why.inner_text() == WHY.strip(), "all of it is there in each form"

    console.run(story)


def test_a_narrow_screen_shows_rows_as_cards_that_keep_their_roles(console: Stage) -> None:
    async def story(page: Page) -> None:
        await page.set_viewport_size({"width": 390, "height": 860})
        await page.locator(".scroll[data-form=cards]").wait_for()
        card = page.get_by_role("row", name="teach", exact=True)
        await card.wait_for()
        assert {"rowheader", "cell"} <= {role for role, _ in await offered_to_screen_readers(page)}
        titles = await card.locator("td").evaluate_all(
            "all => all.filter(one => one.checkVisibility()).map(one => getComputedStyle(one, '::before').content)"
        )
        assert {'"Phase"', '"Step"', '"Loss"'} <= set(titles)
        why = page.get_by_role("row", name=LONGEST).locator(".why")
        assert (await why.inner_text()).strip() == WHY.strip(), "all of it is there for a reader"
        lines = await why.evaluate("one => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)")
        assert round(lines) == 3, "and three lines of it are shown"
        await page.get_by_role("button", name="Loss").click()
        await page.locator("tbody tr").first.filter(has_text="broken").wait_for()

    console.run(story)


def test_a_job_of_sixty_four_ranks_shows_each_on_its_node(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/sixtyfour")
        await page.locator(".rank").nth(63).wait_for()
        assert await page.locator(".rank").all_inner_texts() == [str(rank) for rank in range(64)]
        rows = (
            await page.locator(".node")
            .first.locator(".rank")
            .evaluate_all("all => new Set(all.map(r => r.offsetTop)).size")
        )
        assert rows == 1, "eight ranks in a row"
        assert await page.locator(".node", has_text="gpu-node-3").locator(".rank[data-tone=bad]").count() == 8

    console.run(story)


def test_a_token_that_ends_asks_to_sign_in_and_leads_back(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/cluster")
        await shows(page, ".facts", "GPUs")
        await page.add_init_script("sessionStorage.setItem('stoker.token', 'ended')")  # the page before asks on
        await page.reload()
        await shows(page, "[role=alert]", "Sign in again: the cluster does not know this token.")
        assert await page.get_by_role("link", name="Jobs").count() == 0, "nothing else is offered"
        await page.get_by_label("Token").fill(KEY)
        await page.keyboard.press("Enter")
        await shows(page, "h1", "Cluster")
        console.problems.clear()  # Chromium reports the 401

    console.run(story)


def test_what_cannot_be_read_says_so_in_its_place(console: Stage) -> None:
    refused = '{"detail": "pods is forbidden"}'

    async def story(page: Page) -> None:
        for part in ("pods", "attempts", "checkpoints"):
            await page.route(f"**/teach/{part}?*", lambda route: route.fulfill(status=403, body=refused))
        await visit(page, "#/jobs/default/teach")
        for words in ("The pods", "The attempts", "The checkpoints"):
            await shows(page, ".cause", f"{words} cannot be read: pods is forbidden")
        await visit(page, "#/deployments/default/bare")
        await shows(page, ".chat .muted", "No engine is ready")
        console.problems.clear()  # Chromium reports the 403

    console.run(story)


def test_checkpoints_beyond_the_first_page_of_a_job_are_counted(console: Stage) -> None:
    async def story(page: Page) -> None:
        headers = {"X-Total-Count": "1234", "Content-Type": "application/json"}
        await page.route("**/teach/checkpoints?*", lambda route: route.fulfill(headers=headers, body="[]"))
        await visit(page, "#/jobs/default/teach")
        await shows(page, ".panel .muted", "1,234 older ones are not shown here; see all checkpoints")

    console.run(story)


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


def test_a_job_that_waits_takes_no_room_for_plots(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/waits")
        await shows(page, ".why-line", "WaitingForGPUs 3 of 8")
        await shows(page, ".figure >> nth=3", "No value yet.")
        assert await page.locator(".plot").evaluate_all("all => all.map(one => one.clientHeight)") == [0] * 4

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


WITHOUT_FORM = """() => document.querySelectorAll('.table').forEach((one) => {
  const copy = one.cloneNode(true);  // nothing keeps its form
  delete copy.querySelector('.scroll').dataset.form;
  one.replaceWith(copy);
})"""
"""Tables as they are before the first frame."""
SIDEWAYS = """(width) => new Promise((done) => {
  const wide = () =>
    [...document.querySelectorAll('html, main, .scroll, .nodes, .families, .long th, .long td')]
      .filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 40)}`);
  const look = () => {
    if (innerWidth !== width) return requestAnimationFrame(look);
    const last = document.body.appendChild(document.createElement('hr'));
    new ResizeObserver((_, observer) => {
      observer.disconnect();
      last.remove();
      done(wide());
    }).observe(last);
  };
  requestAnimationFrame(look);
})"""
"""What is wider than its room, measured in a frame of that width, right after all tables took their form in it: an
observer is called after those that were made before it."""


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
