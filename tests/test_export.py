"""Exporting a trained policy: real worlds, a real checkpoint, the file that comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from worlds import make_trainer

from embodied.algos import checkpoint
from embodied.commands.build import make_fresh_env, make_policy, make_task
from embodied.commands.export import SEED, STEPS, export, run
from embodied.compose import Invocation, compose
from embodied.deploy.artifact import PolicyArtifact
from embodied.deploy.export import OPSET
from embodied.policies.gaussian import GaussianPolicy
from embodied.spec.errors import BadInput, Fault
from embodied.spec.policy import PolicySpec

Content = dict[str, Any]


@pytest.fixture(autouse=True)
def torch_as_found():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Invocation, Content]:
    """A configuration, and a checkpoint of two iterations of it."""
    words = ["task=assembly", "task.bank.size=64", "sim.num_worlds=8", "policy.hidden=[16]", "algo.critic_hidden=[16]"]
    invocation = compose("train", [*words, "algo.num_steps=8", f"out={tmp_path_factory.mktemp('trained') / 'run'}"])
    trainer = make_trainer(8)
    for _ in range(2):
        trainer.iterate()
    content = {"trainer": trainer.state_dict(), "best": -1.0, "config": invocation.config}
    return invocation, content


@pytest.fixture
def file(trained: tuple[Invocation, Content]) -> Path:
    """The checkpoint, as `train` leaves it; untouched by the test before."""
    path = trained[0].run_dir / "checkpoints" / "latest.pt"
    checkpoint.save(path, trained[1])
    (trained[0].run_dir / "policy.onnx").unlink(missing_ok=True)
    return path


@pytest.fixture
def config(trained: tuple[Invocation, Content]) -> dict[str, Any]:
    return trained[0].config


def policy_of(config: dict[str, Any], content: Content) -> GaussianPolicy:
    task = make_task(config)
    policy = make_policy(config, task.obs_sizes, task.spec.action.size)
    policy.load_state_dict(content["trainer"]["learner"]["policy"])
    return policy


def with_weights(file: Path, content: Content, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Save the checkpoint with `change` made to a copy of the policy's weights."""
    trainer = content["trainer"]
    weights = {name: value.clone() for name, value in trainer["learner"]["policy"].items()}
    change(weights)
    checkpoint.save(file, {**content, "trainer": {**trainer, "learner": {**trainer["learner"], "policy": weights}}})


# -- the file ------------------------------------------------------------------------------------------------------------


def test_the_file_computes_what_the_policy_computes(config: dict, trained: tuple, file: Path) -> None:
    exported = export(config, file)
    assert exported.policy == file.parent.parent / "policy.onnx"
    assert exported.observations == 1000 and exported.max_difference <= 1e-5
    policy, artifact = policy_of(config, trained[1]), PolicyArtifact.load(exported.policy)
    rng = np.random.default_rng(0)
    extremes = [np.full(33, x) for x in (0.0, 1e-40, 1e30, -1e30, np.inf, -np.inf)]
    ordinary = rng.standard_normal((500, 33)) * 10.0 ** rng.uniform(-3, 3, (500, 1))
    obs = np.concatenate([extremes, ordinary]).astype(np.float32)
    want = policy.act({"policy": torch.from_numpy(obs)}, deterministic=True).action[:, 0].numpy()
    np.testing.assert_allclose(artifact.act(obs), want, atol=1e-5, rtol=0)
    assert np.abs(want).max() > 0.05  # a policy that does something


def test_the_file_is_one_small_plain_graph(config: dict, file: Path) -> None:
    exported = export(config, file)
    assert sorted(path.name for path in exported.policy.parent.iterdir()) == ["checkpoints", "policy.onnx"]
    assert exported.policy.stat().st_size < 30_000
    model = onnx.load(exported.policy)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    operators = [node.op_type for node in model.graph.node if node.op_type not in ("Constant", "Unsqueeze", "Gather")]
    assert operators == ["Sub", "Mul", "Clip", "Gemm", "Elu", "Gemm", "Tanh"]
    assert all(tensor.data_location == onnx.TensorProto.DEFAULT for tensor in model.graph.initializer)


def test_metadata_is_lossless_and_says_where_the_policy_comes_from(config: dict, trained: tuple, file: Path) -> None:
    exported = export(config, file)
    (entry,) = onnx.load(exported.policy).metadata_props
    metadata = json.loads(entry.value)
    assert entry.key == "embodied" and metadata["format"] == 1 and metadata["history"] == 1
    spec = make_task(config).spec
    assert PolicySpec.from_dict(metadata["spec"]) == spec
    assert PolicyArtifact.load(exported.policy).spec == spec
    content = trained[1]["trainer"]
    assert "-".join(metadata["engine"][part] for part in ("name", "version", "model")) == content["env"]["signature"]
    assert metadata["engine"]["name"] == "cpu"
    assert metadata["training"] == {"iteration": 2, "env_steps": 2 * 8 * 8}
    assert metadata["weights_sha256"] == checkpoint.weights_hash(content["learner"]["policy"]) == exported.weights_sha256
    assert set(metadata["versions"]) == {"embodied", "torch", "onnx"}
    assert len(metadata["golden"]) == 4


def test_golden_cases_are_what_the_policy_saw_and_did_in_the_worlds(config: dict, trained: tuple, file: Path) -> None:
    """Against the simulation's own observations, in its own precision, and a different way of collecting them."""
    artifact = PolicyArtifact.load(export(config, file).policy)
    artifact.check_golden()
    policy, task = policy_of(config, trained[1]), make_task(config)
    env = make_fresh_env(config, task, 10, print)
    obs, seen, acted, joints = env.reset(SEED), [], [], []
    for _ in range(STEPS):
        action = policy.act(obs, deterministic=True).action[:, 0]
        seen.append(obs["policy"])
        acted.append(action)
        joints.append(env.engine.read("qpos"))
        obs = env.step(action)[0]
    for world, (step, case) in enumerate(zip((0, 16, 32, 49), artifact.metadata["golden"], strict=True)):
        np.testing.assert_allclose(case["observation"][0], seen[step][world], atol=1e-5, rtol=0)
        np.testing.assert_allclose(case["action"][0], acted[step][world], atol=1e-5, rtol=0)
        np.testing.assert_allclose(case["readings"]["joint_pos"][0], joints[step][world], rtol=0)
    first, last = artifact.metadata["golden"][0], artifact.metadata["golden"][-1]
    assert first["memory"]["target_pos"] == first["readings"]["tcp_pos"]  # an episode's beginning
    assert last["memory"]["target_pos"] != last["readings"]["tcp_pos"] and any(last["memory"]["last_action"][0])


def test_the_same_checkpoint_gives_the_same_bytes_in_another_process(config: dict, file: Path, tmp_path: Path) -> None:
    exported = export(config, file)
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from embodied.commands.export import export\n"
        "export(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))\n"
    )
    other = tmp_path / "again" / "other.onnx"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(config), str(file), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "17", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # exporters like to chat
    assert other.read_bytes() == exported.policy.read_bytes()
    assert PolicyArtifact.load(other).sha256 == exported.sha256


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_says_it_in_words_and_in_json(
    trained: tuple, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    invocation, content = trained
    out = tmp_path / "mine.onnx"
    given = {"command": "export", "config": invocation.config, "overrides": [], "run_dir": invocation.run_dir}
    assert run(Invocation(**given, checkpoint=file, out_file=out)) == 0
    words, last = capsys.readouterr().out.strip().splitlines()
    assert words.startswith(f"{out}: ") and "on 1000 observations" in words
    result = json.loads(last)
    assert result == {
        "policy": str(out),
        "sha256": PolicyArtifact.load(out).sha256,
        "weights_sha256": checkpoint.weights_hash(content["trainer"]["learner"]["policy"]),
        "max_difference": result["max_difference"],
        "observations": 1000,
    }
    assert 0 <= result["max_difference"] <= 1e-5
    assert run(Invocation(**given, checkpoint=file)) == 0
    assert (invocation.run_dir / "policy.onnx").read_bytes() == out.read_bytes()


def test_the_runs_own_policy_is_replaced_but_no_file_that_was_named(config: dict, file: Path, tmp_path: Path) -> None:
    own = file.parent.parent / "policy.onnx"
    own.write_bytes(b"older")
    assert PolicyArtifact.load(export(config, file).policy).spec.task == "assembly"
    before = own.read_bytes()
    for named in (own, tmp_path / "other.onnx"):
        named.touch()
        with pytest.raises(BadInput, match=rf"out={named} exists: choose another, or leave out= away to replace policy.onnx"):
            export(config, file, named)
    assert own.read_bytes() == before and (tmp_path / "other.onnx").read_bytes() == b""


def test_names_that_cannot_be_are_refused_before_work(config: dict, file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in \.onnx, e\.g\. out=.*/folder/policy\.onnx"):
        export(config, file, tmp_path / "folder")
    with pytest.raises(BadInput, match=r"cannot be made \(Not a directory\)"):
        export(config, file, file / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_another_engine_than_the_trainings_is_said(config: dict, trained: tuple, file: Path) -> None:
    said: list[str] = []
    export(config, file, say=said.append)
    assert said == []
    trainer = trained[1]["trainer"]
    moved = {**trainer, "env": {**trainer["env"], "signature": "warp-3.17.0-rc-1-0123456789abcdef"}}
    checkpoint.save(file, {**trained[1], "trainer": moved})
    exported = export(config, file, say=said.append)
    (line,) = said
    assert line.startswith("warning: ") and "warp-3.17.0-rc-1-0123456789abcdef" in line and "cpu-" in line
    engine = PolicyArtifact.load(exported.policy).metadata["engine"]
    assert engine == {"name": "warp", "version": "3.17.0-rc-1", "model": "0123456789abcdef"}


# -- no file unless it is right ------------------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_weights_that_are_not_finite_are_refused(config: dict, trained: tuple, file: Path) -> None:
    for value in (float("nan"), float("inf")):
        with_weights(file, trained[1], lambda weights, x=value: weights["network.0.weight"][3, 4].fill_(x))
        with pytest.raises(BadInput, match=r"'network\.0\.weight' holds values that are not finite: export an earlier"):
            export(config, file)
        assert names_in(file.parent.parent) == ["checkpoints"]


def test_a_policy_that_two_runtimes_round_differently_is_not_kept(config: dict, trained: tuple, file: Path) -> None:
    """Huge weights that cancel: what is left is rounding, and depends on the order in which a library adds."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        weights["network.0.weight"][8:] = weights["network.0.weight"][:8]
        weights["network.0.bias"][8:] = weights["network.0.bias"][:8]
        half = 1e6 * torch.randn(6, 8, generator=generator)
        weights["network.2.weight"].copy_(torch.cat([half, -half], 1))

    with_weights(file, trained[1], change)
    own = file.parent.parent / "policy.onnx"
    own.write_bytes(b"older")
    with pytest.raises(Fault, match=r"onnxruntime and torch differ by [\d.e-]+ on 1000 observations, expected at most 1e-05"):
        export(config, file)
    assert names_in(file.parent.parent) == ["checkpoints", "policy.onnx"] and own.read_bytes() == b"older"


def test_a_place_that_cannot_be_written_is_a_fault_that_leaves_nothing(config: dict, file: Path) -> None:
    own = file.parent.parent / "policy.onnx"
    own.mkdir()
    try:
        with pytest.raises(Fault, match=r"policy\.onnx cannot be written \(Is a directory\)"):
            export(config, file)
        assert names_in(file.parent.parent) == ["checkpoints", "policy.onnx"]
    finally:
        own.rmdir()
