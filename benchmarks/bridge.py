"""From a trained policy to a robot that is another process: `python benchmarks/bridge.py <run> [<part>|all]`.

`<run>` is a folder of `embodied train task=assembly`. Parts: `reality` drives the nominal and the shifted robot for 100
episodes each in real time, and evaluates the same policy in worlds of the same physics; `timing` runs ten minutes at 50 Hz
beside a process that keeps one core busy; `guard` is `python benchmarks/guard.py`; `faults` injects every fault, and kills the
runner 100 times. Results are merged into docs/results/bridge.json, from which docs/results/bridge.md is written.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from assembly import RESULTS, describe_host

from embodied.algos.evaluate import evaluate
from embodied.commands.build import make_engine, make_task
from embodied.commands.evaluate import load_policy
from embodied.compose import compose
from embodied.keys import presets_dir
from embodied.report.statistics import wilson
from embodied.sim.fresh import FreshStarts

EPISODES, WORLDS = 100, 1000
PORT = 47123


@contextlib.contextmanager
def robot(*words: str) -> Iterator[str]:
    """A simulated robot process; its address."""
    command = [sys.executable, "-m", "embodied.cli", "deploy", "sim", "task=assembly", f"port={PORT}", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert "listening" in process.stdout.readline()
        yield f"127.0.0.1:{PORT}"
    finally:
        process.terminate()
        process.wait()


def run(policy: Path, address: str, *words: str) -> dict:
    """`embodied deploy run`: its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "embodied.cli", "deploy", "run", f"policy={policy}", f"robot={address}"]
        done = subprocess.run([*command, f"out={folder}/out", *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_worlds(folder: Path, reality: dict) -> tuple[int, int]:
    """Successes of the run's policy, of episodes in worlds with that reality's physics and calibration error."""
    pinned = [f"task.randomise.{name}=[{reality[name]},{reality[name]}]" for name in ("friction", "gains", "mass", "clearance")]
    invocation = compose("eval", [f"checkpoint={folder}", *pinned, f"task.randomise.delay={reality['delay']}"])
    task = make_task(invocation.config)
    nominal = task.start

    def start(*arguments):
        state = nominal(*arguments)
        state["seen_pos"] = state["seen_pos"] + torch.tensor(reality["offset"])
        return state

    task.start = start
    env = FreshStarts(make_engine(invocation.config, task, WORLDS), task, randomise=True)
    result = evaluate(env, load_policy(invocation, task), seed=99).summary()
    return int(result["successes"]), int(result["episodes"])


def measure_reality(folder: Path) -> dict:
    """Success through the bridge and in worlds, for both realities, by the target that the run was trained to."""
    target = yaml.safe_load((folder / "config.yaml").read_text())["budget"]["target_success"]
    steps = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["env_steps"]
    results: dict = {"env_steps": steps}
    for name in ("nominal", "shifted"):
        reality = yaml.safe_load((presets_dir() / "reality" / f"{name}.yaml").read_text())
        with robot(f"reality={name}", "reality.reversed_joints=true") as address:
            bridge = run(folder / "policy.onnx", address, f"episodes={EPISODES}", "seed=1000")
        successes, worlds = in_worlds(folder, reality)
        print(name, bridge["success_rate"], successes / worlds, flush=True)
        results[name] = {"reality": reality, "bridge": bridge, "worlds": [successes, worlds]}
    return {f"{target:g}": {"host": describe_host(), **results}}


def measure_timing(minutes: float = 10.0) -> dict:
    """50 Hz beside a busy core: an untrained policy at that rate, for episodes that all last until their time limit."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["task=assembly", "robot.control_dt=0.02", "sim.num_worlds=64", "algo.num_steps=8", "task.bank.size=64"]
        bounds = ["budget.iterations=1", "eval.episodes=8", "episodes=8", f"out={folder}/run"]
        subprocess.run([sys.executable, "-m", "embodied.cli", "train", *words, *bounds], check=True, stdout=subprocess.DEVNULL)
        export = [sys.executable, "-m", "embodied.cli", "export", f"checkpoint={folder}/run"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            with robot("robot.control_dt=0.02") as address:
                return run(Path(folder) / "run" / "policy.onnx", address, f"episodes={round(60 * minutes / 3.2)}")
        finally:
            busy.kill()


def measure_guard() -> dict:
    """Cost and the million cases of the guard alone."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("guard.py")], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {"cost": [line["cost"] for line in lines if "cost" in line], "cases": lines[-1]["cases"]}


def measure_faults(folder: Path) -> dict:
    """Every row of `embodied deploy faults`."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "embodied.cli",
            "deploy",
            "faults",
            f"policy={folder}",
            f"out={out}/faults",
            "kills=100",
        ]
        subprocess.run(command, check=False)
        found = json.loads((Path(out) / "faults" / "faults.json").read_text())
        return {key: value for key, value in found.items() if key != "policy"}  # where it lay is nobody's business


def main() -> None:
    """Run what was asked for, and write the results."""
    folder, what = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "all"
    torch.set_num_threads(1)
    file = RESULTS / "bridge.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    parts = {
        "reality": lambda: measure_reality(folder),
        "timing": measure_timing,
        "guard": measure_guard,
        "faults": lambda: measure_faults(folder),
    }
    for name, measure in parts.items():
        if what in (name, "all"):
            # runs trained to different targets stand beside each other
            kept = results.get(name, {}) if name == "reality" else {}
            results[name] = {**kept, "host": describe_host(), **measure()}
            file.write_text(json.dumps(results, indent=1) + "\n")
            (RESULTS / "bridge.md").write_text("\n".join(page(results)) + "\n")


def page(results: dict) -> list[str]:
    """bridge.md."""
    lines = [
        "# The bridge",
        "",
        "Made by `python benchmarks/bridge.py <run>`; the runner, the robot and the policy are three processes.",
        "",
    ]
    if "reality" in results:
        lines += _reality(results["reality"])
    if "timing" in results:
        lines += _timing(results["timing"])
    if "guard" in results:
        lines += _guard(results["guard"])
    if "faults" in results:
        lines += _faults(results["faults"])
    return lines


def _when(part: dict) -> str:
    return f"{part['host']['date']}, {part['host']['cores']} cores of {part['host']['cpu']}"


def _reality(part: dict) -> list[str]:
    targets = sorted(set(part) - {"host"})
    lines = [
        f"## Success in real time ({_when(part[targets[-1]])})",
        "",
        f"{EPISODES} fresh starts through the bridge at 25 Hz, the robot's joints in reversed order; {WORLDS} fresh starts in",
        "worlds of the same physics and calibration error. True: by the simulator's own account, not the policy's estimate.",
        "The default run stops at its target of 0.96; another was trained on with `budget.target_success`.",
        "",
        "| trained to | robot | through the bridge | 95 % | true | in worlds | 95 % | clamped | holds | missed ticks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        for name in ("nominal", "shifted"):
            bridge, (successes, worlds) = part[target][name]["bridge"], part[target][name]["worlds"]
            cells = [
                f"{target} ({part[target]['env_steps'] / 1e6:.1f} M steps)",
                name,
                f"{bridge['success_rate']:.1%}",
                _interval(bridge["ci95"]),
                f"{bridge['true_success_rate']:.1%}",
                f"{successes / worlds:.1%}",
                _interval(wilson(successes, worlds)),
                *(bridge[key] for key in ("clamped", "holds", "missed_ticks")),
            ]
            lines.append(_row(cells))
    return [*lines, "", f"Shifted: {part[targets[-1]]['shifted']['reality']}", ""]


def _timing(part: dict) -> list[str]:
    figures = part["timing_us"]
    lines = [
        f"## 50 Hz beside one busy core ({_when(part)})",
        "",
        f"{figures['late_us']['count']} ticks in {part['episodes']} episodes, scheduling: {part['scheduling']}; missed ticks: "
        f"{part['missed_ticks']},",
        f"holds: {part['holds']}, late answers of the policy: {part['late_answers']}; load average at the end: "
        f"{part['machine']['load'][0]}.",
        "",
        "| us | p50 | p99 | p99.9 | max |",
        "|---|---|---|---|---|",
    ]
    names = {
        "late_us": "a tick begins late by",
        "sent_us": "from its beginning the command is sent after",
        "tick_us": "a tick costs, policy's answer and journal included",
        "guard_us": "of it the guard",
        "infer_us": "of it the policy",
        "age_us": "age of the state, at most",
    }
    for name, text in names.items():
        lines.append(_row([text, *(figures[name][key] for key in ("p50", "p99", "p99.9", "max"))]))
    return [*lines, ""]


def _guard(part: dict) -> list[str]:
    cases = part["cases"]
    lines = [
        f"## The guard alone ({_when(part)})",
        "",
        f"{cases['cases']:,} ticks of an adversary under {len(cases['most_of_limit'])} kinds of limits: {cases['violations']} "
        f"violations of position, velocity, acceleration or jerk, {cases['unrested']} holds that did not end at rest;",
        f"{cases['levels']}.",
        "",
        "| us a tick | p50 | p99 | max |",
        "|---|---|---|---|",
    ]
    for cost in part["cost"]:
        for level, figures in cost["once_us"].items():
            lines.append(_row([f"{cost['hz']:.0f} Hz, {level}", *(figures[key] for key in ("p50", "p99", "max"))]))
    return [*lines, ""]


def _faults(part: dict) -> list[str]:
    rows = part["rows"]
    passed = sum(row["outcome"] == "passed" for row in rows)
    lines = [
        f"## Faults, measured at the robot ({_when(part)})",
        "",
        f"{passed} of {len(rows)} passed. Milliseconds from the fault until the target last changed, the tool was at rest, the",
        "robot stopped by itself or was told to; - where that did not happen.",
        "",
        "| fault | injected | while | promised | target | rest | stop | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [row["measured"].get(key) for key in ("moved", "rested", "stopped")]
        cells = ["-" if seconds is None else f"{1e3 * seconds:.0f}" for seconds in times]
        lines.append(_row([row["name"], row["injected"], row["phase"], row["promised"], *cells, row["outcome"]]))
    return [*lines, ""]


def _row(cells: list) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} - {ends[1]:.1%}"


if __name__ == "__main__":
    main()
