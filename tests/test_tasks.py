"""What every task must keep, whatever it is about: each on its usual robot. A further task is one line in `CASES`."""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.config import CHOICES
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.resets import ResetBank
from embodied.sim.samplers.uniform import Uniform, UniformOptions
from embodied.spec import registry
from embodied.spec.errors import BadInput
from embodied.spec.policy import PolicySpec
from embodied.spec.robot import digest

WORLDS = 16
ODD = torch.arange(WORLDS) % 2 == 1


@dataclass(frozen=True)
class Knob:
    """A range of the options: the entries of a model field that it is about, and their bounds, which multiply or are added."""

    field: str
    body: str | None  # whose row it is; None: all rows
    columns: slice
    bounds: Callable[[Any], list[float]]
    added: bool = False


def _clearance(options: Any) -> list[float]:
    """How far walls may move [m]: each by as much as the gap changes."""
    far = options.clearance * max(abs(factor - 1.0) for factor in options.randomise.clearance)
    return [-far, far]


ARM = (
    Knob("pair_friction", None, slice(0, 2), lambda o: o.randomise.friction),
    Knob("actuator_gainprm", None, slice(0, 1), lambda o: o.randomise.gains),
    Knob("actuator_biasprm", None, slice(1, 3), lambda o: o.randomise.gains),
    Knob("body_mass", "tool", slice(None), lambda o: o.randomise.mass),
    Knob("body_inertia", "tool", slice(None), lambda o: o.randomise.mass),
    Knob("geom_pos", None, slice(0, 2), _clearance, added=True),
)
FLIGHT = (
    Knob("body_mass", "body", slice(None), lambda o: o.randomise.mass),
    Knob("body_inertia", "body", slice(None), lambda o: o.randomise.inertia),
    Knob("actuator_gainprm", None, slice(0, 1), lambda o: o.randomise.thrust),
)
LEGS = (
    Knob("pair_friction", None, slice(0, 2), lambda o: o.randomise.friction),
    Knob("body_mass", "trunk", slice(None), lambda o: o.randomise.mass, added=True),
    Knob("body_ipos", "trunk", slice(0, 2), lambda o: o.randomise.centre, added=True),
    Knob("actuator_gainprm", None, slice(0, 1), lambda o: o.randomise.gains),
    Knob("actuator_biasprm", None, slice(1, 3), lambda o: o.randomise.gains),
    Knob("actuator_forcerange", None, slice(None), lambda o: o.randomise.strength),
)


@dataclass(frozen=True)
class Case:
    """What is known of a task: its knobs, what makes its bank small, whether doing nothing is no failure, what
    makes it last to its time limit whatever is done (None: success is not judged there), and what makes something happen
    all the time.
    """

    knobs: tuple[Knob, ...]
    small: dict[str, Any]
    idle: bool = False
    lasting: dict[str, Any] | None = None
    restless: dict[str, Any] = field(default_factory=dict)


SIZE = {"bank__size": 64}
COURSE = {"bank__size": 64, "terrain": ["stairs", "gaps"], "levels": [0, 3], "variants": 1}
CASES = {
    "assembly": Case(ARM, SIZE),
    "hover": Case(FLIGHT, SIZE, lasting={"box": 100.0}),
    "track": Case(FLIGHT, SIZE, lasting={"box": 100.0}),
    "locomotion": Case(LEGS, {"bank__size": 64}, True, {}, {"command__change_s": 0.04, "randomise__push_s": 0.04}),
    "traverse": Case(LEGS, COURSE, restless={"randomise__push_s": 0.04}),
}
TASKS = list(CASES)
IDLE = [name for name, case in CASES.items() if case.idle]
JUDGED_AT_THE_LIMIT = [name for name, case in CASES.items() if case.lasting is not None]


def usual_robot(name: str) -> str:
    return str(registry.find("task", name).usual.get("robot", CHOICES["robot"]))


def built(group: str, name: str, *parts: Any, **changes: Any) -> Any:
    """What is registered under a name, with `changes` of its options: `__` stands for a dot."""
    entry = registry.find(group, name)
    options = entry.options()
    for key, value in changes.items():
        *path, last = key.split("__")
        setattr(functools.reduce(getattr, path, options), last, value)
    return entry.build(options, *parts)


def make_task(name: str, **changes: Any) -> Any:
    return built("task", name, built("robot", usual_robot(name)), **CASES[name].small, **changes)


def make_engine(task: Any, worlds: int = WORLDS) -> CpuEngine:
    engine = CpuEngine(task.model, worlds, task.parameters, threads=1)
    engine.bind(task.fields)
    return engine


@functools.cache
def bank_of(name: str) -> ResetBank:
    """A small bank, which none of the changes here concerns."""
    task = make_task(name)
    return task.make_bank(make_engine(task, 64))


def make_env(
    name: str, randomise: bool = True, stagger: bool = False, worlds: int = WORLDS, restless: bool = False, **changes: Any
) -> WorldsEnv:
    task, bank = make_task(name, **changes, **(CASES[name].restless if restless else {})), bank_of(name)
    sampler = Uniform(UniformOptions(), bank.slots(worlds, 0, torch.device("cpu")))
    return WorldsEnv(make_engine(task, worlds), task, sampler, bank, randomise, stagger)


def actions(env: WorldsEnv, steps: int, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield 2 * torch.rand(env.num_worlds, env.action_size, generator=generator) - 1


def broken(action: Tensor, worlds: Tensor) -> Tensor:
    """The action, not a number in those worlds: the quickest way to a reset."""
    return torch.where(worlds[:, None], math.nan, action)


def assert_equal_rows(one: dict[str, Tensor], other: dict[str, Tensor], worlds: Tensor, what: str) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value[worlds], other[key][worlds]), f"{what} '{key}'"


def test_every_registered_task_is_here() -> None:
    assert sorted(CASES) == registry.names("task")


@pytest.mark.parametrize("name", TASKS)
def test_observations_after_a_reset_are_of_the_state_that_was_restored(name: str) -> None:
    """A second engine, given the state rows alone, shows the same: nothing of the episode before, or of nominal physics."""
    env = make_env(name)
    env.reset(0)
    task = make_task(name)
    other = make_engine(task)

    def assert_fresh(worlds: Tensor) -> None:
        saved = env.state_dict()
        other.set_state(saved["engine"])
        state = {key: value.clone() for key, value in saved["state"].items()}
        truth, again = task.look(other, state, torch.Generator().manual_seed(0))
        # with the readings that the policy had, noise and all
        expected = task.observe(truth, saved["seen"], state)
        for group, obs in env.observation.items():
            assert obs.shape == (WORLDS, env.obs_sizes[group]) and torch.isfinite(obs).all()
            torch.testing.assert_close(obs[worlds], expected[group][worlds], atol=1e-6, rtol=1e-6)
        for key, value in truth.items():
            noise, alike = ((seen[key] - value)[worlds].abs().max() for seen in (saved["seen"], again))
            assert noise <= 6 * alike + 1e-6, f"'{key}' is not what the policy was told, give or take its noise"

    assert_fresh(torch.ones(WORLDS, dtype=torch.bool))
    for action in actions(env, 5):
        env.step(action)
    env.step(broken(action, ODD))
    assert_fresh(ODD)


@pytest.mark.parametrize("name", TASKS)
def test_resetting_half_the_worlds_leaves_the_others_as_they_were(name: str) -> None:
    """Against a twin in which nobody is reset: state of the engine and of the episode, readings, observations."""
    env, twin = (make_env(name, restless=True) for _ in range(2))
    env.reset(0), twin.reset(0)
    for action in actions(env, 4):
        env.step(action), twin.step(action)
    others = ~ODD
    obs, reward, *_ = env.step(broken(action, ODD))
    unbroken, twins_reward, *ends, info = twin.step(torch.where(ODD[:, None], 0.0, action))
    assert not bool((ends[0] | ends[1] | info["invalid"]).any())
    one, two = env.state_dict(), twin.state_dict()
    assert one["steps"].tolist() == [0 if odd else 5 for odd in ODD.tolist()]
    assert_equal_rows(obs, unbroken, others, "observation")
    assert torch.equal(reward[others], twins_reward[others])
    assert_equal_rows(one["seen"], two["seen"], others, "reading")
    assert_equal_rows(one["state"], two["state"], others, "state")
    for key in ("steps", "returns", "slots", "engine"):
        assert torch.equal(one[key][others], two[key][others]), key


@pytest.mark.parametrize("name", TASKS)
def test_a_thousand_resets_stay_within_the_declared_ranges_of_nominal(name: str) -> None:
    env = make_env(name, worlds=20)
    env.reset(0)
    model, options = env.task.model, env.task.options
    nobody = torch.full((20, env.action_size), math.nan)
    live = {key: env.engine.parameters(key) for key in env.task.parameters}
    nominal = {key: torch.tensor(getattr(model, key)) for key in live}
    seen: dict[int, list[Tensor]] = {i: [] for i in range(len(CASES[name].knobs))}
    generator, everybody = torch.Generator().manual_seed(0), torch.ones(20, dtype=torch.bool)
    for round in range(50):
        if round % 2:
            assert bool(env.step(nobody)[-1]["invalid"].all())
        else:  # without the rows of the bank, which are nominal
            env.task.randomise(env.engine, everybody, generator, True)
        rest = {key: values.clone() for key, values in live.items()}
        for i, knob in enumerate(CASES[name].knobs):
            rows = slice(None) if knob.body is None else slice(model.body(knob.body).id, model.body(knob.body).id + 1)
            where = (slice(None), rows) + ((knob.columns,) if live[knob.field].ndim > 2 else ())
            usual = nominal[knob.field][where[1:]]
            drawn = live[knob.field][where] - usual if knob.added else (live[knob.field][where] / usual)[:, usual != 0]
            low, high = knob.bounds(options)
            assert low - 1e-6 <= drawn.min() and drawn.max() <= high + 1e-6, knob.field
            seen[i].append(drawn.flatten(1))
            rest[knob.field][where] = usual.expand_as(rest[knob.field][where])
        # and what no range is about stays nominal
        for key, values in rest.items():
            assert torch.equal(values, nominal[key].expand_as(values)), key
    for i, knob in enumerate(CASES[name].knobs):
        low, high = knob.bounds(options)
        values = torch.cat(seen[i])
        assert len(values) == 1000
        column = values[:, values.std(0).argmax()]
        # uniform within the bounds: a thousand draws come within 2 % of both, and their spread is a fifth of a uniform's off
        assert column.min() < low + 0.02 * (high - low) and column.max() > high - 0.02 * (high - low), knob.field
        assert float(column.std()) == pytest.approx((high - low) / math.sqrt(12), rel=0.2)


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_trajectory(name: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        env = make_env(name, stagger=True, restless=True)
        seen = [env.reset(seed)["policy"]]
        for action in actions(env, 12):
            obs, reward, *_ = env.step(broken(action, ODD & (action[:, 0] > 0.8)))
            seen += [obs["policy"], obs["critic"], reward, env.engine.get_state()]
        runs.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("name", TASKS)
def test_a_saved_state_continues_bit_equal_through_resets(name: str) -> None:
    env = make_env(name, stagger=True, restless=True)
    env.reset(3)
    for action in actions(env, 6):
        env.step(broken(action, ODD & (action[:, 0] > 0.5)))
    file = io.BytesIO()
    torch.save(env.state_dict(), file)

    def onward(env: WorldsEnv) -> list[Tensor]:
        out, resets = [], 0
        for action in actions(env, 15, seed=9):
            obs, reward, terminated, truncated, info = env.step(broken(action, action[:, 0] > 0.8))
            resets += int((terminated | truncated | info["invalid"]).sum())
            out += [*obs.values(), reward, terminated, truncated, *info["final_obs"].values(), env.engine.get_state()]
        assert resets > WORLDS
        return out

    first = onward(env)
    other = make_env(name, stagger=True, restless=True)
    other.reset(99)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for i, (one, two) in enumerate(zip(first, onward(other), strict=True)):
        assert torch.equal(one, two), f"item {i}"


@pytest.mark.parametrize("fault", ["runs away", "NaN state", "NaN action"])
@pytest.mark.parametrize("name", TASKS)
def test_a_broken_world_is_invalid_and_the_others_go_on_bit_equal(name: str, fault: str) -> None:
    env, twin = (make_env(name, randomise=False) for _ in range(2))
    env.reset(0), twin.reset(0)
    others = torch.arange(WORLDS) != 2
    for t, action in enumerate(actions(env, 8)):
        sick = action.clone()
        if t == 3 and fault == "NaN action":
            sick[2, 1] = math.nan
        elif t == 3:
            velocity = torch.full_like(env.engine.read("qvel"), 1e12 if fault == "runs away" else math.nan)
            env.engine.write("qvel", velocity, ~others)
        obs, reward, terminated, truncated, info = env.step(sick)
        healthy, twins_reward, *_ = twin.step(action)
        assert info["invalid"].tolist() == [t == 3 and world == 2 for world in range(WORLDS)]
        for value in (*obs.values(), *info["final_obs"].values(), reward, *env.state_dict()["state"].values()):
            assert torch.isfinite(value).all()
        assert torch.equal(env.engine.get_state()[others], twin.engine.get_state()[others])
        assert torch.equal(obs["critic"][others], healthy["critic"][others])
        assert torch.equal(reward[others], twins_reward[others])
        if t == 3:
            assert not bool(terminated[2] | truncated[2] | info["episode"]["ended"][2]) and float(reward[2]) == 0.0
            assert not torch.equal(obs["policy"][2], info["final_obs"]["policy"][2])  # it has begun anew
    assert float(env.metrics()["health/invalid_total"]) == 1


def to_the_limit(env: WorldsEnv) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Rest through a whole episode, in which nothing ends before its limit; terminated, truncated, info of the last step."""
    env.reset(0)
    for step in range(1, env.max_episode_steps + 1):
        _, _, terminated, truncated, info = env.step(torch.full((WORLDS, env.action_size), env.task.rest_action))
        if step < env.max_episode_steps:
            assert not bool((terminated | truncated | info["success"] | info["failure"] | info["invalid"]).any())
    return terminated, truncated, info


@pytest.mark.parametrize("name", IDLE)
def test_doing_nothing_to_the_time_limit_is_truncated(name: str) -> None:
    """Where that is no failure: the limit only cuts what goes on, and what follows is bootstrapped."""
    env = make_env(name, episode_s=1.0)
    terminated, truncated, info = to_the_limit(env)
    assert bool(truncated.all()) and not bool(terminated.any())
    assert torch.equal(info["failure"], ~info["success"]) and bool(info["episode"]["ended"].all())
    assert info["episode"]["length"].tolist() == [env.max_episode_steps] * WORLDS


@pytest.mark.parametrize("near", [1000.0, 1e-9])
@pytest.mark.parametrize("name", JUDGED_AT_THE_LIMIT)
def test_success_that_is_judged_at_the_limit_is_counted_and_bootstrapped(name: str, near: float) -> None:
    env = make_env(name, episode_s=1.0, near=near, **CASES[name].lasting)
    terminated, truncated, info = to_the_limit(env)
    good = torch.full((WORLDS,), near == 1000.0)
    assert bool(truncated.all()) and not bool(terminated.any())
    assert torch.equal(info["success"], good) and torch.equal(info["failure"], ~good)
    assert bool(info["episode"]["ended"].all())
    table = env.sampler.table
    assert int(table.visits[:-1].sum()) == WORLDS and int(table.sums[:-1].sum()) == int(good.sum())


@pytest.mark.parametrize("name", TASKS)
def test_the_policys_description_survives_json(name: str) -> None:
    task = make_task(name)
    again = PolicySpec.from_dict(json.loads(json.dumps(task.spec.to_dict())))
    assert again == task.spec and digest(again) == digest(task.spec) and again.robot == task.spec.robot
    assert type(again.robot) is type(task.spec.robot) and type(again.action) is type(task.spec.action)
    assert again.sizes == task.spec.sizes and again.obs_size == task.obs_sizes["policy"]


@pytest.mark.parametrize("name", TASKS)
def test_a_robot_of_another_kind_is_refused_with_one_that_fits(name: str) -> None:
    usual = usual_robot(name)
    for other in {"franka", "crazyflie", "go1"} - {usual}:
        with pytest.raises(BadInput, match=f"task={name} with robot={other}: .* robot={usual}"):
            built("task", name, built("robot", other))
