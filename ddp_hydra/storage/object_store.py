"""Reads and writes objects over HTTP, with obstore: what buckets and web servers have in common; reads web servers.

The client of object stores has threads, which a fork does not copy: in a process that was forked from one that has used
it, as a DataLoader's workers are, it would hang. So such a process starts another program, this module, which reads for
it and sends what it read through a socket.
"""

from __future__ import annotations

import gzip
import http.client
import os
import pickle
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache, wraps
from inspect import isgeneratorfunction
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit, urlunsplit

from ddp_hydra import forked
from ddp_hydra.storage.base import PIECE_BYTES, RangesIgnoredError, Store, TemporaryError, bare_url, cause

_THREADS = 32
_used = False
"""Whether this process has used a client, which does not work in its forks."""
_forked = False
"""Whether this process is such a fork."""
_starting = threading.Lock()
Method = TypeVar("Method", bound=Callable[..., Any])


def _note_fork() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_note_fork)


def by_reader(method: Method) -> Method:
    """Have the `Reader` call a method of a store where this process is a fork."""

    @wraps(method)
    def call(store: Any, *args: Any, **options: Any) -> Any:
        if not _forked:
            return method(store, *args, **options)
        with _starting:
            reader = _reader_of(os.getpid())
        found = reader.iterate(store, method.__name__, args, options)
        return found if isgeneratorfunction(method) else next(found)

    return cast(Method, call)


class Reader:
    """A program that reads stores for this process, and ends with it. Each request has a connection of its own."""

    def __init__(self) -> None:
        self._requests, self.program = forked.start_program(__name__)

    def iterate(self, store: Any, method: str, args: Any, options: Any) -> Iterator[Any]:
        """Yield what a method of a store returns, as a list if it is no generator."""
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            try:
                with theirs:
                    socket.send_fds(self._requests, [b"."], [theirs.fileno()])
                connection.send((pickle.dumps(store), method, args, options))
                while (answer := connection.recv()) is not None:
                    value, error = answer
                    if error is not None:
                        raise error
                    if isinstance(value, bytes):
                        store.traffic.add(requests=1, bytes=len(value))
                    yield value
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise ConnectionError(
                    "the process that reads the store for this one has ended (killed, or out of memory)"
                ) from None


@lru_cache(1)
def _reader_of(pid: int) -> Reader:
    return Reader()


def serve(requests: socket.socket) -> None:
    """Answer requests until the other end is closed."""
    stores: dict[bytes, Any] = {}

    def answer(connection: Connection) -> None:
        with connection:
            try:
                store, method, args, options = connection.recv()
                if store not in stores:
                    stores.setdefault(store, pickle.loads(store))  # noqa: S301 (from the process that started this one)
                found = getattr(stores[store], method)(*args, **options)
                for value in found if isinstance(found, Iterator) else [found]:
                    connection.send((value if isinstance(value, (int, list, tuple)) else bytes(value), None))
                connection.send(None)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return  # the other end is gone
            except Exception as error:
                connection.send((None, error))

    with ThreadPoolExecutor(_THREADS) as pool:
        while fds := socket.recv_fds(requests, 1, 1)[1]:
            pool.submit(answer, Connection(fds[0]))
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Read for the process that has started this one."""
    serve(socket.socket(fileno=int(sys.argv[1])))


_MOST_PIECES = 9000  # S3 takes 10,000
_STREAMED_BYTES = 2**20
_PAGE = 1000
_EMPTY = 2
"""A listing must be empty this many times before it counts as empty."""
_NO_RANGES = ("non-partial response", "Range request not supported", "CONTENT_RANGE")
"""Words of the client's errors about answers that are no part of an object, or do not say of how large a one."""


Object = tuple[str, int]
"""Key and size in bytes."""


class ObjectStore(Store):
    """Reads and writes objects over HTTP; see `Store`. It also reads in processes that were forked."""

    _get_in_fork = by_reader(Store.get)
    get_range = by_reader(Store.get_range)
    size = by_reader(Store.size)
    folders = by_reader(Store.folders)

    def get(self, key: str, size: int | None = None) -> Any:
        """Return the content of an object; see `Store`. Written out, as a Python call is one percent of a fetch."""
        if _forked:
            return self._get_in_fork(key, size)
        content = self._request(self._get, key, key, size)
        self.traffic.add(requests=1, bytes=len(content))
        return content if self.setting is not None else bytes(content)

    @by_reader
    def stream(self, key: str, size: int, start: int = 0) -> Iterator[Any]:
        """Yield an object in pieces, in order, with one request for all of it: for stores without ranges.

        After an error the object is read from its beginning, as there is no other way; bytes that were yielded before
        are skipped.
        """
        given, position = start, 0
        pieces: Iterator[Any] | None = None

        def next_piece(client: Any) -> Any:
            nonlocal given, position, pieces
            try:
                if pieces is None:
                    pieces, position = iter(self._pieces(client, key)), 0
                    self.traffic.add(requests=1)
                for piece in pieces:
                    position += len(piece)
                    self.traffic.add(bytes=len(piece))
                    if position > size:
                        break
                    if (new := position - given) > 0:
                        given = position
                        return memoryview(piece)[max(0, len(piece) - new) :]
                if position != size:
                    raise self._wrong_body(key, position, size)
                return None
            except Exception:
                pieces = None
                raise

        while (piece := self._request(next_piece, key)) is not None:
            yield piece

    @by_reader
    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the key and the size in bytes of each object below a folder; see `Store`.

        The key of a folder's marker comes without its last slash, and size 0. A key that is not a path is a ValueError.
        """
        last: Object | None = None
        pages: Iterator[list[Object]] | None = None
        n_empty = 0

        def next_page(client: Any) -> list[Object]:
            nonlocal pages, n_empty
            while True:
                pages = pages or self._pages(client, prefix, last)
                try:
                    return next(pages)
                except StopIteration as end:
                    pages, n_empty = None, n_empty + (last is None)
                    if not end.value and (last or n_empty >= _EMPTY):
                        if last is None:
                            self._check_answers(client, prefix)
                        return []
                except Exception:
                    pages = None
                    raise

        while page := self._request(next_page, None, first=True):
            last = page[-1]
            yield from page

    def _pages(self, client: Any, prefix: str, last: Object | None) -> Generator[list[Object], None, bool]:
        """Yield the objects behind `last`, page by page; return whether there were any.

        The client mistakes several answers for the end of a listing: an error document, the page of a proxy, "more"
        without a token. So an ended listing begins again, just before the last object. Only an answer that has this
        object, and nothing after it, is the end. After an error, the listing goes on in the same way. The order of
        keys is not used, as not all stores sort them.
        """
        has_reached, has_more = last is None, False
        # A shorter key is a smaller one; the client takes none that ends with a dot or a slash.
        offset = last[0][:-1].rstrip("./") if last else ""
        for page in client.list(prefix or None, offset=offset or None, chunk_size=_PAGE):
            found: list[Object] = [(item["path"], item["size"]) for item in page]
            while not has_reached and found:  # the marker of a folder, of no bytes, may have the same path as a file
                path, size = found.pop(0)
                has_reached = last is not None and (path, bool(size)) == (last[0], bool(last[1]))
            if found:
                has_more = True
                yield found
        if not has_reached and last is not None:
            raise TemporaryError(f"the listing of {self.public_url()} broke off at {last[0]!r}: try again later")
        return has_more

    def _get(self, client: Any, key: str, size: int | None) -> Any:
        content = client.get(key).bytes()
        if size is not None and len(content) != size:
            self._check_changed(client, key, content, size)
        return content

    def _check_changed(self, client: Any, key: str, content: Any, size: int) -> None:
        is_document = bytes(content[:1]) in (b"", b"<")  # an error document, sent with the status of a success
        if is_document or self._size(client, key) != len(content):
            raise self._wrong_body(key, len(content), size)

    def _pieces(self, client: Any, key: str) -> Iterable[Any]:
        return cast(Iterable[Any], client.get(key).stream(min_chunk_size=_STREAMED_BYTES))

    def _get_range(self, client: Any, key: str, start: int, end: int) -> Any:
        return client.get_range(key, start=start, end=end)

    def _size(self, client: Any, key: str) -> int:
        return int(client.head(key)["size"])

    def _folders(self, client: Any, prefix: str) -> list[str]:
        """List the folders until two answers agree: the client takes an error document for an empty one."""
        answers = [client.list_with_delimiter(prefix or None)["common_prefixes"] for _ in range(2)]
        if answers[0] != answers[1]:
            raise TemporaryError(f"{self.public_url()} lists its folders differently each time: try again later")
        return sorted(folder.rsplit("/", 1)[-1] for folder in answers[0])

    def _put(self, client: Any, key: str, content: Any) -> None:
        piece = PIECE_BYTES
        if hasattr(content, "seek"):
            piece = max(piece, -(-content.seek(0, os.SEEK_END) // _MOST_PIECES))
            content.seek(0)
        client.put(key, content, chunk_size=piece, max_concurrency=4)

    def _delete(self, client: Any, key: str) -> None:
        client.delete(key)

    def _etag(self, client: Any, key: str) -> str:
        return str(client.head(key)["e_tag"])

    def _explain(self, error: Exception, key: str | None) -> Exception:
        text = str(error)
        if isinstance(error, RuntimeError | ImportError | PermissionError | RangesIgnoredError):
            return error
        if any(reason in text for reason in _NO_RANGES):
            return self._without_ranges(key)
        if found := re.match(r".*Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text):
            start, end, came_from, came_to = map(int, found.groups())
            return self._wrong_body(str(key), came_to - came_from, end - start)
        if "invalid list response" in text:
            return self._no_listing()
        return self._explain_answer(error, key)

    def _without_ranges(self, key: str | None) -> Exception:
        return RangesIgnoredError(f"{self.public_url()} gives whole objects only, and a part of {key} was asked for")

    def _explain_answer(self, error: Exception, key: str | None) -> Exception:
        raise NotImplementedError

    def _client(self) -> Any:
        global _used
        if _forked:
            raise RuntimeError(
                "a store was used in a process that then forked this one: write in that one, or start processes by "
                "'spawn'"
            )
        client = self._opened  # another thread may forget it
        if client is None:
            _used = True
            client = super()._client()
        return client

    def _options(self, url: str | None) -> dict[str, Any]:
        """Return how obstore connects to a URL. It does not retry by itself, as this class does that and counts it."""
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=3),
            "read_timeout": timedelta(seconds=self.timeout_s),
            "timeout": timedelta(hours=1),
        }
        if url is not None and url.startswith("http://"):
            client["allow_http"] = True
            if is_here(url):
                # A proxy of the environment can't reach this machine. One that excludes all hosts and addresses, also
                # those that this server redirects to, is the way round.
                client |= {"proxy_url": url, "proxy_excludes": "*,0.0.0.0/0,::/0"}
        return {"client_options": client, "retry_config": {"max_retries": 0}}


class WebServer(ObjectStore):
    """Reads the files of a web server; see `Store`. Its folders can't be listed.

    What comes with `Content-Encoding: gzip` is decoded. Such a file has the size of its content, and no parts.

    Args:
        url: scheme and host, e.g. "https://example.org"; a query is sent with each request, as signed URLs need it.
        retrying: arguments of `Store`.
    """

    setting = "data"

    def __init__(self, url: str, **retrying: Any) -> None:
        self.url = url
        super().__init__(**retrying)

    def objects(self, prefix: str = "") -> Any:
        """Refuse: web servers have no listing that programs could rely on."""
        raise ValueError(f"the folders of {self.public_url()} can't be listed: give a bucket, a folder or an index")

    folders = objects

    def _get(self, client: Any, key: str, size: int | None) -> Any:
        content = self._whole(client, key)
        if size is not None and len(content) != size:
            self._check_changed(client, key, content, size)
        return content

    def _whole(self, client: Any, key: str) -> Any:
        try:
            answer = client.get(key)
        except Exception as error:
            if not _lacks_length(error):
                raise
            return self._download(key)
        return _decoded(answer.bytes()) if _is_encoded(key, answer.attributes) else answer.bytes()

    def _pieces(self, client: Any, key: str) -> Iterable[Any]:
        try:
            answer = client.get(key)
        except Exception as error:
            if not _lacks_length(error):
                raise
            return [self._download(key)]
        if _is_encoded(key, answer.attributes):
            return [_decoded(answer.bytes())]
        return cast(Iterable[Any], answer.stream(min_chunk_size=_STREAMED_BYTES))

    def _get_range(self, client: Any, key: str, start: int, end: int) -> Any:
        try:
            answer = client.get(key, options={"range": (start, end)})
            if not _is_encoded(key, answer.attributes):
                return answer.bytes()
        except Exception as error:
            if not _lacks_length(error):
                raise
        raise self._without_ranges(key)

    def _size(self, client: Any, key: str) -> int:
        try:
            return self._size_of(client, key, {"head": True})
        except Exception as error:
            if not _lacks_length(error) and not _has_status(error, "401", "403"):  # as of a URL that is signed for GET
                raise
        try:
            return self._size_of(client, key, {"range": (0, 1)})
        except Exception as error:
            is_whole = isinstance(self._explain(error, key), RangesIgnoredError) or _has_status(error, "416")
            if not is_whole and not _lacks_length(error):
                raise
        return len(self._download(key))

    def _size_of(self, client: Any, key: str, options: dict[str, Any]) -> int:
        answer = client.get(key, options=options)
        return len(self._whole(client, key)) if _is_encoded(key, answer.attributes) else int(answer.meta["size"])

    def _download(self, key: str) -> bytes:
        parts = urlsplit(self.url)
        path = f"{parts.path.rstrip('/')}/{quote(key)}"
        return download(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), self.timeout_s)

    def _put(self, client: Any, key: str, *_: Any) -> None:
        raise PermissionError(f"{self.public_url()} is a web server, and is only read: give a bucket or a folder")

    _delete = _put

    def _open(self) -> Any:
        from obstore.store import HTTPStore

        return HTTPStore.from_url(self.url, **self._options(self.url))

    def _explain_answer(self, error: Exception, key: str | None) -> Exception:
        full = str(error)
        status = (re.findall(r"status code: (\d{3})", full.split("\n\nDebug source")[0]) or [""])[0]
        if isinstance(error, FileNotFoundError):
            status = "404"
        return _error(f"{self.public_url()}/{key}", status, cause(full))


def _lacks_length(error: Exception) -> bool:
    """Return whether obstore refuses an answer that does not say how long it is; some servers refuse HEAD, too."""
    return "Content-Length" in str(error) or _has_status(error, "405", "501")


def _has_status(error: Exception, *statuses: str) -> bool:
    return any(f"status code: {status}" in str(error) for status in statuses)


def _is_encoded(key: str, headers: Any) -> bool:
    """Return whether what a server sends is the gzip of a file; of an archive it may only mean the file itself."""
    return "gzip" in headers.get("Content-Encoding", "").lower() and not key.lower().endswith((".gz", ".tgz"))


def _decoded(content: Any) -> bytes:
    if bytes(content[:2]) != b"\x1f\x8b":  # it is not what the server says
        return bytes(content)
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise TemporaryError(f"a file that the server sends with Content-Encoding: gzip is damaged ({error})") from None


def is_here(url: str) -> bool:
    """Return whether the host of a URL is this machine."""
    host = urlsplit(url).hostname or ""
    return host.split(".")[0] in ("localhost", "127") or host == "::1"


def download(url: str, timeout_s: float) -> bytes:
    """Return the content of a file on a web server.

    It needs no obstore, and takes answers that do not say how long they are, which obstore refuses. Errors are those of
    `Store.get`.
    """
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here(url) else []))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            content: bytes = response.read()
            return _decoded(content) if _is_encoded(urlsplit(url).path, response.headers) else content
    except urllib.error.HTTPError as error:
        with error:
            raise _error(bare_url(url), str(error.code), "") from None
    except (OSError, http.client.HTTPException) as error:
        raise _error(bare_url(url), "", f" ({getattr(error, 'reason', None) or error})") from None


def _error(where: str, status: str, reason: str) -> Exception:
    """Return the error for an answer that is not a success; `reason` is why none came, as " (reason)"."""
    if status in ("404", "410"):
        return FileNotFoundError(f"there is no {where} ({status}): check the URL")
    if status in ("401", "403"):
        return PermissionError(f"{where} may not be read ({status}): check the URL, or that it is still valid")
    if not status:
        return TemporaryError(f"{where} is not reachable{reason}: check the network and the URL")
    kind = TemporaryError if status.startswith("5") or status in ("408", "429") else ConnectionError
    return kind(f"{where} answered {status}: try again later, or check the URL")
