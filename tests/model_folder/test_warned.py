"""Warnings of transformers at load: which there can be, which there are, what becomes of them."""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from support.families import FAMILIES, tiny_family_folder
from support.shards import TINY_MODEL
from transformers.utils import logging as transformers_logging

from vlmpack.backends.hf.load import load_model
from vlmpack.capabilities.served import SERVED
from vlmpack.errors import ModelError
from vlmpack.model_folder.load import load_config, load_image_processor, load_tokenizer
from vlmpack.model_folder.warned import REFUSED, WRONG_SPLIT, refused_warnings

ELSEWHERE = {
    "The tied weights mapping and config": "what a folder says of tied weights is settled apart",
    "This checkpoint seem corrupted": "missing weights are an error",
    "num_hidden_layers (*) is deprecated": "the list of layers counts; other weights are an error",
    "Requested * backend is not available": "load_image_processor looks at the backend it got",
}
"""Warnings of a change that something else takes up."""

HARMLESS = {
    "settings are as the folder says, or take effect under another name": (
        "`torch_dtype` is deprecated", "`rope_scaling` is deprecated", "`use_return_dict` is",
        "`layer_type_validation` is", "`rope_config_validation` is", "The `use_fast` parameter",
        "Passing `min_pixels` and `max_pixels`", "`self.pad_token_id` is deprecated",
        "* got `key=rope_scaling`", "Image processor *: kwargs", "`tokenizer_class` is `*` but",
        "`rope_parameters`'s ", "The explicitly set RoPE scaling factor",
        "This model config has set a `rope_parameters['original_max",
        "Missing validation function", "Missing required keys in `rope_parameters`: 'factor'",
        "`standardize_rope_params` was called", "Unrecognized keys in `rope_parameters`",
    ),
    "an id that no token has is compared with the embedding, and pads teach nothing": (
        "Model config: * must be `None` or an integer within the vocabulary",
    ),
    "not of reading a folder as it is read here": (
        "You passed `num_labels=*`", "The argument `trust_remote_code`", "* has 'model_type=*' but",
        "The encoder model config class", "Could not extract SentencePiece",
        "Could not reorder vocab", "`VisionUnfuseAndPermuteForRope`", "`torchcodec` is not",
        "Passing `tp_plan`", "A kernel_config was", "Using different dtypes per module",
        "You do not have `flash_attn`", "You are attempting to use Flash Attention",
        "Flash Attention * only", "This model is compatible with the following flash",
        "The `paged|` prefix", "Except for `paged|eager`", "We set the attention implementation",
        "* does not support setting its attention", "Skipping caching allocator",
        "* has generative capabilities", "* does not expose input embeddings",
        "Attempting to save a model", "The new embeddings will", "The new lm_head weights will",
        "You are using an old version of the checkpointing", "`gradient_checkpointing_enable`",
        "`gradient_checkpointing_disable`", "`is_gradient_checkpointing`", "Disabling kernels at",
        "You tried to access the `AttentionInterface`", "`loss_type=*` was set",
    ),
    "not of ids: of what a call is given, or of text made of ids": (
        "Attempting to cast", "Setting 'max_len_", "`max_length` is ignored", "Passing a single",
        "Token indices sequence length", "Ignoring clean_up_tokenization_spaces",
        "This sequence already has *",
    ),
}  # fmt: skip
"""Why a warning changes no id, weight or position -> how the warnings begin."""

FILES = (
    "tokenization_utils_base.py",
    "tokenization_utils_tokenizers.py",
    "configuration_utils.py",
    "modeling_rope_utils.py",
    "image_processing_base.py",
    "image_processing_utils.py",
    "video_processing_utils.py",
    "modeling_utils.py",
    "core_model_loading.py",
    "models/auto/*.py",
)
PARTS = ("mistral", "ministral3", "pixtral", "siglip", "clip")
"""Models that those of families are made of."""


def texts() -> Iterator[tuple[str, str]]:
    """(file, warning with * for what it fills in) of all that transformers can say at load."""
    root = Path(transformers.__file__).parent
    names = {name.removesuffix("_text") for name in SERVED} | set(SERVED) | set(PARTS)
    own = [
        f"models/{name}/{kind}_*.py"
        for name in sorted(names)
        for kind in ("configuration", "tokenization", "image_processing")
    ]
    for pattern in (*FILES, *own):
        for path in sorted(root.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("warning", "warning_once", "warn")
                    and node.args
                ):
                    yield path.name, _text(node.args[0])


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) if isinstance(part, ast.Constant) else "*" for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
    return "*"


def test_each_warning_that_there_can_be_is_judged() -> None:
    """A new version of transformers that warns of something else is read before it is taken."""
    known = [*ELSEWHERE, *(start for group in HARMLESS.values() for start in group)]
    found = {text for _, text in texts()}
    assert len(found) > 60
    unjudged = [
        text
        for text in sorted(found)
        if not text.startswith(tuple(known))
        and not any(re.match(pattern.replace("*", ".*"), text) for pattern in REFUSED)
        and WRONG_SPLIT not in text
        and text != "*"
    ]
    assert unjudged == []
    unused = [start for start in known if not any(text.startswith(start) for text in found)]
    assert unused == [] or transformers.__version__ < "5.24"


def seen(folder: Path) -> list[str]:
    """What transformers says of a folder when all of it is loaded."""
    with refused_warnings(folder) as said:
        load_config(folder)
        load_tokenizer(folder)
        if (folder / "preprocessor_config.json").is_file():
            try:
                load_image_processor(folder)
            except ValueError as error:
                assert "image processor" in str(error)  # those that have it on torchvision alone
        load_model(folder)
    return [text for text in said if "image processor class" not in text]


SEEN: dict[str, list[str]] = {}
"""Family -> what is said of its folder as this version of transformers writes it: nothing."""


@pytest.mark.cases(quick=("qwen2_5_vl", "llama"), slow=("mistral3", "gemma4_unified", "idefics3"))
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_of_each_family(name: str, tmp_path: Path) -> None:
    assert seen(tiny_family_folder(name, tmp_path)) == SEEN.get(name, [])


def changed(tmp_path: Path, name: str, **changes: object) -> Path:
    """A family's folder whose config.json says something else; a.b is b of the section a."""
    source = tiny_family_folder(name, tmp_path / "own")
    folder = Path(shutil.copytree(source, tmp_path / "changed"))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, value in changes.items():
        section, _, entry = key.rpartition("__")
        (content[section] if section else content)[entry] = value
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


SCALED = {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}
TURNS = ["sliding_attention", "full_attention"]
CASES = {
    "ignored factor": ("llama", {"rope_parameters": SCALED}),
    "last layer": ("gemma4_text", {"layer_types": ["sliding_attention"] * 6}),
    "ignored layers": ("mistral3", {"text_config__layer_types": TURNS}),
}  # fmt: skip


@pytest.mark.cases(quick="ignored factor", slow=("last layer", "ignored layers"))
@pytest.mark.parametrize("case", CASES)
def test_what_would_be_another_model_is_refused(case: str, tmp_path: Path) -> None:
    """Also where it was said before in this process, and where nothing is printed."""
    name, changes = CASES[case]
    folder = changed(tmp_path, name, **changes)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        for _ in range(2):
            with pytest.raises(ModelError, match=r"model\.path: .*transformers warns"):
                load_config(folder)
        assert transformers_logging.get_verbosity() == logging.ERROR
    finally:
        transformers_logging.set_verbosity(verbosity)
    load_config(tmp_path / "own")


def test_listening_prints_nothing_more(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = (logger.level, [each.level for each in logger.handlers])
    transformers_logging.set_verbosity_error()
    try:
        with refused_warnings(TINY_MODEL) as said:
            logger.getChild("tests").warning("heard")
            logger.getChild("tests").info("not heard")
    finally:
        logger.setLevel(before[0])
    assert said == ["heard"]
    assert "heard" not in capfd.readouterr().err
    assert (logger.level, [each.level for each in logger.handlers]) == before
