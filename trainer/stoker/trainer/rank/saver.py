"""Saves while training goes on: every rank writes its own pieces in a thread, rank 0 commits and reports, and all read back.

A save has one snapshot in host memory; the training may change its tensors as soon as `start` returns. One save is in flight at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.checkpoint.manifest import Box, Manifest, Piece, TensorInfo, folder_name
from stoker.checkpoint.store import CheckpointRoot, Published
from stoker.checkpoint.verify import verify
from stoker.checkpoint.writer import PieceWriter, write_file
from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.channel import RankChannel, RequestEvent, RetentionEvent, SaveEvent, SaveReason, SaveState
from stoker.trainer.rank.save_group import SaveGroup


@dataclass(frozen=True)
class HostPiece:
    """One part of a tensor in host memory, owned by the save."""

    tensor: TensorInfo
    box: Box
    flat: tuple[int, int]
    data: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """What the ranks agree to save."""

    step: int
    tokens: int
    loss: float | None
    reason: SaveReason
    requests: tuple[str, ...] = ()
    """Ids of the commands that it answers (rank 0 knows them)."""
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
        """`files` travel along in every checkpoint; `keep`: retain that many verified ones (None deletes nothing); `verified` are known good."""
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
        """Wait for the save before it, `take` the pieces, and begin to write them as they come."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(plan, take()), name=f"save-{plan.step}")
        self._thread.start()

    def wait(self) -> Exception | None:
        """Until the save in flight has been read back; what went wrong with the last one: StorageFailed, or the error of a lost peer."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._problem

    def _run(self, plan: SavePlan, pieces: Iterable[HostPiece]) -> None:
        event = _begun(plan, folder_name(plan.step, self._writer))
        self._tell(event)
        try:
            published = self._write(plan, pieces)
            event = _committed(event, published)
            self._tell(event)
            event = _read(event, self._read_back(published))
            self._problem = StorageFailed(event.detail) if event.detail else None
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the report; a lost peer shows up here too
            event, self._problem = _broken_off(event, error), error
        self._tell(event)
        self._answer(plan.requests, event)
        self._retain()

    def _write(self, plan: SavePlan, pieces: Iterable[HostPiece]) -> Published:
        """Every rank writes, rank 0 publishes; raises StorageFailed on every rank when any rank failed."""
        staging, problem = self._group.broadcast(
            _attempt(lambda: str(self._root.begin(plan.step, self._writer)), self._leads)
        )
        if problem is None:
            written = _attempt(lambda: self._write_pieces(Path(staging), pieces), True)
            reports = self._group.gather(written)
            problems = [text for _, text in reports if text is not None]
            lists = [list_ for list_, _ in reports]
            publish = _attempt(lambda: self._publish(plan, Path(staging), lists), self._leads and not problems)
            published, problem = self._group.broadcast((publish[0], "; ".join(problems) or publish[1]))
        if problem is not None:
            if self._leads and staging is not None:
                _attempt(lambda: self._root.discard(Path(staging)), True)
            raise StorageFailed(problem)
        return Published(**published)

    def _write_pieces(self, staging: Path, pieces: Iterable[HostPiece]) -> list[dict[str, Any]]:
        with PieceWriter(staging, f"rank-{self._group.rank:05d}.bin") as writer:
            for piece in pieces:
                writer.add(piece.tensor, piece.box, piece.flat, piece.data)
            return [piece.as_json() for piece in writer.close()]

    def _publish(self, plan: SavePlan, staging: Path, lists: Sequence[Sequence[Any]]) -> dict[str, Any]:
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
        """Every rank reads a share of all that was written, another one's where there are several; all learn what was found."""
        folder, share = self._root.root / published.folder_name, (self._group.rank, self._group.size)
        found = self._group.gather(_attempt(lambda: verify(folder, published.digest, share=share).ok, True))
        good = bool(self._group.broadcast(all(good is True for good, _ in found)))
        self._verified[published.folder_name] = good
        return good

    def _retain(self) -> None:
        """Rank 0 deletes old verified checkpoints; one of an earlier run is read once to know. What it cannot delete costs no step, and is told."""
        if not self._leads or self._keep is None:
            return
        keep = self._keep
        done, problem = _attempt(lambda: self._root.retain(keep, self._is_verified), True)
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

    def _tell(self, event: SaveEvent) -> None:
        if self._leads:
            self._channel.send(event)

    @property
    def _leads(self) -> bool:
        return self._group.rank == 0


def _begun(plan: SavePlan, folder: str) -> SaveEvent:
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


def _read(event: SaveEvent, good: bool) -> SaveEvent:
    detail = "" if good else f"{event.folder} does not read back as it was written"
    return replace(event, verified=good, detail=detail)


def _broken_off(event: SaveEvent, error: Exception) -> SaveEvent:
    """What was published stays: whoever comes next can read it back."""
    state: SaveState = "Committed" if event.state == "Committed" else "Failed"
    return replace(event, state=state, detail=str(error) or type(error).__name__)


def _attempt(action: Callable[[], Any], wanted: bool) -> tuple[Any, str | None]:
    """Value and problem of an action; `(None, None)` when it is not wanted on this rank. No error leaves here: the other ranks wait for the report."""
    if not wanted:
        return None, None
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001  # see above
        return None, f"{type(error).__name__}: {error}"
