"""A recipe's training policy, and the table of what it comes to in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmpack.backends.policy import ComponentCount, TrainingPolicy
from vlmpack.recipe import Recipe

COLUMNS = ("component", "mode", "parameters", "trained", "share", "peak lr", "weight decay")


def policy_of(recipe: Recipe) -> TrainingPolicy:
    """What the recipe's `trainable` and `optim` say."""
    return TrainingPolicy(trainable=recipe.trainable, optim=recipe.optim, seed=recipe.training.seed)


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
