"""Answers that a server draws: stand-ins that drop, delay, cut and reorder lose nothing."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.recipes import run_settings, write_recipe
from support.shards import SHARD, read_shard
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.evaluation.generation import Asked
from vlmpack.evaluation.predictions import Question
from vlmpack.evaluation.rollouts import rewards_of
from vlmpack.recipe.data import StorageSection
from vlmpack.run.sample import Drawing, Prompt, SampleOrder, SampleResult, sample_into
from vlmpack.run.servers import Served, Server

EACH = 2
END = 570  # <|im_end|> of the tiny tokenizer
DRAWING = Drawing(answers=EACH, max_new_tokens=5, temperature=0.7, seed=3)
STORAGE = StorageSection(retry_seconds=20, total_timeout_seconds=5, max_tries=40)
FIELDS = {
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


@pytest.fixture(scope="module")
def prompts(encoder: Encoder) -> list[Prompt]:
    asked = [Asked.of(Question.from_sample(s.cooked()), encoder) for s in read_shard(SHARD)[:10]]
    return [Prompt(one, one.digest, range(EACH)) for one in asked]


class StandIn(ThreadingHTTPServer):
    """Answers as vLLM or SGLang would: tokens that follow from the seed."""

    daemon_threads = True

    def __init__(self, kind: str, prompts: list[Prompt], encoder: Encoder, faults: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.faults, self.key = kind, faults, ""
        self.random = random.Random(4)
        self.lock = threading.Lock()
        self.seen: list[dict[str, Any]] = []
        self.dealt = Counter[str]()
        self.change: Any = lambda answer: answer
        self.expanded = {}
        for each in prompts:
            asked = each.asked.question
            marks = [encoder.chat.marker] * len(asked.images)
            ids = encoder.chat.encode_prompt(asked.messages, marks, asked.inputs)
            self.expanded[tuple(ids), asked.images] = list(each.asked.token_ids)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str:
        with self.lock:
            if not self.faults:
                return ""
            self.faults -= 1
            name = self.random.choice(["drop", "delay", "cut", "busy", "late cut"])
            self.dealt[name] += 1
            return name

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        ids, values = drawn_of(seed)
        sent = body.get("token_ids", body.get("input_ids"))
        prompt = self.expanded[tuple(sent), images_of(body)]
        if path == "/generate":
            drawn = [[value, token, None] for value, token in zip(values, ids, strict=True)]
            meta = {"output_token_logprobs": drawn, "finish_reason": {"type": "stop"}}
            return {"output_ids": ids, "meta_info": meta, "prompt_token_ids": prompt}
        content = [{"token_id": t, "logprob": v} for t, v in zip(ids, values, strict=True)]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return {"choices": [choice], "prompt_token_ids": prompt}


def images_of(body: dict[str, Any]) -> tuple[bytes, ...]:
    urls = [part["image_url"]["url"] for part in body.get("content_parts", [])]
    urls += body.get("image_data", [])
    return tuple(base64.b64decode(each.partition(",")[2]) for each in urls)


def drawn_of(seed: int) -> tuple[list[int], list[float]]:
    ids = [300 + seed % 97, 200 + seed % 89, END]
    return ids, [-0.25, -(seed % 7) / 8, -0.5]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def say(self, status: int, value: Any, cut: int = 0) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) - cut])
        self.close_connection = self.close_connection or cut > 0

    def do_GET(self) -> None:
        known = {
            "vllm": {"/version": {"version": "0.33.0"}},
            "sglang": {"/get_server_info": {"version": "0.5.23", "model_path": "m"}},
            "none": {},
        }[self.server.kind] | {"/v1/models": {"data": []}}
        found = known.get(self.path)
        self.say(404 if found is None else 200, found or {})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            self.say(401, {})
            return
        fault = server.fault()
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "busy":
            self.say(503, {})
            return
        if fault == "delay":
            time.sleep(0.05)
        with server.lock:
            server.seen.append(body)
            pause = server.random.random() / 200
        time.sleep(pause)  # so that answers come in another order
        cuts = {"cut": 40, "late cut": 1}
        answer = server.change(server.answer(self.path, body))
        self.say(answer.pop("status", 200), answer, cuts.get(fault, 0))


@contextmanager
def standing_in(
    kind: str, prompts: list[Prompt], encoder: Encoder, faults: int = 0
) -> Iterator[StandIn]:
    with StandIn(kind, prompts, encoder, faults) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def drawn(
    server: StandIn, prompts: list[Prompt], encoder: Encoder, out: Path, **fields: Any
) -> SampleResult:
    order = SampleOrder(drawing=DRAWING, out=out, rewards=rewards_of(["contains"]))
    storage = fields.pop("storage", STORAGE)
    sampler = Served(Server(url=server.url, **fields), storage, DRAWING, encoder)
    return sample_into(order, sampler, prompts, {})


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_faults_lose_and_double_nothing(kind, prompts, encoder, tmp_path) -> None:
    with standing_in(kind, prompts, encoder) as server:
        drawn(server, prompts, encoder, tmp_path / "calm")
        calm, server.seen = server.seen, []
        server.faults = 16
        drawn(server, prompts, encoder, tmp_path / "stormy", concurrency=4)
        assert {*server.dealt} == {"drop", "delay", "cut", "busy", "late cut"}
        assert len(server.seen) > len(calm) == len(prompts) * EACH
    expected = (tmp_path / "calm/rollouts.jsonl").read_bytes()
    assert (tmp_path / "stormy/rollouts.jsonl").read_bytes() == expected
    places = []
    for line in (tmp_path / "stormy/drawn.jsonl").read_text().splitlines()[1:]:
        places.append(json.loads(line)["part"])
    assert sorted(places) == [*range(len(prompts))] != places, "guard: out of order"
    rollouts = [json.loads(line)["rollout"] for line in expected.decode().splitlines()]
    names = [(each["group"], each["number"]) for each in rollouts]
    assert names == [(each.group, n) for each in prompts for n in each.numbers]
    for each in calm:
        sampling = each["sampling_params"]
        assert {*sampling} >= FIELDS and sampling["temperature"] == 0.7
        assert sampling["top_k"] == (0 if kind == "vllm" else -1)
        ids, values = drawn_of(sampling.get("seed", sampling.get("sampling_seed")))
        assert any(x["token_ids"] == ids and x["log_probs"] == values for x in rollouts)
    assert len({tuple(each["token_ids"]) for each in rollouts}) > len(prompts)
    version = {"vllm": "0.33.0", "sglang": "0.5.23"}[kind]
    assert rollouts[0]["server"] == {"name": kind, "version": version}
    meaning = "raw" if kind == "vllm" else "after_temperature"
    assert rollouts[0]["sampling"]["log_probs"] == meaning


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_images_are_sent_as_they_are(kind, prompts, encoder, tmp_path) -> None:
    with standing_in(kind, prompts, encoder) as server:
        drawn(server, prompts, encoder, tmp_path, log_probs="processed")
        sent = server.seen
    found = {images_of(body) for body in sent}
    assert found == {each.asked.question.images for each in prompts}
    [first, *_] = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(first)["rollout"]["sampling"]["log_probs"] == "processed"


def test_a_prompt_may_come_back_as_it_was_sent(prompts, encoder, tmp_path) -> None:
    with standing_in("sglang", prompts, encoder) as server:
        server.change = lambda a: a | {"prompt_token_ids": server.seen[-1]["input_ids"]}
        result = drawn(server, prompts, encoder, tmp_path, concurrency=1)
    assert result.answers == len(prompts) * EACH


def without_one(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["logprobs"]["content"].pop()
    return answer


def other_prompt(answer: dict[str, Any]) -> dict[str, Any]:
    ids = answer["prompt_token_ids"]
    return answer | {"prompt_token_ids": [*ids[:4], 7, *ids[5:]]}


def without_end(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["token_ids"][-1] = 5
    return answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_prompt, "the first that differs is token 4: 7 there"),
        (lambda a: a | {"prompt_token_ids": a["prompt_token_ids"][:-1]}, "None there"),
        (without_one, "3 token ids and 2 log-probabilities"),
        (without_end, "a stop at token 5, which is no end token"),
        (lambda a: {"choices": []}, "lacks what vllm gives"),
        (lambda a: {"status": 400, "error": "too long"}, "it answered 400: .*too long"),
        (lambda a: {"status": 418}, "it answered 418|the server answered 418"),
    ],
)
def test_what_no_server_should_answer_is_refused(change, words, prompts, encoder, tmp_path) -> None:
    with standing_in("vllm", prompts, encoder) as server:
        server.change = change
        with pytest.raises(VlmpackError, match=words):
            drawn(server, prompts, encoder, tmp_path)


def test_a_broken_sampling_goes_on(prompts, encoder, tmp_path) -> None:
    with standing_in("vllm", prompts, encoder) as server:
        server.change = lambda a: {"status": 400} if len(server.seen) > 11 else a
        with pytest.raises(VlmpackError, match="400"):
            drawn(server, prompts, encoder, tmp_path, concurrency=2)
        done = (tmp_path / "drawn.jsonl").read_text().count("\n") - 1
        assert 0 < done < len(prompts)
        server.seen, server.change = [], lambda answer: answer
        assert drawn(server, prompts, encoder, tmp_path).answers == len(prompts) * EACH
        assert len(server.seen) == (len(prompts) - done) * EACH


def test_tries_are_bounded(prompts, encoder, tmp_path) -> None:
    with standing_in("vllm", prompts, encoder, faults=10**6) as server:
        server.random.choice = lambda names: "busy"  # type: ignore[method-assign]
        few = StorageSection(max_tries=3, retry_seconds=5)
        with pytest.raises(VlmpackError, match=r"answered 503; gave up after 3 tries"):
            drawn(server, prompts[:1], encoder, tmp_path, storage=few)
        assert server.dealt["busy"] == 3


def test_a_key_is_sent_and_never_said(prompts, encoder, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MY_KEY", "sk-4711-secret")
    with standing_in("vllm", prompts, encoder) as server:
        server.key = "sk-4711-secret"
        with pytest.raises(VlmpackError, match="denied access"):
            drawn(server, prompts, encoder, tmp_path / "without")
        drawn(server, prompts, encoder, tmp_path / "with", key_variable="MY_KEY")
        server.change = lambda a: {"status": 400, "error": "wrong key sk-4711-secret"}
        with pytest.raises(VlmpackError) as raised:
            drawn(server, prompts, encoder, tmp_path / "said", key_variable="MY_KEY")
    assert "answered 400" in str(raised.value)
    files = [path.read_bytes() for path in tmp_path.rglob("*.jsonl")]
    assert len(files) == 4
    assert all(b"4711" not in text for text in [*files, str(raised.value).encode()])
    assert "4711" not in caplog.text
    with pytest.raises(VlmpackError, match="the variable NO_KEY is not set"):
        Served(Server(url=server.url, key_variable="NO_KEY"), STORAGE, DRAWING, encoder)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://h", "expected http://HOST:PORT"),
        ("http://me:pw@h", "expected http://HOST:PORT"),
        ("http://169.254.169.254", "link-local or metadata address"),
    ],
)
def test_addresses_that_are_never_asked(url, words, encoder) -> None:
    with pytest.raises(VlmpackError, match=words) as raised:
        Served(Server(url=url), STORAGE, DRAWING, encoder)
    assert "pw" not in str(raised.value)


def test_only_the_named_host_may_be_private(prompts, encoder) -> None:
    from vlmpack.run.servers import Client

    client = Client(Server(url="http://127.0.0.1:1"), STORAGE)
    assert client._storage.allows_private("127.0.0.1")
    assert not client._storage.allows_private("10.0.0.1")


def test_the_command_asks_a_server(prompts, encoder, tmp_path) -> None:
    settings = run_settings(tmp_path, data__train=str(SHARD), data__validation=None)
    recipe = str(write_recipe(tmp_path / "recipe.yaml", settings))
    words = ["sample", recipe, "-o", str(tmp_path / "out"), "--reward", "contains", "-n", "2"]
    words += ["--max-prompts", "5", "evaluation.interval_steps=null"]
    with standing_in("vllm", prompts, encoder) as server:
        given = ["--server", server.url, "--server-log-probs", "processed", "--concurrency", "2"]
        ended = CliRunner().invoke(app, [*words, *given])
        assert ended.exit_code == 0, (ended.exception, ended.output)
        assert "10 answers to 5 prompts" in ended.output
        assert len(server.seen) == 10
    [first, *_] = (tmp_path / "out/rollouts.jsonl").read_text().splitlines()
    rollout = json.loads(first)["rollout"]
    assert rollout["server"] == {"name": "vllm", "version": "0.33.0"}
    assert rollout["sampling"]["log_probs"] == "processed"


def test_a_truncation_without_its_values_is_noted(prompts, encoder, caplog) -> None:
    cut = Drawing(top_k=5)
    with standing_in("sglang", prompts, encoder) as server:
        Served(Server(url=server.url, log_probs="processed"), STORAGE, cut, encoder)
        Served(Server(url=server.url), STORAGE, DRAWING, encoder)
        assert "truncation" not in caplog.text
        Served(Server(url=server.url), STORAGE, cut, encoder)
    assert "with a truncation" in caplog.text and "these are after_temperature" in caplog.text


def test_another_server_is_named(prompts, encoder) -> None:
    with (
        standing_in("none", prompts, encoder) as server,
        pytest.raises(VlmpackError, match="neither vLLM"),
    ):
        Served(Server(url=server.url), STORAGE, DRAWING, encoder)
