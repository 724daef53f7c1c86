"""The configuration files of a node's programs, as data."""

import os
from pathlib import Path
from typing import Any

from e2e.cluster.image import BUSYBOX
from e2e.cluster.keys import Pair
from e2e.cluster.spec import NodeSpec

MIB = 1 << 20


def containerd_toml(bin_folder: Path, runc: str, networks: Path) -> str:
    """Return containerd's configuration: overlayfs, runc, no plugin that needs the outside."""
    left_out = [f"io.containerd.snapshotter.v1.{name}" for name in ("btrfs", "zfs", "devmapper", "blockfile", "erofs")]
    left_out += [
        "io.containerd.nri.v1.nri",
        "io.containerd.tracing.processor.v1.otlp",
        "io.containerd.internal.v1.tracing",
    ]
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = {left_out}
[grpc]
  address = "/run/containerd/containerd.sock"
[ttrpc]
  address = "/run/containerd/containerd.sock.ttrpc"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{BUSYBOX}"
[plugins."io.containerd.cri.v1.runtime"]
  # a root without CAP_SYS_RESOURCE may not lower oom_score_adj
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{bin_folder}/cni"]
    conf_dir = "{networks}"
"""


def pod_network(pods: str) -> dict[str, Any]:
    """Return the CNI chain of one node: a bridge with addresses of the node's range, and host ports."""
    addresses = {
        "type": "host-local",
        "dataDir": "/run/pod-addresses",
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def kubelet(spec: NodeSpec, address: str, dns: str, authority: Path, serving: Pair, folder: Path) -> dict[str, Any]:
    """Return the kubelet's file; its periods are short, so that a story sees a lost node within seconds."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "resolvConf": str(folder / "resolv.conf"),
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "failSwapOn": False,
        "readOnlyPort": 0,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
        "volumePluginDir": str(folder / "volume-plugins"),
        "systemReserved": reserved(spec, os.cpu_count() or 1, _machine_memory_bytes()),
    }


def reserved(spec: NodeSpec, cores: int, memory_bytes: int) -> dict[str, str]:
    """Return the resources to reserve so that a node offers exactly its spec."""
    kept = {}
    if spec.cpu is not None and spec.cpu < cores:
        kept["cpu"] = f"{round((cores - spec.cpu) * 1000)}m"
    if spec.memory_gib is not None and spec.memory_gib * 1024 * MIB < memory_bytes:
        kept["memory"] = f"{round(memory_bytes / MIB - spec.memory_gib * 1024)}Mi"
    return kept


def corefile(address: str, kubeconfig: Path) -> str:
    """Return CoreDNS's file: it resolves the cluster's names and no other."""
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
    bind {address}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
.:53 {{
    bind {address}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def _machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
