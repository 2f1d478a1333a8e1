"""`embodied deploy run`: a policy drives a robot, through the guard, with everything recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from embodied.arguments import read
from embodied.commands.deploy.connect import load_policy, refuse_mismatch
from embodied.deploy.brain import Brain
from embodied.deploy.link import DEFAULT, connect
from embodied.deploy.pace import machine_load, no_collection, realtime
from embodied.deploy.record import Episode
from embodied.deploy.recorder import Recorder
from embodied.deploy.runner import Runner, Stopped
from embodied.report.statistics import wilson
from embodied.runs import check_new
from embodied.spec.errors import BadInput, Fault

PRIORITY, BRAIN_PRIORITY = 20, 15  # real-time: the policy must not keep the runner from its tick


@dataclass
class RunOptions:
    """Options of `embodied deploy run`."""

    policy: str = MISSING  # an exported file, or the folder of a run that was exported
    robot: str = DEFAULT
    episodes: int = 1
    seed: int = 0  # of the first scene; the next has the next seed
    hold_s: float = 0.5  # how long something may be late before the run ends
    realtime: bool = True  # ask for real-time priority
    out: str | None = None  # folder, must be new
    key_file: str | None = None


def run(words: list[str]) -> int:
    """Connect, compare, run the episodes, and say what came of them; the last line is JSON."""
    return drive(read("deploy run", RunOptions, words), Brain)


def drive(options: RunOptions, make_brain: Callable[[Path, int], Brain]) -> int:
    """What `run` does; `make_brain` starts the process of an exported file's policy at a real-time priority (0: none)."""
    if options.episodes < 1:
        raise BadInput(f"episodes={options.episodes}: expected 1 or more")
    if not options.hold_s > 0:
        raise BadInput(f"hold_s={options.hold_s}: expected more than 0")
    policy = load_policy(options.policy)
    out = Path(options.out or f"runs/deploy/{datetime.now():%Y%m%d-%H%M%S}").expanduser()
    check_new(out)
    with contextlib.ExitStack() as stack:
        link = connect(options.robot, options.key_file)
        stack.callback(link.close)
        description = link.hello()
        refuse_mismatch(policy, link, description, options.policy)
        link.acquire(f"embodied deploy run, process {os.getpid()}", policy.spec.robot.joint_names)
        file = Path(options.policy).expanduser()
        brain = make_brain(file / "policy.onnx" if file.is_dir() else file, BRAIN_PRIORITY * options.realtime)
        stack.callback(brain.close)
        out.mkdir(parents=True)
        journal = out / "journal.emb"
        meta = {
            "policy": policy.metadata,
            "policy_sha256": policy.sha256,
            "robot": description,
            "options": asdict(options),
            "started": time.time(),
        }
        recorder = Recorder(journal, meta)
        stack.callback(recorder.close)
        runner = Runner(policy, link, brain, recorder, description["watchdog_s"], description["lockstep"], options.hold_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(runner, "stopping", True))
        runner.preflight(policy)
        print(f"{options.policy} drives {link.robot.name} at {options.robot}; journal: {journal}", flush=True)
        scheduling = realtime(PRIORITY) if options.realtime else "ordinary"
        results: list[Episode] = []
        fault: Exception | None = None

        def done(episode: Episode) -> None:
            results.append(episode)
            notes = [f"{count} x {why}" for why, count in episode.holds.items()]
            held = f"; held: {', '.join(notes)}" if notes else ""
            print(
                f"episode {episode.number + 1} of {options.episodes}: {episode.outcome}, {episode.steps} steps{held}",
                flush=True,
            )

        try:
            with no_collection():
                runner.run(options.episodes, options.seed, done)
        except (Fault, Stopped) as error:
            fault = error
        summary = _summary(results, runner, scheduling, fault)
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    late, tick = summary["timing_us"].get("late_us"), summary["timing_us"].get("tick_us")
    if late and tick:
        figures = f"late p99.9 {late['p99.9']:.0f} us, cost p99 {tick['p99']:.0f} us"
        print(f"ticks of {1e3 * runner.dt:.0f} ms: {figures} ({scheduling})")
    print(json.dumps(summary), flush=True)
    if fault is not None:
        raise Fault(str(fault))
    if runner.stopping:
        raise KeyboardInterrupt
    return 0


def _summary(results: list[Episode], runner: Runner, scheduling: str, fault: Exception | None) -> dict[str, Any]:
    successes = sum(episode.success for episode in results)
    truths = [episode.truth["success"] for episode in results if "success" in episode.truth]
    return {
        "task": runner.spec.task,
        "episodes": len(results),
        "successes": successes,
        "success_rate": successes / len(results) if results else None,
        "ci95": list(wilson(successes, len(results))) if results else None,
        "true_success_rate": sum(truths) / len(truths) if truths else None,
        "steps_mean": sum(episode.steps for episode in results) / len(results) if results else None,
        "clamped": sum(episode.clamped for episode in results),
        "holds": sum(sum(episode.holds.values()) for episode in results),
        "missed_ticks": runner.pace.missed,
        "late_answers": runner.brain.late,
        "dropped": dict(runner.link.dropped),
        "fault": None if fault is None else str(fault),
        "scheduling": scheduling,
        "machine": machine_load(),
        "timing_us": runner.timing.summary(),
    }
