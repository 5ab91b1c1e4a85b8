"""What is verified before a run's first step.

With `training.verify: true` that is all of `vlmpack verify`. A model of the generic family trains
only if it passes:

    first launch   verify on the folder's weights and the recipe's samples
                   too large for float32: a tiny model of the class (`--tiny`) in full, and one
                   sample on the folder's weights, forward alone, packed with another
    later          the record of the same model, processor, layout and versions

The record lies in the run's folder. If all was judged, `$VLMPACK_CACHE/proofs` keeps it as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.attention import choose_attention
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import packed_model
from vlmpack.backends.hf.recurrence import replace_kernels
from vlmpack.build.data import DataSpec
from vlmpack.build.engine import EngineSpec
from vlmpack.capabilities.versions import installed_versions
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import VerificationError
from vlmpack.families.base import stock_arguments
from vlmpack.file_format import FORMAT, VERIFICATION
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.measure import LOSS_BOUND, Check, bounded, loss_error, with_noise
from vlmpack.proof.stock import require_finite_losses, token_losses
from vlmpack.proof.verify.memory import TooLarge, require_room_for_weights
from vlmpack.proof.verify.run import (
    Verification,
    VerifyOptions,
    as_json,
    conclusion,
    verify_split,
    verify_tiny,
    write_verification,
)
from vlmpack.proof.verify.samples import choose_samples
from vlmpack.recipe.derived import plan_alignment
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.schema import PackingSection
from vlmpack.recurrence import choose_recurrence
from vlmpack.storage.access import default_cache_dir
from vlmpack.version import __version__
from vlmpack.whole_file import parse_small_json, regular_bytes, regular_text, write_atomically
from vlmpack.words import counted


def verify_at_start(
    engine: EngineSpec, objective: ObjectiveSection, folder: Path, train: TrainData
) -> None:
    """Verify on a temporary engine before the run's is built, and write `verify.json`. Collective.

    Random states are restored.

    Raises:
        VerificationError: packed differs from unpacked, with the checks that failed.
        CapabilityError: the model does not fit.
    """
    verification = verify_split(engine, objective, train, VerifyOptions(scratch=folder))
    path = _write(verification, folder, engine.ranks, "training.verify: ")
    logger.info(
        "%-14s %s (%d checks, %s)",
        "verify",
        conclusion(verification),
        len(verification.checks),
        path,
    )


logger = logging.getLogger("vlmpack")


SMALL_FILES = (".json", ".jinja", ".model", ".txt")
"""Files of a model folder that define the model, besides its weights."""


def require_proof(
    data: DataSpec,
    engine: EngineSpec,
    objective: ObjectiveSection,
    folder: Path,
    train: TrainData,
    weights: Mapping[str, str],
) -> None:
    """Verify a model of the generic family, or find that it was verified. Collective.

    Args:
        weights: a digest of every tensor of the model folder, by name.

    Raises:
        VerificationError: packed differs from unpacked, with the checks that failed.
        CapabilityError: nothing of it can be compared here.
    """
    name, ranks = engine.encoder.family.model_types[0], engine.ranks
    key = proof_key(engine, objective, data.train.mode.packing, weights)
    path = default_cache_dir().parent / "proofs" / f"{key}.json"
    verified = ranks.on_main(lambda: _kept(path, folder))
    if verified is not None:
        logger.info("%-14s %s (found in %s)", "verify", verified, path)
        return
    logger.info(
        "%-14s no family of ours serves %s: packed is compared with unpacked before the first step",
        "verify",
        name,
    )
    verification = _proven(data, engine, objective, folder, train)
    rule = f"no family of ours serves {name}, so it trains only where verify passes, and "
    written = _write(verification, folder, ranks, rule)
    unjudged = _unjudged(engine.encoder, verification)
    if unjudged:
        logger.warning("note: %s, so the record is not kept for later launches", unjudged)
    else:
        ranks.on_main(lambda: _keep(path, verification))
    logger.info(
        "%-14s %s (%d checks, %s)",
        "verify",
        conclusion(verification),
        len(verification.checks),
        written,
    )


def _write(verification: Verification, folder: Path, ranks: Ranks, rule: str) -> Path:
    written = ranks.on_main(lambda: write_verification(verification, folder))
    if not verification.passes:
        raise VerificationError(
            f"{rule}{conclusion(verification)}. All figures are in {written}; nothing was trained"
        )
    return written


def proof_key(
    engine: EngineSpec,
    objective: ObjectiveSection,
    packing: PackingSection,
    weights: Mapping[str, str],
) -> str:
    """A digest of everything that the result depends on, except the samples."""
    folder, policy = engine.encoder.folder, engine.policy
    aligned = {"alignment": plan_alignment(packing, engine.parallelism)}
    small = sorted(path for path in folder.iterdir() if path.suffix in SMALL_FILES)
    parts: dict[str, Any] = {
        "files": [(path.name, hashlib.sha256(regular_bytes(path)).hexdigest()) for path in small],
        "weights": dict(weights),
        "encoder": engine.encoder.fingerprint,
        "model": engine.model.model_dump(mode="json", exclude={"path"}),
        "pairs": objective.learns_pairs,
        "packing": packing.model_dump(mode="json") | aligned,
        "parallelism": engine.parallelism.model_dump(mode="json"),
        "trainable": policy.trainable.model_dump(mode="json"),
        "device": engine.ranks.device.type,
        "versions": [__version__, torch.__version__, dict(installed_versions())],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unjudged(encoder: Encoder, verification: Verification) -> str:
    """What was not judged and other samples may show; empty if all was judged."""
    if encoder.takes_images and not any(each["images"] for each in verification.facts["samples"]):
        return "no sample that was compared has an image"
    few = [check.name for check in verification.checks if check.status == "too few"]
    return f"too few data for {', '.join(few)}" if few else ""


def _keep(path: Path, verification: Verification) -> None:
    """Keep a record for later launches, if the folder can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(as_json(verification), indent=1) + "\n")
    except OSError as error:
        logger.warning("note: the record is not kept, so the next launch verifies again: %s", error)


def _kept(path: Path, folder: Path) -> str | None:
    """The conclusion of an earlier record, which is copied into the run; None without one."""
    try:
        text = regular_text(path)
        values = parse_small_json(text)
    except (OSError, ValueError):
        return None
    if values.get(FORMAT) != VERIFICATION.number or values.get("passes") is not True:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "verify.json", text)
    return str(values.get("conclusion"))


def _proven(
    data: DataSpec, engine: EngineSpec, objective: ObjectiveSection, folder: Path, train: TrainData
) -> Verification:
    """The checks on the folder's weights, or on a tiny model if they are too large. Collective."""
    options = VerifyOptions(scratch=folder)
    try:
        return verify_split(engine, objective, train, options)
    except TooLarge as error:
        logger.info("%-14s %s", "verify", error)
    tiny = verify_tiny(data, engine, objective, replace(options, tiny=True))
    if not tiny.passes:
        return tiny

    def forward() -> Check:
        return check_one_sample(engine.encoder, train)

    one = engine.ranks.on_main(forward)
    facts = tiny.facts | {"forward_on": "the folder's weights", "tiny": False}
    facts["weights"] = f"{tiny.facts['weights']}, but for the last check"
    return replace(tiny, checks=(*tiny.checks, one), facts=facts)


NAME = "loss of one sample on the folder's weights"


SAMPLES = 6
"""Samples that the two are chosen from: no image, one, and several."""


def check_one_sample(encoder: Encoder, train: TrainData) -> Check:
    """Compare a sample alone and packed after another one, in float32 on the host.

    It has labels, and images if any sample has some.

    Raises:
        ModelError: the folder's weights cannot be loaded.
        CapabilityError: the host has no room for them.
    """
    require_room_for_weights(encoder.folder)
    chosen = choose_samples(train, SAMPLES)
    most = max(chosen, key=lambda each: (each.num_labels > 0, each.num_images))
    sample, other = most.sample, next(each.sample for each in chosen if each is not most)
    model = load_model(encoder.folder).eval()
    with torch.no_grad():
        alone = _stock_losses(model, encoder, sample)
        require_finite_losses(
            f"verify: the stock model on {sample.key}",
            model,
            [alone],
            lambda: _stock_losses(model, encoder, sample),
        )
        again = _stock_losses(model, encoder, sample, padding=7)
        packed = _packed_losses(model, encoder, sample, other)
    return bounded(
        NAME,
        loss_error(packed, alone),
        with_noise(LOSS_BOUND, loss_error(again, alone)),
        noise=loss_error(again, alone),
        detail=f"{sample.key}, {len(alone)} label tokens, "
        f"{counted(most.num_images, 'image')}, float32, no gradients",
        look_at="`vlmpack verify --tiny`, which says more",
    )


def _stock_losses(model: Any, encoder: Encoder, sample: EncodedSample, padding: int = 0) -> Tensor:
    """(l,) losses of the stock model, sequence by sequence, with `padding` slots at the right."""
    parts = sequences_of(sample)
    if len(parts) > 1:
        return torch.cat([_stock_losses(model, encoder, part, padding) for part in parts])
    given = stock_arguments(encoder.family, sample, **encoder.placeholders)
    fill = {"input_ids": encoder.pad_token_id, "attention_mask": 0}
    fill |= dict.fromkeys(encoder.family.token_arguments(given["input_ids"] < 0), 0)
    padded = {
        name: F.pad(value, (0, padding), value=fill[name]) if name in fill else value
        for name, value in given.items()
    }
    logits = model(use_cache=False, **padded).logits[:, : sample.length]
    return token_losses(logits, sample.labels[None], shifted=True)


def _packed_losses(
    model: Any, encoder: Encoder, sample: EncodedSample, other: EncodedSample
) -> Tensor:
    """(l,) losses of the sample packed after another one."""
    cpu, dtype = torch.device("cpu"), torch.float32
    packed = packed_model(model, encoder)
    choice = choose_attention("segments", device=cpu, dtype=dtype, image_blocks=False)
    packed.language.set_attn_implementation(register_attention(choice))
    replace_kernels(packed.language, choose_recurrence(device=cpu, dtype=dtype))
    collator = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collator([other, sample])
    losses: Tensor = packed(batch, batch.packed_seq_params())
    return losses[batch.label_positions >= other.length]
