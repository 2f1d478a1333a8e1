"""The main job's figures: `python benchmarks/assembly.py [default|controls|all]`.

`default` trains task=assembly with no other option for three seeds, one after another, and evaluates each on 500 fresh starts.
`controls` gives what must fail the steps that the slowest of those seeds took: a bank without starts near the goal, a policy
that does not see the socket, outcomes shuffled before the sampler sees them; and, for comparison, uniform resets.
Results are merged into docs/results/assembly.json, and docs/results/assembly.md is written from it.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SEEDS = (0, 1, 2)
CONTROLS = {
    "bank without near-goal starts": ["task.bank.inserted=0", "task.bank.near=0", "task.bank.far=1"],
    "policy without socket pose": ["task.see_socket=false"],
    "shuffled outcomes": ["sampler=shuffled"],
    "uniform resets": ["sampler=uniform"],
}


def train(overrides: list[str]) -> dict[str, object]:
    """One training in a process of its own: its evaluation, wall time, steps and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, __file__, "--train", "task=assembly", f"out={out}", *overrides]
        process = subprocess.Popen(command)
        peak = 0
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
                process.wait(timeout=0.5)
            except (subprocess.TimeoutExpired, psutil.NoSuchProcess):
                continue
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((out / "eval.json").read_text())
    curve = [(r["env_steps"], round(r["wall_s"], 1), r["eval/success"]) for r in rows if "eval/success" in r]
    return {
        "overrides": overrides,
        "success_at_end": result["success_at_end"],
        "ci95": result["ci95"],
        "wall_s": round(rows[-1]["wall_s"], 1),
        "env_steps": rows[-1]["env_steps"],
        "steps_per_s": round(statistics.median(r["steps_per_s"] for r in rows)),
        "peak_rss_mb": round(peak / 2**20),
        "invalid": result["invalid"],
        "curve": curve,
    }


def describe_host() -> dict[str, object]:
    """What figures are read by: date and machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), "?"),
        "cores": psutil.cpu_count(),
        "machine": platform.machine(),
    }


def main() -> None:
    """Run what was asked for, and write the results."""
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    file = RESULTS / "assembly.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    host = describe_host()
    if what in ("default", "all"):
        results["default"] = {"host": host, "runs": [train([f"seed={seed}"]) for seed in SEEDS]}
        write(file, results)
    if what in ("controls", "all"):
        steps = max(run["env_steps"] for run in results["default"]["runs"])
        results["controls"] = {"host": host, "env_steps": steps, "runs": {}}
        for name, overrides in CONTROLS.items():
            bound = [f"budget.env_steps={steps}", "budget.target_success=null", "eval.every=1000"]
            results["controls"]["runs"][name] = train([*overrides, *bound])
            write(file, results)


def write(file: Path, results: dict) -> None:
    """assembly.json, and the page made from it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    default = results["default"]
    host = default["host"]
    runs = default["runs"]
    lines = [
        "# `embodied train task=assembly`, no other option",
        "",
        f"{host['date']}, {host['cores']} cores of {host['cpu']}, made by `python benchmarks/assembly.py`. Success is that",
        "of the deterministic policy on 500 fresh starts, at least 30 mm from the mouth; wall time counts from the process's",
        "start, with bank, periodic evaluations and imports, to the iteration that reached the target.",
        "",
        "| seed | success | 95 % interval | wall_s | steps | steps/s | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['overrides'][0].split('=')[1]} | {r['success_at_end']:.1%} | {r['ci95'][0]:.1%} - {r['ci95'][1]:.1%} "
        f"| {r['wall_s']:.0f} | {r['env_steps'] / 1e6:.2f} M | {r['steps_per_s']:,} | {r['peak_rss_mb']} MB |"
        for r in runs
    ]
    success = statistics.median(r["success_at_end"] for r in runs)
    seconds = statistics.median(r["wall_s"] for r in runs)
    lines += ["", f"Median: {success:.1%} in {seconds:.0f} s."]
    if "controls" in results:
        controls = results["controls"]
        lines += [
            "",
            f"## Controls, seed 0, {controls['env_steps'] / 1e6:.2f} M steps each ({controls['host']['date']})",
            "",
            "| what | success | 95 % interval |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {r['success_at_end']:.1%} | {r['ci95'][0]:.1%} - {r['ci95'][1]:.1%} |"
            for name, r in controls["runs"].items()
        ]
    (file.parent / "assembly.md").write_text("\n".join(lines) + "\n")


def child(arguments: list[str]) -> int:
    """`embodied train`, with the control's sampler registered as a plug-in would."""
    import torch

    from embodied.cli import main as cli
    from embodied.sim.samplers.success_guided import SuccessGuided, SuccessGuidedOptions
    from embodied.spec.registry import register

    @register("sampler", "shuffled", SuccessGuidedOptions)
    class Shuffled(SuccessGuided):
        """success_guided, but each outcome is credited to another world's configuration of the same moment."""

        def record(self, slots, success, valid, episode_return):
            ended = torch.nonzero(slots >= 0)[:, 0]
            mixed = success.clone()
            mixed[ended] = success[ended[torch.randperm(len(ended))]]
            super().record(slots, mixed, valid, episode_return)

    return cli(["train", *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        raise SystemExit(child(sys.argv[2:]))
    main()
