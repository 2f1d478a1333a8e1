"""The update that PPO and GRPO share: passes over a batch by the clipped surrogate, a critic beside it where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied.algos.cotraining import CoOptions, CoTraining
from embodied.algos.losses import adapted_rate, approx_kl, clip_fraction, clipped_surrogate, value_loss, weighted
from embodied.algos.threads import each, pieces
from embodied.policies.gaussian import Critic
from embodied.spec.errors import BadInput, Fault
from embodied.spec.protocols import Policy, Symmetry
from embodied.spec.ranks import rank_count, sum_over_ranks

RATE_BOUNDS = (1e-6, 1e-2)  # of the adaptive learning rate

Check = tuple[str, bool, str]
"""An option's name, whether its value is good, and what was expected."""


@dataclass
class SurrogateOptions(CoOptions):
    """Passes over a batch by the clipped surrogate."""

    epochs: int = 4  # passes over the batch an update
    minibatch_size: int | None = None  # transitions, or chunks (on each rank); null: a quarter of the batch
    learning_rate: float = 1e-3
    desired_kl: float | None = 0.01  # the policy's learning rate follows it; null: fixed rate
    clip: float = 0.2  # of the probability ratio
    clip_high: float | None = None  # its upper side, for what turned out well; null: as the lower one
    entropy: float = 0.005  # bonus on the entropy summed over actions; for about 6 of them
    max_grad_norm: float = 1.0  # of the policy's and the critic's gradients, each

    @property
    def clips(self) -> tuple[float, float]:
        """Below and above 1."""
        return self.clip, self.clip if self.clip_high is None else self.clip_high

    def checks(self, batch: int, what: str) -> list[Check]:
        """Of these options, where a batch has so many transitions, which are `what`."""
        size = self.minibatch_size
        return [
            ("epochs", self.epochs >= 1, "at least 1"),
            self.check_rate("learning_rate"),
            ("desired_kl", self.desired_kl is None or self.desired_kl > 0, "above 0, or null for a fixed rate"),
            ("clip", self.clip > 0, "above 0"),
            ("clip_high", self.clip_high is None or self.clip_high > 0, "above 0, or null for that of algo.clip"),
            ("entropy", self.entropy >= 0, "0 or more"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            (
                "minibatch_size",
                size is None or 1 <= size <= batch,
                f"from 1 to the batch of {batch} transitions ({what}), or null for a quarter of it",
            ),
        ]

    def check_rate(self, name: str) -> Check:
        """Of a learning rate, or of none."""
        rate, (low, high) = getattr(self, name), RATE_BOUNDS
        good = rate is None or low <= rate <= high or (self.desired_kl is None and rate > 0)
        return name, good, f"from {low} to {high}, between which it adapts, or algo.desired_kl=null for any fixed rate"

    def refuse(self, checks: list[Check]) -> None:
        """Name the first option that is not good.

        Raises:
            BadInput: see there.
        """
        for name, good, expected in checks:
            if not good:
                raise BadInput(f"algo.{name}={getattr(self, name)}: expected {expected}")
        self.check_co()


class Surrogate:
    """Takes gradient steps on a policy, and on its critic.

    A batch holds, for each of M transitions: the observation groups, the policy's trace, `log_prob`, `advantage` (normalised),
    `valid`, and for a critic `target` (of normalised returns). What is not valid counts nothing, whatever it holds.

    Args:
        options: see `SurrogateOptions`.
        policy: what is learned; its parameters become views of one.
        critic: learned beside it, if there is one.
        rates: the first learning rates of policy and critic.
        generator: of permutations, on the policy's device.
        mirror: half of the transitions of each pass are seen in it.
        co: imitated at every gradient step, if there is anything.
        value_coef: weight of the critic's loss.
        critic_warmup: updates in which the critic learns alone.
    """

    def __init__(
        self,
        options: SurrogateOptions,
        policy: Policy,
        critic: Critic | None,
        rates: tuple[float, ...],
        generator: torch.Generator,
        mirror: Symmetry | None = None,
        co: CoTraining | None = None,
        value_coef: float = 1.0,
        critic_warmup: int = 0,
    ) -> None:
        self.options, self.policy, self.critic = options, policy, critic
        self.device, self.generator = generator.device, generator
        self.value_coef, self.critic_warmup, self.co = value_coef, critic_warmup, co
        self.updates = 0
        self._mirror: Symmetry = {
            name: (index.to(self.device), sign.to(self.device)) for name, (index, sign) in (mirror or {}).items()
        }
        learned: list[nn.Module | Policy] = [policy] if critic is None else [policy, critic]
        self._flat = [flatten(module) for module in learned]
        # 0-d tensors: adapting the rate needs no host read
        self._rates = [torch.tensor(rate, device=self.device) for rate in rates[: len(learned)]]
        groups = [{"params": [x], "lr": rate} for x, rate in zip(self._flat, self._rates, strict=True)]
        self.optimiser = torch.optim.Adam(groups, fused=True)
        if rank_count() > 1:
            for x in self._flat:
                dist.broadcast(x.data, src=0)

    @property
    def learning_rate(self) -> Tensor:
        """The policy's, 0-d."""
        return self._rates[0]

    def learn(self, batch: dict[str, Tensor], threads: int) -> dict[str, Tensor]:
        """Pass over a batch `epochs` times; means of what was measured at the gradient steps.

        Raises:
            Fault: the update diverged: the weights are spoilt.
        """
        history: list[Tensor] = []
        names: tuple[str, ...] = ()
        count = self._minibatches(len(batch["valid"]))
        for _ in range(self.options.epochs):
            order = torch.randperm(len(batch["valid"]), generator=self.generator, device=self.device)
            shown = self._half_mirrored(batch)
            for index in order.tensor_split(count):
                metrics = self._learn(shown, index, threads)
                names = tuple(metrics)
                history.append(torch.stack(list(metrics.values())))
        rows = sum_over_ranks(torch.stack(history)) / rank_count()
        metrics = dict(zip(names, rows.mean(0), strict=True))
        self.updates += 1
        if self.options.desired_kl is not None and self.updates > self.critic_warmup:
            # once an update, from its last pass: how far the policy moved in all; single minibatches are too noisy
            moved = rows[-count:, names.index("kl")].mean()
            self.learning_rate.copy_(adapted_rate(self.learning_rate, moved, self.options.desired_kl, RATE_BOUNDS))
        if not bool(rows.isfinite().all()):
            bad = [name for name, x in metrics.items() if not bool(x.isfinite())]
            raise Fault(
                f"the update diverged: {', '.join(bad)} is not finite, though the rollout was; the weights are spoilt, "
                "resume from the last checkpoint with a lower algo.learning_rate"
            )
        return metrics | {"lr": self.learning_rate.clone()}

    def _minibatches(self, transitions: int) -> int:
        """How many there are, on every rank alike: of chunks, or with groups left out, ranks have different numbers."""
        if self.options.minibatch_size is None:
            return 4
        ranks = rank_count()
        if ranks > 1:
            transitions = int(sum_over_ranks(torch.tensor(transitions, device=self.device)))
        return max(1, -(-transitions // (ranks * self.options.minibatch_size)))

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
        halves = [self._policy_gradient] if self.critic is None else [self._policy_gradient, self._critic_gradient]
        work: list[tuple[int, Callable[[], tuple[Tensor, dict[str, Tensor]]]]] = [
            (number, partial(half, batch, piece, scale))
            for piece in pieces(index, threads, len(halves))
            for number, half in enumerate(halves)
        ]
        if self.co is not None:
            work.append((0, partial(self._co_gradient, self.co)))
        done = each(lambda item: item[1](), work, threads)
        norms = []
        for half, parameters in enumerate(self._flat):
            mine = [gradient for (number, _), (gradient, _) in zip(work, done, strict=True) if number == half]
            gradient = sum_over_ranks(torch.stack(mine).sum(0)).div_(rank_count())
            # apart, because a critic that is still far off would otherwise shrink the policy's step
            norms.append(gradient.norm())
            parameters.grad = gradient.mul_((self.options.max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        if self.updates < self.critic_warmup:
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
        loss = clipped_surrogate(log_ratio, part["advantage"], weight, *options.clips)
        entropy = weighted(score.entropy, weight)
        gradients = torch.autograd.grad(loss - options.entropy * entropy, list(self.policy.parameters()))
        with torch.no_grad():
            metrics = {
                "policy_loss": loss,
                "entropy": entropy,
                "kl": approx_kl(log_ratio, own),
                "clip_fraction": clip_fraction(log_ratio, weight, *options.clips),
                **{name: x * weight.sum() for name, x in score.extras.items()},
            }
        return torch.cat([x.flatten() for x in gradients]), metrics

    def _critic_gradient(
        self, batch: dict[str, Tensor], piece: Tensor, scale: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `_policy_gradient`, of the critic."""
        critic = self.critic
        assert critic is not None
        part = {name: batch[name].index_select(0, piece) for name in ("critic", "target", "valid")}
        loss = value_loss(critic.normalised_value(part), part["target"], part["valid"] * scale["valid"])
        gradients = torch.autograd.grad(self.value_coef * loss, list(critic.parameters()))
        return torch.cat([x.flatten() for x in gradients]), {"value_loss": loss}

    def _co_gradient(self, co: CoTraining) -> tuple[Tensor, dict[str, Tensor]]:
        """As `_policy_gradient`, of what is imitated beside it; parameters that it does not reach get 0."""
        loss = co.loss()
        parameters = list(self.policy.parameters())
        gradients = torch.autograd.grad(co.options.co_weight * loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([x.flatten() for x in gradients]), {"co_imitation": loss}

    def state_dict(self) -> dict[str, Any]:
        """All that decides what comes next but the weights; live references, as in torch."""
        return {
            "optimiser": self.optimiser.state_dict(),
            "permutation": self.generator.get_state(),
            "updates": self.updates,
            "co": None if self.co is None else self.co.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.optimiser.load_state_dict(state["optimiser"])
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            # the loaded rates are other tensors, perhaps on another device
            rate.copy_(group["lr"])
            group["lr"] = rate
        self.generator.set_state(state["permutation"].cpu())
        self.updates = state["updates"]
        if self.co is not None:
            self.co.load_state_dict(state["co"])


def flatten(module: nn.Module | Policy) -> nn.Parameter:
    """All parameters of a module as one [P], of which its own become views: what is done to all of them is done once."""
    parameters = list(module.parameters())
    flat = torch.cat([x.detach().flatten() for x in parameters])
    for parameter, values in zip(parameters, flat.split([x.numel() for x in parameters]), strict=True):
        parameter.data = values.view_as(parameter)
    return nn.Parameter(flat)
