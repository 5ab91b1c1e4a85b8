"""Run folders from which a model card is made: no model, no data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.recipes import MINIMAL, changed

from vlmpack.file_format import RESULT, RUN
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.recipe.show import PublicRecipe
from vlmpack.training.run_dir import RunDir


def a_run(root: Path, **result: Any) -> tuple[RunDir, tuple[Path, PublicRecipe]]:
    """A folder with a recipe and a result, and what `card_of` is given beside it.

    Args:
        root: where it is made, with a model folder.
        result: figures of result.json.
    """
    secret = "https://${env:USER}:${env:PASSWORD}@host/a.tar"
    run = root / "first-run"
    (run / "verify").mkdir(parents=True)
    model = root / "models" / "Tiny-VL"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vision_config": {}}))
    recipe = load_recipe(
        changed(MINIMAL, model__path=str(model), data__train=secret, run_dir=str(run))
    )
    (run / "result.json").write_text(json.dumps(RESULT.mark(result)))
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    (run / "identity.json").write_text(json.dumps(RUN.mark({})))
    return RunDir(run), (model, PublicRecipe.of(recipe, run))
