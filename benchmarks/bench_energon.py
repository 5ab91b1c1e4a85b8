"""Energon's reader beside ours and webdataset's, where Energon is installed.

It reads no plain HTTP. So it reads a prepared dataset of the same shards in two ways: local files,
and S3 by its multi-storage client, from the server that the others read over HTTP. Its checksums
are not compared (it has none), nothing is cooked or decoded, and the order is that of the tars.

Energon needs packages of its own, so it usually lives in another environment:
`VLMPACK_ENERGON_PYTHON` names the Python of one with `megatron-energon boto3`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from loopback import SAMPLES, SHARDS, Server

READER = Path(__file__).resolve().parent / "energon_reader.py"
PYTHON = "VLMPACK_ENERGON_PYTHON"
BUCKET = "energon"

_PROFILE = """\
profiles:
  bench:
    storage_provider:
      type: s3
      options: {{base_path: {bucket}, endpoint_url: "{url}", region_name: us-east-1}}
    credentials_provider:
      type: S3Credentials
      options: {{access_key: none, secret_key: none}}
"""


def energon_python() -> str | None:
    """The Python that has Energon; None where there is none.

    Raises:
        FileNotFoundError: the one that was named does not exist.
    """
    named = os.environ.get(PYTHON)
    if named is not None:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{PYTHON} names {named}, which does not exist")
        return named
    if find_spec("megatron") is None or find_spec("megatron.energon") is None:
        return None
    return sys.executable


def prepare(python: str, root: Path) -> Path:
    """The benchmark's shards as Energon wants them: a folder with its index. Not timed."""
    folder = root / BUCKET
    folder.mkdir()
    for number in range(SHARDS):
        name = f"train-{number:06d}.tar"
        os.link(root / "bucket" / name, folder / name)
    # fmt: off
    command = [
        python, "-c", "from megatron.energon.cli.main import main; main()",
        "prepare", str(folder), "--non-interactive", "--split-ratio", "1,0,0",
        "--num-workers", "1", "--sample-type", "CrudeWebdataset",
    ]
    # fmt: on
    subprocess.run(command, check=True, capture_output=True, env=_environment())
    return folder


@dataclass(frozen=True)
class EnergonReader:
    """A process that waits to read all samples."""

    process: subprocess.Popen[str]

    def __call__(self) -> tuple[float, float]:
        """Reads all; wall and CPU seconds of it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        assert found["samples"] == SHARDS * SAMPLES, found
        return found["seconds"], found["cpu"]


@contextlib.contextmanager
def readers(root: Path, work: Path, server: Server) -> Iterator[dict[str, EnergonReader]]:
    """Energon's readers by name; none where it is not installed."""
    python = energon_python()
    if python is None:
        yield {}
        return
    folder = prepare(python, root)
    profile = work / "msc.yaml"
    profile.write_text(_PROFILE.format(bucket=BUCKET, url=server.url))
    with contextlib.ExitStack() as stack:
        yield {
            name: EnergonReader(stack.enter_context(_started(python, place, profile)))
            for name, place in (("energon_local", str(folder)), ("energon_s3", "msc://bench/"))
        }
    shutil.rmtree(folder)


@contextlib.contextmanager
def _started(python: str, place: str, profile: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, str(READER), place],
        env={**_environment(), "MSC_CONFIG": str(profile)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Without what points other environments to this one's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
