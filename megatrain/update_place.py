"""Where a run's updates are made, host or device, from one process to the next: the kernels of the two round otherwise.

Scope: the refusal of a place that cannot be, what a commit says of it, going on where a state was updated before.
Not here: which of the two is faster (`training_plan.py`), the kernel (`optim.py`).
"""

from collections.abc import Mapping

from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.training_plan import UpdateOn
from tiering.hardware import Hardware
from tiering.store import JSON

_KEY = "updates_on"


def refuse_place(run: RunConfig, *, has_device: bool) -> None:
    """Raises UserError for updates on a device where there is none."""
    if run.train.update_on == "device" and not has_device:
        raise UserError(
            "train.update_on: device: the CPU computes this run, there is no device to update on. Fix: "
            "train.update_on: auto, or device: cuda on a machine with a GPU"
        )


def place_of_updates(run: RunConfig, hardware: Hardware, before: Mapping[str, JSON]) -> UpdateOn:
    """`train.update_on`, where `auto` keeps to the place that a commit names. before: what that says; empty for a new
    state. Raises UserError where it has to be the device and nobody knows how fast that is.
    """
    asked, held = run.train.update_on, before.get(_KEY)
    place: UpdateOn = asked
    if asked == "auto" and held in ("host", "device") and hardware.h2d is not None:
        place = "device" if held == "device" else "host"
    if place == "device" and hardware.device_update is None:
        raise UserError(
            f"train.update_on: {asked}: updates are to be made on the device, and {run.tiers.hardware} does not say "
            "how fast it makes them. Fix: measure again (megatrain measure), or leave tiers.hardware out"
        )
    return place


def kept_place(*, on_device: bool, there: bool) -> dict[str, JSON]:
    """What a commit says; nothing for a run without a device, which has no choice."""
    return {_KEY: "device" if there else "host"} if on_device else {}


def has_moved(before: Mapping[str, JSON], *, there: bool) -> bool:
    """True where a state goes on with updates in another place."""
    return _KEY in before and before[_KEY] != ("device" if there else "host")
