import numpy as np
import pytest
from rerun_reader import read_recording

from embodied.report import recording
from embodied.spec.errors import BadInput, Fault


def moving_square(n, height=64, width=96):
    for i in range(n):
        frame = np.full((height, width, 3), (200, 40, 90), np.uint8)
        frame[16:48, 4 * i : 4 * i + 32] = (20, 180, 240)
        yield frame


def test_a_video_comes_back(tmp_path):
    import av

    path = tmp_path / "episode.mp4"
    recording.write_video(moving_square(12), path, fps=12.5)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert float(stream.average_rate) == 12.5
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 12
    for frame, original in zip(frames, moving_square(12), strict=True):
        assert np.abs(frame.astype(int) - original).mean() < 6
    assert [p.name for p in tmp_path.iterdir()] == ["episode.mp4"]


@pytest.mark.parametrize(
    ("frames", "error", "message"),
    [
        ([], Fault, "no frames"),
        ([np.zeros((32, 32, 3), np.uint8)] * 3, Fault, "black"),
        ([np.zeros((31, 32, 3), np.uint8)], BadInput, "render 32 x 32"),
        ([np.zeros((32, 32), np.uint8)], BadInput, r"expected \[H, W, 3\]"),
        ([np.zeros((32, 32, 3), np.float32)], BadInput, "frame 0 is float32"),
        ([np.ones((32, 32, 3), np.uint8), np.ones((32, 34, 3), np.uint8)], BadInput, "frame 1"),
    ],
)
def test_a_bad_video_is_refused_and_not_kept(tmp_path, frames, error, message):
    with pytest.raises(error, match=message):
        recording.write_video(frames, tmp_path / "v.mp4", fps=25)
    assert not list(tmp_path.iterdir())


def test_a_video_with_one_bright_frame_is_not_black(tmp_path):
    frames = [np.zeros((32, 32, 3), np.uint8)] * 3 + [np.full((32, 32, 3), 60, np.uint8)]
    recording.write_video(frames, tmp_path / "v.mp4", fps=25)
    assert recording._decode(tmp_path / "v.mp4")[0] == 4


def test_a_video_that_lost_a_frame_is_refused(tmp_path, monkeypatch):
    decode = recording._decode
    monkeypatch.setattr(recording, "_decode", lambda path: (decode(path)[0] - 1, 255))
    with pytest.raises(Fault, match="12 frames were written but 11"):
        recording.write_video(moving_square(12), tmp_path / "v.mp4", fps=25)
    assert not list(tmp_path.iterdir())


GEOMS = {
    "floor": recording.Geom("plane", [0, 0, 1], [0.5, 0.5, 0.5, 1]),
    "a/box": ("box", [0.1, 0.2, 0.3], [1, 0, 0, 1]),
    "ball": ("sphere", [0.4, 0, 0], [0, 1, 0, 0.5]),
    "egg": ("ellipsoid", [0.1, 0.2, 0.3], [0, 0, 1, 1]),
    "pill": ("capsule", [0.05, 0.3, 0], [0, 0, 1, 1]),
    "can": ("cylinder", [0.05, 0.3, 0], [0, 0, 1, 1]),
}


@pytest.mark.filterwarnings("error")
def test_a_rerun_recording_comes_back(tmp_path):
    path = tmp_path / "episode.rrd"
    names = list(GEOMS)
    positions, quats = np.zeros((6, 3)), np.tile([1.0, 0, 0, 0], (6, 1))
    with recording.RerunRecording(path) as record:
        record.log_scene(names, list(GEOMS.values()))
        for step in range(5):
            positions[1] = [step, 0, 0.5]
            if step == 3:
                quats[2] = [0.5, 0.5, -0.5, 0.5]
            image = np.full((8, 8, 3), 40 * step, np.uint8) if step == 4 else None
            record.log_step(0.04 * step, positions, quats, {"reward": 2.0 * step}, image)
    static, timed = read_recording(path, 1e9)

    box, ball = timed["/world/a\\/box"], timed["/world/ball"]
    assert box["time"] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])
    assert np.array(box["Transform3D:translation"])[:, 0].tolist() == [[s, 0, 0.5] for s in range(5)]
    assert ball["time"] == pytest.approx([0, 0.12])  # logged when it moves
    assert ball["Transform3D:quaternion"][1] == [[0.5, -0.5, 0.5, 0.5]]  # xyzw
    assert timed["/scalars/reward"]["Scalars:scalars"] == [[0.0], [2.0], [4.0], [6.0], [8.0]]
    assert len(timed["/image"]["time"]) == 1

    # MuJoCo sizes: half sizes; radius; radius and half length. All centred on the geom's frame
    shape = {name: static[f"/world/{name}"] for name in ("a\\/box", "ball", "egg", "pill", "can", "floor")}
    assert shape["a\\/box"]["Boxes3D:half_sizes"][0][0] == pytest.approx([0.1, 0.2, 0.3])
    assert shape["ball"]["Ellipsoids3D:half_sizes"][0][0] == pytest.approx([0.4, 0.4, 0.4])
    assert shape["egg"]["Ellipsoids3D:half_sizes"][0][0] == pytest.approx([0.1, 0.2, 0.3])
    assert shape["pill"]["Capsules3D:lengths"][0] == pytest.approx([0.6])
    assert shape["pill"]["Capsules3D:translations"][0][0] == pytest.approx([0, 0, -0.3])
    assert shape["can"]["Cylinders3D:lengths"][0] == pytest.approx([0.6])
    half, centre = (shape["floor"][f"Boxes3D:{what}"][0][0] for what in ("half_sizes", "centers"))
    assert half[:2] == [5.0, 5.0]
    assert centre[2] + half[2] == pytest.approx(0.0)  # its upper face is the plane
    assert shape["a\\/box"]["Boxes3D:colors"][0] == [0xFF0000FF]


def test_a_recording_refuses_what_it_cannot_show(tmp_path):
    with recording.RerunRecording(tmp_path / "r.rrd") as record:
        with pytest.raises(BadInput, match="did you mean 'capsule'"):
            record.log_scene(["a"], [("capsul", [1, 1, 1], [1, 1, 1, 1])])
        with pytest.raises(BadInput, match="1 different"):
            record.log_scene(["a", "a"], [GEOMS["ball"]] * 2)
        record.log_scene(["a"], [GEOMS["ball"]])
        with pytest.raises(BadInput, match=r"expected \[1, 3\]"):
            record.log_step(0.0, np.zeros((2, 3)), np.zeros((2, 4)), {})
