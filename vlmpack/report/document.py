"""The HTML pages, from the templates beside this file: one file each that needs nothing beside it,
all text escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    environment.globals["palette"] = PALETTE
    return environment.get_template(template).render(values)


def written_out(text: str) -> str:
    """The text with characters that show nothing, or reorder what follows, by their code.

    Line breaks and tabs stay; whatever else is not printable (control characters, marks that turn
    the writing direction) becomes \\uXXXX.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)
