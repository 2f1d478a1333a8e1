"""Flow policies from a few demonstrations to reinforcement: `python benchmarks/flow.py run|report ...`.

`run` records `--episodes` demonstrations of the assembly task's script, imitates those that succeeded (`algo=sft`, once for
each seed), and goes on from there in every way of `WAYS`, each for `--env-steps` steps and evaluated on 500 fresh starts, with
ordinary steps and with noisy ones. A run that the results already have is skipped: interrupt the command
and give it again. Results go to docs/results/flow.json, and from it to flow.md and flow.svg; `report` only does that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

from assembly import RESULTS
from figures import Run, curves, make_runs, take_off, train

from embodied.report.charts import Axis
from embodied.report.statistics import wilson

CHUNKS = ["policy=flow", "policy.execute=4"]
SFT = [*CHUNKS, "algo=sft", "eval.every=1000", "eval.sampled=true"]
GRADIENTS = ["algo.desired_kl=0.1", "algo.epochs=8", "algo.entropy=0"]
PPO = ["eval.every=20", "algo.critic_warmup=5", "algo.policy_learning_rate=3e-5", *GRADIENTS]
FAR = ["sampler=uniform", "task.bank.inserted=0", "task.bank.near=0", "task.bank.far=1"]
"""Starts of training as far as those of evaluation, all alike: for learners that compare episodes with each other."""
GRPO = ["eval.every=12", "sim.num_worlds=512", *FAR, "algo=grpo", "algo.learning_rate=3e-5", *GRADIENTS]
HIORS = ["eval.every=20", *FAR, "algo=hiors", "algo.sampled=false", "algo.co_data={demos}", "algo.co_weight=1"]
"""Rates and passes were chosen with Flow-SDE at .5, on seed 0."""
WAYS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "flow-SDE": (PPO, (0, 1, 2)),
    "CPS": ([*PPO, "policy.method=cps"], (0, 1, 2)),
    "flow-noise": ([*PPO, "policy.method=noise"], (0,)),
    "flow-SDE, GRPO": (GRPO, (0,)),
    "Hi-ORS": (HIORS, (0,)),
    "flow-SDE, a = .2": ([*PPO, "policy.noise=0.2"], (0,)),
    "flow-SDE, a = .8": ([*PPO, "policy.noise=0.8"], (0,)),
    "flow-SDE, one index for all worlds": ([*PPO, "policy.shared_index=true"], (0,)),
}
"""Words and seeds of each."""
EVAL = ["eval.episodes=100", "eval.sampled=true"]

ABOUT = """`python benchmarks/flow.py run`. Success is that of 500 fresh starts by the ordinary differential equation, from
random noise; `noisy steps` with the exploration of training. The interval is Wilson's at 95 %, of the episodes of all seeds
together: how well these policies are known, not how much another seed would differ."""


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--env-steps", type=int, default=2_000_000)
    parser.add_argument("--episodes", type=int, default=10, help="demonstrations")
    parser.add_argument("--iterations", type=int, default=20, help="of imitation")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/flow"), help="folder of the demonstrations and imitators")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--extra", nargs="+", default=[], help="further words for `embodied train`, to try this command out")
    asked = parser.parse_args()
    file = asked.out / "flow.json"
    if asked.what == "run":
        run(file, asked)
    report(file)


def run(file: Path, asked: argparse.Namespace) -> None:
    """Make what is lacking: demonstrations, imitators, and then the runs."""
    work: Path = asked.work
    command = [sys.executable, "-m", "embodied.cli"]
    demos = work / f"demos-{asked.episodes}"
    if not demos.exists():
        collect = [*command, "collect", "task=assembly", "expert=script", f"episodes={asked.episodes}", f"out={demos}"]
        subprocess.run(collect, check=True)
    for seed in sorted({seed for _, seeds in WAYS.values() for seed in seeds}):
        out = work / f"sft-{asked.episodes}-{seed}"
        if not (out / "eval.json").exists():
            words = [*SFT, f"algo.data={demos}", f"seed={seed}", "budget.target_success=null", *asked.extra]
            words += [f"budget.iterations={asked.iterations}", f"out={out}"]
            subprocess.run([*command, "train", "task=assembly", *words], check=True)
    wanted = {
        f"{way}/{seed}": [
            f"start={work}/sft-{asked.episodes}-{seed}",
            f"seed={seed}",
            *EVAL,
            *(word.format(demos=demos) for word in words),
        ]
        for seed in (0, 1, 2)
        for way, (words, seeds) in WAYS.items()
        if seed in seeds
    }

    def make(words: list[str], threads: int) -> Run:
        start = Path(words[0].removeprefix("start="))
        found = train("assembly", words, asked.env_steps, asked.extra, threads, also=_sampled)
        return found | {"before": {key: json.loads((start / "eval.json").read_text())[key] for key in KEPT}}

    conditions = {
        "env_steps": asked.env_steps,
        "episodes": asked.episodes,
        "iterations": asked.iterations,
        "extra": asked.extra,
    }
    make_runs(file, conditions, wanted, make, asked.jobs)


KEPT = ("success_at_end", "success_sampled", "episodes")


def _sampled(out: Path) -> Run:
    return {"success_sampled": json.loads((out / "eval.json").read_text())["success_sampled"]}


# -- report --------------------------------------------------------------------------------------------------------------


def report(file: Path) -> None:
    """flow.md and flow.svg, from flow.json."""
    results = json.loads(file.read_text())
    runs: dict[str, list[Run]] = {}
    for key, one in results["runs"].items():
        runs.setdefault(key.rpartition("/")[0], []).append(one)
    conditions, host = results["conditions"], next(iter(results["runs"].values()))["host"]
    made = f"{host['date']}, {host['cores']} cores of {host['cpu']}, made by {ABOUT}"
    imitation = {tuple(sorted(one["before"].items())) for some in runs.values() for one in some}
    before = ", ".join(f"{p:.1%}" for p in sorted(dict(items)["success_at_end"] for items in imitation))
    steps = f"{conditions['env_steps'] / 1e6:g} M steps"
    lines = [
        f"# From {conditions['episodes']} demonstrations: imitation, then {steps} of learning",
        "",
        *textwrap.wrap(made, 120),
        "",
        f"After imitation alone ({conditions['iterations']} x 200 gradient steps, a seed each): {before}.",
        "",
        "| way | seeds | success | least - most | 95 % interval | noisy steps | steps to 90 % | wall_s |",
        "|---|---|---|---|---|---|---|---|",
        *(row(way, some) for way, some in runs.items()),
        "",
        "![Success on fresh starts](flow.svg)",
        "",
    ]
    charts = [
        ("Success on fresh starts", "fresh starts", Axis("", percent=True)),
        ("Distance from the goal of the starts drawn (mm)", "difficulty of the draws", Axis("", unit=1e-3)),
    ]
    (file.parent / "flow.svg").write_text(curves(runs, charts))
    (file.parent / "flow.md").write_text("\n".join(lines))


def row(way: str, some: list[Run]) -> str:
    """A way's row of the table."""
    rates = [one["final"]["success_at_end"] or 0.0 for one in some]
    episodes = [one["final"]["episodes"] for one in some]
    low, high = wilson(round(sum(r * n for r, n in zip(rates, episodes, strict=True))), sum(episodes))
    noisy = statistics.mean(one["success_sampled"] for one in some)
    cells = [
        way,
        str(len(some)),
        f"{statistics.mean(rates):.1%}",
        f"{min(rates):.1%} - {max(rates):.1%}",
        f"{low:.1%} - {high:.1%}",
        f"{noisy:.1%}",
        ", ".join(take_off(one, 0.9) for one in some),
        ", ".join(f"{one['wall_s']:.0f}" for one in some),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
