"""The commands export and generate, which load a trained model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from ddp_hydra.cli.commands import parse
from ddp_hydra.errors import ConfigError
from ddp_hydra.training import export as exports
from ddp_hydra.training import load_run

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
EXPORT_USAGE = """ddp-hydra export run=<run directory, its URL, or checkpoint> format=safetensors|torch_export|onnx
    [out=model.onnx] [which=best|last] [input_shape=[3,224,224]] [tolerance=1e-4] [overwrite=true]
    [trust=true] [key=value of the run's config …]"""


@dataclass
class ExportOptions:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        format: one of `export.FORMATS`.
        out: the file; null: "model" with the format's suffix.
        which: the checkpoint of a run directory.
        split: the data set that the example for the model is taken from, "val" or "train".
        input_shape: shape of one sample of random numbers, in place of that example.
        tolerance: the largest difference from the model that is allowed, as a share of its largest output.
        overwrite: replace `out`.
        trust: build whatever the checkpoint's config names.
    """

    run: str = MISSING
    format: str = MISSING
    out: str | None = None
    which: str = "best"
    split: str = "val"
    input_shape: list[int] | None = None
    tolerance: float = 1e-4
    overwrite: bool = False
    trust: bool = False


def export(words: Sequence[str]) -> None:
    options, overrides = parse(ExportOptions, words, EXPORT_USAGE)
    if options.format not in SUFFIXES:
        raise ConfigError(f"format={options.format}: give {', '.join(SUFFIXES)}")
    out = Path(options.out or f"model{SUFFIXES[options.format]}").expanduser()
    if out.exists() and not options.overwrite:
        raise ConfigError(f"out={out} exists: give overwrite=true, or another file")
    if options.split not in ("val", "train"):
        raise ConfigError(f"split={options.split}: give val or train")
    if any(not isinstance(size, int) for size in options.input_shape or ()):
        raise ConfigError(f"input_shape={options.input_shape}: give the sizes of one sample, [3,224,224]")
    split = None if options.input_shape else options.split
    trained = load_run.load(options.run, options.which, overrides, split, options.trust)
    example = exports.example_of(trained, options.split, options.input_shape)
    found = exports.export(trained, example, options.format, out, options.tolerance)
    sizes = " and ".join(map(str, found["sizes"]))
    batch = "any batch size" if "batch" in found["dynamic"] else f"a batch size of {sizes} only"
    length = f"texts of {found['length']} tokens only: train or validate with texts of the length that you need"
    if not found["length"] or "length" in found["dynamic"]:
        length = "texts of any length" if found["length"] else ""
    taken = ", ".join(filter(None, (batch, length)))
    print(f"{out}: step {trained.step}, {out.stat().st_size / 2**20:.2f} MiB, for {taken}")  # noqa: T201
    for name, shape in example.described().items():
        print(f"takes {name} {shape}")  # noqa: T201
    print(f"differs from the model by at most {found['difference']:.3g}, on batches of {sizes}")  # noqa: T201


GENERATE_USAGE = """ddp-hydra generate run=<run directory, its URL, or checkpoint> [n=50] [temperature=1.0] [seed=0]
    [which=best|last] [trust=true] [key=value of the run's config …]"""


@dataclass
class GenerateOptions:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        n: number of samples.
        temperature: values below 1 prefer likely samples, values above 1 unlikely ones.
        seed: of the random numbers.
        which: the checkpoint of a run directory.
        trust: build whatever the checkpoint's config names.
    """

    run: str = MISSING
    n: int = 50
    temperature: float = 1.0
    seed: int = 0
    which: str = "best"
    trust: bool = False


def generate(words: Sequence[str]) -> None:
    options, overrides = parse(GenerateOptions, words, GENERATE_USAGE)
    if options.n < 1 or options.temperature <= 0:
        raise ConfigError(f"n={options.n}, temperature={options.temperature}: give n >= 1, and a temperature above 0")
    run = load_run.load(options.run, options.which, overrides, trust=options.trust)
    if not hasattr(run.train_set, "sample"):
        raise ConfigError(f"{type(run.train_set).__name__} has no sample(model, n, temperature, seed) to generate by")
    for line in run.train_set.sample(run.model, options.n, options.temperature, options.seed):
        print(line)  # noqa: T201
