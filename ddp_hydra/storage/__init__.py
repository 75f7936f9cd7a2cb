"""Stores of data and results: buckets, web servers and local folders, with the same few methods."""

from ddp_hydra.storage.base import Store, TransferCounters, bare_url
from ddp_hydra.storage.local import LocalFolder
from ddp_hydra.storage.s3 import Bucket
from ddp_hydra.storage.urls import Access, is_remote

__all__ = ["Access", "Bucket", "LocalFolder", "Store", "TransferCounters", "bare_url", "is_remote"]
