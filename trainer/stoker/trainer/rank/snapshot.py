"""Snapshots of a rank's state to host memory, and loading of state from a checkpoint of any layout.

`Snapshots` owns the host buffers: the loop makes it, and a save takes the pieces. `load_state` writes the shards of
`zero` when `build` resumes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.checkpoint.dtype import to_float32
from stoker.checkpoint.manifest import TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.model.parameter import Part
from stoker.model.pinned import pinned_memory
from stoker.trainer.errors import OtherModel
from stoker.trainer.rank.bucket_state import BucketState, HeldBucket
from stoker.trainer.rank.communicator import Pending
from stoker.trainer.rank.frozen import FrozenState
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.piece_map import ALL_KINDS, HostPiece, ShardPiece, shard_pieces, state_tensors
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.zero import Zero

READERS = 4
"""Threads that read and verify pieces when a checkpoint is loaded."""


def all_state_tensors(parts: Sequence[Part], mesh: Mesh, group: SaveGroup) -> list[TensorInfo]:
    """All tensors of the state over pipeline stages and expert groups, the same list on every rank (collective)."""
    dims = mesh.dims
    if dims.pipeline == dims.expert == 1:
        return state_tensors(parts)
    # The first expert group of a stage holds all of the stage.
    first_of_replicate = mesh.rank in dims.group_of(mesh.rank, "replicate", "context")[:1]
    lists = first_of_replicate and mesh.rank in dims.group_of(mesh.rank, "shard", "tensor")[: dims.expert]
    mine = state_tensors(parts) if lists else []
    stages = group.gather([[info.name, info.shape, info.dtype] for info in mine])
    merged = group.broadcast({name: [shape, dtype] for stage in stages for name, shape, dtype in stage})
    return [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in merged.items()]


@dataclass(frozen=True)
class Copied:
    """The copy of one bucket's state, in flight."""

    event: torch.cuda.Event
    """Of what was on the device."""
    offloaded: Future[None] | None
    """Of what was in host memory."""

    def synchronize(self) -> None:
        """Block until both have ended."""
        self.event.synchronize()
        if self.offloaded is not None:
            self.offloaded.result()

    def before(self, stream: torch.cuda.Stream) -> None:
        """Let nothing that a stream does from now on change what is copied."""
        stream.wait_event(self.event)
        if self.offloaded is not None:
            self.offloaded.result()


def memory_for(shard: Tensor) -> Tensor:
    """Return host memory of a shard's size; page-locked where a GPU copies to it."""
    return pinned_memory(shard.numel(), shard.dtype) if shard.is_cuda else torch.empty_like(shard)


def _copy_offloaded(state: HeldBucket, shards: Mapping[str, Tensor], host: Mapping[str, Tensor]) -> None:
    if isinstance(state, BucketState):
        state.wait_host()
    for kind, shard in shards.items():
        host[kind].copy_(shard)


class Snapshots:
    """Copies of this rank's shards in host memory, cut by tensor; one at a time.

    On a GPU the memory is page-locked and allocated once. The copy runs beside the next forward and backward, bucket by
    bucket; only the next update waits for it, on the device. State that is in host memory is copied by a thread, for
    which the next update's host waits. On the CPU the copy is made at once. State in a file is kept there for the save,
    which reads it bucket by bucket.
    """

    def __init__(self, zero: Zero, parts: Sequence[Part]) -> None:
        self._zero = zero
        self._pieces = [_pieces_to_save(state, parts) for state in zero.held]
        self._frozen: dict[int, Copied] = {}
        """By number of the bucket, the copies of what never changes: made once."""
        device = zero.held[0].bucket.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._memory: Future[list[dict[str, Tensor]]] | None = None

    def prepare(self) -> None:
        """Start to allocate the memory in a thread, because locking many gigabytes takes seconds.

        Else the first snapshot waits for it.
        """
        if self._stream is not None and self._memory is None and self._zero.settings.disk is None:
            allocator = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
            self._memory = allocator.submit(self._allocate)
            allocator.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether a snapshot can start without waiting for memory."""
        return (
            self._stream is None
            or self._zero.settings.disk is not None
            or (self._memory is not None and self._memory.done())
        )

    def take(self) -> Iterator[HostPiece]:
        """The state as it is now.

        The pieces can be iterated in another thread, as their copies end; they are valid until the next `take`.
        """
        states = self._zero.held
        if self._zero.settings.disk is not None:
            return self._cut([_held_on_disk(state) for state in states], [None] * len(states))
        if self._stream is None:
            return self._cut([_copy_on_host(state) for state in states], [None] * len(states))
        self.prepare()
        assert self._memory is not None
        memory = self._memory.result()
        copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        copied = [self._copied(number, memory[number], copier) for number in range(len(states))]
        copier.shutdown(wait=False)
        return self._cut(memory, copied)

    def _allocate(self) -> list[dict[str, Tensor]]:
        states = self._zero.held
        with torch.cuda.device(states[0].bucket.device):
            return [{kind: memory_for(shard) for kind, shard in state.shards().items()} for state in states]

    def _copied(self, number: int, host: dict[str, Tensor], copier: Executor) -> Copied:
        """Start the copy of one bucket, or return the one that was made before where nothing can have changed."""
        state = self._zero.held[number]
        if not isinstance(state, FrozenState):
            return self._copy(state, host, copier)
        if number not in self._frozen:
            self._frozen[number] = self._copy(state, host, copier)
        return self._frozen[number]

    def _copy(self, state: HeldBucket, host: dict[str, Tensor], copier: Executor) -> Copied:
        stream, device = self._stream, state.bucket.device
        assert stream is not None
        if isinstance(state, BucketState):
            state.wait_update()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            shards = state.shards()
            for kind, shard in shards.items():
                if shard.is_cuda:
                    host[kind].copy_(shard.detach(), non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        offloaded = {kind: shard for kind, shard in shards.items() if not shard.is_cuda}
        copied = Copied(event, copier.submit(_copy_offloaded, state, offloaded, host) if offloaded else None)
        state.hold(Pending(lambda: copied.before(torch.cuda.current_stream(device))))
        return copied

    def _cut(
        self, host: Sequence[dict[str, Tensor] | Callable[[], dict[str, Tensor]]], copied: Sequence[Copied | None]
    ) -> Iterator[HostPiece]:
        for held, event, items in zip(host, copied, self._pieces, strict=True):
            if event is not None:
                event.synchronize()
            shards = held() if callable(held) else held  # of a file: one bucket at a time
            for item in items:
                for kind, values in shards.items():
                    dtype = str(values.dtype).removeprefix("torch.")
                    tensor = TensorInfo(f"{kind}.{item.name}", item.shape, dtype)
                    yield HostPiece(tensor, item.box, item.flat, _bits(values[item.start : item.end]))


def _held_on_disk(state: HeldBucket) -> Callable[[], dict[str, Tensor]]:
    """A way to read a bucket's state as it is now, while further steps change it."""
    if isinstance(state, BucketState):
        return state.hold_state()
    frozen = {kind: shard.detach().cpu() for kind, shard in state.shards().items()}
    return lambda: frozen


def _copy_on_host(state: HeldBucket) -> dict[str, Tensor]:
    """What a save reads beside the next steps: copies, but of frozen weights the memory itself."""
    shards = state.shards()
    if isinstance(state, FrozenState):
        return shards
    return {kind: shard.detach().clone() for kind, shard in shards.items()}


def _bits(values: Tensor) -> NDArray[Any]:
    """The elements as numpy has them: bfloat16 as integers of the same bits."""
    found: NDArray[Any] = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()
    return found


def _pieces_to_save(state: HeldBucket, parts: Sequence[Part]) -> list[ShardPiece]:
    communicator = state.communicator
    saved = [part for part in parts if not part.is_copy]
    return shard_pieces(
        state.bucket, communicator.rank, saved, replica=communicator.replica, replicas=communicator.replicas
    )


def load_state(
    zero: Zero,
    parts: Sequence[Part],
    tensors: Sequence[TensorInfo],
    reader: CheckpointReader,
    report: Callable[[str], None],
) -> None:
    """Load the state from a checkpoint: each rank its shards, then all parameters (collective).

    `parts` are this rank's, `tensors` the state of the whole model.

    Raises:
        OtherModel: the checkpoint is of another model; nothing was changed.
        CheckpointCorrupt: a piece is damaged.
    """
    check_same_model(reader, tensors)
    done = 0

    def read(wanted: tuple[str, ShardPiece]) -> Tensor:
        kind, item = wanted
        name = f"{kind}.{item.name}"
        return torch.from_numpy(to_float32(reader.read(name, item.box, item.flat), reader.tensor(name).dtype))

    def fill(state: HeldBucket, shards: dict[str, Tensor]) -> None:
        nonlocal done
        pieces = shard_pieces(state.bucket, state.communicator.rank, parts)
        wanted = [(kind, item) for item in pieces for kind in state.kinds]
        for (kind, item), values in zip(wanted, readers.map(read, wanted), strict=True):
            shards[kind][item.start : item.end].copy_(values)
        done += 1
        report(f"LoadingCheckpoint {100 * done // len(zero.held)} %")

    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="load") as readers:
        zero.set_shards(fill)


def check_same_model(reader: CheckpointReader, tensors: Sequence[TensorInfo]) -> None:
    """Raise OtherModel for a checkpoint whose tensors are not those of this model and its adapters."""
    wanted = {info.name: info.shape for info in tensors}
    have = {name: info.shape for name, info in reader.manifest.tensors.items()}
    problems = [
        f"{name} {shape} is {have.get(name, 'missing')}" for name, shape in wanted.items() if have.get(name) != shape
    ]
    kinds = tuple(f"{kind}." for kind in ALL_KINDS)
    surplus = [name for name in have if name.startswith(kinds) and name not in wanted]
    problems += [f"{name} {have[name]} is not in the model" for name in surplus]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise OtherModel(f"{reader.folder} is a checkpoint of another model: {'; '.join(problems[:3])}{more}")


def check_same_adapters(reader: CheckpointReader, adapter: Mapping[str, Any] | None) -> None:
    """Raise OtherModel for a checkpoint whose adapters mean something else: another rank, scale or other targets."""
    found = reader.manifest.meta.get("adapter")
    if found != adapter:
        raise OtherModel(f"{reader.folder} has lora {found or 'not set'}, the run has {adapter or 'none'}")
