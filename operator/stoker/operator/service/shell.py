"""Kopf as a shell: it watches our kinds beside the informers and wakes the queue. The only module that imports Kopf.

Nothing here decides or writes: no handler keeps state, so Kopf puts no annotation and no finalizer on any object. A
wake-up may be lost or repeated. Kopf runs in a thread with a loop of its own, because when one of its watches fails it
ends by cancelling every task of its loop; the thread starts it again. Credentials are loaded in the caller's loop, and
never at the same time as Kopf loads them: the client library keeps certificates in files that all threads share, and
returns their names before it has written them.

Owned by `program`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stoker.operator.cluster.kinds import GROUP, KINDS, OURS, VERSION
from stoker.operator.cluster.kube.credentials import Access, load_configuration
from stoker.operator.domain.plan import Key
from stoker.pod.error_text import text_of


@contextmanager
def _absent(package: str) -> Iterator[None]:
    """Hide a package that is not loaded yet."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


with _absent("kubernetes"):
    # Kopf loads the client library where it is installed, to recognise its models: 12 MB for what is not used here.
    import kopf

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

Wake = Callable[[Key], None]
Login = Callable[[], Coroutine[Any, Any, kopf.ConnectionInfo]]


class Shell:
    """Kopf in a thread. `login` and `wake` are called in the event loop that called `start`."""

    def __init__(
        self,
        login: Login,
        wake: Wake,
        *,
        namespaces: Sequence[str] = (),
        kinds: Sequence[str] = OURS,
        operate: Callable[..., Awaitable[None]] = kopf.operator,
    ) -> None:
        self.login = login
        self.wake = wake
        self.namespaces = tuple(namespaces)
        self.kinds = tuple(kinds)
        self.operate = operate
        self.restarts = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to watch."""
        loop = asyncio.get_running_loop()

        def tell(key: Key) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.wake, key)

        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.login(), loop))

        registry = make_registry(login, tell, self.kinds)
        self._thread = threading.Thread(target=self._run, args=(registry,), name="kopf", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop Kopf and wait for its end."""
        self._stop.set()
        with self._lock:
            if self._inner is not None:
                loop, event = self._inner
                loop.call_soon_threadsafe(event.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 20.0)

    def _run(self, registry: kopf.OperatorRegistry) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                asyncio.run(self._operate(registry))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  what it says is all that is known
                log.warning("Kopf ended and is started again in %g s: %s", pause_s, text_of(error))
            if self._stop.wait(pause_s):
                return
            self.restarts += 1
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _operate(self, registry: kopf.OperatorRegistry) -> None:
        stop = asyncio.Event()
        with self._lock:
            if self._stop.is_set():
                return
            self._inner = (asyncio.get_running_loop(), stop)
        try:
            await self.operate(
                registry=registry,
                settings=make_settings(),
                stop_flag=stop,
                clusterwide=not self.namespaces,
                namespaces=list(self.namespaces),
            )
        finally:
            with self._lock:
                self._inner = None


def make_settings() -> kopf.OperatorSettings:
    """Build settings for watches only: no peering, no scanning, no events, no webhooks."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.chunk_size = 250
    settings.watching.inactivity_timeout = 120
    settings.watching.server_timeout = 90
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.persistence.finalizer = f"{GROUP}/never"
    settings.process.ultimate_exiting_timeout = None  # else it kills the whole process
    return settings


def make_registry(
    login: Callable[..., Awaitable[kopf.ConnectionInfo]], tell: Wake, kinds: Sequence[str]
) -> kopf.OperatorRegistry:
    """Register a login and one `on.event` for each kind."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)

    def woken(*, type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002  Kopf's name
        if type is not None:  # a first list tells what the informers list themselves
            metadata = body["metadata"]
            tell(Key(body["kind"], metadata.get("namespace", ""), metadata["name"]))

    for kind in kinds:
        kopf.on.event(GROUP, VERSION, KINDS[kind].plural, registry=registry)(woken)
    return registry


async def connection_info(access: Access) -> kopf.ConnectionInfo:
    """Load our credentials in Kopf's form."""
    configuration = await load_configuration(access)
    auth = await configuration.auth_settings()
    scheme, _, token = str(auth.get("BearerToken", {}).get("value") or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
