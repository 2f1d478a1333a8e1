"""Proximal policy optimisation (Schulman et al. 2017) for many parallel worlds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied.algos.chunks import ChunkQueue
from embodied.algos.losses import adapted_rate, approx_kl, clip_fraction, clipped_surrogate, value_loss, weighted
from embodied.algos.returns import chunk_gae, explained_variance, gae, normalise
from embodied.algos.rollout import Rollout
from embodied.algos.threads import each, one_thread, pieces
from embodied.policies.gaussian import Critic
from embodied.spec.errors import BadInput, Fault
from embodied.spec.protocols import Obs, Policy, Symmetry
from embodied.spec.ranks import rank_count, rank_index, sum_over_ranks
from embodied.spec.registry import register

RATE_BOUNDS = (1e-6, 1e-2)  # of the adaptive learning rate


@dataclass
class PPOOptions:
    """Proximal policy optimisation."""

    num_steps: int = 24  # steps of every world between updates
    gamma: float = 0.99  # discount a step
    lam: float = 0.95  # of generalised advantage estimation
    epochs: int = 4  # passes over the batch an update
    minibatch_size: int | None = None  # transitions (on each rank); null: a quarter of the batch
    learning_rate: float = 1e-3  # of the critic
    policy_learning_rate: float | None = None  # the policy's first; null: the critic's
    desired_kl: float | None = 0.01  # the policy's learning rate follows it; null: fixed rate
    clip: float = 0.2  # of the probability ratio
    entropy: float = 0.005  # bonus on the entropy summed over actions; for about 6 of them
    value_coef: float = 1.0  # weight of the critic's loss
    critic_warmup: int = 0  # updates in which the critic learns alone: for a policy that has learned before
    symmetry: bool = False  # learn of every second transition what it looks like in the task's mirror
    max_grad_norm: float = 1.0  # of the policy's and the critic's gradients, each
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
    ) -> None:
        self.validate(options, num_worlds)
        if options.symmetry and (mirror is None or policy.horizon > 1):
            what = "the task has no symmetry to learn by" if mirror is None else "a policy of chunks is not mirrored"
            raise BadInput(f"algo.symmetry=true: {what}; use algo.symmetry=false")
        self.options = options
        self.steps_per_iteration = options.num_steps
        self.device = torch.device(device)
        noise_seed, permutation_seed, critic_seed = (
            int(s) for s in np.random.SeedSequence([seed, rank_index()]).generate_state(3)
        )
        self.policy = policy.to(self.device)
        self.policy.seed(noise_seed)
        self.generator = torch.Generator(self.device).manual_seed(permutation_seed)
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
        self.updates = 0
        self._mirror: Symmetry = {}
        if options.symmetry and mirror is not None:
            self._mirror = {name: (index.to(self.device), sign.to(self.device)) for name, (index, sign) in mirror.items()}
        self._value: Tensor | None = None  # V [N] of the present observation, where the weights have not changed since
        self.advantage = torch.zeros(0, num_worlds, device=self.device)
        batch = options.num_steps * num_worlds
        self.num_minibatches = 4 if options.minibatch_size is None else -(-batch // options.minibatch_size)
        # 0-d tensors: adapting the rate needs no host read
        first = options.policy_learning_rate or options.learning_rate
        self.learning_rate = torch.tensor(first, device=self.device)
        self._flat = flatten(self.policy), flatten(self.critic)
        rates = self.learning_rate, torch.full_like(self.learning_rate, options.learning_rate)
        groups = [{"params": [x], "lr": rate} for x, rate in zip(self._flat, rates, strict=True)]
        self.optimiser = torch.optim.Adam(groups, fused=True)
        if rank_count() > 1:
            for x in self._flat:
                dist.broadcast(x.data, src=0)

    @staticmethod
    def validate(options: PPOOptions, num_worlds: int) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an option outside its range, or a minibatch larger than the batch.
        """
        batch = options.num_steps * num_worlds
        low, high = RATE_BOUNDS
        ranges: list[tuple[str, bool, str]] = [
            ("num_steps", options.num_steps >= 1, "at least 1"),
            ("gamma", 0 <= options.gamma < 1, "in [0, 1)"),
            ("lam", 0 <= options.lam <= 1, "in [0, 1]"),
            ("epochs", options.epochs >= 1, "at least 1"),
            *(
                (
                    name,
                    rate is None or low <= rate <= high or (options.desired_kl is None and rate > 0),
                    f"from {low} to {high}, between which it adapts, or algo.desired_kl=null for any fixed rate",
                )
                for name, rate in (
                    ("learning_rate", options.learning_rate),
                    ("policy_learning_rate", options.policy_learning_rate),
                )
            ),
            ("desired_kl", options.desired_kl is None or options.desired_kl > 0, "above 0, or null for a fixed rate"),
            ("clip", options.clip > 0, "above 0"),
            ("entropy", options.entropy >= 0, "0 or more"),
            ("value_coef", options.value_coef > 0, "above 0"),
            ("max_grad_norm", options.max_grad_norm > 0, "above 0"),
            ("critic_warmup", options.critic_warmup >= 0, "0 or more"),
            ("critic_hidden", all(width >= 1 for width in options.critic_hidden), "widths of at least 1"),
            (
                "minibatch_size",
                options.minibatch_size is None or 1 <= options.minibatch_size <= batch,
                f"from 1 to the batch of {batch} transitions ({options.num_steps} steps of {num_worlds} worlds), "
                "or null for a quarter of it",
            ),
        ]
        for name, good, expected in ranges:
            if not good:
                raise BadInput(f"algo.{name}={getattr(options, name)}: expected {expected}")

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
        self._check_rollout(advantage)
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

        history: list[Tensor] = []
        names: tuple[str, ...] = ()
        for _ in range(options.epochs):
            order = torch.randperm(len(batch["valid"]), generator=self.generator, device=self.device)
            shown = self._half_mirrored(batch)
            for index in order.tensor_split(self.num_minibatches):
                metrics = self._learn(shown, index, threads)
                names = tuple(metrics)
                history.append(torch.stack(list(metrics.values())))
        rows = sum_over_ranks(torch.stack(history)) / rank_count()
        metrics = dict(zip(names, rows.mean(0), strict=True))
        self.updates += 1
        if options.desired_kl is not None and self.updates > options.critic_warmup:
            # once an update, from its last pass: how far the policy moved in all; single minibatches are too noisy
            moved = rows[-self.num_minibatches :, names.index("kl")].mean()
            self.learning_rate.copy_(adapted_rate(self.learning_rate, moved, options.desired_kl, RATE_BOUNDS))
        self.policy.update_normaliser(whole, seen.flatten())
        self.critic.update_normaliser(whole, seen.flatten())
        rollout.clear()
        # what comes was planned by other weights
        self.queue.clear()
        self._value = None
        if not bool(rows.isfinite().all()):
            bad = [name for name, x in metrics.items() if not bool(x.isfinite())]
            raise Fault(
                f"the update diverged: {', '.join(bad)} is not finite, though the rollout was; the weights are spoilt, "
                "resume from the last checkpoint with a lower algo.learning_rate"
            )
        metrics["lr"] = self.learning_rate.clone()
        metrics["explained_variance"] = explained_variance(value, returns, valid)
        return metrics

    def _half_mirrored(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with a random half of its transitions seen in the mirror; `own` are the other valid ones.

        An action in the mirror is taken to be as likely there as it was when it was taken: true of a policy that is symmetric,
        which it becomes. Until then its ratio there is not 1 whatever the update does, so that it says nothing of how far the
        policy has moved.
        """
        if not self._mirror:
            return batch | {"own": batch["valid"]}
        size = len(batch["valid"])
        flip = torch.rand(size, 1, generator=self.generator, device=self.device) < 0.5
        seen = {name: batch[name].index_select(1, index) * sign for name, (index, sign) in self._mirror.items()}
        own = batch["valid"] * ~flip[:, 0]
        return batch | {name: torch.where(flip, x, batch[name]) for name, x in seen.items()} | {"own": own}

    def _learn(self, batch: dict[str, Tensor], index: Tensor, threads: int) -> dict[str, Tensor]:
        """One gradient step on the minibatch `index` of a batch; scalars by name."""
        scale = {name: batch[name].index_select(0, index).sum().clamp(min=1).reciprocal() for name in ("valid", "own")}
        halves = self._policy_gradient, self._critic_gradient
        work = [(half, piece) for piece in pieces(index, threads, len(halves)) for half in halves]
        done = each(lambda item: item[0](batch, item[1], scale), work, threads)
        norms = []
        for half, parameters in enumerate(self._flat):
            gradient = torch.stack([gradient for gradient, _ in done[half :: len(halves)]]).sum(0)
            gradient = sum_over_ranks(gradient).div_(rank_count())
            # apart, because a critic that is still far off would otherwise shrink the policy's step
            norms.append(gradient.norm())
            parameters.grad = gradient.mul_((self.options.max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        if self.updates < self.options.critic_warmup:
            self._flat[0].grad = None
        self.optimiser.step()
        sums: dict[str, Tensor] = {}
        for _, metrics in done:
            # whoever keeps a loss keeps all that its gradient was taken of
            sums |= {name: sums.get(name, 0.0) + x.detach() for name, x in metrics.items()}
        return {**sums, "grad_norm": norms[0]}

    def _policy_gradient(
        self, batch: dict[str, Tensor], piece: Tensor, scale: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """On the piece of a minibatch in which the transitions that are `valid` or `own` have that weight; and metrics, as
        summands.
        """
        options = self.options
        part = {name: x.index_select(0, piece) for name, x in batch.items() if name not in ("critic", "target")}
        weight, own = (part[name] * scale[name] for name in ("valid", "own"))
        score = self.policy.evaluate(part, part)
        log_ratio = score.log_prob - part["log_prob"]
        loss = clipped_surrogate(log_ratio, part["advantage"], weight, options.clip)
        entropy = weighted(score.entropy, weight)
        gradients = torch.autograd.grad(loss - options.entropy * entropy, list(self.policy.parameters()))
        with torch.no_grad():
            metrics = {
                "policy_loss": loss,
                "entropy": entropy,
                "kl": approx_kl(log_ratio, own),
                "clip_fraction": clip_fraction(log_ratio, weight, options.clip),
                **{name: x * weight.sum() for name, x in score.extras.items()},
            }
        return torch.cat([x.flatten() for x in gradients]), metrics

    def _critic_gradient(
        self, batch: dict[str, Tensor], piece: Tensor, scale: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `_policy_gradient`, of the critic."""
        part = {name: batch[name].index_select(0, piece) for name in ("critic", "target", "valid")}
        loss = value_loss(self.critic.normalised_value(part), part["target"], part["valid"] * scale["valid"])
        gradients = torch.autograd.grad(self.options.value_coef * loss, list(self.critic.parameters()))
        return torch.cat([x.flatten() for x in gradients]), {"value_loss": loss}

    def _check_rollout(self, advantage: Tensor) -> None:
        """Refuse a rollout that is not finite, naming the first cause.

        Raises:
            Fault: see there.
        """
        rollout = self.rollout
        causes = {
            "observation group 'policy'": rollout.obs["policy"],
            "observation group 'critic'": rollout.obs["critic"],
            "the reward": rollout.reward,
            **{f"the policy's {name}": x for name, x in rollout.trace.items()},
            "the log-probability of the action": rollout.log_prob,
            "the critic's value": rollout.value,
            "the critic's value of the final observation": rollout.next_value,
            "the advantage": advantage,
        }
        # extremes carry NaN and inf along, and are far cheaper than isfinite of every element
        extremes = torch.stack([torch.stack(x.aminmax()).double() for x in causes.values()])
        finite = extremes.isfinite().all(-1).tolist()
        for (cause, x), good in zip(causes.items(), finite, strict=True):
            if not good:
                step, world = (~x.isfinite()).nonzero()[0, :2].tolist()
                raise Fault(
                    f"{cause} is not finite, first at step {step} of the rollout in world {world}; "
                    "nothing was learned from it and the weights are unchanged"
                )

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs, as tensors and plain data; live references, as in torch."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generators": {"noise": self.policy.generator.get_state(), "permutation": self.generator.get_state()},
            "rollout": self.rollout.state_dict(),
            "queue": self.queue.state_dict(),
            "updates": self.updates,
            "value": self._value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, on this learner's device."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.optimiser.load_state_dict(state["optimiser"])
        policy_group, critic_group = self.optimiser.param_groups
        # the loaded rates are other tensors, perhaps on another device
        self.learning_rate.copy_(policy_group["lr"])
        policy_group["lr"] = self.learning_rate
        critic_group["lr"] = critic_group["lr"].to(self.device)
        self.policy.generator.set_state(state["generators"]["noise"].cpu())
        self.generator.set_state(state["generators"]["permutation"].cpu())
        self.rollout.load_state_dict(state["rollout"])
        self.queue.load_state_dict(state["queue"])
        self.updates = state["updates"]
        self._value = None if state["value"] is None else state["value"].to(self.device)


def flatten(module: nn.Module | Policy) -> nn.Parameter:
    """All parameters of a module as one [P], of which its own become views: what is done to all of them is done once."""
    parameters = list(module.parameters())
    flat = torch.cat([x.detach().flatten() for x in parameters])
    for parameter, values in zip(parameters, flat.split([x.numel() for x in parameters]), strict=True):
        parameter.data = values.view_as(parameter)
    return nn.Parameter(flat)
