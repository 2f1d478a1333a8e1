"""The quadruped's mirror: an involution, and true of physics, reward and observations."""

from __future__ import annotations

import pytest
import torch

from embodied.algos.ppo import PPO, PPOOptions
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.tasks import symmetry
from embodied.sim.tasks.locomotion import Locomotion, LocomotionOptions
from embodied.spec.errors import BadInput

TASK = Locomotion(LocomotionOptions(), go1(Go1Options()))


def seen_in(mirror: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    index, sign = mirror
    return x[..., index] * sign


@pytest.mark.parametrize("group", ["policy", "critic", "action"])
def test_the_mirror_of_the_mirror_is_the_thing_itself(group: str) -> None:
    size = TASK.spec.action.size if group == "action" else TASK.obs_sizes[group]
    x = torch.randn(5, size)
    mirrored = seen_in(TASK.mirror[group], x)
    assert mirrored.shape == x.shape and not torch.equal(mirrored, x)
    assert torch.equal(seen_in(TASK.mirror[group], mirrored), x)


def test_joints_are_mirrored_by_their_names() -> None:
    names = TASK.legged.spec.joint_names
    index, sign = symmetry.joints(TASK.legged)
    assert names[index[names.index("FR_hip_joint")]] == "FL_hip_joint"
    assert names[index[names.index("RL_calf_joint")]] == "RR_calf_joint"
    assert {name.split("_")[1]: s for name, s in zip(names, sign, strict=True)} == {"hip": -1.0, "thigh": 1.0, "calf": 1.0}


def test_a_grid_is_mirrored_row_by_row() -> None:
    index, sign = symmetry.scan(2, 3)
    assert index == [2, 1, 0, 5, 4, 3] and sign == [1.0] * 6
    assert symmetry.joined([([0, 1], [1.0, -1.0]), ([1, 0], [1.0, 1.0])]) == ([0, 1, 3, 2], [1.0, -1.0, 1.0, 1.0])


def mirrored_state(qpos: torch.Tensor, qvel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By hand: y changes its sign, and with it what turns about x and z."""
    index, sign = symmetry.joints(TASK.legged)
    flips = torch.tensor(sign, dtype=qpos.dtype)
    pos = torch.cat([qpos[:, :3] * torch.tensor([1.0, -1, 1]), qpos[:, 3:7] * torch.tensor([1.0, -1, 1, -1])], -1)
    vel = torch.cat([qvel[:, :3] * torch.tensor([1.0, -1, 1]), qvel[:, 3:6] * torch.tensor([-1.0, 1, -1])], -1)
    return torch.cat([pos, qpos[:, 7:][:, index] * flips], -1), torch.cat([vel, qvel[:, 6:][:, index] * flips], -1)


def test_physics_reward_and_observations_are_the_same_in_the_mirror() -> None:
    """World 1 is the mirror image of world 0, and gets the mirrored command and actions."""
    engine = CpuEngine(TASK.model, 2, TASK.parameters, 1)
    engine.bind(TASK.fields)
    generator = torch.Generator().manual_seed(0)
    engine.set_state(TASK.fresh_starts(engine, generator))
    qpos, qvel = engine.read("qpos").double(), engine.read("qvel").double()
    theirs = mirrored_state(qpos[:1], qvel[:1])
    engine.write("qpos", torch.cat([qpos[:1], theirs[0]]))
    engine.write("qvel", torch.cat([qvel[:1], theirs[1]]))
    # the published trunk and calves are a millimetre or two off their middle plane: put that right for the comparison
    for body in ("trunk", *(f"{leg}_calf" for leg in ("FR", "FL", "RR", "RL"))):
        number = TASK.model.body(body).id
        engine.parameters("body_ipos")[:, number, 1] = 0.0
    engine.commit()
    nominal = TASK.walker.randomise(engine, torch.zeros(2, dtype=torch.bool), generator, on=False)
    state = TASK.start(engine, nominal, generator)
    state["request"] = torch.tensor([[0.7, 0.3, -0.5], [0.7, -0.3, 0.5]])
    # half a period apart: the first diagonal of one is the second of the other
    state["time"] = torch.tensor([[0.0], [0.25]])
    for step in range(5):  # contacts part ways later, by what is left of the asymmetry
        action = 0.3 * torch.randn(1, TASK.spec.action.size, generator=generator)
        both = torch.cat([action, seen_in(TASK.mirror["action"], action)])
        truth, _ = TASK.look(engine, state, generator)
        TASK.command(engine, both, state, truth)
        engine.step(TASK.spec.robot.substeps)
        state["elapsed"] = torch.full((2,), step / 500)
        truth, _ = TASK.look(engine, state, generator)
        obs = TASK.observe(truth, truth, state)
        reward, _, _ = TASK.judge(truth, state)
        # inertia tensors of the trunk are published with products of a thousandth: what is left of it
        for group in ("policy", "critic"):
            torch.testing.assert_close(obs[group][1], seen_in(TASK.mirror[group], obs[group][0]), atol=0.05, rtol=0)
        torch.testing.assert_close(reward[0], reward[1], atol=0.02, rtol=0)


def learner(mirror) -> PPO:
    sizes, options = {"policy": 4, "critic": 3}, PPOOptions(num_steps=2, symmetry=True, critic_hidden=[8])
    return PPO(options, GaussianPolicy(MLPOptions(hidden=[8]), sizes, 2), sizes, 2, 50, "cpu", 0, mirror)


def test_half_of_the_transitions_are_learned_in_the_mirror() -> None:
    mirror = {
        "policy": (torch.tensor([1, 0, 2, 3]), torch.tensor([1.0, 1, -1, 1])),
        "critic": (torch.tensor([0, 2, 1]), torch.ones(3)),
        "action": (torch.tensor([1, 0]), torch.tensor([-1.0, -1])),
    }
    sizes = {"policy": 4, "critic": 3, "action": 2}
    batch = {name: torch.randn(1000, size) for name, size in sizes.items()}
    batch |= {name: torch.randn(1000) for name in ("advantage", "target", "log_prob", "valid")}
    shown = learner(mirror).surrogate._half_mirrored(batch)
    kept = (shown["policy"] == batch["policy"]).all(-1)
    assert 400 < int(kept.sum()) < 600
    for name in sizes:
        expected = torch.where(kept[:, None], batch[name], seen_in(mirror[name], batch[name]))
        assert torch.equal(shown[name], expected)
    for name in ("advantage", "target", "log_prob", "valid"):
        assert shown[name] is batch[name]
    assert torch.equal(shown["own"], torch.where(kept, batch["valid"], 0.0))


def test_a_policy_that_does_not_move_has_no_divergence_however_asymmetric_it_is() -> None:
    """Else the learning rate, which follows the divergence, would fall because of the mirror alone."""
    mirror = {
        "policy": (torch.tensor([1, 0, 2, 3]), torch.tensor([1.0, 1, -1, 1])),
        "critic": (torch.tensor([0, 2, 1]), torch.ones(3)),
        "action": (torch.tensor([1, 0]), torch.tensor([-1.0, -1])),
    }
    ppo, count = learner(mirror), 1000
    for parameter in ppo.policy.network.parameters():
        parameter.data.mul_(10.0)
    obs = {"policy": torch.randn(count, 4), "critic": torch.randn(count, 3)}
    step = ppo.policy.act(obs)
    batch = obs | {"action": step.action[:, 0], "log_prob": step.log_prob, "target": torch.zeros(count)}
    batch |= {"advantage": torch.randn(count), "valid": torch.ones(count)}
    shown, everyone = ppo.surrogate._half_mirrored(batch), torch.arange(count)
    scale = {name: 1 / shown[name].sum() for name in ("valid", "own")}
    _, metrics = ppo.surrogate._policy_gradient(shown, everyone, scale)
    assert float(metrics["clip_fraction"]) > 0.1 and float(metrics["kl"]) == pytest.approx(0, abs=1e-6)


def test_symmetry_of_a_task_without_one_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"algo\.symmetry"):
        learner(None)
