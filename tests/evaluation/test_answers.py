"""Answers with adapters, to a file of questions, and in a conversation."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from support.engines import make_engine, policy
from support.families import tiny_family_folder
from support.peft_models import peft_model
from support.references import path_of
from support.shards import ROOT, SHARD, read_shard
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.encode import Encoder
from vlmpack.encode.turns import answer_turn
from vlmpack.errors import ModelError, VlmpackError
from vlmpack.evaluation.generation import (
    _media,
    _model_inputs,
    _tokenise,
    answer_questions,
    load_for_generation,
    stream_answer,
)
from vlmpack.evaluation.predictions import Question

NUM_NEW = 8


def run(*words: object, **more: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], **more)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> tuple[Any, Encoder]:
    return load_for_generation(tiny_folder)


@pytest.fixture
def use_loaded(monkeypatch, loaded) -> None:
    """The commands load the tiny model once for all tests."""
    monkeypatch.setattr("vlmpack.evaluation.generation.load_for_generation", lambda *_: loaded)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_folder: Path, encoder: Encoder) -> Path:
    """Adapters that change answers, and a projector that was trained in full."""
    engine = make_engine(tiny_folder, encoder, policy=policy("frozen", "full", "lora"))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    folder: Path = tmp_path_factory.mktemp("run") / "adapter"
    engine.export_adapter(folder, base=str(tiny_folder))
    return folder


def tokens(model: Any, encoder: Encoder, asked: Question) -> list[int]:
    """What transformers' own greedy decoding gives."""
    prompt = _tokenise(0, asked, encoder)
    inputs = _model_inputs(encoder, [(prompt, _media(asked, encoder))])
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_NEW)
    return list(out[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.slow
def test_with_adapters_it_answers_as_peft_does(tmp_path, tiny_folder, loaded, adapter) -> None:
    base, encoder = loaded
    reference = peft_model(tiny_folder, adapter)
    ours, _ = load_for_generation(tiny_folder, [adapter])
    questions = [Question.from_sample(sample.cooked()) for sample in read_shard(limit=8)]
    theirs = [tokens(reference, encoder, asked) for asked in questions]
    assert [tokens(ours, encoder, asked) for asked in questions] == theirs
    assert [tokens(base, encoder, asked) for asked in questions] != theirs, "they do nothing"

    asked = next(one for one in questions if len(one.images) == 1)
    (picture := tmp_path / "picture.jpg").write_bytes(asked.images[0])
    ask = ["generate", asked.text.replace("[image 1]", "").strip(), "--image", picture]
    ask += ["--max-new-tokens", NUM_NEW]
    merged = tmp_path / "merged"
    assert run("merge", tiny_folder, adapter, "-o", merged, "--dtype", "float32").exit_code == 0
    # The base is the one that the adapters name.
    answers = [run(*ask, *more) for more in (("--adapter", adapter), ("--model", merged))]
    assert [one.exit_code for one in answers] == [0, 0], answers[0].exception
    assert answers[0].stdout == answers[1].stdout
    assert answers[0].stdout != run(*ask, "--model", tiny_folder).stdout
    # Two in a row, as merge takes them.
    both = tmp_path / "both"
    words = ("merge", tiny_folder, adapter, adapter, "-o", both, "--dtype", "float32")
    assert run(*words).exit_code == 0
    twice, again = (
        model[0].state_dict()
        for model in (
            load_for_generation(tiny_folder, [adapter, adapter]),
            load_for_generation(both),
        )
    )
    once = ours.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in twice.items())
    assert not all(torch.equal(value, once[name]) for name, value in twice.items())


def test_adapters_that_cannot_be_used_are_refused_by_name(tmp_path, tiny_folder, adapter) -> None:
    def changed(name: str, **values: object) -> Path:
        shutil.copytree(adapter, tmp_path / name)
        config = tmp_path / name / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
        return tmp_path / name

    of_another = changed("1", base_model_name_or_path="someone/else")
    no_lora = changed("2", peft_type="IA3")
    switched = changed("3", alora_invocation_tokens=[1])
    shutil.copytree(adapter, tmp_path / "run" / "adapter")
    for words, said in {
        ("--adapter", of_another): "names its base model as 'someone/else', which is no folder",
        ("--adapter", tmp_path / "run"): f"a run's are in {tmp_path}/run/adapter",
        ("--adapter", tmp_path / "gone"): "is not a folder; expected adapters in peft's format",
        ("--adapter", no_lora): "its peft_type is 'IA3'; expected LORA",
        ("--adapter", switched): "no weight can hold its adapters: some tokens switch them on",
        (): "expected --model DIR, or --adapter DIR",
    }.items():
        failed = run("generate", "Which?", *words)
        assert isinstance(failed.exception, VlmpackError), failed.output
        assert said in str(failed.exception)
    with pytest.raises(ModelError, match="peft_type"):  # named or not
        load_for_generation(tiny_folder, [no_lora])


def write_questions(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A file whose records have many layouts, with answers or without; two are bad."""
    images = [s.images[0] for s in read_shard(SHARD) if s.images][:4]
    for number, data in enumerate(images):
        (folder / f"{number}.jpg").write_bytes(data)
    user = {"role": "user", "content": "<image>Read the digits."}
    records = [
        {"question": "Read the digits.", "image": "0.jpg"},
        {"question": "Read the digits.", "images": ["1.jpg"]},
        {"question": "Read the digits.", "image": "gone.jpg"},
        {"messages": [user], "images": ["2.jpg"]},
        {"messages": [user, {"role": "assistant", "content": "9"}], "images": ["3.jpg"]},
        {"colour": "red"},
        {"query": "Read the digits.", "response": "9", "images": ["1.jpg"]},
        {
            "conversations": [{"from": "human", "value": "<image>Read the digits."}],
            "image": "0.jpg",
        },
        {"prompt": "Read the digits."},
    ]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, records


def test_a_file_of_questions_is_answered_in_its_order(tmp_path, use_loaded, tiny_folder) -> None:
    path, records = write_questions(tmp_path)
    words = ["--model", tiny_folder, "--max-new-tokens", NUM_NEW]
    many = run("generate", "--questions", path, *words, "--batch-size", 2)
    rows = [json.loads(line) for line in many.stdout.splitlines()]
    assert [row["place"] for row in rows] == [f"{path}, line {n + 1}" for n in range(len(records))]
    bad = {n: row["error"] for n, row in enumerate(rows, start=1) if "error" in row}
    assert bad.keys() == {3, 6}
    assert "gone.jpg" in bad[3] and "no layout fits" in bad[6] and "'colour'" in bad[6]
    assert f"bad: {path}, line 3: " in many.stderr
    assert str(many.exception) == "2 of 9 questions could not be asked"

    alone = {}
    for name in ("0.jpg", "1.jpg", "2.jpg", "3.jpg", None):
        shown = () if name is None else ("--image", tmp_path / name)
        answer = run("generate", "Read the digits.", *shown, *words)
        alone[name] = answer.stdout.removesuffix("\n")
    assert len(set(alone.values())) > 2, "equal answers could not be mixed up"
    order = ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "1.jpg", "0.jpg", None]
    assert [row["answer"] for row in rows if "answer" in row] == [alone[name] for name in order]
    assert {row["question"] for row in rows if "answer" in row} == {"Read the digits."}


def test_answers_go_to_a_new_file_and_images_start_at_a_folder(
    tmp_path, use_loaded, tiny_folder, monkeypatch
) -> None:
    monkeypatch.setattr("vlmpack.cli.generate.BATCHES_READ", 1)  # two chunks
    path, records = write_questions(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "q.jsonl"
    kept = [records[0], records[1] | {"question": "\u00fcber?"}, records[3]]
    moved.write_text("".join(json.dumps(record) + "\n" for record in kept))
    words = ["--model", tiny_folder, "--max-new-tokens", 2, "--batch-size", 2]
    out = tmp_path / "answers.jsonl"
    ask = ["generate", "--questions", moved, "--images", tmp_path, *words]
    said = run(*ask, "-o", out)
    assert (said.exit_code, " ".join(said.stdout.split())) == (0, f"{out}: 3 answers")
    assert [json.loads(line) for line in out.read_text("utf-8").splitlines()] == [
        json.loads(line) for line in run(*ask).stdout.splitlines()
    ]
    assert "\u00fcber?" in out.read_text("utf-8")
    assert "is there already" in str(run(*ask, "-o", out).exception)
    (tmp_path / "empty.jsonl").write_text("")
    for words, message in {
        ("--questions", tmp_path / "empty.jsonl"): "holds no record",
        ("--questions", tmp_path / "gone.jsonl"): "there is no such file",
        ("Which?", "--questions", path): "expected one of QUESTION and --questions FILE",
        ("--questions", path, "--image", tmp_path / "0.jpg"): "records name their images",
        ("Which?", "-o", out): "these go with --questions FILE",
    }.items():
        assert message in str(run("generate", *words, "--model", tiny_folder).exception), words


def test_chat_keeps_its_turns_and_their_images(
    tmp_path, use_loaded, loaded, tiny_folder, monkeypatch
) -> None:
    """Against transformers' own template and decoding, over a pipe."""
    asked: list[list[int]] = []
    pixels: list[Any] = []
    model, encoder = loaded
    generate = model.generate

    def noted(**inputs: Any) -> Any:
        asked.append(inputs["input_ids"][0].tolist())
        pixels.append(inputs.get("pixel_values"))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", noted)
    pictures = [s.images[0] for s in read_shard(SHARD) if len(s.images) == 1][:2]
    for number, data in enumerate(pictures):
        (tmp_path / f"photo {number}.jpg").write_bytes(data)
    lines = [
        f"/image {tmp_path}/photo 0.jpg",
        "Read the digits.",
        "",
        "Once more?",
        f"/image '{tmp_path}/photo 1.jpg'",
        "And these?",
        "/reset",
        "Hello",
        "/quit",
        "never asked",
    ]
    words = ["--model", tiny_folder, "--max-new-tokens", NUM_NEW]
    talked = run("chat", *words, input="\n".join(lines))
    assert talked.exit_code == 0, talked.exception
    answers = talked.stdout.split("\n")
    assert len(asked) == 4 and answers.pop() == ""
    first, again, second, hello = answers

    turns = [("user", "Read the digits.", 1), ("assistant", first, 0), ("user", "Once more?", 0)]
    turns += [("assistant", again, 0), ("user", "And these?", 1)]
    for at, some, number in ((0, turns[:1], 1), (1, turns[:3], 1), (2, turns, 2)):
        said = encoder.tokenizer.decode(asked[at])
        assert re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", said) == written(encoder, some)
        assert len(re.findall(r"(?:<\|image_pad\|>)+", said)) == number
    first_patches = len(pixels[0])
    assert torch.equal(pixels[2][:first_patches], pixels[0]), "the first image comes first"
    assert len(pixels[2]) > first_patches and pixels[3] is None
    assert not torch.equal(pixels[2][-first_patches:], pixels[0]), "equal images"
    assert encoder.tokenizer.decode(asked[3]) == written(encoder, [("user", "Hello", 0)])
    shown = ("--image", tmp_path / "photo 0.jpg")
    assert run("generate", "Read the digits.", *shown, *words).stdout == f"{first}\n"
    assert run("generate", "Hello", *words).stdout == f"{hello}\n"
    assert len({first, again, second, hello}) > 1, "equal answers could not be mixed up"


def written(encoder: Encoder, turns: list[tuple[str, str, int]]) -> str:
    """A conversation as transformers' own template writes it."""
    messages = [
        {"role": role, "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}
        for role, text, images in turns
    ]
    text = encoder.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def test_an_answer_is_shown_while_it_is_generated(loaded) -> None:
    model, encoder = loaded
    asked = [Question.from_sample(s.cooked()) for s in read_shard(SHARD, limit=8) if s.images]
    plain = answer_questions(model, encoder, asked, batch_size=8, max_new_tokens=NUM_NEW)
    place, text = max(enumerate(plain), key=lambda pair: len(pair[1] or ""))
    assert text is not None and len(text) > 3, "too short to be cut in pieces"
    steps, pieces = [0], []
    hook = model.register_forward_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    try:
        streamed = stream_answer(
            model,
            encoder,
            asked[place],
            max_new_tokens=NUM_NEW,
            show=lambda piece: pieces.append((steps[0], piece)),
        )
    finally:
        hook.remove()
    assert "".join(piece for _, piece in pieces).strip() == streamed == text
    assert len({step for step, piece in pieces if piece}) > 2, "all of it came at the end"


def test_chat_says_what_is_wrong(tmp_path, use_loaded, tiny_folder, monkeypatch) -> None:
    (note := tmp_path / "note.jpg").write_text("no image")
    words = ["chat", "--model", tiny_folder, "--max-new-tokens", 2]
    cases = {
        f"/image {tmp_path}/gone.jpg": "gone.jpg cannot be read: No such file or directory",
        f"/image {note}": "note.jpg",
        "/picture x": "/picture is no order; expected /image FILE, /reset, /quit",
        "say <|im_end|>": "spells the special token",
    }
    for line, said in cases.items():
        failed = run(*words, input=f"{line}\nHello\n")
        assert isinstance(failed.exception, VlmpackError), line
        assert said in str(failed.exception) and failed.stdout == ""
    # At a terminal it goes on.
    monkeypatch.setattr("vlmpack.cli.chat._lines", lambda _: iter([*cases, "Hello"]))
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("vlmpack.cli.chat.sys", terminal)
    talked = run(*words)
    assert talked.exit_code == 0, talked.exception
    assert talked.stderr.count("error: ") == len(cases)
    alone = run("generate", "Hello", *words[1:]).stdout
    assert talked.stdout == alone


@pytest.mark.parametrize(
    ("said", "words", "thought"),
    [
        ("Seven.", "Seven.", None),
        ("<think>\nIt has a bar.\n</think>\n\nSeven.", "Seven.", "It has a bar."),
        ("It has a bar.</think>Seven.", "Seven.", "It has a bar."),  # the template opened it
        ("<think>It has", "<think>It has", None),  # cut off
    ],
)
def test_thoughts_of_an_answer_are_apart_in_later_turns(said, words, thought) -> None:
    turn = answer_turn(said)
    assert (turn.role, turn.text) == ("assistant", words)
    assert turn.fields.get("reasoning_content") == thought


SERVING = "openai fastapi starlette uvicorn jiter opentelemetry sniffio"
"""What its extra `serving` brings, and `make references` too."""


@contextmanager
def served(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """`transformers serve` on a model folder; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    start = "from transformers.cli.transformers import app; app()"
    with (folder.parent / "log").open("w+") as log:
        command = [sys.executable, "-c", start, *words]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            for _ in range(600):
                assert server.poll() is None, Path(log.name).read_text()
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1/chat/completions"
        finally:
            server.terminate()
            server.wait()


@pytest.mark.slow
def test_transformers_serve_answers_on_an_export_as_generate_does(tmp_path) -> None:
    """The processor of this family needs no torchvision."""
    environment = path_of(SERVING, tmp_path)
    base = tiny_family_folder("idefics3", tmp_path / "base")
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (base / "processor_config.json").write_text(json.dumps(processor))
    chosen = policy("frozen", "frozen", "lora")
    engine = make_engine(base, Encoder(base), policy=chosen)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    engine.export_adapter(tmp_path / "adapter", base=str(base))
    engine.export(tmp_path / "export", processor_from=base, dtype=torch.float32)
    picture = ROOT / "docs/images/digits.jpg"
    url = f"data:image/jpeg;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    ask = ["generate", "What?", "--image", picture, "--max-new-tokens", NUM_NEW]
    answer = run(*ask, "--model", tmp_path / "export").stdout.strip()
    assert len(answer) > 3 and answer.isascii(), "nothing that every decoder writes alike"
    assert run(*ask, "--adapter", tmp_path / "adapter").stdout.strip() == answer
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    with served(tmp_path / "export", environment) as address:

        def post(**more: Any) -> bytes:
            content = json.dumps({**body, "max_tokens": NUM_NEW, **more}).encode()
            request = Request(address, content, {"Content-Type": "application/json"})
            with urlopen(request, timeout=120) as reply:
                return bytes(reply.read())

        whole = json.loads(post())["choices"][0]["message"]["content"]
        lines = [
            line[6:]
            for line in post(stream=True).decode().split("\n")
            if line.startswith("data: {")
        ]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert whole.strip() == answer
    assert "".join(pieces).strip() == answer and len([x for x in pieces if x]) > 1
