"""Complete lanes to an SVG that stands alone: a title, the lanes, and what their colours mean."""

from __future__ import annotations

import html
from collections.abc import Mapping

PICTURE_WIDTH = 1000  # pixels
NAMES_WIDTH = 96  # pixels left of the lanes
SHARES_WIDTH = 64  # pixels right of them
TITLE_HEIGHT = 92  # pixels above them
LETTER = 6.3  # pixels of a letter of the legend, about


def complete_svg(
    drawn: str, *, title: str, note: str, colours: Mapping[str, str], style: str = ""
) -> str:
    """Return an SVG of what `lanes_chart` drew.

    colours: of each class of bars, in the order of the legend; style: more CSS.
    """
    height = int(drawn.partition('height="')[2].partition('"')[0])
    whole = TITLE_HEIGHT + height + 74
    lanes_width = PICTURE_WIDTH - NAMES_WIDTH - SHARES_WIDTH
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    common = (
        "text{font:12px system-ui,sans-serif;fill:#5d6068}.title{font-size:18px;font-weight:600;"
        "fill:#17181c}svg svg{overflow:visible}.idle{fill:#eeede9}.at{fill:transparent}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {whole}" '
        f'width="{PICTURE_WIDTH}" height="{whole}"><style>{common}{fills}{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="24" y="36">{html.escape(title)}</text>'
        f'<text x="24" y="58">{html.escape(note)}</text>'
        f'<svg x="{NAMES_WIDTH}" y="{TITLE_HEIGHT}" width="{lanes_width}" height="{height}">'
        f"{drawn}</svg>"
        f"{draw_legend(list(colours), TITLE_HEIGHT + height + 50)}</svg>\n"
    )


def draw_legend(names: list[str], at: int) -> str:
    """Draw a square and a name for each class of bars, so many pixels from the top."""
    drawn = ""
    left = 24.0
    for name in names:
        said = name.replace("_", " ")
        drawn += (
            f'<rect class="{name}" x="{left:.0f}" y="{at - 10}" width="10" height="10" rx="2"/>'
            f'<text x="{left + 16:.0f}" y="{at}">{said}</text>'
        )
        left += 30 + LETTER * len(said)
    return drawn
