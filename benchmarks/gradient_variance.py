"""How much the draw of the noisy denoising step adds to the policy gradient: `python benchmarks/gradient_variance.py <run>`.

Flow-SDE and CPS make one step of a chain noisy, and learn from that one. It is drawn for each world, or once for all that are
asked at a time (`policy.shared_index=true`, as RLinf does). Both estimate the same gradient from the same number of decisions:
this takes the estimates of the run's policy in worlds of its task again and again, in both ways from the same states of the
worlds, and compares their variances. A critic learns of the policy first, for generalised advantages; the policy stays as it
is. Results go to docs/results/gradient_variance.json, and from it to gradient_variance.md. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import textwrap
from pathlib import Path

import numpy as np
import torch
from assembly import RESULTS, describe_host
from figures import Run
from torch import Tensor

from embodied.algos import checkpoint
from embodied.algos.chunks import ChunkQueue
from embodied.algos.ppo import PPO, PPOOptions
from embodied.algos.returns import chunk_gae, normalise
from embodied.algos.rollout import Rollout
from embodied.algos.trainer import Trainer
from embodied.commands.build import make_task, make_training_env
from embodied.commands.evaluate import load_policy
from embodied.compose import compose
from embodied.policies.flow import FlowPolicy
from embodied.sim.env import WorldsEnv
from embodied.spec.protocols import Obs

STEPS, MIXING = 24, 40
"""Of a rollout; before each, so that worlds are at all stages of their episodes."""
WARMUP = 10  # updates of the critic alone
EACH, SHARED = "each world its own", "shared"
WAYS = {EACH: False, SHARED: True}
RESAMPLES = 4000


def main() -> None:
    """Measure, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run with policy=flow and policy.method=sde or cps")
    parser.add_argument("--worlds", type=int, nargs="+", default=[16, 64, 256], help="sizes of a batch")
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sorted(asked.worlds)
    invocation = compose("eval", [f"checkpoint={asked.run}", f"sim.num_worlds={sizes[-1]}", "sim.threads=1"])
    config = invocation.config | {"sampler": {"name": "uniform"}}
    if config["policy"]["name"] != "flow" or config["policy"]["method"] == "noise":
        raise SystemExit(f"{asked.run}: expected a run with policy=flow and policy.method=sde or cps")
    task = make_task(config)
    policy = load_policy(invocation, task)
    assert isinstance(policy, FlowPolicy)
    env = make_training_env(config, task, print)
    learner = learn_critic(env, policy, asked.seed)
    gradients, about = measure(env, learner, sizes, asked.batches, asked.seed)
    results = {
        "host": describe_host(),
        "policy": {
            **{name: config["policy"][name] for name in ("method", "noise", "steps", "horizon", "execute")},
            "weights_sha256": checkpoint.weights_hash(policy.state_dict()),
            "parameters": gradients[EACH].shape[-1],
        },
        "conditions": {"task": config["task"]["name"], "batches": asked.batches, "steps": STEPS, "seed": asked.seed},
        "sizes": [compare({way: g[i] for way, g in gradients.items()}, one, asked.seed) for i, one in enumerate(about)],
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "gradient_variance.json").write_text(json.dumps(results, indent=1) + "\n")
    page = report(results)
    (asked.out / "gradient_variance.md").write_text(page)
    print(page)


# -- gradients -----------------------------------------------------------------------------------------------------------


def learn_critic(env: WorldsEnv, policy: FlowPolicy, seed: int) -> PPO:
    """A learner whose critic knows the policy, which has not changed."""
    options = PPOOptions(num_steps=STEPS, critic_warmup=WARMUP, entropy=0.0)
    learner = PPO(options, policy, env.obs_sizes, env.action_size, env.num_worlds, env.device, seed)
    before = checkpoint.weights_hash(policy.state_dict())
    trainer = Trainer(env, learner)
    trainer.reset(seed)
    for _ in range(WARMUP):
        row = trainer.iterate()
    assert checkpoint.weights_hash(policy.state_dict()) == before
    print(f"critic: explained variance {row['loss/explained_variance']:.2f} after {trainer.env_steps} steps", flush=True)
    return learner


def measure(env: WorldsEnv, learner: PPO, sizes: list[int], batches: int, seed: int) -> tuple[dict[str, Tensor], list[Run]]:
    """Gradients [sizes, batches, K, P] in each way, of the first so many worlds, in parts by their noisy step; and by size what
    batches hold.
    """
    policy, found = learner.policy, {way: [] for way in WAYS}
    rollout = Rollout(STEPS, env.num_worlds, env.obs_sizes, policy.trace_like, env.device)
    counts = []
    for batch in range(batches):
        policy.options.shared_index = False
        policy.seed(2 * (seed + 1) * 10**6 + 2 * batch)
        obs = advance(env, learner, env.reset((seed + 1) * 10**6 + batch), MIXING)
        start = copy.deepcopy(env.state_dict())
        for way, shared in WAYS.items():
            policy.options.shared_index = shared
            policy.seed(2 * (seed + 1) * 10**6 + 2 * batch + 1)
            advance(env, learner, obs, STEPS, rollout)
            taken = [gradient(learner, rollout, size) for size in sizes]
            found[way].append(torch.stack([parts for parts, _ in taken]))
            counts.append([(float(asked.sum()), pairs(asked)) for _, asked in taken])
            obs = env.load_state_dict(start)
        print(f"batch {batch + 1} of {batches}", end="\r", flush=True)
    means = np.mean(counts, 0).tolist()
    about = [{"worlds": size, "decisions": n, "same_draw": same} for size, (n, same) in zip(sizes, means, strict=True)]
    return {way: torch.stack(rows, 1) for way, rows in found.items()}, about


@torch.no_grad()
def advance(env: WorldsEnv, learner: PPO, obs: Obs, steps: int, rollout: Rollout | None = None) -> Obs:
    """Take steps by new chunks in all worlds, into a rollout if there is one; what is seen then."""
    queue = ChunkQueue(learner.policy, env.num_worlds, env.action_size, env.device)
    if rollout is not None:
        rollout.clear()
    for _ in range(steps):
        decision = queue.next(obs)
        if rollout is not None:
            rollout.begin(obs, decision, learner.critic(obs))
        obs, reward, terminated, truncated, info = env.step(decision.action)
        ended = terminated | truncated | info["invalid"]
        if rollout is not None:
            rollout.finish(reward, learner.critic(info["final_obs"]), terminated, ended, ~info["invalid"])
        queue.cut(ended)
    return obs


def gradient(learner: PPO, rollout: Rollout, worlds: int) -> tuple[Tensor, Tensor]:
    """PPO's policy gradient before its first step, where every ratio is 1, of the first so many worlds: a mean over decisions,
    in parts [K, P] of those with each noisy step; and how many were made in each step of the rollout [T].
    """
    options, kept = learner.options, slice(0, worlds)
    names = ("reward", "value", "next_value", "terminated", "ended", "decided")
    steps = [getattr(rollout, name)[:, kept] for name in names]
    advantage, valid = chunk_gae(*steps, options.gamma, options.lam, rollout.valid[:, kept])
    weight = normalise(advantage, valid) / valid.sum()
    parts, parameters = [], list(learner.policy.parameters())
    for k in range(learner.policy.choices):
        some = valid & (rollout.trace["index"][:, kept] == k)
        trace = {name: x[:, kept][some] for name, x in rollout.trace.items()}
        score = learner.policy.evaluate({"policy": rollout.obs["policy"][:, kept][some]}, trace)
        gradients = torch.autograd.grad(-(weight[some] * score.log_prob).sum(), parameters)
        parts.append(torch.cat([x.flatten() for x in gradients]))
    return torch.stack(parts), valid.sum(1)


def pairs(asked: Tensor) -> float:
    """Pairs of decisions that have one draw where a step shares it, as a share of M^2; `asked`: decisions by step [T]."""
    return float((asked * (asked - 1)).sum() / asked.sum() ** 2)


# -- variances -----------------------------------------------------------------------------------------------------------


def compare(gradients: dict[str, Tensor], about: Run, seed: int) -> Run:
    """Of gradients [B, K, P] of both ways.

    `trace` is that of their covariance; `ratio` that of shared draws over that of each world's. `expected` is what this should
    be: two decisions of one draw go together by the squared distance between what is expected with each noisy step and what is
    expected of all, which is estimated of both ways from products of different batches. Intervals are those of percentiles
    over resampled batches, which are pairs, and of the jackknife over batches.
    """
    each, shared = (x.sum(1) for x in gradients.values())
    batches, choices = gradients[EACH].shape[:2]
    grams = [(x @ x.T).double().numpy() for x in (each, shared)]
    once = np.ones((1, batches))
    traces = [float(trace(gram, once)[0]) for gram in grams]
    drawn = np.random.default_rng(seed).multinomial(batches, np.full(batches, 1 / batches), RESAMPLES).astype(float)
    low, high = np.quantile(trace(grams[1], drawn) / trace(grams[0], drawn), [0.025, 0.975])
    parts = torch.stack(list(gradients.values())).mean(0)
    signals = squared_means((parts.sum(1) @ parts.sum(1).T).double().numpy())
    between = -signals
    for k in range(choices):
        # each is expected in one decision of K
        between = between + choices * squared_means((parts[:, k] @ parts[:, k].T).double().numpy())
    excess = 1.0 + about["same_draw"] * between / traces[0]
    return {
        **about,
        "trace": dict(zip(gradients, traces, strict=True)),
        "ratio": traces[1] / traces[0],
        "ci95": [float(low), float(high)],
        "expected": interval(excess),
        "signal": interval(signals),
    }


def squared_means(gram: np.ndarray) -> np.ndarray:
    """Squared norm of the mean that B vectors with this Gram matrix are drawn about, without bias, by products of different
    ones: of all vectors, and without each of them [1 + B].
    """
    count, different = len(gram), gram - np.diag(gram.diagonal())
    every, without = different.sum(), different.sum() - 2 * different.sum(1)
    return np.concatenate([[every / (count * (count - 1))], without / ((count - 1) * (count - 2))])


def interval(values: np.ndarray) -> list[float]:
    """The first of values, and 1.96 standard errors about it, by jackknife over the others."""
    count = len(values) - 1
    error = math.sqrt((count - 1) * np.var(values[1:]))
    return [float(values[0]), float(values[0] - 1.96 * error), float(values[0] + 1.96 * error)]


def trace(gram: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Trace of the sample covariance of vectors with this Gram matrix [B, B], taken as often as weights [R, B] say: [R]."""
    count = weights.sum(1)
    return (weights @ gram.diagonal() - np.einsum("rb,bc,rc->r", weights, gram, weights) / count) / (count - 1)


def report(results: Run) -> str:
    """The page."""
    policy, asked, host = results["policy"], results["conditions"], results["host"]
    signal, low, high = results["sizes"][-1]["signal"]
    done = f"chunks of {policy['horizon']} of which {policy['execute']} are executed"
    about = (
        f"{host['date']}, {host['cores']} cores of {host['cpu']}, made by `python benchmarks/gradient_variance.py <run>`: task="
        f"{asked['task']}, policy.method={policy['method']} with noise {policy['noise']}, {policy['steps']} denoising steps, "
        f"{done}. A batch is {asked['steps']} steps of so many worlds; {asked['batches']} independent batches, both ways from "
        "the same states of the worlds. Variance is the trace of the covariance of PPO's first gradient; the squared norm of "
        f"its mean is {signal:.2g} ({low:.2g} to {high:.2g}), by products of different batches. Intervals are of 95 %, over "
        "batches. What the ratio should be follows from how far what is expected with each noisy step lies from "
        "what is expected of all: by so much decisions of one draw are off together."
    )
    rows = []
    for one in results["sizes"]:
        traces = [f"{one['trace'][way]:.0f}" for way in WAYS]
        ratio = f"{one['ratio']:.2f} ({one['ci95'][0]:.2f} - {one['ci95'][1]:.2f})"
        expected, least, most = one["expected"]
        should = f"{expected:.3f} ({least:.3f} - {most:.3f})"
        rows.append(f"| {one['worlds']} | {one['decisions']:.0f} | {' | '.join(traces)} | {ratio} | {should} |")
    lines = [
        "# The noisy denoising step: drawn for each world, or shared",
        "",
        *textwrap.wrap(about, 120),
        "",
        "| worlds | decisions | variance, each world its own draw | a shared draw | ratio | what it should be |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
