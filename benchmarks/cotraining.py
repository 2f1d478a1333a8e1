"""Simulation, a few demonstrations of the real robot, or both: `python benchmarks/cotraining.py run|report ...`.

"Real" is the same task with a shifted plant (`REAL`), outside of what training randomises. `run` records demonstrations of the
assembly task's script on both plants, and makes of those that succeeded, for each seed:

- `SFT, real`: imitation of the real demonstrations alone;
- `SFT, real and simulated`: of both, each with half of the loss;
- `RL in simulation`: from there by Flow-SDE PPO in simulation;
- `RL-Co`: the same, with the loss of imitating the real demonstrations beside it (arXiv 2602.12628).

Each is evaluated on 500 fresh starts of both plants. What exists already is not made again: interrupt the command and give it
again. Results go to docs/results/cotraining.json, and from it to cotraining.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

from assembly import RESULTS, describe_host
from flow import CHUNKS, PPO

from embodied.report.statistics import wilson

REAL = [
    "task.randomise.gains=[0.5,0.5]",
    "task.randomise.friction=[2.5,2.5]",
    "task.randomise.mass=[1,1]",
    "task.randomise.delay=1",
]
"""Half the gains, 2.5 times the friction, every command late. Training draws .8 to 1.2, .5 to 1.6, and half of them late."""
SEEDS = (0, 1)
WEIGHT = "algo.co_weight=0.2"
COMMAND = [sys.executable, "-m", "embodied.cli"]


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--env-steps", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=20, help="demonstrations of each plant")
    parser.add_argument("--iterations", type=int, default=20, help="of imitation")
    parser.add_argument("--work", type=Path, default=Path("runs/cotraining"), help="folder of all runs and datasets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--extra", nargs="+", default=[], help="further words for `embodied train`, to try this command out")
    asked = parser.parse_args()
    file = asked.out / "cotraining.json"
    if asked.what == "run":
        run(file, asked)
    report(file)


def run(file: Path, asked: argparse.Namespace) -> None:
    """Make what is lacking, and evaluate all of it."""
    work: Path = asked.work
    real, simulated = (work / f"demos-{name}-{asked.episodes}" for name in ("real", "simulated"))
    for folder, plant in ((real, ["eval.randomise=true", *REAL]), (simulated, [])):
        if not folder.exists():
            words = ["task=assembly", "expert=script", f"episodes={asked.episodes}", f"out={folder}", *plant]
            subprocess.run([*COMMAND, "collect", *words], check=True)
    imitate = [*CHUNKS, "algo=sft", f"budget.iterations={asked.iterations}", "eval.every=1000", "budget.target_success=null"]
    learn = [*PPO, f"budget.env_steps={asked.env_steps}", "budget.target_success=null"]
    results = {}
    for seed in SEEDS:
        both = work / f"sft-both-{seed}"
        ways = {
            "SFT, real": (work / f"sft-real-{seed}", [*imitate, f"algo.data={real}"]),
            "SFT, real and simulated": (
                both,
                [*imitate, f"algo.data={real}", f"algo.co_data={simulated}", "algo.co_weight=1"],
            ),
            "RL in simulation": (work / f"rl-{seed}", [f"start={both}", *learn]),
            "RL-Co": (work / f"rl-co-{seed}", [f"start={both}", *learn, f"algo.co_data={real}", WEIGHT]),
        }
        for name, (folder, words) in ways.items():
            train(folder, [*words, f"seed={seed}"], asked.extra)
            results[f"{name}/{seed}"] = {
                "words": words,
                "real": evaluate(folder, seed, ["eval.randomise=true", *REAL]),
                "simulated": evaluate(folder, seed, []),
            }
            conditions = {"env_steps": asked.env_steps, "episodes": asked.episodes, "iterations": asked.iterations}
            made = {"host": describe_host(), "conditions": conditions | {"extra": asked.extra}, "runs": results}
            file.write_text(json.dumps(made, indent=1) + "\n")


def train(folder: Path, words: list[str], extra: list[str]) -> None:
    """Make a run, if there is none."""
    if not (folder / "eval.json").exists():
        subprocess.run([*COMMAND, "train", "task=assembly", f"out={folder}", *words, *extra], check=True)


def evaluate(folder: Path, seed: int, words: list[str]) -> float:
    """Success on 500 fresh starts."""
    command = [*COMMAND, "eval", f"checkpoint={folder}", "episodes=500", f"seed={1000 + seed}", *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])["success_at_end"]


def report(file: Path) -> None:
    """cotraining.md, from cotraining.json."""
    results = json.loads(file.read_text())
    conditions, host = results["conditions"], results["host"]
    about = f"""{host["date"]}, {host["cores"]} cores of {host["cpu"]}, made by `python benchmarks/cotraining.py run`. The real
    plant is `{" ".join(REAL)}`; simulation is trained with the task's usual randomisation, and evaluated nominal.
    {conditions["episodes"]} demonstrations of each plant, {conditions["iterations"]} x 200 gradient steps of imitation,
    {conditions["env_steps"] / 1e6:g} M steps of PPO. Success of 500 fresh starts by seed; the interval is Wilson's at 95 %,
    of the episodes of all seeds together."""
    lines = ["# Co-training: simulation, demonstrations of the real plant, or both", ""]
    lines += [*textwrap.wrap(" ".join(about.split()), 120), ""]
    lines += ["| way | on the real plant | mean | 95 % interval | on the simulated one |", "|---|---|---|---|---|"]
    ways: dict[str, list[dict]] = {}
    for key, one in results["runs"].items():
        ways.setdefault(key.rpartition("/")[0], []).append(one)
    for way, some in ways.items():
        real, simulated = ([one[plant] for one in some] for plant in ("real", "simulated"))
        low, high = wilson(round(sum(real) * 500), 500 * len(real))
        cells = [way, spoken(real), f"{statistics.mean(real):.1%}", f"{low:.1%} - {high:.1%}", spoken(simulated)]
        lines.append(f"| {' | '.join(cells)} |")
    (file.parent / "cotraining.md").write_text("\n".join([*lines, ""]))


def spoken(rates: list[float]) -> str:
    """Rates, one after another."""
    return ", ".join(f"{rate:.1%}" for rate in rates)


if __name__ == "__main__":
    main()
