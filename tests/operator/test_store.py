"""The store's contents, and the orders in which changes may arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.labels import JOB_UID
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.store import Change, Store, key_of


def thing(name: str, version: int, *, uid: str = "", kind: str = "ConfigMap", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "a",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            **metadata,
        },
    }


KEY = Key("ConfigMap", "a", "one")


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    assert store.put(thing("one", 5))
    assert not store.put(thing("one", 4))
    assert not store.put(thing("one", 5))
    assert store.put(thing("one", 6))
    assert store.get(KEY) == thing("one", 6)


def test_a_late_event_does_not_bring_a_deleted_object_back() -> None:
    store = Store()
    store.put(thing("one", 5))
    store.remove(KEY, "uid-one", 7)
    assert not store.put(thing("one", 6))
    assert store.get(KEY) is None


def test_the_same_name_with_a_new_uid_comes_in_after_a_deletion() -> None:
    store = Store()
    store.put(thing("one", 5))
    store.remove(KEY, "uid-one", 7)
    assert store.put(thing("one", 8, uid="other"))
    assert not store.remove(KEY, "uid-one", 9)
    assert store.get(KEY) == thing("one", 8, uid="other")


def test_a_list_removes_what_it_lacks_but_not_what_was_written_after_it() -> None:
    store = Store()
    changes: list[Change] = []
    for found in (thing("gone", 3), thing("new", 12), thing("kept", 4)):
        store.put(found)
    store.listeners.append(changes.append)
    store.replace("ConfigMap", [thing("kept", 4), thing("fresh", 9)], 10)
    assert [item["metadata"]["name"] for item in store.of_kind("ConfigMap")] == ["fresh", "kept", "new"]
    assert changes == [Change(thing("gone", 3), None), Change(None, thing("fresh", 9))]


def test_a_list_replaces_the_same_name_with_another_uid() -> None:
    store = Store()
    store.put(thing("one", 3))
    store.replace("ConfigMap", [thing("one", 8, uid="other")], 10)
    assert store.by_uid("uid-one") is None
    assert store.by_uid("other") == thing("one", 8, uid="other")


def test_objects_are_found_by_owner_label_and_reference() -> None:
    store = Store()
    owner = {"apiVersion": "v1", "kind": "TrainingJob", "name": "job", "uid": "job-uid"}
    save = thing("save", 1, kind="Checkpoint", ownerReferences=[owner], labels={JOB_UID: "job-uid"})
    save["spec"] = {"volumes": [{"name": "c", "configMap": {"name": "one"}}]}
    store.put(save)
    assert store.owned_by("job-uid") == [save]
    assert store.labelled(JOB_UID, "job-uid") == store.labelled(JOB_UID, "job-uid", save["kind"]) == [save]
    assert store.labelled(JOB_UID, "job-uid", "Secret") == []
    assert store.referring_to(KEY) == [save]
    bare = thing("save", 2, kind="Checkpoint")
    store.put(bare)
    assert store.owned_by("job-uid") == store.labelled(JOB_UID, "job-uid") == store.referring_to(KEY) == []


def test_a_label_without_index_is_an_error() -> None:
    with pytest.raises(ValueError, match="label color has no index"):
        Store().labelled("color", "red")


def test_reports_go_with_their_pod() -> None:
    store = Store()
    store.put(thing("pod", 1, kind="Pod"))
    assert store.put_report("uid-pod", {"step": 1})
    assert not store.put_report("uid-pod", {"step": 1})
    assert store.report("uid-pod") == {"step": 1}
    store.remove(Key("Pod", "a", "pod"), "uid-pod")
    assert store.report("uid-pod") is None
    assert not store.put_report("uid-pod", {"step": 2})


VERSIONS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=30)


@given(VERSIONS, st.randoms(use_true_random=False))
def test_news_in_any_order_end_in_the_newest_state(history: list[tuple[str, int, bool]], random: Any) -> None:
    """Versions 1..n of each name arrive, some with a deletion at the end; late or repeated changes have no effect."""
    last = {name: max(v for n, v, _ in history if n == name) for name in {n for n, _, _ in history}}
    deleted = {name for name, _, gone in history if gone}
    news = [*history, *random.sample(history, len(history) // 2)]
    news += [(name, version, False) for name, version in last.items()]
    random.shuffle(news)
    store = Store()
    for name, version, _ in news:
        store.put(thing(name, version))
        if name in deleted and random.random() < 0.5:
            store.remove(Key("ConfigMap", "a", name), f"uid-{name}", last[name] + 1)
    for name in deleted:
        store.remove(Key("ConfigMap", "a", name), f"uid-{name}", last[name] + 1)
    for name, version, _ in news:
        store.put(thing(name, version))
    expected = {
        Key("ConfigMap", "a", name): thing(name, version) for name, version in last.items() if name not in deleted
    }
    assert {key_of(found): found for found in store.of_kind("ConfigMap")} == expected


def pod(name: str, version: int, phase: str, **metadata: Any) -> Object:
    found = thing(name, version, kind="Pod", labels={JOB_UID: "job-uid"}, **metadata)
    return {**found, "status": {"phase": phase}}


def test_an_evicted_pod_that_ended_before_it_went_leaves_its_last_word() -> None:
    store = Store()
    deleting = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    store.put(pod("evicted", 1, "Running"))
    store.put(pod("evicted", 2, "Running", **deleting))
    last = pod("evicted", 3, "Failed", **deleting)
    store.remove(key_of(last), "uid-evicted", 3, last=last)
    assert store.get(key_of(last)) is None
    assert store.gone(JOB_UID, "job-uid") == [last]
    assert store.gone(JOB_UID, "other") == []


@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_a_pod_that_had_not_ended_has_nothing_to_say(phase: str) -> None:
    store = Store()
    found = pod("forced", 1, phase)
    store.put(found)
    store.remove(key_of(found), "uid-forced", 2, last=found)
    assert store.gone(JOB_UID, "job-uid") == []


def test_an_ended_pod_that_we_deleted_ourselves_is_not_remembered() -> None:
    store = Store()
    found = pod("done", 1, "Failed")
    store.put(found)
    store.remove(key_of(found), "uid-done")
    assert store.gone(JOB_UID, "job-uid") == []


def test_a_namespace_that_took_nothing_is_ending_until_it_takes_something_or_time_has_passed() -> None:
    store = Store()
    assert not store.is_terminating("a", 0)
    store.set_terminating("a", 10)
    assert store.is_terminating("a", 20)
    assert not store.is_terminating("b", 20)
    assert not store.is_terminating("a", 10 + 600)
    store.set_terminating("a", None)
    assert not store.is_terminating("a", 20)


def test_objects_are_counted_by_kind() -> None:
    store = Store()
    store.put(thing("one", 1))
    store.put(thing("two", 2))
    store.put(pod("three", 3, "Running"))
    assert store.counts() == {"ConfigMap": 2, "Pod": 1}


def test_a_spec_with_its_accepted_and_its_pinned_copy_is_kept_once() -> None:
    def spec() -> dict[str, Any]:
        return {"workers": {"replicas": 2}, "training": {"totalSteps": 100}}

    store = Store()
    for name in ("one", "two"):
        metadata = {"name": name, "namespace": "a", "uid": f"uid-{name}", "resourceVersion": "1"}
        status = {"acceptedSpec": spec(), "pinned": {"intent": "i", "spec": spec()}}
        store.put({"kind": "TrainingJob", "metadata": metadata, "spec": spec(), "status": status})
    one, two = (store.get(Key("TrainingJob", "a", name)) or {} for name in ("one", "two"))
    held = [one["spec"], one["status"]["acceptedSpec"], one["status"]["pinned"]["spec"], two["status"]["acceptedSpec"]]
    assert len({id(found) for found in held}) == 1
