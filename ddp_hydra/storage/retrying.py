"""Repeats requests to a store that fail for now."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from ddp_hydra.storage.base import (
    ObjectChangedError,
    OtherRegionError,
    StaleCredentialsError,
    TemporaryError,
    WrongBodyError,
)
from ddp_hydra.storage.counters import TransferCounters
from ddp_hydra.storage.retry import Backoff

T = TypeVar("T")


class Retrying(ABC):
    """A store that retries by itself.

    It opens its connections when they are first needed, in each process anew, so it can be pickled at any time.
    Its methods may be called from many threads at once.

    Args:
        timeout_s: how long a connection may stay silent.
        retry_timeout_s: how long to retry a request; the first contact gets `FIRST_RETRY_TIMEOUT_S` at most.
        traffic: counts; None: an own one.

    Attributes:
        url: of the store, for messages.
        ranges: whether the store can return parts of objects, as far as is known.
    """

    url: str
    FIRST_RETRY_TIMEOUT_S = 5.0
    REGION_RETRY_TIMEOUT_S = 1.0
    """How long to retry a wrong region, before any request has worked."""

    def __init__(self, timeout_s: float, retry_timeout_s: float, traffic: TransferCounters | None) -> None:
        self.timeout_s = timeout_s
        self.retry_timeout_s = retry_timeout_s
        self.ranges = True
        self.traffic = traffic or TransferCounters()
        self._reset()

    def _reset(self) -> None:
        self._opened: Any = None
        self._opening = threading.Lock()
        self._closing = threading.Event()
        self._worked = False

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_opened", "_opening", "_closing", "_worked")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @abstractmethod
    def _open(self) -> Any:
        """Return the client's store."""

    @abstractmethod
    def _explain(self, error: Exception, key: str | None) -> Exception:
        """Turn an error of the client into a builtin one that says what to type."""

    def close(self) -> None:
        """End all waiting for retries."""
        closing, self._closing = self._closing, threading.Event()
        closing.set()

    def _request(self, request: Callable[[Any], T], key: str | None, first: bool = False) -> T:
        try:
            result = request(self._store())
        except Exception as error:
            return self._request_again(self._explained(error, key), request, key, first)
        self._worked = True
        return result

    def _request_again(self, error: Exception, request: Callable[[Any], T], key: str | None, first: bool) -> T:
        timeout_s = self.retry_timeout_s
        if not self._worked and isinstance(error, OtherRegionError):
            timeout_s = min(timeout_s, self.REGION_RETRY_TIMEOUT_S)
        elif not self._worked and first:
            timeout_s = min(timeout_s, self.FIRST_RETRY_TIMEOUT_S)
        backoff = Backoff(timeout_s, self._closing.wait)
        while True:
            is_stale = isinstance(error, StaleCredentialsError)
            may_pass = isinstance(error, TemporaryError) or (is_stale and self._renew())
            if not may_pass or not backoff.wait():
                raise error from None
            self.traffic.add(retries=1)
            try:
                result = request(self._store())
            except Exception as again:
                error = self._explained(again, key)
            else:
                self._worked = True
                return result

    def _explained(self, error: Exception, key: str | None) -> Exception:
        """Turn any error into one of ours."""
        if isinstance(error, TemporaryError | StaleCredentialsError | ObjectChangedError | NotImplementedError):
            return error
        return self._explain(error, key)

    def _wrong_body(self, key: str, came: int, size: int) -> WrongBodyError:
        return WrongBodyError(
            f"{self.shown()}/{key} came with {came:,} bytes in place of {size:,}: try again later; where it was "
            "changed, list it anew"
        )

    def shown(self) -> str:
        """Return the URL of the store, without its secrets."""
        return self.url

    def _renew(self) -> bool:
        """Forget the credentials, and return whether new ones may help: not if the old ones have never worked."""
        self._opened = None
        return self._worked

    def _store(self) -> Any:
        store = self._opened
        if store is None:
            with self._opening:
                if self._opened is None:
                    self._opened = self._open()
                store = self._opened
        return store
