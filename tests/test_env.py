"""The learning problem: resets, ends, faults and everything that a checkpoint must carry."""

from __future__ import annotations

import math

import pytest
import torch
from worlds import make_engine, make_env, make_task, make_trainer, small_bank

from embodied.algos.evaluate import evaluate
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank
from embodied.spec.errors import BadInput
from embodied.spec.rotations import rotate_inverse


def actions(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(steps, env.num_worlds, env.action_size, generator=generator) - 1


def test_same_seed_same_world_other_seed_other_world() -> None:
    runs = []
    for seed in (0, 0, 1):
        env = make_env()
        obs = [env.reset(seed)["policy"]]
        obs += [env.step(a)[0]["policy"] for a in actions(env, 30)]
        runs.append(torch.stack(obs))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_state_dict_continues_bit_equal_through_resets_and_noise() -> None:
    env = make_env(episode_s=0.6)
    env.reset(3)
    for a in actions(env, 25):
        env.step(a)
    saved = env.state_dict()
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}
    saved["state"] = {k: v.clone() for k, v in saved["state"].items()}

    def onward(e):
        out = []
        for a in actions(e, 40, seed=9):
            obs, reward, terminated, truncated, info = e.step(a)
            out += [obs["policy"], obs["critic"], reward, terminated, truncated, info["final_obs"]["critic"]]
        return out

    first = onward(env)
    other = make_env(episode_s=0.6)
    other.reset(99)
    restored = other.load_state_dict(saved)
    assert torch.equal(restored["policy"], saved["obs"]["policy"])
    for one, two in zip(first, onward(other), strict=True):
        assert torch.equal(one, two)


def test_final_obs_is_the_true_last_observation_and_never_a_view() -> None:
    """Two environments alike; one has worlds that end, the other does not: final_obs is what the other shows."""
    short, long = make_env(episode_s=0.6, stagger=False), make_env(episode_s=4.0, stagger=False)
    a0, b0 = short.reset(0), long.reset(0)
    assert torch.equal(a0["policy"], b0["policy"])
    for t, a in enumerate(actions(short, 15)):
        obs, _, terminated, truncated, info = short.step(a)
        other, *_, info2 = long.step(a)
        assert not bool(info2["success"].any())  # seed 0 starts no world that succeeds by itself
        assert torch.equal(info["final_obs"]["policy"], other["policy"])
        kept = info["final_obs"]["policy"].clone()
        ended = terminated | truncated
        assert bool(ended.all()) == (t == 14)
        if t < 14:
            assert torch.equal(obs["policy"], other["policy"])
        else:
            assert not torch.equal(obs["policy"], other["policy"])
    short.step(actions(short, 1)[0])
    assert torch.equal(info["final_obs"]["policy"], kept)


def test_first_episodes_are_staggered_and_record_nothing() -> None:
    env = make_env(num_worlds=32, episode_s=0.8)
    env.reset(0)
    ends, counted = torch.zeros(20), 0
    first = torch.ones(32, dtype=torch.bool)
    for t, a in enumerate(actions(env, 20)):
        *_, terminated, truncated, info = env.step(a)
        assert not bool((info["episode"]["ended"] & first).any())
        ends[t] = (truncated & first).sum()
        first &= ~(terminated | truncated)
        counted += int(info["episode"]["ended"].sum())
    assert (ends > 0).sum() > 8
    assert not bool(first.any())
    # the table's last row is where records of nothing go
    assert int(env.sampler.table.visits[:-1].sum()) == counted


def test_reaching_the_time_limit_is_a_failure_that_ends_the_episode() -> None:
    """The limit is part of this problem: worth nothing more, charged once, told to the sampler, and seen coming."""
    env = make_env(episode_s=0.6, stagger=False)
    obs = env.reset(0)
    elapsed = env.task.spec.obs_size + 11  # where the critic's privileged terms hold the time
    for t in range(15):
        torch.testing.assert_close(obs["critic"][:, elapsed], torch.full((8,), t / 15))
        obs, reward, terminated, truncated, info = env.step(torch.zeros(8, 6))
        assert not bool(info["success"].any())  # seed 0 starts no world that succeeds by itself
        assert bool(terminated.all()) == bool(info["failure"].all()) == (t == 14)
        assert not bool(truncated.any())
        torch.testing.assert_close(reward, torch.full((8,), -1.0 if t == 14 else 0.0), atol=0.01, rtol=0)
    assert int(env.sampler.table.visits[:-1].sum()) == 8
    assert bool(info["episode"]["ended"].all())


def test_a_staggered_first_end_truncates_and_is_no_failure() -> None:
    env = make_env(num_worlds=32, episode_s=0.8)
    env.reset(0)
    first = torch.ones(32, dtype=torch.bool)
    for a in actions(env, 20):
        _, reward, terminated, truncated, info = env.step(0 * a)
        early = truncated & first
        assert not bool((truncated & ~first).any())
        assert not bool((info["failure"] & early).any())
        assert float(torch.where(early, reward.abs(), 0.0).max()) < 0.01
        first &= ~(terminated | truncated)


def test_success_must_be_held_and_terminates() -> None:
    """World 0 is put deep into the hole and pressed down: exactly five good steps, then 100 and a new episode."""
    task = make_task()
    from embodied.sim.tasks import assembly_starts

    engine = make_engine(task, 4)
    generator = torch.Generator().manual_seed(1)
    poses = assembly_starts.sample_poses(task, "inserted", 4, generator)
    poses["offset"][:, :2], poses["offset"][:, 2], poses["turn"][:] = 0.0, 0.0255, 0.0
    poses["offset"][1, 2] = 0.024  # not deep enough
    poses["offset"][2, 2], poses["turn"][2, 0] = 0.0255, 0.0
    poses["offset"][3, 0], poses["offset"][3, 2] = 0.06, 0.03  # deep, but beside the socket
    rows, valid = assembly_starts.settle(task, engine, poses)
    assert valid[:3].all()
    bank = ResetBank(rows, torch.zeros(4, dtype=torch.int64), ("x",), engine.signature, "x")
    from embodied.sim.env import WorldsEnv
    from embodied.sim.samplers.fixed import Fixed

    env = WorldsEnv(engine, task, Fixed(4, engine.device), bank, randomise=False, stagger=False)
    env.reset(0)
    for t in range(8):
        _, reward, terminated, _, info = env.step(torch.zeros(4, 6))
        assert bool(info["success"][0]) == (t == 4)
        assert bool(terminated[0]) == (t == 4)
        assert not bool(info["success"][1]) and not bool(info["success"][3])
        if t == 4:
            assert float(reward[0]) == pytest.approx(100.0, abs=0.01)
        elif t < 4:
            assert abs(float(reward[0])) < 0.01


def test_a_world_made_nan_is_named_quarantined_and_counted_while_the_rest_runs() -> None:
    said: list[str] = []
    env, twin = make_env(warn=said.append, stagger=False), make_env(stagger=False)
    env.reset(0)
    twin.reset(0)
    plan = actions(env, 12)
    for t, a in enumerate(plan):
        if t == 3:  # state: a velocity that no integrator survives
            velocity = env.engine.read("qvel")
            velocity[2] = 1e12
            env.engine.write("qvel", velocity)
        sick = a.clone()
        if t == 7:  # control: an action that is not a number
            sick[5, 1] = math.nan
        obs, reward, terminated, truncated, info = env.step(sick)
        healthy = twin.step(a)
        expected = {3: 2, 7: 5}.get(t)
        assert info["invalid"].nonzero().flatten().tolist() == ([] if expected is None else [expected])
        for value in (*obs.values(), *info["final_obs"].values(), reward):
            assert torch.isfinite(value).all()
        if expected is not None:
            assert not bool((terminated | truncated)[expected])
            assert not bool(info["episode"]["ended"][expected])
            assert any(f"world {expected}:" in line for line in said)
        if t <= 7:
            others = torch.tensor([i for i in range(8) if i not in (2, 5)])
            if t < 3:
                assert torch.equal(obs["policy"], healthy[0]["policy"])
            # the draws after a reset differ for all; the physics of the others has not noticed in the step itself
            if t == 3:
                torch.testing.assert_close(env.engine.read("qpos")[others], twin.engine.read("qpos")[others], atol=0, rtol=0)
    assert float(env.metrics()["health/invalid_total"]) == 2
    assert any("engine_warning" in line for line in said)
    assert any("non-finite action" in line for line in said)


def test_learning_goes_on_past_an_invalid_world() -> None:
    trainer = make_trainer()
    trainer.iterate()
    velocity = trainer.env.engine.read("qvel")
    velocity[1] = 1e12
    trainer.env.engine.write("qvel", velocity)
    row = trainer.iterate()
    assert row["health/invalid_total"] == 1
    assert all(math.isfinite(v) for k, v in row.items() if k.startswith("loss/"))


def test_randomisation_is_drawn_from_nominal_and_never_compounds() -> None:
    env = make_env(num_worlds=16, episode_s=0.6)
    env.reset(0)
    nominal = torch.tensor(env.task.model.pair_friction)
    low, high = env.task.options.randomise.friction
    clearance_low, clearance_high = env.task.options.randomise.clearance
    wall = env.task.model.geom("shaft_px").id
    for a in actions(env, 120):
        env.step(a)
    factor = env.engine.parameters("pair_friction")[..., 0] / nominal[:, 0]
    assert factor.min() >= low - 1e-9 and factor.max() <= high + 1e-9
    assert factor[:, 0].std() > 0.1  # eight resets a world and still spread
    assert torch.allclose(factor, factor[:, :1].expand_as(factor))
    torch.testing.assert_close(factor[:, 0].float(), env._state["factor/friction"])
    moved = env.engine.parameters("geom_pos")[:, wall, 0] - env.task.model.geom_pos[wall, 0]
    step = env.task.options.clearance
    assert moved.min() >= (clearance_low - 1) * step - 1e-9 and moved.max() <= (clearance_high - 1) * step + 1e-9


def test_nominal_worlds_are_nominal() -> None:
    env = make_env(randomise=False)
    env.reset(0)
    for a in actions(env, 10):
        env.step(a)
    for name in env.task.parameters:
        expected = torch.tensor(getattr(env.task.model, name))
        assert torch.equal(env.engine.parameters(name), expected.expand_as(env.engine.parameters(name)))


def test_a_bank_of_another_engine_is_refused() -> None:
    task, bank = make_task(clearance=0.0004), small_bank()
    with pytest.raises(BadInput, match="cannot serve engine"):
        make_env(clearance=0.0004)
    assert bank.signature != make_engine(task, 1).signature


def test_bank_starts_are_where_their_tags_say() -> None:
    bank, task = small_bank(), make_task()
    engine = make_engine(task, len(bank.tags))
    engine.set_state(bank.rows)
    data = engine.read("sensordata")
    tip = data[:, task.sensors["tcp_pos"]] - engine.read("mocap_pos")[:, 0]
    distance, depth = tip.norm(dim=-1), -tip[:, 2]
    inserted, near, far = (bank.tags == i for i in range(3))
    assert (depth[inserted] > -0.001).all() and (depth[inserted] < 0.029).all()
    assert (depth[near] < 0.001).all() and (distance[near] < 0.04).all()
    assert (distance[far] > 0.029).all() and (distance[far] < 0.101).all()
    assert (data[:, task.sensors["contact"]] > -0.0003).all()
    assert torch.bincount(bank.tags).tolist() == [26, 22, 16]  # .4, .35 and .25 of 64, the rest to the largest


def test_fresh_starts_are_far_tilted_at_most_ten_degrees_and_follow_their_seed() -> None:
    task = make_task()
    fresh = FreshStarts(make_engine(task, 64), task, False)
    first = fresh.reset(1)["critic"].clone()
    tip = fresh._seen["tcp_pos"] - fresh._state["socket_pos"]
    assert tip.norm(dim=-1).min() > 0.0295
    axis = rotate_inverse(fresh._state["socket_quat"], rotate_z(fresh._seen["tcp_quat"]))
    assert axis[:, 2].min() > math.cos(math.radians(10.2))
    assert torch.equal(fresh.reset(1)["critic"], first)
    assert not torch.equal(fresh.reset(2)["critic"], first)


def rotate_z(quat):
    from embodied.spec.rotations import rotate

    return rotate(quat, torch.tensor([0.0, 0.0, 1.0]).expand(len(quat), 3))


def test_evaluation_counts_one_episode_a_world() -> None:
    task = make_task(episode_s=0.6)
    fresh = FreshStarts(make_engine(task, 16), task, False)
    torch.manual_seed(0)
    policy = GaussianPolicy(MLPOptions(hidden=[8]), task.obs_sizes, task.spec.action.size)
    result = evaluate(fresh, policy, seed=5)
    again = evaluate(fresh, policy, seed=5)
    assert result.summary()["episodes"] == 16
    assert result.summary() == again.summary()
    assert result.length.tolist() == [15] * 16
    assert result.summary()["success_at_end"] == 0.0


def test_policy_never_sees_the_truth() -> None:
    """With a large bias the policy's group moves and the critic's first terms do not."""
    seen, biased = make_env(stagger=False, randomise=False), make_env(stagger=False, randomise=False, pose_bias=0.01)
    a, b = seen.reset(0), biased.reset(0)
    size = seen.task.spec.obs_size
    torch.testing.assert_close(a["critic"][:, :size], b["critic"][:, :size], atol=1e-5, rtol=0)
    assert (a["policy"][:, :3] - b["policy"][:, :3]).abs().max() > 0.05


def test_wrist_force_is_what_the_environment_exerts_on_the_tool() -> None:
    """Pressed onto the table beside the socket, the table pushes up: +z in the base frame, with the spring's force."""
    task = make_task()
    from embodied.sim.tasks import assembly_starts
    from embodied.spec.rotations import rotate

    engine = make_engine(task, 1)
    poses = assembly_starts.sample_poses(task, "far", 1, torch.Generator().manual_seed(0))
    poses["turn"][:] = 0.0
    poses["offset"] = torch.tensor([[0.08, 0.0, 0.0995]], dtype=torch.float64)  # 0.5 mm above the table
    assembly_starts.settle(task, engine, poses)
    control = engine.read("ctrl")
    control[0, 2] += 0.008  # the reference frame's z points down
    engine.write("ctrl", control)
    engine.step(400)
    factors = {name: torch.zeros(1) for name in ("friction", "gains", "mass", "clearance", "delay")}
    state = task.start(engine, factors, torch.Generator().manual_seed(0))
    truth, _ = task.look(engine, state, torch.Generator().manual_seed(0))
    force = rotate(truth["tcp_quat"], truth["force"])[0]
    expected = task.arm.spec.impedance.stiffness[0] * 0.0075
    assert float(force[2]) == pytest.approx(expected, rel=0.05)
    assert force[:2].abs().max() < 0.1 * expected
