"""The random numbers that computing draws: those of the CPU, and those of a device that has a generator of its own.

Scope: reading, setting and replaying their states, what a commit holds of them.
Not here: who draws (`stream.py`), first weights, which do not depend on them (`model.py`), the order of the data
(`megatrain/data/order.py`).

torch keeps the state of a device's generator on the host: nothing here waits for the device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tiering.store import JSON

States = tuple[torch.Tensor, ...]
"""The state of the CPU's generator, then that of the device's, where it has one."""

_CPU, _DEVICE = "rng", "device_rng"
"""Their keys in a commit."""


def rng_states(device: torch.device) -> States:
    """The states as they are now."""
    if not _has_own(device):
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def set_rng_states(states: States, device: torch.device) -> None:
    """Go on from `states`, which were those of the same kind of device."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def replayed(states: States | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those that followed `states`; outside, as if nothing had been drawn. None: nothing
    is drawn inside.
    """
    if states is None:
        yield
        return
    with unmoved(device):
        set_rng_states(states, device)
        yield


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers are as if nothing had been drawn inside."""
    now = rng_states(device)
    try:
        yield
    finally:
        set_rng_states(now, device)


def first_rng(seed: int, device: torch.device) -> dict[str, JSON]:
    """What the commit of step 0 holds: the states of generators that were seeded with `seed`."""
    states = [torch.Generator().manual_seed(seed).get_state()]
    if _has_own(device):
        states.append(torch.Generator(device=device).manual_seed(seed).get_state())
    return _named(states)


def rng_now(device: torch.device) -> dict[str, JSON]:
    """What a commit holds of the states as they are now."""
    return _named(rng_states(device))


def set_rng(run: Mapping[str, JSON], seed: int, device: torch.device) -> None:
    """Go on from what a commit holds. A device whose numbers it does not hold, because the run was on another one,
    begins with those of `seed`.
    """
    held = {**first_rng(seed, device), **{key: text for key, text in run.items() if key in (_CPU, _DEVICE)}}
    states = [_state(held[key]) for key in (_CPU, _DEVICE) if key in held]
    set_rng_states(tuple(states) if _has_own(device) else tuple(states[:1]), device)


def drew_on_device(run: Mapping[str, JSON]) -> bool:
    """Was the run on a device with a generator of its own when it made this commit?"""
    return _DEVICE in run


def _named(states: "States | list[torch.Tensor]") -> dict[str, JSON]:
    return {key: bytes(state.tolist()).hex() for key, state in zip((_CPU, _DEVICE), states, strict=False)}


def _state(text: JSON) -> torch.Tensor:
    assert isinstance(text, str), "a commit holds the state of the random generator"
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _has_own(device: torch.device) -> bool:
    return device.type != "cpu"
