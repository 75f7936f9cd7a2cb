"""S3's listings as files that a plain web server can send: one XML page for every 1000 keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = "listing"
"""Below the server's root: FOLDER/<prefix>/<page>.xml, with `start-after` last.xml, with `delimiter=/` folders.xml."""
PAGE = 1000
"""Keys a page: what S3 gives at most."""


@dataclass(frozen=True)
class Entry:
    """Holds one object of a listing.

    Args:
        key: of the object.
        size: in bytes.
        modified: seconds since the epoch.
    """

    key: str
    size: int
    modified: float

    def xml(self) -> str:
        """It as S3 writes it; the ETag is nginx's, so that a conditional read of the object works."""
        when = datetime.fromtimestamp(self.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        etag = f"&quot;{int(self.modified):x}-{self.size:x}&quot;"
        return (
            f"<Contents><Key>{escape(self.key)}</Key><LastModified>{when}</LastModified><ETag>{etag}</ETag>"
            f"<Size>{self.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )


def write(folder: Path, bucket: str, prefix: str, entries: Sequence[Entry]) -> None:
    """Write all pages of a prefix. The token of page n is "page-n", in both versions of the API.

    Our client asks once more at the end, for what comes after a key just before the last one: last.xml is the answer.

    Args:
        folder: for the pages.
        bucket: its name.
        prefix: what is listed, without the slash at its end.
        entries: sorted by key.
    """
    folder.mkdir(parents=True)
    pages = [entries[start : start + PAGE] for start in range(0, len(entries), PAGE)]
    for number, page in enumerate(pages):
        content = "".join(entry.xml() for entry in page)
        (folder / f"{number}.xml").write_text(_page(bucket, prefix, content, len(page), number, len(pages)))
    (folder / "last.xml").write_text(_page(bucket, prefix, entries[-1].xml(), 1, 0, 1))
    inside = sorted({entry.key.removeprefix(f"{prefix}/").partition("/")[0] for entry in entries})
    content = "".join(
        f"<CommonPrefixes><Prefix>{escape(f'{prefix}/{name}/')}</Prefix></CommonPrefixes>" for name in inside
    )
    (folder / "folders.xml").write_text(_page(bucket, prefix, content, len(inside), 0, 1))


def _page(bucket: str, prefix: str, content: str, count: int, number: int, pages: int) -> str:
    token, more = f"page-{number + 1}", number + 1 < pages
    rest = f"<NextContinuationToken>{token}</NextContinuationToken><NextMarker>{token}</NextMarker>" if more else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}/</Prefix><KeyCount>{count}</KeyCount>"
        f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{rest}{content}</ListBucketResult>"
    )
