"""Proximal policy optimisation (Schulman et al. 2017) for many parallel worlds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algos.chunks import ChunkQueue
from embodied.algos.cotraining import co_training
from embodied.algos.returns import chunk_gae, explained_variance, gae, normalise
from embodied.algos.rollout import Rollout
from embodied.algos.surrogate import Surrogate, SurrogateOptions
from embodied.algos.threads import one_thread
from embodied.policies.gaussian import Critic
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs, Policy, Symmetry
from embodied.spec.ranks import rank_index
from embodied.spec.registry import register


@dataclass
class PPOOptions(SurrogateOptions):
    """Proximal policy optimisation."""

    num_steps: int = 24  # steps of every world between updates
    gamma: float = 0.99  # discount a step
    lam: float = 0.95  # of generalised advantage estimation
    policy_learning_rate: float | None = None  # the policy's first; null: that of algo.learning_rate, which the critic has
    value_coef: float = 1.0  # weight of the critic's loss
    critic_warmup: int = 0  # updates in which the critic learns alone: for a policy that has learned before
    symmetry: bool = False  # learn of every second transition what it looks like in the task's mirror
    critic_hidden: list[int] = field(default_factory=lambda: [128, 128])


@register("algo", "ppo", PPOOptions)
class PPO:
    """Proximal policy optimisation with generalised advantages, an asymmetric critic and a rate that follows the KL.

    What a policy decides may be a chunk of actions: it is then learned from as one action with the reward of its executed
    steps. Chunks are cut by the end of an episode, and by an update. Time limits are bootstrapped from V(final observation).
    Normalisers change only after an update, with the rollout's observations, so that the first ratio is exactly 1. Over
    several ranks gradients are averaged and statistics merged.

    Args:
        options: see `PPOOptions`.
        policy: moved to `device`; its action noise is seeded here.
        obs_sizes: width of each observation group; `policy` and `critic` are read.
        action_size: A.
        num_worlds: N, of this rank.
        device: where everything lives.
        seed: of action noise, critic weights and permutations; every rank gets the same and draws its own noise.
        mirror: what the task looks like in the mirror (Mittal et al. 2024, arXiv 2403.04359), for `symmetry`.
        max_episode_steps: not used.

    Attributes:
        advantage: of the steps of the last update [T, N], in units of reward; T is 0 before the first.

    Raises:
        BadInput: see `validate`.
    """

    def __init__(
        self,
        options: PPOOptions,
        policy: Policy,
        obs_sizes: Mapping[str, int],
        action_size: int,
        num_worlds: int,
        device: torch.device | str,
        seed: int,
        mirror: Symmetry | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        self.validate(options, num_worlds)
        if options.symmetry and (mirror is None or policy.horizon > 1):
            what = "the task has no symmetry to learn by" if mirror is None else "a policy of chunks is not mirrored"
            raise BadInput(f"algo.symmetry=true: {what}; use algo.symmetry=false")
        self.options = options
        self.steps_per_iteration = options.num_steps
        self.device = torch.device(device)
        noise_seed, permutation_seed, critic_seed, co_seed = (
            int(s) for s in np.random.SeedSequence([seed, rank_index()]).generate_state(4)
        )
        self.policy = policy.to(self.device)
        self.policy.seed(noise_seed)
        draw = torch.Generator().manual_seed(critic_seed)
        self.critic = Critic(obs_sizes, options.critic_hidden, generator=draw).to(self.device)
        self.rollout = Rollout(
            options.num_steps,
            num_worlds,
            {group: obs_sizes[group] for group in ("policy", "critic")},
            policy.trace_like,
            self.device,
        )
        self.queue = ChunkQueue(self.policy, num_worlds, action_size, self.device)
        self._value: Tensor | None = None  # V [N] of the present observation, where the weights have not changed since
        self.advantage = torch.zeros(0, num_worlds, device=self.device)
        self.surrogate = Surrogate(
            options,
            self.policy,
            self.critic,
            (options.policy_learning_rate or options.learning_rate, options.learning_rate),
            torch.Generator(self.device).manual_seed(permutation_seed),
            mirror if options.symmetry else None,
            co_training(options, self.policy, obs_sizes, action_size, self.device, co_seed),
            options.value_coef,
            options.critic_warmup,
        )

    @staticmethod
    def validate(options: PPOOptions, num_worlds: int) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an option outside its range, or a minibatch larger than the batch.
        """
        options.refuse(
            [
                ("num_steps", options.num_steps >= 1, "at least 1"),
                ("gamma", 0 <= options.gamma < 1, "in [0, 1)"),
                ("lam", 0 <= options.lam <= 1, "in [0, 1]"),
                options.check_rate("policy_learning_rate"),
                ("value_coef", options.value_coef > 0, "above 0"),
                ("critic_warmup", options.critic_warmup >= 0, "0 or more"),
                ("critic_hidden", all(width >= 1 for width in options.critic_hidden), "widths of at least 1"),
                *options.checks(options.num_steps * num_worlds, f"{options.num_steps} steps of {num_worlds} worlds"),
            ]
        )

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """Sampled action [N, A] clipped to [-1, 1]; what is learned from is the one before clipping."""
        decision = self.queue.next(obs)
        if self._value is None:
            self._value = self.critic(obs)
        self.rollout.begin(obs, decision, self._value)
        return decision.action.clamp(-1, 1)

    @torch.no_grad()
    def observe(self, obs: Obs, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Store what came of the last `act`; the arguments are what `VecEnv.step` returned."""
        invalid = info["invalid"]
        ended = terminated | truncated | invalid
        next_value = self.critic(info["final_obs"])
        self.rollout.finish(reward, next_value, terminated, ended, ~invalid)
        self.queue.cut(ended)
        # worlds that go on are now where that value was taken
        if self.device.type == "cpu":
            ids = torch.nonzero(ended)[:, 0]
            self._value = next_value.index_copy(0, ids, self.critic({"critic": obs["critic"][ids]}))
        else:
            self._value = torch.where(ended, self.critic(obs), next_value)

    def update(self) -> dict[str, Tensor]:
        """Learn from a full rollout, and forget it.

        Reads the host twice: that the rollout is finite, before anything changes; that the losses were, at the end.

        Raises:
            Fault: the rollout holds a value that is not finite (the weights are unchanged), or the update diverged
                (the weights are spoilt; the last checkpoint is good).
        """
        if not self.rollout.full:
            raise RuntimeError(f"update after {self.rollout.step} of {self.options.num_steps} steps")
        on_cpu = self.device.type == "cpu"
        with one_thread(on_cpu) as threads:
            # elsewhere one thread keeps the device busy, and the order of its work is the program's
            return self._update(threads if on_cpu else 1)

    def _update(self, threads: int) -> dict[str, Tensor]:
        options, rollout = self.options, self.rollout
        value, seen, step_by_step = rollout.value, rollout.valid, self.policy.execute == 1
        steps = (rollout.reward, value, rollout.next_value, rollout.terminated, rollout.ended)
        if step_by_step:
            advantage, valid = gae(*steps, options.gamma, options.lam, seen), seen
        else:
            advantage, valid = chunk_gae(*steps, rollout.decided, options.gamma, options.lam, seen)
        rollout.check(advantage)
        self.advantage = advantage
        returns = advantage + value
        self.critic.update_returns(returns.flatten(), valid.flatten())
        whole = {group: x.flatten(0, 1) for group, x in rollout.obs.items()}
        batch = whole | {name: x.flatten(0, 1) for name, x in rollout.trace.items()}
        batch["log_prob"] = rollout.log_prob.flatten()
        batch["advantage"] = normalise(advantage, valid).flatten()
        batch["target"] = self.critic.normalise(returns).flatten()
        batch["valid"] = valid.flatten()
        if not step_by_step:
            decided = torch.nonzero(batch["valid"])[:, 0]
            batch = {name: x.index_select(0, decided) for name, x in batch.items()}

        metrics = self.surrogate.learn(batch, threads)
        self.policy.update_normaliser(whole, seen.flatten())
        self.critic.update_normaliser(whole, seen.flatten())
        rollout.clear()
        # what comes was planned by other weights
        self.queue.clear()
        self._value = None
        metrics["explained_variance"] = explained_variance(value, returns, valid)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs, as tensors and plain data; live references, as in torch."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "surrogate": self.surrogate.state_dict(),
            "noise": self.policy.generator.get_state(),
            "rollout": self.rollout.state_dict(),
            "queue": self.queue.state_dict(),
            "value": self._value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, on this learner's device."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.surrogate.load_state_dict(state["surrogate"])
        self.policy.generator.set_state(state["noise"].cpu())
        self.rollout.load_state_dict(state["rollout"])
        self.queue.load_state_dict(state["queue"])
        self._value = None if state["value"] is None else state["value"].to(self.device)
