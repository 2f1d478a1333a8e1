"""The table of faults: what breaks, when, and what is promised."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from embodied.deploy.faults import scenes
from embodied.deploy.faults.cell import BRAIN, RECORDER, Cell
from embodied.deploy.faults.judge import BRAKING, PERIODS, Promise, Row
from embodied.deploy.faults.proxy import CLEAN, Line, lasting, setting, stuck
from embodied.spec.policy import PolicySpec, of_arm

IMPACT_S = 0.04
KILLS = 3  # of everything, at random moments

Play = Callable[[Cell], None]


def rows(spec: PolicySpec, kills: int = KILLS) -> dict[str, Row]:
    """Every row for a policy, by name."""
    found: dict[str, Row] = {}

    def add(name: str, what: str, promise: Promise, play: Play, phase: str = "moving") -> None:
        found[name] = Row(name, what, phase, promise, play)

    _of_the_policy(add, spec)
    _of_processes(add, spec, kills)
    _of_sensors(add, spec)
    _of_the_line(add, spec)
    _of_people_and_clocks(add, spec)
    return found


Add = Callable[..., None]


def halts(spec: PolicySpec, *words: str, after_s: float = 0.0) -> Promise:
    """The runner sees it, brakes, and ends with a line that names it."""
    ticks = PERIODS + BRAKING
    text = f"at rest within {PERIODS} periods and {BRAKING} of braking"
    text += f", {after_s:g} s after it began" if after_s else ""
    return Promise(f"{text}; the run ends and names it", (1,), words, stop_s=after_s + ticks * spec.robot.control_dt)


def _goes_on(*counted: str) -> Promise:
    return Promise("the episode goes on", (0,), goes_on=True, counted=counted)


def _bounded(*counted: str) -> Promise:
    return Promise("the episode goes on, or the run ends at rest and says why", (0, 1), ("fault: ",), counted=counted)


# -- the policy ----------------------------------------------------------------------------------------------------------


def _of_the_policy(add: Add, spec: PolicySpec) -> None:
    def wrong(brain: str) -> Play:
        def play(cell: Cell) -> None:
            cell.start("idle", brain=brain)
            cell.finish()

        return play

    add("nan_action", "the policy answers NaN", halts(spec, "policy", "not finite"), wrong("nan"))
    add("inf_action", "the policy answers infinity", halts(spec, "policy", "not finite"), wrong("inf"))
    add("wrong_shape", "the policy answers five numbers instead of six", halts(spec, "policy", "shape"), wrong("shape"))
    add("silent_policy", "the policy answers nothing", halts(spec, "policy", "not answered"), wrong("silent"))
    add("slow_policy", "the policy answers 10 ms too late, always", halts(spec, "policy", "not answered"), wrong("slow"))

    def late(cell: Cell) -> None:
        wrong("slow_once")(cell)
        cell.expect(cell.runs[0].summary.get("late_answers", 0) > 0, "no answer came late")

    add("late_answer", "the policy answers 10 ms too late, once", _goes_on(), late)
    add("adversarial_actions", "the policy answers extremes of +-10, alternating and random", _bounded(), wrong("extremes"))


# -- processes -----------------------------------------------------------------------------------------------------------


def _of_processes(add: Add, spec: PolicySpec, kills: int) -> None:
    killed = (-signal.SIGKILL,)
    alone = Promise("the robot stops within its watchdog and a step", killed, watchdog=True)
    add("kill_runner", "kill -9 of the runner", alone, scenes.kill_runner("moving"))
    add("kill_runner_contact", "kill -9 of the runner", alone, scenes.kill_runner("in contact"), "in contact")
    idle = Promise("nothing moves", killed, still=True)
    add("kill_runner_idle", "kill -9 of the runner", idle, scenes.kill_runner("idle"), "idle")
    wakes = Promise(f"{alone.text}; when the runner goes on, so does the episode", (0,), goes_on=True)
    add("stop_runner", "SIGSTOP of the runner, SIGCONT after 1 s", wakes, scenes.stop_runner)
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    add("kill_policy", "kill -9 of the policy's process", halts(spec, "policy", "died"), scenes.child(BRAIN, kill))
    add("stop_policy", "SIGSTOP of the policy's process", halts(spec, "policy", "not answered"), scenes.child(BRAIN, stop))
    add("kill_recorder", "kill -9 of the recorder", halts(spec, "journal", "recorder"), scenes.child(RECORDER, kill))
    kept = Promise("the episode ends at rest; the run ends and names it", (1,), ("journal", "recorder"))
    add("stop_recorder", "SIGSTOP of the recorder", kept, scenes.stop_recorder)
    add("disk_full", "no room for the journal", halts(spec, "journal", "cannot write"), scenes.disk_full)
    ended = Promise("the run ends and names it; the restarted robot does not move", (1,), ("state",))
    add("kill_robot", "kill -9 of the robot's process, restarted", ended, scenes.kill_robot)
    what = f"SIGSTOP of the robot's process for {scenes.STOOD_S:g} s"
    add("stop_robot", what, Promise(f"{_bounded().text}; nothing stale is followed", (0, 1), ("fault: ",)), scenes.stop_robot)
    what = f"kill -9 of runner, policy and recorder, {kills} times"
    torn = Promise(f"{alone.text}; every committed episode can be read", killed, watchdog=True)
    add("torn_journal_kill", what, torn, scenes.kill_everything(kills), "any")


# -- sensors -------------------------------------------------------------------------------------------------------------


def _of_sensors(add: Add, spec: PolicySpec) -> None:
    robot, _ = of_arm(spec)
    joint = robot.joints[len(robot.joints) // 2]
    force = 1.5 * robot.motion.wrench[0]

    def says(make: Callable[[Cell], Line], phase: str = "moving") -> Play:
        def play(cell: Cell) -> None:
            cell.start(phase)
            cell.line(up=make(cell))
            cell.finish()

        return play

    def index(cell: Cell) -> int:
        return [one["name"] for one in cell.proxy.description["robot"]["joints"]].index(joint.name)

    def nan_joint(cell: Cell) -> Line:
        return Line(rewrite=setting("joint_pos", index(cell), float("nan")))

    named = halts(spec, joint.name, "not finite")
    add("nan_joint", f"{joint.name} measures NaN", named, says(nan_joint))
    add("nan_joint_contact", f"{joint.name} measures NaN", named, says(nan_joint, "in contact"), "in contact")
    still = Promise("nothing moves; the run ends and names it", (1,), (joint.name, "not finite"), still=True)
    add("nan_joint_idle", f"{joint.name} measures NaN", still, says(nan_joint, "idle"), "idle")
    nan_force = says(lambda cell: Line(rewrite=setting("force", 1, float("nan"))))
    add("nan_force", "the force sensor measures NaN", halts(spec, "force", "not finite"), nan_force)
    beyond = says(lambda cell: Line(rewrite=setting("joint_pos", index(cell), joint.upper + 0.1)))
    add("joint_out_of_limits", f"{joint.name} measures more than its limit", halts(spec, joint.name, "limit"), beyond)
    pressed = says(lambda cell: Line(rewrite=setting("force", 2, force)))
    lasting_force = halts(spec, "force", "limit", after_s=robot.motion.press_s)
    add("force_too_high_lasting", f"the force sensor measures {force:.0f} N", lasting_force, pressed)
    impact = says(lambda cell: Line(rewrite=lasting(setting("force", 2, force), IMPACT_S)))
    what = f"the force sensor measures {force:.0f} N for {1e3 * IMPACT_S:.0f} ms"
    add("force_impact", what, _goes_on("up rewritten"), impact)
    add(
        "stuck_force",
        "the force sensor is stuck",
        halts(spec, "force", "stuck"),
        says(lambda cell: Line(rewrite=stuck("force"))),
    )
    position = says(lambda cell: Line(rewrite=stuck("tcp_pos")))
    add("stuck_position", "the measured tool position is stuck", halts(spec, "tcp_pos", "stuck"), position)
    whole, payload = (says(lambda cell, how=how: Line(repeat=how)) for how in ("whole", "payload"))  # type: ignore[misc]  # mypy infers no lambda with a default
    add("frozen_state", "the last state again and again", halts(spec, "state"), whole)
    add("frozen_state_new_stamps", "the last state again and again, with new stamps", halts(spec, "stuck"), payload)


# -- the line ------------------------------------------------------------------------------------------------------------


def _of_the_line(add: Add, spec: PolicySpec) -> None:
    def bad(up: Line, down: Line, seconds: float | None = None) -> Play:
        def play(cell: Cell) -> None:
            cell.start("moving")
            cell.line(up, down)
            if seconds is not None:
                time.sleep(seconds)
                cell.mend(cell.proxy.clear)
            cell.finish()

        return play

    def always(line: Line, episodes: int = 1) -> Play:
        def play(cell: Cell) -> None:
            cell.start_robot()
            cell.line(line, line)
            cell.finish(cell.start_runner(episodes=episodes))

        return play

    def slow(low: float, high: float | None = None) -> Line:
        return Line(delay_s=(low, low if high is None else high), requests=True)

    add("delayed_state", "states are 30 ms late", _goes_on("up delayed"), bad(slow(0.03), CLEAN))
    add("delayed_commands", "commands are 30 ms late", _goes_on("down delayed"), bad(CLEAN, slow(0.03)))
    add("delayed_state_200", "states are 200 ms late", halts(spec, "acted"), bad(slow(0.2), CLEAN))
    add("delayed_commands_200", "commands are 200 ms late", _bounded("down delayed"), bad(CLEAN, slow(0.2)))
    for percent in (1, 10, 30):
        lossy = always(Line(drop=percent / 100, requests=True))
        add(f"loss_{percent}", f"{percent} % of all datagrams are lost", _goes_on("up dropped"), lossy, "any")
    jitter = always(slow(0.005, 0.05), 2)
    add("jitter_5_50", "datagrams are 5 to 50 ms late", _goes_on("up delayed", "down delayed"), jitter, "any")
    jitter = always(slow(0.05, 0.2))
    add("jitter_50_200", "datagrams are 50 to 200 ms late", _bounded("up delayed", "down delayed"), jitter, "any")
    twice = always(Line(duplicate=1.0, delay_s=(0.0, 0.03), requests=True))
    add("duplicate", "every datagram arrives twice", _goes_on("up duplicated", "robot sequence"), twice, "any")
    swapped = bad(CLEAN, Line(delay_s=(0.0, 0.08)))
    add("reorder", "commands overtake each other", _goes_on("down delayed", "robot sequence"), swapped)
    damaged = always(Line(corrupt=0.2, requests=True))
    add("corrupt", "a byte of 20 % is wrong", _goes_on("up corrupted", "robot crc", "runner crc"), damaged, "any")
    held = Line(hold=True)
    add("pause_500ms", "nothing passes for 0.5 s, then all of it", _bounded("up held", "down held"), bad(held, held, 0.5))
    add("pause_commands_150ms", "no command passes for 0.15 s, then all", _goes_on("down held"), bad(CLEAN, held, 0.15))

    what = "every command is lost for 0.17 s, as the tool turns back"
    add("lost_commands", what, _goes_on("down dropped"), scenes.lost_commands)

    def overtaken(cell: Cell) -> None:
        run = cell.start("moving", episodes=2)
        cell.line(down=Line(delay_s=(0.06, 0.06)))
        cell.finish(run)

    what = "the last command of an episode arrives after the request to rest"
    add("command_after_rest", what, _goes_on("down delayed"), overtaken)


# -- people and clocks ---------------------------------------------------------------------------------------------------


def _of_people_and_clocks(add: Add, spec: PolicySpec) -> None:
    unharmed = Promise("the episode goes on, without a hold", (0,), goes_on=True)
    for name, way, sign in (("clock_forward", "forward", 1), ("clock_back", "back", -1)):
        add(name, f"the wall clock is set an hour {way}, for runner and robot", unharmed, scenes.clock(3600 * sign))
    text = "stopped at once, and latched through release, reconnection, restart, new episode"
    add("estop_latched", "emergency stop", Promise(text, (1,), ("emergency stop",), stop_s=0.1), scenes.emergency_stop)
    add("second_runner", "another runner wants the robot", _goes_on("robot second master"), scenes.second_runner)
    joint = spec.robot.joints[len(spec.robot.joints) // 2].name
    refused = Promise("refused before anything moves, with the joint's name", (2,), (joint, "upper"), still=True)
    add("wrong_spec", "the policy was made for another robot", refused, scenes.wrong_spec(joint), "idle")
