"""A tiny model of the user's own architecture: their config.json with fewer layers, their tokenizer
and processor, seeded random weights.

The cut follows from names and lengths of entries, not from the model's type. A section with layers
keeps one period of every kind of layer. Entries with a value for each layer, or with layer numbers,
are cut in the same way.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import build_model, load_config
from vlmpack.whole_file import read_json

DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "n_layer")
"""Entries that count the layers of a section."""

KINDS = (
    "layer_types",
    "layers_block_type",
    "block_types",
    "mlp_layer_types",
    "hybrid_override_pattern",
)
"""Entries that name the kind of each layer, in a list or by letters (`MEM*`); one that is shorter
than the section is deep is a period. A section that counts no layers is as deep as they are many.
"""

PERIODS = (
    "full_attention_interval",
    "sliding_window_pattern",
    "attn_layer_period",
    "decoder_sparse_step",
    "no_rope_layer_interval",
)
"""Entries by which one kind of layer comes back every so many."""

SHARED = "num_kv_shared_layers"
"""Counts the last layers, which reuse keys and values of earlier ones of their kind."""

FEWEST_LAYERS = 2

_BY_INDEX = ("_indexes", "_indices", "_idxs", "_layers")
"""How entries end that name layers by their numbers."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")

SEED = 0


@contextmanager
def tiny_model(model: Path, scratch: Path, ranks: Ranks) -> Iterator[Path]:
    """The tiny model of a folder, in a folder of its own that is gone afterwards. Collective.

    Args:
        scratch: in which that folder is made; all ranks see it. What else it holds stays.
    """

    def own_folder() -> Path:
        scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="tiny-model-", dir=scratch))

    folder = ranks.on_main(own_folder)
    try:
        ranks.on_main(lambda: write_tiny_model(model, folder))
        yield folder
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def write_tiny_model(folder: Path, target: Path) -> Path:
    """The tiny model of a folder.

    Args:
        folder: model folder in transformers format; its weights are not read.

    Raises:
        ModelError: transformers does not build a model from the cut configuration.
        CapabilityError: no family serves the model.
    """
    auto_class = family_of(folder).auto_class()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*WEIGHTS, ".*"))
    config = read_json(folder / "config.json")
    (target / "config.json").write_text(json.dumps(cut_layers(config), indent=1), encoding="utf-8")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = build_model(auto_class, load_config(target))
            stir(model)
        model.save_pretrained(str(target))
    except (ValueError, TypeError, IndexError, RuntimeError, OSError) as error:
        raise ModelError(
            f"--tiny: transformers builds no model from {folder / 'config.json'} with fewer "
            f"layers: {error}"
        ) from error
    return target


def stir(model: Any) -> None:
    """Give fresh weights of zeros or ones random values, since zeros hide all before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
                continue
            empty = ~parameter.flatten(1).any(dim=1)
            parameter[empty] = torch.randn_like(parameter[empty]).mul_(0.02)


def cut_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with fewer layers in every section that counts some."""
    cut: dict[str, Any] = {
        name: cut_layers(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
    }
    counted = [name for name in DEPTHS if isinstance(cut.get(name), int) and cut[name] > 0]
    depths = {cut[name] for name in counted} or {len(kinds) for kinds in _kinds(cut)}
    for depth in depths:
        keep = _cut_section(cut, depth)
        cut |= {name: keep for name in counted if cut[name] == depth}
    return cut


def _cut_section(section: dict[str, Any], depth: int) -> int:
    """Cut every entry of a section; the number of layers that it keeps."""
    keep = min(depth, _layers_kept(section, depth))
    for key, value in section.items():
        if key in KINDS and isinstance(value, str) and len(value) == depth:
            section[key] = value[:keep]
        elif isinstance(value, list) and value:
            section[key] = _cut_list(key, value, depth, keep)
        elif isinstance(value, Mapping) and value and all(_is_index(each) for each in value):
            section[key] = {each: said for each, said in value.items() if int(each) < keep}
    if section.get(SHARED):
        section[SHARED] = min(section[SHARED], keep // 2)
    for key in ("max_window_layers", "first_k_dense_replace"):
        if isinstance(section.get(key), int):
            section[key] = min(section[key], keep - 1)
    return keep


def _kinds(section: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key in KINDS:
        value = section.get(key)
        if isinstance(value, list | str) and value:
            yield list(value)


def _layers_kept(section: Mapping[str, Any], depth: int) -> int:
    """Layers that hold one period of every kind."""
    kept = FEWEST_LAYERS
    for kinds in _kinds(section):
        kept = max(kept, _period(kinds[:depth]) if len(kinds) >= depth else len(kinds))
    for key in PERIODS:
        if isinstance(section.get(key), int):
            kept = max(kept, section[key])
    for key, value in section.items():  # a kind that is named by its layers: room for one of each
        if _names_layers(key, value, depth):
            kept = max(kept, FEWEST_LAYERS + 1)
    return 2 * kept if section.get(SHARED) else kept  # a period that shares, of one that is shared


def _is_index(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _period(kinds: list[Any]) -> int:
    """Layers after which the kinds repeat; else those up to the last new kind."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(kind == kinds[place % period] for place, kind in enumerate(kinds)):
            return period
    first: dict[Any, int] = {kind: place for place, kind in reversed([*enumerate(kinds)])}
    return max(first.values()) + 1


def _names_layers(key: str, value: Any, depth: int) -> bool:
    """Whether an entry lists layers by index: `fullatt_block_indexes`, `mlp_only_layers` ..."""
    return (
        key.endswith(_BY_INDEX)
        and isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and 0 <= item < depth for item in value)
        and len(value) < depth
    )


def _cut_list(key: str, value: list[Any], depth: int, keep: int) -> list[Any]:
    if len(value) == depth and not key.endswith(_BY_INDEX[:3]):
        return value[:keep]
    if not _names_layers(key, value, depth):
        return value
    inside = [item for item in value if item < keep]
    return inside or [keep - 1]  # one layer of the kind that the list names
