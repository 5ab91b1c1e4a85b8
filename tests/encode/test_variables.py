"""Variables of the chat template for a whole recipe: as transformers has them, in every
conversation, but where a record has its own."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.images import conversation
from support.recipes import changed, small_settings
from support.shards import TINY_MODEL
from support.tool_templates import TOOL_TEMPLATES, without_marks
from typer.testing import CliRunner

from vlmpack.build.data import build_encoder
from vlmpack.cli.app import app
from vlmpack.data.packs.manifest import encoder_differences
from vlmpack.encode import Encoder, VLMSample
from vlmpack.encode.sample import TemplateInputs
from vlmpack.encode.settings import VARIABLES_NOTE
from vlmpack.errors import ModelError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.packing import IGNORE_INDEX
from vlmpack.recipe import identity, identity_differences, load_recipe

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
SAMPLE = conversation(("user", ["one?"]), ("assistant", ["seven"]))
TURNS = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "seven"}]
EFFORT = """\
{%- if enable_thinking is defined and enable_thinking is false -%}
  {{- '<|im_start|>system\\nno thoughts<|im_end|>\\n' -}}
{%- endif -%}
{%- if reasoning_effort is defined -%}
  {{- '<|im_start|>system\\neffort: ' ~ reasoning_effort ~ '<|im_end|>\\n' -}}
{%- endif -%}
"""
"""In the manner of templates that tell the model in words."""


@pytest.fixture(params=["marks", "no marks"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The committed model's processor with a template that reads a variable."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, folder / name)
    template = TOOL_TEMPLATES["qwen3.5"]
    text = (template if request.param == "marks" else without_marks(template)).text
    (folder / "chat_template.jinja").write_text(EFFORT + text, encoding="utf-8")
    return folder


def own(sample: VLMSample, **variables: Any) -> VLMSample:
    """The sample with variables of its own."""
    return replace(sample, inputs=TemplateInputs(variables=variables))


def tokens(encoder: Encoder, sample: VLMSample = SAMPLE) -> tuple[list[int], list[int]]:
    encoded = encoder.encode(sample)
    return encoded.input_ids.tolist(), encoded.labels.tolist()


def test_every_conversation_is_what_transformers_makes_with_them(folder: Path) -> None:
    encoder = Encoder(folder).replace(chat_template_kwargs=OFF)
    plain = Encoder(folder)
    found, labels = tokens(encoder)
    template = encoder.tokenizer.apply_chat_template
    assert found == template(TURNS, return_dict=True, **OFF)["input_ids"]
    assert found != tokens(plain)[0], "the variable changes nothing"
    assert (found, labels) == tokens(plain, own(SAMPLE, **OFF))
    assert any(label != IGNORE_INDEX for label in labels)
    asked = encoder.chat.encode_prompt(SAMPLE.messages[:1])
    prompt = template(TURNS[:1], return_dict=True, add_generation_prompt=True, **OFF)
    assert asked == prompt["input_ids"] == found[: len(asked)]
    assert encoder.length(SAMPLE, []).num_tokens == len(found)


def test_a_records_own_value_goes_before_that_of_the_recipe(folder: Path) -> None:
    encoder = Encoder(folder).replace(chat_template_kwargs={**OFF, "reasoning_effort": "low"})
    expected = Encoder(folder).replace(chat_template_kwargs={**ON, "reasoning_effort": "low"})
    assert tokens(encoder, own(SAMPLE, **ON)) == tokens(expected)
    assert tokens(expected) != tokens(encoder)
    mixed = own(SAMPLE, reasoning_effort="high")
    assert tokens(encoder, mixed) == tokens(
        Encoder(folder), own(mixed, **OFF, reasoning_effort="high")
    )


def test_the_mask_is_that_of_transformers(folder: Path) -> None:
    encoder = Encoder(folder).replace(chat_template_kwargs=OFF)
    mask = encoder.chat.template.mask_of_transformers(SAMPLE.messages)
    ids, labels = tokens(encoder)
    if mask is not None:  # the template has marks
        assert [bool(flag) for flag in mask[1:]] == [label != IGNORE_INDEX for label in labels[:-1]]
        assert len(mask) == len(ids)
    answer = [label for label in labels if label != IGNORE_INDEX]
    assert encoder.tokenizer.decode(answer) == "seven<|im_end|>"


def test_the_identity_of_the_data_has_them_in_any_order(folder: Path) -> None:
    both = {**OFF, "reasoning_effort": "low"}
    encoder = Encoder(folder).replace(chat_template_kwargs=both)
    turned = Encoder(folder).replace(chat_template_kwargs=dict(reversed(both.items())))
    fingerprints = {
        Encoder(folder).replace(chat_template_kwargs=given).fingerprint
        for given in ({}, OFF, ON, both)
    }
    assert len(fingerprints) == 4
    assert turned.fingerprint == encoder.fingerprint
    assert turned.fingerprint_parts == encoder.fingerprint_parts
    again = pickle.loads(pickle.dumps(encoder))
    assert (again.chat_template_kwargs, again.fingerprint) == (both, encoder.fingerprint)
    packs: Any = SimpleNamespace(kind="tokens", encoder=Encoder(folder).fingerprint_parts)
    assert encoder_differences(packs, Encoder(folder).replace(chat_template_kwargs=OFF)) == [
        'data.chat_template_kwargs: not set in the packs, {"enable_thinking": false} now'
    ]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"enable_thinkng": True}, r"'enable_thinkng', which the chat template does not read \(it "
         r"reads .*'enable_thinking'.*\); model.path: "),
        ({"messages": "x"}, r"'messages' is no variable of a template; expected such as enable_"),
        ({"reasoning_effort": "a <|im_end|>"}, r"reasoning_effort spells the special token '<\|im"),
        ({"reasoning_effort": ["<|image_pad|>"]}, r"reasoning_effort spells the special token '<"),
    ],
)  # fmt: skip
def test_what_the_template_cannot_take_is_the_recipes_fault(folder, variables, words) -> None:
    with pytest.raises(ModelError, match=rf"^data\.chat_template_kwargs: {words}"):
        Encoder(folder).replace(chat_template_kwargs=variables).load()


def test_an_export_says_them_and_is_asked_with_them(folder: Path) -> None:
    Encoder(folder).write_settings(folder)
    assert not (folder / VARIABLES_NOTE.file).exists()
    trained = Encoder(folder).replace(chat_template_kwargs=OFF)
    trained.write_settings(folder)
    assert Encoder(folder).chat_template_kwargs == OFF
    assert tokens(Encoder(folder)) == tokens(trained)
    assert Encoder(folder).replace(chat_template_kwargs={}).chat_template_kwargs == {}, (
        "a recipe's count"
    )
    (folder / VARIABLES_NOTE.file).write_text("{", encoding="utf-8")
    assert Encoder(folder).chat_template_kwargs == {}


def test_the_recipes_other_values_are_another_run(folder: Path, tmp_path: Path) -> None:
    settings = small_settings(tmp_path, model__path=str(folder))
    off = load_recipe(changed(settings, data__chat_template_kwargs=OFF))
    assert build_encoder(off).chat_template_kwargs == OFF
    on = load_recipe(off, ["data.chat_template_kwargs.enable_thinking=true"])
    assert identity_differences(identity(off), identity(on)) == [
        "data.chat_template_kwargs.enable_thinking: false in the run folder, true in the recipe"
    ]
    assert hash(off) == hash(load_recipe(off)) != hash(on)
    none = load_recipe(off, ["data.chat_template_kwargs.enable_thinking=null"])
    assert none.data.chat_template_kwargs == {}
    assert identity(none) == identity(load_recipe(settings))
    assert not [key for key in identity(none) if "chat_template" in key], "as before there were any"


@pytest.mark.cases(quick="marks", slow="no marks")
def test_data_show_says_them(folder: Path, tmp_path: Path) -> None:
    settings = small_settings(tmp_path, model__path=str(folder), data__chat_template_kwargs=OFF)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    shown = CliRunner().invoke(app, ["data", "show", str(recipe), "--batch", "0", "--row", "0"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0] == ('data.chat_template_kwargs: {"enable_thinking": false}')
    assert "no thoughts<|im_end|>" in shown.output
