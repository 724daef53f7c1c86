"""What a story leaves behind is its own: another cluster may have taken its addresses since."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from stoker.operator.cluster.local.reservations import Reservations
from testing.stories.story_cluster import StoryCluster


def test_a_listener_on_an_address_of_the_cluster_is_left_behind_unless_another_one_has_it_now(tmp_path: Path) -> None:
    cluster = StoryCluster(tmp_path / "state")
    cluster.client.folders.make()
    with Reservations() as other, socket.socket() as listener:
        block = next(number for number in range(200, 255) if other.take(f"block-{number}"))
        listener.bind((f"127.{block}.0.2", 0))
        listener.listen()
        hosts = {"pod/default/web-0": f"127.{block}.0.2"}
        kept = {"mode": "loopback", "block": block, "hosts": hosts, "ports": {}}
        cluster.client.folders.addresses.write_text(json.dumps(kept))
        assert cluster.remains() == []
        other.__exit__(None, None, None)
        assert cluster.remains() == [f"listener 127.{block}.0.2:{listener.getsockname()[1]}"]
