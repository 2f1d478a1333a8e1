"""A simulated robot as a process, for tests that talk to it as a runner would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from embodied.deploy.link import Link


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RobotProcess:
    """`embodied deploy sim` on a port of its own."""

    def __init__(self, folder: Path, *words: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.cache = folder / "cache"
        self.log = next((Path(word[4:]) for word in words if word.startswith("log=")), None)
        command = [sys.executable, "-m", "embodied.cli", "deploy", "sim", "task=assembly", f"port={self.port}", *words]
        environment = {**os.environ, "EMBODIED_CACHE": str(self.cache)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.said = [self.process.stdout.readline()]
        assert "listening" in self.said[0], self.said

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def robot(folder: Path, *words: str, port: int | None = None) -> Iterator[RobotProcess]:
    process = RobotProcess(folder, *words, port=port)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def linked(process: RobotProcess, name: str = "test") -> Iterator[Link]:
    """A link that holds the robot, joints in the training order."""
    link = Link(("127.0.0.1", process.port))
    try:
        link.hello()
        link.acquire(name, tuple(sorted(link.robot.joint_names)))
        yield link
    finally:
        link.close()


def await_state(link: Link, condition, timeout: float = 5.0):
    """The first state that meets the condition."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        link.wait_until(time.monotonic() + 0.002)
        if link.latest is not None and condition(link.latest.state):
            return link.latest.state
    raise AssertionError(f"no such state in {timeout} s; last: {link.latest}")


def exported_policy(folder: Path) -> tuple[Path, dict]:
    """An exported policy that moves but was never trained, and the run's configuration; its checkpoint is in `folder`."""
    from worlds import make_trainer

    from embodied.algos import checkpoint
    from embodied.commands.export import export
    from embodied.compose import compose

    words = ["task=assembly", "task.bank.size=64", "sim.num_worlds=8", "policy.hidden=[16]", "algo.critic_hidden=[16]"]
    invocation = compose("train", [*words, "algo.num_steps=8", f"out={folder / 'run'}"])
    trainer = make_trainer(8)
    state = trainer.state_dict()
    state["learner"]["policy"]["network.2.weight"] *= 20.0  # its first actions would be nearly zero
    path = invocation.run_dir / "checkpoints" / "latest.pt"
    checkpoint.save(path, {"trainer": state, "best": -1.0, "config": invocation.config})
    return export(invocation.config, path).policy, invocation.config
