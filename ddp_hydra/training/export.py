"""Writes a trained model for other programs, called as with its data, and checks what was written against it."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ddp_hydra import results
from ddp_hydra.config import redact
from ddp_hydra.config.targets import without
from ddp_hydra.data.batch import described, mapped, tensors
from ddp_hydra.errors import ConfigError
from ddp_hydra.finetune import adapter
from ddp_hydra.finetune import models as pretrained
from ddp_hydra.storage.files import replacing, writing
from ddp_hydra.training import build_data, builders, plain_state
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.load_run import TrainedModel
from ddp_hydra.training.parallel import weights
from ddp_hydra.training.seeds import seeded_as

Written = tuple[Callable[..., Any], tuple[str, ...]]
"""The written model as a function, and which of `FREE` it takes in any size."""
MODEL_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.*",
)
"""Files of an earlier export to a folder, which this one may write under other names."""
_ONE_FILE_BYTES = 1_500_000_000
"""An ONNX file may have 2 GB; a larger model's weights go into another file."""


def export(
    trained: TrainedModel,
    example: Example,
    form: str,
    out: Path,
    tolerance: float,
    merge: bool = True,
    max_shard_size: str = "5GB",
) -> dict[str, Any]:
    writers: dict[str, Callable[..., Written]] = {
        "torch": torch_file,
        "safetensors": safetensors,
        "huggingface": partial(huggingface, max_shard_size=max_shard_size),
        "torch_export": torch_export,
        "onnx": onnx,
    }
    model = trained.model.cpu().to(memory_format=torch.contiguous_format)
    if merge and "adapter" in trained.cfg:
        model, trained = adapter.merged(model), replace(trained, cfg=without(trained.cfg, ["adapter"]))
    example = Example(
        *(mapped(lambda tensor: tensor.cpu().contiguous(), part) for part in (example.args, example.kwargs))
    )
    # The files have their names from the beginning, for a model may name the file of its weights.
    with writing(out), tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        part = Path(folder) / out.name
        with torch.no_grad(), quiet():
            check_call(model, example)
            example.is_fixed = not takes_sizes(model, example)
            with disk_errors():
                again, dynamic = writers[form](trained, model, example, part)
            sizes = SIZES if "batch" in dynamic and not example.is_fixed else SIZES[:1]
            lengths = example.length - ("length" in dynamic), example.length
            found = max(
                compared(model, again, example.of_size(*both), tolerance) for both in zip(sizes, lengths, strict=False)
            )
        for file in sorted(part.parent.iterdir(), key=lambda file: file == part):  # the model follows its weights
            place(file, out.with_name(file.name))
    return {"difference": found, "sizes": sizes, "dynamic": dynamic, "length": example.length * (form != "safetensors")}


@contextmanager
def disk_errors() -> Iterator[None]:
    # safetensors and tokenizers, which are written in Rust, tell the number of a disk's error in the text only. torch
    # raises an error of its own where a file can't be written to.
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def place(file: Path, out: Path) -> None:
    if not file.is_dir():
        with replacing(out, part=file):
            return
    if not out.is_dir():
        file.replace(out)
        return
    for old in (path for pattern in MODEL_FILES for path in out.glob(pattern)):  # no loader shall find some of these
        old.unlink()
    for one in file.iterdir():  # what else is in the folder stays
        one.replace(out / one.name)


@contextmanager
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def check_call(model: nn.Module, example: Example) -> None:
    try:
        example.call(model)
    except Exception as error:
        taken = ", ".join(f"{name} {shape}" for name, shape in example.described().items())
        raise ConfigError(
            f"{type(model).__name__} can't be called with {taken}: {type(error).__name__}: {error!s:.300}"
        ) from error


def takes_sizes(model: nn.Module, example: Example) -> bool:
    # In a list of samples, as detection has it, and in a PackedSequence the first axis of a tensor is not the batch.
    if all(isinstance(part, Tensor) for part in example.parts):
        return True
    try:
        for size in SIZES:
            example.of_size(size, example.length).call(model)
    except Exception:
        return False
    return True


def compared(model: nn.Module, again: Callable[..., Any], example: Example, tolerance: float) -> float:
    wanted, found = (tensors(list(pytree.tree_leaves(example.call(one)))) for one in (model, again))
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in found]:
        raise ConfigError(
            f"the written model returns {[tuple(tensor.shape) for tensor in found]}, and the model "
            f"{[tuple(tensor.shape) for tensor in wanted]}: nothing was written"
        )
    pairs = [(a.double(), b.double()) for a, b in zip(wanted, found, strict=True) if a.numel()]
    difference = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    scale = max((float(a.abs().max()) for a, _ in pairs), default=1.0)
    if not difference <= tolerance * max(1.0, scale):  # NaN, too
        raise ConfigError(
            f"the written model's output differs by up to {difference:.3g} from the model's, whose largest number is "
            f"{scale:.3g}; nothing was written. To accept it, give tolerance={2 * difference / max(1.0, scale):.1g}"
        )
    return difference


def safetensors(trained: TrainedModel, model: nn.Module, example: Example, path: Path) -> Written:
    try:
        from safetensors.torch import load_file, save_model
    except ModuleNotFoundError:
        raise missing("safetensors", "safetensors") from None
    if others := {key: type(value) for key, value in model.state_dict().items() if not torch.is_tensor(value)}:
        key, kind = next(iter(others.items()))
        raise ConfigError(f"format=safetensors holds tensors only, and {key} is a {kind.__name__}: give format=torch")
    config = redact.without({name: trained.config[name] for name in ("model", "task", "data")})
    meta = {"format": "pt", "config": json.dumps(config), "data": json.dumps(trained.data.as_dict())}
    path.touch()  # by the umask, which save_model does not ask
    mode = path.stat().st_mode
    save_model(weights.made_contiguous(model), str(path), {**meta, "step": str(trained.step)})
    path.chmod(mode)
    again = built_again(trained)
    weights.load_part(weights.made_contiguous(again), load_file(str(path)))
    return again, FREE[:1]


def built_again(trained: TrainedModel, without_groups: Sequence[str] = ()) -> nn.Module:
    with seeded_as(trained.cfg.seed, 0, 0):
        return builders.model(without(trained.cfg, without_groups), trained.data).eval()


def torch_file(trained: TrainedModel, model: nn.Module, example: Example, path: Path) -> Written:
    with path.open("wb") as file:  # torch's own writer of files doesn't say why one can't be written
        torch.save(plain_state.encode(model.state_dict()), file)
    again = built_again(trained)
    again.load_state_dict(plain_state.decode(torch.load(path, weights_only=True)))
    return again, FREE


def huggingface(trained: TrainedModel, model: nn.Module, example: Example, path: Path, max_shard_size: str) -> Written:
    if adapter.has_adapter(model):
        return adapter.save(model, built_again(trained, ["adapter"]), path), FREE
    if not pretrained.is_of_transformers(model):
        raise ConfigError(
            f"format=huggingface is for models of transformers, and this is a {type(model).__name__}: give "
            "format=safetensors"
        )
    return pretrained.save(model, path, max_shard_size), FREE


def torch_export(trained: TrainedModel, model: nn.Module, example: Example, path: Path) -> Written:
    program, dynamic = exported(model, example)
    content = io.BytesIO()  # torch's own writer of files ends the process where one can't be written
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    with path.open("rb") as file:
        return torch.export.load(file).module(), dynamic


def exported(model: nn.Module, example: Example) -> tuple[Any, tuple[str, ...]]:
    # Return the program, and which of `FREE` it takes in any size. `DYNAMIC`, of newer versions of torch, may have
    # bounds, such as the length of a table of positions.
    if any(isinstance(part, PackedSequence) for part in example.parts):
        raise ConfigError(
            f"torch.export takes no PackedSequence, with which {type(model).__name__} is called: give format=torch or "
            "format=safetensors"
        )
    length_of_any = getattr(torch.export.Dim, "DYNAMIC", None) or torch.export.Dim("length")
    lengths = () if example.is_fixed else (length_of_any, None) if example.length else (None,)
    ways = [(example.dynamic(length), FREE if length else FREE[:1]) for length in lengths]
    for shapes, free in [*ways, (None, ())]:
        try:
            by_name = shapes and inspect.signature(model.forward).bind(*shapes["args"], **shapes["kwargs"]).arguments
            return traced(model, example, by_name), free
        except Exception as error:  # the model fixes a size; or it can't be followed at all, which the last way tells
            failure = error
    reason = " ".join(str(failure).split())[:300]
    raise ConfigError(
        f"torch.export can't follow {type(model).__name__} ({type(failure).__name__}: {reason}): give "
        "format=safetensors, or see the limits of torch.export"
    ) from failure


def traced(model: nn.Module, example: Example, dynamic_shapes: Any) -> Any:
    try:
        return torch.export.export(model, example.args, example.kwargs, dynamic_shapes=dynamic_shapes)
    finally:
        results.take_means()  # what the model has logged is a tensor of this trace, and would be added to in the next


def onnx(trained: TrainedModel, model: nn.Module, example: Example, path: Path) -> Written:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing("onnx", str(error.name)) from None
    if not all(isinstance(part, Tensor) for part in example.parts):
        raise ConfigError("format=onnx takes tensors as arguments of the model, and this one takes others, too")
    is_large = sum(tensor.nbytes for _, tensor in plain_state.tensors(model.state_dict())) > _ONE_FILE_BYTES
    first = ["input"] if len(example.args) == 1 else [f"input_{number}" for number in range(len(example.args))]
    inputs = [*first, *example.kwargs]
    program, dynamic = exported(model, example)
    outputs = output_names(example.call(model))
    written = torch.onnx.export(
        program, input_names=inputs, output_names=outputs, dynamo=True, external_data=is_large, verbose=False
    )
    assert written is not None
    written.save(str(path), external_data=is_large)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]

    def again(*args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        given = dict(zip(inputs, (part.numpy() for part in (*args, *kwargs.values())), strict=True))
        return [torch.from_numpy(part) for part in session.run(None, {name: given[name] for name in taken})]

    return again, dynamic


def output_names(output: Any) -> list[str]:
    # A model that returns one tensor has "output"; a dict's have their keys.
    leaves, _ = pytree.tree_flatten_with_path(output)
    paths = ["_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves]
    return [path if path and not path.isdigit() else "_".join(filter(None, ("output", path))) for path in paths]


def missing(form: str, package: str) -> ConfigError:
    return ConfigError(f"format={form} needs {package}: type pip install 'ddp-hydra[export]'")


SIZES = (2, 3)
"""Sizes of the batches that an export is checked with, where the batch may have any size."""
FREE = ("batch", "length")
"""Sizes that a written model may leave open: of the batch, and of texts."""


@dataclass
class Example:
    """The arguments with which a task calls the model; `is_fixed`: they can't be brought to another size of batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_fixed: bool = False

    @property
    def parts(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    def of_size(self, size: int, length: int) -> Example:
        def resize(tensor: Tensor) -> Tensor:
            if self.is_text(tensor):
                tensor = tensor[:, :length]
            return tensor[torch.arange(size) % len(tensor)] if self.is_batched(tensor) else tensor

        return Example(mapped(resize, self.args), mapped(resize, self.kwargs))

    def is_batched(self, tensor: Tensor) -> bool:
        size = next((len(one) for one in tensors(self.parts) if one.ndim), 0)
        return not self.is_fixed and bool(tensor.ndim) and len(tensor) == size

    @property
    def length(self) -> int:
        # Tokens in each text; 0 if the arguments are no texts.
        given = [one for one in tensors(self.parts) if not one.is_floating_point()]
        lengths = {one.shape[1] for one in given if one.ndim == 2 and self.is_batched(one)}
        return lengths.pop() if len(lengths) == 1 and min(lengths) > 2 else 0

    def is_text(self, tensor: Tensor) -> bool:
        return tensor.ndim == 2 and self.is_batched(tensor) and tensor.shape[1] == self.length

    def dynamic(self, length: Any) -> dict[str, Any]:
        batch = torch.export.Dim("batch")

        def shape(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or not self.is_batched(tensor):
                return None
            return {0: batch, 1: length} if length and self.is_text(tensor) else {0: batch}

        return {"args": pytree.tree_map(shape, self.args), "kwargs": pytree.tree_map(shape, self.kwargs)}

    def described(self) -> Mapping[str, str]:
        named = {**{f"input {number}": part for number, part in enumerate(self.args)}, **self.kwargs}
        lists = {name: list(part) for name, part in named.items() if type(part) in (list, tuple)}
        return {name: described(part) for name, part in {**named, **lists}.items() if isinstance(part, (Tensor, list))}


def example_of(trained: TrainedModel, split: str, input_shape: Sequence[int] | None) -> Example:
    if pretrained.takes_tokens(trained.model):
        return Example((), pretrained.example_of(trained.model))
    if input_shape is not None:
        generator = torch.Generator().manual_seed(0)
        return Example((torch.randn(SIZES[0], *input_shape, generator=generator).to(trained.device),), {})
    cfg = trained.cfg
    split = split if cfg.data.get(split) else "train"
    with build_data.opened(cfg, split, like=trained.data) as data:
        description = DataDescription.of(data)
        trained.data.check_model(description, f"data.{split}")
        loader = build_data.loader(cfg, data, trained.device, channels_last=False)
        first = range(min(SIZES[0], description.n_samples or SIZES[0]))
        with closing(loader.each_once(SIZES[0], 0, 1, first)) as batches:  # type: ignore[type-var]
            batch, numbers = next(batches, (None, []))
        if len(numbers) < SIZES[0]:
            raise ConfigError(
                f"the data set has {len(numbers)} samples, and an example needs {SIZES[0]}: give input_shape"
            )
        task = builders.task(cfg, trained.data, trained.device)
        return called_with(trained.model, lambda: task.predict(trained.model, batch))


def called_with(model: nn.Module, call: Callable[[], Any]) -> Example:
    calls: list[Example] = []
    note = lambda _, args, kwargs: calls.append(Example(tuple(args), dict(kwargs)))  # noqa: E731
    with model.register_forward_pre_hook(note, with_kwargs=True), torch.no_grad():
        call()
    if not calls:
        raise ConfigError("the task predicts without calling the whole model: give input_shape=[…], of one sample")
    return calls[0]
