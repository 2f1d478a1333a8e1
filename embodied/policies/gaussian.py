"""A Gaussian policy for vector observations, and a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.networks import check_mlp, mlp
from embodied.policies.normaliser import RunningNormaliser
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs, Score, Step
from embodied.spec.registry import register


@dataclass
class MLPOptions:
    """A Gaussian policy whose mean is a multi-layer perceptron."""

    hidden: list[int] = field(default_factory=lambda: [128, 128])
    activation: str = "elu"  # elu, relu, silu or tanh
    init_std: float = 0.5  # of an action in [-1, 1], before learning
    min_std: float = 0.05  # exploration never falls below


@register("policy", "mlp", MLPOptions)
class GaussianPolicy(nn.Module):
    """Gaussian with a mean by multi-layer perceptron and one standard deviation per action.

    Reads the observation group `policy`, through its own running normaliser. The standard deviation is
    min_std + softplus(raw): it cannot reach zero, and has a gradient everywhere. Weights are drawn from torch's global
    generator, action noise from `generator` (see `seed`).

    Args:
        options: see `MLPOptions`.
        obs_sizes: width of each observation group.
        action_size: A.

    Raises:
        BadInput: no observation group `policy`, or options that make no sense.
    """

    horizon = execute = 1

    def __init__(self, options: MLPOptions, obs_sizes: Mapping[str, int], action_size: int) -> None:
        super().__init__()
        self.validate(options)
        size = group_size(obs_sizes, "policy")
        self.min_std = options.min_std
        self.trace_like = {"action": torch.zeros(action_size)}
        self.normaliser = RunningNormaliser(size)
        self.network = mlp([size, *options.hidden, action_size], options.activation, last_gain=0.01)
        raw = math.log(math.expm1(options.init_std - options.min_std))  # the inverse of softplus
        self.raw_std = nn.Parameter(torch.full((action_size,), raw))
        self.seed(0)

    @staticmethod
    def validate(options: MLPOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an unknown activation, a width below 1, or standard deviations that make no sense.
        """
        check_mlp(options.hidden, options.activation)
        if not 0 < options.min_std < options.init_std:
            raise BadInput(
                f"policy.min_std={options.min_std} and policy.init_std={options.init_std}: "
                "expected 0 < min_std < init_std; exploration starts at init_std and shrinks towards min_std"
            )

    @torch.no_grad()
    def begin_at(self, action: float) -> None:
        """Make the mean of every action that number in (-1, 1), whatever is observed but for the last layer's small weights."""
        last = self.network[-1]
        assert isinstance(last, nn.Linear)
        last.bias.fill_(math.atanh(action))

    def seed(self, seed: int) -> None:
        """Start the stream of action noise anew, on the device where the weights are."""
        self.generator = torch.Generator(self.raw_std.device).manual_seed(seed)

    @property
    def std(self) -> Tensor:
        """Standard deviation [A] of each action."""
        return self.min_std + F.softplus(self.raw_std)

    def forward(self, obs: Tensor) -> Tensor:
        """Mean action [N, A] in [-1, 1] for the raw observations [N, D] of group `policy`.

        Worlds clip actions to [-1, 1]: a mean that may leave it drifts to where noise no longer changes what is executed,
        and learning stops.
        """
        return torch.tanh(self.network(self.normaliser(obs)))

    @torch.no_grad()
    def act(self, obs: Obs, carry: Any = None, deterministic: bool = False) -> Step:
        """A sampled (or, `deterministic`, the mean) action [N, 1, A], not clipped; its trace is {"action": [N, A]}."""
        mean, std = self(obs["policy"]), self.std
        if deterministic:
            action = mean
        else:
            noise = torch.randn(mean.shape, generator=self.generator, device=mean.device)
            action = mean + std * noise
        return Step(action.unsqueeze(1), _log_prob(mean, std, action), {"action": action}, carry)

    def evaluate(self, obs: Obs, trace: Mapping[str, Tensor], carry: Any = None, starts: Tensor | None = None) -> Score:
        """Log-probability [N] of the actions of `trace`, entropy [N] in nats summed over actions, mean std."""
        mean, std = self(obs["policy"]), self.std
        entropy = std.log().sum() + 0.5 * std.numel() * (1 + math.log(2 * math.pi))
        return Score(_log_prob(mean, std, trace["action"]), entropy.expand(len(mean)), {"std_mean": std.mean()})

    def imitate(self, obs: Obs, action: Tensor, mask: Tensor) -> Tensor:
        """Mean negative log-likelihood a number, in nats, of actions [M, 1, A] where mask bool [M, 1]."""
        log_prob = _log_prob(self(obs["policy"]), self.std, action[:, 0])
        kept = mask[:, 0]
        return -torch.where(kept, log_prob, 0.0).sum() / (kept.sum().clamp(min=1) * action.shape[-1])

    def take_statistics(self, obs: Obs, action: Tensor) -> None:
        """Take in the observations [M, D] of demonstrations."""
        seen = obs["policy"]
        self.normaliser.update(seen, torch.ones(len(seen), dtype=torch.bool, device=seen.device))

    def update_normaliser(self, obs: Obs, mask: Tensor) -> None:
        """Take in the observations [M, D] where mask bool [M]; every rank must call it."""
        self.normaliser.update(obs["policy"], mask)


class Critic(nn.Module):
    """State value by multi-layer perceptron, from the observation group `critic`.

    The network predicts values in units of the returns' root mean square, because a network that starts near zero needs
    very long to reach a value of 100; whoever calls it sees reward units. Scaled, never shifted: a state from which
    nothing has ever been reached must look worth nothing. With a shift it would look like the average return, a phantom
    that bootstrapping at time limits keeps alive and that draws the policy away from what it can do.

    Args:
        obs_sizes: width of each observation group.
        hidden: widths of the hidden layers; none makes it linear.
        activation: a name in `networks.ACTIVATIONS`.
        generator: draws the weights; None: torch's global one.

    Raises:
        BadInput: no observation group `critic`, or an unknown activation.
    """

    scale: Tensor

    def __init__(
        self,
        obs_sizes: Mapping[str, int],
        hidden: Sequence[int],
        activation: str = "elu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        size = group_size(obs_sizes, "critic")
        self.normaliser = RunningNormaliser(size)
        self.returns = RunningNormaliser(1)
        self.register_buffer("scale", torch.ones(()))
        self.network = mlp([size, *hidden, 1], activation, last_gain=0.01, generator=generator)

    def forward(self, obs: Obs) -> Tensor:
        """Value [N] in reward units."""
        return self.normalised_value(obs) * self.scale

    def normalised_value(self, obs: Obs) -> Tensor:
        """Value [N] in units of `scale`, what the loss is taken of."""
        return self.network(self.normaliser(obs["critic"])).squeeze(-1)

    def normalise(self, returns: Tensor) -> Tensor:
        """Returns [M] in the units of `normalised_value`; not clipped."""
        return returns / self.scale

    def update_normaliser(self, obs: Obs, mask: Tensor) -> None:
        """Take in the observations [M, D] where mask bool [M]; every rank must call it."""
        self.normaliser.update(obs["critic"], mask)

    def update_returns(self, returns: Tensor, mask: Tensor) -> None:
        """Take in the returns [M] where mask bool [M]; every rank must call it."""
        self.returns.update(returns.unsqueeze(-1), mask)
        variance = self.returns.m2 / self.returns.count.clamp(min=1)
        self.scale.copy_((self.returns.mean.square() + variance).sqrt().clamp(min=0.01).squeeze())


def group_size(obs_sizes: Mapping[str, int], group: str) -> int:
    """Width of the observation group `group`.

    Raises:
        BadInput: there is none.
    """
    if group not in obs_sizes:
        raise BadInput(f"the task gives no observation group '{group}', only {', '.join(sorted(obs_sizes)) or 'none'}")
    return obs_sizes[group]


def _log_prob(mean: Tensor, std: Tensor, action: Tensor) -> Tensor:
    """Log density [N] of a diagonal Gaussian; `act` and `evaluate` both take it of the action, to agree bit for bit."""
    z = (action - mean) / std
    # as a product, for a sum over so few columns is slow
    return z.square() @ z.new_full((z.shape[-1],), -0.5) - (std.log().sum() + 0.5 * std.numel() * math.log(2 * math.pi))
