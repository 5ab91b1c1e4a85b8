"""Every loading call of transformers that the package makes.

A model folder is data. None of its code runs, no question is asked, nothing is fetched, and weights
come from safetensors files. A folder's own classes (`auto_map`) are ignored where transformers has
a class for it, and refused by name where it has none.

`trust_remote_code=False` alone is not enough. transformers drops it on the way to nested calls (an
`image_processor_type` of "AutoProcessor" is one). A call without it asks on standard input "Do you
wish to run the custom code? [y/N]". So its time to wait for an answer is set to none, which makes
it raise instead.

transformers has two versions of most image processors, on torchvision and on PIL with numpy, and
prefers the first where torchvision is installed. Their pixels differ by up to 6e-4, so a run would
change with its environment. Here it is always the second, which has no further dependency.

A processor is composed of a tokenizer and an image processor that are already loaded:

    AutoProcessor.from_pretrained(folder)   wants torchvision: most classes have a video processor
    compose_processor(folder, ...)          the same class, with what images need and nothing else

Nothing is loaded from the folder but the values of processor_config.json.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vlmpack.capabilities.folder import read_config, refuse_adapters
from vlmpack.capabilities.versions import installed_versions
from vlmpack.errors import ModelError
from vlmpack.model_folder.mistral_split import (
    corrected,
    is_corrected,
    may_be_wrong,
    write_corrected,
)
from vlmpack.model_folder.warned import refused_warnings
from vlmpack.model_folder.weights import first
from vlmpack.whole_file import read_json

IMAGE_BACKEND = "pil"


def made_with() -> str:
    """What made lengths and pixels: `images by pil, transformers 5.24.0`."""
    return f"images by {IMAGE_BACKEND}, transformers {transformers_version()}"


@cache
def transformers_version() -> str:
    """That which is installed; looked up once, since every shard's index is named with it."""
    return str(installed_versions()["transformers"])


_AS_DATA: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}

_WEIGHTS: Mapping[str, Any] = {
    "dtype": torch.float32,
    "use_safetensors": True,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}
"""How weights are loaded, or what would be said of them."""

_GENERATION: Mapping[str, Any] = {
    "cache_dir": None,
    "force_download": False,
    "proxies": None,
    "token": None,
    "revision": None,
    "subfolder": "",
}
"""Where the generation config is: in the folder alone."""

_CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that may name code."""

_CONTRADICTIONS = (AssertionError, ArithmeticError, AttributeError, IndexError, TypeError)
"""What transformers raises for values that do not fit one another, besides OSError, ValueError and
KeyError.

Examples are a pad_token_id outside the vocabulary, and a head without channels.
"""

_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Entries of config.json by which transformers fetches a kernel, which is code, from the Hub: where
their value is a repository's name."""


def load_config(folder: Path) -> Any:
    """transformers' config of a folder, as that of dense weights.

    Raises:
        OSError, ValueError, KeyError: config.json is none that transformers takes.
        ModelError: it wants code of its own.
    """
    from transformers import AutoConfig

    with _as_data(folder), buildable(folder):
        config = AutoConfig.from_pretrained(str(folder), **_AS_DATA)
    for section in (config, config.get_text_config()):
        vars(section).pop("quantization_config", None)  # what is loaded is dense
        vars(section).pop("compression_config", None)
    return config


def config_of(values: Mapping[str, Any]) -> Any:
    """transformers' config of the content of a config.json.

    Raises:
        TypeError, ValueError: it is none that transformers takes.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(**{name: _with_floats(value) for name, value in values.items()})


def _with_floats(value: Any) -> Any:
    """A value of a config.json with floats where transformers saves infinities as objects."""
    match value:
        case {"__float__": str(name), **others} if not others:
            return float(name)
        case Mapping():
            return {name: _with_floats(part) for name, part in value.items()}
        case list():
            return [_with_floats(part) for part in value]
    return value


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder, which splits texts as the model's does; raises as
    `load_config`."""
    from transformers import AutoTokenizer

    def load(**corrections: bool) -> Any:
        return AutoTokenizer.from_pretrained(str(folder), **_AS_DATA, **corrections)

    with _as_data(folder) as said:
        return corrected(folder, load(), said, load)


def write_as_loaded(source: Path, folder: Path) -> None:
    """Correct the tokenizer.json of an exported folder, a copy of the source's, where
    `load_tokenizer` does; else it stays as it is, byte for byte."""
    if may_be_wrong(source):
        tokenizer = load_tokenizer(source)
        if is_corrected(tokenizer):
            write_corrected(tokenizer, folder)


def load_image_processor(folder: Path, **settings: Any) -> Any:
    """transformers' image processor of a folder, on PIL and numpy; raises as `load_config`.

    Raises:
        ValueError: transformers has it on another backend alone.
    """
    from transformers import AutoImageProcessor

    with _as_data(folder):
        processor: Any = AutoImageProcessor.from_pretrained(
            str(folder), backend=IMAGE_BACKEND, **_AS_DATA, **settings
        )
    backend = getattr(processor, "backend", IMAGE_BACKEND)  # classes without one know PIL alone
    if backend != IMAGE_BACKEND:
        raise ValueError(
            f"transformers has {type(processor).__name__} for the backend {backend} "
            f"alone, expected one for {IMAGE_BACKEND}"
        )
    return processor


def load_model_class(auto_class: Any, folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """A model with its weights, on CPU in float32 whatever the files' dtype.

    Returns:
        The model, and what transformers says of weights that were missing, left over or of another
        shape, which is no error here.

    Raises:
        OSError, ValueError, RuntimeError, SafetensorError: it cannot be loaded.
        ModelError: it wants code of its own, or weights from elsewhere.
    """
    with _as_data(folder), buildable(folder):
        _refuse_other_weights(folder)
        loaded: tuple[Any, Mapping[str, Any]] = auto_class.from_pretrained(
            str(folder), **_WEIGHTS, **_AS_DATA
        )
    return loaded


def load_shapes(auto_class: Any, folder: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `load_model_class` would say of these tensors, which may be without values (on the meta
    device), or slices that give one on being asked; raises as it does, and KeyError."""
    return _loaded_from(auto_class, folder, state, device_map="meta")[1]


def load_with(
    auto_class: Any, folder: Path, state: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """`load_model_class` with these tensors in place of those of the folder's files.

    It raises the same errors, and KeyError.

    Args:
        state: every tensor of its files under its name there.
    """
    model, info = _loaded_from(auto_class, folder, state)
    # transformers knows of no folder where it is given the tensors.
    model.name_or_path = model.config.name_or_path = str(folder)
    if model.can_generate():
        model.adjust_generation_fn(None, True, None, str(folder), **_GENERATION, **_AS_DATA)
    return model, info


def _loaded_from(
    auto_class: Any, folder: Path, state: Mapping[str, Any], **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    with _as_data(folder), buildable(folder):
        _refuse_other_weights(folder)
        config = load_config(folder)
        model_class = auto_class._model_mapping[type(config)]
        loaded: tuple[Any, Mapping[str, Any]] = model_class.from_pretrained(
            None, config=config, state_dict=dict(state), **options, **_WEIGHTS, **_AS_DATA
        )
    return loaded


def build_model(auto_class: Any, config: Any) -> Any:
    """A model of that config in float32, its weights as a fresh one has them.

    Raises:
        ValueError, KeyError, TypeError: transformers cannot build it.
    """
    _never_ask()
    return auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)


def build_part(part: Any) -> Any:
    """A fresh module of the class and config of a part of a model."""
    return type(part)._from_config(part.config)


@contextmanager
def buildable(folder: Path) -> Iterator[None]:
    """Values of config.json that contradict one another raise ModelError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, *_CONTRADICTIONS) as error:
        raise ModelError(
            f"model.path: {folder / 'config.json'} describes no model that transformers can build: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def _as_data(folder: Path) -> Iterator[list[str]]:
    """What would run code raises ModelError, with the names of that code, and so does a warning
    that is refused; yields all warnings."""
    _never_ask()
    _refuse_kernels(folder)
    try:
        with refused_warnings(folder) as said:
            yield said
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"model.path: {folder} wants to run its own code ({_named_code(folder)}), which "
            "vlmpack never does. Expected a folder whose classes are in transformers"
        ) from error


def _never_ask() -> None:
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def _named_code(folder: Path) -> str:
    """`preprocessor_config.json: payload.Processor`, for each entry that names code."""
    lines: list[str] = []
    for name in _CONFIGS:
        try:
            content = read_json(folder / name)
        except (OSError, ValueError, RecursionError):
            continue
        lines += [f"{name}: {code}" for _, code in _named(content, ("auto_map",)) if code]
    return first(lines) if lines else "no auto_map names it"


def _named(content: object, keys: Sequence[str]) -> Iterator[tuple[str, object]]:
    """What such entries of a file and of its sections name, each with its key."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if key not in keys:
            yield from _named(value, keys)
            continue
        for entry in value.values() if isinstance(value, Mapping) else [value]:
            yield from ((key, name) for name in (entry if isinstance(entry, list) else [entry]))


def _refuse_kernels(folder: Path) -> None:
    named = _named(read_config(folder), _KERNELS)
    kernels = sorted(f"{key}: {name}" for key, name in named if "/" in str(name))
    if kernels:
        raise ModelError(
            f"model.path: {folder / 'config.json'} names kernels of the Hub, whose code would run "
            f"({first(kernels)}); leave these entries out"
        )


def _refuse_other_weights(folder: Path) -> None:
    """transformers would load a base model from elsewhere, or other files than `weight_files`."""
    refuse_adapters(folder)
    named = read_config(folder).get("transformers_weights")
    if named is not None:
        raise ModelError(
            f"model.path: {folder / 'config.json'} says transformers_weights: {named}, which would "
            f"be loaded in place of the folder's weights; leave that entry out"
        )


_FILES = ("processor_config.json", "tokenizer_config.json", "preprocessor_config.json")


def compose_processor(folder: Path, tokenizer: Any, image_processor: Any) -> Any:
    """A folder's processor class around these two, without audio.

    Some classes ask their video processor for settings when they are made. The image processor
    stands in for it, as settings of both have one name, and is never shown a video.

    Raises:
        ValueError: the folder names no processor class of transformers, or its class cannot be made
            without what is missing here.
    """
    files = {name: _content(folder / name) for name in _FILES}
    kind = _processor_class(folder, files)
    parts = kind.get_attributes()
    takes = inspect.signature(kind.__init__).parameters
    settings = {
        name: value
        for name, value in files["processor_config.json"].items()
        if name in takes and name not in parts
    }
    seen = dict.fromkeys(("image_processor", "video_processor"), image_processor)
    given = {part: tokenizer if "tokenizer" in part else seen.get(part) for part in parts}
    composed = type(
        kind.__name__,
        (kind,),
        {"check_argument_for_proper_class": _any_class, "__module__": kind.__module__},
    )
    try:
        return composed(**given, **settings)
    except Exception as error:  # a class may ask anything of what it is made of
        raise ValueError(
            f"transformers' {kind.__name__} cannot be made of the folder's tokenizer and image "
            f"processor alone: {type(error).__name__}: {error}"
        ) from error


def _any_class(self: Any, name: str, argument: Any) -> None:
    """In place of transformers' check, which refuses a processor without one for videos."""


def _processor_class(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    registered: Mapping[str, Any] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    model_type = read_config(folder).get("model_type")
    named = [content.get("processor_class") for content in files.values()]
    name = next((name for name in named if isinstance(name, str)), None)
    name = name or registered.get(str(model_type))
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type):
        said = f"names {name}, which transformers has not" if name else "names no processor class"
        raise ValueError(f"the folder {said}, expected one of transformers' (processor_class)")
    return kind


def _content(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path, object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
