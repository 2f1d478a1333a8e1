"""The options of a run that belong to no single task, robot, sampler, policy or learner.

Those of a group are dataclasses beside the thing they configure and are registered with it (`embodied.spec.registry`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class SimOptions:
    """Worlds."""

    num_worlds: int = 1024
    engine: str = "cpu"  # a registered engine: cpu (MuJoCo) or warp (MuJoCo Warp)
    threads: int = 0  # physics threads of the CPU engine; 0: every core


@dataclass
class BudgetOptions:
    """When training stops, whichever comes first; null: no such bound."""

    iterations: int | None = None
    env_steps: int | None = None
    minutes: float | None = None
    target_success: float | None = 0.97  # success of a periodic evaluation on fresh starts


@dataclass
class EvalOptions:
    """Evaluation on fresh starts, deterministic policy."""

    every: int = 10  # iterations between periodic evaluations
    episodes: int = 200  # of a periodic one; the final one has `episodes`
    randomise: bool = False  # the training's randomisation of physics, instead of nominal


@dataclass
class SaveOptions:
    """Checkpoints."""

    every: int = 10  # iterations between them; also at the end and on Ctrl-C


@dataclass
class RunConfig:
    """A whole run, resolved: what config.yaml holds."""

    task: Any = MISSING
    robot: Any = MISSING
    sampler: Any = MISSING
    policy: Any = MISSING
    algo: Any = MISSING
    sim: SimOptions = field(default_factory=SimOptions)
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    episodes: int = 500
    device: str = "cpu"
    out: str | None = None
