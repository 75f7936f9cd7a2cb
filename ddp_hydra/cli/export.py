"""The commands export and generate, which load a trained model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import MISSING

from ddp_hydra.cli.commands import parse
from ddp_hydra.cli.resumed import environment_of, without_variables
from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError
from ddp_hydra.finetune import models as pretrained
from ddp_hydra.storage.files import new_folder
from ddp_hydra.storage.manifest import SUFFIX
from ddp_hydra.training import export as exports
from ddp_hydra.training import load_run

SUFFIXES = {
    "torch": SUFFIX,
    "safetensors": ".safetensors",
    "huggingface": "",
    "torch_export": ".pt2",
    "onnx": ".onnx",
}
EXPORT_USAGE = """ddp-hydra export run=<run directory, its URL, or checkpoint>
    format=torch|safetensors|huggingface|torch_export|onnx [out=model.onnx] [which=best|last] [input_shape=[3,224,224]]
    [tolerance=1e-4] [merge=false] [max_shard_size=5GB] [overwrite=true] [trust=true]
    [key=value of the run's config …] [hydra.job.env_set.<name>=<value>]"""


@dataclass
class ExportOptions:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        format: one of `SUFFIXES`.
        out: the file, or the folder of format=huggingface; null: "model" with the format's suffix.
        which: the checkpoint of a run directory.
        split: the data set that the example for the model is taken from, "val" or "train".
        input_shape: shape of one sample of random numbers, in place of that example.
        tolerance: the largest difference from the model that is allowed, as a share of its largest output.
        merge: add an adapter's weights to the model's; false, with format=huggingface: write the adapter alone.
        max_shard_size: the most bytes of a file of format=huggingface.
        overwrite: replace `out`; of a folder, the files of an export.
        trust: build whatever the checkpoint's config names.
    """

    run: str = MISSING
    format: str = MISSING
    out: str | None = None
    which: str = "best"
    split: str = "val"
    input_shape: list[int] | None = None
    tolerance: float = 1e-4
    merge: bool = True
    max_shard_size: str = "5GB"
    overwrite: bool = False
    trust: bool = False


def export(words: Sequence[str]) -> None:
    options, others = parse(ExportOptions, words, EXPORT_USAGE)
    overrides, typed = without_variables(others)
    if options.format not in SUFFIXES:
        raise ConfigError(f"format={options.format}: give {', '.join(SUFFIXES)}")
    out = expanded(options.out or f"model{SUFFIXES[options.format]}")
    if not options.merge and options.format != "huggingface":
        raise ConfigError(f"merge=false is for format=huggingface, not for format={options.format}: leave it out")
    if out.exists() and out.is_dir() != (options.format == "huggingface"):
        kinds = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
        raise ConfigError(f"out={out} is {kinds[0]}, and format={options.format} writes {kinds[1]}: give another out")
    if out.exists() and not options.overwrite:
        raise ConfigError(f"out={out} exists: give overwrite=true, or another file")
    if options.split not in ("val", "train"):
        raise ConfigError(f"split={options.split}: give val or train")
    if any(not isinstance(size, int) for size in options.input_shape or ()):
        raise ConfigError(f"input_shape={options.input_shape}: give the sizes of one sample, [3,224,224]")
    split = None if options.input_shape else options.split
    with environment_of(options.run, options.trust, typed), new_folder(out.absolute().parent):
        trained = load_run.load(options.run, options.which, overrides, split, options.trust)
        example = exports.example_of(trained, options.split, options.input_shape)
        how = options.tolerance, options.merge, options.max_shard_size
        found = exports.export(trained, example, options.format, out, *how)
    sizes = " and ".join(map(str, found["sizes"]))
    batch = "any batch size" if "batch" in found["dynamic"] else f"a batch size of {sizes} only"
    length = f"texts of {found['length']} tokens only: train or validate with texts of the length that you need"
    if not found["length"] or "length" in found["dynamic"]:
        length = "texts of any length" if found["length"] else ""
    size = sum(path.stat().st_size for path in (out.iterdir() if out.is_dir() else [out]))
    taken = ", ".join(filter(None, (batch, length)))
    print(f"{out}: step {trained.step}, {size / 2**20:.2f} MiB, for {taken}")  # noqa: T201
    for name, shape in example.described().items():
        print(f"takes {name} {shape}")  # noqa: T201
    print(f"differs from the model by at most {found['difference']:.3g}, on batches of {sizes}")  # noqa: T201


GENERATE_USAGE = """ddp-hydra generate run=<run directory, its URL, or checkpoint> [n=50] [temperature=1.0] [seed=0]
    [prompt='Once upon'] [max_new_tokens=50] [chat=true] [which=best|last] [trust=true]
    [key=value of the run's config …] [hydra.job.env_set.<name>=<value>]"""


@dataclass
class GenerateOptions:
    """The options of this command.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        n: number of samples; null: 1 text of a model of transformers, 50 samples of a data set's own.
        temperature: values below 1 prefer likely samples, values above 1 unlikely ones.
        seed: of the random numbers.
        which: the checkpoint of a run directory.
        prompt: the beginning of the text, for a model of transformers.
        max_new_tokens: the most tokens that follow.
        chat: the prompt is a user's message, in the tokenizer's chat template.
        trust: build whatever the checkpoint's config names.
    """

    run: str = MISSING
    n: int | None = None
    temperature: float = 1.0
    seed: int = 0
    which: str = "best"
    prompt: str = ""
    max_new_tokens: int = 50
    chat: bool = False
    trust: bool = False


def generate(words: Sequence[str]) -> None:
    options, others = parse(GenerateOptions, words, GENERATE_USAGE)
    overrides, typed = without_variables(others)
    if (options.n is not None and options.n < 1) or options.temperature <= 0:
        raise ConfigError(f"n={options.n}, temperature={options.temperature}: give n >= 1, and a temperature above 0")
    with environment_of(options.run, options.trust, typed):
        print_generated(options, overrides)


def print_generated(options: GenerateOptions, overrides: Sequence[str]) -> None:
    run = load_run.load(options.run, options.which, overrides, trust=options.trust)
    if pretrained.takes_tokens(run.model) and run.model.can_generate():  # type: ignore[operator]
        how = (options.temperature, options.seed, options.max_new_tokens, options.chat)
        for text in pretrained.generate(run.model, options.prompt, options.n or 1, *how):
            print(text)  # noqa: T201
        return
    if not hasattr(run.train_set, "sample"):
        raise ConfigError(f"{type(run.train_set).__name__} has no sample(model, n, temperature, seed) to generate by")
    for line in run.train_set.sample(run.model, options.n or 50, options.temperature, options.seed):
        print(line)  # noqa: T201
