"""HTML pages from the templates of this folder, with their pictures and images.

A page is one file that needs no others. All text is escaped.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from vlmpack.encode.decode import IMAGE_FORMATS
from vlmpack.report.style import PALETTE


def render(template: str, **values: object) -> str:
    """A page as HTML."""
    loader = PackageLoader("vlmpack.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["visible"] = written_out
    environment.filters["breakable"] = breakable
    environment.globals["palette"] = PALETTE
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "backslashreplace").decode()  # names of files need not be UTF-8


def breakable(text: str) -> Markup:
    """The text, escaped, with places where a narrow column may break long names."""
    return Markup(re.sub(r"(?<=\w)([._/])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def written_out(text: str) -> str:
    """The text with characters that show nothing, or reorder what follows, by their code.

    Line breaks and tabs stay; whatever else is not printable (control characters, marks that turn
    the writing direction) becomes \\uXXXX.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing.

    Args:
        caption: below it, and its description for screen readers.
        narrow: an `<svg>` element for a telephone and for columns.
        wide: another one for a wide page, if there is one.
    """

    title: str
    caption: str
    narrow: str
    wide: str = ""


MAX_SIDE = 640
MAX_PNG_PIXELS = 1 << 16
"""The largest side and the most pixels of an image that stays a PNG."""


class Thumbnail(NamedTuple):
    """An image in a page."""

    url: str
    size: tuple[int, int]


def thumbnail(image: Image.Image, max_side: int = MAX_SIDE) -> Thumbnail:
    """The image, smaller if it is large: photos as JPEG, small images with every pixel."""
    small, data = image.convert("RGB"), io.BytesIO()
    small.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    kind = "JPEG" if small.width * small.height > MAX_PNG_PIXELS else "PNG"
    small.save(data, kind, quality=85)
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return Thumbnail(f"data:image/{kind.lower()};base64,{encoded}", small.size)


def thumbnails(files: Iterable[bytes], max_side: int = MAX_SIDE) -> tuple[str, ...]:
    """Addresses of encoded images; () where one of them cannot be read."""
    decoded = [decode(data) for data in files]
    return tuple(thumbnail(one, max_side).url for one in decoded if one) if all(decoded) else ()


def decode(data: bytes) -> Image.Image | None:
    """The image in RGB, or None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
