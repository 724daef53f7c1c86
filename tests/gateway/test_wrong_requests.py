"""Wrong requests: each refusal names what is wrong and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.gateway.domain.repeated import DIGEST, difference, request_digest
from testing.gateway.world import JOB_SPEC, World

Tell = Callable[..., None]
JOBS = "/v1/training/jobs"
JSON = {"Content-Type": "application/json"}


def new(name: str = "run", **given: Any) -> dict[str, Any]:
    return {"job_name": name, "spec": dict(JOB_SPEC), **given}


def test_a_query_that_a_route_does_not_have_is_refused(tell: Tell) -> None:
    async def story(found: World) -> None:
        mistyped = await found.client.post(JOBS, params={"namespase": "team-a"}, json=new())
        assert (mistyped.status_code, mistyped.json()["errors"]) == (
            422,
            [{"field": "query.namespase", "message": "no such parameter; allowed here: namespace"}],
        )
        assert found.objects.of_kind("TrainingJob") == [], "nothing was made elsewhere"
        none = await found.client.get("/v1/cluster/nodes", params={"limit": 1})
        assert none.json()["detail"] == "query.limit: no such parameter; this route has none"
        stranger = await found.client.get(JOBS, params={"x": 1}, headers={"Authorization": "Bearer nonsense"})
        assert stranger.status_code == 401, "who asks comes first"

    tell(story)


def test_bodies_that_are_no_object_are_named(tell: Tell) -> None:
    wrong = (
        (b"{", JSON, 422, "body: is no JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"\xff\xfe", JSON, 422, "body: is no JSON"),
        (b"[]", JSON, 422, "body: must be a JSON object, with the Content-Type application/json, got '[]'"),
        (b"job_name: a", {"Content-Type": "application/yaml"}, 422, "got 'job_name: a'"),
        (b"[" * 100_000, JSON, 400, "nests too deeply"),
        (b'{"job_name":"a","labels":{"a key":"b"}}', JSON, 422, "labels.a key: "),
        (b'{"job_name":"a","labels":{"a":"' + b"b" * 64 + b'"}}', JSON, 422, "labels.a: "),
    )

    async def story(found: World) -> None:
        for content, headers, status, words in wrong:
            answer = await found.client.post(JOBS, content=content, headers=headers)
            assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text[:300]

    tell(story)


def test_a_body_that_no_route_reads_is_refused(tell: Tell) -> None:
    """What it asks for would not happen, and its sender would not know."""
    suspend, cancel = ("POST", f"{JOBS}/run/suspend"), ("DELETE", f"{JOBS}/run")
    wrong = (
        (suspend, b'{"pinned": true, "after": 3}', ["after", "pinned"], "no such field; this route takes no body"),
        (cancel, b'{"purge": true}', ["purge"], "no such field; this route takes no body"),
        (suspend, b"[1]", ["body"], "this route takes none, got '[1]'"),
        (cancel, b"\xff", ["body"], "this route takes none, got"),
        (suspend, b"[" * 100_000, ["body"], "this route takes none, got"),
    )

    async def story(found: World) -> None:
        found.put_status(found.job(), phase="Running")
        for (method, path), content, fields, words in wrong:
            answer = await found.client.request(method, path, content=content, headers=JSON)
            assert (answer.status_code, [one["field"] for one in answer.json()["errors"]]) == (422, fields)
            assert words in answer.json()["detail"]
        (job,) = found.objects.of_kind("TrainingJob")
        run = job["spec"].get("run", {})
        assert not run.get("suspend"), "nothing was done"
        assert not run.get("cancel"), "nothing was done"
        for nothing in (b"", b"{}", b"null", b" \n"):
            assert (await found.client.post(suspend[1], content=nothing, headers=JSON)).status_code == 202

    tell(story)


def test_a_version_without_a_watch_is_refused(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.job()
        for path in (JOBS, f"{JOBS}/run", "/v1/checkpoints", "/v1/deployments", "/v1/deployments/chat"):
            for query in ({}, {"watch": False}):
                answer = await found.client.get(path, params={"resource_version": "7", **query})
                assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.resource_version")
                assert "7 is where a watch begins: add watch=true" in answer.json()["detail"]

    tell(story)


def test_a_refused_method_names_all_that_the_path_has(tell: Tell) -> None:
    async def story(found: World) -> None:
        for path, allowed in ((JOBS, "GET, POST"), (f"{JOBS}/run", "DELETE, GET"), ("/health", "GET")):
            answer = await found.client.put(path, json={})
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert answer.json()["detail"] == f"PUT is not allowed here; allowed are: {allowed}"
        assert "/openapi.json lists all" in (await found.client.get("/v1")).json()["detail"]

    tell(story)


def test_an_attempt_without_pods_and_steps_that_run_backwards_are_refused(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        none = await found.client.get(f"{JOBS}/run/logs", params={"attempt": 0})
        assert (none.status_code, "no pod of the job is left" in none.json()["detail"]) == (404, True)
        assert (await found.client.get(f"{JOBS}/run/logs")).text == "", "a job that waits has no log yet"
        found.pod(job, 0, "step 1\n", attempt=1)
        other = await found.client.get(f"{JOBS}/run/logs", params={"attempt": 9})
        assert other.json()["detail"] == "query.attempt: no pod of attempt 9; there are those of 1"
        assert (await found.client.get(f"{JOBS}/run/logs", params={"attempt": 1})).text == "step 1\n"
        query = {"after_step": 9, "until_step": 3}
        backwards = await found.client.get(f"{JOBS}/run/metrics", params=query)
        assert backwards.json()["errors"] == [{"field": "query.until_step", "message": "3 is before after_step 9"}]

    tell(story)


def test_a_key_is_for_one_body(tell: Tell) -> None:
    """Also for what may be edited later, of which the resource does not show what was asked for."""
    key = {"Idempotency-Key": "order-7"}

    async def story(found: World) -> None:
        first = await found.client.post(JOBS, json=new(), headers=key)
        others = (new(labels={"team": "a"}), new(spec={**JOB_SPEC, "workers": {"replicas": 3}}))
        for body in others:
            answer = await found.client.post(JOBS, json=body, headers=key)
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:stoker:problem:idempotency-key-reused")
            assert "used before with another body" in answer.json()["detail"]
        job = found.put_status(found.job("done"), phase="Completed")
        found.checkpoint(job, 10)
        resumed = await found.client.post(f"{JOBS}/done/resume", headers=key)
        found.checkpoint(job, 20)
        again = await found.client.post(f"{JOBS}/done/resume", headers=key)
        assert (again.status_code, again.json()) == (202, resumed.json()), "a newer save does not change what was asked"
        longer = await found.client.post(f"{JOBS}/done/resume", headers=key, json={"total_steps": 300})
        first_one = f"the first request with this Idempotency-Key ({resumed.json()['job_name']})"
        message = f"got 300, but {first_one} had none: leave it out, or take a new key"
        assert longer.json()["errors"] == [{"field": "total_steps", "message": message}]
        chosen = await found.client.post(f"{JOBS}/done/resume", headers=key, json={"checkpoint_id": "done-20"})
        assert chosen.json()["detail"].startswith("checkpoint_id: got 'done-20', but the first request with this")
        found.put_status(found.job("runs"), phase="Running")
        await found.client.post(f"{JOBS}/runs/checkpoint", headers=key)
        pinned = await found.client.post(f"{JOBS}/runs/checkpoint", headers=key, json={"pinned": True})
        assert (pinned.status_code, pinned.json()["errors"][0]["field"]) == (422, "pinned")
        assert "got True, but" in pinned.json()["detail"]
        assert (await found.client.post(JOBS, json=new(), headers=key)).json() == first.json()

    tell(story)


def test_a_page_that_there_is_not_is_named(tell: Tell) -> None:
    async def story(found: World) -> None:
        for number in range(3):
            found.job(f"job-{number}")
        token = (await found.client.get(JOBS, params={"limit": 2})).json()["continue"]
        assert token
        for path, wrong in (
            (JOBS, "nonsense"), (JOBS, "default/job-0"), (JOBS, "\0"), (JOBS, token + "A"), (JOBS, token[:-1]),
            ("/v1/checkpoints", token), ("/v1/deployments", "é"), (f"{JOBS}/job-0/checkpoints", "nonsense"),
        ):  # fmt: skip
            answer = await found.client.get(path, params={"limit": 2, "continue": wrong})
            assert (answer.status_code, [one["field"] for one in answer.json().get("errors", [])]) == (
                422,
                ["query.continue"],
            ), (path, wrong, answer.text)
        last = (await found.client.get(JOBS, params={"limit": 2, "continue": token})).json()
        assert ([job["job_name"] for job in last["items"]], last["continue"]) == (["job-2"], "")

    tell(story)


def test_a_place_in_a_watch_that_there_is_not_is_named(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.job()
        for path in (JOBS, f"{JOBS}/run", "/v1/checkpoints", "/v1/deployments"):
            for wrong in ("abc", "-1", "0", "1.5"):
                answer = await found.client.get(path, params={"watch": True}, headers={"Last-Event-ID": wrong})
                assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "header.last-event-id")
                answer = await found.client.get(path, params={"watch": True, "resource_version": wrong})
                assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.resource_version")
            ahead = await found.client.get(path, params={"watch": True}, headers={"Last-Event-ID": "9" * 18})
            assert (ahead.status_code, ahead.json()["type"]) == (410, "urn:stoker:problem:expired")
            assert "of another history" in ahead.json()["detail"], "as after a restored backup: it would stay silent"

    tell(story)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_digests_are_equal_for_equal_values_alone(one: Any, other: Any) -> None:
    assert (request_digest(one) == request_digest(other)) == (repr_of(one) == repr_of(other))


def repr_of(value: Any) -> Any:
    """The value with its types, as 1 and True are equal in Python; the order of keys does not count."""
    if isinstance(value, dict):
        return {name: repr_of(inner) for name, inner in value.items()}
    return [repr_of(inner) for inner in value] if isinstance(value, list) else repr(value)


def test_a_resource_of_an_earlier_release_is_compared_by_what_cannot_change() -> None:
    def resource(steps: int, **annotations: str) -> dict[str, Any]:
        return {"metadata": {"annotations": annotations}, "spec": {"training": {"totalSteps": steps}}}

    asked = resource(10, **{DIGEST: "a"})
    assert [difference(asked, resource(steps)) for steps in (10, 20)] == ["", "training"]
    assert [difference(asked, resource(10, **{DIGEST: digest})) for digest in ("a", "b")] == ["", "body"]
