"""Files of TensorBoard events, as bytes.

TensorBoard's own writer takes half a second to import. A record is its length, a sum of that, the content, and a sum
of that: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/summary/writer/record_writer.py
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
    """A new name for a file of events: programs read those of one folder in the order of their names."""
    return f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}.{next(_numbers):06d}"


def encoded(event: Event) -> bytes:
    """An event as such a file holds it."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _sum(length) + content + _sum(content)


def _sum(content: bytes) -> bytes:
    """CRC-32C, masked as in TFRecord files."""
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
