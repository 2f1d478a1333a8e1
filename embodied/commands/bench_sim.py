"""`embodied bench sim`: how much of the physics' own speed is left to the environment and to training.

Three figures from one run: `train` steps the worlds and learns, `env` steps them without learning, `raw` replays the controls
and resets recorded just before on the bare engine. They are taken in turn, round after round, so that what else the machine
does falls on all alike; the ratios are medians over rounds.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from typing import Any

import psutil
import torch
from torch import Tensor

from embodied.algos.trainer import single_threaded
from embodied.commands.build import make_engine, make_task
from embodied.commands.memory import peak
from embodied.commands.train import build
from embodied.compose import Invocation
from embodied.sim.env import WorldsEnv
from embodied.spec.protocols import Engine

ROUNDS = 6
WARM_UP = 2  # iterations, so that episodes end and worlds are reset as they are later


class Recorder:
    """Stands before an engine and keeps the controls, and the rows of the worlds that are reset, of every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def write(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Pass on; controls are kept."""
        self._engine.write(name, values, mask)
        if name == "ctrl":
            self.steps.append((values.clone(), None, None))

    def commit(self, mask: Tensor | None = None) -> None:
        """Pass on; the worlds' rows are kept, parameters and all: the last thing a reset does."""
        self._engine.commit(mask)
        if self.steps:
            self.steps[-1] = (self.steps[-1][0], mask, self._engine.get_state())


def run(invocation: Invocation) -> int:
    """Measure, and print one JSON line."""
    config = invocation.config
    task = make_task(config)
    before = psutil.Process().memory_info().rss
    trainer, _ = build(config, task, lambda text: print(text, flush=True))
    trainer.reset(config["seed"])
    env: WorldsEnv = trainer.env  # type: ignore[assignment]  # what `build` made; the trainer knows it as a VecEnv
    num_worlds, steps = env.num_worlds, trainer.learner.steps_per_iteration
    for _ in range(WARM_UP):
        trainer.iterate()
    engine = env.engine
    bare = make_engine(config, task, num_worlds)
    seconds: dict[str, list[float]] = {"raw": [], "env": [], "train": []}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        trainer.iterate()
        seconds["train"].append(time.perf_counter() - begin)
        recorder = Recorder(engine)
        start = engine.get_state()
        actions = _actions(trainer, steps)
        # recorded once, timed twice: what is kept for the replay must not slow what is timed
        snapshot = copy.deepcopy(env.state_dict())
        env.engine = recorder
        with single_threaded(num_worlds):
            for action in actions:
                env.step(action)
        env.engine = engine
        env.load_state_dict(snapshot)
        with single_threaded(num_worlds):
            begin = time.perf_counter()
            for action in actions:
                env.step(action)
            seconds["env"].append(time.perf_counter() - begin)
        trainer.obs = env.observation
        bare.set_state(start)
        seconds["raw"].append(_replay(bare, recorder, task.spec.robot.substeps))
    rates = {name: num_worlds * steps / statistics.median(times) for name, times in seconds.items()}
    ratios = {
        name: statistics.median(raw / other for raw, other in zip(seconds["raw"], seconds[name], strict=True))
        for name in ("env", "train")
    }
    memory = psutil.Process().memory_info().rss
    print(
        json.dumps(
            {
                "task": config["task"]["name"],
                "num_worlds": num_worlds,
                "raw_steps_per_s": round(rates["raw"]),
                "env_steps_per_s": round(rates["env"]),
                "train_steps_per_s": round(rates["train"]),
                "env_ratio": round(ratios["env"], 3),
                "train_ratio": round(ratios["train"], 3),
                "bytes_per_world": round((memory - before) / num_worlds),
                "peak_rss_bytes": peak(),
            }
        )
    )
    return 0


def _actions(trainer: Any, steps: int) -> list[Tensor]:
    """Actions as the policy draws them now, for the present observation of each world."""
    with torch.no_grad():
        return [trainer.learner.policy.act(trainer.obs).action[:, 0] for _ in range(steps)]


def _replay(engine: Engine, recorder: Recorder, substeps: int) -> float:
    """Seconds to step the bare engine through what was recorded, resets included."""
    begin = time.perf_counter()
    for control, mask, rows in recorder.steps:
        engine.write("ctrl", control)
        engine.step(substeps)
        if mask is not None and rows is not None:
            engine.set_state(rows, mask)
    return time.perf_counter() - begin
