"""Encodes TensorBoard events.

TensorBoard's own writer takes half a second to import. A record is its length, the checksum of the length, the content,
and the checksum of the content: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/summary/writer/record_writer.py
"""

from __future__ import annotations

import itertools
import os
import struct
import time

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event

_numbers = itertools.count()


def file_name() -> str:
    """Return a new name for an event file; TensorBoard reads the files of a folder in the order of their names."""
    return f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}.{next(_numbers):06d}"


def encoded(event: Event) -> bytes:
    """Return an event as a record of such a file."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    """Return the CRC-32C, masked as in TFRecord files."""
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
