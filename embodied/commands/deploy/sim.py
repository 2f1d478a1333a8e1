"""`embodied deploy sim`: a simulated robot as a process of its own, behind the wire that a real one would use."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from embodied.arguments import read
from embodied.commands.build import make_task
from embodied.compose import compose
from embodied.deploy.journal import Writer
from embodied.deploy.link import read_key
from embodied.deploy.pace import realtime
from embodied.deploy.robot import Server, ServerOptions
from embodied.deploy.simulated import RealityOptions, SimulatedRobot
from embodied.keys import presets_dir
from embodied.runs import check_new
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.resets import cache_folder
from embodied.spec.errors import BadInput, nearest

GROUPS = ("task", "robot")


@dataclass
class SimOptions:
    """Options of `embodied deploy sim`, beside task.* and robot.*."""

    port: int = 47000
    host: str = "127.0.0.1"
    key_file: str | None = None  # needed for a host that is not loopback
    seed: int = 0  # of sensor noise; an episode's scene has the seed that the runner asks for
    lockstep: bool = False  # time passes only with commands
    watchdog_s: float = 0.1
    log: str | None = None  # file for what the robot heard and did
    reality: RealityOptions = field(default_factory=RealityOptions)


def run(words: list[str]) -> int:
    """Serve until Ctrl-C."""
    theirs = [word for word in words if word.split("=")[0].split(".")[0].lstrip("+~") in GROUPS]
    options = read("deploy sim", SimOptions, _with_preset([word for word in words if word not in theirs]))
    options.reality.validate()
    _validate(options)
    config = compose("deploy sim", theirs).config
    torch.set_num_threads(1)
    task = make_task(config)
    robot = SimulatedRobot(task, CpuEngine(task.model, 1, task.parameters, threads=1), options.reality, options.seed)
    wire = ServerOptions(
        options.host,
        options.port,
        watchdog_s=options.watchdog_s,
        lockstep=options.lockstep,
        key=read_key(options.key_file),
    )
    latch = cache_folder() / "estop" / f"{robot.spec.name}-{options.port}"
    log = (
        None if options.log is None else Writer(Path(options.log), {"robot": robot.spec.name, "reality": vars(options.reality)})
    )
    server = Server(robot, wire, latch, log)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    scheduling = realtime(10) if not options.lockstep else "lockstep"
    print(
        f"{robot.spec.name}, {task.name}: listening on {options.host}:{server.port} ({scheduling}); Ctrl-C ends it", flush=True
    )
    if latch.exists():
        print("the emergency stop is latched: embodied deploy clear", flush=True)
    try:
        server.serve()
    finally:
        server.close()
        if log is not None:
            log.close()
    print("ended")
    return 0


def _with_preset(words: list[str]) -> list[str]:
    """`reality=<preset or file>` spelled out, before what else is said of it."""
    found = [word for word in words if word.startswith("reality=")]
    rest = [word for word in words if word not in found]
    if not found:
        return rest
    if len(found) > 1:
        raise BadInput(f"reality= is given twice: {found[0]} and {found[1]}")
    name = found[0].partition("=")[2]
    presets = {path.stem: path for path in (presets_dir() / "reality").glob("*.yaml")}
    file = presets.get(name, Path(name).expanduser())
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        hint = f"{nearest(name, presets)}, or the path of a YAML file"
        raise BadInput(f"reality={name} cannot be read: {hint}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{file}: expected `name: value` lines of reality.* options")
    return [f"reality.{key}={value}" for key, value in values.items()] + rest


def _validate(options: SimOptions) -> None:
    if not 0 < options.port < 65536:
        raise BadInput(f"port={options.port}: expected 1 to 65535")
    if not 0.01 <= options.watchdog_s <= 1.0:
        raise BadInput(f"watchdog_s={options.watchdog_s}: expected 0.01 to 1 s")
    if options.log is not None:
        check_new(Path(options.log), "log")
