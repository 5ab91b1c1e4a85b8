"""An S3 server of moto on loopback, filled from a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

REGION = "us-east-1"


@contextmanager
def s3_server(root: Path) -> Iterator[str]:
    """Serves each folder below `root` as a bucket; yields the endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        fill(endpoint, root)
        yield endpoint
    finally:
        server.stop()


def fill(endpoint: str, root: Path) -> None:
    """Uploads what lies below `root`; existing objects are replaced."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=Config(proxies={}, retries={"max_attempts": 1}),
    )
    try:
        for bucket in sorted(folder for folder in root.iterdir() if folder.is_dir()):
            client.create_bucket(Bucket=bucket.name)
            for file in sorted(path for path in bucket.rglob("*") if path.is_file()):
                key = str(file.relative_to(bucket))
                client.put_object(Bucket=bucket.name, Key=key, Body=file.read_bytes())
    finally:
        client.close()
