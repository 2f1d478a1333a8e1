"""Charts of several lines side by side as one SVG."""

from __future__ import annotations

from collections.abc import Sequence

STYLE = """svg{background:#fff;font:12px sans-serif}.tick{fill:#555}.grid,.axis{fill:none;stroke:#ddd}.axis{stroke:#999}
.line{fill:none;stroke:currentColor;stroke-width:1.8}.dots{fill:currentColor}
.c0{color:#0b68c8}.c1{color:#d4570a}.c2{color:#0a8a62}.c3{color:#ab3f90}.c4{color:#8a6a00}"""


def side_by_side(charts: Sequence[str], names: Sequence[str]) -> str:
    """What `embodied.report.charts.line_chart` gave, with one legend: the names of their lines, alike in all."""
    inner = ""
    for index, chart in enumerate(charts):
        title = chart.partition("<figcaption>")[2].partition("</figcaption>")[0]
        drawing = chart[chart.index("<svg") : chart.index("</svg>") + len("</svg>")]
        inner += f'<text x="{10 + 440 * index}" y="18">{title}</text>'
        inner += drawing.replace("<svg", f'<svg x="{440 * index}" y="28" width="420" height="220"', 1)
    legend = "".join(
        f'<text class="c{index}" fill="currentColor" x="{50 + 150 * index}" y="270">{name}</text>'
        for index, name in enumerate(names)
    )
    size = 'width="870" height="285" viewBox="0 0 870 285"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{inner}{legend}</svg>\n'
