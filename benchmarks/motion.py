"""Legs and wings: `python benchmarks/motion.py hover|track|locomotion [default|controls|all] [--seeds 0 1 2]`.

`default` trains the task with no other option for three seeds, one after another, and evaluates each on 500 fresh starts;
runs of seeds that are not asked for are kept.
`controls` gives what must fail, and harder starts, for comparison. Results are merged into docs/results/motion.json, and
docs/results/motion.md is written from it.

`wall_s` counts from the start of the process, as in metrics.jsonl; `startup_s` is what of it passed before the first step of
training: imports, compilation of the model, reset bank, construction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from assembly import RESULTS, SEEDS, describe_host

Run = dict[str, Any]

CONTROLS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "hover": {
        "without past actions": (["task.history=0"], []),
        "trained without motor delay": (["robot.motor_delay=0"], ["robot.motor_delay=0.15"]),
        "from up to upside down, in a box of 2 m": (["task.bank.max_angle=180", "task.box=2"], []),
    },
    "track": {},
    "locomotion": {
        "without symmetry": (["algo.symmetry=false"], []),
        "without the suggestion of a trot": (["task.reward.trot=0"], []),
        "as much noise as usual": (["policy.init_std=0.5", "algo.entropy=0.005"], []),
    },
}
"""By task and name: words for training, and those that evaluation takes beside."""


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(CONTROLS))
    parser.add_argument("what", choices=["default", "controls", "all"], nargs="?", default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of `default`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    asked = parser.parse_args()
    file = asked.out / "motion.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    mine = results.setdefault(asked.task, {})
    if asked.what in ("default", "all"):
        mine["host"] = describe_host()
        for seed in asked.seeds:
            words = [f"seed={seed}"]
            kept = [run for run in mine.get("default", []) if run["words"] != words]
            mine["default"] = sorted([*kept, train(asked.task, words)], key=lambda run: run["words"])
            write(file, results)
    if asked.what in ("controls", "all"):
        steps = max(run["env_steps"] for run in mine["default"])
        mine["controls"] = {}
        for name, (words, evaluated) in CONTROLS[asked.task].items():
            bounds = ["budget.target_success=null", f"budget.env_steps={steps}"]
            mine["controls"][name] = train(asked.task, [*words, *bounds], evaluated)
            write(file, results)


def train(task: str, words: list[str], evaluated: list[str] | None = None) -> Run:
    """One training in a process of its own, and what came of it; `evaluated`: evaluate again with these options."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "embodied.cli"]
        subprocess.run([*command, "train", f"task={task}", f"out={out}", *words], check=True)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        final = json.loads((out / "eval.json").read_text())
        if evaluated:
            again = [*command, "eval", f"checkpoint={out}", f"seed={final['seed']}", *evaluated]
            output = subprocess.run(again, check=True, capture_output=True, text=True).stdout
            final = json.loads(output.strip().splitlines()[-1])
    known = ("task", "deterministic", "seed", "weights_sha256", "successes")
    first = rows[0]
    return {
        "words": words,
        "evaluated with": evaluated or [],
        "wall_s": round(rows[-1]["wall_s"], 1),
        "startup_s": round(first["wall_s"] - first["sim_s"] - first["learn_s"], 1),
        "env_steps": rows[-1]["env_steps"],
        "final": {key: value for key, value in final.items() if key not in known},
        "curve": [(r["env_steps"], round(r["wall_s"], 1), r["eval/success"]) for r in rows if "eval/success" in r],
    }


def write(file: Path, results: dict[str, Any]) -> None:
    """motion.json, and the page made from it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    about = """Made by `python benchmarks/motion.py <task>`. Success is that of the deterministic policy on 500 fresh starts,
    with nominal physics; what it means is in docs/motion.md. wall_s counts from the start of the process, startup_s of it had
    passed before the first step of training (imports, compilation, reset bank). Controls took as many steps as the
    longest of the default runs. A figure of position is over the last half of the episodes that got there."""
    lines = ["# Legs and wings", "", *textwrap.wrap(" ".join(about.split()), 120), ""]
    for task, found in results.items():
        lines += section(task, found)
    (file.parent / "motion.md").write_text("\n".join(lines))


def section(task: str, found: dict[str, Any]) -> list[str]:
    """A task's part of the page."""
    host, runs = found["host"], found["default"]
    figures = [key for key in runs[0]["final"] if key not in BASE]
    names = [name.replace("_", " ") for name in figures]
    head = ["run", "success", "95 % interval", "wall_s", "startup_s", "steps", "episode, steps", *names]
    lines = [f"## {task}", "", f"{host['date']}, {host['cores']} cores of {host['cpu']}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [row(run["words"][0].replace("=", " "), run, figures) for run in runs]
    lines += [row(f"{name} (`{' '.join(run['words'][:-2])}`)", run, figures) for name, run in found.get("controls", {}).items()]
    success = statistics.median(run["final"]["success_at_end"] for run in runs)
    wall, startup = (statistics.median(run[key] for run in runs) for key in ("wall_s", "startup_s"))
    trained = statistics.median(run["wall_s"] - run["startup_s"] for run in runs)
    lines += ["", f"Medians: {success:.1%} in {wall:.0f} s, of which {startup:.1f} s startup; {trained:.1f} s without it.", ""]
    return lines


BASE = ("episodes", "success_once", "success_at_end", "return_mean", "length_mean", "invalid", "ci95")


def row(name: str, run: Run, figures: list[str]) -> str:
    """A run's row of the table."""
    final = run["final"]
    low, high = final["ci95"]
    cells = [
        name,
        f"{final['success_at_end']:.1%}",
        f"{low:.1%} - {high:.1%}",
        f"{run['wall_s']:.1f}",
        f"{run['startup_s']:.1f}",
        f"{run['env_steps'] / 1e6:.2f} M",
        f"{final['length_mean']:.0f}",
        *("-" if final[key] is None else f"{final[key]:.3g}" for key in figures),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
