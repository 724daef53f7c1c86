"""The console in a real Chromium: every page, actions, a lost connection, many jobs, long histories."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from stoker.gateway.http.console import FILES
from stoker.operator.domain.plan import Key, Object, Ref
from testing.gateway.browser import Stage, missing_browser, shows, stage, visit
from testing.gateway.console_world import (
    AGENT_PORT,
    API_KEY,
    Programs,
    deployment,
    gpu_agent,
    many_jobs,
    other_jobs,
    programs,
    running_job,
    step_lines,
)
from testing.gateway.world import World
from testing.operator.devices import device, resource_slice
from testing.pod.nvml import FakeGpu, FakeNvml

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "complete"),
    pytest.mark.xdist_group("browser"),
]
PLOTS = (FILES / "vendor" / "uPlot.esm.js").exists()
DASH = "\u2013"
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


def at_step_nine(console: Stage, name: str) -> tuple[Object, Object]:
    """A running job with a log of nine steps, and its pod."""
    world = console.world
    found = world.put_status(world.job(name), phase="Running", progress={"step": 9, "totalSteps": 100})
    return found, world.pod(found, 0, step_lines(9))


def ref(found: Object) -> Ref:
    metadata = found["metadata"]
    return Ref(found["kind"], metadata["namespace"], metadata["name"], metadata["uid"])


async def text_of(page: Page, selector: str) -> str:
    return re.sub(r"\s+", " ", await page.locator(selector).inner_text())


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
        await shows(page, ".table-tools", re.compile(r"^Filter 1 of \d+ jobs$"))
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
        await page.clock.set_fixed_time(START.replace(microsecond=0) + timedelta(minutes=60))
        await visit(page, "#/jobs/default/teach")
        await shows(page, "h1", "teach")
        await shows(page, ".figure >> nth=0", "1,200 values")
        words = await text_of(page, ".figure >> nth=0")
        assert re.search(r"loss [\d.]+ at step 1,200, lowest [\d.]+ at step [\d,]+ \(1,200 values\)", words)
        assert "validation loss" in words
        await shows(page, ".figure >> nth=3", "1,200 values")
        rate = await text_of(page, ".figure >> nth=3")
        assert re.search(r"tokens/s 4\d,\d{3} at step 1,200, from 3\d,\d{3} to 4\d,\d{3}", rate)
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
        await shows(page, ".legend", "Productive 51 min (89 %)")  # 41 minutes and the 10 since then
        await page.get_by_role("button", name="Table").first.click()
        await page.locator(".figure tbody tr").nth(199).wait_for()

    console.run(story)


@pytest.mark.skipif(not PLOTS, reason="uPlot is not installed (make setup)")
def test_what_has_no_value_has_no_picture_and_one_value_is_seen(console: Stage) -> None:
    coloured = """canvas => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200 && Math.max(...data.slice(at, at + 3)) - Math.min(...data.slice(at, at + 3)) > 90)
          return true;
      return false;
    }"""

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/done")
        await shows(page, ".figure", "loss 2.5 at step 100, 1 value")
        await page.wait_for_function(f"() => ({coloured})(document.querySelector('.plot canvas'))")
        await shows(page, ".figure >> nth=3", "No value yet.")  # the last of them, each a frame after the one before
        assert await page.locator(".plot canvas").count() == 1, "the other three have no value"
        assert await page.locator(".figure", has_text="No value yet.").count() == 3

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


def test_a_time_of_a_clock_that_is_days_ahead_has_its_date(console: Stage) -> None:
    ahead = datetime.now(UTC) + timedelta(days=3)
    console.world.put_status(console.world.job("ahead"), phase="Running", startedAt=f"{ahead:%Y-%m-%dT%H:%M:%SZ}")

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/ahead")
        await shows(page, ".facts time", str(ahead.year))

    console.run(story)


def test_a_run_that_goes_back_loses_the_steps_that_were_thrown_away(console: Stage) -> None:
    world = console.world
    found, pod = at_step_nine(console, "back")

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/back")
        await shows(page, ".figure", "9 values")
        world.folders.log("default", pod["metadata"]["name"]).write_text(step_lines(4, seed=8))
        world.put_status(found, progress={"step": 4, "totalSteps": 100})
        await shows(page, ".figure", re.compile("at step 4,.*4 values"))

    console.run(story)


def test_another_job_of_the_same_name_has_nothing_of_the_one_that_was_deleted(console: Stage) -> None:
    world = console.world
    found, pod = at_step_nine(console, "again")

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/again")
        await shows(page, ".figure", "9 values")
        for one in (pod, found):
            world.objects.delete(ref(one))
        await shows(page, ".why-line", "This job was deleted.")
        made = world.job("again")
        world.pod(made, 0, step_lines(4, seed=8), attempt=1)
        world.put_status(made, phase="Running", progress={"step": 4, "totalSteps": 100})
        await shows(page, ".figure", re.compile("at step 4,.*4 values"))
        await page.get_by_role("button", name="Suspend").wait_for()

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
        await visit(page, "#/jobs/default/waits")
        await page.get_by_role("button", name="Suspend").wait_for()
        assert await page.get_by_role("button", name="Save now").count() == 0, "nothing runs that could save"
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


def test_a_finished_job_goes_on_as_a_new_one_from_a_chosen_checkpoint(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("ended"), phase="Completed", progress={"step": 100, "totalSteps": 100})
    for step in (50, 100):
        world.checkpoint(found, step)

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/ended")
        await page.get_by_role("row", name="ended-50").wait_for()
        await page.get_by_role("button", name="Continue as a new job").click()
        dialog = page.get_by_role("dialog")
        assert await dialog.get_by_label("Steps in total").input_value() == "200", "the newest is at the end"
        await dialog.get_by_label("From").select_option("ended-50 (step 50)")
        await dialog.get_by_label("Steps in total").fill("150")
        await dialog.get_by_role("button", name="Continue").click()
        await shows(page, "h1", "ended-go-")

    console.run(story)
    (made,) = [one for one in world.objects.of_kind("TrainingJob") if one["metadata"]["name"].startswith("ended-go-")]
    assert made["spec"]["modelFrom"]["checkpoint"]["name"] == "ended-50"
    assert made["spec"]["training"]["totalSteps"] == 150


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


def test_a_deployment_is_promoted_to_a_checkpoint_of_its_choice(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/deployments/default/chat")
        await page.get_by_role("button", name="Promote a checkpoint").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Checkpoint").wait_for()  # the list is read before it opens
        offered = await dialog.get_by_label("Checkpoint").locator("option").all_inner_texts()
        assert not any("teach-420" in text for text in offered), "a corrupt one is not offered"
        saves = [text for text in offered if text.startswith("teach-")]
        assert saves[0].startswith("teach-1200 (step 1,200, loss 2.1"), "newest first"
        await dialog.get_by_label("Checkpoint").select_option(saves[1])
        await dialog.get_by_role("button", name="Promote").click()
        await shows(page, ".notice", "chat moves to teach-1000")

    console.run(story)
    assert model_of(console)["checkpointRef"] == {"name": "teach-1000"}


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
        found = console.world.objects.get(Key("InferenceDeployment", "default", "chat"))
        rollout = {"phase": "Progressing", "fromRevision": "r7", "toRevision": "r6", "step": 1}
        console.world.put_status(found, rollout=rollout)
        await page.get_by_role("button", name="Roll back to r7").wait_for()
        assert await page.get_by_role("button", name="Roll back to r6").count() == 0, "that is where it goes"
        console.world.put_status(found, rollout=None)
        await page.get_by_label("Message").fill(HOSTILE)
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", f"You asked: {HOSTILE}")
        assert await page.locator(".said[data-who=assistant] p").all_inner_texts() == [
            "Let me think", f"You asked: {HOSTILE}",
        ]  # fmt: skip
        assert await page.locator(".chat img").count() == 0
        await shows(page, "tr", "FirstTokenLate: the first token takes 240 ms of 200")

    console.run(story)
    assert model_of(console)["checkpointRef"] == {"name": "teach-800"}
    assert SERVED[0].asked[-1]["model"] == "chat"


def test_a_cleared_answer_is_no_part_of_the_next_question(console: Stage) -> None:
    async def story(page: Page) -> None:
        await visit(page, "#/deployments/default/chat")
        await page.get_by_label("Message").fill("slow")
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", "You")
        await page.get_by_role("button", name="Clear").click()
        await page.locator(".chat button[type=submit]:enabled").wait_for()
        await page.get_by_label("Message").fill("next")
        await page.keyboard.press("Enter")
        await shows(page, ".said[data-who=assistant]", "You asked: next")
        SERVED[0].held.set()

    console.run(story)
    assert SERVED[0].asked[-1]["messages"] == [{"role": "user", "content": "next"}]


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
        await shows(page, "main", "prometheus_url")

    console.run(story)


def test_the_cluster_names_gpus_that_are_devices_of_drivers(console: Stage) -> None:
    console.world.devices.serve(resource_slice("local", [device("d0")]))

    async def story(page: Page) -> None:
        await visit(page, "#/cluster")
        await shows(page, ".gpu-kinds li", "local: 1 of 1 gpu.example.com available, 2 of 2 nvidia.com/gpu available")
        console.world.devices.serve(versions=())

    console.run(story)


def test_the_cluster_shows_each_gpu_that_an_agent_measures(console: Stage) -> None:
    world = console.world
    gpus = [FakeGpu("GPU-7f", "0000:1B", busy=42, used=20 << 30), FakeGpu("GPU-9c", "0000:43", busy=None)]

    async def story(page: Page) -> None:
        pod = world.pod(world.job("measured"), 0, "", gpus=1, port=AGENT_PORT)
        async with gpu_agent(world, pod, FakeNvml(gpus)):
            await visit(page, "#/cluster")
            await shows(page, "tr", "GPU-7f")
            rows = page.get_by_role("table", name="GPUs").locator("tbody tr")
            shown = [re.sub(r"\s+", " ", text) for text in await rows.all_inner_texts()]
            assert shown == [
                "GPU-7f local 42 % 25 % 20 GiB of 80 GiB agents",
                f"GPU-9c local {DASH} 0.0 % 0 B of 80 GiB agents",
            ]
            await shows(page, ".facts", "2 by agents")
        world.objects.delete(Ref("Pod", "default", pod["metadata"]["name"], pod["metadata"]["uid"]))

    console.run(story)


def test_a_question_keeps_wrong_values_and_enter_answers_it(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("asked"), phase="Completed", progress={"step": 100, "totalSteps": 100})
    bare = world.put_status(world.job("bare"), phase="Completed", progress={"step": 100, "totalSteps": 100})
    world.checkpoint(found, 50)

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/asked")
        await page.get_by_role("row", name="asked-50").wait_for()
        await page.get_by_role("button", name="Continue as a new job").click()
        steps = page.get_by_role("dialog").get_by_label("Steps in total")
        for wrong in ("0", "2.5", "-3"):
            await steps.fill(wrong)
            await page.keyboard.press("Enter")
            assert await page.get_by_role("dialog").is_visible()
        await steps.fill("150")
        await page.keyboard.press("Enter")
        await shows(page, "h1", "asked-go-")
        await visit(page, f"#/jobs/default/{bare['metadata']['name']}")
        await shows(page, "h1", "bare")
        await page.get_by_role("button", name="Continue as a new job").click()
        await shows(page, "dialog", "no verified checkpoint")
        assert await page.get_by_role("dialog").get_by_role("button").all_inner_texts() == ["Back"]

    console.run(story)


def test_a_wrong_namespace_is_not_asked_for(console: Stage) -> None:
    async def story(page: Page) -> None:
        await shows(page, "tr", "teach")
        await page.get_by_label("Namespace").fill("Bad_Name")
        await page.keyboard.press("Enter")
        assert await page.locator("#namespace:invalid").count() == 1
        assert await page.evaluate("sessionStorage.getItem('stoker.namespace')") is None
        await page.get_by_label("Namespace").fill("*")
        await page.keyboard.press("Enter")
        await page.wait_for_function("() => sessionStorage.getItem('stoker.namespace') === '*'")

    console.run(story)


@pytest.mark.parametrize("address", ["#/jobs/%E0%A4%A/x", "#/nothing", "#/jobs/a/b/c"])
def test_an_address_that_is_none_is_said(console: Stage, address: str) -> None:
    async def story(page: Page) -> None:
        await shows(page, "h1", "Jobs")
        await visit(page, address)
        await shows(page, "h1", "No such page")
        assert await page.locator("nav [aria-current]").count() == 0

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
        await page.locator(".lost").wait_for(state="hidden")
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


def test_twenty_thousand_points_stay_usable(console: Stage) -> None:
    world = console.world
    found = world.put_status(world.job("long"), phase="Running", progress={"step": 20_000, "totalSteps": 30_000})
    world.pod(found, 0, step_lines(20_000))

    async def story(page: Page) -> None:
        await visit(page, "#/jobs/default/long")
        await shows(page, ".figure", "20,000 values")
        if PLOTS:
            await page.locator(".plot canvas").first.wait_for()
            await page.locator(".u-over").first.hover()
            drawn = (
                "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(v => v)"
            )
            await page.wait_for_function(f"() => ({drawn})(document.querySelector('.plot canvas'))")
        await page.get_by_role("button", name="Table").first.click()
        await page.locator(".figure tbody tr").nth(199).wait_for()

    console.run(story)
