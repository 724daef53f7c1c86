"""The parts of an engine's HTTP side, built from its configuration: the same in one process as in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.routing import BaseRoute

from stoker.checkpoint.remote.model_uri import model_name
from stoker.engine.config import EngineConfig, EngineIdentity
from stoker.engine.core.core_client import CoreClient
from stoker.engine.core.core_group import CoreGroup, Cores
from stoker.engine.core.core_watch import WatchLimits
from stoker.engine.http.api_keys import load_api_keys
from stoker.engine.http.front import Front
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.openai.parser_choice import ParserChoice
from stoker.engine.http.server import OpenAiServer
from stoker.engine.http.text import TextCodec
from stoker.pod.installed_version import installed_version
from stoker.pod.tracing import Tracer


def joined(addresses: Sequence[str], watch: WatchLimits, identity: bytes = b"") -> Cores:
    """The link to one core, or to several that answer as one."""
    links = [CoreClient(address, watch, identity=identity) for address in addresses]
    return links[0] if len(links) == 1 else CoreGroup(links)


def links_of(core: Cores) -> tuple[CoreClient, ...]:
    """The link to each core."""
    return core.cores if isinstance(core, CoreGroup) else (core,)


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """Names in `/v1/models`."""
    return config.model.names or (model_name(config.model.path),)


def front_of(
    config: EngineConfig,
    core: Cores,
    metrics: FrontMetrics,
    open_codec: Callable[[Path], TextCodec],
    tracer: Tracer,
) -> Front:
    """A front of the configured model."""
    front = Front(
        core,
        served_names(config),
        metrics,
        open_codec,
        parsers=ParserChoice(config.api.tool_call_parser, config.api.reasoning_parser),
        managed=managed_by(config.identity),
        role=config.role,
    )
    front.tracer = tracer
    return front


def app_of(config: EngineConfig, front: Front, own: list[BaseRoute], pod_uid: str) -> OpenAiServer:
    """The HTTP application around a front. A front's share of the bodies in flight is the same for each."""
    return OpenAiServer(
        front,
        own,
        api_keys=load_api_keys(config.api.api_key_file),
        max_body_bytes=config.api.max_body_bytes,
        max_body_bytes_in_flight=config.listen.limits.max_body_bytes_in_flight // config.api.fronts,
        allowed_origins=config.api.allowed_origins,
        pod_uid=pod_uid,
        version=installed_version(),
        load_reports=front.load_reports,
        num_ranks=front.core.num_ranks,
        comment_interval_s=config.listen.limits.comment_interval_s,
    )


def managed_by(identity: EngineIdentity) -> str:
    """Why clients may not load or unload models here."""
    if identity.deployment:
        return f"the InferenceDeployment {identity.namespace}/{identity.deployment} chooses the model of this engine"
    return "this engine serves one model; start it with --models-dir to load others"
