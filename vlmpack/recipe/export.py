"""The recipe's section on what is written at the end of a run."""

from __future__ import annotations

from typing import Literal

from vlmpack.recipe.sources import Section


class ExportSection(Section):
    """The finetuned model as a transformers folder, at the end of the run."""

    enabled: bool = True
    """Write it."""

    weights: Literal["last", "best"] = "last"
    """Those of the last step, or those of the best one by `evaluation.best`, which the questions
    are then answered with after training too. `vlmpack export` takes the same."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the exported weights. `auto`: as in the folder `model.path`."""
