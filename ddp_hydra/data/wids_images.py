"""Labelled images in tar shards."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ddp_hydra.data.images.bad_samples import LostSamples
from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS
from ddp_hydra.data.images.stored import StoredImages
from ddp_hydra.data.shards.decode import missing_field, not_a_class
from ddp_hydra.data.wids import WidsShards, field_of
from ddp_hydra.storage import shown
from ddp_hydra.storage.base import StaleCredentialsError


class WidsImages(StoredImages):
    """Labelled images of a wids index: one field of a sample is the image, another one its class number.

    Use the `chunked` sampler, which reads few shards at a time. If a shard is missing or damaged, the samples of the
    next shard replace its samples, just as one image replaces another.

    Args:
        index: as in `WidsShards`, and so are base, dataset, cache_dir, cache_gb and prefetch_shards.
        label: extension of the field that holds the class number as text; None: there is none, and the images are to
            be predicted.
        classes: names of the classes, or their number; None: what the index says (`info.classes`).
        images: arguments of `StoredImages` (endpoint_url, region, anon and more) and of `ImageDataset` (transform,
            threads, max_bad_fraction and more).

    Raises:
        ValueError: an argument is out of its range, the file is not such an index, or the classes are not known.
        FileNotFoundError: there is no such file.
        PermissionError: it may not be read.
        ConnectionError: its host is not reachable.
    """

    thread_safe = True
    setting = "data.index"

    def __init__(
        self,
        index: str,
        *,
        base: str | None = None,
        dataset: str | None = None,
        label: str | None = ".cls",
        classes: list[str] | int | None = None,
        cache_dir: str | Path | None = None,
        cache_gb: float = 50,
        prefetch_shards: int = 4,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.index = index
        self.label, self.labelled = label and f".{label.lower().lstrip('.')}", label is not None
        self.shards = WidsShards(
            index,
            base=base,
            dataset=dataset,
            cache_dir=cache_dir,
            cache_gb=cache_gb,
            prefetch_shards=prefetch_shards,
            access=self.access,
        )
        self.shard_lengths = self.shards.shard_lengths
        self._starts = np.cumsum([0, *self.shard_lengths])
        found = self.shards.info.get("classes") if classes is None and isinstance(self.shards.info, dict) else classes
        if not found and not self.labelled:
            found = []
        elif not found:
            raise ValueError(
                f"{self.where()} does not say which classes there are (info.classes): give their number, "
                "data.classes=1000"
            )
        self.classes = [str(number) for number in range(found)] if isinstance(found, int) else list(found)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.shards)

    def where(self) -> str:
        """Return the index."""
        return shown(str(self.index))

    def name(self, index: int) -> str:
        """Return the shard and key of a sample."""
        return self.shards.key(index)

    def sample_id(self, index: int) -> str:
        """Return the shard and key of a sample, whose shard is opened for that."""
        with suppress(LostSamples):
            self._fields(index)
        return self.name(index)

    def fetch(self, index: int) -> Any:
        """Return the image file of a sample, without a copy; raise as `ImageDataset.fetch` does."""
        fields = self._fields(index)
        image = field_of(fields, IMAGE_EXTENSIONS)
        if image is None:
            raise ValueError(missing_field("with an image", fields))
        return image

    def target(self, index: int) -> int:
        """Return the class number of a sample.

        Raises:
            ValueError: it has no valid one.
        """
        if self.label is None:
            return -1
        fields = self._fields(index)
        text = fields.get(self.label)
        if text is None:
            raise ValueError(f"{missing_field(self.label, fields)}: check data.label=...")
        try:
            number = int(bytes(text))
        except ValueError:
            raise ValueError(not_a_class(self.label, text)) from None
        if not 0 <= number < len(self.classes):
            raise ValueError(f"its class is {number}, and there are {len(self.classes)}: check data.classes=...")
        return number

    def _fields(self, index: int) -> dict[str, memoryview]:
        try:
            return self.shards.fields(index)
        except (ValueError, FileNotFoundError, PermissionError) as error:
            if isinstance(error, StaleCredentialsError) or (isinstance(error, PermissionError) and not self._works):
                raise  # the cause is not the shard
            shard = int(np.searchsorted(self._starts, index, side="right")) - 1
            first, end = self._starts[shard : shard + 2].tolist()
            raise LostSamples(str(error), shown(self.shards.shards[shard].url), first, end - first) from None

    def expect(self, indices: list[int]) -> None:
        """Say which samples will be read, in order, so that their shards are downloaded before that."""
        self.shards.expect(indices)

    def read_elsewhere(self, indices: list[int]) -> None:
        """Say which of these samples another process reads."""
        self.shards.read_elsewhere(indices)

    def stats(self) -> dict[str, float]:
        """Return what reading has cost this process so far, as `ImageDataset.stats` does; cache hits count shards."""
        return super().stats() | self.shards.stats()

    def close(self) -> None:
        """Stop the threads and the downloads, and close the shards."""
        super().close()
        self.shards.close()
