"""The command line: `embodied <command> key=value ...`.

Answers to `--help` must not wait for torch: nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from embodied import __version__
from embodied.spec.errors import BadInput, Fault, nearest

if TYPE_CHECKING:
    from embodied.compose import Invocation

RUNNERS = {
    "train": "embodied.commands.train",
    "eval": "embodied.commands.evaluate",
    "play": "embodied.commands.play",
    "export": "embodied.commands.export",
    "bench sim": "embodied.commands.bench_sim",
}
"""The module of each command that takes a configuration; its `run(invocation)` does the work."""

DEPLOY = {
    "deploy check": ("check", "run"),
    "deploy sim": ("sim", "run"),
    "deploy run": ("run", "run"),
    "deploy stop": ("operate", "stop"),
    "deploy clear": ("operate", "clear"),
    "deploy faults": ("faults", "run"),
    "deploy replay": ("journal", "replay"),
    "deploy repair": ("journal", "repair"),
}
"""Module under embodied.commands.deploy and function of each command that reads a few options of its own."""

HELP = """\
embodied: sim-to-real reinforcement learning for robots

usage: embodied <command> key=value ...

  train      train a policy for a task, then evaluate it
  eval       success rate of a trained policy, with its confidence interval
  play       recording and video of a trained policy
  export     a trained policy as one self-describing ONNX file
  deploy     a policy on a robot: check, sim, run, stop, clear, faults, replay, repair
  bench sim  speed of a task's simulation
  tasks      the tasks that can be trained, and their options
  doctor     check this machine and say how to mend it

  embodied train task=assembly                  embodied <command> --help
  embodied eval                                 embodied --version
"""

CONFIGURED = """
  -m            run every combination of several values, in turn: -m seed=0,1,2 sampler=success_guided,uniform
  --cfg job     print the resolved configuration as YAML and stop
  EMBODIED_DEBUG=1 in the environment shows tracebacks
"""

RUN_KEYS = """
  task=         what to learn; `embodied tasks` lists them           robot=franka
  sampler=      how resets are drawn (success_guided)                policy=mlp  algo=ppo
  task.* robot.* sampler.* policy.* algo.*      options of the above, shown by --cfg job

  sim.num_worlds=1024       worlds in parallel       sim.engine=cpu  sim.threads=0 (every core)
  seed=0                    of everything random     device=cpu
"""

HELPS = {
    "train": f"""\
usage: embodied train task=<task> key=value ...
       embodied train resume=<run> budget.<bound>=value
{RUN_KEYS}
  budget.iterations= budget.env_steps= budget.minutes= budget.target_success=0.96     whichever comes first; null: none
  eval.every=10  eval.episodes=200  eval.randomise=false     evaluations during training
  episodes=500              of the final evaluation
  save.every=10             iterations between checkpoints
  out=runs/<task>/<date-time>-<seed>            folder of the run, must be new
  resume=<run>              continue a run exactly where its last checkpoint left it
{CONFIGURED}""",
    "eval": f"""\
usage: embodied eval checkpoint=<run> key=value ...

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  episodes=500  seed=0  device=cpu  out=<folder>
  task.* sim.* eval.*       change what the run was trained with
{CONFIGURED}""",
    "play": f"""\
usage: embodied play checkpoint=<run> key=value ...

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  episodes=  seed=0  device=cpu  out=<folder>
  task.* sim.* eval.*       change what the run was trained with
{CONFIGURED}""",
    "export": """\
usage: embodied export checkpoint=<run> [out=<file.onnx>]

  checkpoint=   folder of a run, or one of its checkpoint files; the newest under runs/ by default
  out=          file to write, must be new; policy.onnx in the run's folder by default, which is replaced
""",
    "deploy": """\
usage: embodied deploy <command> key=value ...

  sim      a simulated robot, as a process of its own
  check    does an exported policy fit a robot, name by name
  run      the policy drives the robot, through the guard, recorded
  stop     emergency stop, latched in the robot        clear    let it move again
  faults   inject faults, and measure at the robot what comes of them
  replay   a journal as a rerun recording              repair   set a journal's torn end aside

  embodied deploy sim task=assembly                    embodied deploy <command> --help
  embodied deploy run policy=runs/a episodes=3
""",
    "deploy check": """\
usage: embodied deploy check policy=<file.onnx> key=value ...

  policy=       an exported policy, or the folder of a run that was exported
  robot=127.0.0.1:47000     address of the robot process
  key_file=     file with the shared key; needed for an address that is not this machine

Names every difference between what the policy was made for and what the robot says of itself.
""",
    "deploy sim": """\
usage: embodied deploy sim task=<task> key=value ...

A simulated robot in the task's cell, as a process of its own that runs at the wall clock.

  port=47000  host=127.0.0.1  key_file=       where it listens
  seed=0                    of sensor noise
  watchdog_s=0.1            without a command for so long, the robot stops by itself
  lockstep=false            time passes only with commands
  log=<file>                what the robot heard and did (a journal)
  task.* robot.*            the cell, as for training
  reality=nominal           how the robot differs from the simulation: nominal, shifted, or a YAML file
  reality.friction= gains= mass= clearance=1.0      factors
  reality.delay=0           control steps between a command and its effect
  reality.offset=[0,0,0]    constant error of the seen socket [m]
  reality.position_noise= force_noise=  reversed_joints=false
""",
    "deploy run": """\
usage: embodied deploy run policy=<file.onnx> key=value ...

  policy=       an exported policy, or the folder of a run that was exported
  robot=127.0.0.1:47000     address of the robot process
  episodes=1  seed=0        scenes seed, seed + 1, ...
  hold_s=0.5                how long something may be late before the run ends
  realtime=true             ask for real-time priority
  out=runs/deploy/<date-time>     folder, must be new: journal.emb, summary.json
  key_file=     file with the shared key; needed for an address that is not this machine

Ctrl-C ends the present episode at rest. `embodied deploy stop` is the emergency stop.
""",
    "deploy stop": """\
usage: embodied deploy stop [robot=127.0.0.1:47000] [key_file=]

Emergency stop: the robot stops, whoever holds it, and stays so until `embodied deploy clear`.
""",
    "deploy clear": """\
usage: embodied deploy clear [robot=127.0.0.1:47000] [key_file=]

Lets a robot move again after an emergency stop.
""",
    "deploy faults": """\
usage: embodied deploy faults policy=<file.onnx> [rows=<name>,...] [out=<folder>] [seed=0]

Injects faults between a runner and a simulated robot and measures at the robot what comes of them.
""",
    "deploy replay": """\
usage: embodied deploy replay journal=<file> [out=<file.rrd>] [episode=<number>]

A journal as a recording for the rerun viewer.
""",
    "deploy repair": """\
usage: embodied deploy repair journal=<file>

Sets a torn end aside, so that the journal can be read; nothing is deleted.
""",
    "bench sim": f"""\
usage: embodied bench sim task=<task> key=value ...
{RUN_KEYS}{CONFIGURED}""",
    "bench": "usage: embodied bench sim task=<task> key=value ...   (embodied bench sim --help)\n",
    "tasks": "usage: embodied tasks\n\nLists the tasks that can be trained, and their options.\n",
    "doctor": "usage: embodied doctor\n\nChecks this machine and says how to mend what is missing.\n",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 fault, 2 bad input, 130 interrupted."""
    try:
        code = _main(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # a closed pipe shows here, not after the last handler
        return code
    except BadInput as error:
        return _failed(f"error: {error}", 2)
    except Fault as error:
        return _failed(f"fault: {error}", 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:  # `embodied tasks | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the outermost frame: users get one line, whatever happened
        return _failed(f"fault: {type(error).__name__}: {error} (EMBODIED_DEBUG=1 shows the traceback)", 1)


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    command, args = _command(args)
    if "-h" in args or "--help" in args:
        print(HELPS[command], end="")
        return 0
    if command in RUNNERS:
        return _configured(command, args)
    if command in DEPLOY:
        module, function = DEPLOY[command]
        code: int = getattr(importlib.import_module(f"embodied.commands.deploy.{module}"), function)(args)
        return code
    if args:
        raise BadInput(f"embodied {command} takes no arguments, got '{args[0]}'")
    if command == "doctor":
        from embodied.doctor import doctor

        return doctor()
    _tasks()
    return 0


def _command(args: list[str]) -> tuple[str, list[str]]:
    """The command, of one word or two, and what follows it."""
    word, rest = args[0], args[1:]
    kinds = [name.partition(" ")[2] for name in HELPS if name.startswith(f"{word} ")]
    if kinds and not (rest and rest[0] in ("-h", "--help")):
        if not rest:
            raise BadInput(f"embodied {word}: which? valid: {', '.join(kinds)}")
        if rest[0] not in kinds:
            raise BadInput(f"unknown command '{word} {rest[0]}': {nearest(rest[0], kinds)}")
        return f"{word} {rest[0]}", rest[1:]
    if word in HELPS:
        return word, rest
    if "=" in word:
        raise BadInput(f"the command is missing before '{word}': embodied train {word}")
    raise BadInput(f"unknown command '{word}': {nearest(word, {name.split()[0] for name in HELPS})}")


def _configured(command: str, args: list[str]) -> int:
    """Compose every job of a command, and only when all are sound print or run them."""
    overrides, sweep, show = _flags(args)
    # bit-exact resume needs a fixed number of MKL threads, which it reads once, when torch is imported
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    # threads that spin while they wait make an update ten times slower as soon as anything else wants a core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if command == "play" and "MUJOCO_GL" not in os.environ:
        from embodied.doctor import offscreen_backend

        # MuJoCo takes its GL backend from here when it is imported, and by default wants a window
        os.environ["MUJOCO_GL"] = offscreen_backend() or "egl"
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        from embodied.compose import compose, to_yaml
        from embodied.overrides import expand

        if sweep:
            jobs = [compose(command, words, job) for job, words in enumerate(expand(overrides))]
            folders = [job.run_dir for job in jobs]
            shared = next((folder for folder in folders if folders.count(folder) > 1), None)
            if shared is not None and command != "eval":  # which writes only where out= says
                raise BadInput(f"several jobs would write to {shared}: give out=, to which each appends its number")
        else:
            jobs = [compose(command, overrides)]
    if show:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    for number, job in enumerate(jobs):
        if sweep:
            if number > 0:
                job = replace(job, started=time.time())
            print(f"job {number + 1} of {len(jobs)}: {' '.join(job.overrides)}", flush=True)
        code = _run(job)
        if code != 0:
            return code
    return 0


def _run(job: Invocation) -> int:
    if job.checkpoint is not None and not any(word.startswith("checkpoint=") for word in job.overrides):
        print(f"checkpoint={job.checkpoint} (the newest run)", flush=True)
    return importlib.import_module(RUNNERS[job.command]).run(job) or 0


def _flags(args: list[str]) -> tuple[list[str], bool, bool]:
    """Overrides, whether to sweep, whether only to print the configuration."""
    overrides, sweep, show = [], False, False
    rest = iter(args)
    for word in rest:
        if word in ("-m", "--multirun"):
            sweep = True
        elif word in ("-c", "--cfg") or word.startswith("--cfg="):
            value = word.partition("=")[2] if "=" in word else next(rest, "nothing")
            if value != "job":
                raise BadInput(f"--cfg takes 'job', got '{value}'")
            show = True
        elif word.startswith("-"):
            name = word.lstrip("-").partition("=")[0] or "key"
            raise BadInput(f"unknown flag '{word}': options are written {name}=value; flags: -m, --cfg job, --help")
        else:
            overrides.append(word)
    return overrides, sweep, show


def _tasks() -> None:
    """Print the registered tasks: a table in a terminal, plain lines elsewhere."""
    from embodied.compose import defaults
    from embodied.config import CHOICES
    from embodied.spec import registry

    rows = []
    for name in registry.names("task"):
        entry = registry.find("task", name)
        rows.append((name, entry.summary, CHOICES["robot"], defaults("task", name)))
    if not sys.stdout.isatty():
        for name, summary, robot, values in rows:
            print(f"{name}: {summary}\n  robot={robot}", *values, sep="\n  ")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("task", "what it is", "robot")
    table.add_column("options", overflow="fold", min_width=44)
    for name, summary, robot, values in rows:
        table.add_row(name, summary, robot, escape("\n".join(values)))
    Console().print(table)
    print(f"embodied train task={rows[0][0]}")


def _failed(line: str, code: int) -> int:
    if os.environ.get("EMBODIED_DEBUG") == "1":
        traceback.print_exc()
    print(" ".join(line.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
