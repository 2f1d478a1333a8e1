"""A small set of registered things, so that the command line is tested without engines and tasks."""

from dataclasses import dataclass, field
from enum import Enum

import pytest

from embodied import keys
from embodied.spec import registry
from embodied.spec.errors import BadInput


class Shape(Enum):
    ROUND = 1
    SQUARE = 2


@dataclass
class Reach:
    near: float = 0.1
    far: float = 1.0


@dataclass
class StackOptions:
    part: str = "peg"
    limits: tuple[float, float] = (0.0, 1.0)
    weights: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    shape: Shape = Shape.ROUND
    seen: bool = True
    height: float | None = None
    reach: Reach = field(default_factory=Reach)


class Stack:
    """Put one thing on another."""

    @staticmethod
    def validate(options):
        if options.part not in ("peg", "cube"):
            raise BadInput(f"task.part={options.part}: expected peg or cube")


@dataclass(frozen=True)
class FrontierOptions:
    history: int = 50
    target: float = 0.66


@dataclass
class PlainOptions:
    history: int = 10


@dataclass
class NoOptions:
    pass


@dataclass
class MlpOptions:
    hidden: list[int] = field(default_factory=lambda: [128, 128])

    def __post_init__(self):
        if not self.hidden:
            raise ValueError("hidden needs at least one layer")


@dataclass
class PpoOptions:
    clip: float = 0.2
    num_steps: int = 24
    minibatch_size: int | None = None


class Ppo:
    """Learns."""

    @staticmethod
    def validate(options, num_worlds):
        if options.minibatch_size is not None and options.minibatch_size > options.num_steps * num_worlds:
            raise BadInput(f"algo.minibatch_size={options.minibatch_size}: more than the batch")


class Swim:
    """Go through water."""


SWIM = {"robot": "eel", "sampler": "uniform", "sampler.history": 5, "algo.num_steps": 8, "sim.num_worlds": 64}


def install(patch: pytest.MonkeyPatch, presets) -> None:
    """Replace what is registered, and the presets by those in the folder `presets`, which is filled."""

    def entry(options, build=object, usual=None):
        return registry.Entry(build, options, (build.__doc__ or "").splitlines()[0], usual or {})

    entries = {
        "task": {"stack": entry(StackOptions, Stack), "swim": entry(NoOptions, Swim, SWIM)},
        "robot": {"eel": entry(NoOptions), "franka": entry(NoOptions)},
        "sampler": {"success_guided": entry(FrontierOptions), "uniform": entry(PlainOptions)},
        "policy": {"mlp": entry(MlpOptions)},
        "algo": {"ppo": entry(PpoOptions, Ppo)},
        "engine": {"cpu": entry(NoOptions), "warp": entry(NoOptions)},
    }
    patch.setattr(registry, "_entries", entries)
    patch.setattr(registry, "_loaded", True)
    (presets / "sampler").mkdir()
    (presets / "sampler" / "patient.yaml").write_text("name: success_guided\nhistory: 400\ntarget: 0.9\n")
    patch.setattr(keys, "presets_dir", lambda: presets)
