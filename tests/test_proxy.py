"""The line that can be made bad: every fault does what it says, seen through sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from embodied.deploy import wire
from embodied.deploy.faults.proxy import CLEAN, Line, Proxy, lasting, setting, stuck
from embodied.deploy.wire import Kind, Malformed, Reason, State, Status

LAYOUT = {"joint_pos": 2, "force": 3}
SPEC = b"theirbot"


class Ends:
    """A robot's socket, a runner's socket, and the line between them."""

    def __init__(self, robot: socket.socket, proxy: Proxy, key: bytes | None) -> None:
        self.robot, self.proxy, self.key = robot, proxy, key
        self.runner = self.connected()
        self.back: tuple[str, int] | None = None

    def connected(self) -> socket.socket:
        runner = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        runner.connect(("127.0.0.1", self.proxy.port))
        return runner

    def introduce(self) -> None:
        """The runner's hello and the robot's description, by which the line learns how states are laid out."""
        self.runner.send(wire.pack(Kind.REQUEST, wire.pack_json({"verb": "hello"}), SPEC, key=self.key))
        _, self.back = self.robot.recvfrom(65536)
        answer = wire.pack_json({"description": {"readings": LAYOUT}})
        self.robot.sendto(wire.pack(Kind.REPLY, answer, SPEC, key=self.key), self.back)
        self.runner.recv(65536)

    def state(self, number: int, pos: float = 0.5, force: float = 1.0, session: int = 7) -> bytes:
        readings = {"joint_pos": np.float32([pos, -pos]), "force": np.float32([force, 2.0, 3.0])}
        payload = wire.pack_state(State(Status.FOLLOWING, Reason.NONE, session, 1, number, readings), LAYOUT)
        return wire.pack(Kind.STATE, payload, SPEC, session, age_us=number, sequence=number, key=self.key)

    def up(self, *datagrams: bytes) -> None:
        for data in datagrams:
            self.robot.sendto(data, self.back)

    def down(self, *datagrams: bytes) -> None:
        for data in datagrams:
            self.runner.send(data)


def command(number: int) -> bytes:
    return wire.pack(Kind.COMMAND, bytes([number % 256]) * 28, SPEC, 7, 1, ttl_us=1000, sequence=number)


def arriving(end: socket.socket, count: int, within_s: float = 10.0) -> list[bytes]:
    """What arrives, up to `count` datagrams."""
    got = []
    deadline = time.monotonic() + within_s
    while len(got) < count and (rest := deadline - time.monotonic()) > 0:
        end.settimeout(rest)
        with contextlib.suppress(TimeoutError):
            got.append(end.recv(65536))
    return got


def nothing_more(end: socket.socket) -> bool:
    return not arriving(end, 1, 0.15)


@contextlib.contextmanager
def line(seed: int = 0, key: bytes | None = None):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as robot:
        robot.bind(("127.0.0.1", 0))
        with Proxy(robot.getsockname(), seed, key) as proxy:
            ends = Ends(robot, proxy, key)
            ends.introduce()
            yield ends
            ends.runner.close()


@pytest.fixture
def ends():
    with line() as ends:
        yield ends


def test_a_clean_line_changes_nothing_and_keeps_the_order(ends):
    sent = [command(i) for i in range(50)]
    ends.down(*sent)
    assert arriving(ends.robot, 50) == sent
    told = [ends.state(i) for i in range(50)]
    ends.up(*told)
    assert arriving(ends.runner, 50) == told
    assert nothing_more(ends.runner) and nothing_more(ends.robot)
    assert not ends.proxy.counts


def test_two_runners_are_two_addresses_to_the_robot(ends):
    other = ends.connected()
    other.send(command(1))
    _, address = ends.robot.recvfrom(65536)
    assert address != ends.back
    ends.robot.sendto(b"for the other", address)
    assert arriving(other, 1) == [b"for the other"]
    assert nothing_more(ends.runner)
    other.close()


def test_loss_is_of_one_direction_and_of_the_seed():
    survivors = []
    for seed in (1, 1, 2):
        with line(seed) as ends:
            ends.proxy.inject(up=Line(drop=0.3))
            ends.up(*(ends.state(i) for i in range(200)))
            got = [wire.unpack(data).sequence for data in arriving(ends.runner, 200, 0.5)]
            assert ends.proxy.counts["up dropped"] == 200 - len(got)
            ends.down(*(command(i) for i in range(20)))
            assert len(arriving(ends.robot, 20)) == 20
            survivors.append(got)
    assert survivors[0] == survivors[1] != survivors[2]
    # 140 +- 6.5 of 200; these are five standard deviations
    assert 107 < len(survivors[0]) < 173


def test_requests_are_spared_unless_it_is_said(ends):
    request = wire.pack(Kind.REQUEST, wire.pack_json({"verb": "status"}), SPEC)
    ends.proxy.inject(down=Line(drop=1.0))
    ends.down(command(1), request)
    assert arriving(ends.robot, 1) == [request] and nothing_more(ends.robot)
    ends.proxy.inject(down=Line(drop=1.0, requests=True))
    ends.down(command(2), request)
    assert nothing_more(ends.robot)


def test_a_delay_is_at_least_so_long_and_keeps_the_order(ends):
    ends.proxy.inject(down=Line(delay_s=(0.1, 0.1)))
    began = time.monotonic()
    ends.down(*(command(i) for i in range(5)))
    got = arriving(ends.robot, 1)
    assert time.monotonic() - began >= 0.1
    got += arriving(ends.robot, 4)
    assert [wire.unpack(data).sequence for data in got] == [0, 1, 2, 3, 4]
    assert ends.proxy.counts["down delayed"] == 5


def test_jitter_makes_datagrams_overtake_each_other_and_loses_none(ends):
    ends.proxy.inject(up=Line(delay_s=(0.0, 0.1)))
    ends.up(*(ends.state(i) for i in range(60)))
    got = [wire.unpack(data).sequence for data in arriving(ends.runner, 60)]
    assert sorted(got) == list(range(60)) != got


def test_duplicates_are_the_same_twice(ends):
    ends.proxy.inject(down=Line(duplicate=1.0))
    ends.down(command(1), command(2))
    assert arriving(ends.robot, 4) == [command(1), command(1), command(2), command(2)]
    assert ends.proxy.counts["down duplicated"] == 2


def test_corruption_changes_one_byte_and_the_wire_sees_it(ends):
    ends.proxy.inject(up=Line(corrupt=1.0))
    told = [ends.state(i) for i in range(30)]
    ends.up(*told)
    places = set()
    for was, now in zip(told, arriving(ends.runner, 30), strict=True):
        differing = [i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b]
        assert len(differing) == 1
        places.update(differing)
        with pytest.raises(Malformed, match="crc"):
            wire.unpack(now)
    assert len(places) > 10


def test_what_is_held_comes_in_a_burst_in_its_order(ends):
    began = ends.proxy.inject(up=Line(hold=True), down=Line(hold=True))
    told, sent = [ends.state(i) for i in range(10)], [command(i) for i in range(10)]
    ends.up(*told)
    ends.down(*sent)
    assert nothing_more(ends.runner) and nothing_more(ends.robot)
    ended = ends.proxy.clear()
    assert ended - began > 150_000_000 and ended <= time.monotonic_ns()
    assert arriving(ends.runner, 10) == told and arriving(ends.robot, 10) == sent
    ends.down(command(11))
    assert arriving(ends.robot, 1) == [command(11)]


def test_a_frozen_state_is_the_whole_last_one_or_its_payload_under_new_stamps(ends):
    ends.up(ends.state(1, 0.1))
    last = arriving(ends.runner, 1)[0]
    ends.proxy.inject(up=Line(repeat="whole"))
    ends.up(ends.state(2, 0.2), ends.state(3, 0.3))
    assert arriving(ends.runner, 2) == [last, last]
    ends.proxy.inject(up=Line(repeat="payload"))
    ends.up(ends.state(4, 0.4))
    packet = wire.unpack(arriving(ends.runner, 1)[0])
    assert (packet.sequence, packet.age_us, packet.session, packet.spec) == (4, 4, 7, SPEC)
    assert packet.payload == wire.unpack(last).payload
    ends.proxy.clear()
    ends.up(ends.state(5, 0.5))
    assert arriving(ends.runner, 1) == [ends.state(5, 0.5)]


@pytest.mark.parametrize("key", [None, b"0123456789abcdef"])
def test_a_rewritten_state_is_whole_and_differs_in_one_number(key):
    with line(key=key) as ends:
        ends.proxy.inject(up=Line(rewrite=setting("joint_pos", 1, float("nan"))))
        ends.up(ends.state(9, 0.5))
        packet = wire.unpack(arriving(ends.runner, 1)[0], key)
        assert (packet.sequence, packet.age_us, packet.session) == (9, 9, 7)
        state = wire.unpack_state(packet.payload, LAYOUT)
        np.testing.assert_array_equal(state.readings["joint_pos"], np.float32([0.5, np.nan]))
        np.testing.assert_array_equal(state.readings["force"], np.float32([1, 2, 3]))
        assert (state.status, state.acted) == (Status.FOLLOWING, 9)
        assert ends.proxy.counts["up rewritten"] == 1


def test_a_stuck_sensor_keeps_its_value_while_the_others_go_on(ends):
    ends.proxy.inject(up=Line(rewrite=stuck("force")))
    ends.up(ends.state(1, 0.1, force=5.0), ends.state(2, 0.2, force=6.0), ends.state(3, 0.3, force=7.0))
    states = [wire.unpack_state(wire.unpack(data).payload, LAYOUT) for data in arriving(ends.runner, 3)]
    assert [float(state.readings["force"][0]) for state in states] == [5.0, 5.0, 5.0]
    np.testing.assert_allclose([state.readings["joint_pos"][0] for state in states], [0.1, 0.2, 0.3])


def test_a_rewriting_that_lasts_ends_by_itself(ends):
    ends.proxy.inject(up=Line(rewrite=lasting(setting("force", 0, 99.0), 0.2)))
    ends.up(ends.state(1))
    first = arriving(ends.runner, 1)
    time.sleep(0.25)
    ends.up(ends.state(2))
    forces = [
        wire.unpack_state(wire.unpack(data).payload, LAYOUT).readings["force"][0] for data in first + arriving(ends.runner, 1)
    ]
    assert forces == [99.0, 1.0]
    assert ends.proxy.counts["up rewritten"] == 1


def test_it_waits_for_a_state_as_the_robot_sent_it(ends):
    ends.proxy.inject(up=Line(drop=1.0))
    assert not ends.proxy.await_state(lambda state: True, 0.1)
    stop = threading.Event()

    def publish() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            ends.up(ends.state(number, pos=0.01 * number))

    robot = threading.Thread(target=publish)
    robot.start()
    try:
        assert ends.proxy.await_state(lambda state: state.readings["joint_pos"][0] > 0.5, 20.0)
        assert not ends.proxy.await_state(lambda state: state.readings["joint_pos"][0] < 0.5, 0.1)
    finally:
        stop.set()
        robot.join()


def test_a_robot_that_is_gone_is_counted_and_harms_nothing(ends):
    ends.robot.close()
    for number in range(20):
        ends.down(command(number))
        time.sleep(0.01)
    assert ends.proxy.counts["unreachable"] + ends.proxy.counts["lost"] > 0
    assert ends.proxy.inject(CLEAN) > 0
