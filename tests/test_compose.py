"""Composition of a run's configuration: precedence, types, saved runs, sweeps."""

import os
import re
import zipfile
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import get_type_hints

import fake_registry
import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

import embodied
from embodied import keys
from embodied.compose import compose, options, to_yaml
from embodied.config import RunConfig
from embodied.overrides import expand
from embodied.spec import registry
from embodied.spec.errors import BadInput

TASK = "task=stack"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    presets = tmp_path / "presets"
    presets.mkdir()
    fake_registry.install(monkeypatch, presets)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def save(folder: Path, *overrides: str) -> Path:
    """A run as training leaves it: config.yaml and a checkpoint, of which only the archive form is read here."""
    invocation = compose("train", [TASK, *overrides, f"out={folder}"])
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(invocation.config))
    with zipfile.ZipFile(folder / "checkpoints" / "latest.pt", "w") as archive:
        archive.writestr("data.pkl", b"weights")
    return folder


def refused(*overrides: str, command: str = "train") -> str:
    with pytest.raises(BadInput) as caught:
        compose(command, list(overrides))
    return str(caught.value)


# -- values --------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_dataclasses(fake):
    config = compose("train", [TASK]).config
    assert set(config) == {option.name for option in fields(RunConfig)}
    assert [config[group]["name"] for group in keys.GROUPS] == ["stack", "franka", "success_guided", "mlp", "ppo"]
    assert config["sim"] == {"num_worlds": 1024, "engine": "cpu", "threads": 0}
    assert config["budget"]["target_success"] == 0.96
    assert config["algo"] == {"name": "ppo", "clip": 0.2, "num_steps": 24, "minibatch_size": None}


def test_a_task_says_what_is_usual_for_it(fake):
    """Choices and options of its own, which the user's beat; those of what the user replaced fall away."""

    def chosen(*overrides):
        config = compose("train", ["task=swim", *overrides]).config
        sampler = config["sampler"]
        return (
            config["robot"]["name"],
            (sampler["name"], sampler["history"]),
            (config["algo"]["num_steps"], config["algo"]["clip"]),
            config["sim"]["num_worlds"],
        )

    assert chosen() == ("eel", ("uniform", 5), (8, 0.2), 64)
    assert chosen("sampler=uniform", "algo=ppo") == chosen()
    assert chosen("sampler=success_guided") == ("eel", ("success_guided", 50), (8, 0.2), 64)
    assert chosen("sampler=patient")[1] == ("success_guided", 400)
    assert chosen("robot=franka", "algo.num_steps=3", "sim.num_worlds=7") == ("franka", ("uniform", 5), (3, 0.2), 7)


def test_a_saved_run_keeps_what_it_was_run_with(fake, tmp_path):
    folder = save(tmp_path / "run", "sim.num_worlds=32")
    text = (folder / "config.yaml").read_text().replace("name: stack", "name: swim")
    values = yaml.safe_load(text)
    values["task"] = {"name": "swim"}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    assert compose("train", [f"resume={folder}"]).config["sim"]["num_worlds"] == 32
    assert compose("eval", [f"checkpoint={folder}"]).config["algo"]["num_steps"] == 24


def test_command_line_beats_preset_beats_dataclass(fake):
    def sampler(*overrides):
        values = compose("train", [TASK, *overrides]).config["sampler"]
        return values["name"], values["history"], values["target"]

    assert sampler() == ("success_guided", 50, 0.66)
    assert sampler("sampler=patient") == ("success_guided", 400, 0.9)
    # the order on the command line does not matter between a choice and its options
    assert sampler("sampler.target=0.5", "sampler=patient") == ("success_guided", 400, 0.5)


def test_the_last_of_two_values_counts(fake):
    assert compose("train", [TASK, "seed=1", "seed=2"]).config["seed"] == 2


def test_config_is_plain_and_survives_yaml(fake):
    config = compose("train", [TASK, "task.shape=SQUARE", "task.reach.far=1e-8", "task.part=cube"]).config
    assert yaml.safe_load(to_yaml(config)) == config
    assert config["task"]["shape"] == "SQUARE"


def test_options_are_the_registered_dataclasses(fake):
    given_ = [
        TASK,
        "task.limits=[1,2]",
        "task.weights={b:3}",
        "task.weights.c=4",
        "task.shape=SQUARE",
        "task.reach.near=2",
    ]
    config = compose("train", [*given_, "sampler.history=7", "policy.hidden=[3]"]).config
    assert options("task", config) == fake_registry.StackOptions(
        limits=(1.0, 2.0),
        weights={"a": 1.0, "b": 3.0, "c": 4.0},
        shape=fake_registry.Shape.SQUARE,
        reach=fake_registry.Reach(near=2.0),
    )
    assert options("sampler", config) == fake_registry.FrontierOptions(history=7)
    assert options("policy", config).hidden == [3]
    assert options("sim", config).num_worlds == 1024


def test_a_section_can_be_given_as_a_dict(fake):
    assert compose("train", [TASK, "sim={num_worlds:4}"]).config["sim"]["num_worlds"] == 4


def test_interpolations_are_resolved(fake, monkeypatch):
    monkeypatch.setenv("WORLDS", "12")
    config = compose("train", [TASK, "sim.num_worlds=${oc.env:WORLDS}", "seed=${sim.num_worlds}"]).config
    assert (config["sim"]["num_worlds"], config["seed"]) == (12, 12)


def test_hydra_is_left_as_it_was(fake):
    store = ConfigStore.instance()
    store.store(group="task", name="foreign", node={"a": 1})
    before = {name: dict(group) if isinstance(group, dict) else group for name, group in store.repo.items()}
    compose("train", [TASK])
    assert store.repo == before
    del store.repo["task"]


# -- refusals ------------------------------------------------------------------------------------------------------

BAD = {
    "": "task is missing: embodied train task=stack; valid: stack",
    "task=stak": "unknown task 'stak': did you mean 'stack'?",
    f"{TASK} sampler=unifrom": "did you mean 'uniform'?",
    f"{TASK} sampler=patint": "did you mean 'patient'?",
    f"{TASK} sampler=null": "unknown sampler 'null'",
    f"{TASK} sampler=[uniform]": "expected one of patient, success_guided, uniform",
    f"{TASK} task=stack": "task= is given twice",
    f"{TASK} +sampler=uniform": "write sampler=value",
    f"{TASK} ++sampler=uniform": "write sampler=value",
    f"{TASK} sampler@x=uniform": "packages",
    "tsk=stack": "did you mean 'task'?",
    f"{TASK} algo.clp=1": "unknown key 'algo.clp': did you mean 'algo.clip'?",
    f"{TASK} +algo.clp=1": "unknown key 'algo.clp': did you mean 'algo.clip'?",
    f"{TASK} ++algo.clp=1": "unknown key 'algo.clp': did you mean 'algo.clip'?",
    f"{TASK} ~algo.clp": "unknown key 'algo.clp': did you mean 'algo.clip'?",
    f"{TASK} algo.qqqqq=1": "algo has clip, num_steps, minibatch_size",
    f"{TASK} num_worlds=3": "did you mean 'sim.num_worlds'?",
    f"{TASK} task.num_worlds=3": "did you mean 'sim.num_worlds'?",
    f"{TASK} task.reach.nea=3": "did you mean 'task.reach.near'?",
    f"{TASK} task.reach={{nea:3}}": "did you mean 'task.reach.near'?",
    f"{TASK} task.part.x=3": "unknown key 'task.part.x'",
    f"{TASK} task.name=cube": "choose with task=",
    f"{TASK} hydra.run.dir=x": "unknown key 'hydra.run.dir'",
    f"{TASK} hydra/launcher=x": "unknown key 'hydra/launcher'",
    f"{TASK} +seed=1": "seed exists already: write seed=value",
    f"{TASK} ~seed": "none can be removed",
    f"{TASK} sim.num_worlds=abc": "sim.num_worlds=abc: expected a whole number",
    f"{TASK} sim.num_worlds=1.5": "expected a whole number",
    f"{TASK} sim.num_worlds=true": "expected a whole number",
    f"{TASK} sim.num_worlds=null": "expected a whole number",
    f"{TASK} algo.clip=big": "algo.clip=big: expected a number",
    f"{TASK} algo.minibatch_size=x": "expected a whole number or null",
    f"{TASK} task.height=x": "expected a number or null",
    f"{TASK} task.seen=perhaps": "expected true or false",
    f"{TASK} task.part=[1]": "expected text",
    f"{TASK} task.shape=OVAL": "expected one of ROUND, SQUARE",
    f"{TASK} task.limits=3": "expected tuple[float, float]",
    f"{TASK} task.limits=[1,x]": "expected tuple[float, float]",
    f"{TASK} task.limits=[1,2,3]": "expected 2 values",
    f"{TASK} task.limits.7=3": "as task.limits",
    f"{TASK} task.weights.a=x": "expected dict[str, float] as task.weights",
    f"{TASK} policy.hidden=[a]": "expected list[int]",
    f"{TASK} policy.hidden=[]": "hidden needs at least one layer",
    f"{TASK} sim=3": "sim is a section: write sim.num_worlds=value",
    f"{TASK} seed=1,2": "several values need -m",
    f"{TASK} seed=range(3)": "several values need -m",
    f"{TASK} seed=???": "seed",
    f"{TASK} seed=${{nothing}}": "seed",
    f"{TASK} seed=${{seed}}": "seed",
    f"{TASK} seed=${{device}}": "seed",
    f"{TASK} algo.clip=nan": "expected a finite number",
    f"{TASK} algo.clip=inf": "expected a finite number",
    f"{TASK} policy.hidden=[1,99999999999999999999]": "too large",
    f"{TASK} sim.num_worlds=0": "sim.num_worlds=0: expected more than 0",
    f"{TASK} sim.num_worlds=-5": "expected more than 0",
    f"{TASK} sim.threads=-1": "expected 0 (every core) or more",
    f"{TASK} sim.engine=wrap": "unknown engine 'wrap': did you mean 'warp'?",
    f"{TASK} episodes=0": "episodes=0: expected more than 0",
    f"{TASK} eval.every=0": "expected more than 0",
    f"{TASK} eval.episodes=0": "expected more than 0",
    f"{TASK} save.every=0": "expected more than 0",
    f"{TASK} budget.minutes=-1": "budget.minutes=-1.0: expected more than 0",
    f"{TASK} budget.iterations=-1": "expected more than 0",
    f"{TASK} budget.env_steps=0": "expected more than 0",
    f"{TASK} budget.target_success=1.5": "success rate in (0, 1]",
    f"{TASK} seed=-1": "expected 0 to 4294967295",
    f"{TASK} device=gpu": "expected cpu, cuda or cuda:<number>",
    f"{TASK} device=cuda:99": "device=cuda:99",
    f"{TASK} algo.minibatch_size=49 sim.num_worlds=2": "more than the batch",
    f"{TASK} task.part=ball": "expected peg or cube",
    "stack": "did you mean task=stack?",
    f"{TASK} =3": "unknown key ''",
    f"{TASK} out=a(": "cannot read 'out=a(': expected key=value",
    f"{TASK} checkpoint=x": "train does not",
    f"{TASK} out=.": "exists",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_says_what_to_write(fake, line):
    assert BAD[line] in refused(*line.split())


def test_minibatch_as_large_as_the_batch_is_fine(fake):
    assert compose("train", [TASK, "algo.minibatch_size=48", "sim.num_worlds=2"]).config["algo"]["minibatch_size"] == 48


def test_a_broken_preset_is_named(fake):
    preset = keys.presets_dir() / "sampler" / "patient.yaml"
    preset.write_text("name: success_guided\nhistry: 400\n")
    assert "patient.yaml: Key 'histry'" in refused(TASK, "sampler=patient")


# -- the run's folder ----------------------------------------------------------------------------------------------


def test_default_folder_has_task_time_and_seed(fake):
    invocation = compose("train", [TASK, "seed=7"])
    assert re.fullmatch(r"runs/stack/\d{8}-\d{6}-7", str(invocation.run_dir))
    assert invocation.config["out"] == str(invocation.run_dir)
    assert list(fake.iterdir()) == [], "composing leaves nothing on disk"


def test_a_job_of_a_sweep_has_its_number_in_the_folder(fake):
    assert str(compose("train", [TASK, "out=runs/a"], job=3).run_dir) == "runs/a-3"


def test_an_existing_folder_is_not_used_again(fake):
    (fake / "runs" / "a").mkdir(parents=True)
    assert refused(TASK, "out=runs/a").strip().endswith("out=runs/a exists: choose another")
    (fake / "runs" / "a" / "config.yaml").touch()  # a run, which can be continued
    assert "out=runs/a exists: choose another, or continue it with resume=runs/a" in refused(TASK, "out=runs/a")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which not even root can write")
def test_a_read_only_parent_is_refused(fake):
    assert "out=/proc/runs/a cannot be made" in refused(TASK, "out=/proc/runs/a")


def test_a_parent_that_is_a_file_is_refused(fake):
    (fake / "file").touch()
    assert "cannot be made" in refused(TASK, "out=file/a")


def test_a_name_too_long_is_refused(fake):
    assert "cannot be made" in refused(TASK, "out=" + "a" * 300)


# -- saved runs ----------------------------------------------------------------------------------------------------


def test_resume_takes_the_saved_configuration_and_a_new_budget(fake):
    run = save(fake / "a", "seed=5", "sampler=patient", "task.weights={b:2}", "task.limits=[3,4]", "budget.iterations=10")
    invocation = compose("train", [f"resume={run}", "budget.iterations=20"])
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["budget"]["iterations"] = 20
    assert invocation.config == saved
    assert options("task", invocation.config).limits == (3.0, 4.0)
    assert (invocation.run_dir, invocation.resume, invocation.checkpoint) == (run, run / "checkpoints/latest.pt", None)


def test_resume_keeps_what_is_no_budget(fake):
    run = save(fake / "a")
    for override in ("seed=1", "algo.clip=0.3", "sim.num_worlds=2", "out=b", TASK, "sampler=uniform", "episodes=3"):
        message = refused(f"resume={run}", override)
        assert override in message and "accepts only budget.*" in message
    assert "did you mean 'budget.minutes'?" in refused(f"resume={run}", "budget.minuts=3")


@pytest.mark.parametrize("command", ["eval", "play"])
def test_evaluation_may_change_task_and_simulation(fake, command):
    run = save(fake / "a", "seed=5", "algo.clip=0.3")
    given_ = ["task.part=cube", "sim.num_worlds=8", "episodes=3", "seed=9", "device=cpu", "eval.randomise=true"]
    invocation = compose(command, [f"checkpoint={run}", *given_])
    config = invocation.config
    assert (config["task"]["part"], config["sim"]["num_worlds"], config["episodes"]) == ("cube", 8, 3)
    assert (config["seed"], config["eval"]["randomise"], config["algo"]["clip"]) == (9, True, 0.3)
    assert (invocation.run_dir, invocation.checkpoint, invocation.resume) == (run, run / "checkpoints/latest.pt", None)
    assert str(compose(command, [f"checkpoint={run}", "out=b"]).run_dir) == "b"
    for override in ("algo.clip=0.2", TASK, "sampler=uniform", "budget.minutes=1", "policy.hidden=[1]"):
        assert f"{override}: {command} of a saved run" in refused(f"checkpoint={run}", override, command=command)
    assert "task.part=ball" in refused(f"checkpoint={run}", "task.part=ball", command=command)


def test_a_checkpoint_file_names_its_run(fake, monkeypatch):
    run = save(fake / "a")
    best = run / "checkpoints" / "best.pt"
    best.write_bytes((run / "checkpoints" / "latest.pt").read_bytes())
    assert compose("eval", [f"checkpoint={best}"]).checkpoint == best
    monkeypatch.chdir(best.parent)
    invocation = compose("eval", ["checkpoint=best.pt"])
    assert (invocation.checkpoint, invocation.run_dir) == (best, run)


def test_a_moved_run_is_where_it_is_now(fake):
    run = save(fake / "a").rename(fake / "b")
    assert compose("train", [f"resume={run}"]).config["out"] == str(run)


def test_the_newest_run_is_evaluated_by_default(fake):
    assert "no run under runs/" in refused(command="eval")
    for name, age in (("x/1", 100), ("y/2", 300), ("x/3", 200)):
        latest = save(fake / "runs" / name) / "checkpoints" / "latest.pt"
        os.utime(latest, (age, age))
    invocation = compose("play", [])
    assert (invocation.run_dir, invocation.checkpoint) == (Path("runs/y/2"), Path("runs/y/2/checkpoints/latest.pt"))


def test_paths_that_are_no_run(fake):
    run = save(fake / "a")
    (fake / "empty").mkdir()
    stray = fake / "stray.pt"
    stray.write_bytes((run / "checkpoints" / "latest.pt").read_bytes())
    cases = {
        "nowhere": "there is no such folder or file",
        "empty": "not a run",
        str(stray): "not a run",
        str(run / "checkpoints"): "not a run",
        str(run / "config.yaml"): "not a run",
        "''": "expected the path of a run folder",
        "[1]": "expected the path of a run folder",
        "'~nobody-of-this-name/a'": "cannot be read",
        "a" * 300: "cannot be read",
    }
    for path, message in cases.items():
        assert message in refused(f"checkpoint={path}", command="eval"), path
        assert message in refused(f"resume={path}"), path


def test_damaged_runs(fake):
    run = save(fake / "a")
    latest = run / "checkpoints" / "latest.pt"
    whole = latest.read_bytes()
    latest.write_bytes(whole[: len(whole) // 2])
    assert "latest.pt is no checkpoint" in refused(f"resume={run}")
    latest.unlink()
    assert "has no checkpoint yet" in refused(f"resume={run}")
    latest.write_bytes(whole)
    config = yaml.safe_load((run / "config.yaml").read_text())
    for text, message in (
        ("[", "cannot be read"),
        ("- 1", "'task' has no name"),
        (to_yaml({**config, "algo": {"name": "ppo", "clp": 1}}), "Key 'clp'"),
        (to_yaml({**config, "seed": "x"}), "could not be converted"),
        (to_yaml({**config, "task": {"name": "gone"}}), "unknown task 'gone'"),
    ):
        (run / "config.yaml").write_text(text)
        assert message in refused(f"resume={run}"), text


def test_sources_belong_to_their_commands(fake):
    run = save(fake / "a")
    assert "eval does not" in refused(f"resume={run}", command="eval")
    assert "bench sim does not" in refused(TASK, f"checkpoint={run}", command="bench sim")
    assert "given twice" in refused(f"resume={run}", f"resume={run}")


def test_bench_takes_only_what_it_measures(fake):
    given_ = ["sampler=uniform", "sim.num_worlds=4", "algo.num_steps=3", "seed=1"]
    assert compose("bench sim", [TASK, *given_]).config["algo"]["num_steps"] == 3
    for override in ("budget.minutes=1", "out=a", "episodes=3", "save.every=1", "eval.every=1"):
        assert f"{override}: bench sim measures and keeps no run" in refused(TASK, override, command="bench sim")


# -- sweeps --------------------------------------------------------------------------------------------------------


def test_sweeps_give_every_combination(fake):
    jobs = expand([TASK, "seed=range(0,3)", "sampler=uniform,patient"])
    assert jobs == [[TASK, f"seed={s}", f"sampler={name}"] for s in range(3) for name in ("uniform", "patient")]
    assert expand([TASK, "sampler=glob(*,exclude=p*)"]) == [[TASK, "sampler=success_guided"], [TASK, "sampler=uniform"]]
    with pytest.raises(BadInput, match="matches none"):
        expand([TASK, "sampler=glob(z*)"])
    with pytest.raises(BadInput, match="several values"):
        compose("train", expand([TASK, "seed=interval(0,1)"])[0], job=0)


values = st.lists(
    st.one_of(st.integers(-9, 9).map(str), st.sampled_from(["abc", "[1,2]", "'a b'", "{x:1}", "0.5"])),
    min_size=1,
    max_size=3,
)
words = st.one_of(
    values.map(",".join),
    values.map(lambda several: f"choice({','.join(several)})"),
    st.tuples(st.integers(-3, 3), st.integers(1, 4)).map(lambda pair: f"range({pair[0]},{pair[0] + pair[1]})"),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["seed", "sim.num_worlds", "++algo.clip"]), words), max_size=3))
def test_sweeps_expand_as_hydras_own_sweeper_does(pairs):
    overrides = [f"{key}={word}" for key, word in pairs]
    batches = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    assert read(expand(overrides)) == read([job for batch in batches for job in batch])


def read(jobs):
    """Overrides as Hydra understands them: spelling (quotes) may differ."""
    parser = OverridesParser.create()
    return [[(one.get_key_element(), one.value()) for one in parser.parse_overrides(job)] for job in jobs]


# -- what is shipped -----------------------------------------------------------------------------------------------


def test_presets_are_found_in_a_checkout_and_in_a_wheel(monkeypatch, tmp_path):
    assert (keys.presets_dir() / "sampler" / "manipulation.yaml").is_file()
    package = tmp_path / "site-packages" / "embodied"
    (package / "configs" / "sampler").mkdir(parents=True)
    (package / "configs" / "sampler" / "mine.yaml").touch()
    monkeypatch.setattr(embodied, "__file__", str(package / "__init__.py"))
    assert list(keys.presets("sampler")) == ["mine"]


def test_the_usual_choices_compose(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for task in registry.names("task"):
        config = compose("train", [f"task={task}"]).config
        usual = registry.find("task", task).usual
        for key in usual.keys() - keys.GROUPS:
            assert attrgetter(key.partition(".")[2])(options(key.partition(".")[0], config)) == usual[key]
        for group in (group for group in keys.GROUPS if usual.get(group) not in keys.presets(group)):
            changed = {key.partition(".")[2]: value for key, value in usual.items() if key.startswith(f"{group}.")}
            assert options(group, config) == replace(registry.find(group, config[group]["name"]).options(), **changed)


def test_every_preset_composes_and_differs_from_what_it_presets(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = 0
    for group in keys.GROUPS:
        for name, path in keys.presets(group).items():
            assert name not in registry.names(group)
            config = compose("train", [f"task={registry.names('task')[0]}", f"{group}={name}"]).config
            assert config[group].items() >= yaml.safe_load(path.read_text()).items()
            assert options(group, config) != registry.find(group, config[group]["name"]).options()
            found += 1
    assert found >= 2


@pytest.mark.parametrize(
    ("name", "expected"),
    # the table of arXiv 2610.12465: H, t, kappa, T, eps
    [("manipulation", (100, 0.5, 1.0, 2.0, 1e-4)), ("locomotion", (100, 0.66, 5.0, 2.0, 1e-8))],
)
def test_sampler_presets_are_those_of_the_paper(monkeypatch, tmp_path, name, expected):
    monkeypatch.chdir(tmp_path)
    made = options("sampler", compose("train", [f"task={registry.names('task')[0]}", f"sampler={name}"]).config)
    assert (made.history, made.target, made.kappa, made.temperature, made.floor) == expected


def test_options_of_every_registered_thing_have_types_that_compose(monkeypatch):
    for group in keys.GROUPS:
        for name in registry.names(group):
            cls = registry.find(group, name).options
            assert "name" not in get_type_hints(cls), f"{group} '{name}': 'name' holds the registered name"
