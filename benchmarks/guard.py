"""The guard's cost and its million cases: `python benchmarks/guard.py [TICKS]`, one JSON line each.

Cost: microseconds of a tick at the Franka's limits, 25 and 50 Hz, by level; `once_us` as the clock saw them, `best_us` the
best of five calls with the same arguments: without what the machine did meanwhile. Cases: an adversary wants poses at, beyond
and far beyond the limits, under limits of several kinds; all commands are then judged again, from the float32 numbers alone.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial.transform import Rotation

from embodied.deploy.guard import Command, Level, State, clear, guard, start
from embodied.deploy.limits import Limits
from embodied.sim.robots.franka import SPEC

CHUNK = 20_000
CALM = {"joint_pos": np.float32(SPEC.home), "joint_vel": np.zeros(7), "force": np.zeros(3), "torque": np.zeros(3)}
FAULT = {**CALM, "joint_pos": np.full(7, 9.0)}
GAP = {**CALM, "joint_vel": np.full(7, math.nan)}
KINDS = ("near", "edge", "far", "corner", "flip", "none", "nan", "gap", "fault")
ODDS = (0.2, 0.34, 0.15, 0.15, 0.1, 0.02, 0.02, 0.01, 0.01)
RIDES = (0.0, 0.5, 0.9985, 0.9995, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 2.0)


def six(move: float, turn: float) -> tuple[float, ...]:
    """One value for each axis."""
    return (move,) * 3 + (turn,) * 3


def kinds_of_limits() -> dict[str, Limits]:
    """The Franka's at three rates, and such where acceleration or jerk binds, or float32 only just does."""
    at = {hz: Limits.of(SPEC, 1.0 / hz) for hz in (25, 50, 100)}
    least = 2.0**-25 / 5e-4, 2.0**-23 / 5e-4  # m, rad: what a tick must allow
    return {
        "franka 25 Hz": at[25],
        "franka 50 Hz": at[50],
        "franka 100 Hz": at[100],
        "slow": replace(at[50], acceleration=six(1.0, 4.0)),
        "soft": replace(at[25], jerk=six(10.0, 40.0)),
        "slow and soft": replace(at[25], acceleration=six(0.5, 2.0), jerk=six(2.0, 8.0)),
        "fine": replace(
            at[50],
            velocity=six(*(6.0 * step / 0.02 for step in least)),
            acceleration=six(*(3.0 * step / 0.02**2 for step in least)),
            jerk=six(*(1.01 * step / 0.02**3 for step in least)),
        ),
        "narrow": replace(at[25], lower=(0.5, 0.0, 0.2, *at[25].lower[3:]), upper=(0.501, 0.02, 0.2001, *at[25].upper[3:])),
    }


@dataclass(frozen=True)
class Draws:
    """Chance for a number of ticks."""

    kind: np.ndarray
    normal: np.ndarray
    uniform: np.ndarray
    sign: np.ndarray
    ride: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator, ticks: int) -> Draws:
        """Draw it."""
        rides = rng.choice(RIDES, (ticks, 6))
        rides[::2] = rides[::2, :1]
        return cls(
            np.repeat(rng.choice(len(KINDS), ticks // 5, p=ODDS), 5),
            rng.normal(size=(ticks, 6)) * rng.choice([0.01, 0.3, 1.0], (ticks, 1)),
            rng.uniform(-2.0, 2.0, (ticks, 3)),
            rng.choice([-1.0, 1.0], (ticks, 6)),
            rides,
        )


def turned(quat: tuple[float, ...], r: np.ndarray) -> np.ndarray:
    """The quaternion turned by a rotation vector of the base frame."""
    angle = math.sqrt(float(r @ r)) + 1e-300
    pw, p = math.cos(angle / 2.0), r * (math.sin(angle / 2.0) / angle)
    qw, q = quat[0], np.array(quat[1:])
    new = np.array([pw * qw - p @ q, *(pw * q + qw * p + np.cross(p, q))])
    return new / np.sqrt(new @ new)


def attack(limits: Limits, state: State, draws: Draws, k: int) -> tuple[object, dict[str, np.ndarray]]:
    """What is wanted and measured in tick k."""
    kind, sign, dt = KINDS[draws.kind[k]], draws.sign[k], limits.dt
    pos, quat = np.array(state.command.pos), state.command.quat
    if kind == "none":
        return None, CALM
    if kind == "nan":
        return (pos * math.nan, quat), CALM
    if kind == "near":
        move = draws.normal[k] * limits.velocity * dt
        return (pos + move[:3], turned(quat, move[3:])), CALM
    if kind == "edge":
        a = np.clip(state.acceleration + sign * limits.jerk * dt * draws.ride[k], *np.outer([-1, 1], limits.acceleration))
        v = np.clip(state.velocity + dt * a, *np.outer([-1, 1], limits.velocity))
        return (pos + dt * v[:3], turned(quat, dt * v[3:])), CALM
    if kind == "far":
        return (draws.uniform[k], turned(quat, draws.uniform[k])), CALM
    if kind == "corner":
        return (np.where(sign[:3] > 0, limits.upper[:3], limits.lower[:3]) * draws.ride[k, :3], quat), CALM
    if kind == "flip":
        return (-1e300 * np.sign(state.velocity[:3]), np.roll(quat, 1)), CALM
    return (pos, quat), GAP if kind == "gap" else FAULT


def worst(limits: Limits, commands: list[Command]) -> list[float]:
    """Velocity, acceleration and jerk, of their limits, the most in any command; inf where one leaves the workspace."""
    pos, quat = np.array([c.pos for c in commands]), np.array([c.quat for c in commands])
    inside = (pos >= limits.lower[:3]).all() and (pos <= limits.upper[:3]).all() and np.isfinite(quat).all()
    if not inside or (pos != np.float32(pos)).any() or (quat != np.float32(quat)).any():
        return [math.inf] * 3
    turns = Rotation.from_quat(quat[:, [1, 2, 3, 0]])
    moves = np.hstack([np.diff(pos, axis=0), (turns[1:] * turns[:-1].inv()).as_rotvec()])
    rates = np.vstack([np.zeros((2, 6)), moves / limits.dt])
    shares = []
    for order, limit in enumerate((limits.velocity, limits.acceleration, limits.jerk), start=1):
        noise = 2.0 ** (order - 52) / limits.dt**order  # of float64, in differences of numbers near 1
        shares.append(float(np.max((np.abs(rates) - noise) / np.array(limit))))
        rates = np.diff(rates, axis=0) / limits.dt
    return shares


def cases(ticks: int) -> dict[str, object]:
    """The adversary against the guard."""
    began = time.perf_counter()
    kinds = list(kinds_of_limits().items())
    count = dict.fromkeys(Level, 0)
    most: dict[str, list[float]] = {name: [0.0] * 3 for name, _ in kinds}
    unrested = done = 0
    while done < ticks:
        name, limits = kinds[done // CHUNK % len(kinds)]
        rng = np.random.default_rng(done)
        draws = Draws.of(rng, CHUNK)
        state = start(limits, np.add(limits.lower[:3], limits.upper[:3]) / 2.0, Rotation.random(rng=rng).as_quat())
        commands = [state.command]
        for k in range(CHUNK):
            wanted, readings = attack(limits, state, draws, k)
            state, verdict = guard(limits, state, wanted, readings)
            commands.append(state.command)
            count[verdict.level] += 1
            if state.latch and draws.uniform[k, 0] > 1.0:
                state = clear(state)
        for _ in range(33):
            state, _ = guard(limits, state, None, CALM)
            commands.append(state.command)
        unrested += any(state.velocity) or any(state.acceleration)
        most[name] = np.maximum(most[name], worst(limits, commands)).tolist()
        done += CHUNK
    return {
        "cases": done,
        "violations": sum(share > 1.0 + 1e-9 for shares in most.values() for share in shares),
        "unrested": unrested,
        "levels": {level.name: n for level, n in count.items()},
        "most_of_limit": {name: [round(share, 6) for share in shares] for name, shares in most.items()},
        "seconds": round(time.perf_counter() - began),
    }


def cost(hz: float, ticks: int = 20_000) -> dict[str, object]:
    """Microseconds a tick: a policy that keeps to the limits, one that does not, and holds from motion."""
    limits = Limits.of(SPEC, 1.0 / hz)
    rng = np.random.default_rng(0)
    draws = Draws.of(rng, ticks)
    state = start(limits, (0.5, 0.0, 0.25), (0.0, 1.0, 0.0, 0.0))
    once: dict[Level, list[int]] = {level: [] for level in Level}
    best: dict[Level, list[int]] = {level: [] for level in Level}
    for k in range(ticks):
        phase = k // 50 % 4
        wanted: object = None
        if phase == 0:  # the assembly task's steps: 4 mm, 12 mrad
            step = np.clip(draws.normal[k], -1.0, 1.0) * six(0.004, 0.012)
            wanted = np.add(state.command.pos, step[:3]), turned(state.command.quat, step[3:])
        elif phase in (1, 2):
            wanted, _ = attack(limits, state, draws, k)
        took = []
        for _ in range(5):
            began = time.perf_counter_ns()
            after, verdict = guard(limits, state, wanted, CALM)
            took.append(time.perf_counter_ns() - began)
        state = after
        once[verdict.level].append(took[0])
        best[verdict.level].append(min(took))
    return {"hz": hz, "once_us": figures(once), "best_us": figures(best)}


def figures(times: dict[Level, list[int]]) -> dict[str, dict[str, float]]:
    """Median, 99th percentile and most, in microseconds, by level."""
    return {
        level.name.lower(): {"p50": round(p50 / 1e3, 1), "p99": round(p99 / 1e3, 1), "max": round(most / 1e3, 1), "n": len(ns)}
        for level, ns in times.items()
        if ns
        for p50, p99, most in [np.percentile(ns, [50, 99, 100])]
    }


if __name__ == "__main__":
    for rate in (25.0, 50.0):
        print(json.dumps({"cost": cost(rate)}), flush=True)
    print(json.dumps({"cases": cases(int(sys.argv[1]) if len(sys.argv) > 1 else 10**6)}))
