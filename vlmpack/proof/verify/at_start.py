"""`training.verify: true`: the checks of `vlmpack verify` before the first step of a run."""

from __future__ import annotations

import logging

from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import VerificationError
from vlmpack.proof.verify.record import conclusion, write_verification
from vlmpack.proof.verify.run import VerifyOptions, verify_split
from vlmpack.recipe import Recipe
from vlmpack.training.run_dir import RunDir

logger = logging.getLogger("vlmpack")


def verify_at_start(
    recipe: Recipe, ranks: Ranks, run_dir: RunDir, encoder: Encoder, train: TrainData
) -> None:
    """Verify on an engine of its own, gone before the run's is built. Collective.

    Random numbers go on as if nothing had been. `verify/verify.json` of the run folder says what
    was found.

    Raises:
        VerificationError: packed differs from unpacked, with the checks that failed.
        CapabilityError: the model does not fit.
    """
    folder = run_dir.path / "verify"
    found = verify_split(recipe, ranks, encoder, train, VerifyOptions(scratch=folder))
    path = ranks.on_main(lambda: write_verification(found, folder))
    if not found.passes:
        raise VerificationError(
            f"training.verify: {conclusion(found)}. All figures are in {path}; nothing was trained"
        )
    logger.info("%-14s %s (%d checks, %s)", "verify", conclusion(found), len(found.checks), path)
