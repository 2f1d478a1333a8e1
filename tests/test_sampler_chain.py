"""On the chain (see `chain`): which samplers reach its far end, and that outcomes are what they reach it by."""

import pytest
from chain import DEPTHS, HISTORY, SEEDS, learn
from sampler_tools import PRESETS

from embodied.sim.samplers.linear import Linear, LinearOptions
from embodied.sim.samplers.plr import PLR, PLROptions
from embodied.sim.samplers.sfl import SFL, SFLOptions
from embodied.sim.samplers.success_guided import SuccessGuided, SuccessGuidedOptions
from embodied.sim.samplers.uniform import Uniform, UniformOptions


def guided(preset):
    return SuccessGuidedOptions(**{**PRESETS[preset], "history": HISTORY})


def results_of(cls, options, **changes):
    return [learn(cls, options, seed, **changes)[:2] for seed in SEEDS]


@pytest.fixture(scope="module")
def uniform():
    return results_of(Uniform, UniformOptions(history=HISTORY))


def test_uniform_resets_do_not_reach_the_far_end(uniform):
    assert all(7 <= solved <= 15 and deepest < 0.01 for solved, deepest in uniform), uniform


def test_success_guided_resets_with_the_locomotion_preset_solve_the_whole_chain():
    results = results_of(SuccessGuided, guided("locomotion"))
    assert all(solved == DEPTHS and deepest > 0.85 for solved, deepest in results), results


def test_the_manipulation_preset_is_between(uniform):
    results = results_of(SuccessGuided, guided("manipulation"))
    assert all(solved >= 20 and 0.02 < deepest < 0.5 for solved, deepest in results), results
    assert min(solved for solved, _ in results) > max(solved for solved, _ in uniform)


def test_shuffled_outcomes_lose_the_gain():
    # the same outcomes, credited to other starts: whatever else differs from uniform resets is not what helps
    results = results_of(SuccessGuided, guided("locomotion"), shuffled=True)
    assert all(solved <= 18 and deepest < 0.01 for solved, deepest in results), results


def test_level_replay_and_a_linear_curriculum_solve_the_whole_chain():
    for cls, options in ((PLR, PLROptions()), (Linear, LinearOptions())):
        results = results_of(cls, options)
        assert all(solved == DEPTHS and deepest > 0.8 for solved, deepest in results), results


def test_sampling_for_learnability_goes_further_than_uniform_and_the_further_the_more_it_is_used(uniform):
    half, most = (results_of(SFL, SFLOptions(num_levels=DEPTHS, buffer_size=4, update_period=5, rho=rho)) for rho in (0.5, 0.9))
    assert min(solved for solved, _ in half) > 1.3 * max(solved for solved, _ in uniform), half
    assert all(solved == DEPTHS and deepest > 0.5 for solved, deepest in most), most


@pytest.mark.parametrize(("cls", "options"), [(Linear, LinearOptions()), (PLR, PLROptions())])
def test_what_they_follow_is_what_they_gain_by(cls, options):
    # a curriculum with shuffled outcomes climbs at random; replay by score does not look at outcomes
    results = results_of(cls, options, shuffled=True)
    if cls is Linear:
        assert all(solved < DEPTHS for solved, _ in results), results
    else:
        assert all(solved == DEPTHS for solved, _ in results), results
