"""`vlmpack replay`: does a step that was not finite come again, and where does it begin?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    AsJson,
    Overrides,
    argument,
    launcher_number,
    option,
    quiet_transformers,
)
from vlmpack.terminal import say


def replay(
    dump: Annotated[Path, argument("replay.dump")],
    overrides: Overrides = None,
    at_checkpoint: Annotated[bool, option("replay.at_checkpoint")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute a step that was not finite again, and say where that begins.

    Trains from the newest checkpoint before the step up to it. Then looks at its micro-batches, at
    each sample alone, and in float32. Nothing of the run is changed. Runs under torchrun too.
    """
    quiet_transformers()
    from vlmpack.run.replay import recipe_of
    from vlmpack.run.replay import replay as replayed

    ACTIVITY.enter_alone("opening model and data")
    found = replayed(dump, recipe_of(dump, overrides or ()), at_checkpoint=at_checkpoint)
    if launcher_number("RANK", 0) or 0:
        return
    if as_json:
        say(json.dumps(found.as_json(), indent=1))
        return
    for line in found.words():
        say(line)
