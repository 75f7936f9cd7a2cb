"""Where data lies: buckets, web servers, local folders, all read through the same few methods."""

from data.stores.local import LocalFolder
from data.stores.s3 import Bucket
from data.stores.traffic import Traffic
from data.stores.urls import Access, Store

__all__ = ["Access", "Bucket", "LocalFolder", "Store", "Traffic"]
