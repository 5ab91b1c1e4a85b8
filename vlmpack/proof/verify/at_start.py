"""`training.verify: true`: the checks of `vlmpack verify` before the first step of a run."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmpack.build.engine import EngineSpec
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import VerificationError
from vlmpack.proof.verify.run import VerifyOptions, conclusion, verify_split, write_verification
from vlmpack.recipe.objective import ObjectiveSection

logger = logging.getLogger("vlmpack")


def verify_at_start(
    engine: EngineSpec, objective: ObjectiveSection, folder: Path, train: TrainData
) -> None:
    """Verify on an engine of its own, gone before the run's is built. Collective.

    Random numbers go on as if nothing had been. `verify.json` says what was found.

    Args:
        folder: where it is written.

    Raises:
        VerificationError: packed differs from unpacked, with the checks that failed.
        CapabilityError: the model does not fit.
    """
    found = verify_split(engine, objective, train, VerifyOptions(scratch=folder))
    path = engine.ranks.on_main(lambda: write_verification(found, folder))
    if not found.passes:
        raise VerificationError(
            f"training.verify: {conclusion(found)}. All figures are in {path}; nothing was trained"
        )
    logger.info("%-14s %s (%d checks, %s)", "verify", conclusion(found), len(found.checks), path)
