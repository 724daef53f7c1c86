"""The programs that a cluster needs, and the Go module of each.

The packages and their versions stand in `e2e/tools/<tool>/go.mod` (its `tool` lines). This file holds only the further
arguments of `go build`.
"""

import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path

MODULES = Path(__file__).resolve().parent.parent / "tools"


@dataclass(frozen=True)
class Tool:
    """One pinned Go module below `e2e/tools/`, with its programs.

    It maps each package to the path of its program below the bin folder.
    """

    name: str
    programs: dict[str, str]
    tags: tuple[str, ...] = ()
    stamps: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    """`MODULE/PATH` of files and folders of its dependencies that are kept beside the programs, in `files/`."""
    replaced: dict[str, str] = field(default_factory=dict)
    """`MODULE/PATH` of a dependency's source file -> file beside `go.mod` that is compiled in its place."""

    @property
    def module(self) -> Path:
        """The folder with `go.mod` and `go.sum`."""
        return MODULES / self.name

    @property
    def key(self) -> str:
        """Return a digest of every input of the build."""
        files = [list(self.files)] if self.files else []
        recipe = json.dumps([self.programs, self.tags, self.stamps, platform.machine(), *files], sort_keys=True)
        digest = hashlib.sha256(recipe.encode())
        for name in ("go.mod", "go.sum", *sorted(self.replaced.values())):
            digest.update((self.module / name).read_bytes())
        return f"{self.name}-{digest.hexdigest()[:12]}"


KUBERNETES_VERSION = "v1.36.3"
_STAMP = "k8s.io/component-base/version"
_CNI = "github.com/containernetworking/plugins/plugins"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"

ETCD = Tool("etcd", {"go.etcd.io/etcd/server/v3": "etcd"})
KUBERNETES = Tool(
    "kubernetes",
    {
        f"k8s.io/kubernetes/cmd/{program}": program
        for program in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        )
    },
    stamps={f"{_STAMP}.gitVersion": KUBERNETES_VERSION, f"{_STAMP}.gitMajor": "1", f"{_STAMP}.gitMinor": "36"},
)
HELM = Tool("helm", {"helm.sh/helm/v4/cmd/helm": "helm"})
CONTAINERD = Tool(
    "containerd",
    {
        f"{_CONTAINERD}/containerd": "containerd",
        f"{_CONTAINERD}/containerd-shim-runc-v2": "containerd-shim-runc-v2",
        f"{_CONTAINERD}/ctr": "ctr",
        f"{_CNI}/main/bridge": "cni/bridge",
        f"{_CNI}/main/loopback": "cni/loopback",
        f"{_CNI}/ipam/host-local": "cni/host-local",
        f"{_CNI}/meta/portmap": "cni/portmap",
    },
    tags=("no_btrfs", "no_zfs", "no_devmapper"),
)
COREDNS = Tool("coredns", {"github.com/coredns/coredns": "coredns"})

KWOK = Tool("kwok", {"sigs.k8s.io/kwok/cmd/kwok": "kwok"})
"""Nodes and pods that are faked, for measurements."""

_KUEUE = "sigs.k8s.io/kueue"
_JOBSET = "sigs.k8s.io/jobset"
KUEUE = Tool(
    "kueue",
    {f"{_KUEUE}/cmd/kueue": "kueue"},
    files=(f"{_KUEUE}/config/components/crd/bases", f"{_KUEUE}/config/components/webhook/manifests.yaml"),
)
JOBSET = Tool(
    "jobset",
    {_JOBSET: "jobset"},
    files=(f"{_JOBSET}/config/components/crd/bases", f"{_JOBSET}/config/components/webhook/manifests.yaml"),
)
_FLUX = "github.com/fluxcd"
KUSTOMIZE_CONTROLLER = Tool(
    "kustomize-controller",
    {f"{_FLUX}/kustomize-controller": "kustomize-controller"},
    files=(
        f"{_FLUX}/kustomize-controller/config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml",
        *(
            f"{_FLUX}/source-controller/config/crd/bases/source.toolkit.fluxcd.io_{kind}.yaml"
            for kind in ("buckets", "externalartifacts", "gitrepositories", "ocirepositories")
        ),
    ),
)
"""Flux's controller that applies manifests. source-controller, which fetches them, is not pinned here: of its newest
releases the module proxy lacks github.com/fluxcd/pkg/artifact; of 1.7.3, whose modules are there, the checksum database
lacks two (github.com/fluxcd/pkg/http/transport v0.7.0 and go-containerregistry's k8schain)."""
TRAEFIK = Tool(
    "traefik",
    {"github.com/traefik/traefik/v3/cmd/traefik": "traefik"},
    files=("sigs.k8s.io/gateway-api/config/crd/standard",),
    replaced={"github.com/go-acme/lego/v4/providers/dns/zz_gen_dns_providers.go": "dns_providers.go.txt"},
)
"""A gateway that speaks Gateway API, with the definitions of that API."""

_VOLCANO = "volcano.sh/volcano"
VOLCANO = Tool(
    "volcano",
    {f"{_VOLCANO}/cmd/scheduler": "volcano"},
    files=tuple(
        f"{_VOLCANO}/installer/helm/chart/volcano/crd/bases/{name}.yaml"
        for name in (
            "batch.volcano.sh_jobs",
            "nodeinfo.volcano.sh_numatopologies",
            "scheduling.volcano.sh_podgroups",
            "scheduling.volcano.sh_queues",
            "shard.volcano.sh_nodeshards",
            "topology.volcano.sh_hypernodes",
        )
    ),
)
"""Volcano's scheduler; its types are volcano.sh/apis v1.14.0, the newest version in the module proxy."""

REGISTRY = Tool("registry", {"github.com/distribution/distribution/v3/cmd/registry": "registry"})
"""A registry of OCI images, the one that others are measured by."""
VERSITYGW = Tool("versitygw", {"github.com/versity/versitygw/cmd/versitygw": "versitygw"})
"""A server of the S3 protocol over a folder."""

ALL = (ETCD, KUBERNETES, HELM, CONTAINERD, COREDNS)
"""Tools in the order of their build; those that most tests need come first."""
OPTIONAL = (KWOK, KUEUE, JOBSET, KUSTOMIZE_CONTROLLER, TRAEFIK, VOLCANO, REGISTRY, VERSITYGW)
"""Programs of others, which only the targets of their own tests and measurements need; each keeps its own folder."""
