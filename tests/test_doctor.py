"""The doctor: what it finds on this machine; its prediction of memory against memory really taken and sizes counted by hand."""

import os
import subprocess
import sys

import mujoco
import psutil
import pytest
import torch

from embodied import cli, doctor
from embodied.algos.rollout import Rollout
from embodied.algos.threads import ROWS
from embodied.commands import memory
from embodied.commands.memory import Memory, group_room
from embodied.compose import compose
from embodied.spec.errors import Fault

WORDS = [
    "task=assembly",
    "task.bank.size=64",
    "sim.threads=1",
    "algo.num_steps=4",
    "algo.epochs=1",
    "episodes=8",
    "eval.episodes=8",
    "budget.iterations=1",
    "budget.target_success=null",
]
GIB = 2**30


@pytest.fixture(scope="module")
def predicted():
    return memory.predict(compose("train", WORDS).config)


def made_up(**changes):
    known = {"process": 300e6, "engine": 4000.0, "environment": 2000.0, "rollout": 9000.0, "iteration": 8000.0}
    known |= {"row": 3000.0, "bank": 1000, "periodic": 0, "final": 0, "num_steps": 24, "minibatch": None}
    known |= {"transition": 4000.0, "threads": 2}
    return Memory(**(known | changes))


# -- this machine ---------------------------------------------------------------------------------------------------


def test_doctor_finds_what_this_machine_has():
    done = subprocess.run([sys.executable, "-m", "embodied.cli", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert {line.split()[0] for line in done.stdout.splitlines()} <= {"ok", "warn", "mend:"}
    for text in (f"torch {torch.__version__}", f"MuJoCo {mujoco.__version__}", "offscreen rendering", "H.264", "disk"):
        assert text in done.stdout


def test_doctor_says_how_to_mend(monkeypatch, capsys):
    checks = ("_python", "_torch", "_warp", "_rendering", "_video", "_memory", "_disk")
    for name in checks:
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setitem(sys.modules, "mujoco", None)  # what Python does for a module that cannot be imported
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert out.startswith("bad   mujoco cannot be imported") and "mend: pip install 'mujoco==3.17.*'" in out


def test_doctor_tests_rendering_by_rendering():
    assert doctor._render_error("no_such_backend")


# -- against memory that was taken -----------------------------------------------------------------------------------

TRAIN = """
import sys
from pathlib import Path
from embodied import cli
code = cli.main(sys.argv[1:])
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1])
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_training_takes_what_was_predicted(predicted, tmp_path):
    worlds = 8192
    words = ["train", *WORDS, f"sim.num_worlds={worlds}", f"out={tmp_path}/run"]
    environment = os.environ | {"EMBODIED_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRAIN, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    taken = 1024 * int(done.stdout.splitlines()[-1])
    assert predicted.peak(worlds) == pytest.approx(taken, rel=0.2)
    # most of so small a run is the process: what the worlds add must be right too
    assert predicted.peak(worlds) - predicted.process == pytest.approx(taken - predicted.process, rel=0.35)


def test_rollout_and_engine_against_their_arrays(predicted):
    from embodied.commands.build import make_engine, make_task

    config = compose("train", WORDS).config
    task = make_task(config)
    # obs, action, log-probability, value, reward, next value: float32; four flags of a byte
    closed = 4 * (4 * (sum(task.obs_sizes.values()) + task.spec.action.size + 4) + 4)
    rollout = Rollout(4, 100, task.obs_sizes, {"action": torch.zeros(task.spec.action.size)}, torch.device("cpu"))
    held = [*rollout.obs.values(), *rollout.trace.values(), rollout.decided, rollout.log_prob]
    held += [rollout.value, rollout.reward, rollout.next_value]
    held += [rollout.terminated, rollout.ended, rollout.valid]
    assert predicted.rollout == closed == sum(x.nbytes for x in held) / 100

    engine = make_engine(config, task, 100)
    row = engine.default_row.nbytes
    # a row is what physics keeps of a world, beside readings, warnings (counted twice) and memory's own bookkeeping
    arrays = row + sum(task.model.__getattribute__(n) for n in ("nsensordata", "nv")) * 8 + 84
    assert predicted.row == row and predicted.bank == 64
    assert predicted.engine == pytest.approx(arrays, rel=0.2)  # what is promised


def test_the_table_adds_up_to_the_peak(predicted):
    for worlds in (1, 256, 100_000):
        rows = predicted.rows(worlds)
        assert sum(total for _, _, total in rows) == predicted.peak(worlds)
        assert all(total >= 0 for _, _, total in rows)
        assert all(each * worlds == pytest.approx(total) for _, each, total in rows if each is not None)


# -- lines -----------------------------------------------------------------------------------------------------------


def test_minibatches_are_a_quarter_of_the_batch_unless_given_and_worked_on_in_pieces():
    none = made_up(transition=0.0)
    # a quarter of 24 steps of 64 worlds, less than one piece (KEPT does not bound what so few leave behind: it counts twice)
    assert made_up().peak(64) - none.peak(64) == pytest.approx(2 * 4000 * 24 * 64 / 4)
    many = 1 << 20
    assert made_up().peak(many) - none.peak(many) == pytest.approx(4000 * 2 * ROWS)
    assert made_up(threads=5).peak(many) - none.peak(many) == pytest.approx(4000 * 5 * ROWS)
    assert made_up(minibatch=100).peak(many) - none.peak(many) == pytest.approx(4000 * 100)
    # no minibatch is larger than the batch
    assert made_up(minibatch=10**9).peak(64) == made_up(minibatch=24 * 64).peak(64)
    # and the worlds grow as they do
    assert none.peak(2 * many) - none.peak(many) == pytest.approx(many * (4000 + 2000 + 9000 + 8000))


def test_evaluations_of_many_worlds_are_counted():
    few, many = made_up(periodic=10), made_up(periodic=10, final=10**6)
    each = 4000 + 2000 + 3000
    assert few.peak(1024) - made_up().peak(1024) == pytest.approx(10 * each)
    # the final evaluation comes when what the last iteration took is free again
    iteration = 1024 * 8000 + 4000 * 24 * 1024 / 4
    assert many.peak(1024) - few.peak(1024) == pytest.approx(10**6 * each - iteration)


@pytest.mark.parametrize("minibatch", [None, 4096])
@pytest.mark.parametrize("room", [0.35 * GIB, 1.0 * GIB, 20.0 * GIB, 500.0 * GIB])
def test_the_largest_count_fits_and_one_more_does_not(minibatch, room):
    found = made_up(minibatch=minibatch)
    largest = found.largest(room)
    assert not found.fits(largest + 1, room)
    assert found.peak(largest + 1) > 0.9 * room
    if largest:
        assert found.peak(largest) <= 0.9 * room


def test_nothing_fits_where_the_process_does_not():
    assert made_up().largest(0.1 * GIB) == 0


# -- what is available -----------------------------------------------------------------------------------------------


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_control_group_counts(tmp_path):
    mounted, member = tmp_path / "cgroup", tmp_path / "member"
    write(mounted / "a/b", memory__max="max", memory__current=5, memory__stat="inactive_file 1")
    write(mounted / "a", memory__max=1000, memory__current=700, memory__stat="anon 600\ninactive_file 90\nactive_file 10")
    member.write_text("0::/a/b\n")
    assert group_room(member, mounted) == 1000 - 700 + 90
    write(mounted / "a/b", memory__max=200, memory__current=5, memory__stat="inactive_file 1")
    assert group_room(member, mounted) == 196
    member.write_text("0::/\n")
    assert group_room(member, mounted) is None
    assert group_room(tmp_path / "absent", mounted) is None


def test_control_groups_of_version_1(tmp_path):
    mounted, member = tmp_path / "cgroup", tmp_path / "member"
    stat = "inactive_file 3\ntotal_inactive_file 40"
    write(mounted / "memory/job", memory__limit_in_bytes=500, memory__usage_in_bytes=100, memory__stat=stat)
    member.write_text("5:cpu,cpuacct:/other\n4:memory:/job\n0::/\n")
    assert group_room(member, mounted) == 440


def test_a_lower_group_limit_is_what_is_available(tmp_path):
    mounted, member = tmp_path / "cgroup", tmp_path / "member"
    member.write_text("0::/\n")
    room, source = memory.available(member, mounted)
    assert source == "this machine" and room == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    write(mounted, memory__max=200, memory__current=80, memory__stat="inactive_file 3")
    assert memory.available(member, mounted) == (123, "limit of the control group")


# -- the command -----------------------------------------------------------------------------------------------------


def test_what_cannot_fit_exits_1_and_says_what_can(capsys):
    assert cli.main(["doctor", *WORDS, "sim.num_worlds=1000000000"]) == 1
    out = capsys.readouterr().out
    assert "at 1,000,000,000 worlds" in out and "does not fit" in out
    last = out.splitlines()[-1]
    largest = int(last.partition("sim.num_worlds=")[2].split()[0])
    power = int(last.rpartition(" ")[2].strip(")"))
    assert 1024 < largest < 10**9 and power <= largest < 2 * power and power & (power - 1) == 0


def test_bad_words_are_those_of_train(capsys):
    assert cli.main(["doctor", "task=assembly", "sim.num_wolds=4"]) == 2
    assert "did you mean 'sim.num_worlds'?" in capsys.readouterr().err
    assert cli.main(["doctor", "task=assembly", "sim.engine=warp"]) == 2
    assert capsys.readouterr().err == "error: sim.engine=warp: memory can be predicted with sim.engine=cpu only\n"
    assert cli.main(["doctor", "task=assembly", "algo=grpo"]) == 2
    assert capsys.readouterr().err == "error: algo=grpo: memory can be predicted with algo=ppo only\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without one")
def test_no_cuda_device_is_one_line(capsys):
    assert cli.main(["doctor", "task=assembly", "device=cuda"]) == 2
    assert capsys.readouterr().err == "error: device=cuda: 0 CUDA devices are available; device=cpu works\n"


def test_a_build_that_fails_is_named():
    config = compose("train", WORDS).config
    config["robot"]["name"] = "absent"
    with pytest.raises(Fault, match=r"a build with 256 worlds failed.*absent"):
        memory.predict(config)
