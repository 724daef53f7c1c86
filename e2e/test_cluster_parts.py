"""Parts of the test cluster that need neither root nor programs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import binaries, tools
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.groups import hierarchies
from e2e.cluster.keys import Authority
from e2e.cluster.network import MAX_NODES, Network, claim, claimed, release
from e2e.cluster.processes import Program, started_at
from e2e.cluster.settings import reserved
from e2e.cluster.spec import NodeSpec, parse_nodes
from e2e.cluster.waiting import wait_until
from e2e.images.built import chain_ids

GIB = 1 << 30


def test_nodes_are_read_from_plain_data() -> None:
    given = [{"name": "a", "gpus": 2, "labels": {"zone": "x"}, "taints": ["k=v:NoSchedule"]}, {"name": "b"}]

    assert parse_nodes(given) == (
        NodeSpec(name="a", gpus=2, labels={"zone": "x"}, taints=("k=v:NoSchedule",)),
        NodeSpec(name="b"),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nodes must be a list with at least one node"),
        ([{"gpus": 1}], r"nodes\[0\] must be a mapping with a name"),
        ([{"name": "a", "gpu": 1}], r"nodes\[0\]: unknown gpu; there are name, gpus"),
        ([{"name": "A_1"}], "'A_1', it must be 1 to 32 lower-case letters, digits and dashes"),
        ([{"name": "a", "gpus": -1}], r"nodes\[a\]\.gpus is -1, it must be 0 or more"),
    ],
)
def test_nodes_that_cannot_be_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nodes(given)


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (NodeSpec(name="a"), {}),
        (NodeSpec(name="a", cpu=1.5, memory_gib=6), {"cpu": "2500m", "memory": "10240Mi"}),
        (NodeSpec(name="a", cpu=64, memory_gib=900), {}),
    ],
    ids=["all of it", "a part", "never more than there is"],
)
def test_a_node_keeps_from_pods_what_its_spec_does_not_offer(spec: NodeSpec, kept: dict[str, str]) -> None:
    assert reserved(spec, cores=4, memory_bytes=16 * GIB) == kept


def test_addresses_of_a_cluster_do_not_meet() -> None:
    network = Network(207)
    nodes = {network.node(slot) for slot in range(MAX_NODES)} | {network.gateway}
    pods = {network.pods_of(slot) for slot in range(MAX_NODES)}

    assert (len(nodes), len(pods)) == (MAX_NODES + 1, MAX_NODES)
    assert (network.pods_of(0), network.pods_of(MAX_NODES - 1)) == ("10.207.64.0/24", "10.207.95.0/24")
    assert (network.pods, network.services) == ("10.207.64.0/18", "10.207.128.0/20")
    assert len(network.link(MAX_NODES - 1)) < 16, "the kernel's longest name of a link"


def test_a_network_belongs_to_one_cluster_until_it_is_released(tmp_path: Path) -> None:
    one, two = claim(tmp_path, "one"), claim(tmp_path, "two")
    assert one != two
    assert claim(tmp_path, "one") == one

    release(tmp_path, "one")

    assert claimed(tmp_path, "one") is None
    assert claimed(tmp_path, "two") == two


def test_hierarchies_of_both_versions_are_read() -> None:
    one, systemd, two = hierarchies("4:memory:/a/b\n9:name=systemd:/\n0::/c\n")

    assert (one.mount, one.path) == (Path("/sys/fs/cgroup/memory"), "/a/b")
    assert systemd.mount == Path("/sys/fs/cgroup/systemd")
    assert (two.controllers, two.path) == ("", "/c")


def test_the_key_of_a_tool_follows_its_module_and_its_flags() -> None:
    other = tools.Tool("etcd", tools.ETCD.programs, tags=("more",))

    assert tools.ETCD.key == tools.Tool("etcd", tools.ETCD.programs).key
    assert len({tool.key for tool in (*tools.ALL, other)}) == len(tools.ALL) + 1


def test_what_only_measurements_need_is_built_for_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(binaries.BIN_VARIABLE, raising=False)
    assert binaries.folder_of(tools.KWOK) not in {binaries.folder_of(tool) for tool in tools.ALL}


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(binaries.BIN_VARIABLE, str(tmp_path))
    (tmp_path / "etcd").touch(mode=0o755)

    assert binaries.find([tools.ETCD]) == tmp_path
    with pytest.raises(
        binaries.MissingBinaries, match=rf"^no helm in {tmp_path}; is STOKER_KUBE_BIN the right folder\?$"
    ):
        binaries.find([tools.ETCD, tools.HELM])


GO = """#!/bin/sh
mkdir -p "$GOCACHE" "$GOMODCACHE" && touch "$GOCACHE/object" "$GOMODCACHE/module"
while [ "$1" != -o ]; do shift; done
mkdir -p "$(dirname "$2")" && printf "#!/bin/sh\\n" >"$2" && chmod 755 "$2"
"""
"""A fake `go` that builds a program without effect and, as the real one, fills its caches."""


def with_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine whose Go is the script above."""
    (folder / "bin").mkdir()
    (folder / "bin" / "go").write_text(GO)
    (folder / "bin" / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv(binaries.CACHE_VARIABLE, str(folder / "cache"))
    for name in (binaries.BIN_VARIABLE, "GOCACHE", "GOMODCACHE"):
        monkeypatch.delenv(name, raising=False)
    return binaries.cache()


def test_what_go_keeps_besides_is_gone_after_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = with_go(tmp_path, monkeypatch)
    (cache / "go" / "build").mkdir(parents=True)
    (cache / "go" / "build" / "left-by-an-interrupted-build").touch()

    folder = binaries.build([tools.ETCD])

    assert binaries.missing_programs(tools.ETCD, folder) == []
    assert not (cache / "go").exists()


GO_WITH_MODULES = """#!/bin/sh
if [ "$1" = mod ]; then printf '{"Dir": "%s"}' "$MODULE_FOLDER"; exit; fi
""" + GO.removeprefix("#!/bin/sh\n")


def test_a_controller_of_others_has_a_folder_of_its_own_with_the_files_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_go(tmp_path, monkeypatch)
    (tmp_path / "bin" / "go").write_text(GO_WITH_MODULES)
    components = tmp_path / "module" / "config" / "components"
    (components / "crd" / "bases").mkdir(parents=True)
    (components / "crd" / "bases" / "workloads.yaml").write_text("kind: CustomResourceDefinition\n")
    (components / "webhook").mkdir()
    (components / "webhook" / "manifests.yaml").write_text("kind: MutatingWebhookConfiguration\n")
    monkeypatch.setenv("MODULE_FOLDER", str(tmp_path / "module"))
    with pytest.raises(binaries.MissingBinaries, match=r"no kueue in .*; build it with: .* kueue"):
        binaries.find_optional(tools.KUEUE)

    binaries.build([tools.KUEUE])

    folder = binaries.find_optional(tools.KUEUE)
    assert folder.parent == cache / "tools"
    assert (folder / "files" / "bases" / "workloads.yaml").exists()
    assert (folder / "files" / "manifests.yaml").exists()
    assert not (binaries.bin_folder() / "kueue").exists()
    assert not (cache / "go").exists()


GO_WITH_MODFILE = GO_WITH_MODULES.replace(
    "while [",
    'for word in "$@"; do case "$word" in *.modules/go.mod) cp "$word" "$MODULE_FOLDER/used.mod";; esac; done\nwhile [',
    1,
)


def test_a_file_of_a_dependency_is_replaced_in_a_copy_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_go(tmp_path, monkeypatch)
    (tmp_path / "bin" / "go").write_text(GO_WITH_MODFILE)
    (tmp_path / "module" / "providers" / "dns").mkdir(parents=True)
    (tmp_path / "module" / "providers" / "dns" / "zz_gen_dns_providers.go").write_text("package dns // as it came\n")
    (tmp_path / "module" / "config" / "crd" / "standard").mkdir(parents=True)
    monkeypatch.setenv("MODULE_FOLDER", str(tmp_path / "module"))

    binaries.build([tools.TRAEFIK])

    folder = binaries.find_optional(tools.TRAEFIK)
    assert (folder / "files" / "standard").is_dir()
    copied = f"replace github.com/go-acme/lego/v4 => {folder}.modules/github.com/go-acme/lego/v4"
    assert copied in (tmp_path / "module" / "used.mod").read_text()
    assert "as it came" in (tmp_path / "module" / "providers" / "dns" / "zz_gen_dns_providers.go").read_text()
    assert not list((cache / "tools").glob("*.modules"))


def test_caches_of_go_that_the_environment_names_are_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_go(tmp_path, monkeypatch)
    monkeypatch.setenv("GOCACHE", str(tmp_path / "build"))
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))

    binaries.build([tools.ETCD])

    assert (tmp_path / "build" / "object").exists()
    assert (tmp_path / "modules" / "module").exists()
    assert not (cache / "go").exists()


def test_a_build_that_ends_first_leaves_the_caches_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_go(tmp_path, monkeypatch)
    cache.mkdir(parents=True)
    with (cache / "go.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        binaries.build([tools.ETCD])
        assert (cache / "go" / "build" / "object").exists()

    binaries.build([tools.HELM])
    assert not (cache / "go").exists()


def test_keys_are_private_and_an_authority_is_found_again(tmp_path: Path) -> None:
    pair = Authority(tmp_path).client("system:node:a", ("system:nodes",))
    again = Authority(tmp_path)

    assert pair.key.stat().st_mode & 0o777 == 0o600
    assert again.pair.certificate.read_bytes() == Authority(tmp_path).pair.certificate.read_bytes()
    assert again.kubeconfig("me", "https://127.0.0.1:1").stat().st_mode & 0o777 == 0o600


def test_a_pid_that_belongs_to_another_process_is_never_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "mine.pid").write_text(f'{{"pid": {other.pid}, "started_at": 1}}')

        Program("mine", tmp_path).stop()

        assert other.poll() is None
        other.kill()


def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\nfrom e2e.cluster.processes import Program\n"
        f"p = Program('child', pathlib.Path({str(tmp_path)!r}))\n"
        "p.start(['sleep', '60'], detached=False)\nprint(p.pid, flush=True)\nos._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": "."},
    )

    assert wait_until(lambda: started_at(int(done.stdout)) is None, timeout_s=120)


@pytest.mark.timeout(120)
def test_two_api_servers_live_side_by_side_and_one_starts_again_with_its_state(tmp_path: Path) -> None:
    binaries.find([tools.ETCD, tools.KUBERNETES])
    with ControlPlane(tmp_path / "one") as one, ControlPlane(tmp_path / "two") as two:
        assert one.url != two.url
        kubectl(one, "create", "namespace", "kept")
        start = time.monotonic()
        one.restart_api_server()
        assert "kept" in kubectl(one, "get", "namespaces")
        assert "kept" not in kubectl(two, "get", "namespaces")
        assert time.monotonic() - start < 60
        nobody = one.kubeconfig_of("nobody")
        assert "forbidden" in kubectl(one, "get", "namespaces", config=nobody)
    assert not one.api_server.alive


def kubectl(plane: ControlPlane, *arguments: str, config: Path | None = None) -> str:
    program = binaries.bin_folder() / "kubectl"
    done = subprocess.run(
        [str(program), f"--kubeconfig={config or plane.kubeconfig}", *arguments], capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_layer_is_named_by_what_lies_below_it() -> None:
    """The value comes from: printf 'sha256:AA.. sha256:BB..' | sha256sum."""
    first, second = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    assert chain_ids([]) == []
    assert chain_ids([first]) == [first]
    assert chain_ids([first, second]) == [
        first,
        "sha256:ccd722928bd92476ba1745586fed6e45a102504185ad88cd89e01ff116fd146c",
    ]
