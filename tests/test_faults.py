"""Faults injected into the real bridge: rows that must pass, and the same rows without their fault, which must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import make_trainer

from embodied.algos import checkpoint
from embodied.commands.deploy import faults as command
from embodied.commands.export import export
from embodied.compose import compose
from embodied.deploy.artifact import PolicyArtifact
from embodied.deploy.faults import scenes as faults_scenes
from embodied.deploy.faults.judge import Promise, Result, judge, run_row
from embodied.deploy.faults.rows import rows
from embodied.spec.errors import BadInput

BIAS = (0.35, 0.0, -0.35, 0.0, 0.0, 0.0)  # sideways and up, 50 mm/s: it moves, and touches nothing


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported policy without skill that keeps moving, with episodes of 1.6 s."""
    words = ["task=assembly", "task.episode_s=1.6", "policy.hidden=[16]", "algo.critic_hidden=[16]"]
    invocation = compose("train", [*words, f"out={tmp_path_factory.mktemp('faults') / 'run'}"])
    state = make_trainer(8).state_dict()
    weights = state["learner"]["policy"]
    weights["network.2.bias"].copy_(torch.atanh(torch.tensor(BIAS)))
    weights["network.2.weight"].mul_(0.01)
    file = invocation.run_dir / "checkpoints" / "latest.pt"
    checkpoint.save(file, {"trainer": state, "best": -1.0, "config": invocation.config})
    exported: Path = export(invocation.config, file).policy
    return exported


@pytest.fixture
def played(policy: Path, tmp_path: Path):
    def play(name: str, armed: bool = True) -> Result:
        spec = PolicyArtifact.load(policy).spec
        return run_row(rows(spec)[name], policy, spec, tmp_path / name, seed=3, armed=armed)

    return play


@pytest.mark.parametrize("name", ["nan_action", "kill_runner", "nan_joint", "loss_10"])
def test_rows_that_keep_their_promise(played, name: str) -> None:
    result = played(name)
    assert result.outcome == "passed", result
    assert result.measured["followed"] and result.measured["fastest_m_s"] > 0.02, "it moved before the fault"


@pytest.fixture(scope="module")
def unharmed(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Rows of each way to inject (a signal, the line, the policy) in which nothing was injected."""
    spec, folder = PolicyArtifact.load(policy).spec, tmp_path_factory.mktemp("unharmed")
    names = ("kill_runner", "nan_joint", "nan_action")
    return {name: run_row(rows(spec)[name], policy, spec, folder / name, seed=3, armed=False) for name in names}


def test_without_its_fault_a_row_that_expects_a_stop_fails(unharmed: dict[str, Result]) -> None:
    for name, result in unharmed.items():
        assert result.outcome == "failed", (name, result)
        assert any("exit code is 0" in line for line in result.why), (name, result.why)
        late = [line for line in result.why if line.startswith("the target last changed")]
        assert late, (name, result.why)
        # and nothing else is wrong with such a run
        assert result.measured["violations"] == [] and result.measured["episodes"] == [1, 1]


def test_what_happens_without_a_fault_keeps_no_promise_that_a_fault_must_bring_about(policy, unharmed) -> None:
    spec = PolicyArtifact.load(policy).spec
    measured = unharmed["nan_joint"].measured
    judged = {row.name: judge(row.promise, measured, spec.robot.control_dt) for row in rows(spec).values()}
    kept = sorted(name for name, why in judged.items() if not why)
    # those whose promise is that nothing comes of it, and whose own checks tell whether it took place
    assert kept == ["adversarial_actions", "clock_back", "clock_forward", "late_answer", "stop_robot", "stop_runner"]


def test_the_runner_with_a_faulty_policy_does_without_torch_too() -> None:
    code = "import sys, embodied.commands.deploy.faults_child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- judging, by hand-made figures ---------------------------------------------------------------------------------------

DT = 0.04
GOOD: dict[str, Any] = {
    "held": 0.05, "moved": 0.1, "rested": 0.2, "stopped": 0.09, "stall": 0.0, "late": 0.0, "watchdog": 0.1, "step": 0.002,
    "violations": [], "code": 1, "said": "fault: reading joint_pos of fr3_joint4 is not finite", "episodes": [1, 1],
    "counts": {"up dropped": 3},
}  # fmt: skip
STOPS = Promise("", (1,), ("fr3_joint4",), stop_s=0.24)
WATCHED = Promise("", (1,), watchdog=True)
ON = Promise("", (0,), goes_on=True, counted=("up dropped",))


@pytest.mark.parametrize(
    ("promise", "changes", "complaint"),
    [
        (STOPS, {}, None),
        (STOPS, {"moved": None}, None),
        (STOPS, {"moved": 0.241}, "the target last changed 241 ms after the fault, allowed 240 ms"),
        (STOPS, {"moved": 0.241, "stall": 0.01}, None),
        (STOPS, {"moved": 0.241, "late": 0.01}, None),
        (WATCHED, {"stopped": 0.103, "stall": 0.002}, None),
        (WATCHED, {"stopped": 0.103, "late": 0.1}, "the robot stopped 103 ms after"),
        (STOPS, {"rested": None}, "the tool did not come to rest"),
        (STOPS, {"rested": 0.41}, "the tool was at rest 410 ms after the fault, allowed 400 ms"),
        (STOPS, {"code": 0}, "the runner's exit code is 0, expected (1,)"),
        (STOPS, {"code": -9}, "the runner's exit code is -9"),
        (STOPS, {"said": "fault: something"}, "its line does not name 'fr3_joint4': fault: something"),
        (STOPS, {"violations": ["velocity"]}, "limit broken: velocity"),
        (WATCHED, {}, None),
        (WATCHED, {"stopped": None}, "the robot did not stop by itself"),
        (WATCHED, {"stopped": 0.103}, "the robot stopped 103 ms after the fault, allowed 102 ms"),
        (WATCHED, {"moved": 0.103}, "the target last changed 103 ms"),
        (ON, {"code": 0, "moved": 1.0}, None),
        (ON, {"code": 0, "moved": None}, "the robot did not move on"),
        (ON, {"code": 0, "moved": 1.0, "episodes": [1, 2]}, "1 of 2 episodes were played"),
        (ON, {"code": 0, "moved": 1.0, "counts": {"up dropped": 0}}, "nothing was counted as 'up dropped'"),
        (Promise("", (1,), still=True), {"moved": None}, None),
        (Promise("", (1,), still=True), {}, "the target changed 0.100 s after the fault"),
    ],
)
def test_a_promise_is_judged_by_what_was_measured(promise: Promise, changes: dict, complaint: str | None) -> None:
    why = judge(promise, {**GOOD, **changes}, DT)
    assert len(why) == (complaint is not None), why
    if complaint is not None:
        assert why[0].startswith(complaint)


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_says_it_in_lines_and_in_json(policy: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """With a row that is played, and one that cannot be here."""
    monkeypatch.setattr(faults_scenes, "LIBRARIES", tmp_path / "nowhere")
    out = tmp_path / "out"
    assert command.run([f"policy={policy}", "rows=wrong_spec,clock_back", f"out={out}"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"rows": 2, "passed": 1, "failed": [], "not_run": ["clock_back"]}
    assert any(line.startswith("passed  wrong_spec: ") for line in lines)
    assert any("apt-get install libfaketime" in line for line in lines)
    report = json.loads((out / "faults.json").read_text())
    by_name = {row["name"]: row for row in report["rows"]}
    assert by_name["clock_back"]["outcome"] == "not run" and report["policy"] == str(policy)
    measured = by_name["wrong_spec"]["measured"]
    assert measured["code"] == 2 and not measured["followed"] and "fr3_joint4" in measured["said"]
    assert (out / "wrong_spec" / "robot0.emb").is_file()


def test_a_failed_row_is_in_the_summary() -> None:
    one = Result("a", "", "", "", "passed", [], {})
    results = [one, Result("b", "", "", "", "failed", ["why"], {}), Result("c", "", "", "", "not run", ["why"], {})]
    assert command.summary(results) == {"rows": 3, "passed": 1, "failed": ["b"], "not_run": ["c"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows=nan_jiont"], r"rows=nan_jiont: there is no such row: did you mean 'nan_joint'\?"),
        (["rows=nan_joint,kill_policie"], r"rows=kill_policie: there is no such row: did you mean 'kill_policy'\?"),
        (["kills=0"], "kills=0: expected 1 or more"),
        (["seed=-1"], "seed=-1: expected 0 or more"),
        (["row=a"], r"unknown key 'row': did you mean 'rows'\?"),
        (["out={out}"], "exists: choose another"),
    ],
)
def test_bad_input_is_said_before_anything_starts(policy: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        command.run([f"policy={policy}", *(word.replace("{out}", str(tmp_path)) for word in words)])
    with pytest.raises(BadInput, match="policy is missing"):
        command.run([])
