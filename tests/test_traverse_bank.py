"""The task traverse: where its episodes start."""

from __future__ import annotations

import pytest
import torch
from test_traverse import BORDER, LEVELS, ROBOT, SIDE, make, make_engine, make_env

from embodied.sim.tasks.traverse import Traverse
from embodied.sim.tasks.walker import heading


@pytest.fixture(scope="module")
def task() -> Traverse:
    return make()


def tiles(task: Traverse, xy: torch.Tensor) -> torch.Tensor:
    """Row and column of the tile of each place, by division: rows along y, columns along x."""
    return torch.stack([(xy[:, axis] - task.map.ground.origin[axis] - BORDER).div(SIDE).floor().long() for axis in (1, 0)], -1)


@pytest.fixture(scope="module")
def placed(task):
    """Start, goal and truth of the bank's configurations and of fresh ones."""
    bank = task.make_bank(make_engine(task, 16))
    engine = make_engine(task, 20)
    engine.set_state(bank.rows)
    fresh = make_engine(task, 20)
    fresh.set_state(task.fresh_starts(fresh, torch.Generator().manual_seed(5)))
    read = [(e.read("qpos")[:, :2], e.read("mocap_pos")[:, 0], task.walker.truth(e)) for e in (engine, fresh)]
    return bank, *read


def test_the_bank_has_every_kind_and_level_alike(task, placed):
    bank, (start, goal, _), _ = placed
    where = tiles(task, start)
    assert torch.equal(where, tiles(task, goal[:, :2]))
    assert ((start - goal[:, :2]).norm(dim=1) >= 2.0).all()
    assert bank.tag_names == ("stairs", "gaps") and torch.equal(bank.tags, where[:, 0])
    # three tiles a level side by side
    assert bank.difficulty.tolist() == [LEVELS[column // 3] for column in where[:, 1]]
    counts = torch.zeros(2, 6).index_put_((where[:, 0], where[:, 1]), torch.ones(20), accumulate=True)
    trained = counts.view(2, 2, 3)[..., :2]
    # 20 over 8 tiles
    assert trained.sum() == 20 and set(trained.flatten().tolist()) == {2, 3}
    kind, level, variant = task.tile_of(start)
    assert torch.equal(kind, bank.tags) and level.tolist() == bank.difficulty.tolist()
    assert torch.equal(variant, where[:, 1] % 3)


def test_fresh_starts_share_no_tile_with_the_bank(task, placed):
    _, (start, _, _), (fresh, goal, _) = placed
    trained, kept = ({tuple(tile) for tile in tiles(task, xy).tolist()} for xy in (start, fresh))
    assert len(trained) == 8 and len(kept) == 4 and not trained & kept
    assert torch.equal(tiles(task, fresh), tiles(task, goal[:, :2]))
    assert task.tile_of(fresh)[2].unique().tolist() == [2]
    engine = make_engine(task, 1)
    first = {
        tuple(task.fresh_starts(engine, torch.Generator().manual_seed(seed))[0, 1:3].div(SIDE).floor().tolist())
        for seed in range(20)
    }
    assert len(first) == 4  # a single world is not always on the same tile


def test_robots_start_on_their_feet_turned_anyhow(task, placed):
    for start, goal, truth in placed[1:]:
        # joints are off by 0.05 rad at most, legs are 0.43 m long
        assert (truth["clearance"] > -0.005).all() and (truth["clearance"] < 0.04).all()
        assert (truth["joint_pos"] - torch.tensor(ROBOT.spec.home)).abs().max() < 0.0501
        turned = torch.atan2(*heading(truth["trunk_quat"]).flip(-1).T)
        assert turned.min() < -1.5 and turned.max() > 1.5
        column, row = (
            ((at - low) / 0.05).round().long() for at, low in zip(goal[:, :2].T, task.map.ground.origin, strict=True)
        )
        assert torch.allclose(goal[:, 2], task.map.ground.heights[row, column], atol=1e-4)  # level ground round goals
        assert not torch.equal(start, goal[:, :2])


def test_a_reset_brings_the_goal_of_its_configuration(task, placed):
    bank, (start, goal, _), _ = placed
    engine = make_engine(task, 4)
    slots = torch.tensor([7, 0, 19, 7])
    engine.set_state(bank.rows, index=slots)
    factors = task.randomise(engine, torch.ones(4, dtype=torch.bool), torch.Generator().manual_seed(0), on=True)
    state = task.start(engine, factors, torch.Generator().manual_seed(0))
    assert torch.equal(state["goal"], goal[slots, :2])
    assert state["distance"].tolist() == pytest.approx((goal[slots, :2] - start[slots]).norm(dim=1).tolist(), abs=1e-5)
    engine.set_state(bank.rows, torch.tensor([False, True, False, False]), torch.full((4,), 3))
    assert torch.equal(engine.read("mocap_pos")[:, 0], goal[[7, 3, 19, 7]])


def test_goals_survive_a_checkpoint(task, placed):
    env, other = make_env(task, placed[0]), make_env(task, placed[0], seed=9)
    env.reset(0)
    other.reset(9)
    assert not torch.equal(env._state["goal"], other._state["goal"])
    saved = env.state_dict()
    assert torch.equal(other.load_state_dict(saved)["policy"], env.observation["policy"])
    assert torch.equal(other.engine.read("mocap_pos"), env.engine.read("mocap_pos"))
    noise = torch.Generator().manual_seed(2)
    for _ in range(3):
        action = torch.randn(6, 12, generator=noise)
        ours, theirs = env.step(action), other.step(action)
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0]) and torch.equal(ours[1], theirs[1])
