"""`import vlmpack`: cheap, free of torch, and exactly these names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import vlmpack

NAMES = [
    "Callback",
    "Drawing",
    "Encoder",
    "Event",
    "ExtensionError",
    "FinetuneResult",
    "Objective",
    "Recipe",
    "STOP",
    "VlmpackError",
    "encode_sample",
    "finetune",
    "judge",
    "load_recipe",
    "pack_batch_sequences",
    "pack_padded_batch",
    "packed_model",
    "replay",
    "sample",
    "vlm_step",
]

SIGNATURES = {
    "Encoder": "(folder, settings=EncoderSettings(loss_on='assistant', learn='all_turns',"
    " pairs=False, rollouts=False, share_prefix=False, max_image_pixels=50000000,"
    " budget=ImagesSection(min_pixels=None, max_pixels=None, max_tiles=None), date=None,"
    " chat_template_kwargs=None, special_tokens=None, coordinates=None, boxes_in_text='keep'))",
    "encode_sample": "(encoder, record, images=None, *, key='sample')",
    "finetune": "(recipe, *, sources=None, objective=None, metrics=None, callbacks=(),"
    " **overrides)",
    "pack_batch_sequences": "(samples, *, pad_to_multiple_of=1, pad_token_id, total_multiple_of=1,"
    " fixed=None, share_prefix=False)",
    "packed_model": "(model, encoder, *, attention='auto', device=None, dtype=None,"
    " recurrence='auto')",
    "vlm_step": "(data_iterator, model)",
}
"""Of what a loop of a user's own calls: they stay, or grow at the end by what has a default."""

IMPORT = """
import sys, time
start = time.perf_counter()
import vlmpack
seconds = time.perf_counter() - start
dir(vlmpack)
heavy = {"torch", "numpy", "transformers", "accelerate", "pydantic", "pyarrow", "PIL", "rich"}
print(seconds, ",".join(sorted(heavy & set(sys.modules))))
"""


def imported():
    """Seconds that the import took in a fresh process, and the heavy modules that it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, _, heavy = done.stdout.strip("\n").partition(" ")
    return float(seconds), heavy


def test_importing_loads_no_torch_and_takes_under_300_ms():
    runs = [imported() for _ in range(3)]
    assert [heavy for _, heavy in runs] == ["", "", ""]
    assert min(seconds for seconds, _ in runs) < 0.3


def test_the_names_are_pinned():
    assert sorted(vlmpack.__all__) == NAMES
    assert dir(vlmpack) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name):
    value = getattr(vlmpack, name)
    home = import_module(vlmpack._HOMES[name])
    assert value is getattr(home, name)
    assert value.__doc__


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_pinned(name):
    empty = inspect.Parameter.empty
    signature = inspect.signature(getattr(vlmpack, name))
    bare = [each.replace(annotation=empty) for each in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_every_name_has_a_home():
    assert sorted(vlmpack._HOMES) == NAMES


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'vlmpack' has no attribute 'fintune'"):
        _ = vlmpack.fintune
    assert not hasattr(vlmpack, "__path_of_nothing__")


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert vlmpack.__version__ == version("vlmpack")
