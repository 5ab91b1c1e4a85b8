"""A folder over HTTP and as S3: from a request to the answer that a FaultServer sends."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from support.faults import Fault


@dataclass(slots=True)
class Answer:
    """A status line, headers and a body: bytes, or (file, offset, length)."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: tuple[Path, int, int] | None = None

    @property
    def length(self) -> int:
        """Of the whole body."""
        return self.file[2] if self.file is not None else len(self.body)


def answer_for(
    root: Path, method: str, path: str, query: str, headers: dict[str, str], fault: Fault | None
) -> Answer:
    """What a request gets; `fault` may replace it."""
    if fault is not None and fault.kind == "status":
        return Answer(fault.status, dict(fault.headers), f"injected {fault.status}".encode())
    if fault is not None and fault.kind == "redirect":
        return Answer(302, {"Location": fault.location})
    if method not in ("GET", "HEAD"):
        return Answer(405)
    file = (root / path.strip("/")).resolve()
    if not file.is_relative_to(root):
        return Answer(403)
    if "list-type=2" in query:
        return _listing(file, query)
    if not file.is_file():
        return Answer(404, body=b"no such file")
    status = file.stat()
    etag = hashlib.md5(f"{status.st_size}-{status.st_mtime_ns}".encode()).hexdigest()
    is_other = fault is not None and fault.kind == "etag"
    if is_other:
        etag = f"other-{etag}"
    common = {
        "ETag": f'"{etag}"',
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime)),
    }
    if not is_other and headers.get("if-match", f'"{etag}"') not in (f'"{etag}"', etag, "*"):
        return Answer(412, body=b"another version")
    first, last = 0, status.st_size - 1
    if "range" in headers:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", headers["range"])
        if match is None or match.groups() == ("", ""):
            return Answer(416)
        if match[1]:
            first, last = int(match[1]), min(last, int(match[2] or last))
        else:
            first = max(0, status.st_size - int(match[2]))
        if first > last:
            return Answer(416, {"Content-Range": f"bytes */{status.st_size}"})
        common["Content-Range"] = f"bytes {first}-{last}/{status.st_size}"
    length = last - first + 1
    code = 206 if "range" in headers else 200
    if is_other:
        return Answer(code, common, body=bytes(length))
    return Answer(code, common, file=(file, first, length))


def _listing(bucket: Path, query: str) -> Answer:
    """ListObjectsV2, without delimiter."""
    values = parse_qs(query)
    prefix = values.get("prefix", [""])[0]
    most = int(values.get("max-keys", ["1000"])[0])
    start = int(values.get("continuation-token", ["0"])[0])
    names = sorted(str(f.relative_to(bucket)) for f in bucket.rglob("*") if f.is_file())
    names = [name for name in names if name.startswith(prefix)]
    rows = []
    for name in names[start : start + most]:
        status = (bucket / name).stat()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
        etag = hashlib.md5(f"{status.st_size}-{status.st_mtime_ns}".encode()).hexdigest()
        rows.append(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{stamp}</LastModified>"
            f"<ETag>&quot;{etag}&quot;</ETag><Size>{status.st_size}</Size></Contents>"
        )
    more = start + most < len(names)
    token = f"<NextContinuationToken>{start + most}</NextContinuationToken>" if more else ""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        f"<Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{most}</MaxKeys>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
    )
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())
