"""The control process: reads the robot, asks the policy, passes what it wants through the guard, once a tick.

No torch here, no disk, no terminal while the robot moves: the policy and the journal are processes of their own. A trouble
that may pass (a late policy, an old state) is a HOLD: the tool comes to rest and goes on when it has passed. One that lasts,
or that the guard latches, is a FAULT: the run ends at rest, and nothing moves again until a person starts it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.deploy import guard
from embodied.deploy.artifact import PolicyArtifact
from embodied.deploy.guard import Level
from embodied.deploy.link import Link, Readings
from embodied.deploy.pace import Pace, Timing
from embodied.deploy.record import Brain, Episode, Journal
from embodied.deploy.states import Machine, Mode
from embodied.deploy.wire import Reason, Status
from embodied.spec.errors import Fault
from embodied.spec.observe import Memory, command, observe, start_memory, succeeded
from embodied.spec.policy import of_arm

ALIGN_S = 2.0
REST_S = 2.0
ANSWER_SHARE = 0.5  # of a tick that the policy may take
COMMIT_S = 5.0
UNHEARD = "the robot has stopped by itself: no command reached it in time"


class Stopped(Exception):
    """The emergency stop was pressed."""


class Runner:
    """Runs episodes of a policy on the robot at the other end of `link`, which it must hold already.

    Args:
        policy: what the policy was made for.
        link: the robot.
        brain: answers observations.
        journal: records.
        watchdog_s: the robot's: how long a command may live.
        lockstep: the robot's time passes only with commands.
        hold_s: how long a HOLD may last before it is a FAULT.
    """

    def __init__(
        self,
        policy: PolicyArtifact,
        link: Link,
        brain: Brain,
        journal: Journal,
        watchdog_s: float,
        lockstep: bool = False,
        hold_s: float = 0.5,
    ) -> None:
        self.spec, self.link, self.brain, self.journal = policy.spec, link, brain, journal
        self.dt = self.spec.robot.control_dt
        self.watchdog_s, self.lockstep, self.hold_s = watchdog_s, lockstep, hold_s
        robot, self.success = of_arm(self.spec)
        self.limits = guard.Limits.of(robot, self.dt)
        self.machine = Machine(self._transition)
        self.pace, self.timing = Pace(self.dt), Timing()
        self.stopping = False
        """Set from a signal handler: the present episode ends at rest, and with it the run."""
        self._guard: guard.State
        self._memory: Memory
        self._broken_journal = False
        self._terms = [term.name for term, size in zip(self.spec.terms, self.spec.sizes, strict=True) for _ in range(size)]

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self, count: int, seed: int, done: Callable[[Episode], None]) -> None:
        """Run `count` episodes, scenes `seed`, `seed` + 1, ...; `done` hears of each when the robot is at rest.

        Raises:
            Fault: the run ended early; the robot is at rest, or has stopped by itself.
            Stopped: the emergency stop was pressed.
        """
        try:
            for number in range(count):
                if self.stopping:
                    break
                done(self._episode(number, seed + number))
        except Fault as error:  # outside of an episode, which ends in its own way
            if self.machine.mode not in (Mode.FAULT, Mode.ESTOP):
                self._give_up(error)
            raise
        finally:
            self.machine.to(Mode.DISCONNECTED)

    def preflight(self, policy: PolicyArtifact) -> None:
        """Recompute the golden cases on this machine: DISCONNECTED to IDLE."""
        self.machine.to(Mode.PREFLIGHT)
        policy.check_golden()
        self.machine.to(Mode.IDLE)

    def _episode(self, number: int, seed: int) -> Episode:
        self.link.request("scene", timeout_s=10.0, seed=seed)
        self._write("episode_start", {"episode": number, "seed": seed})
        self._steps, self._held, self._clamped = 0, 0, 0
        self._holds: Counter[str] = Counter()
        self._sent: deque[tuple[int, int]] = deque(maxlen=64)
        outcome, reason = "fault", ""
        try:
            self.machine.to(Mode.ALIGN)
            self._align()
            self.machine.to(Mode.AUTO)
            outcome = ""
            while not outcome:
                outcome = self._tick(self._wait())
            self.machine.to(Mode.END, outcome)
            self._come_to_rest()
        except (Fault, Stopped) as error:
            outcome, reason = "fault", str(error)
            self._give_up(error)
            raise
        finally:
            episode = self._finish(number, seed, outcome, reason)
        self.machine.to(Mode.IDLE)
        return episode

    def _finish(self, number: int, seed: int, outcome: str, reason: str) -> Episode:
        truth: dict[str, Any] = {}
        if outcome != "fault":
            truth = self.link.request("rest", epoch=self.machine.epoch)["truth"]
        episode = Episode(
            number,
            seed,
            outcome,
            outcome == "success",
            outcome in ("timeout", "stopped", "fault"),
            self._steps,
            dict(self._holds),
            self._clamped,
            reason,
            truth,
        )
        self._write("episode_end", {"episode": number, **asdict(episode)})
        if not self._broken_journal:
            self.journal.commit(COMMIT_S)
        return episode

    def _give_up(self, error: Exception) -> None:
        """FAULT or ESTOP: come to rest if the robot still listens; a robot that hears nothing stops by itself."""
        mode = Mode.ESTOP if isinstance(error, Stopped) else Mode.FAULT
        moving = self.machine.mode in (Mode.AUTO, Mode.HOLD, Mode.END)
        self.machine.to(mode, str(error))
        if moving and mode == Mode.FAULT:
            self._come_to_rest()

    # -- a tick ------------------------------------------------------------------------------------------------------

    def _wait(self) -> float:
        """Take in what the robot says until the next tick; how late it begins [us]."""
        if self.lockstep:
            self._next_state()
            return 0.0
        self.link.wait_until(self.pace.due)
        return 1e6 * self.pace.next()

    def _tick(self, late_us: float) -> str:
        """One tick of AUTO or HOLD; the outcome if the episode has ended."""
        began = time.monotonic_ns()
        readings, trouble = self._look(began)
        if trouble == UNHEARD:  # what it keeps is the truth
            kept = guard.start(self.limits, readings["target_pos"][0], readings["target_quat"][0])
            self._guard = replace(kept, pressed=self._guard.pressed)
            if self.machine.mode == Mode.HOLD:
                self.machine.renew()
        age_us = self.link.latest.age_us(began) if self.link.latest else 0
        if not trouble:
            self._held = self._held + 1 if bool(succeeded(self.success, readings)[0]) else 0
            if self._held >= self.success.steps:
                return "success"
        if self.stopping:
            return "stopped"
        if self._steps >= self.spec.max_steps:
            return "timeout"
        obs = action = wanted = None
        infer_us = 0
        if not trouble:
            if self.machine.mode == Mode.HOLD:
                self._memory = self._restart(readings)
            obs, action, infer_us, trouble = self._think(readings, began)
        memory = self._memory
        if not trouble:
            memory = command(self.spec, action, readings, memory)
            wanted = memory["target_pos"][0], memory["target_quat"][0]
        checked = time.monotonic_ns()
        self._guard, verdict = guard.guard(self.limits, self._guard, wanted, {name: x[0] for name, x in readings.items()})
        guard_us = (time.monotonic_ns() - checked) / 1e3
        if verdict.level == Level.HOLD and not trouble:
            trouble = "; ".join(verdict.reasons)
        self._change_mode(trouble, began)
        self._send()
        sent = self._guard.command
        pos, quat = _row(sent.pos), _row(sent.quat)
        self._memory = {**memory, "target_pos": pos, "target_quat": quat}
        self._steps += 1
        self._clamped += verdict.level == Level.CLAMP
        done = time.monotonic_ns()
        self._write(
            "tick",
            {
                "tick": self._steps,
                "epoch": self.machine.epoch,
                "state": str(self.machine.mode),
                "age_us": age_us,
                "late_us": late_us,
                "infer_us": infer_us,
                "readings": {name: x[0] for name, x in readings.items()},
                "obs": None if obs is None else obs[0],
                "action": None if action is None else action[0],
                "target_pos": None if wanted is None else wanted[0],
                "target_quat": None if wanted is None else wanted[1],
                "sent_pos": pos[0],
                "sent_quat": quat[0],
                "level": int(verdict.level),
                "reasons": [trouble] if trouble else list(verdict.reasons),
            },
            done,
        )
        tick_us = (time.monotonic_ns() - began) / 1e3
        self.timing.add(late_us=late_us, sent_us=(done - began) / 1e3, tick_us=tick_us, guard_us=guard_us, age_us=age_us)
        if obs is not None:
            self.timing.add(infer_us=infer_us)
        if verdict.level == Level.LATCH:
            raise Fault(f"the guard has stopped the robot: {'; '.join(verdict.reasons)}")
        return ""

    def _look(self, now_ns: int) -> tuple[Readings, str]:
        """The readings, and why they may not be acted on."""
        arrived = self.link.latest
        if arrived is None:
            return {}, "no state from the robot"
        state = arrived.state
        if state.status == Status.ESTOP:
            raise Stopped("the emergency stop was pressed")
        if state.status == Status.STOPPED and state.reason not in (Reason.WATCHDOG, Reason.NONE):
            raise Fault(f"the robot has stopped by itself: {state.reason.name.lower().replace('_', ' ')}; see its log")
        readings = self.link.readings()
        if not self.lockstep:
            age_us = arrived.age_us(now_ns)
            if age_us > 1e6 * self.dt:
                what = f"{arrived.stuck()} stuck" if arrived.stuck() else "state"
                return readings, f"{what} for more than {1e3 * self.dt:.0f} ms"
        if not state.finite:
            name, value = next((name, x[0]) for name, x in readings.items() if not np.isfinite(x).all())
            return readings, f"reading {self._component(name, value)} is not finite"
        if state.status == Status.STOPPED and self.machine.mode in (Mode.AUTO, Mode.HOLD):
            return readings, UNHEARD
        if not self.lockstep:
            lag_ns = now_ns - next((sent for number, sent in self._sent if number > state.acted), now_ns)
            if lag_ns > 1e9 * (self.watchdog_s + self.dt):
                return (
                    readings,
                    f"the robot has not acted on a command for more than {1e3 * (self.watchdog_s + self.dt):.0f} ms",
                )
        return readings, ""

    def _component(self, name: str, value: Any) -> str:
        """The first component of a reading that is not finite, joints by their name."""
        index = int(np.flatnonzero(~np.isfinite(value))[0])
        return f"{name} of {self.spec.robot.joint_names[index]}" if name.startswith("joint_") else f"{name}[{index}]"

    def _think(self, readings: Readings, began_ns: int) -> tuple[Any, Any, int, str]:
        """Observation, action, the policy's time, and what is wrong with them."""
        obs = observe(self.spec, readings, self._memory).astype(np.float32)
        if not np.isfinite(obs).all():
            return obs, None, 0, f"observation term '{self._terms[int(np.flatnonzero(~np.isfinite(obs[0]))[0])]}' is not finite"
        self.brain.ask(obs)
        budget = 60.0 if self.lockstep else ANSWER_SHARE * self.dt
        answer = self.brain.answer(began_ns / 1e9 + budget)
        if answer is None:
            return obs, None, 0, f"the policy has not answered within {1e3 * budget:.0f} ms"
        action, took_us = answer
        if np.shape(action) != (1, self.spec.action.size):
            return (
                obs,
                None,
                took_us,
                f"the policy's action has shape {np.shape(action)}, expected (1, {self.spec.action.size})",
            )
        if not np.isfinite(action).all():
            index = int(np.flatnonzero(~np.isfinite(action[0]))[0])
            return obs, None, took_us, f"the policy's action for {guard.AXES[index]} is not finite"
        return obs, action, took_us, ""

    def _change_mode(self, trouble: str, now_ns: int) -> None:
        mode = self.machine.mode
        if not trouble:
            if mode == Mode.HOLD:
                self.machine.to(Mode.AUTO, "the trouble has passed")
            return
        if mode == Mode.AUTO:
            self._hold_since = now_ns
            self._holds[trouble] += 1
            self.machine.to(Mode.HOLD, trouble)
        elif (now_ns - self._hold_since) / 1e9 > self.hold_s:
            raise Fault(f"held for {self.hold_s:g} s and it has not passed: {trouble}")

    # -- motion that is not the policy's -----------------------------------------------------------------------------

    def _align(self) -> None:
        """Bring the target from where the robot keeps it to where the tool is, inside the limits."""
        if not self.lockstep:
            self.link.latest = None
        deadline = time.monotonic() + ALIGN_S
        while self.link.latest is None:
            self.link.wait_until(min(deadline, time.monotonic() + 0.02))
            if time.monotonic() > deadline:
                raise Fault(f"no state from the robot for {ALIGN_S:g} s")
        readings = self.link.readings()
        self._guard = guard.start(self.limits, readings["target_pos"][0], readings["target_quat"][0])
        self.pace.start()
        while True:
            readings, trouble = self._look(time.monotonic_ns())
            wanted = None if trouble else (readings["tcp_pos"][0], readings["tcp_quat"][0])
            self._guard, verdict = guard.guard(self.limits, self._guard, wanted, {k: x[0] for k, x in readings.items()})
            self._send()
            if verdict.level == Level.LATCH:
                raise Fault(f"the guard has stopped the robot: {'; '.join(verdict.reasons)}")
            if verdict.level == Level.PASS:
                break
            if time.monotonic() > deadline:
                raise Fault(f"the target could not be brought to the tool in {ALIGN_S:g} s: {trouble or verdict.reasons}")
            self._wait()
        self._memory = start_memory(self.spec, readings)
        if not self.lockstep:
            self._wait()

    def _restart(self, readings: Readings) -> Memory:
        """The policy's memory after a HOLD: the target is what the robot keeps, nothing was commanded."""
        sent = self._guard.command
        memory = start_memory(self.spec, readings)
        return {**memory, "target_pos": _row(sent.pos), "target_quat": _row(sent.quat)}

    def _come_to_rest(self) -> None:
        """Brake inside the limits."""
        deadline = time.monotonic() + REST_S
        self.pace.start()
        while time.monotonic() < deadline:
            arrived = self.link.latest
            readings = {} if arrived is None else {name: x[0] for name, x in self.link.readings().items()}
            if arrived is not None and arrived.state.status in (Status.STOPPED, Status.ESTOP):
                return
            self._guard, _ = guard.guard(self.limits, self._guard, None, readings)
            self._send()
            if not any(self._guard.velocity) and not any(self._guard.acceleration):
                return
            self._wait()

    def _send(self) -> None:
        sent = self._guard.command
        self.link.send(sent.pos, sent.quat, self.machine.epoch, self.watchdog_s)
        self._sent.append((self.link.sequence, time.monotonic_ns()))

    def _next_state(self) -> None:
        """Lockstep: the state that the last command has led to."""
        deadline = time.monotonic() + 10.0
        while self.link.latest is None or self.link.latest.state.acted < self.link.sequence:
            if time.monotonic() > deadline:
                raise Fault("the robot has not answered a command for 10 s")
            self.link.wait_until(time.monotonic() + 0.001)

    # -- the journal -------------------------------------------------------------------------------------------------

    def _transition(self, before: Mode, after: Mode, reason: str, epoch: int) -> None:
        self._write("transition", {"from": str(before), "to": str(after), "reason": reason, "epoch": epoch})

    def _write(self, kind: str, data: dict[str, Any], time_ns: int | None = None) -> None:
        if self._broken_journal:
            return
        try:
            self.journal.write(kind, time.monotonic_ns() if time_ns is None else time_ns, data)
        except Fault:
            self._broken_journal = True  # said once, by the fault that ends the run
            raise


def _row(values: tuple[float, ...]) -> NDArray[np.float32]:
    """A batch of one."""
    return np.array([values], np.float32)
