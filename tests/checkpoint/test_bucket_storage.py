"""Checkpoints in a bucket: the same as in a folder, whole or not there at all, whatever happens to the connection.

The server is `testing.checkpoint.s3_server`. Against a real one: `STOKER_TEST_S3=1` with the usual variables and a
bucket named `stoker-test`; what cuts connections is then left out.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from stoker.checkpoint.bucket_access import access_of
from stoker.checkpoint.bucket_errors import as_os_error
from stoker.checkpoint.bucket_storage import BucketStorage
from stoker.checkpoint.command import program
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointExists, CheckpointMissing
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.storage import PosixStorage
from stoker.checkpoint.store import CheckpointRoot, Published
from stoker.checkpoint.task import Result, Target, delete_task, inspect_task, list_task, verify_task
from stoker.checkpoint.task import run as run_task
from stoker.checkpoint.verify import verify
from stoker.pod.causes import Cause
from testing.checkpoint.s3_server import S3Server
from testing.checkpoint.synthetic import LAYOUTS, SMALL, make_state, same_bits, save

BUCKET = "stoker-test"
STATE = make_state(SMALL)
REAL = "STOKER_TEST_S3" in os.environ
in_memory = pytest.mark.skipif(REAL, reason="it looks into the server")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def root(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> CheckpointRoot:
    """A root that no other test has."""
    server.fault = lambda _number, _method: ""
    if not REAL:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
    return CheckpointRoot(Path(f"s3://{BUCKET}/runs/{secrets.token_hex(4)}"))


def save_small(root: CheckpointRoot, step: int, **changes: Any) -> Published:
    return save(root, STATE, step=step, cut=LAYOUTS["both"], ranks=3, files={"config.json": b"{}"}, **changes)


def assert_whole(root: CheckpointRoot, published: Published) -> None:
    folder = root.root / published.folder_name
    assert verify(folder, published.digest, storage=root.storage).problems == ()
    reader = CheckpointReader(folder, published.digest, storage=root.storage)
    assert all(same_bits(reader.read(name), values) for name, (_, values) in STATE.items())


def test_a_url_chooses_the_storage(root: CheckpointRoot, tmp_path: Path) -> None:
    assert isinstance(root.storage, BucketStorage)
    assert isinstance(storage_of(tmp_path), PosixStorage)
    with pytest.raises(CheckpointError, match="names no bucket"):
        storage_of(Path("s3://"))


def test_a_bucket_holds_what_a_folder_holds(root: CheckpointRoot, tmp_path: Path) -> None:
    posix = CheckpointRoot(tmp_path / "root")
    for place in (root, posix):
        with place.lock():
            for step in (1, 2, 3):
                assert_whole(place, save_small(place, step))
        with pytest.raises(CheckpointExists):
            place.begin(2, "0a1b2c3d")
    names = [[found.folder_name for found in place.committed()] for place in (root, posix)]
    assert names[0] == names[1]
    assert len(names[0]) == 3
    latest = root.latest()
    assert latest is not None
    assert latest.folder_name == names[0][0]
    for name in names[0]:
        assert root.find(name).digest == posix.find(name).digest
        assert root.storage.names(root.root / name) == posix.storage.names(posix.root / name)


def test_retention_and_deletion(root: CheckpointRoot) -> None:
    done = [save_small(root, step) for step in (1, 2, 3, 4)]
    kept = root.retain(2, lambda _name: True)
    assert (kept.deleted, kept.problems) == ((done[1].folder_name, done[0].folder_name), ())
    assert root.storage.folders(root.root) == [done[2].folder_name, done[3].folder_name]
    with pytest.raises(CheckpointCorrupt, match="nothing deleted"):
        root.delete(done[2].folder_name, "0" * 64)
    assert_whole(root, done[2])
    gone = root.delete(done[2].folder_name, done[2].digest)
    assert (gone.bytes, gone.left) == (done[2].bytes, ())
    assert root.delete(done[2].folder_name, done[2].digest).files == ()
    assert root.storage.folders(root.root) == [done[3].folder_name]
    with pytest.raises(CheckpointMissing):
        root.find(done[2].folder_name)


def test_an_unfinished_save_is_no_checkpoint_and_is_removed(root: CheckpointRoot) -> None:
    staging = root.begin(7, "0a1b2c3d")
    sink = root.storage.create(staging / "rank-00000.bin")
    sink.write(memoryview(b"half"))
    sink.sync()
    assert root.scan() == []
    with pytest.raises(FileExistsError):
        root.storage.create(staging / "rank-00000.bin")
    assert root.discard_unfinished(["ffffffff"]) == []
    assert len(root.discard_unfinished(["0a1b2c3d"])) == 1
    assert root.storage.folders(root.root) == []
    assert_whole(root, save_small(root, 7))


def test_a_large_file_is_uploaded_in_parts(root: CheckpointRoot) -> None:
    data = np.random.default_rng(0).integers(0, 256, 40 * 2**20, np.uint8).tobytes()
    sink = root.storage.create(root.root / "large")
    for start in range(0, len(data), 7_000_001):
        sink.write(memoryview(data)[start : start + 7_000_001])
    sink.sync()
    sink.close()
    assert root.storage.size(root.root / "large") == len(data)
    found = memoryview(bytearray(10_000_000))
    assert root.storage.read(root.root / "large", 30_000_000, found) == 10_000_000
    assert found == data[30_000_000:40_000_000]
    assert root.storage.read(root.root / "large", len(data) - 3, found) == 3
    root.storage.remove_file(root.root / "large")


def test_an_upload_that_is_given_up_leaves_no_object(root: CheckpointRoot) -> None:
    for size in (10, 40 * 2**20):
        sink = root.storage.create(root.root / "given-up")
        sink.write(memoryview(bytes(size)))
        sink.close()
        with pytest.raises(FileNotFoundError):
            root.storage.size(root.root / "given-up")


def outcome_of(root: CheckpointRoot, step: int) -> Published | None:
    """Save over the connection as it is; None where that failed, with an error of the disk."""
    try:
        return save_small(root, step)
    except (OSError, CheckpointExists):
        return None


@in_memory
@pytest.mark.parametrize("kind", ["cut", "lost", "503"])
def test_a_save_over_a_line_that_goes_dead_is_whole_or_not_there(
    root: CheckpointRoot, server: S3Server, kind: str
) -> None:
    """From the n-th request of a save on nothing is answered (or carried out), for every n."""
    fragile = CheckpointRoot(root.root, storage=BucketStorage(BUCKET, access_of(BUCKET, server.environment), retries=0))
    before = server.requests
    save_small(fragile, 1)
    needed, good = server.requests - before, 1
    assert needed > 6
    for requests in range(needed):
        first = server.requests + 1 + requests
        server.fault = lambda number, _method, first=first: kind if number >= first else ""  # type: ignore[misc]
        published = outcome_of(fragile, 10 + requests)
        server.fault = lambda _number, _method: ""
        visible = [found for found in root.committed() if found.step == 10 + requests]
        good += len(visible)
        assert published is None or visible
        for found in visible:
            assert verify(found.path, found.digest).ok
    root.discard_unfinished()
    assert len(root.storage.folders(root.root)) == len(root.committed()) == good


@in_memory
def test_requests_are_tried_again(root: CheckpointRoot, server: S3Server) -> None:
    """Every third request is lost: refused, cut, or carried out without an answer."""
    kinds = ("503", "cut", "lost")
    server.fault = lambda number, _method: kinds[number // 3 % 3] if number % 3 == 0 else ""
    published = save_small(root, 1)
    server.fault = lambda _number, _method: ""
    assert_whole(root, published)


@in_memory
def test_a_delete_that_is_cut_at_any_request_is_finished_later(root: CheckpointRoot, server: S3Server) -> None:
    fragile = CheckpointRoot(root.root, storage=BucketStorage(BUCKET, access_of(BUCKET, server.environment), retries=0))
    done = save_small(root, 1)
    before = server.requests
    fragile.delete(done.folder_name, done.digest)
    for requests in range(server.requests - before):
        done = save_small(root, 2 + requests)
        first = server.requests + 1 + requests
        server.fault = lambda number, _method, first=first: "cut" if number >= first else ""  # type: ignore[misc]
        with pytest.raises((OSError, CheckpointError)):
            fragile.delete(done.folder_name, done.digest)
        server.fault = lambda _number, _method: ""
        for found in root.committed():
            assert verify(found.path, found.digest).ok, "a visible checkpoint is whole"
        root.delete(done.folder_name, done.digest)
        assert root.storage.folders(root.root) == []


@in_memory
def test_damage_is_found(root: CheckpointRoot, server: S3Server) -> None:
    done = save_small(root, 1)
    folder = root.root / done.folder_name
    key = f"{BUCKET}/{root.storage.key(folder / 'rank-00001.bin')}"  # type: ignore[attr-defined]
    good = server.objects[key]
    server.objects[key] = bytes([good[0] ^ 1]) + good[1:]
    assert "is damaged" in verify(folder).problems[0]
    server.objects[key] = good[:-1]
    assert not verify(folder).ok
    del server.objects[key]
    assert "rank-00001.bin" in verify(folder).problems[0]


@in_memory
def test_a_refused_key_is_named(root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONG")
    other = CheckpointRoot(root.root)
    with pytest.raises(PermissionError, match=r"403 Forbidden: AccessDenied: 's3://stoker-test/runs/.*'"):
        save_small(other, 1)
    with pytest.raises(PermissionError, match=r"403 Forbidden: AccessDenied: 's3://stoker-test'"):
        CheckpointRoot(Path(f"s3://{BUCKET}")).scan()


def expire_from(server: S3Server, first: int) -> None:
    """Refuse the credentials from the request `first` of those that follow."""
    server.requests = 0
    server.fault = lambda number, _method: "expired" if number >= first else ""


@in_memory
def test_credentials_that_expire_in_a_list_deny_no_save(root: CheckpointRoot, server: S3Server) -> None:
    """An operator would take such a save for lost."""
    done = save_small(root, 1)
    url = f"s3://{root.root.relative_to('s3:')}"
    for first in range(1, 4):  # the list, the manifest's size, its content
        expire_from(server, first)
        with pytest.raises(PermissionError, match="403 Forbidden"):
            list_task(root.root)
        expire_from(server, first)
        listed = CliRunner().invoke(program, ["list", url], standalone_mode=False)
        assert 68 in (listed.return_value, listed.exit_code)
    assert f"{done.folder_name}  cannot be read: " in listed.output
    server.fault = lambda _number, _method: ""
    assert [found["folder"] for found in list_task(root.root)["saves"]] == [done.folder_name]


@in_memory
def test_credentials_that_expire_in_a_save_publish_nothing_and_are_named(
    root: CheckpointRoot, server: S3Server
) -> None:
    messages = list[str]()
    saved = None
    for first in itertools.count(1):
        expire_from(server, first)
        try:
            saved = save_small(root, first)
        except PermissionError as error:
            messages.append(str(error))
        server.fault = lambda _number, _method: ""
        if saved is not None:
            break
        assert root.committed() == []
    assert saved is not None
    assert_whole(root, saved)
    assert len(messages) > 10
    uploads = [message for message in messages if "performing PUT" in message]
    assert len(uploads) == 5, "three data files, a file that travels along, the manifest"
    for message in uploads:
        assert "403 Forbidden: ExpiredToken: The provided token has expired.: 's3://" in message


@pytest.fixture
def secret(root: CheckpointRoot, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mounted Secret from which the root's credentials come."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (tmp_path / name).write_text(os.environ[name])
    section = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "credentials": str(tmp_path)}
    monkeypatch.setenv("STOKER_BUCKETS", json.dumps({BUCKET: section}))
    return tmp_path


def test_a_secret_without_a_key_is_no_verdict_on_a_checkpoint(
    root: CheckpointRoot, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would take every save of the job for corrupt, one after the other."""
    done = save_small(root, 1)
    target = Target(root.root, done.folder_name, done.digest)
    (secret / "AWS_ACCESS_KEY_ID").unlink()
    tasks: dict[str, Callable[[], Result]] = {
        "verify": lambda: verify_task(target),
        "inspect": lambda: inspect_task(target),
        "delete": lambda: delete_task(target),
        "list": lambda: list_task(root.root),
    }
    for name, task in tasks.items():
        told = run_task(task, name, done.folder_name)
        assert (told.cause, told.result) == (Cause.STORAGE_ERROR, {"task": name, "folder": done.folder_name})
        assert (
            f"needs the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: '{secret}/AWS_ACCESS_KEY_ID'" in told.detail
        )
    monkeypatch.setenv("STOKER_BUCKETS", "[]")
    for name, task in tasks.items():
        told = run_task(task, name, done.folder_name)
        assert (told.cause, told.detail) == (Cause.CONFIG_INVALID, "STOKER_BUCKETS must be an object of buckets")
    shown = CliRunner().invoke(program, ["list", f"s3://{BUCKET}/runs"])
    assert (shown.exit_code, shown.output) == (64, "error: STOKER_BUCKETS must be an object of buckets\n")


DENIED = """The operation failed for path x/y: Error performing PUT http://host/b/x/y - Server returned non-2xx \
status code: 403 Forbidden: <?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SignatureDoesNotMatch</Code><Message>Check your key.</Message><StringToSign>AWS4</StringToSign></Error>

Debug source: ..."""
NO_BUCKET = """Object at location x/y not found: Error performing PUT http://host/b/x/y - Server returned non-2xx \
status code: 404 Not Found: <?xml version="1.0"?><Error><Code>NoSuchBucket</Code>\
<Message>It is not there.</Message></Error>"""
NO_IDENTITY = (
    "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - 403 Forbidden: none"
)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Exception(DENIED), PermissionError, "403 Forbidden: SignatureDoesNotMatch: Check your key.: 's3://b/x/y'"),
        (FileNotFoundError(NO_BUCKET), OSError, "404 Not Found: NoSuchBucket: It is not there.: 's3://b/x/y'"),
        (FileNotFoundError("Object at location x/y not found"), FileNotFoundError, "no such object: 's3://b/x/y'"),
        (Exception(NO_IDENTITY), PermissionError, "and this machine has no identity of its own: 's3://b/x/y'"),
        (Exception("Generic S3 error: timed out\n\nDebug source"), OSError, "S3 error: timed out: 's3://b/x/y'"),
    ],
)
def test_an_error_tells_what_the_server_answered(error: Exception, kind: type[OSError], text: str) -> None:
    found = as_os_error(error, "s3://b/x/y")
    assert type(found) is kind
    assert str(found).endswith(text)


def test_without_the_client_the_extra_is_named(root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CheckpointError, match=r"needs the package obstore: pip install 'stoker\[bucket\]'"):
        storage_of(root.root)


def test_the_commands_take_urls(root: CheckpointRoot, tmp_path: Path) -> None:
    done = save_small(root, 1)
    url = f"s3://{root.root.relative_to('s3:')}"
    runner = CliRunner()
    listed = runner.invoke(program, ["list", url, "--json"], standalone_mode=False)
    assert [item["folder"] for item in json.loads(listed.output)["checkpoints"]] == [done.folder_name]
    assert runner.invoke(program, ["verify", f"{url}/{done.folder_name}"], standalone_mode=False).return_value == 0
    show = runner.invoke(program, ["show", f"{url}/{done.folder_name}", "--json"], standalone_mode=False)
    assert json.loads(show.output)["digest"] == done.digest
    exported = runner.invoke(program, ["export", f"{url}/{done.folder_name}", str(tmp_path / "out")])
    assert exported.exit_code == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_task_pods_take_urls(root: CheckpointRoot) -> None:
    done = save_small(root, 1)
    target = Target(root.root, done.folder_name, done.digest)
    assert verify_task(target)["ok"]
    assert inspect_task(target)["ok"]
    assert [item["folder"] for item in list_task(root.root)["saves"]] == [done.folder_name]
    with pytest.raises(CheckpointError):
        verify_task(Target(root.root, f"../x/{done.folder_name}"))
    assert delete_task(target)["deleted"] == [done.folder_name]


def test_a_prefix_without_any_save_is_no_verdict_on_a_recorded_one(root: CheckpointRoot) -> None:
    done = save_small(root, 1)
    other = root.root.parent / secrets.token_hex(4)
    with pytest.raises(FileNotFoundError, match="no sign of any save"):
        verify_task(Target(other, done.folder_name, done.digest))
    root.delete(done.folder_name, done.digest)
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        verify_task(Target(root.root, done.folder_name, done.digest))
