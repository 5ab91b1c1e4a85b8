"""A tiny model folder of any class of transformers, written from nothing but the class.

tokenizer.json              bytes, and every special token that the processor's sources name
preprocessor_config.json    the image processor's defaults, with small sizes
config.json                 the class's defaults with small sizes, by the names of entries
weights                     random, seeded
chat_template.jinja         ChatML, an image by the processor's own token

What a class needs beyond that stands in `classes.py`. No two sizes are equal, as far as the class
leaves the choice.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tools.sweep.classes import CLASSES, ClassFacts
from vlmpack.capabilities.refused import kind_of
from vlmpack.errors import CapabilityError
from vlmpack.model_folder.load import IMAGE_BACKEND, build_model, config_of, load_tokenizer
from vlmpack.proof.verify.run import stir

LAYERS = 2

HIDDEN = 64

TILE = 56
"""Side of the images that a tower of fixed size is made for, in pixels."""

TEXT: Mapping[str, int] = {
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 4096,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "query_pre_attn_scalar": 24,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_head": HIDDEN // 2,
    "mamba_headdim": HIDDEN // 2,
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "state_size": 16,
    "chunk_size": 64,
    "adapter_rank": 8,
    "shared_intermediate_size": 32,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": HIDDEN // 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "block_ff_dim": 96,
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_inner": 96,
    "n_positions": 4096,
    "num_layers": LAYERS,
    "num_heads": 4,
}
"""Sizes of the language model."""

VISION: Mapping[str, int] = {
    "hidden_size": 48,
    "embed_dim": 48,
    "d_model": 48,
    "intermediate_size": 80,
    "mlp_dim": 80,
    "depth": LAYERS,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "layers": LAYERS,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "out_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "output_dim": HIDDEN,
    "projection_dim": 32,
    "num_position_embeddings": 64,
    "image_size": TILE,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "window_size": TILE,
    "patch_embed_hidden_size": 48,
    "encoder_hidden_size": 48,
}
"""Sizes of the tower, and of what lies between the two."""

FORGOTTEN = (
    "id2label",
    "label2id",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "dtype",
)

KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")

LEFT_OUT = ("per_layer_config", "kv_source_layers", "no_rope_layers")
"""Entries about single layers of the many, without which a class does too."""


def tiny_config(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The content of a config.json with small sizes.

    Args:
        config: that of the class's defaults.
        vocab_size: of the tokenizer.
    """
    return _section(config, vocab_size, is_vision=False)


def _section(config: Mapping[str, Any], vocab_size: int, *, is_vision: bool) -> dict[str, Any]:
    sizes = VISION if is_vision else TEXT
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in FORGOTTEN or name in LEFT_OUT:
            continue
        if isinstance(value, Mapping) and name.endswith("_config"):
            other = any(part in name for part in ("vision", "vit", "qformer", "audio", "projector"))
            found[name] = _section(value, vocab_size, is_vision=other)
        elif name in ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"):
            found[name] = vocab_size
        elif name in sizes and _is_number(value):
            found[name] = sizes[name]
        elif name in KINDS and isinstance(value, list):
            found[name] = _kinds(value)
        elif _names_layers(name, value):
            found[name] = [0]
        else:
            found[name] = value
    if "kv_lora_rank" in found:  # latent attention has keys for every head
        found["num_key_value_heads"] = found["num_attention_heads"]
    _same_number_of_layers(found)
    if not is_vision:
        _rotary(found)
    return found


def _names_layers(name: str, value: Any) -> bool:
    listed = name.startswith("deepstack") or name.endswith(("_block_indexes", "_attn_indexes"))
    return listed and isinstance(value, list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kinds(kinds: list[Any]) -> list[Any]:
    """One of each kind, as many as there are layers at least."""
    each = list(dict.fromkeys(kinds))
    return (each * LAYERS)[: max(LAYERS, len(each))]


def _same_number_of_layers(section: dict[str, Any]) -> None:
    """As many layers as kinds of them are listed."""
    listed = [name for name in KINDS if isinstance(section.get(name), list)]
    if not listed or "num_hidden_layers" not in section:
        return
    count = section["num_hidden_layers"] = max(len(section[name]) for name in listed)
    for name in listed:
        section[name] = (section[name] * count)[:count]


def _rotary(section: dict[str, Any]) -> None:
    """Sections of MRoPE that sum to half of a head; classes without it pass them over."""
    rope = section.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope or "hidden_size" not in section:
        return
    head = section.get("head_dim") or section["hidden_size"] // section["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    thirds = [half - 2 * (half // 3), half // 3, half // 3]
    section["rope_parameters"] = {**rope, "mrope_section": thirds}


SEED = 0

TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

SPARE = 40
"""Special tokens for ids that config.json names and nobody writes."""

ENCODER_DECODERS = ("vision-encoder-decoder", "mllama", "idefics", "evolla", "blip")
"""Those whose config does not say so."""

_LITERAL = re.compile(r"[\"'](<[^\"'<>\s]+>|\[[A-Z_]+\])[\"']")
_ASKED = re.compile(r"tokenizer\.(\w+_token)\b")

_SIDES: Mapping[str, int] = {"height": TILE, "width": TILE}


def write_folder(model_type: str, target: Path) -> Path:
    """The folder of a class.

    Args:
        model_type: that transformers registers for images and text, or for text alone.
        target: an empty folder.

    Raises:
        CapabilityError: a processor or a model of the class cannot be made; the message says what
            is missing.
    """
    facts = CLASSES.get(model_type, ClassFacts())
    _refuse_encoder_decoders(model_type)
    if facts.text_alone or kind_of(model_type) == "text":
        return _write_language_model(model_type, target, facts)
    kind, images = _processor_classes(model_type, facts)
    processor = _image_processor(images, facts)
    tokens, named = _tokens_of(kind, facts)
    size = _write_tokenizer(target, tokens, named)
    _write_json(target / "config.json", {"model_type": model_type})
    _write_json(target / "preprocessor_config.json", processor)
    _write_json(
        target / "processor_config.json", {"processor_class": kind.__name__, **facts.processor}
    )
    marker, placeholder = _image_tokens(target, facts)
    (target / "chat_template.jinja").write_text(
        _template(marker.join(facts.around)), encoding="utf-8"
    )
    config = _config(model_type, facts, size, placeholder, target)
    _write_json(target / "config.json", config)
    write_model(config, target)
    return target


def _write_language_model(model_type: str, target: Path, facts: ClassFacts) -> Path:
    size = _write_tokenizer(target, facts.words, facts.tokens)
    (target / "chat_template.jinja").write_text(_template(""), encoding="utf-8")
    _write_json(target / "config.json", {"model_type": model_type})
    config = _merged(tiny_config(_defaults(model_type), size), facts.config)
    _renumber(config, facts, load_tokenizer(target), "<|endoftext|>")
    _write_json(target / "config.json", config)
    kind = kind_of(model_type)
    write_model(config, target, *(["AutoModelForCausalLM"] if kind == "text" else []))
    return target


def _defaults(model_type: str) -> dict[str, Any]:
    """A config.json of the class's defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    return {**found, "model_type": model_type}


def _refuse_encoder_decoders(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    if model_type in ENCODER_DECODERS or getattr(kind(), "is_encoder_decoder", False):
        raise CapabilityError(
            "its text attends to what an encoder made by cross attention, where nothing tells the "
            "images of one packed sample from those of the next"
        )


def _processor_classes(model_type: str, facts: ClassFacts) -> tuple[Any, Any]:
    """The classes of the processor and of its image processor on PIL."""
    import transformers
    from transformers.models.auto import image_processing_auto, processing_auto

    processors: Mapping[str, Any] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    image_processors: Mapping[str, Any] = vars(image_processing_auto)[
        "IMAGE_PROCESSOR_MAPPING_NAMES"
    ]
    name = facts.processor_class or processors.get(model_type)
    if name is None:
        raise CapabilityError("transformers registers no processor for it")
    images = facts.image_processor_class or image_processors.get(model_type)
    if isinstance(images, Mapping):
        found = images.get(IMAGE_BACKEND)
        if found is None:
            raise CapabilityError(
                f"transformers has its image processor ({images.get('torchvision')}) for "
                f"torchvision alone, none on PIL"
            )
        images = found
    if images is None:
        raise CapabilityError("transformers registers no image processor for it")
    return getattr(transformers, name), getattr(transformers, images)


GRIDS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
"""(height, width) of the grids of tiles that an image may become."""


def _image_processor(kind: Any, facts: ClassFacts) -> dict[str, Any]:
    """The content of preprocessor_config.json."""
    try:
        content: dict[str, Any] = json.loads(kind().to_json_string())
    except ImportError as error:
        raise CapabilityError(
            f"its image processor wants a package: {_first_line(error)}"
        ) from error
    if content.get("crop_size"):
        content["crop_size"] = dict(_SIDES)
    size = content.get("size")
    if isinstance(size, Mapping) and set(size) == {"height", "width"}:
        content["size"] = dict(_SIDES)
    elif isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        content["size"] = {"shortest_edge": TILE}
    if isinstance(content.get("image_grid_pinpoints"), list):
        content["image_grid_pinpoints"] = GRIDS
    return {**content, **facts.images}


def _tokens_of(kind: Any, facts: ClassFacts) -> tuple[list[str], dict[str, str]]:
    """Special tokens that the processor's sources write or ask the tokenizer for, by name."""
    try:
        source = inspect.getsource(import_module(kind.__module__))
    except ImportError as error:
        raise CapabilityError(f"its processor wants a package: {_first_line(error)}") from error
    tokens = [*dict.fromkeys([*_LITERAL.findall(source), *facts.tokens.values(), *facts.words])]
    asked = {
        name
        for name in _ASKED.findall(source)
        if name not in ("pad_token", "eos_token", "bos_token")
    }
    named = {name: f"<|{name}|>" for name in sorted(asked)} | dict(facts.tokens)
    return tokens, named


def _write_tokenizer(target: Path, tokens: Sequence[str], named: Mapping[str, str]) -> int:
    """A byte-level tokenizer; returns its vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        extra_special_tokens=dict(named),
    )
    extra = [*TURNS, *tokens, *named.values(), *(f"<|spare_{n}|>" for n in range(SPARE))]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(extra))})
    tokenizer.save_pretrained(str(target))
    return len(tokenizer)


def _image_tokens(target: Path, facts: ClassFacts) -> tuple[str, str]:
    """What the template writes for an image, and the token that its features replace: the one that
    the processor repeats."""
    from PIL.Image import new

    from vlmpack.families.generic_images import open_processor, written_by_call

    open_processor.cache_clear()
    try:
        processor = open_processor(target)
    except ValueError as error:
        raise CapabilityError(str(error)) from error
    marker = getattr(processor, "image_token", None)
    marker = getattr(marker, "content", marker)
    if not isinstance(marker, str):
        raise CapabilityError(f"{type(processor).__name__} names no image_token")
    merged = processor._merge_kwargs(
        tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
    )
    image = new("RGB", (90, 60))
    try:
        _, texts = processor._process_images([[image]], **merged["images_kwargs"])
    except NotImplementedError:
        _, texts = written_by_call(processor, image)
    special = processor.tokenizer.get_added_vocab()
    ids = [t for t in processor.tokenizer.tokenize(texts[0]) if t in special]
    if facts.placeholder:
        return marker, facts.placeholder
    if not ids:
        raise CapabilityError(f"{type(processor).__name__} writes no special token for an image")
    return marker, max(dict.fromkeys(ids), key=ids.count)


def _config(
    model_type: str, facts: ClassFacts, vocab_size: int, placeholder: str, target: Path
) -> dict[str, Any]:
    """The content of config.json: small sizes, and ids of this tokenizer."""
    from vlmpack.families.generic_images import open_processor

    processor = open_processor(target)
    tiny = tiny_config(_defaults(model_type), vocab_size)
    _fit_tower(tiny, processor.image_processor)
    config = _merged(tiny, facts.config)
    _renumber(config, facts, processor.tokenizer, placeholder)
    return config


def _renumber(config: dict[str, Any], facts: ClassFacts, tokenizer: Any, placeholder: str) -> None:
    """Every id that config.json names becomes one of this tokenizer."""
    spare = iter([f"<|spare_{n}|>" for n in range(SPARE)])
    given: dict[str, int] = {}
    known = tokenizer.get_added_vocab()

    def token_of(name: str) -> str:
        if named := facts.tokens.get(name.removesuffix("_id")):
            return named
        own = f"<|{name.removesuffix('_token_id')}|>"
        return own if own in known else next(spare)

    def renumber(section: dict[str, Any]) -> None:
        for name, value in section.items():
            if isinstance(value, dict):
                renumber(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                if name in ("image_token_id", "image_token_index"):
                    section[name] = tokenizer.convert_tokens_to_ids(placeholder)
                elif name in ("pad_token_id", "bos_token_id", "eos_token_id", "_pad_token_id"):
                    section[name] = tokenizer.convert_tokens_to_ids("<|endoftext|>")
                elif name.endswith(("_token_id", "_token_index", "_id")):
                    if name not in given:
                        given[name] = tokenizer.convert_tokens_to_ids(token_of(name))
                    section[name] = given[name]

    renumber(config)


def _fit_tower(config: dict[str, Any], images: Any) -> None:
    """The tower's patches are those of the image processor."""
    if "image_grid_pinpoints" in config:
        config["image_grid_pinpoints"] = GRIDS
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return
    patch = getattr(images, "patch_size", None)
    patch = patch["height"] if isinstance(patch, Mapping) else patch
    said = {
        "patch_size": patch if isinstance(patch, int) else PATCH,
        "spatial_merge_size": getattr(images, "merge_size", None),
        "temporal_patch_size": getattr(images, "temporal_patch_size", None),
    }
    vision |= {name: value for name, value in said.items() if name in vision and value is not None}


PATCH = 14
"""Side of a patch where the image processor has none."""


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name, value in changes.items():
        mine = found.get(name)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            value = _merged(mine, value)
        found[name] = value
    return found


def write_model(
    config: Mapping[str, Any], target: Path, auto_class: str = "AutoModelForImageTextToText"
) -> None:
    """Seeded random weights.

    Raises:
        CapabilityError: transformers builds no model of it.
    """
    import transformers

    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = build_model(getattr(transformers, auto_class), config_of(config))
            stir(model)
        model.save_pretrained(str(target))
    except ImportError as error:
        raise CapabilityError(f"its model wants a package: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _template(marker: str) -> str:
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{- '" + marker + "' -}}"
        "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
