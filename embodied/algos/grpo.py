"""Group-relative policy optimisation: advantages without a critic, from episodes that began alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algos.chunks import ChunkQueue
from embodied.algos.cotraining import co_training
from embodied.algos.returns import group_advantage
from embodied.algos.rollout import Rollout
from embodied.algos.surrogate import Surrogate, SurrogateOptions
from embodied.algos.threads import one_thread
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs, Policy, Symmetry
from embodied.spec.ranks import rank_index, sum_over_ranks
from embodied.spec.registry import register


@dataclass
class GRPOOptions(SurrogateOptions):
    """Group-relative policy optimisation."""

    clip_high: float | None = 0.28
    entropy: float = 0.0  # bonus on the entropy summed over actions
    num_steps: int | None = None  # steps of every world between updates; null: the longest episode, at least that
    group_size: int = 8  # neighbouring worlds that begin their episodes at the same configuration
    keep: list[float] = field(default_factory=lambda: [0.1, 0.9])  # groups are learned from whose success lies in there


@register("algo", "grpo", GRPOOptions)
class GRPO:
    """Advantages are outcomes relative to the group's: (success - mean) / standard deviation (arXiv 2402.03300).

    Every iteration restarts the worlds. An episode counts if it began early enough to reach its time limit in the iteration:
    counting whatever is over by its end would favour short episodes, which are mostly successes. All its decisions have its
    advantage. Groups outside of `keep`, in which nearly all failed or succeeded, are not learned from (dynamic sampling,
    arXiv 2503.14476, with the bounds and the clips of arXiv 2509.09674). No critic, no discount, no reward but success.

    Args:
        options: see `GRPOOptions`.
        policy: moved to `device`; its action noise is seeded here.
        obs_sizes: width of each observation group; `policy` is read.
        action_size: A.
        num_worlds: N, of this rank; a multiple of the group's size.
        device: where everything lives.
        seed: of action noise and permutations; every rank gets the same and draws its own noise.
        mirror: not used.
        max_episode_steps: after which an episode is over.

    Raises:
        BadInput: see `validate`; `num_steps` is less than an episode may take.
    """

    def __init__(
        self,
        options: GRPOOptions,
        policy: Policy,
        obs_sizes: Mapping[str, int],
        action_size: int,
        num_worlds: int,
        device: torch.device | str,
        seed: int,
        mirror: Symmetry | None = None,
        max_episode_steps: int = 1,
    ) -> None:
        self.validate(options, num_worlds)
        steps = max_episode_steps if options.num_steps is None else options.num_steps
        if steps < max_episode_steps:
            raise BadInput(
                f"algo.num_steps={steps}: expected {max_episode_steps}, which an episode may take, or more; null is as many"
            )
        self.options, self.group, self.steps_per_iteration = options, options.group_size, steps
        self.device = torch.device(device)
        noise_seed, permutation_seed, co_seed = (int(s) for s in np.random.SeedSequence([seed, rank_index()]).generate_state(3))
        self.policy = policy.to(self.device)
        self.policy.seed(noise_seed)
        self.rollout = Rollout(steps, num_worlds, {"policy": obs_sizes["policy"]}, policy.trace_like, self.device)
        self.queue = ChunkQueue(self.policy, num_worlds, action_size, self.device)
        self._nothing = torch.zeros(num_worlds, device=self.device)
        self._latest = steps - max_episode_steps
        self.surrogate = Surrogate(
            options,
            self.policy,
            None,
            (options.learning_rate,),
            torch.Generator(self.device).manual_seed(permutation_seed),
            co=co_training(options, self.policy, obs_sizes, action_size, self.device, co_seed),
        )

    @staticmethod
    def validate(options: GRPOOptions, num_worlds: int) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an option outside its range, or worlds that do not make whole groups.
        """
        size, keep = options.group_size, options.keep
        whole = size >= 2 and num_worlds % size == 0
        options.refuse(
            [
                ("group_size", whole, f"2 or more, and a divisor of sim.num_worlds={num_worlds}"),
                ("keep", len(keep) == 2 and 0 <= keep[0] < keep[1] <= 1, "[low, high] with 0 <= low < high <= 1"),
                *options.checks((options.num_steps or 1) * num_worlds, f"steps of {num_worlds} worlds"),
            ]
        )

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """Sampled action [N, A] clipped to [-1, 1]; what is learned from is the one before clipping."""
        if self.rollout.step == 0:
            # the worlds were restarted
            self.queue.clear()
        decision = self.queue.next(obs)
        self.rollout.begin(obs, decision, self._nothing)
        return decision.action.clamp(-1, 1)

    @torch.no_grad()
    def observe(self, obs: Obs, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Store what came of the last `act`; the arguments are what `VecEnv.step` returned."""
        invalid = info["invalid"]
        ended = terminated | truncated | invalid
        self.rollout.finish((info["success"] & ended).float(), self._nothing, terminated, ended, ~invalid)
        self.queue.cut(ended)

    def update(self) -> dict[str, Tensor]:
        """Learn from a full rollout, and forget it.

        Raises:
            Fault: the rollout holds a value that is not finite (the weights are unchanged), or the update diverged
                (the weights are spoilt; the last checkpoint is good).
        """
        if not self.rollout.full:
            raise RuntimeError(f"update after {self.rollout.step} of {self.steps_per_iteration} steps")
        on_cpu = self.device.type == "cpu"
        with one_thread(on_cpu) as threads:
            return self._update(threads if on_cpu else 1)

    def _update(self, threads: int) -> dict[str, Tensor]:
        rollout, keep = self.rollout, self.options.keep
        outcome = (rollout.reward, rollout.ended, rollout.valid)
        advantage, counted, kept = group_advantage(*outcome, self._latest, self.group, (keep[0], keep[1]))
        rollout.check(advantage)
        seen = rollout.valid
        whole = {group: x.flatten(0, 1) for group, x in rollout.obs.items()}
        batch = whole | {name: x.flatten(0, 1) for name, x in rollout.trace.items()}
        batch |= {"log_prob": rollout.log_prob.flatten(), "advantage": advantage.flatten()}
        batch["valid"] = (counted & rollout.decided).flatten()
        decided = torch.nonzero(batch["valid"])[:, 0]
        metrics: dict[str, Tensor] = {"groups_kept": kept}
        # with nothing to learn from, momentum alone would move the policy
        if int(sum_over_ranks(torch.tensor(len(decided), device=self.device))):
            metrics |= self.surrogate.learn({name: x.index_select(0, decided) for name, x in batch.items()}, threads)
        self.policy.update_normaliser(whole, seen.flatten())
        rollout.clear()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs, as tensors and plain data; live references, as in torch."""
        return {
            "policy": self.policy.state_dict(),
            "surrogate": self.surrogate.state_dict(),
            "noise": self.policy.generator.get_state(),
            "rollout": self.rollout.state_dict(),
            "queue": self.queue.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, on this learner's device."""
        self.policy.load_state_dict(state["policy"])
        self.surrogate.load_state_dict(state["surrogate"])
        self.policy.generator.set_state(state["noise"].cpu())
        self.rollout.load_state_dict(state["rollout"])
        self.queue.load_state_dict(state["queue"])
