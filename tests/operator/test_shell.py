"""Kopf as a mere shell: it keeps no state on objects, and its end leaves the operator's tasks running."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import kopf
import pytest

from stoker.operator.cluster.kube.credentials import Access, NoCredentials, load_configuration
from stoker.operator.domain.plan import Key
from stoker.operator.service.shell import Shell, connection_info, make_settings


def kubeconfig(folder: Path, **user: str) -> Access:
    """Return the kubeconfig of a server that does not exist."""
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    return Access(str(file))


def test_kopf_watches_and_nothing_else() -> None:
    settings = make_settings()
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.process.ultimate_exiting_timeout is None, "it would kill the whole process"


def test_it_uses_our_credentials(tmp_path: Path) -> None:
    info = asyncio.run(connection_info(kubeconfig(tmp_path, token="secret")))
    assert info.server == "http://127.0.0.1:1"
    assert info.as_http_headers() == {"Authorization": "Bearer secret"}


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match=r"api\.kubeconfig: .*none"):
        asyncio.run(load_configuration(Access(str(tmp_path / "none"))))


async def no_connection() -> kopf.ConnectionInfo:
    raise AssertionError("no login was asked for")


def test_it_loads_credentials_in_the_loop_of_the_program() -> None:
    """Two threads that load the same kubeconfig at once find each other's half-written certificate files."""
    threads: list[threading.Thread] = []
    found: list[kopf.ConnectionInfo] = []
    info = kopf.ConnectionInfo(server="http://127.0.0.1:1")

    async def login() -> kopf.ConnectionInfo:
        threads.append(threading.current_thread())
        return info

    async def story() -> None:
        done = threading.Event()

        async def logs_in(**given: Any) -> None:
            (handler,) = given["registry"]._activities.get_all_handlers()
            found.append(await handler.fn())
            done.set()
            await given["stop_flag"].wait()

        shell = Shell(login, lambda _: None, operate=logs_in)
        shell.start()
        assert await asyncio.to_thread(done.wait, 60)
        await shell.stop()

    asyncio.run(story())
    assert (threads, found) == ([threading.current_thread()], [info])


def test_when_kopf_ends_it_is_begun_anew_and_our_tasks_go_on() -> None:
    """A watch that fails ends all of Kopf, and it cancels every task of its loop on the way out."""
    begun: list[bool] = []
    again = threading.Event()

    async def ends(**given: Any) -> None:
        begun.append(given["clusterwide"])
        if len(begun) > 1:
            again.set()
            await given["stop_flag"].wait()
            return
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    async def story() -> None:
        ours = asyncio.create_task(asyncio.sleep(3600))
        shell = Shell(no_connection, lambda _: None, operate=ends)
        shell.start()
        assert await asyncio.to_thread(again.wait, 60)
        assert shell.restarts == 1
        assert not ours.done()
        await shell.stop()
        assert len(begun) == 2
        ours.cancel()

    asyncio.run(story())


def test_a_wake_up_arrives_in_the_loop_that_asked_for_it() -> None:
    woken: list[Key] = []

    async def story() -> None:
        heard = asyncio.Event()

        def wake(key: Key) -> None:
            woken.append(key)
            heard.set()

        async def tells(**given: Any) -> None:
            for handler in given["registry"]._watching.get_all_handlers():
                metadata = {"name": "run", "namespace": "a"}
                for change in (None, "MODIFIED"):
                    handler.fn(type=change, body={"kind": "TrainingJob", "metadata": metadata})
            await given["stop_flag"].wait()

        shell = Shell(no_connection, wake, kinds=["TrainingJob"], operate=tells)
        shell.start()
        await asyncio.wait_for(heard.wait(), 60)
        await shell.stop()

    asyncio.run(story())
    assert woken == [Key("TrainingJob", "a", "run")]
