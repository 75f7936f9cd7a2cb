"""Names, cut into windows of characters for a model that predicts the next one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddp_hydra.data.names import check, check_range, is_of
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import Access, bare_url, is_remote
from ddp_hydra.storage.files import private_folder, replacing, user_cache
from ddp_hydra.storage.object_store import download
from ddp_hydra.storage.urls import as_text

ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "
PAD, STOP = ALPHABET.index("*"), ALPHABET.index("+")
PUBLIC_URL = "https://saturn-public-data.s3.us-east-2.amazonaws.com/examples/pytorch/seattle_pet_licenses_cleaned.json"
_SET_SOURCE = "type data.source=<path, URL or s3://bucket/key> of a JSON list of names"


class PetNames(Dataset):
    """Windows of characters over a list of names.

    Each name, with a stop character after it, gives one window for each of its characters: the last
    `window + 1` characters up to there, padded on the left. The first `window` of them are what the model
    sees, the last `window` what it is to say.

    Args:
        source: a JSON list of lower-case names: an http(s) URL, a path, or s3://bucket/key.
        cache_dir: where downloads are kept; None: ddp_hydra in the user's cache folder (XDG_CACHE_HOME).
        window: characters that the model sees.
        holdout: share of the distinct names kept for validation, 0..1, chosen by a hash of each name.
        split: "train": the names not held out; "val": the others.
        timeout_s: seconds to wait for the network.
        endpoint_url: of an s3:// source; None: what the environment says, else AWS.
        region: of an s3:// source.
        anon: read an s3:// source without credentials.

    Attributes:
        names: the names of the split, with repetitions, in the order of the file.
        windows: uint8 (samples, window + 1), indices into `ALPHABET`.
        num_classes: characters in the alphabet.

    Raises:
        ValueError: an argument out of its range, or a file that is not a list of such names.
        FileNotFoundError: no such file, URL, bucket or object.
        PermissionError: the source can't be read.
        ConfigError: no network, or the host is not reachable, in the time that the download tries it again.
    """

    thread_safe = True
    built_once = True
    num_classes = len(ALPHABET)

    def __init__(
        self,
        source: str | os.PathLike[str] = PUBLIC_URL,
        cache_dir: str | None = None,
        window: int = 8,
        holdout: float = 0.0,
        split: str = "train",
        timeout_s: float = 30,
        endpoint_url: str | None = None,
        region: str | None = None,
        anon: bool = False,
    ) -> None:
        check_range("window", window, 1, example=8)
        check(holdout, split)
        self.window = window
        access = {"endpoint_url": endpoint_url, "region": region, "anon": anon}
        names = _load(as_text(source), cache_dir, timeout_s, access)
        self._known = frozenset(names)
        names = [name for name in names if is_of(name, holdout, split)]
        if not names:
            raise ValueError(f"no names are left for {split}: holdout is {holdout}; type data.holdout=0.1")
        self.names = names
        self.windows = make_windows(names, window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return what the model sees and what it is to say, each uint8 (window,)."""
        window = self.windows[index]
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Return a batch of windows, uint8 (batch, window + 1)."""
        return self.windows[torch.as_tensor(indices)]

    def collate(self, samples: Tensor) -> Tensor:
        """Return the samples: `__getitems__` made them one tensor."""
        return samples

    def prepare(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Split windows into input and target, on the device they are on.

        Args:
            batch: uint8 (batch, window + 1).

        Returns:
            One-hot characters, float32 (batch, window, 31), and the character after each, (batch, window).
        """
        characters = batch.long()
        return F.one_hot(characters[:, :-1], self.num_classes).float(), characters[:, 1:]

    def sample(self, model: nn.Module, n: int, temperature: float = 1.0, seed: int = 0) -> list[str]:
        """Let the model make up names.

        Args:
            model: (batch, window, 31) one-hot -> logits (batch, window, 31), on any device.
            n: how many names.
            temperature: below 1: more usual names; above 1: stranger ones.
            seed: the same seed and model give the same names.

        Returns:
            `n` names that are new: none of the source, none empty, none twice. Fewer only where the model
            keeps saying the same ones.

        Raises:
            ValueError: `n` or `temperature` is not positive.
        """
        if n < 1 or temperature <= 0:
            raise ValueError(f"n is {n} and temperature {temperature}; both must be above 0: type n=50 temperature=1.0")
        generator = torch.Generator().manual_seed(seed)
        was_training = model.training
        model.eval()
        new: dict[str, None] = {}
        try:
            for _ in range(20):
                for name in self._generate(model, 2 * n + 32, temperature, generator):
                    if name and name not in self._known:
                        new[name] = None
                if len(new) >= n:
                    break
        finally:
            model.train(was_training)
        return list(new)[:n]

    @torch.no_grad()
    def _generate(self, model: nn.Module, n: int, temperature: float, generator: torch.Generator) -> list[str]:
        """Make up `n` names at once, without those that grow longer than the longest known one."""
        first = next(model.parameters())
        longest = max(map(len, self._known)) + 1
        said = torch.full((n, self.window), PAD)
        ended = torch.zeros(n, dtype=torch.bool)
        for _ in range(longest):
            x = F.one_hot(said[:, -self.window :], self.num_classes)
            logits = model(x.to(first.device, first.dtype))[:, -1].float().cpu() / temperature
            logits[:, PAD] = -torch.inf
            character = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            said = torch.cat([said, character], dim=1)
            ended |= character[:, 0] == STOP
            if ended.all():
                break
        texts = ["".join(ALPHABET[index] for index in row) for row in said[ended, self.window :].tolist()]
        return [text.partition("+")[0].strip() for text in texts]


def make_windows(names: Sequence[str], window: int) -> Tensor:
    """Cut names into windows.

    Args:
        names: of the alphabet's characters, without padding and stop.
        window: characters that the model sees.

    Returns:
        uint8 (characters and stops of all names, window + 1), indices into `ALPHABET`.
    """
    table = torch.zeros(256, dtype=torch.uint8)
    for index, character in enumerate(ALPHABET):
        table[ord(character)] = index
    text = bytearray("+".join([*names, ""]).encode("ascii"))
    characters = table[torch.frombuffer(text, dtype=torch.uint8).long()]
    lengths = torch.tensor([len(name) + 1 for name in names])
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    # Row i looks back from character i; what lies before its name is padding.
    positions = torch.arange(len(characters))[:, None] + torch.arange(-window, 1)
    seen = characters[positions.clamp(min=0)]
    return seen.masked_fill_(positions < starts[:, None], PAD)


def _load(source: str, cache_dir: str | None, timeout_s: float, access: dict[str, Any]) -> list[str]:
    """Read and check the names; keep those that come over the network on disk."""
    if not is_remote(source):
        return _parse(_read(source, timeout_s, access), source)
    folder = Path(cache_dir).expanduser() if cache_dir else user_cache()
    identity = "\n".join(filter(None, (source, Access(**access).endpoint(source))))
    name = f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-names.json"
    with contextlib.suppress(OSError, ValueError):  # not there yet, or damaged
        return _parse((private_folder(folder) / name).read_bytes(), bare_url(source))
    content = _read(source, timeout_s, access)
    names = _parse(content, bare_url(source))
    try:
        with replacing(private_folder(folder) / name, durable=False) as part:
            part.write_bytes(content)
    except OSError as error:
        warnings.warn(f"the names can't be kept for the next time: {error}; type data.cache_dir=...", stacklevel=3)
    return names


def _read(source: str, timeout_s: float, access: dict[str, Any]) -> bytes:
    try:
        if source.startswith(("http://", "https://")):
            return download(source, timeout_s)
        store, key = Access(**access, setting="data.source").open(source)
        return bytes(store.get(key))
    except OSError as error:
        kinds = {PermissionError: PermissionError, ConnectionError: ConfigError}  # it was tried again already
        kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), FileNotFoundError)
        place = f"source {bare_url(source)!r} on {socket.gethostname()}: " if error.filename else ""
        raise kind(f"{place}{error}; {_SET_SOURCE}") from None


def _parse(content: bytes | bytearray, source: str) -> list[str]:
    try:
        names = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); {_SET_SOURCE}") from None
    if not isinstance(names, list) or not names:
        raise ValueError(f"{source} holds {str(names)[:60]!r}, and must be a list of names; {_SET_SOURCE}")
    allowed = frozenset(ALPHABET) - {"*", "+"}
    bad = [
        f"{name!r} (number {index})"
        for index, name in enumerate(names)
        if not (isinstance(name, str) and name and allowed.issuperset(name))
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} of the {len(names)} names in {source} are not text of the characters {ALPHABET[2:]!r}: "
            f"{', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}. Write them in lower case"
        )
    return names
