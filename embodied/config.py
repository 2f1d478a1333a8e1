"""The options of a run that belong to no single task, robot, sampler, policy or learner.

Those of a group are dataclasses beside the thing they configure and are registered with it (`embodied.spec.registry`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from embodied.spec.errors import BadInput
from embodied.spec.registry import find

CHOICES = {"robot": "franka", "sampler": "success_guided", "policy": "mlp", "algo": "ppo"}
"""What a run takes when the user names nothing; a task has to be named."""


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
    target_success: float | None = 0.96  # success of a periodic evaluation on fresh starts


@dataclass
class EvalOptions:
    """Evaluation on fresh starts, deterministic policy."""

    every: int = 10  # iterations between periodic evaluations
    episodes: int = 200  # of a periodic one; the final one has `episodes`
    randomise: bool = False  # the training's randomisation of physics, instead of nominal
    sampled: bool = False  # the final one also of sampled actions, as `success_sampled`


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
    start: str | None = None  # a run whose policy is trained on, under any learner
    out: str | None = None


def validate(config: dict[str, Any]) -> None:
    """Check the ranges of the options above in a plain resolved config.

    Raises:
        BadInput: a value is out of its range, the engine is unknown, the device is unknown or absent.
    """
    sim, budget = config["sim"], config["budget"]
    counts = {
        "sim.num_worlds": sim["num_worlds"],
        "episodes": config["episodes"],
        "eval.every": config["eval"]["every"],
        "eval.episodes": config["eval"]["episodes"],
        "save.every": config["save"]["every"],
        "budget.iterations": budget["iterations"],
        "budget.env_steps": budget["env_steps"],
        "budget.minutes": budget["minutes"],
    }
    for key, value in counts.items():
        if value is not None and value <= 0:
            raise BadInput(f"{key}={value}: expected more than 0")
    target = budget["target_success"]
    if target is not None and not 0 < target <= 1:
        raise BadInput(f"budget.target_success={target}: expected a success rate in (0, 1], or null for no such bound")
    if sim["threads"] < 0:
        raise BadInput(f"sim.threads={sim['threads']}: expected 0 (every core) or more")
    if not 0 <= config["seed"] < 2**32:
        raise BadInput(f"seed={config['seed']}: expected 0 to {2**32 - 1}")
    find("engine", sim["engine"])
    device = config["device"]
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", device):
        raise BadInput(f"device={device}: expected cpu, cuda or cuda:<number>")
    if device != "cpu":
        import torch  # seconds to import: only where it is asked

        if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
            raise BadInput(f"device={device}: {torch.cuda.device_count()} CUDA devices are available; device=cpu works")
