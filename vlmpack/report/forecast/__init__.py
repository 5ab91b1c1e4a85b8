"""A run's plan for a person: `sections` are titled tables, for the terminal and for the page.
`write_page` writes one HTML file with pictures and tables. `as_json` has every figure.
"""

from vlmpack.report.document import Column, Section
from vlmpack.report.forecast.page import as_json, write_page
from vlmpack.report.forecast.sections import sections

__all__ = ["Column", "Section", "as_json", "sections", "write_page"]
