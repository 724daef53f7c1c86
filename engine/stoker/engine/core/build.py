"""Construction of an engine from its configuration, and of the model's facts that fronts need.

Called once, at the start of a core (`core`) or of an offline engine (`llm`). Keeps no state: the result is owned by the
caller.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stoker.engine.config import CacheEventsConfig, EngineConfig, StoreConfig
from stoker.engine.core.block_identity import BlockIdentity, shared_weights_digest, stored_identity
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.cache_event_publisher import CacheEventPublisher
from stoker.engine.core.cache_events import CacheEventLog
from stoker.engine.core.disk.block_files import BlockFiles
from stoker.engine.core.disk.cold_traffic import WaitForAny, wait_for_any
from stoker.engine.core.disk.open_tiers import open_cold_traffic, store_name
from stoker.engine.core.disk.rank_files import rank_files, wait_for_report
from stoker.engine.core.disk.slot_files import SlotFiles
from stoker.engine.core.disk.store_tier import StoreTier
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.fetched_model import with_fetched_model
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.host_tier import HostTier
from stoker.engine.core.kernel_warmup import warm_up_beside_weights
from stoker.engine.core.rank_mover import RankMover
from stoker.engine.core.rank_tier_link import RankTierLink
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_budget import StepBudget
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.core.stored_beginnings import StoredBeginnings
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.core.timeline import FileTimeline
from stoker.engine.execution.executor import Executor, InProcess, OnDevice
from stoker.engine.execution.host_link import host_link
from stoker.engine.execution.load import Progress, load_runner
from stoker.engine.execution.pass_shape import TOKENS
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import Opening, StepInput, TableEntry
from stoker.engine.plan import EnginePlan, plan_engine
from stoker.engine.ranks.data_executor import DataRank
from stoker.engine.ranks.data_meeting import meet
from stoker.engine.ranks.data_place import DataPlace, find_data_place
from stoker.engine.ranks.executor import Ranks
from stoker.engine.ranks.pod_place import find_place
from stoker.engine.ranks.workers import Workers
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.fingerprint import root_digest
from stoker.engine.transfer.port import ReadableLink
from stoker.model.tokenizer_limits import panics_named
from stoker.model.weights.source import WeightsSource, open_weights

log = logging.getLogger("stoker.engine")

StartWorkers = Callable[[int, str], Workers]
"""(ranks, device) -> the further ranks, without a model yet."""


def build_engine(
    config: EngineConfig,
    progress: Progress = lambda _: None,
    start: StartWorkers = Workers,
    data: DataPlace | None = None,
) -> tuple[LLMEngine, EnginePlan]:
    """Load the model and make everything ready. `start` starts the further ranks, if there are some; `data` is the
    place among the ranks that share experts.

    Raises:
        ConfigError: a field cannot be used, with what is allowed.
        ValueError: the weights cannot be loaded (WeightsError, CheckpointError).
        ExecutorLost: a further rank cannot start.
        OSError: a model cannot be fetched.
    """
    config, source_digest = with_fetched_model(config, progress)
    source = open_weights(config.model.path, config.model.digest)
    plan = replace(plan_engine(config, source), source_digest=source_digest)
    limits = ModelLimits(source.config.vocab_size, plan.max_model_len, end_tokens(source))
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside_weights:
        reading = beside_weights.submit(grammar_compiler, source, limits)
        executor, plan = make_executor(config, source, plan, progress, start, data)
        limits = replace(limits, max_model_len=plan.max_model_len)
    try:
        return assemble(config, plan, executor, limits, reading.result()), plan
    except BaseException:
        executor.close()
        raise


def assemble(
    config: EngineConfig, plan: EnginePlan, executor: Executor, limits: ModelLimits, grammars: GrammarCompiler | None
) -> LLMEngine:
    """Make the engine over loaded ranks. Raises ConfigError."""
    identity = kept_identity(config, plan, executor)
    keeps_digests = plan.num_host_blocks or config.cache_events is not None
    root = (identity.root if identity is not None else root_digest(b"host tier")) if keeps_digests else None
    blocks = BlockManager(plan.num_blocks, plan.block_size, config.cache.prefix_cache, root)
    flight = StepFlight(plan.pipeline, overlap=plan.overlap)
    scheduler = Scheduler(
        blocks,
        max_batch_tokens=plan.max_batch_tokens,
        max_requests=plan.num_seats,
        max_queued_requests=config.scheduler.max_queued_requests,
        chunk_tokens=flight.chunk_tokens(config.scheduler.chunk_tokens),
        aging_s=config.scheduler.aging_s,
        budget=StepBudget(plan.max_batch_tokens, plan.mixed_tokens, TOKENS),
        tier=make_tier(config, plan, blocks, executor, identity),
        flight=flight,
    )
    engine = LLMEngine(
        executor,
        scheduler,
        limits,
        overlap=plan.overlap,
        grammars=grammars,
        num_devices=plan.ranks if plan.device == "cuda" else 1,
    )
    if config.cache.store is not None and identity is not None and scheduler.tier is not None:
        engine.beginnings = tell_stored(config.cache.store, identity, blocks, scheduler.tier)
    engine.shared_steps = executor if isinstance(executor, DataRank) else None
    engine.hosted_experts = leading_runner(executor).hosted
    if config.cache_events is not None:
        engine.cache_events = publish_cache(config.cache_events, blocks, plan.device)
    if config.timeline is not None:
        engine.timeline = FileTimeline(Path(config.timeline))
    return engine


def publish_cache(config: CacheEventsConfig, blocks: BlockManager, device: str) -> CacheEventPublisher:
    """Tell subscribers what the prefix cache holds from now on. Raises ConfigError."""
    assert blocks.root is not None
    blocks.log = log = CacheEventLog(blocks.block_size, blocks.root)
    publisher = CacheEventPublisher(config, log, medium="GPU" if device == "cuda" else "CPU")
    publisher.publish()
    return publisher


def tell_stored(store: StoreConfig, identity: BlockIdentity, blocks: BlockManager, tier: HostTier) -> StoredBeginnings:
    """Tell routers which beginnings are in the store."""
    below = tier.cold.find("store") if tier.cold is not None else None
    assert isinstance(below, StoreTier), "it is configured"
    return StoredBeginnings(store_name(store, identity), blocks, below, tier.costs, tier.block_bytes)


def build_in_pod(
    environment: Mapping[str, str], config: EngineConfig, progress: Progress
) -> tuple[LLMEngine, EnginePlan]:
    """As `build_engine`, where the ranks of a replica of several pods come from the other pods."""
    start = partial(Workers, place=find_place(config, environment))
    return build_engine(config, progress, start, find_data_place(config, environment))


def grammar_compiler(source: WeightsSource, limits: ModelLimits) -> GrammarCompiler | None:
    """The compiler of output grammars; None for a model whose tokenizer it cannot use."""
    tokenizer = source.tokenizer_files.get("tokenizer.json")
    if tokenizer is None:
        return None
    try:
        with panics_named():
            return GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
    except ValueError as error:
        log.warning("structured output is not possible with this tokenizer: %s", error)
        return None


def make_executor(
    config: EngineConfig, source: WeightsSource, plan: EnginePlan, progress: Progress, start: StartWorkers,
    data: DataPlace | None = None,
) -> tuple[Executor, EnginePlan]:  # fmt: skip
    """Load the model on one rank in this process, or on several. Return the plan with the memory of all ranks.

    `plan`: as far as this process can plan alone, so that nothing is started that will be refused.
    """
    if plan.ranks > 1:
        return start_ranks(config, source, plan, progress, start)
    if plan.data > 1:
        assert data is not None, "given by the program"
        progress("StartingRanks")
        return DataRank(plan, meet(data), progress, warm_up_beside_weights), plan
    runner = load_runner(plan, None, progress, warm_up_beside_weights)
    return (OnDevice(runner) if plan.device == "cuda" else InProcess(runner)), plan


def start_ranks(
    config: EngineConfig, source: WeightsSource, plan: EnginePlan, progress: Progress, start: StartWorkers
) -> tuple[Ranks, EnginePlan]:
    """Start the further ranks, plan again with their memory, and load all."""
    progress("StartingRanks")
    workers = start(plan.ranks, plan.device)

    def waiting(pods: tuple[int, ...]) -> None:
        progress(f"StartingRanks waiting for pods {', '.join(map(str, pods))}" if pods else "StartingRanks")

    try:
        free_bytes = workers.smallest_free_bytes(waiting)
        plan = replace(plan_engine(config, source, free_bytes), source_digest=plan.source_digest)
        return Ranks(plan, workers, progress, warm_up_beside_weights, make_mover=RankMover), plan
    except BaseException:
        workers.close()
        raise


def kept_identity(config: EngineConfig, plan: EnginePlan, executor: Executor) -> BlockIdentity | None:
    """What blocks in files are; None where there are none. Raises ConfigError."""
    if config.cache.disk is None and config.cache.store is None:
        return None
    weights = shared_weights_digest(plan, executor, "cache.disk" if config.cache.disk is not None else "cache.store")
    return stored_identity(config, plan, leading_runner(executor), weights)


def make_tier(
    config: EngineConfig, plan: EnginePlan, blocks: BlockManager, executor: Executor, identity: BlockIdentity | None
) -> HostTier | None:
    """The host tier of an engine, if it has one, over the tiers below it. Raises ConfigError."""
    if not plan.num_host_blocks:
        return None
    costs, index, clock = TierCosts(plan.preemption), HostIndex(plan.num_host_blocks), time.monotonic
    slots, cold = open_slots(plan, executor), None
    if identity is not None:
        cold = open_cold_traffic(config, identity, index, slots.carrier(identity), costs, clock, slots.wait)
    return HostTier(blocks, index, slots.link, costs, slots.block_bytes, clock, cold)


class Slots(NamedTuple):
    """The slots of the host tier."""

    link: ReadableLink
    block_bytes: int
    """Of a block over all ranks."""
    carrier: Callable[[BlockIdentity], Callable[[], BlockFiles]]
    """Makes what makes a carrier to and from files, one for each volume."""
    wait: WaitForAny = wait_for_any
    """For what carriers do."""


def open_slots(plan: EnginePlan, executor: Executor) -> Slots:
    """Make the slots, on one rank or on several. Raises ConfigError: a rank has no room."""
    if isinstance(executor, Ranks):
        calls, joint = executor.calls, RankTierLink(executor.calls, plan.num_host_blocks)
        carrier = partial(rank_files, calls, joint.layouts)
        return Slots(joint, joint.block_bytes, carrier, partial(wait_for_report, calls))
    cache = runner_of(executor).cache
    link = host_link(cache, plan.num_host_blocks, fused=plan.kernels == "fused")
    return Slots(link, cache.data[0].nbytes, lambda identity: partial(SlotFiles, identity, link.memory))


def runner_of(executor: Executor) -> Runner:
    """The runner of an engine with one rank."""
    assert isinstance(executor, InProcess | OnDevice | DataRank), "one rank"
    assert isinstance(executor.runner, Runner), "the engine's own"
    return executor.runner


def leading_runner(executor: Executor) -> Runner:
    """The runner of rank 0."""
    return executor.runner if isinstance(executor, Ranks) else runner_of(executor)


def warm_up(executor: Executor) -> None:
    """Warm up with one token, so that the first request finds libraries loaded and buffers made.

    It writes only into a free block and an empty seat.
    """
    greedy = SamplingParams(temperature=0, seed=0)
    step = StepInput(
        number=-1,
        openings=(Opening(seat=0, tokens=(0,), num_prompt=1, choice=0, stop_tokens=(), params=greedy),),
        table=(TableEntry(seat=0, column=0, block=0),),
        cleared=(),
        copies=(),
        seats=(0,),
        starts=(0,),
        lengths=(1,),
        scored=(0,),
        sample_chunks=(0,),
        sample_seats=(0,),
    )
    executor.submit(step).result()


def tokenizer_folder(plan: EnginePlan, work_dir: Path) -> Path:
    """Folder of the tokenizer's files: the model's own, or one made from a GGUF file."""
    path = Path(plan.model_path)
    if path.is_dir():
        return path
    folder = work_dir / "tokenizer"
    folder.mkdir(exist_ok=True)
    for name, content in open_weights(path).tokenizer_files.items():
        (folder / name).write_bytes(content)
    return folder


def end_tokens(source: WeightsSource) -> tuple[int, ...]:
    """Tokens that end an answer, from config.json and generation_config.json."""
    listed = json.loads(source.tokenizer_files.get("generation_config.json", b"{}")).get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    ids = (*source.config.eos_token_ids, *(token for token in more if isinstance(token, int)))
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < source.config.vocab_size))
