"""The HTML pages, from the templates beside this file: one file each that needs nothing beside it,
all text escaped."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vlmpack.report.style import PALETTE


def render(template: str, **values: object) -> str:
    """A page as HTML.

    Args:
        template: the name of a file in `templates`.
        values: what it shows, as plain text; the template escapes it.
    """
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
    """The text, escaped, with places in long names where a narrow column may break them: behind
    the dots, lines and slashes inside."""
    return Markup(re.sub(r"(?<=\w)([._/])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def written_out(text: str) -> str:
    """The text with characters that show nothing, or reorder what follows, by their code.

    Line breaks and tabs stay; whatever else is not printable (control characters, marks that turn
    the writing direction) becomes \\uXXXX.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)
