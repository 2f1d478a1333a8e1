"""The robot's own side, as a process: one master, limits of its own, a watchdog, a latched emergency stop."""

from __future__ import annotations

import time

import numpy as np
import pytest
from live import await_state, linked, robot

from embodied.deploy import wire
from embodied.deploy.journal import read
from embodied.deploy.link import Link
from embodied.deploy.wire import Kind, Reason, Status
from embodied.spec.errors import BadInput, Fault


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robot")
    with robot(folder, f"log={folder / 'robot.emb'}", "reality.reversed_joints=true") as process:
        yield process


@pytest.fixture
def link(live):
    with linked(live) as link:
        link.request("scene", seed=1, timeout_s=10)
        await_state(link, lambda state: state.episode > 0)
        yield link


def target(link: Link):
    readings = link.latest.state.readings
    return readings["target_pos"].astype(float), readings["target_quat"].astype(float)


def follow(link: Link, steps: int = 5, epoch: int = 1) -> None:
    """Move up by a millimetre a step, at 25 Hz."""
    pos, quat = target(link)
    for _ in range(steps):
        pos[2] += 0.001
        link.send(pos, quat, epoch, 0.1)
        link.wait_until(time.monotonic() + 0.04)


def test_joints_come_by_name_whatever_the_robots_order(link):
    theirs = link.robot.joint_names
    assert list(theirs) == sorted(theirs, reverse=True)
    training_order = link.readings()["joint_pos"][0]
    with linked_again(link, theirs) as same:
        await_state(same, lambda state: True)
        np.testing.assert_allclose(same.readings()["joint_pos"][0][::-1], training_order, atol=1e-4)
    limits = {joint.name: (joint.lower, joint.upper) for joint in link.robot.joints}
    for name, at in zip(sorted(theirs), training_order, strict=True):
        assert limits[name][0] < at < limits[name][1]


class linked_again:
    """The same holder, with another order of joints: a second `acquire` from the same address."""

    def __init__(self, link, order):
        self.link, self.order = link, order

    def __enter__(self):
        self.link.acquire("test", self.order)
        self.link.latest = None
        return self.link

    def __exit__(self, *_):
        self.link.acquire("test", tuple(sorted(self.order)))


def test_it_follows_and_says_what_it_has_acted_on(link):
    before = link.latest.state.readings["tcp_pos"][2]
    follow(link, 10)
    state = link.latest.state
    assert (state.status, state.acted) == (Status.FOLLOWING, link.sequence)
    assert 0.005 < state.readings["tcp_pos"][2] - before < 0.0105
    truth = link.request("rest")["truth"]
    assert truth["success"] is False
    assert await_state(link, lambda state: state.status != Status.FOLLOWING).status == Status.HOLDING


def test_silence_stops_it_and_the_old_epoch_is_over(live, link):
    follow(link, 3)
    state = await_state(link, lambda state: state.status == Status.STOPPED)
    assert state.reason == Reason.WATCHDOG
    kept = state.readings["target_pos"]
    follow(link, 3)
    assert link.latest.state.status == Status.STOPPED, "commands of the epoch in which it had to stop are refused"
    np.testing.assert_array_equal(link.latest.state.readings["target_pos"], kept)
    follow(link, 3, epoch=2)
    assert link.latest.state.status == Status.FOLLOWING
    records = list(read(live.log))
    stops = [r for r in records if r.kind == "status" and r.data["reason"] == "WATCHDOG"]
    last = [r for r in records if r.kind == "command" and r.time_ns < stops[0].time_ns][-1]
    assert 0.097 <= (stops[0].time_ns - last.time_ns) / 1e9 < 0.2, "the watchdog's time, by the robot's own clock"


def test_a_time_to_live_is_kept_where_it_is_shorter_than_the_watchdog(link):
    pos, quat = target(link)
    link.send(pos, quat, 1, 0.03)
    sent = time.monotonic()
    await_state(link, lambda state: state.status == Status.STOPPED)
    assert time.monotonic() - sent < 0.09


def command(link: Link, **changes):
    """One datagram that would be obeyed, but for `changes`."""
    pos, quat = target(link)
    payload = wire.pack_arrays({"target_pos": pos, "target_quat": quat}, {"target_pos": 3, "target_quat": 4})
    fields = {"spec": link._hash, "session": link.session, "epoch": 5, "ttl_us": 100_000, "sequence": link.sequence + 1}
    return wire.pack(Kind.COMMAND, changes.pop("payload", payload), **{**fields, **changes})


def refused(link: Link) -> dict[str, int]:
    return link.request("status")["refused"]


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("spec", {"spec": b"othrspec"}),
        ("session", {"session": 12345}),
        ("sequence", {"sequence": 0}),
        ("expired", {"age_us": 100_000}),
        ("expired", {"ttl_us": 0}),
        ("length", {"payload": bytes(24)}),
    ],
)
def test_what_is_not_meant_for_it_is_dropped_and_counted(link, word, changes):
    before = refused(link).get(word, 0)
    link._transmit(command(link, **changes))
    assert refused(link)[word] == before + 1
    assert link.request("status")["status"] == "HOLDING"


def test_an_older_epoch_is_dropped(link):
    link._transmit(command(link))
    await_state(link, lambda state: state.status == Status.FOLLOWING)
    link._transmit(command(link, epoch=4, sequence=link.sequence + 2))
    assert refused(link)["epoch"] > 0


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Reason.NOT_FINITE, lambda pos, quat: (pos * np.nan, quat)),
        (Reason.NOT_FINITE, lambda pos, quat: (pos, quat * np.inf)),
        (Reason.NOT_FINITE, lambda pos, quat: (pos, quat * 1.1)),
        (Reason.LIMIT, lambda pos, quat: (pos * 0, quat)),
        (Reason.LIMIT, lambda pos, quat: (pos + np.array([0, 0, 0.04]), quat)),
        (Reason.LIMIT, lambda pos, quat: (pos, np.array([1.0, 0, 0, 0]))),
    ],
)
def test_its_own_limits_stop_it_whoever_commands(link, reason, change):
    before = target(link)
    with np.errstate(invalid="ignore"):
        link.send(*change(*before), 1, 0.1)
    state = await_state(link, lambda state: state.status == Status.STOPPED)
    assert state.reason == reason
    np.testing.assert_array_equal(state.readings["target_pos"], np.float32(before[0]))


def test_noise_on_the_line_is_counted_and_ignored(live, link):
    rng = np.random.default_rng(0)
    before = sum(refused(link).values())
    for _ in range(200):
        link._transmit(rng.bytes(int(rng.integers(1, 300))))
    link.wait_until(time.monotonic() + 0.1)
    assert sum(refused(link).values()) == before + 200
    follow(link, 2, epoch=9)
    assert link.latest.state.status == Status.FOLLOWING


def test_one_master_at_a_time(live, link):
    other = Link(("127.0.0.1", live.port))
    other.hello()
    with pytest.raises(Fault, match="held by test: end that first"):
        other.acquire("second", link.robot.joint_names)
    other.session = link.session  # even one who has overheard the session cannot request in another's place
    follow(link, 3)
    link.release()
    other.acquire("second", link.robot.joint_names)
    other.close()
    link.acquire("test", tuple(sorted(link.robot.joint_names)))


def test_a_master_that_died_is_replaced_after_two_seconds(live, link):
    with pytest.raises(Fault, match="held by"):
        lost = Link(("127.0.0.1", live.port))
        lost.hello()
        lost.acquire("second", link.robot.joint_names)
    time.sleep(2.1)
    lost.acquire("second", link.robot.joint_names)
    lost.close()
    with pytest.raises(Fault, match="not held by you"):
        link.request("scene", seed=1)
    link.acquire("test", tuple(sorted(link.robot.joint_names)))


def test_a_repeated_request_is_done_once(link):
    before = link.request("status")["episode"]
    document = wire.pack_json({"verb": "scene", "id": 77, "session": link.session, "seed": 5})
    for _ in range(3):
        link._transmit(wire.pack(Kind.REQUEST, document, link._hash))
    link.wait_until(time.monotonic() + 1.0)
    assert link.request("status")["episode"] == before + 1


def test_a_repeated_acquire_gives_the_same_session(link):
    """What a network repeats must not begin another session, of which the first asker knows nothing."""
    before = refused(link).get("session", 0)
    document = wire.pack_json({"verb": "acquire", "id": 78, "name": "test"})
    answers = []
    link._request_id = 78
    for _ in range(3):
        link._transmit(wire.pack(Kind.REQUEST, document))
        link.wait_until(time.monotonic() + 0.2)
        answers.append(link._replies.pop(78)["session"])
    assert answers[0] != link.session and len(set(answers)) == 1
    link.session, link._states = answers[0], 0
    follow(link, 2)
    assert link.latest.state.status == Status.FOLLOWING and refused(link).get("session", 0) == before


def test_a_command_that_comes_after_rest_is_too_late(link):
    follow(link, 2, epoch=3)
    link.request("rest", epoch=3)
    follow(link, 2, epoch=3)
    assert link.latest.state.status == Status.HOLDING
    follow(link, 2, epoch=4)
    assert link.latest.state.status == Status.FOLLOWING


def test_a_scene_is_refused_while_it_moves(link):
    follow(link, 2)
    with pytest.raises(Fault, match="moving"):
        link.request("scene", seed=2)


def test_the_emergency_stop_is_latched_through_everything(tmp_path):
    log = tmp_path / "a.emb"
    with robot(tmp_path, f"log={log}") as process:
        port = process.port
        with linked(process) as link:
            link.request("scene", seed=1, timeout_s=10)
            await_state(link, lambda state: state.episode > 0)
            follow(link, 3)
            operator = Link(("127.0.0.1", port))  # holds nothing
            operator.request("estop", reason="test")
            state = await_state(link, lambda state: state.status == Status.ESTOP)
            kept = state.readings["target_pos"]
            follow(link, 3, epoch=50)
            np.testing.assert_array_equal(link.latest.state.readings["target_pos"], kept)
            with pytest.raises(Fault, match="latched"):
                link.request("scene", seed=2)
        with pytest.raises(Fault, match="embodied deploy clear"), linked(process):
            pass
        process.kill()
    with robot(tmp_path, port=port) as process:
        with pytest.raises(Fault, match="embodied deploy clear"), linked(process):
            pass
        operator.request("clear")
        operator.close()
        with linked(process) as link:
            link.request("scene", seed=1, timeout_s=10)
            await_state(link, lambda state: state.episode > 0)
            follow(link, 3)
            assert link.latest.state.status == Status.FOLLOWING
    assert not list((tmp_path / "cache" / "estop").iterdir())


def test_with_a_key_only_who_has_it_is_heard(tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123")
    with robot(tmp_path, f"key_file={key}") as process:
        stranger = Link(("127.0.0.1", process.port))
        with pytest.raises(Fault, match="no answer"):
            stranger.hello(timeout_s=0.5)
        friend = Link(("127.0.0.1", process.port), key.read_bytes())
        assert friend.hello()["robot"]["name"] == "franka"
        stranger.close()
        friend.close()


def test_a_port_that_is_taken_is_bad_input(live, tmp_path):
    from embodied.deploy.robot import Server, ServerOptions

    with pytest.raises(BadInput, match="another robot process may have it"):
        Server(type("Body", (), {"spec": None})(), ServerOptions(port=live.port), tmp_path / "latch")
