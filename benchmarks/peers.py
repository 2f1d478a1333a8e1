"""The same task through other learners: `python benchmarks/peers.py speed|success|profile|report` (extra `bench`).

Against rsl_rl's and Stable-Baselines3's PPO on the same worlds (task=assembly, 1024 of them, the same reset sampler), with the
same networks (ELU, 128-128), 24 steps, 4 epochs of 4 minibatches, the same gamma, lambda, clipping, entropy bonus and first
learning rate; and against Stable-Baselines3 with one process a world (SubprocVecEnv).

`speed` times a training iteration of each in turn, round after round, each in a process of its own with that library's
defaults for threads. What is not spent in stepping worlds is the learner's: acting, storing, returns and update. For it all
three see the same observation group, `policy`, in the critic as well, for Stable-Baselines3 has no other.
`success` trains each, in turn, until 90 % of 200 fresh starts succeed, or --minutes are over; evaluation is not counted.

Rewards are given to the other two in hundredths: they do not normalise returns, which reach 100 here. Stable-Baselines3 has a
constant learning rate, 3e-4 in `success`, its own default, since 1e-3 follows no KL there; and normalises by its VecNormalize.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assembly import RESULTS, describe_host
from figures import side_by_side

LEARNERS = ("embodied", "rsl_rl", "sb3")
PROCESSES = (2, 8, 32)
BATCH = 24_576  # transitions an iteration: 1024 worlds x 24 steps
TARGET, EVERY, EPISODES = 0.9, 10, 200


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "success", "profile", "report"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=10, help="success: of each training, at most")
    names = [*LEARNERS, *(f"sb3, {n} processes" for n in PROCESSES)]
    parser.add_argument("--learners", nargs="+", default=names, choices=names, help="embodied, and what it is compared with")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    asked = parser.parse_args()
    file = asked.out / "peers.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    if asked.what == "speed":
        results["speed"] = {"host": describe_host(), "rounds": asked.rounds, **speed(asked.rounds, asked.learners)}
    if asked.what == "success":
        for seed in asked.seeds:
            for name in (name for name in asked.learners if name in LEARNERS):
                with Child(name, seed, critic="critic") as child:
                    results.setdefault("success", {})[f"{name}/{seed}"] = {**child.ask("success", asked.minutes)}
                print(name, seed, results["success"][f"{name}/{seed}"], flush=True)
    if asked.what == "profile":
        profile()
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    (asked.out / "peers.md").write_text(report(results))
    if "success" in results:
        (asked.out / "peers.svg").write_text(plot(results["success"]))


def profile() -> None:
    """Print which operations an update of ours takes its time for, with one thread."""
    import torch
    from peers_learners import Embodied

    from embodied.compose import compose

    torch.set_num_threads(1)
    ours = Embodied(compose("train", ["task=assembly"]).config, 0, "critic")
    ours.iterate()
    update = ours.learner.update
    ours.learner.update = lambda: None  # a rollout, and no more
    ours.iterate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        update()
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def speed(rounds: int, names: list[str]) -> dict[str, Any]:
    """Medians over rounds of what each spends, in seconds, and of the ratios."""
    children = {name: Child(name, 0, critic="policy") for name in names}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for number in range(rounds + 1):
            for name, child in children.items():
                if number <= 3 or name in LEARNERS:  # three rounds of the slow ones are enough
                    spent = child.ask("iterate", None)
                    if number > 0:
                        times[name].append(spent)
                        print(name, {key: round(value, 3) for key, value in spent.items()}, flush=True)
    finally:
        for child in children.values():
            child.__exit__()

    def ratios(other: str, key: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(key(a) / key(b) for a, b in zip(times["embodied"], times[other], strict=False))

    medians = {
        name: {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]} for name, rows in times.items()
    }
    others = [name for name in names if name != "embodied"]
    batched = [name for name in others if name in LEARNERS]
    return {
        "seconds": medians,
        "update": {name: round(ratios(name, lambda row: row["update"]), 3) for name in batched},
        "learner": {name: round(ratios(name, learner_time), 3) for name in batched},
        "steps/s": {name: round(1 / ratios(name, lambda row: row["total"] / row["steps"]), 2) for name in others},
    }


def learner_time(row: dict[str, float]) -> float:
    """All that was not spent in stepping worlds."""
    return row["total"] - row["env"]


# -- children ------------------------------------------------------------------------------------------------------------


class Child:
    """A learner in a process of its own."""

    def __init__(self, name: str, seed: int, critic: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, seed, critic))
        self._process.start()
        self._name = name

    def ask(self, what: str, argument: Any) -> dict[str, float]:
        """Have it done, and wait."""
        self._pipe.send((what, argument))
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self._name} failed: see above") from None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # which ends it
        self._process.join()


def serve(pipe: Any, name: str, seed: int, critic: str) -> None:
    """The child's side."""
    if name == "embodied":
        # as the console script does, before torch is imported
        os.environ.update(MKL_DYNAMIC="FALSE", OMP_WAIT_POLICY="PASSIVE")
    from embodied.compose import compose

    overrides = ["task=assembly", f"seed={seed}"]
    config = compose("train", overrides).config
    from peers_learners import Embodied, RslRl, StableBaselines, StableBaselinesProcesses

    if name not in LEARNERS:
        config["sim"]["num_worlds"] = int(name.split()[1])
    kinds = {"embodied": Embodied, "rsl_rl": RslRl, "sb3": StableBaselines}
    learner = kinds.get(name, StableBaselinesProcesses)(config, seed, critic)
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            learner.close()
            return
        pipe.send(learner.iterate() if what == "iterate" else until_good(learner, config, seed, argument))


def until_good(learner: Any, config: dict[str, Any], seed: int, minutes: float) -> dict[str, Any]:
    """Train until `TARGET` of fresh starts succeed: seconds without evaluation, steps, and the curve."""
    from embodied.algos.evaluate import evaluate
    from embodied.commands.build import make_fresh_env, make_task
    from embodied.commands.train import eval_seed

    fresh = make_fresh_env(config, make_task(config), EPISODES, print)
    spent, steps, curve, iteration = 0.0, 0, [], 0
    while spent < 60 * minutes:
        began = time.perf_counter()
        steps += int(learner.iterate()["steps"])
        spent += time.perf_counter() - began
        iteration += 1
        if iteration % EVERY == 0:
            success = evaluate(fresh, learner.policy(), eval_seed(seed, 1, iteration)).summary()["success_at_end"]
            curve.append([steps, round(spent, 1), success])
            if success >= TARGET:
                return {"reached": True, "seconds": round(spent, 1), "env_steps": steps, "curve": curve}
    return {"reached": False, "seconds": round(spent, 1), "env_steps": steps, "curve": curve}


# -- report --------------------------------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    """peers.md, from peers.json."""
    lines = ["# Other learners on the same task", "", *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(), ""]
    if "speed" in results:
        found = results["speed"]
        host = found["host"]
        lines += [
            "## Speed",
            "",
            f"{host['date']}, {host['cores']} cores of {host['cpu']}; medians of {found['rounds']} rounds, of 3 where each",
            "world is a process; seconds an iteration of 24,576 steps. Ratios are medians of those of each round.",
            "",
            "| learner | in all | worlds | learner | its update | our learner / it | our update / its | our steps/s / its |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, row in found["seconds"].items():
            ratio = (
                "{:.2f} | {:.2f}".format(found["learner"][name], found["update"][name]) if name in found["update"] else "- | -"
            )
            faster = f"{found['steps/s'][name]:.2f}" if name in found["steps/s"] else "-"
            scale = BATCH / row["steps"]
            cells = [scale * x for x in (row["total"], row["env"], learner_time(row), row["update"])]
            lines.append(f"| {name} | {' | '.join(f'{x:.3f}' for x in cells)} | {ratio} | {faster} |")
        lines.append("")
    if "success" in results:
        lines += [f"## Until {TARGET:.0%} of {EPISODES} fresh starts succeed", ""]
        lines += ["| learner | seed | reached | seconds | environment steps | last success |", "|---|---|---|---|---|---|"]
        for key, row in results["success"].items():
            name, seed = key.split("/")
            reached, last = "yes" if row["reached"] else "no", row["curve"][-1][2] if row["curve"] else 0.0
            lines.append(f"| {name} | {seed} | {reached} | {row['seconds']:.0f} | {row['env_steps']:,} | {last:.1%} |")
        lines += ["", "![Success against time and against steps](peers.svg)", ""]
    return "\n".join(lines)


def plot(runs: dict[str, Any]) -> str:
    """Success against seconds and against environment steps, of each learner's first seed."""
    from embodied.report.charts import Axis, Line, line_chart

    curves = {key.split("/")[0]: row["curve"] for key, row in reversed(runs.items())}
    names = [name for name in LEARNERS if name in curves]
    charts = []
    for title, column in (
        ("Success on fresh starts against seconds, evaluation left out", 1),
        ("against environment steps", 0),
    ):
        lines = [Line(name, [(row[column], row[2]) for row in curves[name]], marked=True) for name in names]
        charts.append(line_chart(title, lines, Axis("environment steps" if column == 0 else "seconds"), Axis("", percent=True)))
    return side_by_side(charts, names)


if __name__ == "__main__":
    main()
