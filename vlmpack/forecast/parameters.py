"""A model's sizes from the files of its folder: headers of safetensors files and config.json.

No weight is read. If there are no weights, the class that config.json names is built without
storage. Layers of one decoder may be of several kinds: attention or a recurrence, an MLP or
experts. Shapes show the kind in any family. config.json adds what shapes cannot show, such as
widths of states and experts of a token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmpack.capabilities.config import is_prediction
from vlmpack.errors import ModelError
from vlmpack.families.configs import whole_config
from vlmpack.model_folder.quantised import dense_headers, is_quantised
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.model_folder.weights import weight_files
from vlmpack.whole_file import read_json

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name; of one layer, by the name inside of it."""

_LAYER_PATH = re.compile(r"^(.*\blayers)\.(\d+)\.(.+)$")
_ATTENTION = re.compile(r"(^|\.)\w*(attn|attention|qkv|q_proj|k_proj)\.")
_UP = re.compile(r"(?:^|\.)(up_proj|gate_up_proj|input_linear|w1|w3|fc1|gate_proj)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSizes:
    """A layer that carries state.

    Args:
        kind: its recurrence; a convolution alone where nothing follows it.
        channels: D, of the convolution.
        heads: H, of the state.
        keys: columns of all keys (B and C of a scan have as many each), before heads share them.
        key_width: K, of a head's key.
        inner: columns of all values, H times V.
    """

    kind: Literal["delta_rule", "scan", "convolution"]
    channels: int
    heads: int = 0
    keys: int = 0
    key_width: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """A layer of the decoder.

    Args:
        norms: over the decoder's width.
        query, key: total width of query heads and of key heads; 0 without attention. Keys are 0
            also if the layer reads another layer's.
        gate: columns that the output of attention is multiplied with.
        head_norms: columns of query and key heads that pass a norm.
        mlp: columns of the MLP that a token passes through, over its chosen experts.
        sent: columns of a token's copies to its experts.
        choices: experts that a token is sent to.
        shared: columns of experts that every token passes.
        own_input: width of the layer's own input (per-layer inputs).
    """

    norms: int = 2
    query: int = 0
    key: int = 0
    gate: int = 0
    head_norms: int = 0
    mlp: int = 0
    gated: bool = True
    sent: int = 0
    choices: int = 0
    shared: int = 0
    own_input: int = 0
    recurrent: RecurrentSizes | None = None


def decoder_layers(shapes: Shapes, text: Mapping[str, Any]) -> tuple[LayerSizes, ...]:
    """The layers of a decoder, in order.

    Args:
        shapes: of the model's tensors without its towers.
        text: the decoder's section of config.json.

    Raises:
        KeyError: neither names nor config.json give the sizes.
    """
    layers = _by_layer(shapes)
    if not layers:
        return (_plain(text),) * int(text["num_hidden_layers"])
    known = any(_ATTENTION.search(name) for layer in layers for name in layer)
    normed = any(_norms(layer, text["hidden_size"]) for layer in layers)
    mlps = any(_up(layer) for layer in layers)
    counted = []
    for layer in layers:
        recurrent = _recurrent(layer, text)
        rest = _without_recurrence(layer)
        query, key, gate = _attention(rest, text, known or recurrent is not None)
        columns, sent, choices, shared = _mlp(layer, text, mlps)
        counted.append(
            LayerSizes(
                norms=_norms(layer, text["hidden_size"]) if normed else 2,
                query=query,
                key=key,
                gate=gate,
                head_norms=_head_norms(rest, query, key),
                mlp=columns,
                gated=_gated(layer),
                sent=sent,
                choices=choices,
                shared=shared,
                own_input=layer.get("per_layer_input_gate.weight", (0,))[0],
                recurrent=recurrent,
            )
        )
    return tuple(counted)


def _by_layer(shapes: Shapes) -> list[Shapes]:
    """The shapes of each layer, of the largest stack of layers."""
    stacks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        if match := _LAYER_PATH.match(name):
            layers = stacks.setdefault(match[1], {})
            layers.setdefault(int(match[2]), {})[match[3]] = shape
    deepest = max(stacks.values(), key=len, default={})
    return [deepest[number] for number in sorted(deepest)]


def _plain(text: Mapping[str, Any]) -> LayerSizes:
    query, key = _configured_heads(text)
    return LayerSizes(query=query, key=key, mlp=text["intermediate_size"])


def _configured_heads(text: Mapping[str, Any]) -> tuple[int, int]:
    heads = text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // heads
    return heads * width, (text.get("num_key_value_heads") or heads) * width


def _attention(layer: Shapes, text: Mapping[str, Any], known: bool) -> tuple[int, int, int]:
    """Columns of queries, of keys, and of a gate."""
    inside = {name.rpartition(".")[0].rpartition(".")[2]: shape for name, shape in layer.items()
              if name.endswith(".weight")}  # fmt: skip
    queries, given = inside.get("q_proj"), inside.get("o_proj") or inside.get("out_proj")
    if "kv_b_proj" in inside:  # latent attention: keys and values are made for every head
        queries = inside.get("q_b_proj") or queries
        if queries is not None and given is not None:
            return queries[0], given[1], 0
    if queries is not None and given is not None:
        query = given[1]
        return query, inside.get("k_proj", (0,))[0], queries[0] - query
    if known and not any(_ATTENTION.search(name) for name in layer):
        return 0, 0, 0
    return *_configured_heads(text), 0


def _without_recurrence(layer: Shapes) -> Shapes:
    """Shapes of a layer without those of its recurrence."""
    homes = {
        name.removesuffix("A_log")
        if name.endswith("A_log")
        else name[: re.search(r"[^.]*conv", name).start()]  # type: ignore[union-attr]
        for name, shape in layer.items()
        if name.endswith("A_log") or _is_convolution(name, shape)
    }
    return {
        name: shape
        for name, shape in layer.items()
        if not any(name.startswith(home) for home in homes if home)
    }


def _is_convolution(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and "conv" in name


def _head_norms(layer: Shapes, query: int, key: int) -> int:
    return sum(
        columns
        for columns, name in ((query, r"\bq_(layer)?norm"), (key, r"\bk_(layer)?norm"))
        if any(re.search(name, one) for one in layer)
    )


def _norms(layer: Shapes, hidden: int) -> int:
    return sum(shape == (hidden,) and "norm" in name for name, shape in layer.items())


def _up(layer: Shapes) -> list[tuple[str, int]]:
    """Matrices into an MLP's columns, of no expert that a router chooses: name and columns."""
    shapes = []
    for name, shape in layer.items():
        if (match := _UP.search(name)) and not _of_experts(name, shape):
            both = match[1] in ("gate_up_proj", "input_linear")
            shapes.append((match[1], shape[0] // (1 + both)))
    return shapes


def _of_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor belongs to routed experts: by name, or all of them in one tensor."""
    return ".experts." in f".{name}" or ("moe" in name and len(shape) == 3)


def _gated(layer: Shapes) -> bool:
    """Whether the MLP multiplies two halves; assumed if names do not say."""
    return not (
        any("up_proj" in name for name in layer)
        and any("down_proj" in name for name in layer)
        and not any("gate_proj" in name or "gate_up_proj" in name for name in layer)
    )


def _mlp(layer: Shapes, text: Mapping[str, Any], known: bool) -> tuple[int, int, int, int]:
    """Columns that a token passes, columns of its expert copies, their number, shared columns."""
    ups = _up(layer)
    # Two matrices of a gated MLP lead into the same columns.
    halves = {"gate_proj", "up_proj"} <= {kind for kind, _ in ups} or {"w1", "w3"} <= {
        kind for kind, _ in ups
    }
    columns = sum(each for _, each in ups) // (1 + halves)
    if not known:  # a stack of scans alone (Mamba-2) has no MLPs
        has_none = _recurrent(layer, text) is not None
        columns = text.get("intermediate_size", 0) if has_none else text["intermediate_size"]
    if not any(_of_experts(name, shape) for name, shape in layer.items()):
        return columns, 0, 0, 0
    choices = text.get("num_experts_per_tok") or text.get("top_k_experts") or 0
    each = text.get("moe_intermediate_size") or text["intermediate_size"]
    if isinstance(each, (list, tuple)):  # ERNIE's: of experts for text, and of those for images
        each = max(each)
    sent = text.get("moe_latent_size") or text["hidden_size"]
    return columns + choices * each, choices * sent, choices, columns


def _recurrent(layer: Shapes, text: Mapping[str, Any]) -> RecurrentSizes | None:
    """The layer's recurrence, known by its convolution and the source of its decays."""
    channels = sum(shape[0] for name, shape in layer.items() if _is_convolution(name, shape))
    if not channels:
        return None
    heads = next((shape[0] for name, shape in layer.items() if name.endswith("A_log")), 0)
    if not heads:
        return RecurrentSizes(kind="convolution", channels=channels)
    if "linear_key_head_dim" in text:
        width = text["linear_key_head_dim"]
        keys, kind = width * text["linear_num_key_heads"], "delta_rule"
    else:
        width = _first(text, "ssm_state_size", "mamba_d_state", "state_size")
        keys, kind = width * _first(text, "n_groups", "mamba_n_groups", "mamba_ngroups"), "scan"
    return RecurrentSizes(
        kind="delta_rule" if kind == "delta_rule" else "scan",
        channels=channels,
        heads=heads,
        keys=keys,
        key_width=width,
        inner=channels - 2 * keys,
    )


def _first(text: Mapping[str, Any], *keys: str) -> int:
    """The value of the first spelling that a config has."""
    for key in keys:
        if text.get(key):
            return int(text[key])
    raise KeyError(keys[0])


_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The vision tower's sizes.

    One matrix may make queries, keys and values, which then lie in one tensor.
    """

    blocks: int
    width: int
    intermediate: int
    gated: bool
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes that memory depends on.

    Args:
        tower, embedding, head: parameters outside the decoder layers; an audio tower counts with
            the vision tower, the head's are 0 where it shares the embedding.
        layers: parameters of all decoder layers that every expert-parallel rank holds, matrices.
        vectors: those of the layers that are no matrices (norms, biases), and the final norm.
        experts: parameters of all experts of all layers.
        largest_block: of one decoder layer or vision block.
        outside: parameters in no layer or block: embedding, head, final norm, the tower's patch
            embedding and the projector.
        vocabulary: rows of the head.
        query_heads: of a layer with attention; 0 if unknown.
    """

    tower: int
    embedding: int
    head: int
    layers: int
    vectors: int
    experts: int
    largest_block: int
    outside: int
    hidden: int
    decoder: tuple[LayerSizes, ...]
    vocabulary: int
    vision: TowerSizes | None
    files: str
    query_heads: int = 0

    @property
    def parameters(self) -> int:
        dense = self.tower + self.embedding + self.head
        return dense + self.layers + self.vectors + self.experts

    @property
    def num_layers(self) -> int:
        return len(self.decoder)


class UnknownSizesError(ModelError):
    """Neither config.json nor the tensors' names give the needed sizes."""


def read_sizes(folder: Path) -> ModelSizes | None:
    """The sizes of a model folder; None where it has no safetensors file.

    Raises:
        ModelError: a file is missing, or is no safetensors file.
        UnknownSizesError: a config.json without the sizes of a decoder.
    """
    if next(folder.glob("*.safetensors"), None) is None:
        return None
    paths = weight_files(folder)  # not all there are: some folders hold the weights twice
    shapes: dict[str, tuple[int, ...]] = {}
    if is_quantised(folder):
        shapes = {name: tuple(tensor.shape) for name, tensor in dense_headers(folder).items()}
    else:
        for path in paths:
            shapes.update(read_shapes(path))
    return _of_folder(shapes, folder, f"{len(paths)} safetensors header{'s'[: len(paths) > 1]}")


def built_sizes(auto_class: Any, folder: Path) -> ModelSizes:
    """The sizes of a model whose weights are not there, as transformers builds it from config.json,
    without storage.

    Args:
        folder: with config.json; an index of weights, or files that it lists, are not looked at.

    Raises:
        UnknownSizesError: a config.json that transformers cannot build, or that lacks the sizes of
            a decoder.
    """
    from vlmpack.backends.skeleton import model_skeleton

    try:
        model = model_skeleton(auto_class, folder)
    except ModelError as error:
        raise UnknownSizesError(f"{error}; memory cannot be estimated") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return _of_folder(shapes, folder, "config.json, as transformers builds it")


def _of_folder(shapes: Mapping[str, tuple[int, ...]], folder: Path, files: str) -> ModelSizes:
    config = read_json(folder / "config.json")
    if "model_type" in config:
        config = whole_config(config)
    try:
        return _sizes(shapes, config, files)
    except (KeyError, TypeError) as error:
        raise UnknownSizesError(
            f"model.path: {folder / 'config.json'} does not say {error}, so memory cannot be "
            "estimated"
        ) from error


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file's tensors.

    Raises:
        ModelError: a file that cannot be read, or is no safetensors file.
    """
    try:
        return {tensor.name: tensor.shape for tensor in tensors_of(path, whole=False)}
    except ValueError as error:
        raise ModelError(f"model.path: {error}") from error


def block_of(name: str) -> str | None:
    """The decoder layer or vision block of a parameter or module; None outside of them."""
    block = re.match(r"(.*\b(?:layers|blocks)\.\d+)\.", name)
    return None if block is None else block[1]


def _sizes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], files: str
) -> ModelSizes:
    groups = dict.fromkeys(("tower", "embedding", "head", "layers", "vectors", "experts"), 0)
    blocks: dict[str, int] = {}
    held = {name: shape for name, shape in shapes.items() if not is_prediction(name, config)}
    for name, shape in held.items():
        count = math.prod(shape)
        groups[_group(name, shape)] += count
        block = block_of(name)
        if block is not None:
            blocks[block] = blocks.get(block, 0) + count
    text: Mapping[str, Any] = config.get("text_config") or config
    language = {name: shape for name, shape in held.items() if _group(name, shape) != "tower"}
    return ModelSizes(
        **groups,
        largest_block=max(blocks.values(), default=0),
        outside=sum(groups.values()) - sum(blocks.values()),
        hidden=text["hidden_size"],
        decoder=decoder_layers(language, text),
        vocabulary=text["vocab_size"],
        vision=_tower(config.get("vision_config"), held) if groups["tower"] else None,
        files=files,
        query_heads=text.get("num_attention_heads") or 0,
    )


def _group(name: str, shape: tuple[int, ...]) -> str:
    if re.search(r"(^|\.)(visual|vision_tower|vision_model|audio_tower)\.", name):
        return "tower"
    if "embed_tokens" in name or name.endswith(".embeddings.weight"):
        return "embedding"
    if "lm_head" in name:
        return "head"
    if ".experts." in name:
        return "experts"
    return "layers" if len(shape) > 1 and _LAYER.search(name) else "vectors"


def _tower(
    vision: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> TowerSizes | None:
    if vision is None:
        return None
    # Qwen2-VL calls the width embed_dim, and its hidden_size is the language model's.
    width = vision.get("embed_dim") or vision["hidden_size"]
    return TowerSizes(
        blocks=vision.get("depth") or vision["num_hidden_layers"],
        width=width,
        intermediate=vision.get("intermediate_size")
        or vision.get("mlp_dim")
        or int(width * vision["mlp_ratio"]),
        gated=vision.get("hidden_act") == "silu",
        fused=any(name.endswith(".attn.qkv.weight") for name in shapes),
    )
