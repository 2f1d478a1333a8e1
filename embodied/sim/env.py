"""The learning problem: an engine, a task and a reset sampler, N worlds at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.sim.engines import describe_health
from embodied.sim.resets import ResetBank
from embodied.spec.errors import BadInput
from embodied.spec.policy import PolicySpec
from embodied.spec.protocols import Engine, Obs, Sampler, ScoringSampler, Symmetry


class Task(Protocol):
    """What a task must offer to be a learning problem; `state` and `readings` are dicts of tensors [N, ...]."""

    name: str
    spec: PolicySpec
    """What its policy sees and commands, how often, and for how long at most."""
    training_steps: int
    """An episode of training is cut there: worlds that go on for long see too few beginnings."""
    bank_size: int
    rest_action: float
    """In all its components, of an action that leaves things as they are: where a policy's mean begins."""
    obs_sizes: dict[str, int]
    fields: tuple[str, ...]
    failure_cost: float
    time_limit_fails: bool
    """The time limit is part of the problem: reaching it is a failure, worth nothing more. Else it truncates, with success
    where the task says so there."""

    mirror: Symmetry | None
    """What the task looks like in a mirror in which it is the same task, if there is one."""

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """Draw the physics of the worlds of `mask` from nominal (`on` false: nominal) and commit it; what was drawn [N]."""
        ...

    def start(self, engine: Engine, factors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The state at an episode's beginning, of every world; the environment keeps the rows that it needs."""
        ...

    def command(self, engine: Engine, action: Tensor, state: dict[str, Tensor], readings: dict[str, Tensor]) -> None:
        """Turn an action [N, A] and the readings that the policy had into controls."""
        ...

    def disturb(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """What befalls the worlds in a control step, whatever the policy does: once, before physics."""
        ...

    def look(
        self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """True readings, and those that the policy gets; changes nothing, for the same moment may be looked at twice."""
        ...

    def observe(self, truth: dict[str, Tensor], seen: dict[str, Tensor], state: dict[str, Tensor]) -> Obs:
        """Observation groups; `state["elapsed"]` [N] is the share of the episode that is over."""
        ...

    def judge(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward [N] (the environment adds `failure_cost`), success and failure bool [N]."""
        ...

    def errors(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The task's own figures of an episode by name, [N], as they are now."""
        ...

    def bank_hash(self, signature: str) -> str:
        """A hash of everything that decides what the training bank holds on the engine of that signature."""
        ...

    def make_bank(self, engine: Engine) -> ResetBank:
        """The training bank; the engine's worlds are used up."""
        ...

    def fresh_starts(self, engine: Engine, generator: torch.Generator) -> Tensor:
        """Rows [N, S] to evaluate from, independent of the bank."""
        ...


def _choose(mask: Tensor, new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """The new rows where `mask` is set, else the old ones."""
    if mask.device.type == "cpu":
        # few worlds end in a step, and a CPU need not avoid shapes that depend on data
        ids = torch.nonzero(mask)[:, 0]
        return {name: old[name].index_copy(0, ids, x[ids]) for name, x in new.items()}
    return {name: torch.where(mask if x.ndim == 1 else mask[:, None], x, old[name]) for name, x in new.items()}


class WorldsEnv:
    """`VecEnv` over an engine, a task and a sampler of reset configurations; see `embodied.spec.protocols.VecEnv`."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        sampler: Sampler,
        bank: ResetBank,
        randomise: bool = True,
        stagger: bool = True,
        warn: Callable[[str], None] | None = None,
        max_steps: int | None = None,
    ) -> None:
        """`randomise`: draw physics anew at each reset; `stagger`: spread the ends of first episodes, which record nothing;
        `max_steps`: an episode's limit, by default the task's.
        """
        bank.check(engine.signature)
        self.engine, self.task, self.sampler, self.bank = engine, task, sampler, bank
        self.num_worlds, self.device = engine.num_worlds, engine.device
        self.action_size, self.obs_sizes = task.spec.action.size, task.obs_sizes
        self.max_episode_steps = max_steps or task.spec.max_steps
        self.mirror = task.mirror
        self._randomise, self._stagger, self._warn = randomise, stagger, warn
        self._rows = bank.rows.to(engine.device)
        self._generator = torch.Generator(engine.device)
        self._all = torch.ones(self.num_worlds, dtype=torch.bool, device=engine.device)
        self._scorer = sampler if isinstance(sampler, ScoringSampler) else None
        self._visited: list[Tensor] = []  # slots [N] of the steps since the iteration began, for a scorer
        engine.bind(task.fields)

    def reset(self, seed: int) -> Obs:
        """Start every world anew; the seed decides everything that follows."""
        self._generator.manual_seed(seed)
        count, device = self.num_worlds, self.device
        self._steps = torch.zeros(count, dtype=torch.int64, device=device)
        self._returns = torch.zeros(count, device=device)
        # -1: an episode that records nothing
        self._slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._invalid_total = torch.zeros((), dtype=torch.int64, device=device)
        self._visited.clear()
        self._held: Tensor | None = None
        slots = self.sampler.sample()
        self._state: dict[str, Tensor] = {}
        self._begin(self._all, slots)
        if self._stagger:
            self._steps = torch.randint(self.max_episode_steps, (count,), generator=self._generator, device=device)
        else:
            self._slots = slots
        self._mark_time()
        truth, self._seen = self.task.look(self.engine, self._state, self._generator)
        self._obs = self.task.observe(truth, self._seen, self._state)
        return self._obs

    def restart(self, group: int) -> Obs:
        """Cut all episodes, which record nothing, and start every world anew.

        Until the next call the worlds of a group, `group` neighbours, begin every episode at the same configuration.
        """
        held = self._held = self.sampler.sample()[::group].repeat_interleave(group)
        self._begin(self._all, held)
        self._slots = held
        self._steps = torch.zeros_like(self._steps)
        self._returns = torch.zeros_like(self._returns)
        self._mark_time()
        truth, self._seen = self.task.look(self.engine, self._state, self._generator)
        self._obs = self.task.observe(truth, self._seen, self._state)
        return self._obs

    def _mark_time(self) -> None:
        """`elapsed` [N], the share of the episode that is over: a critic needs it where the time limit fails."""
        self._state["elapsed"] = self._steps / self.max_episode_steps

    def _begin(self, mask: Tensor, slots: Tensor) -> None:
        """Put the worlds of `mask` at the configurations of their slots."""
        self.engine.set_state(self._rows, mask, slots)
        factors = self.task.randomise(self.engine, mask, self._generator, self._randomise)
        fresh = self.task.start(self.engine, factors, self._generator)
        self._state = _choose(mask, fresh, self._state) if self._state else fresh

    def step(self, action: Tensor) -> tuple[Obs, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Advance a control step; worlds that ended are already reset in the returned observation."""
        engine, task = self.engine, self.task
        bad_action = ~torch.isfinite(action).all(-1)
        task.command(engine, torch.where(bad_action[:, None], 0.0, action), self._state, self._seen)
        task.disturb(engine, self._state, self._generator)
        engine.step(task.spec.robot.substeps)
        self._steps = self._steps + 1
        self._mark_time()
        truth, seen = task.look(engine, self._state, self._generator)
        final_obs = task.observe(truth, seen, self._state)
        reward, success, failure = task.judge(truth, self._state)
        health = engine.health()
        invalid = (health != 0) | bad_action
        recorded = self._slots >= 0
        late = self._steps >= self.max_episode_steps
        if task.time_limit_fails:
            # not where the limit came early because first episodes are staggered
            failure = failure | (late & recorded & ~success)
        # else the limit only cuts what goes on, and what went well until then is judged there
        reached = success if task.time_limit_fails else success & ~late
        success, failure = success & ~invalid, failure & ~invalid
        terminated = (reached | failure) & ~invalid
        truncated = late & ~terminated & ~invalid
        reward = reward - task.failure_cost * failure
        ended = terminated | truncated | invalid
        if self._some(invalid):
            # whatever a broken world says must not reach a learner
            reward = torch.where(invalid, 0.0, reward)
            final_obs = {name: torch.where(invalid[:, None], self._obs[name], value) for name, value in final_obs.items()}
        self._returns = self._returns + reward
        self.sampler.record(torch.where(ended, self._slots, -1), success, ~invalid, self._returns)
        info: dict[str, Any] = {
            "final_obs": final_obs,
            "success": success,
            "failure": failure | (truncated & recorded & ~success),
            "invalid": invalid,
            "episode": {
                "ended": ended & recorded & ~invalid,
                "return": self._returns,
                "length": self._steps,
            },
            "errors": task.errors(truth, self._state),
        }
        if self._some(invalid):
            self._invalid_total = self._invalid_total + invalid.sum()
            if self._warn is not None and engine.device.type == "cpu":
                self._report(self._warn, invalid, health, bad_action)
        if self._scorer is not None:
            self._visited.append(torch.where(invalid, -1, self._slots))
        self._seen, self._obs = seen, final_obs
        if self._some(ended):
            self._obs = self._renew(ended, seen, final_obs)
        return self._obs, reward, terminated, truncated, info

    def _some(self, mask: Tensor) -> bool:
        """Whether any world is in a mask; on a GPU always, for there nothing is read."""
        if self.device.type == "cpu":
            return bool(mask.any())
        return True

    def _renew(self, ended: Tensor, seen: dict[str, Tensor], final_obs: Obs) -> Obs:
        """Begin new episodes where one ended; the observations of all worlds then.

        Worlds that go on keep what they saw: looking twice would draw noise twice.
        """
        slots = self.sampler.sample() if self._held is None else self._held
        self._begin(ended, slots)
        self._slots = torch.where(ended, slots, self._slots)
        self._steps = torch.where(ended, 0, self._steps)
        self._returns = torch.where(ended, 0.0, self._returns)
        self._mark_time()
        truth, fresh = self.task.look(self.engine, self._state, self._generator)
        self._seen = _choose(ended, fresh, seen)
        if self.device.type != "cpu":
            return _choose(ended, self.task.observe(truth, fresh, self._state), final_obs)
        ids = torch.nonzero(ended)[:, 0]
        parts = ({name: x[ids] for name, x in values.items()} for values in (truth, fresh, self._state))
        new = self.task.observe(*parts)
        return {name: x.index_copy(0, ids, new[name]) for name, x in final_obs.items()}

    def _report(self, warn: Callable[[str], None], invalid: Tensor, health: Tensor, bad_action: Tensor) -> None:
        for world in torch.nonzero(invalid)[:4, 0].tolist():
            cause = "non-finite action" if bad_action[world] else describe_health(int(health[world]))
            warn(f"world {world}: {cause}; quarantined and reset (start {int(self._slots[world])})")

    def on_warning(self, warn: Callable[[str], None] | None) -> None:
        """Where one line is sent for each world that had to be quarantined."""
        self._warn = warn

    def end_iteration(self, advantage: Tensor | None) -> int:
        """Tell the sampler that an iteration is over; environment steps that it took itself.

        Raises:
            RuntimeError: the sampler scores configurations by advantages, and there are none.
        """
        if self._scorer is not None:
            if advantage is None:
                raise RuntimeError("the sampler scores configurations by advantages: the learner must give them")
            self._scorer.score(torch.stack(self._visited[-len(advantage) :]), advantage.abs())
            self._visited.clear()
        return self.sampler.end_iteration()

    def metrics(self) -> dict[str, Tensor]:
        """What the sampler and the worlds' health look like: 0-d tensors."""
        named = {f"sampler/{name}": value for name, value in self.sampler.metrics().items()}
        return {**named, "health/invalid_total": self._invalid_total.float()}

    @property
    def observation(self) -> Obs:
        """What the worlds show now."""
        return self._obs

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next."""
        return {
            "engine": self.engine.get_state(),
            "signature": self.engine.signature,
            "state": dict(self._state),
            "seen": dict(self._seen),
            "obs": dict(self._obs),
            "steps": self._steps,
            "returns": self._returns,
            "slots": self._slots,
            "held": self._held,
            "visited": list(self._visited),
            "invalid_total": self._invalid_total,
            "generator": self._generator.get_state(),
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Obs:
        """Restore, and return the present observation.

        Raises:
            BadInput: the state is of another engine, model or number of worlds.
        """
        if state["signature"] != self.engine.signature:
            raise BadInput(f"environment state of engine '{state['signature']}', this one is '{self.engine.signature}'")
        if state["engine"].shape[0] != self.num_worlds:
            raise BadInput(f"environment state of {state['engine'].shape[0]} worlds, this one has {self.num_worlds}")
        self.engine.set_state(state["engine"].to(self.device))
        self._state = {name: value.to(self.device).clone() for name, value in state["state"].items()}
        self._seen = {name: value.to(self.device).clone() for name, value in state["seen"].items()}
        self._obs = {name: value.to(self.device).clone() for name, value in state["obs"].items()}
        for name in ("steps", "returns", "slots", "invalid_total"):
            setattr(self, f"_{name}", state[name].to(self.device).clone())
        self._held = None if state["held"] is None else state["held"].to(self.device).clone()
        self._visited = [slots.to(self.device).clone() for slots in state["visited"]]
        self._generator.set_state(state["generator"])
        self.sampler.load_state_dict(state["sampler"])
        return self._obs
