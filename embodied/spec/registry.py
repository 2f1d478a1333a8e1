"""Names for tasks, robots, samplers, learners and policies.

A class declares its options as a dataclass in its own file and registers both under a name:

    @register("sampler", "uniform", UniformOptions)
    class Uniform: ...

A plug-in does the same in its own distribution and names its module in the entry-point group `embodied.plugins`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from embodied.spec.errors import BadInput, nearest

GROUPS = ("task", "robot", "sampler", "algo", "policy", "engine")

BUILTIN_MODULES = (
    "embodied.sim.engines.cpu",
    "embodied.sim.engines.warp",
    "embodied.sim.robots.crazyflie",
    "embodied.sim.robots.franka",
    "embodied.sim.robots.go1",
    "embodied.sim.robots.ur5e",
    "embodied.sim.samplers.linear",
    "embodied.sim.samplers.plr",
    "embodied.sim.samplers.sfl",
    "embodied.sim.samplers.success_guided",
    "embodied.sim.samplers.uniform",
    "embodied.sim.tasks.assembly",
    "embodied.sim.tasks.flight",
    "embodied.sim.tasks.locomotion",
    "embodied.sim.tasks.traverse",
    "embodied.policies.diffusion",
    "embodied.policies.flow",
    "embodied.policies.gaussian",
    "embodied.algos.ppo",
    "embodied.algos.grpo",
    "embodied.algos.hiors",
    "embodied.algos.sft",
)

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """What is registered under a name: how to build it, its options dataclass, one line about it, and, of a task, what a run
    of it takes where the user says nothing: choices and options by key (`robot`, `algo.num_steps`).
    """

    build: Callable[..., Any]
    options: type
    summary: str
    usual: Mapping[str, Any]


_entries: dict[str, dict[str, Entry]] = {group: {} for group in GROUPS}
_loaded = False


def register(group: str, name: str, options: type, usual: Mapping[str, Any] | None = None) -> Callable[[T], T]:
    """Register the decorated class or function as `name` in `group`; `options` is its dataclass of options; see `Entry`."""

    def decorate(build: T) -> T:
        if name in _entries[group]:
            raise ValueError(f"{group} '{name}' is registered twice")
        lines = (build.__doc__ or "").strip().splitlines()
        _entries[group][name] = Entry(build, options, lines[0] if lines else "", usual or {})
        return build

    return decorate


def load() -> None:
    """Import every built-in module and every plug-in; a broken plug-in warns and is left out."""
    global _loaded
    if _loaded:
        return
    for module in BUILTIN_MODULES:
        importlib.import_module(module)
    for point in entry_points(group="embodied.plugins"):
        try:
            point.load()
        except Exception as error:  # a plug-in is foreign code: whatever it raises must not stop the others
            warnings.warn(f"plug-in '{point.name}' is left out: {type(error).__name__}: {error}", stacklevel=2)
    _loaded = True


def names(group: str) -> list[str]:
    """The names registered in `group`, sorted."""
    load()
    return sorted(_entries[group])


def find(group: str, name: str) -> Entry:
    """The entry `name` of `group`.

    Raises:
        BadInput: no such name; the nearest one is named.
    """
    load()
    try:
        return _entries[group][name]
    except KeyError:
        raise BadInput(f"unknown {group} '{name}': {nearest(name, _entries[group])}") from None
