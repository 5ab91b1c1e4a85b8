"""The HTML pages, from the templates beside this file: one file each that needs nothing beside it,
all text escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


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
    return environment.get_template(template).render(values)
