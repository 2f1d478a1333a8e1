"""Several ranks hold one table, and draw differently."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sampler_tools import make, make_slots

from embodied.sim.samplers.linear import Linear, LinearOptions
from embodied.sim.samplers.plr import PLR, PLROptions
from embodied.sim.samplers.sfl import SFL, SFLOptions
from embodied.sim.samplers.success_guided import SuccessGuided, SuccessGuidedOptions
from embodied.sim.samplers.table import OutcomeTable
from embodied.sim.samplers.uniform import Uniform, UniformOptions
from embodied.spec.protocols import Trials
from embodied.spec.ranks import gather_rows, rank_seed

SAMPLERS = {
    "success_guided": (SuccessGuided, SuccessGuidedOptions(history=6, max_age=20)),
    "uniform": (Uniform, UniformOptions(history=6)),
    "plr": (PLR, PLROptions(history=6)),
    "sfl": (SFL, SFLOptions(num_levels=7, episodes=3, buffer_size=3, update_period=2, history=6)),
    "linear": (Linear, LinearOptions(num_levels=4, max_init_level=2, history=6)),
}
WORLDS, SLOTS, STEPS, ITERATIONS = 6, 11, 5, 6


def chance(slots):
    return (slots + 0.5) / SLOTS


def run(name, rank):
    """Some iterations of made-up episodes; what was drawn, recorded and tried, and the sampler's state at the end."""
    cls, options = SAMPLERS[name]
    sampler, generator = make(cls, options, WORLDS, SLOTS), torch.Generator().manual_seed(100 + rank)
    drawn, told, tried = [], [], []

    def evaluate(slots, seed):
        tried.append(slots)
        success = torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < chance(slots)
        return Trials(success, torch.rand(len(slots), generator=generator) < 0.9, 10 * len(slots))

    if name == "sfl":
        sampler.evaluate = evaluate
    steps = 0
    for iteration in range(ITERATIONS):
        slots = []
        for _ in range(STEPS):
            # rank 1 has no episode at all in one iteration
            some = torch.rand(WORLDS, generator=generator) < (0.0 if (rank, iteration) == (1, 3) else 0.7)
            slots.append(sampler.sample())
            drawn.append(slots[-1])
            recorded = slots[-1].masked_fill(~some, -1)
            success = torch.rand(WORLDS, generator=generator) < chance(slots[-1])
            valid = torch.rand(WORLDS, generator=generator) < 0.9
            told.append((recorded, success, valid))
            sampler.record(recorded, success, valid, torch.zeros(WORLDS))
        if name == "plr":
            sampler.score(torch.stack(slots), torch.rand(STEPS, WORLDS, generator=generator))
        steps += sampler.end_iteration()
    return {
        "state": sampler.state_dict(),
        "drawn": drawn,
        "told": told,
        "tried": tried,
        "steps": steps,
        "p": sampler.probabilities,
    }


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    results = {name: run(name, rank) for name in SAMPLERS}
    results["rows"] = gather_rows(torch.full((rank + 1, 2), rank))
    # in the midst of an iteration the table is not the same everywhere
    sampler = make(Uniform, UniformOptions(), 1, 1)
    sampler.record(torch.tensor([0]), torch.tensor([True]), torch.tensor([True]), torch.zeros(1))
    with pytest.raises(RuntimeError, match="end the iteration before saving"):
        sampler.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(on_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_rows_are_gathered_in_rank_order(ranks):
    for result in ranks:
        assert result["rows"].tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_ranks_hold_the_same_table_and_draw_differently(ranks, name):
    one, two = (result[name] for result in ranks)
    own = {"generator", "levels"}  # a rank's draws, and the levels of its own worlds
    shared = one["state"].keys() - own - {"bank_hash"}
    assert {"outcomes", "visits", "sums", "last_record", "records"} <= shared
    for key in shared:
        assert torch.equal(one["state"][key], two["state"][key]), key
    if name != "linear":
        assert torch.equal(one["p"], two["p"])
    assert not torch.equal(torch.stack(one["drawn"]), torch.stack(two["drawn"]))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_table_is_that_of_all_outcomes_in_rank_order(ranks, name):
    table = OutcomeTable(make_slots(SLOTS), 6)
    for iteration in range(ITERATIONS):
        told = [result[name]["told"][STEPS * iteration :][:STEPS] for result in ranks]
        rows = [torch.cat(column) for column in zip(*(row for rank in told for row in rank), strict=True)]
        table.record(*rows, calls=STEPS)
    state = ranks[0][name]["state"]
    for key in ("outcomes", "visits", "sums", "last_record", "records"):
        assert torch.equal(state[key], table.state_dict()[key]), key


def test_sfl_shares_the_trials_out(ranks):
    for mine, others in zip(*(result["sfl"]["tried"] for result in ranks), strict=True):
        assert len(mine) == 3 * 4 and len(others) == 3 * 3  # 7 levels, three episodes each
        assert not set(mine.tolist()) & set(others.tolist())
    assert [result["sfl"]["steps"] for result in ranks] == [3 * 10 * 12, 3 * 10 * 9]
    assert ranks[0]["sfl"]["state"]["chosen"].sum() == 3


def test_a_single_process_uses_the_seed_itself_and_records_at_once():
    assert rank_seed(17) == 17
    rows = torch.tensor([[1, 2]])
    assert gather_rows(rows) is rows
    results = [run(name, 0) for name in SAMPLERS]
    for name, result in zip(SAMPLERS, results, strict=True):
        table = OutcomeTable(make_slots(SLOTS), 6)
        for row in result["told"]:
            table.record(*row)
        for key in ("outcomes", "last_record", "records"):
            assert torch.equal(result["state"][key], table.state_dict()[key]), (name, key)
