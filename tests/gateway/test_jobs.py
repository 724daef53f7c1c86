"""The routes of training jobs: bodies and states of the low-level design, errors that name the field, safe repeats."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stoker.gateway.domain.sections import to_spec
from stoker.gateway.domain.states import JOB_STATES
from stoker.gateway.problem import Problem
from stoker.operator.api.trainingjob_status import TERMINAL_PHASES, TrainingPhase
from stoker.operator.domain.plan import Key
from testing.gateway.world import JOB_SPEC, World

Tell = Callable[..., None]
JOBS = "/v1/training/jobs"
WHOLE: dict[str, Any] = {
    "job_name": "pretrain",
    "model_config": {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    },
    "parallelism_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1},
    "optimization_config": {
        "optimizer": "ADAMW",
        "learning_rate": 3e-5,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "gradient_clipping": 1.0,
        "warmup_steps": 5,
        "total_steps": 100,
        "lr_scheduler": "COSINE",
    },
    "memory_config": {"precision": "BF16", "zero_stage": 1, "gradient_checkpointing": True, "cpu_offload": False},
    "data_config": {
        "dataset_path": "/data/text.txt",
        "sequence_length": 64,
        "global_batch_size": 8,
        "micro_batch_size": 1,
    },
    "checkpoint_config": {
        "checkpoint_dir": "pvc://claim/runs/one",
        "checkpoint_interval_steps": 10,
        "max_checkpoints_to_keep": 3,
        "async_save": True,
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """`WHOLE` with another value at `section.field`."""
    section, _, field = path.partition(".")
    return {**WHOLE, section: {**WHOLE[section], field: value}}


def test_a_job_of_sections_comes_back_as_it_was_sent(tell: Tell) -> None:
    async def story(found: World) -> None:
        answer = await found.client.post(JOBS, json=WHOLE)
        assert (answer.status_code, answer.json()["status"]) == (201, "PENDING"), answer.text
        made = answer.json()
        read = await found.client.get(answer.headers["location"])
        job = read.json()
        for section, values in WHOLE.items():
            if isinstance(values, dict):
                assert {name: job[section][name] for name in values} == values
        assert job["job_id"] == made["job_id"]
        assert job["spec"]["optimization"]["learningRate"] == "0.00003"
        assert job["spec"]["checkpoint"]["storage"] == {"claimName": "claim", "path": "runs/one"}
        assert job["spec"]["memory"]["activationCheckpointing"] == "full"
        assert (await found.client.get(f"{JOBS}/pretrain")).json() == job, "by name as by UUID"
        assert read.headers["etag"] == answer.headers["etag"] == f'"{job["resource_version"]}"'
        same = await found.client.get(f"{JOBS}/pretrain", headers={"If-None-Match": read.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")

    tell(story)


def test_a_number_is_the_same_in_every_way_to_write_it() -> None:
    rate = {"optimization_config": {"learning_rate": 3e-4}}
    for text in ("3e-4", "0.0003", "0.00030", "3E-04"):
        assert to_spec(rate, {"optimization": {"learningRate": text}}) == {"optimization": {"learningRate": text}}
    for other in ("4e-4", "much", None):
        with pytest.raises(Problem, match="differs from"):
            to_spec(rate, {"optimization": {"learningRate": other}})


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("range of the API", changed("memory_config.zero_stage", 4), "memory_config.zero_stage", "less than or equal to 3"),
    (
        "rule of the definition",
        changed("optimization_config.warmup_steps", 101),
        "optimization_config.warmup_steps",
        "101",
    ),
    ("enumeration", changed("optimization_config.optimizer", "SGD"), "optimization_config.optimizer", "adamw"),
    (
        "calculated",
        changed("parallelism_config.data_parallel_size", 2),
        "parallelism_config.data_parallel_size",
        "calculated",
    ),
    ("no claim", changed("checkpoint_config.checkpoint_dir", "s3://a"), "checkpoint_config.checkpoint_dir", "pvc://"),
    ("no folder", changed("memory_config.nvme_offload", True), "memory_config.nvme_offload", "nvmeOffload.path"),
    (
        "no offload and its folder",
        {**changed("memory_config.nvme_offload", False), "spec": {"memory": {"nvmeOffload": {"path": "/nvme"}}}},
        "memory_config.nvme_offload",
        "false differs from spec.memory.nvmeOffload",
    ),
    ("empty path", changed("data_config.dataset_path", ""), "data_config.dataset_path", ""),
    ("empty folder", changed("checkpoint_config.checkpoint_dir", ""), "checkpoint_config.checkpoint_dir", "pvc://"),
    (
        "empty path beside another",
        {**changed("data_config.tokenizer_path", ""), "spec": {"data": {"tokenizer": {"kind": "train"}}}},
        "data_config.tokenizer_path",
        "differs from",
    ),
    ("unknown", {**WHOLE, "colour": "red"}, "colour", "no such field"),
    ("unknown in the spec", {**WHOLE, "spec": {"colour": "red"}}, "spec.colour", "unknown field"),
    ("twice", {**WHOLE, "spec": {"training": {"totalSteps": 7}}}, "optimization_config.total_steps", "differs from 7"),
    ("no object", {**WHOLE, "spec": {"training": 7}}, "spec.training", "an object is needed"),
    ("missing", {"job_name": "a"}, "spec.training", "Required value"),
    ("name", {**WHOLE, "job_name": "Not a name"}, "job_name", "Not a name"),
]


@pytest.mark.parametrize(("body", "field", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_an_error_names_the_field_as_the_caller_wrote_it(
    tell: Tell, body: dict[str, Any], field: str, text: str
) -> None:
    async def story(found: World) -> None:
        answer = await found.client.post(JOBS, json=body)
        problem = answer.json()
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), problem
        assert problem["instance"] == JOBS
        assert any(one["field"] == field and text in one["message"] for one in problem["errors"]), problem
        assert found.objects.of_kind("TrainingJob") == []

    tell(story)


def test_a_repeated_submission_makes_one_job(tell: Tell) -> None:
    async def story(found: World) -> None:
        key = {"Idempotency-Key": "order-7"}
        first, again = [await found.client.post(JOBS, json=WHOLE, headers=key) for _ in range(2)]
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.json() == again.json()
        assert first.json()["job_name"].startswith("pretrain-")
        other = await found.client.post(JOBS, json=changed("data_config.micro_batch_size", 2), headers=key)
        assert (other.status_code, other.json()["type"]) == (422, "urn:stoker:problem:idempotency-key-reused")
        assert len(found.objects.of_kind("TrainingJob")) == 1
        plain = await found.client.post(JOBS, json=WHOLE)
        taken = await found.client.post(JOBS, json=WHOLE)
        assert (plain.status_code, taken.status_code) == (201, 409)
        assert taken.json()["type"] == "urn:stoker:problem:exists"

    tell(story)


def test_every_phase_has_a_state() -> None:
    assert set(JOB_STATES) == set(TrainingPhase.__args__)  # type: ignore[attr-defined]
    ended = {phase for phase, state in JOB_STATES.items() if state in ("COMPLETED", "FAILED", "CANCELLED")}
    assert ended == TERMINAL_PHASES


def test_metrics_of_a_running_job_are_numbers_or_null(tell: Tell) -> None:
    async def story(found: World) -> None:
        progress = {"step": 7, "totalSteps": 100, "tokens": 640, "loss": "nan", "learningRate": "0.0003"}
        found.put_status(found.job(), phase="Running", progress=progress, restarts=2, dataParallel=4)
        job = (await found.client.get(f"{JOBS}/run")).json()
        assert (job["status"], job["phase"]) == ("RUNNING", "Running")
        assert (job["metrics"]["step"], job["metrics"]["learning_rate"]) == (7, 0.0003)
        assert job["metrics"]["loss"] is None, "JSON has no NaN"
        assert job["parallelism_config"]["data_parallel_size"] == 4

    tell(story)


def test_pages_and_states(tell: Tell) -> None:
    async def story(found: World) -> None:
        for number in range(5):
            found.put_status(found.job(f"job-{number}"), phase="Running" if number % 2 else "Completed")
        found.job("elsewhere", namespace="team-a")
        seen, following = [], ""
        while True:
            page = (await found.client.get(JOBS, params={"limit": 2, "continue": following})).json()
            seen += [job["job_name"] for job in page["items"]]
            following = page["continue"]
            if not following:
                break
        assert seen == [f"job-{number}" for number in range(5)]
        running = (await found.client.get(JOBS, params={"status": "RUNNING"})).json()["items"]
        assert [job["job_name"] for job in running] == ["job-1", "job-3"]
        assert len((await found.client.get(JOBS, params={"namespace": "*"})).json()["items"]) == 6

    tell(story)


def test_cancel_and_purge(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        path = f"{JOBS}/{job['metadata']['uid']}"
        stale = await found.client.delete(path, headers={"If-Match": '"1"'})
        assert (stale.status_code, stale.json()["type"]) == (412, "urn:stoker:problem:stale")
        for _ in range(2):
            assert (await found.client.delete(path)).json() == {"status": "CANCELLED"}
        (stored,) = found.objects.of_kind("TrainingJob")
        assert stored["spec"]["run"]["cancel"] is True
        found.put_status(stored, phase="Completed")
        refused = await found.client.delete(path)
        assert (refused.status_code, refused.json()["detail"]) == (
            409,
            "job run is COMPLETED: it cannot be cancelled; ?purge=true deletes it",
        )
        assert (await found.client.delete(path, params={"purge": True})).json() == {"status": "DELETED"}
        assert (await found.client.get(path)).status_code == 404

    tell(story)


def test_a_suspended_job_goes_on_from_its_newest_save_alone(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        early = await found.client.post(f"{JOBS}/run/resume")
        assert (early.status_code, "only a suspended or finished job" in early.json()["detail"]) == (409, True)
        suspended = await found.client.post(f"{JOBS}/run/suspend")
        assert (suspended.status_code, suspended.headers["etag"]) == (
            202, (await found.client.get(f"{JOBS}/run")).headers["etag"],
        )  # fmt: skip
        found.put_status(found.objects.of_kind("TrainingJob")[0], phase="Suspended")
        old, new = found.checkpoint(job, 10), found.checkpoint(job, 20)
        body = {"checkpoint_id": old["metadata"]["uid"]}
        older = await found.client.post(f"{JOBS}/run/resume", json=body)
        assert (older.status_code, "run-20" in older.json()["detail"]) == (409, True)
        answer = await found.client.post(f"{JOBS}/run/resume", json={"checkpoint_id": new["metadata"]["uid"]})
        assert (answer.status_code, answer.json()["job_id"]) == (202, job["metadata"]["uid"])
        assert found.objects.of_kind("TrainingJob")[0]["spec"]["run"]["suspend"] is False

    tell(story)


def test_a_repeated_resume_of_a_suspended_job_does_nothing_again(tell: Tell) -> None:
    """A client whose first answer was lost sends the same request again, whatever the job does by then."""

    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Suspended")
        await found.client.post(f"{JOBS}/run/suspend")
        saved = found.checkpoint(job, 20)["metadata"]["uid"]
        key = {"Idempotency-Key": "again"}

        async def ask() -> httpx.Response:
            return await found.client.post(f"{JOBS}/run/resume", headers=key, json={"checkpoint_id": saved})

        first = await ask()
        assert (first.status_code, first.json()["job_id"]) == (202, job["metadata"]["uid"])
        found.put_status(found.objects.of_kind("TrainingJob")[0], phase="Running")
        second = await ask()
        assert (second.status_code, second.json()) == (202, {**first.json(), "status": "RUNNING"})
        other = await found.client.post(f"{JOBS}/run/resume", headers=key)
        assert (other.status_code, other.json()["type"]) == (422, "urn:stoker:problem:idempotency-key-reused")
        assert other.json()["detail"] == (
            f"checkpoint_id: got none, but the first request with this Idempotency-Key (run) had {saved!r}: "
            f"give {saved!r}, or take a new key"
        )
        fresh = await found.client.post(f"{JOBS}/run/resume", headers={"Idempotency-Key": "fresh"})
        assert fresh.status_code == 409, "another request is told that the job runs"
        await found.client.post(f"{JOBS}/run/suspend")
        late = await ask()
        assert (late.status_code, found.objects.of_kind("TrainingJob")[0]["spec"]["run"]["suspend"]) == (202, True)
        found.put_status(found.objects.of_kind("TrainingJob")[0], phase="Completed")
        assert (await ask()).json()["job_id"] == job["metadata"]["uid"]

    tell(story)


def test_a_job_that_is_being_cancelled_is_neither_suspended_nor_resumed(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.put_status(found.job(), phase="Suspended")
        await found.client.post(f"{JOBS}/run/suspend")
        await found.client.delete(f"{JOBS}/run")
        for phase in ("Suspended", "Cancelling"):
            found.put_status(found.objects.of_kind("TrainingJob")[0], phase=phase)
            for verb in ("suspend", "resume"):
                refused = await found.client.post(f"{JOBS}/run/{verb}")
                assert (refused.status_code, "it is being cancelled" in refused.json()["detail"]) == (409, True)
        run = found.objects.of_kind("TrainingJob")[0]["spec"]["run"]
        assert (run["suspend"], run["cancel"]) == (True, True)

    tell(story)


def test_a_repeated_save_is_answered_after_the_end_of_the_job(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.put_status(found.job(), phase="Running")
        key = {"Idempotency-Key": "save"}
        first = await found.client.post(f"{JOBS}/run/checkpoint", headers=key)
        found.put_status(found.objects.of_kind("TrainingJob")[0], phase="Completed")
        again = await found.client.post(f"{JOBS}/run/checkpoint", headers=key)
        assert (again.status_code, again.json()) == (202, first.json())
        other = await found.client.post(f"{JOBS}/run/checkpoint", headers=key, json={"pinned": True})
        assert (other.status_code, other.json()["type"]) == (422, "urn:stoker:problem:idempotency-key-reused")
        for headers in ({"Idempotency-Key": "late"}, {}):
            assert (await found.client.post(f"{JOBS}/run/checkpoint", headers=headers)).status_code == 409

    tell(story)


def test_a_finished_job_becomes_a_new_one_from_a_verified_checkpoint(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Failed")
        nothing = await found.client.post(f"{JOBS}/run/resume")
        assert (nothing.status_code, "no verified checkpoint" in nothing.json()["detail"]) == (409, True)
        found.checkpoint(job, 10)
        newest, broken = found.checkpoint(job, 20), found.checkpoint(job, 30, verified=False)
        unusable = await found.client.post(f"{JOBS}/run/resume", json={"checkpoint_id": broken["metadata"]["uid"]})
        assert (unusable.status_code, unusable.json()["errors"][0]["field"]) == (422, "checkpoint_id")
        foreign = found.checkpoint(found.job("other"), 40)
        stranger = await found.client.post(f"{JOBS}/run/resume", json={"checkpoint_id": foreign["metadata"]["name"]})
        assert "is no checkpoint of this job; verified: run-20, run-10" in stranger.json()["detail"]
        key = {"Idempotency-Key": "again"}
        first, again = [await found.client.post(f"{JOBS}/run/resume", headers=key) for _ in range(2)]
        assert (first.status_code, first.json()) == (202, again.json())
        new = (await found.client.get(first.headers["location"])).json()
        assert new["spec"]["modelFrom"]["checkpoint"] == {"name": newest["metadata"]["name"], "state": "All"}
        assert "model" not in new["spec"]
        assert new["job_id"] != job["metadata"]["uid"]
        fresh = [(await found.client.post(f"{JOBS}/run/resume")).json()["job_id"] for _ in range(2)]
        assert len({*fresh, new["job_id"]}) == 3, "without a key every request is a new job"

    tell(story)


def test_a_job_that_reached_its_end_needs_more_steps(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Completed")
        found.checkpoint(job, 100)
        done = await found.client.post(f"{JOBS}/run/resume")
        assert done.json()["errors"] == [
            {"field": "total_steps", "message": "the checkpoint is at step 100 of 100: give more than 100"}
        ]
        longer = await found.client.post(f"{JOBS}/run/resume", json={"total_steps": 150})
        new = (await found.client.get(longer.headers["location"])).json()
        assert new["spec"]["training"] == {**JOB_SPEC["training"], **new["spec"]["training"], "totalSteps": 150}

    tell(story)


def test_the_longest_names_are_continued_saved_and_repeated(tell: Tell) -> None:
    longest = "a-name-as-long-as-the-definition-allows0"
    key = {"Idempotency-Key": "order-7"}

    async def story(found: World) -> None:
        one, again = [await found.client.post(JOBS, json={**WHOLE, "job_name": longest}, headers=key) for _ in range(2)]
        assert (one.status_code, one.json()) == (201, again.json()), one.text
        assert one.json()["job_name"].startswith("a-name-as-long-as-the-definit-")
        other = await found.client.post(JOBS, json={**WHOLE, "job_name": f"{longest[:-1]}1"}, headers=key)
        assert (other.status_code, other.json()["job_id"] != one.json()["job_id"]) == (201, True), "the same beginning"
        name = longest
        job = found.job(name)
        saved = await found.client.post(f"{JOBS}/{name}/checkpoint")
        assert (saved.status_code, saved.json()["checkpoint_name"].startswith(f"{name}-save-")) == (202, True)
        for step in (10, 20, 30):
            found.checkpoint(found.put_status(job, phase="Failed"), step)
            resumed = await found.client.post(f"{JOBS}/{name}/resume")
            assert resumed.status_code == 202, resumed.text
            name = resumed.json()["job_name"]
            assert re.fullmatch(r"a-name-as-long-as-the-defi-go-[0-9a-f]{10}", name), "it does not grow"
            job = found.objects.get(Key("TrainingJob", "default", name))
        longer = await found.client.post(JOBS, json={**WHOLE, "job_name": f"{longest}1"})
        assert (longer.status_code, longer.json()["errors"][0]["field"]) == (422, "job_name")

    tell(story)


def test_saves_on_request_and_the_checkpoints_of_a_job(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        key = {"Idempotency-Key": "save"}
        first, again = [await found.client.post(f"{JOBS}/run/checkpoint", headers=key) for _ in range(2)]
        assert (first.status_code, first.json()["status"], first.json()) == (202, "SAVING", again.json())
        pinned = await found.client.post(f"{JOBS}/run/checkpoint", json={"pinned": True})
        stored = {item["metadata"]["uid"]: item for item in found.objects.of_kind("Checkpoint")}
        assert stored[pinned.json()["checkpoint_id"]]["spec"]["pinned"] is True
        assert stored[first.json()["checkpoint_id"]]["spec"]["source"]["jobRef"]["uid"] == job["metadata"]["uid"]
        for step in (10, 20):
            found.checkpoint(job, step)
        found.checkpoint(found.job("other"), 50)
        page = await found.client.get(f"{JOBS}/run/checkpoints", params={"limit": 3})
        assert page.headers["X-Total-Count"] == "4", "of all pages, and of this job alone"
        found.checkpoint(job, 30)
        rest = await found.client.get(page.links["next"]["url"])
        steps = [one["step"] for one in page.json() + rest.json()]
        assert (steps, "next" in rest.links) == ([20, 10, None, None], False), "a save between two pages moves none"
        wrong = await found.client.get(f"{JOBS}/run/checkpoints", params={"continue": "3"})
        assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "query.continue")
        newest = page.json()[0]
        assert (newest["status"], newest["verified"], newest["metadata"]["loss"]) == ("COMPLETE", True, 2.5)
        assert (await found.client.get(f"/v1/checkpoints/{newest['checkpoint_id']}")).json() == newest
        assert len((await found.client.get("/v1/checkpoints")).json()["items"]) == 6
        found.put_status(job, phase="Completed")
        assert (await found.client.post(f"{JOBS}/run/checkpoint")).status_code == 409

    tell(story)
