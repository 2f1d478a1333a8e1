"""Reset samplers compared at equal environment steps, and their cost: `python benchmarks/samplers.py run|report|cost ...`.

`run` trains every sampler in every setting, `--jobs` runs at a time, each in a process of its own with its share of the cores,
for `--env-steps` steps (those that a sampler takes to try configurations included). A run that the results already have is
skipped: interrupt the command and give it again. Settings and samplers were fixed before the first run; `peg_tight_sparse`
is held out: nothing was chosen by it. Results go to docs/results/samplers.json, and from it to samplers.md and a plot a
setting; `report` only does that.

`cost` times the samplers on a bank of 104,000 configurations (arXiv 2610.12465, locomotion) against a training iteration; set
OMP_WAIT_POLICY=PASSIVE for it, as the console script does for a training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from assembly import RESULTS
from figures import Run, curves, make_runs, on_the_way, take_off, train

from embodied.algos.trainer import single_threaded
from embodied.report.charts import Axis
from embodied.report.statistics import wilson
from embodied.sim.samplers.slots import Slots
from embodied.spec import registry
from embodied.spec.protocols import Trials

# 5 % of the configurations at all distances, inserted to near as by default (40 to 35), and 95 % far
SPARSE = ["task.bank.inserted=0.0266667", "task.bank.near=0.0233333", "task.bank.far=0.95"]
SETTINGS = {
    "peg": [],
    "peg_sparse": SPARSE,
    "bayonet_sparse": ["task.part=bayonet", *SPARSE],
    "peg_tight_sparse": ["task.clearance=0.0003", *SPARSE],
}
HELD_OUT = ("peg_tight_sparse",)
SAMPLERS: dict[str, tuple[int, ...]] = {
    "success_guided": (0, 1, 2),
    "uniform": (0, 1, 2),
    "plr": (0,),
    "sfl": (0,),
    "linear": (0,),
}
"""Each with its default options, and the seeds it is run with."""

COST_SLOTS, COST_HISTORY, COST_STEPS = 104_000, 100, 24
ENDING = 0.02  # share of the worlds whose episode ends in a step


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report", "cost"])
    parser.add_argument("--env-steps", type=int, default=3_000_000)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--extra", nargs="+", default=[], help="further words for `embodied train`, to try this command out")
    parser.add_argument("--max-log2", type=int, default=20, help="cost: up to so many worlds, as a power of 2")
    parser.add_argument("--steps-per-s", type=float, help="cost: of training; measured here if not given")
    parser.add_argument("--device", default="cpu", help="cost: where the sampler lives")
    asked = parser.parse_args()
    if asked.what == "cost":
        cost(asked.max_log2, asked.steps_per_s, torch.device(asked.device))
        return
    file = asked.out / "samplers.json"
    if asked.what == "run":
        run(file, asked.env_steps, asked.settings, asked.extra, asked.jobs)
    report(file)


ABOUT = """`python benchmarks/samplers.py run`. Success is that of the deterministic policy on fresh starts at least 30 mm from
the mouth, never from the bank trained from. Every sampler has its default options: success_guided's were chosen on the setting
`peg`, plr's and linear's are their sources', sfl's are scaled to so few steps. The steps that sfl takes to try configurations
are among the steps. The interval is Wilson's at 95 %, of the episodes of all seeds together: how well these policies are known,
not how much another seed would differ. By kind: of the inserted / near / far configurations visited in training."""


# -- runs ----------------------------------------------------------------------------------------------------------------


def plan(settings: list[str]) -> Iterator[tuple[str, str, int]]:
    """Setting, sampler and seed of each run, seeds last: a comparison of all samplers comes first."""
    for setting in settings:
        for seed in sorted({seed for seeds in SAMPLERS.values() for seed in seeds}):
            yield from ((setting, sampler, seed) for sampler, seeds in SAMPLERS.items() if seed in seeds)


def run(file: Path, env_steps: int, settings: list[str], extra: list[str], jobs: int) -> None:
    """Make the runs that the results lack."""
    wanted = {
        f"{setting}/{sampler}/{seed}": [f"sampler={sampler}", f"seed={seed}", *SETTINGS[setting]]
        for setting, sampler, seed in plan(settings)
    }

    def make(words: list[str], threads: int) -> Run:
        return train("assembly", words, env_steps, extra, threads)

    make_runs(file, {"env_steps": env_steps, "extra": extra}, wanted, make, jobs)


# -- report --------------------------------------------------------------------------------------------------------------


def report(file: Path) -> None:
    """samplers.md and a plot a setting, from samplers.json."""
    results = json.loads(file.read_text())
    runs: dict[str, dict[str, list[Run]]] = {}
    for key, one in results["runs"].items():
        setting, sampler, _ = key.split("/")
        runs.setdefault(setting, {}).setdefault(sampler, []).append(one)
    host = next(iter(results["runs"].values()))["host"]
    million = results["conditions"]["env_steps"] / 1e6
    lines = [
        f"# Reset samplers at {million:g} M environment steps each",
        "",
        *textwrap.wrap(f"{host['date']}, {host['cores']} cores of {host['cpu']}, made by {ABOUT}", 120),
        "",
    ]
    if extra := results["conditions"]["extra"]:
        lines += [f"Further options of every run: `{' '.join(extra)}`.", ""]
    for setting, by_sampler in runs.items():
        held = ", held out: no choice was made by it" if setting in HELD_OUT else ""
        options = " ".join(SETTINGS[setting]) or "the default"
        lines += [f"## {setting}{held}", "", f"`embodied train task=assembly` with {options}.", "", *table(by_sampler), ""]
        (file.parent / f"samplers-{setting}.svg").write_text(plot(by_sampler))
        lines += [f"![Success on fresh starts, and where the draws go](samplers-{setting}.svg)", ""]
    (file.parent / "samplers.md").write_text("\n".join(lines))


def table(by_sampler: dict[str, list[Run]]) -> list[str]:
    """Rows of a setting."""
    lines = [
        "| sampler | seeds | success | least - most | 95 % interval | at 1/3 | at 2/3 of the steps | steps to 50 % | by kind |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for sampler, runs in by_sampler.items():
        rates = [one["final"]["success_at_end"] or 0.0 for one in runs]
        episodes = [one["final"]["episodes"] for one in runs]
        low, high = wilson(round(sum(r * n for r, n in zip(rates, episodes, strict=True))), sum(episodes))
        tags = [statistics.mean(one["success by tag"][tag] for one in runs) for tag in ("inserted", "near", "far")]
        lines.append(
            f"| {sampler} | {len(runs)} | {statistics.mean(rates):.1%} | {min(rates):.1%} - {max(rates):.1%} | "
            f"{low:.1%} - {high:.1%} | {on_the_way(runs, 1 / 3)} | {on_the_way(runs, 2 / 3)} | "
            f"{', '.join(map(take_off, runs))} | {' / '.join(f'{t:.2f}' for t in tags)} |"
        )
    return lines


def plot(by_sampler: dict[str, list[Run]]) -> str:
    """Success on fresh starts, and mean difficulty of the draws."""
    distance = ("Distance from the goal of the starts drawn (mm)", "difficulty of the draws", Axis("", unit=1e-3))
    return curves(by_sampler, [("Success on fresh starts", "fresh starts", Axis("", percent=True)), distance])


# -- cost ----------------------------------------------------------------------------------------------------------------


def cost(max_log2: int, steps_per_s: float | None, device: torch.device) -> None:
    """Print what an iteration of each sampler costs, for 2^12 worlds and more.

    A training iteration of N worlds is taken to last N times as long as one of a world at the measured rate, which favours
    neither: physics is linear in worlds, and larger batches learn no slower.
    """
    rate = steps_per_s or measured_rate()
    print(f"{COST_SLOTS:,} configurations, {COST_STEPS} steps an iteration, {rate:,.0f} training steps/s, on {device}")
    print(f"{'worlds':>9} {'sampler':>15} {'record':>9} {'rescore':>9} {'draw':>9} {'iteration':>10} {'share':>8}  (ms)")
    for log2 in range(12, max_log2 + 1, 2):
        worlds = 2**log2
        for name in SAMPLERS:
            parts = sampler_times(name, worlds, device)
            total = COST_STEPS * sum(parts[part] for part in ("record", "rescore", "draw")) + parts["end"]
            share = total / (1e3 * COST_STEPS * worlds / rate)
            times = " ".join(f"{parts[part]:9.2f}" for part in ("record", "rescore", "draw"))
            print(f"{worlds:>9} {name:>15} {times} {total:10.1f} {share:8.2%}", flush=True)


def measured_rate() -> float:
    """Training steps a second of the default task here."""
    command = [sys.executable, "-m", "embodied.cli", "bench", "sim", "task=assembly"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])["train_steps_per_s"]


def sampler_times(name: str, worlds: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step's record, rescore and draw, and of what comes once an iteration (scores, metrics): the least of
    ten, because whatever else the machine does can only add to them.
    """
    entry = registry.find("sampler", name)
    tags, difficulty = torch.zeros(COST_SLOTS, dtype=torch.int64), torch.rand(COST_SLOTS, dtype=torch.float64)
    slots = Slots(worlds, tags, ("all",), difficulty, "cost", 0, device)
    sampler = entry.build(entry.options(history=COST_HISTORY), slots)
    sampler.evaluate = lambda some, seed: Trials(*(torch.rand(len(some), device=device) < p for p in (0.5, 1.0)), 0)
    generator = torch.Generator(device).manual_seed(0)
    ended, success = (torch.rand(worlds, generator=generator, device=device) < share for share in (ENDING, 0.5))
    valid, returns = torch.ones_like(ended), torch.zeros(worlds, device=device)
    rows = torch.where(ended, sampler.sample(), -1)
    visited = sampler.sample().expand(COST_STEPS, -1)
    advantage = torch.rand(COST_STEPS, worlds, generator=generator, device=device)

    def rescore() -> None:
        if sampler._stale:
            sampler._refresh()

    def end() -> None:
        if hasattr(sampler, "score"):
            sampler.score(visited, advantage)
        sampler.end_iteration()
        sampler.metrics()

    parts: dict[str, Callable[[], object]] = {
        "record": lambda: sampler.record(rows, success, valid, returns),
        "rescore": rescore,
        "draw": sampler.sample,
        "end": end,
    }
    spent: dict[str, list[float]] = {part: [] for part in parts}
    with single_threaded(worlds):  # as in training
        for _ in range(11):
            for part, function in parts.items():
                spent[part].append(timed(function, device))
    return {part: 1e3 * min(times[1:]) for part, times in spent.items()}


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
