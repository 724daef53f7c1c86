"""This machine's paths and addresses in place of the cluster's names, as a pod reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.operator.cluster.local.addresses import AddressError, Addresses, Host
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.cluster.local.rewrite import TCP_PORTS, Rewriter


def rewriter(mode: str = "loopback", **paths: str) -> Rewriter:
    addresses = Addresses(mode, lambda _: True)  # type: ignore[arg-type]
    own = Host("pod", "team", "job-0")
    for name in ("job-0", "job-1"):
        addresses.ip(Host("pod", "team", name))
    places = {f"/{path}": place for path, place in paths.items()}
    return Rewriter("team", own, places, addresses, subdomain="job", services=frozenset({"chat"}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://job-1.job.team.svc:8080/status", "http://127.16.0.3:8080/status"),
        ("job-1.job.team.svc.cluster.local", "127.16.0.3"),
        ("http://job-1.job:8080", "http://127.16.0.3:8080"),
        ("http://chat.team.svc:8000/v1", "http://127.16.0.4:8000/v1"),
        ("http://chat:8000/v1", "http://127.16.0.4:8000/v1"),
        ("chat", "chat"),
        ("talk about chat and job", "talk about chat and job"),
        ("http://other.elsewhere.svc", "http://127.16.0.4"),
        ("files in /data/x and /data, not /database or a/data", "files in /D/x and /D, not /database or a/data"),
        ("--root=/data/deep/y", "--root=/E/y"),
        ("https://example.com/data", "https://example.com/data"),
        ("file:///data/x, file:/data and s3:///data", "file:///D/x, file:/D and s3:///data"),
        ("a.b.c.d.svc", "a.b.c.d.svc"),
    ],
)
def test_names_and_paths_are_replaced_at_their_borders(text: str, expected: str) -> None:
    assert rewriter(**{"data": "/D", "data/deep": "/E"}).text(text) == expected


def test_json_gets_its_own_listen_section() -> None:
    config = {
        "listen": {"host": "0.0.0.0", "port": 8080, "control_keys": "/keys"},
        "peers": ["http://job-1.job.team.svc:8080"],
        "numbers": [1, 2.5, None, True],
    }
    assert json.loads(rewriter(keys="/K").file("config.json", json.dumps(config))) == {
        "listen": {"host": "127.16.0.2", "port": 8080, "control_keys": "/K"},
        "peers": ["http://127.16.0.3:8080"],
        "numbers": [1, 2.5, None, True],
    }


def test_a_host_that_was_chosen_stays() -> None:
    assert rewriter().json({"listen": {"host": "10.0.0.1", "port": 1}}) == {"listen": {"host": "10.0.0.1", "port": 1}}


def test_ports_are_given_out_by_name_and_the_rendezvous_follows() -> None:
    found = rewriter("ports")
    master = Host("pod", "team", "job-0")
    environment = found.environment({"MASTER_ADDR": "job-0.job.team.svc", "MASTER_PORT": "29500", "X": "/x"})
    assert environment == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(found.addresses.port(master, 29500)),
        "X": "/x",
    }
    listen = found.json({"listen": {"host": "0.0.0.0", "port": 8080}})["listen"]
    assert listen == {"host": "127.0.0.1", "port": found.addresses.port(master, 8080)}
    url = found.text("http://job-0.job.team.svc:8080")
    assert url == f"http://127.0.0.1:{listen['port']}"
    assert found.addresses.port(Host("pod", "team", "job-1"), 8080) != listen["port"]


def test_a_program_that_listens_over_zeromq_has_the_ports_behind_for_its_copies() -> None:
    addresses, own = Addresses("ports", lambda _: True), Host("pod", "team", "chat-0")
    config = {"endpoint": "tcp://0.0.0.0:5557", "replay_endpoint": "tcp://0.0.0.0:5559"}
    found = Rewriter("team", own, {}, addresses).json(config)
    first, replay = (int(found[name].removeprefix("tcp://127.0.0.1:")) for name in config)
    others = {addresses.port(Host("pod", "team", f"chat-{number}"), 8000) for number in range(1, 9)}
    assert not others & {*range(first, first + TCP_PORTS), *range(replay, replay + TCP_PORTS)}
    assert abs(first - replay) >= TCP_PORTS


def test_data_is_never_rewritten() -> None:
    assert rewriter(data="/D").file("train.jsonl", '{"text": "/data"}') == '{"text": "/data"}'
    assert rewriter(data="/D").file("app.yaml", "root: /data") == "root: /D"


def test_addresses_are_the_same_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    with Reservations() as names:
        first = Addresses("loopback", names.take, file)
        given = [first.ip(Host("pod", "a", name)) for name in ("x", "y", "x")]
    with Reservations() as names:
        second = Addresses("loopback", names.take, file)
        assert [second.ip(Host("pod", "a", name)) for name in ("x", "y", "x")] == given
        assert second.ip(Host("service", "a", "x")) not in given
    assert given[0] == given[2] != given[1]


def test_two_supervisors_never_share_an_address_or_a_port() -> None:
    with Reservations() as mine, Reservations() as theirs:
        for mode in ("loopback", "ports"):
            one, other = Addresses(mode, mine.take), Addresses(mode, theirs.take)
            host = Host("pod", "a", "x")
            assert (one.ip(host), one.port(host, 8080)) != (other.ip(host), other.port(host, 8080))


def test_a_block_that_was_taken_meanwhile_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    with Reservations() as names:
        ours = Addresses("loopback", names.take, file).ip(Host("pod", "a", "x"))
    block = ours.split(".")[1]
    with Reservations() as theirs, Reservations() as names:
        assert theirs.take(f"block-{block}")
        again = Addresses("loopback", names.take, file).ip(Host("pod", "a", "x"))
        assert again.split(".")[1] != block


def test_a_state_folder_keeps_its_kind_of_addresses(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    Addresses("ports", lambda _: True, file).port(Host("pod", "a", "x"), 8080)
    with pytest.raises(AddressError, match="this state folder uses addresses: ports, not loopback"):
        Addresses("loopback", lambda _: True, file)


def test_ports_of_root_move_up() -> None:
    addresses = Addresses("loopback", lambda _: True)
    host = Host("service", "a", "chat")
    assert [addresses.port(host, port) for port in (80, 443, 8000)] == [8080, 8443, 8000]
