"""Recipe -> training policy, checked against the model before any data is read; and its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlmpack.backends.policy import ComponentCount, TrainingPolicy
from vlmpack.build.adapter import open_adapter
from vlmpack.encode import Encoder
from vlmpack.recipe import Recipe

COLUMNS = ("component", "mode", "parameters", "trained", "share", "peak lr", "weight decay")


def policy_of(recipe: Recipe) -> TrainingPolicy:
    """What the recipe's `trainable` and `optim` say."""
    return TrainingPolicy(trainable=recipe.trainable, optim=recipe.optim, seed=recipe.training.seed)


def check_policy(
    policy: TrainingPolicy, encoder: Encoder, device: torch.device, *, adapter: str | None = None
) -> None:
    """See that the model and this machine can be trained like that, without reading a weight.

    Args:
        policy: what is trained.
        encoder: of the model folder.
        device: that trains.
        adapter: folder of the adapters that training goes on with.

    Raises:
        CapabilityError: adapters without a layer to go to, or 4-bit weights without a GPU.
        ModelError: the model folder's config.json is none that transformers knows, or the adapters
            that training goes on with are others than the policy has.
    """
    if policy.lora is None:
        return
    from vlmpack.backends.hf.adapters import adapter_targets
    from vlmpack.backends.hf.quantize import check_quantization
    from vlmpack.backends.skeleton import model_skeleton

    if policy.lora.quantize != "none":
        check_quantization(device)
    if adapter is not None:
        open_adapter(Path(adapter), policy, encoder)
        return
    family = encoder.family
    skeleton = model_skeleton(family.auto_class(), encoder.folder)
    adapter_targets(skeleton, family.modules, policy)


def policy_rows(counts: Sequence[ComponentCount], policy: TrainingPolicy) -> list[dict[str, Any]]:
    """The table's rows, as figures; written to `trainable.json`."""
    optim, lora = policy.optim, policy.trainable.lora
    return [
        {
            "component": count.component,
            "mode": count.mode,
            "parameters": count.parameters,
            "trained": count.trained,
            "trained_tensors": count.tensors,
            "peak_lr": optim.peak(count.component) if count.trained else None,
            "weight_decay": optim.weight_decay if count.trained else None,
            "decayed": count.decayed,
            "lora": lora.model_dump(mode="json") if count.mode == "lora" else None,
        }
        for count in counts
    ]


def policy_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of text, aligned: one a component, and the sum."""
    cells = [list(COLUMNS)]
    for row in rows:
        trained, total = row["trained"], row["parameters"]
        cells.append(
            [
                row["component"],
                _mode(row),
                f"{total:,}",
                f"{trained:,}",
                f"{trained / max(1, total):.2%}",
                f"{row['peak_lr']:.3g}" if trained else "-",
                _decay(row),
            ]
        )
    trained, total = (sum(row[key] for row in rows) for key in ("trained", "parameters"))
    share = f"{trained / max(1, total):.2%}"
    cells.append(["all", "", f"{total:,}", f"{trained:,}", share, "", ""])
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return [
        "  ".join(
            text.ljust(width) if column < 2 or column == 6 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _mode(row: dict[str, Any]) -> str:
    lora = row["lora"]
    if lora is None:
        return str(row["mode"])
    extra = "".join(f" {name}" for name in ("dora", "rslora") if lora[name])
    bits = "" if lora["quantize"] == "none" else f" {lora['quantize']}"
    return f"lora r={lora['rank']} alpha={lora['alpha']:g}{extra}{bits}"


def _decay(row: dict[str, Any]) -> str:
    if not row["trained"]:
        return "-"
    if not row["weight_decay"]:
        return "0"
    return f"{row['weight_decay']:g} on {row['decayed']:,}"
