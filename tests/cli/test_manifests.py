"""Manifests from files, folders and standard input."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from stoker.cli.manifests import ManifestError, claim_manifest, read_manifests


def document(kind: str, name: str) -> str:
    return f"apiVersion: v1\nkind: {kind}\nmetadata: {{name: {name}}}\n"


def names(paths: list[Path], namespace: str | None = None) -> list[str]:
    return [
        f"{o['kind']}/{o['metadata']['namespace']}/{o['metadata']['name']}" for o in read_manifests(paths, namespace)
    ]


def test_folders_give_their_manifests_and_what_is_mounted_comes_first(tmp_path: Path) -> None:
    (tmp_path / "20.yaml").write_text(
        document("TrainingJob", "job") + "---\n" + document("ConfigMap", "config") + "---\n"
    )
    (tmp_path / "10.yml").write_text(document("InferenceDeployment", "chat"))
    (tmp_path / "30.json").write_text(
        '{"kind": "List", "metadata": {}, "items": [{"kind": "Secret", "metadata": {"name": "s"}}]}'
    )
    (tmp_path / "notes.txt").write_text("not a manifest")
    assert names([tmp_path], "team") == [
        "ConfigMap/team/config",
        "Secret/team/s",
        "InferenceDeployment/team/chat",
        "TrainingJob/team/job",
    ]


def test_a_namespace_of_its_own_stays(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("kind: ConfigMap\nmetadata: {name: c, namespace: own}\n")
    assert names([file], "team") == ["ConfigMap/own/c"]


def test_standard_input_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(document("ConfigMap", "c")))
    assert names([Path("-")]) == ["ConfigMap/default/c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", r"bad\.yaml:2:1: did not find expected node content$"),
        ("just text", r"bad\.yaml:1: a manifest needs apiVersion, kind and metadata.name$"),
        ("metadata: {name: x}", r"bad\.yaml:1: a manifest needs apiVersion, kind and metadata.name$"),
        ("kind: Secret", r"bad\.yaml:1: Secret: metadata.name is needed$"),
        ("kind: Secret\nmetadata: {}", r"bad\.yaml:1: Secret: metadata.name is needed$"),
        ("kind: Secret\nmetadata: {name: 5}", r"metadata.name is needed, a text, not 5 \(write it in quotes\)$"),
        (
            "kind: Secret\nmetadata: {name: a, namespace: 5}",
            r"metadata.namespace is a text, not 5 \(write it in quotes\)$",
        ),
        ("kind: List\nitems: 5", r"bad\.yaml:1: List: items: a list of objects is needed, got 5$"),
        ("kind: List\nitems: [x]", r"bad\.yaml:1: a manifest needs apiVersion, kind and metadata.name$"),
        ("kind: Secret\nspec: {a: 1,\n  a: 2}", r"bad\.yaml:3:3: the key a appears twice in one mapping$"),
        ("", r"no manifest in .*bad\.yaml"),
    ],
)
def test_what_is_no_manifest_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ManifestError, match=message):
        read_manifests([file])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"gone\.yaml: No such file or directory$"):
        read_manifests([tmp_path / "gone.yaml"])


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\x92\x00")
    with pytest.raises(ManifestError, match=r"a\.yaml: not a text in UTF-8"):
        read_manifests([tmp_path / "a.yaml"])


def test_a_claim_stands_for_a_folder(tmp_path: Path) -> None:
    made = claim_manifest("models", tmp_path / "x" / "..", "team")
    assert made["metadata"] == {
        "name": "models",
        "namespace": "team",
        "annotations": {"stoker.dev/local-folder": str(tmp_path)},
    }
