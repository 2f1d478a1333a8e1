"""`embodied doctor task=...`: the memory that a training of this configuration takes, and how many worlds fit.

Processes build the run with few worlds, each takes it through one iteration and one checkpoint, and what they took gives
the lines that are extended to any number of worlds: a task, sampler or network that nobody foresaw is measured like any
other. There malloc gives back at once what is freed, so that few worlds take in proportion what many do. Sizes that are known
are counted instead: the rollout, the bank. The bank is not generated: every start is the model's default row. Generating it
takes memory too, before the worlds are built, and only the first time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from embodied.algos import checkpoint
from embodied.algos.threads import ROWS
from embodied.commands.build import make_engine, make_task
from embodied.commands.train import build
from embodied.compose import Invocation
from embodied.sim.env import WorldsEnv
from embodied.sim.resets import ResetBank, bank_path
from embodied.spec.errors import BadInput, Fault
from embodied.spec.protocols import Engine, Trials, TryingSampler

COUNTS = 256, 1024
"""Worlds that are really built."""

SMALL = 256
"""Transitions of a minibatch then, so that memory grows with the worlds alone; and once the whole batch."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
"""glibc: blocks from 16 KiB on are given back when they are freed, as from 32 MiB on without this."""

KEPT = 64 << 20
"""What glibc keeps at most of what was freed [bytes]: it trims its heap when twice 32 MiB of it are free."""

HEADROOM = 0.1
"""Share of the available memory that is left alone: predictions are as good as that."""

Row = tuple[str, float | None, float]
"""An item's name, bytes a world (None: does not depend on the worlds), bytes in all."""


@dataclass(frozen=True)
class Memory:
    """What a configuration takes, in bytes, for any number of worlds.

    Attributes:
        process: interpreter, libraries, networks and whatever else does not depend on the number of worlds.
        engine, environment, rollout: of each world, as long as the run lasts; the sampler's share is the environment's.
        iteration: of each world, what collecting, learning and saving add at their peak, minibatches left aside.
        transition: of each transition of a minibatch in hand.
        row: of a world's state, as the bank keeps it.
        bank, periodic, final: rows of the bank, worlds of the periodic and of the final evaluation.
        num_steps, minibatch: of the learner.
        threads: that learn; each has so many rows of a minibatch in hand at a time.
    """

    process: float
    engine: float
    environment: float
    rollout: float
    iteration: float
    transition: float
    row: float
    bank: int
    periodic: int
    final: int
    num_steps: int
    minibatch: int | None
    threads: int

    def rows(self, num_worlds: int) -> list[Row]:
        """The items that are held at the peak."""
        iteration = self.iteration * num_worlds + self.transition * self.rows_in_hand(num_worlds)
        evaluated = self.engine + self.environment + self.row
        final = evaluated * self.final
        worst: Row = "an iteration's copies and buffers", iteration / num_worlds, iteration
        if final > iteration:  # which comes when training is over
            worst = "worlds of the final evaluation", None, final
        return [
            ("process: Python, libraries, networks", None, self.process),
            ("physics engine", self.engine, self.engine * num_worlds),
            ("environment and sampler", self.environment, self.environment * num_worlds),
            ("rollout", self.rollout, self.rollout * num_worlds),
            ("reset bank", None, self.row * self.bank),
            ("worlds of the periodic evaluation", None, evaluated * self.periodic),
            worst,
            ("freed, but kept by malloc", None, min(iteration, KEPT)),
        ]

    def rows_in_hand(self, num_worlds: int) -> float:
        """Transitions of a minibatch that are worked on at a time."""
        batch = self.num_steps * num_worlds
        minibatch = batch / 4 if self.minibatch is None else min(self.minibatch, batch)
        return min(minibatch, self.threads * ROWS)

    def peak(self, num_worlds: int) -> float:
        """Resident memory at its largest, in bytes."""
        return sum(total for _, _, total in self.rows(num_worlds))

    def largest(self, available: float) -> int:
        """The largest number of worlds that fits into so many bytes with `HEADROOM` to spare; 0: not even one."""
        low, high = 0, 1
        while self.fits(high, available):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, available) else (low, middle)
        return low

    def fits(self, num_worlds: int, available: float) -> bool:
        """Whether so many worlds leave `HEADROOM` of the available bytes."""
        return self.peak(num_worlds) <= (1 - HEADROOM) * available


def run(invocation: Invocation) -> int:
    """Print what the configuration takes; 0 if it fits this machine, otherwise 1."""
    from rich.console import Console
    from rich.table import Table

    config = invocation.config
    num_worlds = config["sim"]["num_worlds"]
    memory = predict(config)
    table = Table("memory", box=None, pad_edge=False)
    table.add_column("bytes a world", justify="right")
    table.add_column(f"at {num_worlds:,} worlds", justify="right")
    for name, each, total in memory.rows(num_worlds):
        table.add_row(name, "" if each is None else f"{each:,.0f}", _size(total))
    table.add_row("predicted peak", "", _size(memory.peak(num_worlds)))
    Console().print(table)
    room, source = available()
    largest = memory.largest(room)
    fits = memory.fits(num_worlds, room)
    print(f"{_size(room)} available ({source}): {'fits' if fits else 'does not fit'}")
    if largest == 0:
        print("no number of worlds fits: free memory, or lower task.bank.size, algo.num_steps or episodes")
    else:
        power = 1 << (largest.bit_length() - 1)
        print(f"largest that fits with {HEADROOM:.0%} to spare: sim.num_worlds={largest} (power of two: {power})")
    return 0 if fits else 1


def predict(config: Mapping[str, Any]) -> Memory:
    """Measure two small builds of a resolved configuration; seconds, most of them spent importing.

    Raises:
        BadInput: its engine or device keeps what it holds elsewhere.
        Fault: a build failed.
    """
    simulator, device = config["sim"]["engine"], config["device"]
    if simulator != "cpu":
        raise BadInput(f"sim.engine={simulator}: memory can be predicted with sim.engine=cpu only")
    if config["algo"]["name"] != "ppo":
        raise BadInput(f"algo={config['algo']['name']}: memory can be predicted with algo=ppo only")
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        found = f"{_size(free)} of {_size(total)} are free on it"
        raise BadInput(f"device={device}: memory can be predicted with device=cpu only; {found}")
    builds = [(COUNTS[0], SMALL), (COUNTS[1], SMALL), (COUNTS[1], None)]
    with ThreadPoolExecutor(len(builds)) as pool:
        small, large, whole = pool.map(lambda build: _measured(config, *build), builds)

    def line(name: str) -> tuple[float, float]:
        slope = (large[name] - small[name]) / (COUNTS[1] - COUNTS[0])
        return small[name] - slope * COUNTS[0], slope

    started, world = line("started")
    buffers, iteration = line("iteration")
    transitions = min(COUNTS[1] * large["num_steps"], large["threads"] * ROWS) - SMALL
    transition = max((whole["iteration"] - large["iteration"]) / transitions, 0.0)
    engine, rollout = line("engine")[1], line("rollout")[1]
    return Memory(
        process=started + buffers - transition * SMALL,
        engine=engine,
        environment=world - engine - rollout,
        rollout=rollout,
        iteration=iteration,
        transition=transition,
        row=small["row"],
        bank=int(small["bank"]),
        periodic=config["eval"]["episodes"],
        final=config["episodes"],
        num_steps=int(small["num_steps"]),
        minibatch=config["algo"].get("minibatch_size"),
        threads=int(small["threads"]),
    )


def _measured(config: Mapping[str, Any], num_worlds: int, minibatch: int | None) -> dict[str, float]:
    """`measure` in a process of its own."""
    words = [sys.executable, "-m", "embodied.commands.memory", json.dumps([num_worlds, minibatch])]
    done = subprocess.run(words, input=json.dumps(config), capture_output=True, text=True, env=os.environ | MALLOC)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Fault(f"a build with {num_worlds} worlds failed, so that nothing can be predicted: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Idle:
    """An engine that simulates the first step and then stands still: more physics takes time but no more memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.step: Callable[[int], None] = self._first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _first(self, substeps: int) -> None:
        self._engine.step(substeps)
        self.step = lambda substeps: None


def measure(config: dict[str, Any], num_worlds: int, minibatch: int | None) -> dict[str, float]:
    """Take a run of so many worlds through an iteration and a checkpoint, in this process; bytes by name.

    `minibatch`: transitions; None: the whole batch.
    """
    checkpoint.deterministic()
    config["sim"]["num_worlds"] = num_worlds
    task = make_task(config)
    before = resident()
    engine = make_engine(config, task, num_worlds)
    found: dict[str, float] = {"engine": resident() - before, "row": engine.default_row.nbytes}
    found["bank"] = size = task.bank_size
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EMBODIED_CACHE"] = folder
        key, tags = task.bank_hash(engine.signature), torch.zeros(size, dtype=torch.int64)
        rows = engine.default_row.expand(size, -1)  # a view: it takes one row, also in the file
        ResetBank(rows, tags, ("any",), engine.signature, key).save(bank_path(key))
        del engine
        if "minibatch_size" in config["algo"]:  # one pass: more of them take no more memory
            batch = config["algo"]["num_steps"] * num_worlds
            config["algo"] |= {"minibatch_size": minibatch or batch, "epochs": 1}
        trainer, _ = build(config, task, lambda text: None)
        env: WorldsEnv = trainer.env  # type: ignore[assignment]  # what `build` made; the trainer knows it as a VecEnv
        env.engine = _Idle(env.engine)
        if isinstance(env.sampler, TryingSampler):
            env.sampler.evaluate = _untried
        trainer.reset(config["seed"])
        started = resident()
        trainer.iterate()
        checkpoint.save(Path(folder) / "checkpoint.pt", {"trainer": trainer.state_dict()})
    learner: Any = trainer.learner
    found |= {"num_steps": learner.steps_per_iteration, "threads": torch.get_num_threads()}
    found["rollout"] = tensor_bytes(vars(learner.rollout))
    return found | {"started": started, "iteration": peak() - started}


def _untried(slots: Tensor, seed: int) -> Trials:
    """Trials as a sampler asks for them, without the time that they take; their worlds are there."""
    return Trials(torch.zeros_like(slots, dtype=torch.bool), torch.ones_like(slots, dtype=torch.bool), 0)


def tensor_bytes(held: Any) -> int:
    """Bytes of the tensors in nested dicts."""
    if isinstance(held, Tensor):
        return held.nbytes
    return sum(tensor_bytes(value) for value in held.values()) if isinstance(held, Mapping) else 0


def resident() -> int:
    """Memory of this process that is resident now, in bytes."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    if sys.platform == "linux":
        # of this program alone: what getrusage says includes the process that started it
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    import resource

    largest: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def available(membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Bytes that a new process can take before memory runs out, and what limits them; for the paths see `group_room`."""
    machine = psutil.virtual_memory().available
    group = group_room(membership, mounted)
    return (machine, "this machine") if group is None or machine <= group else (group, "limit of the control group")


def group_room(membership: Path, mounted: Path) -> int | None:
    """Bytes left by the tightest memory limit of the control groups named in the file `membership`; None: no limit.

    File pages that nobody uses count as free: the kernel gives them up before it refuses memory. `mounted` is where groups
    are found, of version 1 or 2 (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
    """
    if not membership.exists():
        return None
    room: list[int] = []
    for line in membership.read_text(encoding="utf-8").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            root, limit, usage, idle = mounted, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage, idle = (
                mounted / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        inside = root / group.strip("/")
        for folder in (inside, *inside.parents):
            if not (folder == root or root in folder.parents) or not (folder / limit).exists():
                continue
            text = (folder / limit).read_text(encoding="utf-8").strip()
            if text != "max":
                stat = (one.split() for one in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                unused = next((int(value) for name, value in stat if name == idle), 0)
                room.append(int(text) - int((folder / usage).read_text(encoding="utf-8")) + unused)
    return min(room, default=None)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin), *json.loads(sys.argv[1]))))
