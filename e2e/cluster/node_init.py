"""Pid 1 of a node, and what opens the node's namespaces.

Run by file name with the standard library alone; `node.py` writes the configuration.

    python -I node_init.py open CONFIG    joins the node's cgroups, then becomes `unshare`, whose child is
    python -I node_init.py init CONFIG    pid 1: mounts, network, containerd; kubelet and kube-proxy when the API server
    answers; then it reaps and restarts

All mounts happen in the node's own mount namespace. Files in the node's folder connect the two sides:
`opened` (our pid as this machine sees it), `connected` (the cable is in), `joinable` (the API server answers).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Config = dict[str, Any]
MACHINE_WIDE = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def open_namespaces(file: str, config: Config) -> None:
    for group in config["groups"]:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    kinds = ["--mount", "--pid", "--net", "--cgroup", "--ipc", "--uts"]
    init = [sys.executable, "-I", __file__, "init", file]
    os.execvp("unshare", ["unshare", *kinds, "--fork", "--kill-child", *init])


def init(config: Config) -> None:
    folder = Path(config["folder"])
    pid_outside = str(Path("/proc/self").readlink())  # the machine's own /proc is still mounted
    run("hostname", config["name"])
    mount_everything(folder, config)
    tell(folder / "opened", pid_outside)
    wait_for(folder / "connected")
    set_up_network(config)
    running = {start(folder, config, "containerd"): "containerd"}
    wait_for(Path("/run/containerd/containerd.sock"))
    for archive in config["archives"]:
        run(f"{config['bin']}/ctr", "--namespace", "k8s.io", "images", "import", archive)
    wait_for(folder / "joinable")
    running.update({start(folder, config, name): name for name in ("kubelet", "kube-proxy")})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watch(folder, config, running)


def mount_everything(folder: Path, config: Config) -> None:
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    mount_groups()
    for name in ("/run", "/var/lib/cni"):
        Path(name).mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", name)
    Path("/run/lock").mkdir()
    for inside in ("/var/log", "/var/lib/kubelet", "/var/lib/containerd"):
        mine = folder / Path(inside).name
        mine.mkdir(exist_ok=True)
        Path(inside).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(mine), inside)
    stand_in_for_machine_settings(folder)
    replace_file(folder / "resolv.conf", "", os.path.realpath("/etc/resolv.conf"))
    replace_file(folder / "hosts", f"127.0.0.1 localhost\n{config['address']} {config['name']}\n", "/etc/hosts")
    run("mount", "--make-rshared", "/")


def mount_groups() -> None:
    """Mount the cgroup hierarchies as the node's cgroup namespace shows them: its own subtree is the root."""
    kinds = [line.split(":", 2)[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if kinds == [""]:
        run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
        free_the_root_group(Path("/sys/fs/cgroup"))
        return
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    for kind in kinds:
        name = kind.removeprefix("name=") or "unified"
        options = (
            ["-t", "cgroup", "-o", f"none,{kind}" if kind.startswith("name=") else kind] if kind else ["-t", "cgroup2"]
        )
        Path("/sys/fs/cgroup", name).mkdir()
        run("mount", *options, "cgroup", f"/sys/fs/cgroup/{name}")


def free_the_root_group(root: Path) -> None:
    """Move this node's processes into a leaf: version 2 delegates controllers only to groups without processes."""
    (root / "node").mkdir()
    (root / "node" / "cgroup.procs").write_text(str(os.getpid()))
    for controller in (root / "cgroup.controllers").read_text().split():
        (root / "cgroup.subtree_control").write_text(f"+{controller}")


def stand_in_for_machine_settings(folder: Path) -> None:
    """Mount files over the machine-wide settings that the kubelet writes."""
    (folder / "settings").mkdir(exist_ok=True)
    for name in MACHINE_WIDE:
        path = Path("/proc/sys", name)
        if path.exists():
            copy = folder / "settings" / name.replace("/", ".")
            copy.write_text(path.read_text())
            run("mount", "--bind", str(copy), str(path))


def replace_file(path: Path, text: str, inside: str) -> None:
    path.write_text(text)
    run("mount", "--bind", str(path), inside)


def set_up_network(config: Config) -> None:
    lines = [
        "link set lo up",
        f"address add {config['address']}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {config['gateway']}",
        *(f"route add {pods} via {node}" for pods, node in config["routes"]),
    ]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")
    # a Service without a rule yet is refused; it would be routed back and forth
    run("iptables", "-A", "FORWARD", "-d", config["services"], "-j", "REJECT")


def start(folder: Path, config: Config, name: str) -> int:
    with (folder / f"{name}.log").open("ab") as log:
        environment = {**os.environ, "PATH": f"{config['bin']}:{os.environ['PATH']}"}
        process = subprocess.Popen(
            config["programs"][name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    process.returncode = 0  # `watch` takes its exit status
    return process.pid


def watch(folder: Path, config: Config, running: dict[int, str]) -> None:
    """Reap every orphan and restart programs of the node that end, as a service manager does."""
    while True:
        pid, _ = os.wait()
        if name := running.pop(pid, None):
            print(f"{name} ended and starts again", flush=True)
            time.sleep(1)
            running[start(folder, config, name)] = name


def tell(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    verb, config_file = sys.argv[1:]
    content = json.loads(Path(config_file).read_text())
    if verb == "open":
        open_namespaces(config_file, content)
    else:
        init(content)
