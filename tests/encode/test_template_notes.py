"""A template that alters, ends or adds to answers is told, and ids are those that transformers
gives to the form that it documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.images import conversation
from support.published_templates import published_templates
from support.recipes import small_settings
from support.record_data import write_records
from support.shards import TINY_MODEL
from support.templates import MARKED, SMOLLM3, TEMPLATES, Template, chat_encoder
from support.tool_templates import TOOL_TEMPLATES, without_marks
from typer.testing import CliRunner

from vlmpack.build.data import build_encoder
from vlmpack.cli.app import app
from vlmpack.encode import Encoder
from vlmpack.encode import template as template_module
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import said
from vlmpack.encode.template_notes import template_notes
from vlmpack.errors import ModelError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.recipe import load_recipe

CHATML = ("<|im_start|>", "<|im_end|>")
KNOWN: dict[str, Template] = {
    **{f"published {name}": template for name, template in published_templates().items()},
    **{f"unmarked {n}": without_marks(template) for n, template in published_templates().items()},
    **TEMPLATES,
    **{f"marked {name}": template for name, template in MARKED.items()},
    **{f"tools {name}": template for name, template in TOOL_TEMPLATES.items()},
    "smollm3": SMOLLM3,
}
EMPTY = ("Qwen3.5, 4B", "Qwen3.6", "Qwen3.8", "qwen3", "qwen3.5")
"""Those that write an empty thought, or close one, before an answer that has none."""


def template(
    string: str = "message.content",
    parts: str = "part.text",
    *,
    behind: str = "<|im_end|>",
    before: str = "",
    takes_parts: bool = False,
) -> Template:
    """ChatML with a branch for each form of a turn."""
    text = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        f"{{% if message.role == 'assistant' %}}{{{{ '{before}' }}}}{{% endif %}}"
        f"{{% if message.content is string %}}{{{{ {string} }}}}{{% else %}}"
        "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}"
        f"{{{{ {parts} }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
        f"{{% if message.role == 'assistant' %}}{{{{ '{behind}' }}}}{{% else %}}<|im_end|>"
        "{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    special = (*CHATML, "<image>") if takes_parts else CHATML
    return Template(text, "", special, takes_parts, "<image>" if takes_parts else "")


ALTERING = {
    "upper case": "message.content | upper",
    "cut": "message.content[:5]",
    "in reverse": "message.content | reverse",
    "replaced": "message.content | replace('e', '3')",
}
TURNS = [("user", "Is it Seven?"), ("assistant", "It is Seven, said Eve.")]


def told(encoder: ChatEncoder, *, parts: bool) -> list[int]:
    """Ids by transformers alone."""
    turns = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
        for role, text in TURNS
    ]
    found: Any = encoder.tokenizer.apply_chat_template(turns, return_dict=True)
    return list(found["input_ids"])


@pytest.fixture
def old_probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The probe as it was: a form whose words are altered is not taken."""
    takes = template_module._takes

    def plain(apply: Any, role: Any, forms: Any) -> bool:
        turns = template_module.turn_dicts(
            template_module._asked(role, template_module._WORD), forms
        )
        return takes(apply, role, forms) and template_module._WORD in template_module._text_of(
            apply, turns
        )

    monkeypatch.setattr(template_module, "_takes", plain)
    chat_encoder.cache_clear()
    yield
    chat_encoder.cache_clear()


def altering(way: str, *, tower: bool) -> Template:
    """The documented form's branch alters words."""
    if tower:
        words = ALTERING[way].replace("message.content", "part.text")
        return template(parts=words, takes_parts=True)
    return template(ALTERING[way])


@pytest.mark.parametrize("tower", [False, True], ids=["strings", "parts"])
@pytest.mark.parametrize("way", ALTERING)
def test_altered_words_have_the_ids_of_transformers_and_are_told(way: str, tower: bool) -> None:
    encoder = chat_encoder(altering(way, tower=tower))
    messages = tuple(said(role, text) for role, text in TURNS)  # type: ignore[arg-type]
    assert encoder.encode(messages).input_ids == told(encoder, parts=tower)
    assert told(encoder, parts=tower) != told(encoder, parts=not tower)
    encoder.refuse_other_ids()
    notes = template_notes(encoder, "all_turns")
    form = "a list of parts" if tower else "a string"
    assert f"(user, assistant, system, tool). They are trained as {form}" in notes[0]
    assert "does not write answers as they are given ('First Answer ...  to its End.' b" in notes[1]
    assert encoder.template.ids_of_transformers(messages) == told(encoder, parts=tower)


@pytest.mark.usefixtures("old_probe")
@pytest.mark.parametrize("tower", [False, True], ids=["strings", "parts"])
def test_the_old_probe_is_refused_at_launch(tower: bool) -> None:
    """The negative control."""
    encoder = chat_encoder(altering("upper case", tower=tower))
    with pytest.raises(ModelError, match=r"It is Seven\..* and .*IT IS SEVEN\..* by apply_chat_t"):
        encoder.refuse_other_ids()


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_said_of_known_templates(name: str) -> None:
    """Ids are transformers' for all; nobody's answers are altered or have no end."""
    encoder = chat_encoder(KNOWN[name])
    encoder.refuse_other_ids()
    shown = (encoder.marker,) if encoder.takes_images else ()
    sample = conversation(("user", [None, "x?"] if shown else ["x?"]), ("assistant", ["Yes."]))
    theirs = encoder.template.ids_of_transformers(sample.messages)
    assert theirs == encoder.encode(sample.messages, shown).input_ids
    notes = " ".join(template_notes(encoder, "all_turns"))
    assert "as they are given" not in notes and "no end-of-turn" not in notes
    bare = name.removeprefix("published ").removeprefix("unmarked ").removeprefix("tools ")
    adds = bare.removeprefix("marked ").startswith(EMPTY) or name == "smollm3"
    assert ("adds words to answers" in notes) == adds, notes
    assert ("string differently than a list of parts" in notes) == ("Gemma 4" in name), notes


ENDS = {
    "no end": ({"behind": ""}, "writes no end-of-turn token behind an answer", ""),
    "an end of words": ({"behind": "\\n\\nHuman:"}, "no end-of-turn token", r"'\n\nHuman:'"),
    "words behind": ({"behind": "\\nBye.<|im_end|>"}, "", r"'\nBye.'"),
    "words before": ({"before": "Sure! "}, "", "'Sure! '"),
    "a template without faults": ({}, "", ""),
}


@pytest.mark.parametrize("case", ENDS)
def test_missing_ends_and_added_words_are_told(case: str) -> None:
    changes, end, words = ENDS[case]
    notes = template_notes(chat_encoder(template(**changes)), "all_turns")
    assert len(notes) == bool(end) + bool(words), notes
    assert not end or (end in notes[0] and "{{ eos_token }}" in notes[0])
    assert not words or f"and they are learnt: {words}; a template that" in notes[-1]


def test_a_remedy_that_the_template_knows_is_named() -> None:
    encoder = chat_encoder(TOOL_TEMPLATES["qwen3.5"])
    [words, _] = template_notes(encoder, "all_turns")
    assert r"'\n</think>\n\n'; data.chat_template_kwargs: {enable_thinking: false}" in words
    off = ChatEncoder(encoder.tokenizer, True, encoder.marker, None, {"enable_thinking": False})
    assert "adds words" not in " ".join(template_notes(off, "all_turns"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The committed model's processor; its answers have no end."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            (path / name).write_bytes((TINY_MODEL / name).read_bytes())
    text = template(behind="", takes_parts=True).text
    marker = Encoder(TINY_MODEL).chat.marker
    (path / "chat_template.jinja").write_text(text.replace("<image>", marker), encoding="utf-8")
    return path


def test_a_launch_and_stats_say_it(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vlmpack"):
        build_encoder(load_recipe(small_settings(tmp_path)))
        assert caplog.text == ""
        build_encoder(load_recipe(small_settings(tmp_path, model__path=str(folder))))
    assert "note: the chat template writes no end-of-turn token" in caplog.text
    records = write_records(tmp_path, "jsonl", range(3))
    command = ["data", "stats", records, "--index-dir", str(tmp_path / "i"), "--model"]
    shown = CliRunner().invoke(app, [*command, str(folder)]).output
    assert "note: the chat template writes no end-of-turn token behind an answer" in shown
    found = json.loads(CliRunner().invoke(app, [*command, str(folder), "--json"]).stdout)
    assert [note[:37] for note in found["notes"]] == ["the chat template writes no end-of-tu"]
    good = json.loads(CliRunner().invoke(app, [*command, str(TINY_MODEL), "--json"]).stdout)
    assert "notes" not in good
