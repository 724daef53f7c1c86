"""The pinned rendering of a TrainingJob, which every attempt reuses until the user changes the intent. Pure.

The trainer's image is pinned by the digest that pod 0's node reports, so a tag that moves changes no restarted attempt.
Where no digest is known (an image that was loaded by hand, the embedded cluster) the image stays as it is written.

Called by `start` and `status`; the pinned form is kept in the status.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from stoker.operator.api.trainingjob_status import Pinned
from stoker.operator.domain.image import pulled_digest
from stoker.operator.domain.pods import MAIN, image_id
from stoker.operator.reconcile.trainingjob.pending_edit import pending_edit, spec_of_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.trainer import StartCheckpoint, intent_of, pin

TRAINER = "trainer"
"""Key of `pinned.images`."""


class PinnedChanges(TypedDict, total=False):
    """Fields of the pinned rendering that change after it was made."""

    images: dict[str, str]
    rendered: dict[str, Any] | None
    spec: dict[str, Any] | None


def pinned_for_next_attempt(view: TrainingView, start: StartCheckpoint | None) -> Pinned:
    """The pinned rendering with the image by digest; a new rendering where the user changed the intent."""
    pinned = view.job.status.pinned
    if pinned is not None and view.intent.never_accepted:
        return _with_pinned_image(pinned)
    if pinned is not None and _is_unedited(view, pinned):  # placement is not rendered: its edit is in the spec alone
        return _changed(_with_pinned_image(pinned), spec=dict(view.intent.spec))
    return pin(view.job, start, view.settings, view.intent.spec)


def _is_unedited(view: TrainingView, pinned: Pinned) -> bool:
    """Whether the rendering is of the present intent, whatever defaults the version had that made it."""
    if pinned.intent == intent_of(view.job.spec):
        return True
    return pinned.spec is not None and not pending_edit(view, pinned)


def pinned_by_now(view: TrainingView) -> Pinned | None:
    """The pinned rendering of the running attempt, with the digest that pod 0 runs and the topology that places it."""
    pinned = _with_pulled_image(view)
    spec = None if pinned is None or pinned.spec is None else spec_of_attempt(view, pinned.spec)
    return pinned if pinned is None or spec == pinned.spec else _changed(pinned, spec=spec)


def _with_pulled_image(view: TrainingView) -> Pinned | None:
    pinned, leader = view.job.status.pinned, view.leader
    image = pinned.images.get(TRAINER) if pinned is not None else None
    digest = pulled_digest(image, image_id(leader)) if image and leader is not None else None
    if pinned is None or digest is None or "@" in (image or ""):
        return pinned
    return _changed(pinned, images={**pinned.images, TRAINER: digest})


def _with_pinned_image(pinned: Pinned) -> Pinned:
    """The rendering whose main container runs the pinned image."""
    image, rendered = pinned.images.get(TRAINER), pinned.rendered
    if image is None or rendered is None:
        return pinned
    spec = rendered["pod"]["spec"]
    containers = [{**found, "image": image} if found["name"] == MAIN else found for found in spec["containers"]]
    pod = {**rendered["pod"], "spec": {**spec, "containers": containers}}
    return _changed(pinned, rendered={**rendered, "pod": pod})


def _changed(pinned: Pinned, **changes: Unpack[PinnedChanges]) -> Pinned:
    return pinned.model_copy(update={**changes})
