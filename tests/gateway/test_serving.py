"""What a deployment serves: engines and traffic, chat, promotion and roll back; attempts and pods of a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx

from stoker.gateway.domain.run_history import rank_pod
from stoker.gateway.domain.serving import engine_load, traffic
from stoker.gateway.http.console import FILES
from stoker.operator.domain.pods import ref_of
from testing.gateway.console_world import (
    deployment,
    other_jobs,
    programs,
    routers,
    running_job,
    use_checkpoint,
)
from testing.gateway.world import World

Tell = Callable[..., None]
START = datetime(2026, 1, 1, tzinfo=UTC)
CHAT = "/v1/deployments/chat"


def model_of(found: World) -> object:
    (item,) = found.objects.of_kind("InferenceDeployment")
    return {name: value for name, value in item["spec"]["model"].items() if name.startswith("checkpoint")}


def test_attempts_tell_causes_and_the_use_of_time(tell: Tell) -> None:
    async def story(found: World) -> None:
        running_job(found, START, steps=420)
        history = (await found.client.get("/v1/training/jobs/teach/attempts")).json()
        first, second = history["attempts"]
        assert (first["attempt"], first["failure"]["cause"], first["failure"]["node"]) == (
            0,
            "OutOfMemory",
            "gpu-node-3",
        )
        assert (second["resumed_from"], second["failure"]) == ({"checkpoint_name": "teach-400", "step": 400}, None)
        assert (first["startup"], list(second["startup"].items())[-3:]) == (
            {}, [("load", 25), ("compile", 8), ("first_step", 6)],
        )  # fmt: skip
        assert (history["goodput"]["productive"], history["goodput"]["state"]) == (2460, "productive")
        pods = (await found.client.get("/v1/training/jobs/teach/pods")).json()
        assert [(pod["attempt"], pod["first_rank"], pod["last_rank"], pod["node"]) for pod in pods] == [
            (0, 0, 3, "gpu-node-2"), (1, 0, 3, "gpu-node-1"), (1, 4, 7, "gpu-node-4"),
        ]  # fmt: skip
        assert [(pod["ready"], pod["gpus"]) for pod in pods[1:]] == [(True, 4), (True, 4)]
        ended = {"number": 0, "endedAt": "2026-01-01T00:00:00Z", "end": "suspended by the user"}
        found.put_status(found.job("ended"), attempt=ended)
        (shown,) = (await found.client.get("/v1/training/jobs/ended/attempts")).json()["attempts"]
        assert (shown["end"], shown["failure"], second["end"]) == ("suspended by the user", None, None)
        found.job("new")
        assert (await found.client.get("/v1/training/jobs/new/attempts")).json()["attempts"] == []

    tell(story)


def test_a_checkpoint_names_its_attempt_and_its_users(tell: Tell) -> None:
    async def story(found: World) -> None:
        running_job(found, START, steps=420)
        use_checkpoint(found, "teach-400", "chat")
        answer = (await found.client.get("/v1/checkpoints/teach-400")).json()
        assert (answer["attempt"], answer["in_use_by"]) == (0, ["InferenceDeployment/chat"])

    tell(story)


def test_the_traffic_of_several_routers_is_what_they_count_together(tell: Tell) -> None:
    async def story(found: World) -> None:
        chat = deployment(found, START)
        async with programs(found) as made, routers(found, chat, made, 3):
            answer = (await found.client.get(f"{CHAT}/serving")).json()
            assert (answer["routers"], answer["traffic"]["requests"]["500"]) == (3, 3.0)
            assert answer["traffic"]["first_byte_seconds"][-1]["count"] == answer["traffic"]["requests"]["200"]
            counted = (answer["traffic"]["held"], answer["traffic"]["pending"], answer["traffic"]["ready_engines"])
            assert counted == (6.0, 9.0, 2.0)
        late = (await found.client.get(f"{CHAT}/serving")).json()
        assert (late["traffic"], "chat-router-" in late["unavailable"]["traffic"]) == (None, True), "not of some alone"

    tell(story)


def test_pools_revisions_and_the_load_of_each_engine(tell: Tell) -> None:
    async def story(found: World) -> None:
        deployment(found, START)
        async with programs(found, engines=1):
            answer = (await found.client.get(f"{CHAT}/serving")).json()
        assert answer["traffic"]["requests"] == {
            "200": 140.0 + 40 * (answer["traffic"]["requests"]["200"] > 140),
            "500": 1.0,
        }
        assert answer["traffic"]["first_byte_seconds"][-1]["up_to"] is None
        assert (answer["traffic"]["held"], answer["traffic"]["pending"]) == (2.0, 3.0)
        first, second = answer["engines"]
        assert (first["load"]["kv_cache_usage"], first["load"]["running"], second["load"]) == (0.42, 5.0, None)
        assert "chat-main-1" in answer["unavailable"], "an engine that cannot be reached is named"
        shown = (await found.client.get(CHAT)).json()
        assert [(one["name"], one["share"]) for one in shown["revisions"]] == [("r7", 100), ("r6", 0)]
        assert shown["checkpoint"] == {"checkpoint_name": "teach-1200", "step": 1200, "verified": True}
        assert (shown["pools"][0]["ready"], shown["models"], shown["current_revision"]) == (2, ["chat"], "r7")
        start = shown["pools"][0]["last_start"]
        assert (start["engine"], start["seconds"]) == ("chat-main-1", 18)
        assert list(start["parts"].items()) == [("schedule", 0), ("pull", 5), ("load", 9), ("ready", 4)]

    tell(story, sockets=True)


def test_a_chat_reaches_the_deployment_whole_and_as_events(tell: Tell) -> None:
    async def story(found: World) -> None:
        deployment(found, START)
        asked = {"model": "chat", "messages": [{"role": "user", "content": "héllo"}]}
        path = f"{CHAT}/chat/completions"
        async with programs(found) as served:
            whole = await found.client.post(path, json=asked)
            assert whole.json()["choices"][0]["message"]["content"] == "You asked: héllo"
            async with found.client.stream("POST", path, json={**asked, "stream": True}) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                parts = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
            words = [json.loads(part)["choices"][0]["delta"].get("content", "") for part in parts[:-1]]
            assert ("".join(words), parts[-1]) == ("You asked: héllo", "[DONE]")
            assert [body["stream"] for body in served.asked if "stream" in body] == [True]
            refused = await found.client.post(path, json={**asked, "model": "unknown"})
            assert (refused.status_code, "'unknown' is not served" in refused.json()["detail"]) == (404, True)
            late = await found.client.post(path, json={**asked, "model": "late"})
            assert (late.status_code, late.json()["type"]) == (503, "urn:stoker:problem:not-ready")
            assert (late.headers["retry-after"], "No engine is ready" in late.json()["detail"]) == ("2", True)
        gone = await found.client.post(path, json=asked)
        assert (gone.status_code, gone.headers["content-type"]) == (503, "application/problem+json")
        wrong = await found.client.post(path, json=["no", "object"])
        assert wrong.status_code == 422

    tell(story, sockets=True)


def test_a_chat_needs_the_callers_own_right(tell: Tell) -> None:
    async def story(found: World) -> None:
        if found.server is None:
            return  # the embedded cluster has one user
        deployment(found, START)
        viewer = {"Authorization": "Bearer viewer"}
        async with programs(found) as served:
            body = {"messages": [{"role": "user", "content": "hello"}]}
            refused = await found.client.post(f"{CHAT}/chat/completions", json=body, headers=viewer)
            assert (refused.status_code, served.asked) == (403, [])
            assert ("viewer", "create", "services") not in found.server.requests
            await found.client.post(f"{CHAT}/chat/completions", json=body)
            assert ("admin", "create", "services") in found.server.requests

    tell(story, sockets=True)


def test_promotion_takes_verified_checkpoints_alone(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = running_job(found, START, steps=420)
        other_jobs(found)
        deployment(found, START)
        corrupt = await found.client.post(f"{CHAT}/promote", json={"checkpoint_id": "teach-420"})
        assert (corrupt.status_code, corrupt.json()["errors"][0]["field"]) == (422, "checkpoint_id")
        missing = await found.client.post(f"{CHAT}/promote", json={"checkpoint_id": "nothing"})
        assert missing.status_code == 404
        assert model_of(found) == {"checkpointSelector": {"jobRef": {"name": "teach"}, "policy": "newest"}}
        moved = await found.client.post(f"{CHAT}/promote", json={"checkpoint_id": "teach-800"})
        assert (moved.status_code, model_of(found)) == (202, {"checkpointRef": {"name": "teach-800"}})
        stale = await found.client.post(
            f"{CHAT}/promote", json={"checkpoint_id": "teach-600"}, headers={"If-Match": '"1"'}
        )
        assert stale.status_code == 412
        by_uid = (await found.client.get("/v1/checkpoints/teach-600")).json()["checkpoint_id"]
        await found.client.post(f"{CHAT}/promote", json={"checkpoint_id": by_uid})
        assert model_of(found) == {"checkpointRef": {"name": "teach-600"}}
        assert job["metadata"]["name"] == "teach"

    tell(story)


def test_a_deployment_of_a_fetched_model_is_promoted_to_a_checkpoint(tell: Tell) -> None:
    async def story(found: World) -> None:
        running_job(found, START, steps=420)
        other_jobs(found)
        item = deployment(found, START)
        fetched = {"uri": "hf://team/base", "uriSecretRef": {"name": "hub"}}
        found.objects.patch(ref_of(item), {"spec": {"model": {"checkpointSelector": None, **fetched}}})
        moved = await found.client.post(f"{CHAT}/promote", json={"checkpoint_id": "teach-800"})
        assert moved.status_code == 202, moved.text
        assert moved.json()["spec"]["model"].keys() == {"checkpointRef", "names", "dtype"}

    tell(story)


def test_roll_back_serves_the_checkpoint_of_an_earlier_revision(tell: Tell) -> None:
    async def story(found: World) -> None:
        item = deployment(found, START)
        unknown = await found.client.post(f"{CHAT}/rollback", json={"revision": "r1"})
        assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "revision")
        assert "those are: r7, r6" in unknown.json()["detail"]
        gone = await found.client.post(f"{CHAT}/rollback")
        assert (gone.status_code, gone.json()["detail"]) == (
            409, "revision r6 served checkpoint teach-800, which is gone"
        )  # fmt: skip
        job = found.job("teach")
        older, newer = found.checkpoint(job, 800, verified=False), found.checkpoint(job, 1200)
        broken = await found.client.post(f"{CHAT}/rollback")
        assert (broken.status_code, "is Complete and not verified" in broken.json()["detail"]) == (409, True)
        for one in (older, newer):
            condition = {
                "type": "Verified",
                "status": "True",
                "reason": "Read",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            found.put_status(one, conditions=[condition])
        back = await found.client.post(f"{CHAT}/rollback")
        assert (back.status_code, model_of(found)) == (202, {"checkpointRef": {"name": "teach-800"}})
        assert back.headers["etag"] == (await found.client.get(CHAT)).headers["etag"]
        await found.client.post(f"{CHAT}/rollback", json={"revision": "r7"})
        assert model_of(found) == {"checkpointRef": {"name": "teach-1200"}}
        found.put_status(item, revisions=item["status"]["revisions"][:1])
        none = await found.client.post(f"{CHAT}/rollback")
        assert (none.status_code, "no earlier revision" in none.json()["detail"]) == (409, True)

    tell(story)


def test_counters_of_several_labels_are_added() -> None:
    text = 'a_bucket{le="1"} 1\nvllm:num_requests_running{m="x"} 2\nvllm:num_requests_running{m="y"} 3\n'
    assert engine_load(text).running == 5.0
    assert engine_load(text).kv_cache_usage is None
    histogram = "".join(
        f'stoker_router_first_byte_seconds_bucket{{code="{code}",le="{le}"}} {n}\n'
        for code, le, n in (("a", "0.5", 1), ("a", "+Inf", 2), ("b", "0.5", 3), ("b", "+Inf", 4))
    )
    assert [(one.up_to, one.count) for one in traffic(histogram).first_byte_seconds] == [(0.5, 4.0), (None, 6.0)]


def test_a_pod_that_does_not_run_says_why() -> None:
    pod = {
        "metadata": {"name": "p", "labels": {"stoker.dev/node-rank": "2"}},
        "spec": {"containers": []},
        "status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "none"}}}]},
    }
    seen = rank_pod(pod, {"spec": {"workers": {"gpusPerPod": 8}}})
    assert (seen.first_rank, seen.last_rank, seen.message) == (16, 23, "ImagePullBackOff: none")


def test_the_console_is_served_under_a_strict_policy(tell: Tell) -> None:
    async def story(found: World) -> None:
        async with httpx.AsyncClient(base_url=found.client.base_url, transport=found.client._transport) as anyone:
            root = await anyone.get("/")
            assert (root.status_code, root.headers["location"]) == (307, "/console/")
            page = await anyone.get("/console/")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == (
                "nosniff",
                "no-referrer",
            )
            script = await anyone.get("/console/main.js")
            assert script.headers["content-type"].startswith("text/javascript")
            unchanged = await anyone.get("/console/main.js", headers={"If-None-Match": script.headers["etag"]})
            assert unchanged.status_code == 304
            for path in (
                "/console/../config.py",
                "/console/%2e%2e/config.py",
                "/console/nothing.js",
                "/console/pages/",
            ):
                assert (await anyone.get(path)).status_code == 404, path

    tell(story)


def test_the_console_has_no_inline_code_and_no_html_from_data() -> None:
    page = (FILES / "index.html").read_text()
    assert " style=" not in page
    assert " on" not in page.replace(" one", "")
    assert page.count("<script") == page.count('<script type="module" src=') == 1
    for file in sorted(FILES.rglob("*.js")):
        if "vendor" not in file.parts:
            text = file.read_text()
            for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert sink not in text, f"{file}: {sink}"
            assert max(len(line) for line in text.splitlines()) <= 120, file
            assert len(text.splitlines()) < 400, file


def test_every_module_is_reached_from_the_page(tmp_path: Path) -> None:
    def reached(file: Path, seen: set[Path]) -> set[Path]:
        if file in seen or "vendor" in file.parts:
            return seen
        seen.add(file)
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "export {")) and ' from "' in line:
                reached((file.parent / line.split(' from "')[1].split('"')[0]).resolve(), seen)
        return seen

    files = {file for file in FILES.rglob("*.js") if "vendor" not in file.parts}
    assert reached(FILES / "main.js", set()) == files
