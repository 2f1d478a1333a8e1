"""A supervised loss on another source of data, beside whatever else is learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.algos.windows import SUCCESS, Windows, check_folder
from embodied.data.lerobot import read
from embodied.spec.errors import BadInput, Fault
from embodied.spec.protocols import Obs, Policy


@dataclass
class CoOptions:
    """Co-training on a dataset."""

    co_data: str = ""  # folder of a dataset, e.g. of the real robot, to imitate at every gradient step; empty: none
    co_weight: float = 0.2  # of that loss
    co_batch_size: int = 256  # moments of it a gradient step

    def check_co(self) -> None:
        """Check them before anything is built.

        Raises:
            BadInput: an option outside its range, or no dataset.
        """
        if self.co_data:
            check_folder("co_data", self.co_data)
        for name in ("co_weight", "co_batch_size"):
            if getattr(self, name) <= 0:
                raise BadInput(f"algo.{name}={getattr(self, name)}: expected more than 0; algo.co_data= alone turns it off")


class CoTraining:
    """`co_weight` times the policy's loss of imitating `co_data` (RL-Co, arXiv 2602.12628).

    The loss is a mean over its own batch, whatever the size of the other's: the weight alone says what counts how much.
    Episodes that failed are left out where the data tell.

    Raises:
        BadInput: the dataset is of other observations or actions, or no episode of it can be used.
    """

    def __init__(self, options: CoOptions, policy: Policy, sizes: tuple[int, int], device: torch.device, seed: int) -> None:
        """`sizes`: of the observation group `policy`, and of an action."""
        data = read(options.co_data)
        self.options, self.policy = options, policy
        self.windows = Windows.of(data, policy.horizon, SUCCESS in data.columns, device, "algo.co_data")
        self.windows.check(*sizes)
        self.generator = torch.Generator(device).manual_seed(seed)

    def loss(self) -> Tensor:
        """Of a random batch, unweighted."""
        return self.policy.imitate(*self.windows.draw(self.options.co_batch_size, self.generator))

    def state_dict(self) -> dict[str, Any]:
        """Which moments come next; the data are read again."""
        return {"order": self.generator.get_state(), "data_sha256": self.windows.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            BadInput: the dataset is not the one that was learned from.
        """
        self.windows.check_same(state["data_sha256"])
        self.generator.set_state(state["order"].cpu())


def co_training(
    options: CoOptions, policy: Policy, obs_sizes: Mapping[str, int], action_size: int, device: torch.device, seed: int
) -> CoTraining | None:
    """What options ask for, if they do; see `CoTraining`."""
    if not options.co_data:
        return None
    return CoTraining(options, policy, (obs_sizes["policy"], action_size), device, seed)


def imitate(
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    draw: Callable[[], tuple[Obs, Tensor, Tensor]],
    updates: int,
    max_grad_norm: float,
    co: CoTraining | None,
) -> dict[str, Tensor]:
    """Take gradient steps on what `draw` gives, the arguments of `Policy.imitate`, and on `co` beside it; means of the figures.

    Raises:
        Fault: the loss is not finite.
    """
    history = []
    for _ in range(updates):
        loss = policy.imitate(*draw())
        if co is not None:
            loss = loss + co.options.co_weight * co.loss()
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimiser.step()
        history.append(torch.stack([loss.detach(), norm]))
    loss, norm = torch.stack(history).mean(0)
    if not bool(loss.isfinite()):
        raise Fault("the loss is not finite: resume from the last checkpoint with a lower algo.learning_rate")
    return {"imitation": loss, "grad_norm": norm}
