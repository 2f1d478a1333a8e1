"""What happened, to look at: video files, and rerun recordings that the rerun viewer scrubs through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.spec.errors import BadInput, Fault, nearest

if TYPE_CHECKING:
    import rerun

Frame = NDArray[np.uint8]

BLACK = 4  # a decoded luma (0..255) up to this is black; compression moves it by one or two
INFINITE_PLANE = 5.0  # m, shown half size of planes whose MJCF size is 0
PLANE_THICKNESS = 1e-3  # m
FINEST = 400  # rows and columns of a height field that are shown


def write_video(frames: Iterable[Frame], path: Path, fps: float) -> None:
    """Write an MP4 file (H.264, yuv420p: every browser plays it) and check it by decoding it.

    Nothing is left at `path` if this fails.

    Args:
        frames: uint8 [H, W, 3] RGB each, all of one size, H and W even.
        path: the file to write; its folder exists.
        fps: frames a second.

    Raises:
        BadInput: frames that are not such arrays, or odd sizes.
        Fault: no frames, an all-black video, or a decoded number of frames that is not the written one.
    """
    temporary = Path(path).with_suffix(".partial.mp4")
    try:
        written = _encode(frames, temporary, fps)
        if written == 0:
            raise Fault(f"{path}: there are no frames to write: render at least one")
        read, brightest = _decode(temporary)
        if read != written:
            raise Fault(f"{path}: {written} frames were written but {read} can be read: the file is not kept")
        if brightest <= BLACK:
            raise Fault(f"{path}: all {written} frames are black: check the camera and lights (`embodied doctor`)")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _encode(frames: Iterable[Frame], path: Path, fps: float) -> int:
    """Encode and return the number of frames."""
    import av

    count = 0
    shape: tuple[int, ...] | None = None
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1000), options={"crf": "20"}, pix_fmt="yuv420p"
        )
        for frame in frames:
            if shape is None:
                shape = frame.shape
                _check_shape(shape)
                stream.height, stream.width = shape[:2]
            if frame.shape != shape or frame.dtype != np.uint8:
                raise BadInput(f"frame {count} is {frame.dtype} {list(frame.shape)}, expected uint8 {list(shape)}")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            count += 1
        if count:
            container.mux(stream.encode())
    return count


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or shape[2] != 3:
        raise BadInput(f"frames are {list(shape)}, expected [H, W, 3]")
    height, width = shape[:2]
    if height % 2 or width % 2:
        raise BadInput(
            f"frames are {width} x {height}: H.264 needs even sizes, render {width + width % 2} x {height + height % 2}"
        )


def _decode(path: Path) -> tuple[int, int]:
    """Number of frames and greatest luma (0..255) of a video file."""
    import av

    count = brightest = 0
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            count += 1
            if brightest <= BLACK:
                brightest = max(brightest, int(frame.to_ndarray(format="gray").max()))
    return count, brightest


class Geom(NamedTuple):
    """A MuJoCo primitive: its type by name, size [3] and rgba [4] (0 to 1) as in MJCF, in metres.

    A `height_field` also has heights [rows along y, columns along x], of which at most `FINEST` each way are shown.
    """

    type: str
    size: ArrayLike
    rgba: ArrayLike
    heights: ArrayLike | None = None


class RerunRecording:
    """Writes an .rrd file for the rerun viewer (`rerun file.rrd`); opens no viewer and no port.

    The geoms are entities `world/<name>`, scalars `scalars/<name>`, the picture `image`, on the timeline `time`.

    Args:
        path: the file to write; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        import rerun

        self._stream = rerun.RecordingStream("embodied")
        self._stream.save(str(path))
        self._names: Sequence[str] = ()
        self._poses: NDArray[np.float64] | None = None

    def log_scene(self, names: Sequence[str], geoms: Sequence[Geom | tuple[str, ArrayLike, ArrayLike]]) -> None:
        """Declare the geoms that `log_step` moves: their names, all different, and shapes.

        Raises:
            BadInput: names that repeat or do not match the geoms, or a geom type without a shape here (meshes).
        """
        if len(names) != len(geoms) or len(set(names)) != len(names):
            raise BadInput(f"{len(names)} names ({len(set(names))} different) for {len(geoms)} geoms: give one each")
        self._names, self._poses = list(names), None
        self._log("world", _right_handed_z_up(), static=True)
        for name, geom in zip(names, geoms, strict=True):
            self._log(f"world/{_part(name)}", _shape(Geom(*geom)), static=True)

    def log_step(
        self,
        time_s: float,
        positions: ArrayLike,
        quats_wxyz: ArrayLike,
        scalars: Mapping[str, float],
        image: Frame | None = None,
    ) -> None:
        """Log one moment.

        Args:
            time_s: its time, seconds.
            positions: [G, 3] of the scene's geoms, metres.
            quats_wxyz: [G, 4], unit.
            scalars: values to plot by name.
            image: uint8 [H, W, 3] RGB, or None.

        Raises:
            BadInput: another number of geoms than the scene has.
        """
        import rerun

        positions, quats = np.asarray(positions, dtype=np.float64), np.asarray(quats_wxyz, dtype=np.float64)
        expected = len(self._names)
        if positions.shape != (expected, 3) or quats.shape != (expected, 4):
            raise BadInput(
                f"positions {list(positions.shape)} and quaternions {list(quats.shape)}, expected [{expected}, 3] and "
                f"[{expected}, 4] as in log_scene"
            )
        self._stream.set_time("time", duration=time_s)
        poses = np.concatenate((positions, quats), axis=1)
        # a pose holds until the next one: what stands still is logged once
        moved = range(expected) if self._poses is None else np.flatnonzero((poses != self._poses).any(axis=1))
        for index in moved:
            w, x, y, z = quats[index]
            pose = rerun.Transform3D(translation=positions[index], quaternion=rerun.Quaternion(xyzw=[x, y, z, w]))
            self._log(f"world/{_part(self._names[int(index)])}", pose)
        self._poses = poses
        for name, value in scalars.items():
            self._log(f"scalars/{_part(name)}", rerun.Scalars(float(value)))
        if image is not None:
            self._log("image", rerun.Image(image).compress(jpeg_quality=85))

    def close(self) -> None:
        """Finish the file."""
        self._stream.disconnect()

    def __enter__(self) -> RerunRecording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _log(self, entity: str, what: rerun.AsComponents, static: bool = False) -> None:
        self._stream.log(entity, what, static=static, strict=True)  # else rerun turns errors into warnings


def _part(name: str) -> str:
    """A name as one part of a rerun entity path."""
    import rerun

    return rerun.escape_entity_path_part(name)


def _right_handed_z_up() -> rerun.AsComponents:
    import rerun

    return rerun.ViewCoordinates.RIGHT_HAND_Z_UP


def _shape(geom: Geom) -> rerun.AsComponents:
    """The rerun shape of a geom, about the geom's own frame; sizes as in MuJoCo's XML reference for geom/size."""
    import rerun

    size = np.asarray(geom.size, dtype=np.float64)
    style: dict[str, Any] = {"colors": [np.round(255 * np.asarray(geom.rgba)).astype(np.uint8)], "fill_mode": "solid"}
    match geom.type:
        case "box":
            return rerun.Boxes3D(half_sizes=[size], **style)
        case "sphere":
            return rerun.Ellipsoids3D(half_sizes=[size[[0, 0, 0]]], **style)
        case "ellipsoid":
            return rerun.Ellipsoids3D(half_sizes=[size], **style)
        case "capsule":  # rerun's begins at its frame, MuJoCo's is centred on it
            ends: dict[str, Any] = {"lengths": [2 * size[1]], "translations": [[0.0, 0.0, -size[1]]]}
            return rerun.Capsules3D(radii=[size[0]], **ends, **style)
        case "cylinder":
            return rerun.Cylinders3D(radii=[size[0]], lengths=[2 * size[1]], **style)
        case "plane":
            half = [*np.where(size[:2] > 0, size[:2], INFINITE_PLANE), PLANE_THICKNESS / 2]
            return rerun.Boxes3D(half_sizes=[half], centers=[[0.0, 0.0, -PLANE_THICKNESS / 2]], **style)
        case "height_field":
            return _ground(np.asarray(geom.heights), size, style["colors"])
    known = ("box", "sphere", "ellipsoid", "capsule", "cylinder", "plane", "height_field")
    raise BadInput(f"geom type '{geom.type}' cannot be shown: {nearest(geom.type, known)}")


def _ground(heights: np.ndarray, size: np.ndarray, colors: list[np.ndarray]) -> rerun.AsComponents:
    """A height field [rows, columns] m as triangles, centred on its frame, of half sizes `size` [m]."""
    import rerun

    stride = max(1, -(-max(heights.shape) // FINEST))
    z = heights[::stride, ::stride]
    rows, columns = z.shape
    x = np.linspace(-size[0], size[0], heights.shape[1])[::stride]
    y = np.linspace(-size[1], size[1], heights.shape[0])[::stride]
    points = np.stack([*np.meshgrid(x, y), z], -1).reshape(-1, 3)
    corner = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).ravel()
    ahead, left = corner + 1, corner + columns
    triangles = np.concatenate([np.stack([corner, ahead, left + 1], -1), np.stack([corner, left + 1, left], -1)])
    return rerun.Mesh3D(vertex_positions=points, triangle_indices=triangles, albedo_factor=colors[0])
