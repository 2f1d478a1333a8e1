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
from embodied.helps import HELP, HELPS
from embodied.spec.errors import BadInput, Fault, nearest

if TYPE_CHECKING:
    from embodied.compose import Invocation

RUNNERS = {
    "train": "embodied.commands.train",
    "eval": "embodied.commands.evaluate",
    "play": "embodied.commands.play",
    "collect": "embodied.commands.collect",
    "export": "embodied.commands.export",
    "bench sim": "embodied.commands.bench_sim",
    "doctor": "embodied.commands.memory",
}
"""The module of each command that takes a configuration; its `run(invocation)` does the work. `doctor` may do without."""

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
    if command == "doctor" and not args:
        from embodied.doctor import doctor

        return doctor()
    if command in RUNNERS:
        return _configured(command, args)
    if command in DEPLOY:
        module, function = DEPLOY[command]
        code: int = getattr(importlib.import_module(f"embodied.commands.deploy.{module}"), function)(args)
        return code
    if args:
        raise BadInput(f"embodied {command} takes no arguments, got '{args[0]}'")
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

        # doctor looks at a training before it is started
        of = "train" if command == "doctor" else command
        if sweep:
            jobs = [compose(of, words, job) for job, words in enumerate(expand(overrides))]
            folders = [job.run_dir for job in jobs]
            shared = next((folder for folder in folders if folders.count(folder) > 1), None)
            if shared is not None and command != "eval":  # which writes only where out= says
                raise BadInput(f"several jobs would write to {shared}: give out=, to which each appends its number")
        else:
            jobs = [compose(of, overrides)]
    if show:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    for number, job in enumerate(jobs):
        if sweep:
            if number > 0:
                job = replace(job, started=time.time())
            print(f"job {number + 1} of {len(jobs)}: {' '.join(job.overrides)}", flush=True)
        code = _run(command, job)
        if code != 0:
            return code
    return 0


def _run(command: str, job: Invocation) -> int:
    if job.checkpoint is not None and not any(word.startswith("checkpoint=") for word in job.overrides):
        print(f"checkpoint={job.checkpoint} (the newest run)", flush=True)
    return importlib.import_module(RUNNERS[command]).run(job) or 0


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
        usual = CHOICES | dict(entry.usual)
        robot = usual.pop("robot")
        changed = [f"{key}={value}" for key, value in usual.items() if CHOICES.get(key) != value]
        rows.append((name, entry.summary, robot, [*defaults("task", name), *changed]))
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
