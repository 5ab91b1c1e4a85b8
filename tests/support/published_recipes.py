"""The recipes for models whose sizes are published: which model, which tiny twin, what for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.published_folder import published_folder
from support.published_names import PUBLISHED_CONFIGS, published_names
from support.recipes import copy_samples
from support.shards import ROOT


@dataclass(frozen=True)
class Published:
    """One of them.

    Args:
        model: by its name among the published ones.
        folder: that the recipe names.
        twin: tiny family.
        processes: of the recipe.
        on_twin: what is changed to run 3 steps of the tiny model on a CPU, in few processes.
        twin_processes: so many.
        pairs: whether it learns from pairs.
    """

    model: str
    folder: str
    twin: str
    processes: int
    on_twin: tuple[str, ...] = ()
    twin_processes: int = 1
    pairs: bool = False


PUBLISHED = {
    "qwen3_6-27b-mcore-8gpu": Published(
        "Qwen3.6-27B",
        "models/Qwen3.6-27B",
        "qwen3_5",
        8,
        ("parallelism.tensor=1", "parallelism.sequence=false"),
        twin_processes=2,
    ),
    "qwen3_6-35b-a3b-mcore-2x8gpu": Published(
        "Qwen3.6-35B-A3B",
        "models/Qwen3.6-35B-A3B",
        "qwen3_5_moe",
        16,
        ("parallelism.expert=2",),
        twin_processes=2,
    ),
    "gemma4-e4b-lora-1gpu": Published("Gemma-4-E4B", "models/gemma-4-E4B-it", "gemma4", 1),
    "gemma4-e4b-64k-8gpu": Published(
        "Gemma-4-E4B",
        "models/gemma-4-E4B-it",
        "gemma4",
        8,
        ("parallelism.context=2",),
        twin_processes=2,
    ),
    "qwen3_vl-8b-128k-cp8": Published(
        "Qwen3-VL-8B",
        "models/Qwen3-VL-8B-Instruct",
        "qwen3_vl",
        8,
        ("parallelism.context=2",),
        twin_processes=2,
    ),
    "qwen3_5-0.8b-captured-8gpu": Published("Qwen3.5-0.8B", "models/Qwen3.5-0.8B", "qwen3_5", 8),
    "qwen3_6-27b-dpo-lora-8gpu": Published(
        "Qwen3.6-27B",
        "models/Qwen3.6-27B",
        "qwen3_5",
        8,
        ("parallelism.sharding=none",),
        pairs=True,
    ),
    "qwen3_6-27b-lora-mcore-4gpu": Published(
        "Qwen3.6-27B",
        "models/Qwen3.6-27B",
        "qwen3_5",
        4,
        ("parallelism.tensor=2",),
        twin_processes=2,
    ),
}
"""By the recipe's name."""


def published_model(entry: Published, folder: Path) -> Path:
    """A folder with its config, names and shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = entry.model
    return published_folder(folder, name, PUBLISHED_CONFIGS[name], published_names()[name])


def placed(entry: Published, model: Path, root: Path, *, samples: int = 24) -> list[str]:
    """Overrides: that model, small shards, everything else in `root`."""
    source = ROOT / "assets" / ("pairs" if entry.pairs else "digits")
    shards = {name: root / f"{name}-000000.tar" for name in ("train", "val")}
    for name, shard in shards.items():
        copy_samples(source / shard.name, shard, samples if name == "train" else 4)
    return [
        f"model.path={model}",
        f"data.train={shards['train']}",
        f"data.validation={shards['val']}",
        f"data.index_dir={root / 'index'}",
        "data.num_workers=0",
        f"run_dir={root / 'run'}",
    ]
