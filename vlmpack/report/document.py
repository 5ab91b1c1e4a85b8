"""What the HTML pages share: their frame, and the look and the figures of those about a run."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

SHEET = """
body { margin: 2.5rem auto; padding: 0 1rem; color: #1f2933;
       font: 16px/1.5 system-ui, sans-serif; background: #fff; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p.from { color: #6b7785; margin: .2rem 0 1.5rem; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1.2rem 2.2rem; margin: 0; }
.figures dd { margin: 0; }
.figures dt, .figures .note { color: #6b7785; font-size: .85rem; }
.figures .value { font-size: 1.7rem; font-weight: 650; line-height: 1.2; }
img { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { border-bottom: 1px solid #e4e7eb; } th { font-weight: 600; }
"""
"""The style of a page about a run; each adds its widths and its tables' cells."""


def html_document(title: str, style: str, body: str) -> str:
    """One file that needs nothing beside it.

    Args:
        title, body: escaped.
        style: CSS.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def figure_list(figures: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers in a row, as HTML.

    Args:
        figures: (name, value, note) of each, not escaped.
    """
    items = "\n".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for name, value, note in figures
    )
    return f'<dl class="figures">\n{items}\n</dl>'
