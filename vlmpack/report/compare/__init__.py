"""Two runs side by side, from their folders alone.

read         what a folder says: losses by step, samples of each step, identity, recipe, model
align        steps that trained the same samples; windows of as many samples; where losses part
differences  what differs, and whether the losses may be compared at all
sections     all that as titled tables of text, for the terminal and for the page
page         one HTML file with the curves and the tables
"""

from vlmpack.report.compare.comparison import Comparison, compare_runs
from vlmpack.report.compare.page import write_page
from vlmpack.report.compare.sections import sections

__all__ = ["Comparison", "compare_runs", "sections", "write_page"]
