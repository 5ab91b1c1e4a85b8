"""A small HTTP server for tests and benchmarks that serves a folder, and fails on request.

The first folder below the root is a bucket, so the same address is a plain HTTP server and an S3
endpoint (path style; GET, HEAD, ListObjectsV2; signatures are not looked at). It knows ranges,
ETags and If-Match. Faults are a list, or drawn by seed for each (path, end of the range, attempt),
so the order in which threads come by changes nothing.

    with FaultServer(folder) as server:
        server.fail(Fault("truncate", times=2, match="shard-000"))
        fetch(f"{server.url}/bucket/shard-000.tar")
        assert server.bytes_sent > 0

In a process of its own, for benchmarks: `PYTHONPATH=tests python -m support.fault_server FOLDER`
prints the address, and `GET /.stats` gives its counters as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from support.faults import KINDS, Fault, SeededFaults
from support.folder_answers import Answer, answer_for

__all__ = ["KINDS", "Fault", "FaultServer", "Request", "SeededFaults"]

SETTLE_SECONDS = 0.2
REASONS = {
    200: "OK",
    206: "Partial Content",
    302: "Found",
    304: "Not Modified",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was answered."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    status: int
    body_bytes: int
    fault: str


class FaultServer:
    """The server, in threads of this process.

    Args:
        root: the folder; its sub-folders are the buckets.
        seeded: faults by lot.
        latency_ms: before every answer.
        port: 0 for a free one.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        seeded: SeededFaults | None = None,
        latency_ms: float = 0.0,
        port: int = 0,
    ) -> None:
        self.root = Path(root).resolve()
        self.seeded = seeded
        self.latency_ms = latency_ms
        self._requests: list[Request] = []
        self.num_requests = 0
        self.bytes_sent = 0
        self.num_failed = 0
        """Requests that got a fault, at the time it was chosen."""
        self.together: threading.Barrier | None = None
        """Requests wait here for each other; broken where too few are in flight at once."""
        self.in_progress = 0
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._faults: list[Fault] = []
        self._attempts: dict[tuple[str, str], int] = {}
        self._server = _Threads(("127.0.0.1", port), _Connection)
        self._server.owner = self
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every connection; the counters are final then."""
        self.closing.set()
        self._server.shutdown()
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()
        self._settle(5.0)

    def fail(self, *faults: Fault) -> None:
        """Adds faults; the first one that matches a request and is not used up hits it."""
        with self.lock:
            self._faults.extend(faults)

    def reset(self) -> None:
        """Forgets faults, attempts and counters."""
        self._settle(SETTLE_SECONDS)
        with self.lock:
            self._faults.clear()
            self._attempts.clear()
            self._requests.clear()
            self.num_requests = self.bytes_sent = self.num_failed = 0

    @property
    def requests(self) -> list[Request]:
        """The answers since the start or the last reset, in the order they ended."""
        self._settle(SETTLE_SECONDS)
        return list(self._requests)

    def stats(self) -> dict[str, int]:
        """Requests answered and body bytes sent."""
        self._settle(SETTLE_SECONDS)
        return {"requests": self.num_requests, "bytes": self.bytes_sent}

    def _settle(self, seconds: float) -> None:
        """Waits for answers that are being sent: a client may have all of one already."""
        deadline = time.monotonic() + seconds
        while self.in_progress and time.monotonic() < deadline:
            time.sleep(0.001)

    def next_fault(self, method: str, path: str, span: str) -> Fault | None:
        """The fault of a request; counts it."""
        with self.lock:
            for fault in self._faults:
                if fault.times == 0 or fault.match not in path or method not in fault.methods:
                    continue
                if fault.times is not None:
                    fault.times -= 1
                self.num_failed += 1
                return fault
            if self.seeded is None or method != "GET":
                return None
            end = span.rpartition("-")[2]  # what is left of a body ends where the body did
            attempt = self._attempts.get((path, end), 0)
            self._attempts[path, end] = attempt + 1
        return self.seeded.draw(path, end, attempt)

    def record(self, request: Request) -> None:
        """Counts an answer."""
        with self.lock:
            self.in_progress -= 1
            self.num_requests += 1
            self.bytes_sent += request.body_bytes
            self._requests.append(request)


class _Threads(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    owner: FaultServer


class _Connection(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: _Threads

    def handle(self) -> None:
        owner = self.server.owner
        with owner.lock:
            owner.connections.add(self.connection)
        with contextlib.suppress(OSError):
            while not owner.closing.is_set() and self._one():
                pass
        with owner.lock:
            owner.connections.discard(self.connection)

    def _one(self) -> bool:
        """Answers one request; whether the connection stays open."""
        line = self.rfile.readline(65536).decode("latin-1").split()
        if len(line) != 3:
            return False
        headers = {}
        while (text := self.rfile.readline(65536).decode("latin-1").strip()) != "":
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        method, target, _ = line
        parts = urlsplit(target)
        path = unquote(parts.path)
        owner = self.server.owner
        self.sent = 0
        if path == "/.stats":
            return self._send(_json(owner.stats()), None, method)
        with owner.lock:
            owner.in_progress += 1
        answer, fault, whole = Answer(500), None, False
        try:
            if owner.together is not None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    owner.together.wait()
            if owner.latency_ms:
                time.sleep(owner.latency_ms / 1000)
            fault = owner.next_fault(method, path, headers.get("range", ""))
            answer = answer_for(owner.root, method, path, parts.query, headers, fault)
            whole = self._send(answer, fault if answer.status in (200, 206) else None, method)
        finally:
            owner.record(
                Request(
                    method=method,
                    path=path,
                    query=parts.query,
                    headers=headers,
                    status=answer.status,
                    body_bytes=self.sent,
                    fault=fault.kind if fault is not None else "",
                )
            )
        return whole

    def _send(self, answer: Answer, fault: Fault | None, method: str) -> bool:
        """Sends an answer as the fault has it; whether the connection can go on."""
        kind = fault.kind if fault is not None else ""
        if kind == "latency" and fault is not None:
            self.server.owner.closing.wait(fault.seconds)
        head = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Status')}"]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        if kind == "short":
            head.append("Connection: close")
        else:
            head.append(f"Content-Length: {answer.length}")
        data = "\r\n".join([*head, "", ""]).encode()
        if kind == "drip" and fault is not None:
            for place in range(len(data)):
                self.connection.sendall(data[place : place + 1])
                if self.server.owner.closing.wait(fault.seconds):
                    break
            return False
        if method == "HEAD":
            self.connection.sendall(data)
            return True
        if fault is None or kind not in ("truncate", "short", "reset", "stall"):
            self._body(data, answer, answer.length, fault)
            return self.sent == answer.length
        self._body(data, answer, int(answer.length * fault.part), fault)
        if kind == "stall":
            self.server.owner.closing.wait(fault.seconds)
        if kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        return False

    def _body(self, head: bytes, answer: Answer, length: int, fault: Fault | None) -> None:
        if answer.file is None:
            self.connection.sendall(head + answer.body[:length])
            self.sent = length
            return
        path, offset, _ = answer.file
        step = length
        if fault is not None and fault.kind == "slow":
            step = max(1, fault.bytes_per_second // 20)
        with path.open("rb", buffering=0) as file:
            if length <= 65536 and step == length:
                self.connection.sendall(head + os.pread(file.fileno(), length, offset))
                self.sent = length
                return
            self.connection.sendall(head)
            out, source = self.connection.fileno(), file.fileno()
            while self.sent < length:
                count = os.sendfile(out, source, offset + self.sent, min(step, length - self.sent))
                if count == 0:
                    break
                self.sent += count
                if step != length:
                    time.sleep(0.05)


def _json(value: Any) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves a folder until it is killed; the first line of output is the address."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    with FaultServer(options.root, latency_ms=options.latency_ms, port=options.port) as server:
        print(server.url, flush=True)
        server._thread.join()


if __name__ == "__main__":
    main()
