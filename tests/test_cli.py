"""The command line: what it answers, how it ends, what it prints when the user is wrong."""

import contextlib
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import fake_registry
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from embodied import __version__, cli, config
from embodied.keys import GROUPS, option_types
from embodied.spec.errors import BadInput, Fault

TASK = "task=stack"
RUNNER = "fake_runner_of_tests"


@pytest.fixture(scope="module", autouse=True)
def fake(tmp_path_factory):
    """Fake registered things, an empty working folder, and a runner that only remembers what it was given."""
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        fake_registry.install(patch, tmp_path_factory.mktemp("presets"))
        patch.chdir(work)
        patch.setattr(cli, "RUNNERS", dict.fromkeys(cli.RUNNERS, RUNNER))
        patch.delenv("EMBODIED_DEBUG", raising=False)
        yield work


@pytest.fixture
def ran(monkeypatch):
    """What the runner is called with; `.answer` may be replaced by what it does."""
    ran = SimpleNamespace(calls=[], answer=lambda: None)

    def run(invocation):
        ran.calls.append(invocation)
        return ran.answer()

    monkeypatch.setitem(sys.modules, RUNNER, SimpleNamespace(run=run))
    return ran


def call(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(list(argv))
    return code, out.getvalue(), err.getvalue()


def shell(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "embodied.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)


# -- help ----------------------------------------------------------------------------------------------------------

LIGHT = """
import sys, io, contextlib
from embodied.cli import main
for argv in [[], ["--help"], ["-h"], ["--version"], *([*name.split(), "--help"] for name in sys.argv[1:])]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(argv) == 0 and out.getvalue().endswith("\\n"), argv
heavy = {"torch", "hydra", "omegaconf", "mujoco", "numpy", "rich", "av"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_imports_nothing_heavy_and_takes_no_time():
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", LIGHT, *cli.HELPS], capture_output=True, text=True, timeout=60)
        after = os.times()
        assert done.returncode == 0, done.stderr
        # processor time: other processes on the machine do not count
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5


def test_version():
    assert call("--version") == (0, f"{__version__}\n", "")


def test_help_of_train_names_every_option():
    text = call("train", "--help")[1]
    common = [key for key in option_types({}) if "." in key or key not in ("sim", "budget", "eval", "save")]
    for key in [*common, *GROUPS, "resume"]:
        assert f"{key}=" in text, key


def test_help_tells_the_true_defaults():
    text = call("train", "--help")[1] + call("eval", "--help")[1]
    true = {key: getattr(config.RunConfig, key) for key in ("seed", "episodes", "device")} | config.CHOICES
    for section in ("sim", "budget", "eval", "save"):
        made = config.RunConfig.__dataclass_fields__[section].default_factory()
        true |= {f"{section}.{key}": value for key, value in vars(made).items()}
    shown = re.findall(r"([a-z_.]+)=([a-z0-9_.]+)", text)
    told = [(key, word) for key, word in shown if key in true]
    assert len(told) > 12
    for key, word in told:
        assert yaml.safe_load(word) == true[key], key


def test_help_is_answered_wherever_it_stands(ran):
    assert call("train", TASK, "--help") == call("train", "-h") == (0, cli.HELPS["train"], "")
    assert "bench sim" in call("bench", "--help")[1]
    assert "emergency stop" in call("deploy", "--help")[1]
    assert ran.calls == []


# -- dispatch ------------------------------------------------------------------------------------------------------


def test_train_runs_with_its_configuration(ran):
    assert call("train", TASK, "seed=3", "out=runs/here") == (0, "", "")
    (invocation,) = ran.calls
    assert (invocation.command, invocation.config["seed"], str(invocation.run_dir)) == ("train", 3, "runs/here")
    assert invocation.overrides == [TASK, "seed=3", "out=runs/here"]
    assert invocation.resume is invocation.checkpoint is None


def test_bench_sim_runs(ran):
    assert call("bench", "sim", TASK)[0] == 0
    assert ran.calls[0].command == "bench sim"


def test_the_newest_run_is_named(ran, fake):
    assert call("train", TASK, "out=runs/new", "--cfg", "job")[0] == 0
    run = fake / "runs" / "new"
    (run / "checkpoints").mkdir(parents=True)
    try:
        (run / "config.yaml").write_text(call("train", TASK, "--cfg", "job")[1])
        # the smallest zip archive: an empty one
        (run / "checkpoints" / "latest.pt").write_bytes(b"PK\x05\x06" + bytes(18))
        assert call("eval") == (0, "checkpoint=runs/new/checkpoints/latest.pt (the newest run)\n", "")
        assert call("eval", "checkpoint=runs/new") == (0, "", "")
        assert [str(one.run_dir) for one in ran.calls] == ["runs/new"] * 2
        assert "several jobs would write to runs/new: give out=" in call("play", "-m", "seed=0,1")[2]
        assert call("eval", "-m", "seed=0,1", "out=other")[0] == 0
        assert [str(one.run_dir) for one in ran.calls[2:]] == ["other-0", "other-1"]
    finally:
        for path in sorted(run.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        run.rmdir()


def test_cfg_prints_the_resolved_configuration_and_stops(ran):
    code, out, err = call("train", TASK, "sampler=patient", "algo.clip=0.5", "--cfg", "job")
    shown = yaml.safe_load(out)
    assert (code, err, ran.calls) == (0, "", [])
    assert shown["sampler"] == {"name": "success_guided", "history": 400, "target": 0.9}
    assert shown["algo"]["clip"] == 0.5
    assert call("train", "--cfg=job", TASK)[0] == call("train", "-c", "job", TASK)[0] == 0


def test_sweep_runs_every_job_in_turn(ran):
    code, out, _ = call("train", "-m", TASK, "seed=0,1", "sampler=choice(uniform,patient)", "out=runs/s")
    got = [(one.config["seed"], one.config["sampler"]["history"], str(one.run_dir)) for one in ran.calls]
    assert code == 0
    assert got == [(0, 10, "runs/s-0"), (0, 400, "runs/s-1"), (1, 10, "runs/s-2"), (1, 400, "runs/s-3")]
    clocks = [one.started for one in ran.calls]
    assert clocks == sorted(set(clocks)), "each job has a clock of its own"
    assert out.splitlines()[3] == "job 4 of 4: task=stack seed=1 sampler=patient out=runs/s"
    ran.calls.clear()
    assert call("train", "--multirun", TASK, "seed=range(0,3)")[0] == 0
    assert [one.config["seed"] for one in ran.calls] == [0, 1, 2]
    assert [str(one.run_dir).rpartition("-")[2] for one in ran.calls] == ["0", "1", "2"]


def test_sweep_is_checked_before_its_first_job(ran):
    code, out, err = call("train", "-m", TASK, "sim.num_worlds=4,0")
    assert (code, out, err) == (2, "", "error: sim.num_worlds=0: expected more than 0\n")
    assert ran.calls == []


def test_sweep_can_be_shown(ran):
    out = call("train", "-m", TASK, "seed=4,5", "--cfg", "job")[1]
    assert [one["seed"] for one in yaml.safe_load_all(out)] == [4, 5]


def test_sweep_stops_at_a_job_that_fails(ran):
    ran.answer = lambda: 1
    assert call("train", "-m", TASK, "seed=0,1")[0] == 1
    assert len(ran.calls) == 1


# -- ends ----------------------------------------------------------------------------------------------------------


def raiser(error):
    def answer():
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BadInput("no\nsuch  thing"), 2, "error: no such thing"),
        (Fault("loss is NaN"), 1, "fault: loss is NaN"),
        (ValueError("bad\u2028value"), 1, "fault: ValueError: bad value (EMBODIED_DEBUG=1 shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes_and_one_line(ran, monkeypatch, error, code, line):
    ran.answer = raiser(error)
    assert call("train", TASK) == (code, "", line + "\n")
    monkeypatch.setenv("EMBODIED_DEBUG", "1")
    got, _, err = call("train", TASK)
    assert got == code
    assert err.startswith("Traceback") and err.endswith("\n" + line + "\n")


def test_a_reader_that_leaves_gives_no_traceback():
    read, write = os.pipe()
    os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "embodied.cli", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


WARNS = """
import sys, warnings
from embodied import cli, compose
from embodied.spec.errors import BadInput
def warn(*_):
    warnings.warn("plug-in 'x' is left out")
    raise BadInput("stop")
compose.compose = warn
sys.exit(cli.main(["train", "task=any"]))
"""


def test_a_warning_takes_one_line():
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "warning: plug-in 'x' is left out\nerror: stop\n")


# -- bad input -----------------------------------------------------------------------------------------------------

BAD = {
    "trian": "unknown command 'trian': did you mean 'train'?",
    "--hlep": "unknown command '--hlep'",
    TASK: f"the command is missing before '{TASK}': embodied train {TASK}",
    "bench": "embodied bench: which? valid: sim",
    "bench smi": "unknown command 'bench smi': did you mean 'sim'?",
    "deploy": "embodied deploy: which? valid: check, sim, run, stop, clear, faults, replay, repair",
    "deploy rum": "unknown command 'deploy rum': did you mean 'run'?",
    "tasks all": "embodied tasks takes no arguments, got 'all'",
    "doctor now": "cannot read 'now': expected key=value",
    "train": "task is missing: embodied train task=stack; valid: stack",
    "bench sim": "task is missing: embodied bench sim task=stack; valid: stack",
    "eval": "no run under runs/ to eval",
    "play": "no run under runs/ to play",
    "eval checkpoint=nowhere": "checkpoint=nowhere: there is no such folder or file",
    "train resume=nowhere": "resume=nowhere: there is no such folder or file",
    f"train {TASK} --seed 3": "unknown flag '--seed': options are written seed=value",
    f"train {TASK} --seed=3": "unknown flag '--seed=3': options are written seed=value",
    f"train {TASK} -": "unknown flag '-'",
    f"train {TASK} --cfg": "--cfg takes 'job', got 'nothing'",
    f"train {TASK} --cfg all": "--cfg takes 'job', got 'all'",
    f"train {TASK} +algo.clp=1": "unknown key 'algo.clp': did you mean 'algo.clip'?",
    f"train {TASK} sim.num_worlds=abc": "sim.num_worlds=abc: expected a whole number",
    f"train {TASK} sim.num_worlds=0": "sim.num_worlds=0: expected more than 0",
    f"train {TASK} algo.minibatch_size=999999": "more than the batch",
    f"train {TASK} task.part=ball": "task.part=ball: expected peg or cube",
    f"train -m {TASK} seed=interval(0,1)": "several values need -m",
    f"train {TASK} out=/dev/null/a": "out=/dev/null/a cannot be made",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_2(ran, line):
    code, out, err = call(*line.split())
    assert (code, out, ran.calls) == (2, "", [])
    assert err.startswith("error: ") and err.count("\n") == 1 and BAD[line] in err


def test_bad_input_through_a_real_shell():
    for argv in (["trian"], ["train", "task=assembly", "--seed", "3"]):
        done = shell(*argv)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "Traceback" in shell("trian", EMBODIED_DEBUG="1").stderr


def test_real_registry_through_a_real_shell(fake):
    done = shell("train", "task=asembly")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown task 'asembly': did you mean 'assembly'?\n"


TYPES = option_types(
    {
        "task": fake_registry.StackOptions,
        "robot": fake_registry.NoOptions,
        "sampler": fake_registry.FrontierOptions,
        "policy": fake_registry.MlpOptions,
        "algo": fake_registry.PpoOptions,
    }
)
KEYS = sorted(TYPES)
NUMBERS = [key for key in KEYS if TYPES[key] in (int, float, int | None, float | None)]
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


@st.composite
def misspelt(draw):
    """A valid key with one letter more, less or other, that is no valid key."""
    key = draw(st.sampled_from(KEYS))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(LETTERS))
    return draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + letter + key[at + 1 :], key[:at] + letter + key[at:]]))


def is_refused(*argv: str) -> None:
    code, out, err = call(*argv)
    assert (code, out) == (2, ""), (argv, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err.splitlines()) == 1, (argv, err)


fuzz = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(
    misspelt().filter(lambda key: key not in {*KEYS, *GROUPS} and not key.startswith("task.weights.")),
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from(["1", "abc", "null", "[1,2]", "{a:1}", "1,2"]),
)
def test_any_misspelt_key_is_refused(key, sign, value):
    is_refused("train", TASK, f"{sign}{key}={value}", "--cfg", "job")


@fuzz
@given(st.sampled_from(NUMBERS), st.text(LETTERS, min_size=1, max_size=8))
@example("algo.clip", "infinit")
def test_any_word_for_a_number_is_refused(key, word):
    if word not in ("null", "inf", "infinity"):
        is_refused("train", TASK, f"{key}={word}", "--cfg", "job")


@fuzz
@given(st.lists(st.one_of(
    st.text(max_size=12),
    st.tuples(st.sampled_from([*KEYS, *GROUPS, "resume", "checkpoint"]), st.text(max_size=6)).map("=".join),
    st.tuples(st.sampled_from(KEYS), st.from_regex(r"[\[\]{}(),:'\"$~+.0-9a-e\\ ]{0,8}", fullmatch=True)).map("=".join),
), max_size=3), st.booleans())  # fmt: skip
@example(["seed=${seed}"], False)
@example(["out=" + "[" * 2000], False)
@example(["out=\x00"], False)
@example(["resume=\x00"], False)
@example(["resume=\ud800"], False)
def test_nothing_typed_gives_a_traceback(words, sweep):
    # a lone -h is a request for help, and --cfg keeps sound ones from running
    words = [word for word in words if word not in ("-h", "--help")]
    code, out, err = call("train", TASK, *words, *["-m"] * sweep, "--cfg", "job")
    if code == 0:
        assert err == "" and all(one["task"]["name"] == "stack" for one in yaml.safe_load_all(out))
    else:
        assert code == 2 and out == "" and err.startswith("error: ") and len(err.splitlines()) == 1, (words, err)


# -- tasks ---------------------------------------------------------------------------------------------------------


def test_tasks_are_plain_lines_when_piped():
    assert call("tasks")[1].splitlines() == [
        "stack: Put one thing on another.",
        "  robot=franka",
        "  task.part=peg",
        "  task.limits=[0.0, 1.0]",
        "  task.weights.a=1.0",
        "  task.shape=ROUND",
        "  task.seen=true",
        "  task.height=null",
        "  task.reach.near=0.1",
        "  task.reach.far=1.0",
        "swim: Go through water.",
        "  robot=eel",
        "  sampler=uniform",
        "  sampler.history=5",
        "  algo.num_steps=8",
        "  sim.num_worlds=64",
    ]


def test_tasks_are_a_table_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["tasks"]) == 0
    out = capsys.readouterr().out
    assert "│" in out and "stack" in out and "task.limits=[0.0, 1.0]" in out
