"""The README's picture: `python benchmarks/moving_picture.py VIDEO.mp4 docs/assembly.gif` halves a video of `embodied play`."""

from __future__ import annotations

import sys

import av


def main(source: str, target: str) -> None:
    """Re-encode the video as a gif of half its size."""
    with av.open(source) as video, av.open(target, "w") as gif:
        picture = video.streams.video[0]
        out = gif.add_stream("gif", rate=picture.average_rate)
        out.width, out.height, out.pix_fmt = picture.width // 2, picture.height // 2, "rgb8"
        for frame in video.decode(picture):
            small = frame.reformat(out.width, out.height, "rgb8")
            small.pts = None
            gif.mux(out.encode(small))
        gif.mux(out.encode(None))


if __name__ == "__main__":
    main(*sys.argv[1:3])
