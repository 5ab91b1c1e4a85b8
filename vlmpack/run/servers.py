"""Answers drawn by a server: vLLM's `/inference/v1/generate`, SGLang's `/generate`.

    ids with one marker an image, image files, every sampling field
    -> the prompt's ids as the server had them, compared with ours -> token ids, log-probabilities

Every field is sent, since servers take what is left out from the model's folder. A request is tried
again as `data.storage` says. The guard of private addresses lets through the one host that is
named. The key comes from an environment variable, and no message has it.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal
from urllib.parse import urlsplit

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import redacted, same_host, without_secrets
from vlmpack.data.shards.images import image_facts
from vlmpack.encode import Encoder
from vlmpack.encode.rollouts import LogProbs
from vlmpack.encode.sample import shown_by, shows_video
from vlmpack.errors import DataError, VlmpackError
from vlmpack.evaluation.sampling import Drawn, uniform_numbers
from vlmpack.recipe.data import StorageSection
from vlmpack.run.sample import ANY_SIZE, Drawing, Prompt
from vlmpack.storage.http import Answer, HttpClient, check_status
from vlmpack.storage.transport import Refused, StoreFault, Transient, Tries
from vlmpack.whole_file import parse_small_json, read_json

logger = logging.getLogger("vlmpack")

MOST_BYTES = 64 << 20
"""The largest answer that is read."""
MOST_SAID = 500
"""Characters of a server's error that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server to draw from.

    Args:
        url: its address, without a path.
        key_variable: environment variable with its key; None where it wants none.
        log_probs: what its log-probabilities are of; None for its default, which is `raw` of vLLM
            and `after_temperature` of SGLang.
        concurrency: prompts that are asked at once.
    """

    url: str
    key_variable: str | None = None
    log_probs: LogProbs | None = None
    concurrency: int = 8


class Client:
    """Asks one server, from several threads.

    Raises:
        VlmpackError: an address that is none, or a key's variable that is not set.
    """

    def __init__(self, server: Server, storage: StorageSection) -> None:
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise VlmpackError(
                f"--server {redacted(server.url)}: expected http://HOST:PORT, and a key by "
                "--server-key VARIABLE"
            )
        self.shown = redacted(server.url).rstrip("/")
        self._url = server.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if server.key_variable is not None:
            key = os.environ.get(server.key_variable)
            if not key:
                raise VlmpackError(f"--server-key: the variable {server.key_variable} is not set")
            self._headers["Authorization"] = f"Bearer {key}"
        seconds = min(storage.total_timeout_seconds, 3600.0)
        named = {"allow_private": (same_host(parts.hostname),), "read_timeout_seconds": seconds}
        self._storage = storage.model_copy(update=named)
        self._http = HttpClient(self._storage)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with, after as many tries as it takes.

        Raises:
            VlmpackError: it refuses, or the tries are spent.
        """
        tries = Tries(self.shown + path, self._storage)
        while True:
            try:
                return self.ask_once(path, body)
            except StoreFault as fault:
                try:
                    tries.note(fault)
                except DataError as error:
                    raise VlmpackError(f"--server {self.shown}{path}: {error.reason}") from None

    def ask_once(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same in one try.

        Raises:
            Refused, Transient: see their classes.
        """
        data = None if body is None else json.dumps(body).encode()
        method: Literal["GET", "POST"] = "GET" if data is None else "POST"
        request = self._http.request(
            method, self._url + path, self._headers, follow=False, body=data, check=_check
        )
        with request as answer:
            if answer.status >= 300:
                raise Refused("it redirects to another host, which is not asked")
            try:
                return dict(parse_small_json(_body(answer, MOST_BYTES)))
            except ValueError:
                raise Transient("the answer is no whole JSON object") from None


def _body(answer: Answer, most: int) -> bytes:
    data = bytearray()
    for chunk in answer.chunks():
        data += chunk
        if len(data) > most:
            raise Refused(f"the answer is longer than {most:,} bytes")
    return bytes(data)


def _check(answer: Answer) -> None:
    """Raises for a status that is no success, with what the server says of it."""
    if answer.status in (400, 413, 422):
        text = _body(answer, 1 << 20).decode("utf-8", "replace")[:MOST_SAID]
        raise Refused(f"it answered {answer.status}: {without_secrets(text)!a}")
    if answer.status in (401, 403):
        raise Refused(
            f"it denied access ({answer.status}); a key is given by --server-key VARIABLE"
        )
    if answer.status == 404:
        raise Refused("it has no such address (404)")
    check_status(answer)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered, by our names.

    Args:
        prompt: its ids of the prompt.
    """

    prompt: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: str


class VLLM:
    """vLLM's own interface for tokens."""

    name = "vllm"
    log_probs: LogProbs = "raw"
    path = "/inference/v1/generate"

    @staticmethod
    def body(
        ids: Sequence[int], images: Sequence[str], drawing: Drawing, ends: Sequence[int], seed: int
    ) -> dict[str, Any]:
        """The request for one answer."""
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        sampling = {
            **drawing.fields(),
            "max_tokens": drawing.max_new_tokens,
            "min_tokens": 0,
            "stop_token_ids": list(ends),
            "ignore_eos": False,
            "seed": seed,
            "n": 1,
            "logprobs": 0,
        }
        more = {"content_parts": parts} if parts else {}
        return {
            "token_ids": list(ids),
            "sampling_params": sampling,
            "return_token_ids": True,
            "stream": False,
            **more,
        }

    @staticmethod
    def reply(answer: Mapping[str, Any]) -> Reply:
        """Raises KeyError, IndexError or TypeError for another answer than it gives."""
        [choice] = answer["choices"]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt = answer["prompt_token_ids"]
        return Reply(prompt, choice["token_ids"], values, choice["finish_reason"])


class SGLang:
    """SGLang's own interface."""

    name = "sglang"
    log_probs: LogProbs = "after_temperature"
    path = "/generate"

    @staticmethod
    def body(
        ids: Sequence[int], images: Sequence[str], drawing: Drawing, ends: Sequence[int], seed: int
    ) -> dict[str, Any]:
        """The request for one answer."""
        sampling = {
            **drawing.fields(),
            "top_k": drawing.top_k or -1,  # its word for all
            "max_new_tokens": drawing.max_new_tokens,
            "min_new_tokens": 0,
            "stop_token_ids": list(ends),
            "ignore_eos": False,
            "sampling_seed": seed,
            "n": 1,
        }
        return {
            "input_ids": list(ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
            "stream": False,
            **({"image_data": list(images)} if images else {}),
        }

    @staticmethod
    def reply(answer: Mapping[str, Any]) -> Reply:
        """Raises KeyError, IndexError or TypeError for another answer than it gives."""
        meta = answer["meta_info"]
        drawn = meta["output_token_logprobs"]
        ids = [entry[1] for entry in drawn]
        if answer["output_ids"] not in (ids, ids[:-1]):  # the end token may be left out
            raise TypeError("output_ids and output_token_logprobs name other tokens")
        return Reply(
            answer["prompt_token_ids"],
            ids,
            [entry[0] for entry in drawn],
            meta["finish_reason"]["type"],
        )


Kind = type[VLLM] | type[SGLang]


def found_kind(client: Client) -> tuple[Kind, str]:
    """Which server it is, and its version.

    Raises:
        VlmpackError: it is neither, or cannot be reached.
    """
    client.ask("/v1/models")  # both have it; waits for a server that is starting
    for path, kind in (("/server_info", SGLang), ("/get_server_info", SGLang), ("/version", VLLM)):
        try:
            version = client.ask_once(path).get("version")
        except StoreFault:
            continue
        if isinstance(version, str):
            return kind, version
    raise VlmpackError(
        f"--server {client.shown}: it is neither vLLM (/version) nor SGLang (/server_info)"
    )


class Served:
    """A server as a sampler; see `vlmpack.run.sample.Sampler`."""

    prompts_together = 1

    def __init__(
        self, server: Server, storage: StorageSection, drawing: Drawing, encoder: Encoder
    ) -> None:
        self._client = Client(server, storage)
        self._kind, version = found_kind(self._client)
        self.server = {"name": self._kind.name, "version": version}
        self.log_probs: LogProbs = server.log_probs or self._kind.log_probs
        if drawing.truncates and self.log_probs != "processed":
            logger.warning(
                "note: with a truncation, objective.name: policy takes log-probabilities after it "
                "alone (--server-log-probs processed), and these are %s; best answers and pairs "
                "need none",
                self.log_probs,
            )
        self._drawing, self._encoder = drawing, encoder
        self._concurrency = server.concurrency
        self._ends = _end_tokens(encoder)

    def draw(
        self, parts: Iterable[tuple[int, Sequence[Prompt]]]
    ) -> Iterator[tuple[int, list[tuple[Prompt, list[Drawn]]]]]:
        """Several prompts at once; see `Sampler`."""
        pending: set[Future[tuple[int, list[tuple[Prompt, list[Drawn]]]]]] = set()
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="server")
        try:
            for part, prompts in parts:
                marked = [self._marked(prompt) for prompt in prompts]
                pending.add(pool.submit(self._part, part, prompts, marked))
                if len(pending) >= 2 * self._concurrency:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from self._results(done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from self._results(done)
        finally:
            pool.shutdown(cancel_futures=True)

    @staticmethod
    def _results(done: Iterable[Future[Any]]) -> Iterator[Any]:
        for each in done:
            ACTIVITY.moved()
            yield each.result()

    def _marked(self, prompt: Prompt) -> list[int]:
        """The prompt's ids with one marker for each image, as servers expand it themselves."""
        question = prompt.asked.question
        shown = shown_by(question.messages)
        if shows_video(shown):
            raise VlmpackError(
                f"{question.key} in {question.shard}: it shows a video, and only images are "
                "sent to a server; expected images, or no --server"
            )
        chat = self._encoder.chat_for(objects=question.grounding is not None)
        return chat.encode_prompt(question.messages, [chat.marker] * len(shown), question.inputs)

    def _part(
        self, part: int, prompts: Sequence[Prompt], marked: Sequence[list[int]]
    ) -> tuple[int, list[tuple[Prompt, list[Drawn]]]]:
        return part, [
            (prompt, [self._drawn(prompt, ids, number) for number in prompt.numbers])
            for prompt, ids in zip(prompts, marked, strict=True)
        ]

    def _drawn(self, prompt: Prompt, marked: Sequence[int], number: int) -> Drawn:
        asked, drawing = prompt.asked, self._drawing
        numbers = uniform_numbers(drawing.seed, drawing.round, asked.digest, number)
        images = [_data_url(data) for data in asked.question.images]
        seed = int(numbers.integers(2**31))
        answer = self._client.ask(
            self._kind.path, self._kind.body(marked, images, drawing, self._ends, seed)
        )
        where = f"--server {self._client.shown}, {asked.question.key} in {asked.question.shard}"
        try:
            reply = self._kind.reply(answer)
            ids = tuple(int(token) for token in reply.token_ids)
            log_probs = tuple(float(value) for value in reply.log_probs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise VlmpackError(
                f"{where}: the answer lacks what {self._kind.name} gives: {error!r}"
            ) from None
        if list(reply.prompt) != list(marked):  # as it was sent, or expanded
            _refuse_other_prompt(asked.token_ids, reply.prompt, where)
        wrong = ""
        if not ids or len(ids) != len(log_probs):
            wrong = f"{len(ids)} token ids and {len(log_probs)} log-probabilities"
        elif not all(math.isfinite(value) and value < 1e-3 for value in log_probs):
            wrong = f"the log-probability {max(log_probs)}"
        elif reply.finish not in ("stop", "length"):
            wrong = f"the finish {reply.finish!r}"
        elif reply.finish == "stop" and ids[-1] not in self._ends:
            wrong = f"a stop at token {ids[-1]}, which is no end token ({self._ends})"
        if wrong:
            raise VlmpackError(f"{where}: {wrong}; expected a whole answer")
        chat = self._encoder.chat_for(objects=asked.question.grounding is not None)
        return Drawn(
            token_ids=ids,
            log_probs=log_probs,
            finish="stop" if reply.finish == "stop" else "length",
            text=chat.decode(ids),
        )


def _refuse_other_prompt(ours: Sequence[int], theirs: Sequence[int], where: str) -> None:
    for place, (own, other) in enumerate(zip_longest(ours, theirs)):
        if own != other:
            raise VlmpackError(
                f"{where}: the server's prompt has {len(theirs)} tokens and ours {len(ours)}; the "
                f"first that differs is token {place}: {other} there, {own} here. Expected a "
                "server with the same template, tokenizer and bounds of images"
            )


def _data_url(data: bytes) -> str:
    kind = image_facts(data, "image", ANY_SIZE).format.lower()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _end_tokens(encoder: Encoder) -> list[int]:
    """Ids that end an answer: the tokenizer's and those of generation_config.json."""
    ends = {encoder.tokenizer.eos_token_id}
    path = encoder.folder / "generation_config.json"
    if path.is_file():
        given = read_json(path).get("eos_token_id")
        ends |= {*given} if isinstance(given, list) else {given}
    return sorted(end for end in ends if isinstance(end, int))
