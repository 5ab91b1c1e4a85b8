"""Two runs side by side, from their folders alone.

comparison  what a folder holds, steps that trained the same samples, where losses part, and what
            else differs
page        the comparison as titled tables of text, and as one HTML file with the curves
"""

from vlmpack.report.compare.comparison import Comparison, compare_runs
from vlmpack.report.compare.page import sections, write_page

__all__ = ["Comparison", "compare_runs", "sections", "write_page"]
