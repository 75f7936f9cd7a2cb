"""Imports OpenCV: it computes in the calling thread, and the import leaves the environment as it was."""

import os

_before = os.environ.get("LD_LIBRARY_PATH")
import cv2  # noqa: E402

if _before is None:
    os.environ.pop("LD_LIBRARY_PATH", None)
else:
    os.environ["LD_LIBRARY_PATH"] = _before

cv2.setNumThreads(1)

__all__ = ["cv2"]
