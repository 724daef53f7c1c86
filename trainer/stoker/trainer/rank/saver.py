"""Saves beside the training: every rank writes its pieces in a thread, rank 0 commits, all read back.

A save works on one snapshot in host memory; the training may change its tensors as soon as `start` returns. One save is
in flight at a time.

Made by `build`, called by the loop. Owns the save that runs; at most one runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.checkpoint.manifest import Manifest, Piece, TensorInfo, folder_name
from stoker.checkpoint.store import CheckpointRoot, Published
from stoker.checkpoint.verify import verify
from stoker.checkpoint.writer import PieceWriter, write_file
from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import RequestEvent, RetentionEvent, SaveEvent, SaveReason, SaveState
from stoker.trainer.rank.piece_map import HostPiece
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.save_room import SaveRoom


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One save, the same on every rank."""

    step: int
    tokens: int
    loss: float | None
    reason: SaveReason
    requests: tuple[str, ...] = ()
    """Ids of the commands that it answers; only rank 0 has them."""
    tensors: Sequence[TensorInfo]
    """The whole state, for the manifest."""
    meta: Mapping[str, Any]


class Saver:
    """Runs saves for one rank. All ranks call `start` for the same plans in the same order."""

    def __init__(
        self,
        root: CheckpointRoot,
        writer: str,
        group: SaveGroup,
        channel: RankChannel,
        files: Mapping[str, bytes],
        keep: int | None,
        verified: frozenset[str] = frozenset(),
    ) -> None:
        """`files` are added to every checkpoint.

        `keep`: how many verified ones to keep (None deletes nothing). `verified`: folders that need no check.
        """
        self._root = root
        self._writer = writer
        self._group = group
        self._channel = channel
        self._files = files
        self._keep = keep
        self._verified = dict.fromkeys(verified, True)
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, plan: SavePlan, take: Callable[[], Iterable[HostPiece]]) -> None:
        """Wait for the previous save, `take` the pieces, and start to write them as they arrive."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(plan, take()), name=f"save-{plan.step}")
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait until the save in flight has been read back, and return the error of the last save, if it had one:

        StorageFailed, or that of a lost peer.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._problem

    def _run(self, plan: SavePlan, pieces: Iterable[HostPiece]) -> None:
        event = _started(plan, folder_name(plan.step, self._writer))
        self._report(event)
        try:
            published = self._write(plan, pieces)
            event = _committed(event, published)
            self._report(event)
            event = _read_back_result(event, self._read_back(published))
            self._problem = StorageFailed(event.detail) if event.detail else None
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the report; a lost peer shows up here too
            event, self._problem = _failed(event, error), error
        self._report(event)
        self._answer(plan.requests, event)
        self._retain()

    def _write(self, plan: SavePlan, pieces: Iterable[HostPiece]) -> Published:
        """Write all pieces and publish the checkpoint (collective).

        Raises:
            StorageFailed: on every rank, when any rank failed; nothing was published.
        """
        room = SaveRoom(self._root.root, plan.tensors)
        staging = Path(self._on_rank_0(lambda: str(self._root.begin(plan.step, self._writer))))
        try:
            lists = self._on_every_rank(lambda: self._write_pieces(staging, pieces, room))
            return Published(**self._on_rank_0(lambda: self._publish(plan, staging, lists, room)))
        except StorageFailed:
            if self._leads:
                _attempt(lambda: self._root.discard(staging))
            raise

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and return its result on every rank (collective).

        Raises StorageFailed everywhere if it failed.
        """
        value, problem = self._group.broadcast(_attempt(action) if self._leads else None)
        if problem is not None:
            raise StorageFailed(problem)
        return value

    def _on_every_rank(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action on every rank and return the results, in rank order, on rank 0 (collective).

        Raises:
            StorageFailed: on every rank, when it failed on any.
        """
        reports = self._group.gather(_attempt(action))
        problem = self._group.broadcast("; ".join(text for _, text in reports if text is not None))
        if problem:
            raise StorageFailed(problem)
        return [value for value, _ in reports]

    def _write_pieces(self, staging: Path, pieces: Iterable[HostPiece], room: SaveRoom) -> list[dict[str, Any]]:
        with room.in_errors(), PieceWriter(staging, f"rank-{self._group.rank:05d}.bin") as writer:
            for piece in pieces:
                writer.add(piece.tensor, piece.box, piece.flat, piece.data)
            return [piece.as_json() for piece in writer.close()]

    def _publish(self, plan: SavePlan, staging: Path, lists: Sequence[Sequence[Any]], room: SaveRoom) -> dict[str, Any]:
        with room.in_errors():
            manifest = Manifest.build(
                step=plan.step,
                writer=self._writer,
                tensors=plan.tensors,
                pieces=[Piece.from_json(item) for items in lists for item in items],
                files=[write_file(staging, name, data) for name, data in self._files.items()],
                meta=plan.meta,
            )
            return vars(self._root.publish(staging, manifest))

    def _read_back(self, published: Published) -> bool:
        """Whether the checkpoint reads back as it was written (collective).

        Each rank reads a share that another rank wrote, where there are several.
        """
        folder, share = self._root.root / published.folder_name, (self._group.rank, self._group.size)
        found = self._group.gather(_attempt(lambda: verify(folder, published.digest, share=share).ok))
        good = bool(self._group.broadcast(all(good is True for good, _ in found)))
        self._verified[published.folder_name] = good
        return good

    def _retain(self) -> None:
        """Delete old verified checkpoints, on rank 0.

        One of an earlier run is verified first. A failure is reported and tried again after the next save.
        """
        if not self._leads or self._keep is None:
            return
        keep = self._keep
        done, problem = _attempt(lambda: self._root.retain(keep, self._is_verified))
        event = RetentionEvent(
            deleted=list(done.deleted if done else ()), problems=[problem] if problem else list(done.problems)
        )
        if event.deleted or event.problems:
            self._channel.send(event)

    def _is_verified(self, name: str) -> bool:
        if name not in self._verified:
            self._verified[name] = verify(self._root.root / name).ok
        return self._verified[name]

    def _answer(self, requests: Sequence[str], event: SaveEvent) -> None:
        good = event.state == "Committed" and event.verified is not False
        for request in requests:
            self._channel.send(
                RequestEvent(
                    id=request,
                    state="Done" if good else "Failed",
                    folder=event.folder if good else "",
                    detail=event.detail,
                )
            )

    def _report(self, event: SaveEvent) -> None:
        if self._leads:
            self._channel.send(event)

    @property
    def _leads(self) -> bool:
        return self._group.rank == 0


def _started(plan: SavePlan, folder: str) -> SaveEvent:
    return SaveEvent(
        id=plan.requests[0] if plan.requests else folder,
        folder=folder,
        step=plan.step,
        tokens=plan.tokens,
        loss=plan.loss,
        state="Saving",
        reason=plan.reason,
        learning_rate=plan.meta.get("learning_rate"),
        elapsed_s=plan.meta.get("elapsed_s"),
        layout=dict(plan.meta["layout"]),
    )


def _committed(event: SaveEvent, published: Published) -> SaveEvent:
    return replace(
        event,
        state="Committed",
        digest=published.digest,
        bytes=published.bytes,
        files=published.files,
        pieces=published.pieces,
    )


def _read_back_result(event: SaveEvent, good: bool) -> SaveEvent:
    detail = "" if good else f"{event.folder} does not read back as it was written"
    return replace(event, verified=good, detail=detail)


def _failed(event: SaveEvent, error: Exception) -> SaveEvent:
    """The event of a failed save. A published checkpoint stays published; the next run can verify it."""
    state: SaveState = "Committed" if event.state == "Committed" else "Failed"
    return replace(event, state=state, detail=str(error) or type(error).__name__)


def _attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of an action, or None and the problem.

    No error leaves it: the other ranks wait for this rank's report.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001  # see the docstring
        return None, f"{type(error).__name__}: {error}"
