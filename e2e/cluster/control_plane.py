"""A real Kubernetes API in about three seconds, without root.

It runs etcd and kube-apiserver and, if configured, the controller-manager and the scheduler.

    with ControlPlane(folder) as plane:
        subprocess.run(["kubectl", "--kubeconfig", plane.kubeconfig, "get", "ns"])

Several live side by side: everything listens on `address` at ports of its own. Alone (the default) it has no garbage
collector and makes no service accounts, so the ServiceAccount admission is off; with `controllers=True` both are as in
any cluster.
"""

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from e2e.cluster import binaries, tools
from e2e.cluster.keys import Authority, service_account_keys
from e2e.cluster.processes import Program, wait_for_program
from testing.free_port import free_port

ISSUER = "https://kubernetes.default.svc.cluster.local"


class ControlPlane:
    """One control plane with its state, keys and logs in `folder`.

    Args:
        folder: made if missing; what an earlier process started there is found again.
        name: shown in messages.
        address: where the API server listens. Not a loopback address if pods shall reach it.
        service_range: where Services get their addresses.
        pod_range: where nodes get their pod networks (only with controllers); empty: nodes get none.
        controllers: start the controller-manager too.
        scheduler: start the scheduler too.
        detached: the processes outlive this one.
        api_server_flags, controller_flags, scheduler_flags: further flags, which win over ours.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "alone",
        *,
        address: str = "127.0.0.1",
        service_range: str = "10.96.0.0/16",
        pod_range: str = "",
        controllers: bool = False,
        scheduler: bool = False,
        detached: bool = False,
        api_server_flags: tuple[str, ...] = (),
        controller_flags: tuple[str, ...] = (),
        scheduler_flags: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.name = name
        self.address = address
        self._service_range = service_range
        self._pod_range = pod_range
        self._has_controllers = controllers
        self._has_scheduler = scheduler
        self._detached = detached
        self._api_server_flags = api_server_flags
        self._controller_flags = controller_flags
        self._scheduler_flags = scheduler_flags
        self._logs = folder / "log"
        self.etcd = Program("etcd", self._logs)
        self.api_server = Program("kube-apiserver", self._logs)
        self.controller_manager = Program("kube-controller-manager", self._logs)
        self.scheduler = Program("kube-scheduler", self._logs)

    def __enter__(self) -> "ControlPlane":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The API server's port, the same for the life of `folder`."""
        return self._port("api-server")

    @property
    def url(self) -> str:
        """The address at which the API server listens."""
        return f"https://{self.address}:{self.port}"

    @property
    def authority(self) -> Authority:
        """The authority that signs the certificates of the cluster's programs."""
        return Authority(self.folder / "keys")

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator (group `system:masters`)."""
        path = self.folder / "keys" / "admin.kubeconfig"
        return path if path.exists() else self.kubeconfig_of("admin", ("system:masters",))

    def kubeconfig_of(self, user: str, groups: tuple[str, ...] = (), *, url: str | None = None) -> Path:
        """Write a new kubeconfig of any user, for RBAC and for clients behind a proxy (`url`).

        It overwrites an earlier one of that user.
        """
        return self.authority.kubeconfig(user, url or self.url, groups)

    def start(self) -> None:
        """Start the missing processes and wait until they work.

        Raises:
            ClusterError: if a part ends or does not answer in time, with the end of its log.
            MissingBinaries: if the programs are not built.
        """
        self.start_storage()
        self.start_api_server()
        if self._has_controllers:
            self._start_controller_manager()
        if self._has_scheduler:
            self._start_scheduler()
        if self._has_controllers:
            path = "/api/v1/namespaces/default/serviceaccounts/default"
            wait_for_program(
                self.controller_manager,
                lambda: self._answers(path),
                what="the default service account is there",
                timeout_s=240,
            )

    def stop(self) -> None:
        """End every process; the state stays in `folder`."""
        for program in (self.scheduler, self.controller_manager, self.api_server, self.etcd):
            program.stop(grace_s=0)

    def stop_api_server(self) -> None:
        """Kill the API server; clients lose their connections, its state and port stay."""
        self.api_server.stop(grace_s=0)

    def restart_api_server(self) -> None:
        """Kill the API server and start it again with the same port and state."""
        self.stop_api_server()
        self.start_api_server()

    def start_api_server(self) -> None:
        """Start the API server, if it does not run, and wait until it is ready."""
        if self.api_server.alive:
            return
        keys = self.folder / "keys"
        names = [
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ]
        serving = self.authority.server(
            "kube-apiserver", [*names, "127.0.0.1", self.address, self._first_service_address()]
        )
        kubelet_client = self.authority.client("kube-apiserver-kubelet-client", ("system:masters",))
        front_authority = Authority(keys, "front-proxy-ca")
        accounts = service_account_keys(keys)
        loopback = self.address.startswith("127.")
        command = [
            str(self._program("kube-apiserver")),
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self.address}",
            f"--secure-port={self.port}",
            f"--advertise-address={self.address}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}",
            f"--kubelet-certificate-authority={self.authority.pair.certificate}",
            f"--kubelet-client-certificate={kubelet_client.certificate}",
            f"--kubelet-client-key={kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={accounts.certificate}",
            f"--service-account-signing-key-file={accounts.key}",
            f"--requestheader-client-ca-file={front_authority.pair.certificate}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            *(() if self._has_controllers else ("--disable-admission-plugins=ServiceAccount",)),
            f"--service-cluster-ip-range={self._service_range}",
            f"--endpoint-reconciler-type={'none' if loopback else 'lease'}",
            # webhooks and aggregated APIs: straight to the pod, this machine has no Service addresses of its own
            "--enable-aggregator-routing=true",
            "--allow-privileged=true",
            "--profiling=false",
            *self._api_server_flags,
        ]
        self.api_server.start(command, detached=self._detached)
        wait_for_program(
            self.api_server, lambda: self._answers("/readyz"), what="kube-apiserver is ready", timeout_s=300
        )

    @contextlib.contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """Stop the scheduler while the context lasts. The next one knows all pods before it schedules the first."""
        self.scheduler.stop(grace_s=0)
        try:
            yield
        finally:
            self._start_scheduler()

    def start_storage(self) -> None:
        """Start etcd alone."""
        if self.etcd.alive:
            return
        peer = f"http://127.0.0.1:{self._port('etcd-peer')}"
        command = [
            str(self._program("etcd")),
            "--name=alone",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=alone={peer}",
            # a store that lives as long as a test: no waiting for the disk
            "--unsafe-no-fsync",
            "--log-level=warn",
            "--auto-compaction-retention=5m",
        ]
        self.etcd.start(command, detached=self._detached)
        wait_for_program(self.etcd, lambda: _listens(self._port("etcd")), what="etcd listens", timeout_s=240)

    def _start_controller_manager(self) -> None:
        if self.controller_manager.alive:
            return
        config = self.kubeconfig_of("system:kube-controller-manager")
        pods = (
            ["--allocate-node-cidrs=true", f"--cluster-cidr={self._pod_range}"]
            if self._pod_range
            else ["--allocate-node-cidrs=false"]
        )
        command = [
            str(self._program("kube-controller-manager")),
            *(f"--{flag}={config}" for flag in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")),
            "--secure-port=0",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={service_account_keys(self.folder / 'keys').key}",
            f"--root-ca-file={self.authority.pair.certificate}",
            f"--cluster-signing-cert-file={self.authority.pair.certificate}",
            f"--cluster-signing-key-file={self.authority.pair.key}",
            *pods,
            f"--service-cluster-ip-range={self._service_range}",
            f"--flex-volume-plugin-dir={self.folder / 'volume-plugins'}",
            "--kube-api-qps=300",
            "--kube-api-burst=600",
            "--profiling=false",
            *self._controller_flags,
        ]
        self.controller_manager.start(command, detached=self._detached)

    def _start_scheduler(self) -> None:
        if self.scheduler.alive:
            return
        config = self.kubeconfig_of("system:kube-scheduler")
        command = [
            str(self._program("kube-scheduler")),
            *(f"--{flag}={config}" for flag in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")),
            "--secure-port=0",
            "--leader-elect=false",
            "--kube-api-qps=300",
            "--kube-api-burst=600",
            "--profiling=false",
            *self._scheduler_flags,
        ]
        self.scheduler.start(command, detached=self._detached)

    def _program(self, name: str) -> Path:
        return binaries.find([tools.ETCD, tools.KUBERNETES]) / name

    @property
    def _etcd_url(self) -> str:
        return f"http://127.0.0.1:{self._port('etcd')}"

    def _first_service_address(self) -> str:
        """Return the address at which pods reach the API server as `kubernetes.default.svc`."""
        return self._service_range.partition("/")[0].rpartition(".")[0] + ".1"

    def _port(self, what: str) -> int:
        """Return a port that was free at the first call, recorded in `folder`."""
        note = self.folder / f"{what}.port"
        if not note.exists():
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(free_port(self.address if what == "api-server" else "127.0.0.1")))
        return int(note.read_text())

    def _answers(self, path: str) -> bool:
        """Return whether the API server answers a GET with 200."""
        pair = self.authority.folder
        if not (pair / "admin.kubeconfig").exists():
            self.kubeconfig_of("admin", ("system:masters",))
        context = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        context.load_cert_chain(pair / "admin-client.crt", pair / "admin-client.key")
        try:
            with urllib.request.urlopen(self.url + path, context=context, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
