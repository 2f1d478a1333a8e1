"""`embodied train`: learn until a bound is reached, evaluate, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from embodied.algos import checkpoint
from embodied.algos.evaluate import evaluate
from embodied.algos.trainer import Trainer
from embodied.commands.build import make_fresh_env, make_policy, make_task, make_training_env, make_trials
from embodied.commands.datasets import check_datasets
from embodied.commands.evaluate import final_evaluation, write_eval
from embodied.compose import Invocation, options, to_yaml
from embodied.config import BudgetOptions, EvalOptions
from embodied.report.console import Progress
from embodied.report.environment import describe
from embodied.report.metrics import MetricsLog
from embodied.report.page import write_page
from embodied.runs import locate
from embodied.spec import registry
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Policy, ScoringSampler, TryingSampler

FINAL_SEED, PERIODIC_SEED = 1, 2  # streams of evaluation starts, apart from each other and from training


def eval_seed(seed: int, stream: int, number: int = 0) -> int:
    """The seed of an evaluation's starts: a stream of its own for each run seed, purpose and iteration."""
    return (seed * 1_000_003 + stream * 7_919 + number * 104_729) % 2**62 + 1


@dataclass
class Run:
    """A run under way: what was built, where it is kept, how it stands."""

    invocation: Invocation
    trainer: Trainer
    policy: Policy
    best: float = -1.0

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.invocation.run_dir

    def save(self, name: str = "latest") -> None:
        """Write a complete checkpoint."""
        content = {"trainer": self.trainer.state_dict(), "best": self.best, "config": self.invocation.config}
        checkpoint.save(self.folder / "checkpoints" / f"{name}.pt", content)


def run(invocation: Invocation) -> int:
    """Train, then evaluate; returns the exit code."""
    config = invocation.config
    checkpoint.deterministic()
    resumed = None if invocation.resume is None else checkpoint.load(invocation.resume)
    task = make_task(config)
    trainer, policy = build(config, task, print)
    state = Run(invocation, trainer, policy)
    if resumed is None:
        if config["start"] is not None:
            begin_with(policy, config["start"])
        trainer.reset(config["seed"])
        _begin_folder(invocation)
    else:
        for difference in checkpoint.differences(resumed):
            print(f"warning: {difference}: continuing will not be bit-exact", flush=True)
        trainer.load_state_dict(resumed["trainer"])
        state.best = resumed["best"]
    reason = _learn(state, task, None if resumed is None else trainer.iteration)
    if reason == "interrupted":
        print(f"interrupted at iteration {trainer.iteration}; continue with: embodied train resume={invocation.run_dir}")
        return 130
    print(f"stopped: {reason}", flush=True)
    fresh = make_fresh_env(config, task, config["episodes"], print)
    seed = eval_seed(config["seed"], FINAL_SEED)
    write_eval(invocation.run_dir, config, final_evaluation(config, fresh, policy, seed))
    print(f"report: {write_page(invocation.run_dir)}")
    return 0


def begin_with(policy: Policy, start: str) -> None:
    """Give a policy the weights and statistics of a run's.

    Raises:
        BadInput: they are of another policy.
    """
    theirs = checkpoint.load(locate("start", start))["trainer"]["learner"]["policy"]
    mine = policy.state_dict()
    # what decides the noise of exploration may be new
    lacking = [name for name in mine if name not in theirs and not name.startswith("noise_network.")]
    other = [name for name, x in theirs.items() if name not in mine or mine[name].shape != x.shape]
    if lacking or other:
        raise BadInput(
            f"start={start}: its policy is built otherwise ({', '.join((lacking + other)[:3])}): give the policy, task and "
            "robot options that it was trained with"
        )
    policy.load_state_dict(mine | theirs)


def build(config: dict[str, Any], task: Any, say: Callable[[str], None]) -> tuple[Trainer, Policy]:
    """The training worlds, policy and learner of a configuration."""
    check_datasets(config, task.spec)
    env = make_training_env(config, task, say)
    policy = make_policy(config, env.obs_sizes, env.action_size)
    policy.begin_at(task.rest_action)
    learner = registry.find("algo", config["algo"]["name"]).build(
        options("algo", config),
        policy,
        env.obs_sizes,
        env.action_size,
        env.num_worlds,
        config["device"],
        config["seed"],
        env.mirror,
        env.max_episode_steps,
    )
    if isinstance(env.sampler, ScoringSampler) and not hasattr(learner, "advantage"):
        name, algo = config["sampler"]["name"], config["algo"]["name"]
        raise BadInput(f"sampler={name} scores configurations by advantages, which algo={algo} has not: use algo=ppo")
    if isinstance(env.sampler, TryingSampler):
        env.sampler.evaluate = make_trials(config, task, env.bank, policy, say)
    return Trainer(env, learner), policy


def _begin_folder(invocation: Invocation) -> None:
    folder = invocation.run_dir
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BadInput(f"out={folder} exists: continue it with resume={folder}, or give another folder as out=") from None
    (folder / "config.yaml").write_text(to_yaml(invocation.config), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(describe(), indent=2), encoding="utf-8")
    print(f"run: {folder}", flush=True)


def _learn(run: Run, task: Any, resume_iteration: int | None) -> str:
    """Iterate until a bound is reached; returns which."""
    config = run.invocation.config
    budget: BudgetOptions = options("budget", config)
    periodic: EvalOptions = options("eval", config)
    started = psutil.Process().create_time()
    trainer = run.trainer
    fresh = make_fresh_env(config, task, periodic.episodes, print)
    progress = Progress(budget.iterations, budget.env_steps, budget.minutes, budget.target_success)
    with MetricsLog(run.folder, resume_iteration) as log, progress, _deferred_interrupt() as interrupted:
        if resume_iteration is None:
            run.save()
        trainer.env.on_warning(progress.message)  # type: ignore[attr-defined]  # a WorldsEnv, by `build`
        while True:
            reason = _bound_reached(budget, trainer, time.time() - started)
            if reason is None and interrupted():
                reason = "interrupted"
            if reason is not None:
                run.save()
                return reason
            row = trainer.iterate()
            success = None
            if trainer.iteration % periodic.every == 0:
                before = time.perf_counter()
                result = evaluate(fresh, run.policy, eval_seed(config["seed"], PERIODIC_SEED, trainer.iteration))
                summary = result.summary()
                success = float(summary["success_at_end"])
                row.update({"eval/success": success, "eval/length": summary["length_mean"]})
                row["eval/eval_s"] = time.perf_counter() - before
            row["wall_s"] = time.time() - started
            log.write(row)
            progress.update(row)
            if success is not None and success > run.best:
                run.best = success
                run.save("best")
            if trainer.iteration % config["save"]["every"] == 0:
                run.save()
            if success is not None and budget.target_success is not None and success >= budget.target_success:
                run.save()
                return f"target success {budget.target_success:.0%} reached at iteration {trainer.iteration}"


def _bound_reached(budget: BudgetOptions, trainer: Trainer, wall_s: float) -> str | None:
    if budget.iterations is not None and trainer.iteration >= budget.iterations:
        return f"budget.iterations={budget.iterations}"
    if budget.env_steps is not None and trainer.env_steps >= budget.env_steps:
        return f"budget.env_steps={budget.env_steps}"
    if budget.minutes is not None and wall_s >= 60 * budget.minutes:
        return f"budget.minutes={budget.minutes}"
    return None


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C once: finish the iteration and save; twice: stop at once (the last checkpoint stands)."""
    import signal

    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
