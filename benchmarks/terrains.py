"""Reset samplers compared on terrains at equal environment steps: `python benchmarks/terrains.py run|report ...`.

`run` trains the task `traverse`, reduced to five kinds of terrain in six levels, with every sampler and seed, `--jobs` runs at
a time, each in a process of its own with its share of the cores. A run that the results already have is skipped: interrupt
the command and give it again. Results go to docs/results/terrains.json, and from it to terrains.md and terrains.svg;
`report` only does that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from pathlib import Path

import torch
from assembly import RESULTS
from figures import Run, curves, make_runs, on_the_way, take_off, train

from embodied.algos import checkpoint
from embodied.algos.evaluate import evaluate
from embodied.commands.build import make_fresh_env, make_policy, make_task
from embodied.report.charts import Axis
from embodied.report.statistics import wilson

KINDS, LEVELS = ("flat", "stairs", "gaps", "stepping_stones", "boxes"), (0, 1, 2, 3, 4, 5)
TASK = [
    f"task.terrain=[{','.join(KINDS)}]",
    f"task.levels=[{','.join(map(str, LEVELS))}]",
    "task.bank.size=3840",  # 64 in each of 60 tiles
    # episodes are long, and physics on a height field is slow
    "eval.every=20",
    "eval.episodes=100",
    "episodes=300",
]
SAMPLERS = {"success_guided": "locomotion", "uniform": "uniform", "linear": "linear", "plr": "plr"}
"""What `sampler=` is given: success_guided with the locomotion preset of its paper, the others with their defaults."""
SEEDS = (0, 1)
EVAL_SEED = 20261130  # of the starts that success by kind and level is taken on, the same for all runs

ABOUT = """`python benchmarks/terrains.py run`. Success is that of the deterministic policy on fresh starts in tiles that no
training saw. Every run has the same map, bank, learner and number of environment steps; success_guided has its paper's
locomotion preset, the others their defaults. The interval is Wilson's at 95 %, of the episodes of all seeds together: how well
these policies are known, not how much another seed would differ."""


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--env-steps", type=int, default=1_500_000)
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--episodes", type=int, default=10, help="on each kind and level in the last evaluation")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--extra", nargs="+", default=[], help="further words for `embodied train`, to try this command out")
    asked = parser.parse_args()
    file = asked.out / "terrains.json"
    if asked.what == "run":
        run(file, asked.env_steps, asked.samplers, asked.episodes, asked.extra, asked.jobs)
    report(file)


def run(file: Path, env_steps: int, samplers: list[str], episodes: int, extra: list[str], jobs: int) -> None:
    """Make the runs that the results lack, seeds last: a comparison of all samplers comes first."""
    wanted = {
        f"{sampler}/{seed}": [f"sampler={SAMPLERS[sampler]}", f"seed={seed}", *TASK] for seed in SEEDS for sampler in samplers
    }

    def make(words: list[str], threads: int) -> Run:
        return train("traverse", words, env_steps, extra, threads, lambda out: by_tile(out, episodes))

    # the last evaluations run here, as many at a time as runs
    torch.set_num_threads(1)
    make_runs(file, {"env_steps": env_steps, "episodes": episodes, "extra": extra}, wanted, make, jobs)


def by_tile(out: Path, episodes: int) -> Run:
    """Success of a run's last policy by kind and level, on `episodes` fresh starts each."""
    content = checkpoint.load(out / "checkpoints" / "latest.pt")
    config = content["config"]
    task = make_task(config)
    policy = make_policy(config, task.obs_sizes, task.spec.action.size)
    policy.load_state_dict(content["trainer"]["learner"]["policy"])
    kinds, levels = task.map.kinds, task.map.levels
    fresh = make_fresh_env(config, task, len(kinds) * len(levels) * episodes, print)
    # `evaluate` starts the same episodes from the same seed
    fresh.reset(EVAL_SEED)
    kind, level, _ = task.tile_of(fresh.engine.read("qpos")[:, :2])
    success = evaluate(fresh, policy, EVAL_SEED).success.double()
    table = {
        name: [float(success[(kind == i) & (level == number)].mean()) for number in levels] for i, name in enumerate(kinds)
    }
    return {"success by kind and level": table}


# -- report --------------------------------------------------------------------------------------------------------------


def report(file: Path) -> None:
    """terrains.md and terrains.svg, from terrains.json."""
    results = json.loads(file.read_text())
    runs: dict[str, list[Run]] = {}
    for key, one in results["runs"].items():
        runs.setdefault(key.split("/")[0], []).append(one)
    conditions, host = results["conditions"], next(iter(results["runs"].values()))["host"]
    made = f"{host['date']}, {host['cores']} cores of {host['cpu']}, made by {ABOUT}"
    lines = [
        f"# Reset samplers on terrains at {conditions['env_steps'] / 1e6:g} M environment steps each",
        "",
        *textwrap.wrap(made, 120),
        "",
        f"`embodied train task=traverse {' '.join([*TASK, *conditions['extra']])}`.",
        "",
        *summary(runs),
        "",
        "![Success on fresh starts, and where the draws go](terrains.svg)",
        "",
        *by_kind(runs),
        "",
        *textwrap.wrap(f"Success by kind and level, {conditions['episodes']} fresh starts each, means over seeds:", 120),
        "",
        *by_level(runs),
        "",
    ]
    levels = ("Mean level of the starts drawn", "difficulty of the draws", Axis(""))
    charts = [("Success on fresh starts", "fresh starts", Axis("", percent=True)), levels]
    (file.parent / "terrains.svg").write_text(curves(runs, charts))
    (file.parent / "terrains.md").write_text("\n".join(lines))


def summary(runs: dict[str, list[Run]]) -> list[str]:
    """A row for each sampler."""
    lines = [
        "| sampler | seeds | success | least - most | 95 % interval | at 1/3 | at 2/3 of the steps | steps to 50 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sampler, some in runs.items():
        rates = [one["final"]["success_at_end"] or 0.0 for one in some]
        episodes = [one["final"]["episodes"] for one in some]
        low, high = wilson(round(sum(r * n for r, n in zip(rates, episodes, strict=True))), sum(episodes))
        lines.append(
            f"| {sampler} | {len(some)} | {statistics.mean(rates):.1%} | {min(rates):.1%} - {max(rates):.1%} | "
            f"{low:.1%} - {high:.1%} | {on_the_way(some, 1 / 3)} | {on_the_way(some, 2 / 3)} | "
            f"{', '.join(map(take_off, some))} |"
        )
    return lines


def by_kind(runs: dict[str, list[Run]]) -> list[str]:
    """Success on all levels of each kind, a row for each sampler."""
    tables = {sampler: mean_table(some) for sampler, some in runs.items()}
    kinds = list(next(iter(tables.values())))
    lines = [f"| sampler | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for sampler, table in tables.items():
        lines.append(f"| {sampler} | {' | '.join(f'{statistics.mean(table[kind]):.1%}' for kind in kinds)} |")
    return lines


def by_level(runs: dict[str, list[Run]]) -> list[str]:
    """Success on each level of each kind."""
    lines = [f"| kind | sampler | {' | '.join(f'level {level}' for level in LEVELS)} |", "|---" * (2 + len(LEVELS)) + "|"]
    tables = {sampler: mean_table(some) for sampler, some in runs.items()}
    for kind in next(iter(tables.values())):
        lines += [f"| {kind} | {name} | {' | '.join(f'{p:.0%}' for p in table[kind])} |" for name, table in tables.items()]
    return lines


def mean_table(some: list[Run]) -> dict[str, list[float]]:
    """Success by kind and level, averaged over runs."""
    tables = [one["success by kind and level"] for one in some]
    return {kind: [statistics.mean(values) for values in zip(*(t[kind] for t in tables), strict=True)] for kind in tables[0]}


if __name__ == "__main__":
    main()
