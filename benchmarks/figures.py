"""What benchmarks of several trainings share: making the runs, averaging them over seeds, charts side by side as one SVG."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from assembly import describe_host

from embodied.report.charts import Axis, Line, line_chart

Run = dict[str, Any]
"""What `train` gave."""

STYLE = """svg{background:#fff;font:12px sans-serif}.tick{fill:#555}.grid,.axis{fill:none;stroke:#ddd}.axis{stroke:#999}
.line{fill:none;stroke:currentColor;stroke-width:1.8}.dots{fill:currentColor}
.c0{color:#0b68c8}.c1{color:#d4570a}.c2{color:#0a8a62}.c3{color:#ab3f90}.c4{color:#8a6a00}"""


def side_by_side(charts: Sequence[str], names: Sequence[str]) -> str:
    """What `embodied.report.charts.line_chart` gave, with one legend: the names of their lines, alike in all."""
    inner = ""
    for index, chart in enumerate(charts):
        title = chart.partition("<figcaption>")[2].partition("</figcaption>")[0]
        drawing = chart[chart.index("<svg") : chart.index("</svg>") + len("</svg>")]
        inner += f'<text x="{10 + 440 * index}" y="18">{title}</text>'
        inner += drawing.replace("<svg", f'<svg x="{440 * index}" y="28" width="420" height="220"', 1)
    legend = "".join(
        f'<text class="c{index}" fill="currentColor" x="{50 + 150 * index}" y="270">{name}</text>'
        for index, name in enumerate(names)
    )
    size = 'width="870" height="285" viewBox="0 0 870 285"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{inner}{legend}</svg>\n'


# -- runs ----------------------------------------------------------------------------------------------------------------


def make_runs(
    file: Path, conditions: Run, wanted: Mapping[str, list[str]], make: Callable[[list[str], int], Run], jobs: int
) -> None:
    """Make the runs that the results lack, `jobs` at a time, and keep each in `file` as it is done.

    Args:
        file: JSON of `conditions` and `runs` by name.
        conditions: what all runs have in common; results made under others are refused.
        wanted: words for `embodied train` by name, in order.
        make: makes a run from its words, with so many threads.
        jobs: runs at a time.
    """
    results = json.loads(file.read_text()) if file.exists() else {"conditions": conditions, "runs": {}}
    if results["conditions"] != conditions:
        raise SystemExit(f"{file} was made under {results['conditions']}, not {conditions}: give another --out")
    for key, words in wanted.items():
        if key in results["runs"] and results["runs"][key]["overrides"] != words:
            raise SystemExit(f"{file}: {key} was run with other options: give another --out")
    lock = threading.Lock()

    def keep(key: str) -> None:
        print(f"-- {key}", flush=True)
        made = make(wanted[key], max(1, (os.cpu_count() or 1) // jobs))
        with lock:
            results["runs"][key] = made
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".tmp")
            partial.write_text(json.dumps(results, indent=1) + "\n")
            partial.replace(file)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(keep, [key for key in wanted if key not in results["runs"]]))


def train(
    task: str, words: list[str], env_steps: int, extra: list[str], threads: int, also: Callable[[Path], Run] | None = None
) -> Run:
    """One training: its final evaluation, what was measured whenever it was evaluated on the way, and what `also` finds in
    the run's folder, which is not kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        bounds = ["budget.target_success=null", f"budget.env_steps={env_steps}"]
        command = [sys.executable, "-m", "embodied.cli", "train", f"task={task}", f"out={out}", *words, *bounds, *extra]
        command.append(f"sim.threads={threads}")
        if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}).returncode != 0:
            raise SystemExit(f"failed: {' '.join(command)}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        final = json.loads((out / "eval.json").read_text())
        found = also(out) if also else {}
    kept = [row for row in rows if "eval/success" in row]
    ranges = sum(name.startswith("sampler/success_by_difficulty_") for name in rows[0])
    tags = [name for name in rows[0] if name.startswith("sampler/success/")]
    return {
        "overrides": words,
        "host": describe_host(),
        "wall_s": round(rows[-1]["wall_s"], 1),
        "env_steps": rows[-1]["env_steps"],
        "iterations": len(rows),
        "success by tag": {name.split("/")[-1]: round(rows[-1][name], 4) for name in tags},
        "final": {name: final[name] for name in ("success_at_end", "episodes", "ci95", "invalid", "length_mean")},
        **found,
        "curve": {
            "env_steps": [row["env_steps"] for row in kept],
            "fresh starts": [row["eval/success"] for row in kept],
            "visited": [round(row["sampler/visited_fraction"], 4) for row in kept],
            "difficulty of the draws": [round(row["sampler/difficulty"], 5) for row in kept],
            "success by tag": {name.split("/")[-1]: [round(row[name], 4) for row in kept] for name in tags},
            "success by difficulty": [
                [round(row[f"sampler/success_by_difficulty_{i}"], 4) for i in range(ranges)] for row in kept
            ],
        },
    }


# -- what came of them ---------------------------------------------------------------------------------------------------


def on_the_way(runs: list[Run], share: float) -> str:
    """Success of each run at a share of its steps, between the periodic evaluations before and after."""
    at = share * max(one["env_steps"] for one in runs)
    found = [float(np.interp(at, one["curve"]["env_steps"], one["curve"]["fresh starts"])) for one in runs]
    return ", ".join(f"{success:.1%}" for success in found)


def take_off(one: Run, share: float = 0.5) -> str:
    """Environment steps at which that share of the fresh starts was first solved."""
    curve = one["curve"]
    points = zip(curve["env_steps"], curve["fresh starts"], strict=True)
    return next((f"{steps / 1e6:.2f} M" for steps, success in points if success >= share), "-")


def curves(by_name: Mapping[str, list[Run]], charts: Sequence[tuple[str, str, Axis]]) -> str:
    """Charts side by side, each a title, a key of the runs' curves and its axis; lines are means over seeds."""
    by_name = {name: runs for name, runs in by_name.items() if mean(runs, "fresh starts")}
    steps = Axis("environment steps")
    drawn = [
        line_chart(title, [Line(name, mean(runs, key), marked=True) for name, runs in by_name.items()], steps, y)
        for title, key, y in charts
    ]
    return side_by_side(drawn, list(by_name))


def mean(runs: list[Run], key: str) -> list[tuple[float, float]]:
    """Points of a curve, averaged over seeds; they were measured at the same iterations."""
    columns = zip(*(zip(one["curve"]["env_steps"], one["curve"][key], strict=True) for one in runs), strict=True)
    return [(points[0][0], statistics.mean(value for _, value in points)) for points in columns]
