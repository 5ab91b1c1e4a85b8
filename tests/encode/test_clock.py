"""Templates that write the day write one date, as transformers would on that day."""

from __future__ import annotations

import datetime
import pickle
import shutil

import pytest
from support.images import conversation
from support.shards import TINY_MODEL
from transformers.utils import chat_template_utils

from vlmpack.encode import Encoder, EncoderSettings, settings
from vlmpack.encode.settings import DATE_NOTE, reads_clock, with_date
from vlmpack.model_folder.content import PROCESSOR_FILES

DAYS = [datetime.date(2026, 11, 22), datetime.date(2024, 2, 3), datetime.date(2025, 12, 31)]

LLAMA_3_2 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- for message in messages %}{{- message['content'] }}{%- endfor %}
"""
MISTRAL_SMALL_3_1 = """\
{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default = "It is " + today + "." %}
{{- bos_token }}
{%- if messages[0]["role"] == "system" %}{%- set default = messages[0]["content"] %}{%- endif %}
{{- "[SYSTEM_PROMPT]" + default + "[/SYSTEM_PROMPT]" }}
{%- macro year() %}{{ strftime_now("%y") }}{% endmacro %}
{%- for message in messages %}{{ year() }}{{- message['content'] }}{%- endfor %}
"""
EVERYTHING = (
    "\n\n {{ strftime_now('%a %A %b %B %d %-d %e %D %F %H:%M:%S.%f %I %p %j %U %W %V %G %u %w %x "
    "%X %c %y %Y %% %%Y %Q%%%d') }}\n\n"
)
TEMPLATES = {
    "llama-3.2": LLAMA_3_2,
    "mistral-small-3.1": MISTRAL_SMALL_3_1,
    "everything": EVERYTHING,
}


def render(template):
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "7"}]
    texts = chat_template_utils.render_jinja_template([said], chat_template=template, bos_token="B")
    return texts[0][0]


@pytest.mark.cases(quick=("everything-*", "llama-3.2-2024-02-03"), slow="mistral-*-2025-12-31")
@pytest.mark.parametrize("day", DAYS, ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pinned_template_writes_what_transformers_writes_on_that_day(name, day, monkeypatch):
    now = render(TEMPLATES[name])

    class Faked(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(day.year, day.month, day.day)

    pinned = render(with_date(TEMPLATES[name], day))
    monkeypatch.setattr(chat_template_utils, "datetime", Faked)
    assert pinned == render(TEMPLATES[name])
    assert str(day.year)[2:] in pinned and (now != pinned or day == settings.today())


@pytest.mark.parametrize(
    "text", ["\n\nx\n\n", "  x", "{# a #}\nx\n", "{%- if 1 %} y\n{% endif %}\n"]
)
def test_nothing_else_that_a_template_writes_changes(text):
    assert render(with_date(text, DAYS[0])) == render(text)


@pytest.fixture
def dated(tmp_path):
    """The committed model with a template that writes the day before each conversation."""
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, tmp_path / name)
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}\n" + path.read_text(encoding="utf-8"))
    return tmp_path


def test_which_templates_read_the_clock(dated, tmp_path):
    assert reads_clock(dated) and not reads_clock(TINY_MODEL)
    path = tmp_path / "chat_template.jinja"
    path.write_text("{# strftime_now is not\nused #}" + (TINY_MODEL / path.name).read_text())
    assert not reads_clock(tmp_path)
    path.unlink()
    (tmp_path / "chat_template.json").write_text(
        '{"chat_template": "{{ strftime_now(\\"%Y\\") }}"}'
    )
    assert reads_clock(tmp_path)


def test_ids_lengths_and_fingerprints_follow_the_date_alone(dated, monkeypatch):
    sample = conversation(("user", ["?"]), ("assistant", ["7"]))
    first, second = (Encoder(dated, EncoderSettings(date=day)) for day in DAYS[:2])
    monkeypatch.setattr("vlmpack.encode.settings.today", lambda: pytest.fail("the clock was read"))
    again = Encoder(dated, EncoderSettings(date=DAYS[0]))
    assert again.encode(sample).input_ids.tolist() == first.encode(sample).input_ids.tolist()
    assert again.fingerprint == first.fingerprint != second.fingerprint
    assert "22 Nov 2026" in first.tokenizer.decode(first.encode(sample).input_ids)
    assert "03 Feb 2024" in second.tokenizer.decode(second.encode(sample).input_ids)
    assert first.fingerprint_parts == second.fingerprint_parts | {"date": "2026-11-22"}
    prompt = first.chat.encode_prompt(sample.messages[:1])
    assert first.encode(sample).input_ids.tolist()[: len(prompt)] == prompt


def test_a_worker_gets_the_date_of_the_process_that_sent_it_its_encoder(dated, monkeypatch):
    monkeypatch.setattr("vlmpack.encode.settings.today", lambda: DAYS[1])
    sent = pickle.dumps(Encoder(dated))
    monkeypatch.setattr("vlmpack.encode.settings.today", lambda: DAYS[2])
    assert pickle.loads(sent).date == DAYS[1]
    assert Encoder(dated).date == DAYS[2]


def test_other_templates_have_no_date():
    plain, asked = Encoder(TINY_MODEL), Encoder(TINY_MODEL, EncoderSettings(date=DAYS[0]))
    assert plain.date is asked.date is None
    assert plain.fingerprint == asked.fingerprint
    assert "date" not in asked.fingerprint_parts
    assert plain.chat.template.text() == plain.tokenizer.chat_template


def test_an_export_says_its_date_and_is_asked_with_it(dated):
    Encoder(TINY_MODEL).write_settings(dated)
    assert DATE_NOTE.read(dated, str) is None
    Encoder(dated, EncoderSettings(date=DAYS[1])).write_settings(dated)
    assert DATE_NOTE.read(dated, str) == DAYS[1].isoformat()
    assert Encoder(dated).date == DAYS[1]
    assert Encoder(dated, EncoderSettings(date=DAYS[0])).date == DAYS[0]
