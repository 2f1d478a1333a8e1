"""`embodied eval`: success of a trained policy on fresh starts, with its confidence interval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from embodied.algos import checkpoint
from embodied.algos.evaluate import Evaluation, evaluate
from embodied.commands.build import make_fresh_env, make_policy, make_task
from embodied.compose import Invocation
from embodied.report.statistics import wilson
from embodied.sim.fresh import FreshStarts
from embodied.spec.protocols import Policy

Result = dict[str, Any]


def run(invocation: Invocation) -> int:
    """Evaluate a checkpoint; the last line printed is the result as JSON."""
    config = invocation.config
    checkpoint.deterministic()
    task = make_task(config)
    policy = load_policy(invocation, task)
    fresh = make_fresh_env(config, task, config["episodes"], print)
    seed = config["seed"]
    result = final_evaluation(config, fresh, policy, seed)
    if "out" in {word.partition("=")[0] for word in invocation.overrides}:
        invocation.run_dir.mkdir(parents=True)
        write_eval(invocation.run_dir, config, result)
    else:
        print(json.dumps(result))
    return 0


def load_policy(invocation: Invocation, task: Any) -> Policy:
    """The policy of the invocation's checkpoint."""
    assert invocation.checkpoint is not None
    content = checkpoint.load(invocation.checkpoint)
    policy = make_policy(invocation.config, task.obs_sizes, task.spec.action.size)
    policy.load_state_dict(content["trainer"]["learner"]["policy"])
    return policy


def final_evaluation(config: dict[str, Any], fresh: FreshStarts, policy: Policy, seed: int) -> Result:
    """Evaluate, and once more with sampled actions where that is asked for; the content of eval.json."""
    result = report_evaluation(config, evaluate(fresh, policy, seed), policy, seed)
    if config["eval"]["sampled"]:
        result["success_sampled"] = evaluate(fresh, policy, seed, deterministic=False).summary()["success_at_end"]
    return result


def report_evaluation(config: dict[str, Any], evaluation: Evaluation, policy: Policy, seed: int) -> Result:
    """The content of eval.json."""
    summary = evaluation.summary()
    successes = int(summary.pop("successes"))
    episodes = int(summary["episodes"])
    figures = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in summary.items()}
    return {
        "task": config["task"]["name"],
        **figures,
        "ci95": list(wilson(successes, episodes)),
        "deterministic": True,
        "seed": seed,
        "weights_sha256": checkpoint.weights_hash(policy.state_dict()),
    }


def write_eval(folder: Path, config: dict[str, Any], result: Result) -> None:
    """Write eval.json, say the result in words, and print it as the last JSON line."""
    (folder / "eval.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    low, high = result["ci95"]
    if result["success_at_end"] is not None:
        print(
            f"{result['task']}: success {result['success_at_end']:.1%} [{low:.1%}, {high:.1%}] of {result['episodes']} "
            f"fresh starts, {result['length_mean']:.0f} steps on average, {result['invalid']} invalid"
        )
    print(json.dumps(result), flush=True)
