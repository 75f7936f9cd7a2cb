"""Trains a model that computes its own loss, as the models of Hugging Face's transformers do."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_hydra.console.text import listed
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks.base import Step, Task
from ddp_hydra.tasks.counting import IGNORED, update_counted

_SHIFTS = re.compile(
    r"ForCausalLM$|ForCausalImageModeling$|LMHeadModel$|DoubleHeadsModel$|^Blip(ForConditionalGeneration|ForQuestionAns)"
)
_PREDICTS_ALL = re.compile(
    r"^(XLM|Flaubert)WithLMHeadModel$|^XLNetLMHeadModel$|ForMaskedLM$|ForTokenClassification$|"
    r"^(Bart|BigBirdPegasus|Blenderbot|BlenderbotSmall|CpmAnt|Marian|MBart|Mvp|Pegasus|PLBart|ProphetNet|TrOCR|Whisper)"
    r"ForCausalLM$"
)
"""Classes of transformers whose labels are not shifted, although the names of some look so."""
_LEAVES_OUT_PADDING = re.compile(
    r"^(BioGpt|Mra|XLMRobertaXL|Yoso)ForTokenClassification$|^(Electra|Funnel)ForPreTraining$"
)
RULES = ("all", "masked all", "shift", "masked shift")
"""Which labels count that are not -100: all, or all but the first of a row; "masked": where attention_mask is 1."""


def _is_of_transformers(model: Any) -> bool:
    return any(kind.__module__.partition(".")[0] in ("transformers", "peft") for kind in type(model).__mro__)


def _has_decoder(model: Any) -> bool:
    """Return whether a model has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _by_name(model: Any) -> str:
    """Return the rule of a class of transformers; "" where its name tells none."""
    if not _is_of_transformers(model):
        return ""
    names = [kind.__name__ for kind in type(model).__mro__]
    if any(map(_LEAVES_OUT_PADDING.search, names)):
        return "masked all"
    if any(map(_PREDICTS_ALL.search, names)) or _has_decoder(model):
        return "all"
    return "shift" if any(map(_SHIFTS.search, names)) else ""


def _answers(batch: Mapping[str, Any], start_logits: Any) -> int | Tensor | None:
    """Return the number of answers that count of a batch without labels; None where the batch tells nothing."""
    if isinstance(masked := batch.get("bool_masked_pos"), Tensor):
        return masked.sum()
    starts, ends = batch.get("start_positions"), batch.get("end_positions")
    if not (isinstance(starts, Tensor) and isinstance(ends, Tensor) and isinstance(start_logits, Tensor)):
        return None
    first, last = (int((positions < start_logits.shape[1]).sum()) for positions in (starts, ends))
    if first != last:  # the loss is the mean of two means
        raise ConfigError(
            f"{first} of the start_positions of a batch are in its texts, but {last} of the end_positions: set both to "
            "0, or both to the length of the text, where the answer is cut off"
        )
    return first


def counting(rule: str, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Return the labels that count, at the places of the logits that predict them; -100 at all others."""
    if mask is not None and rule.startswith("masked"):
        labels = labels.where(mask == 1, IGNORED)
    if rule.endswith("shift") and labels.ndim > 1:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return labels


def rules_of(
    loss: Tensor, logits: Tensor, labels: Tensor, mask: Tensor | None = None, known: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the rules that a loss may follow, the likeliest first; () if it is no mean by any.

    Two rules that count the same labels in this batch are both returned: another batch tells them apart.

    Args:
        mask: of the shape of the labels.
        known: the rules that earlier batches have left; () before the first.
    """
    alike: list[tuple[tuple[str, ...], Tensor]] = []
    for rule in (one for one in RULES if one in (known or RULES)):
        counted = counting(rule, labels, mask)
        if alike and rule == f"masked {alike[-1][0][0]}" and (mask is None or torch.equal(counted, alike[-1][1])):
            alike[-1] = ((*alike[-1][0], rule), counted)
        else:
            alike.append(((rule,), counted))
    if known and len(alike) == 1:
        return alike[0][0]
    logits, value = logits.float(), float(loss)
    means = [(mean, rules) for rules, counted in alike if (mean := _mean(logits, counted, rules[0])) is not None]
    if not math.isfinite(value):  # nothing counts, or the model has diverged
        return tuple(rule for mean, rules in means if mean != mean for rule in rules) or tuple(known) or RULES
    # A model may return 0 where nothing counts.
    errors = [(abs((mean if mean == mean else 0.0) - value), rules) for mean, rules in means]
    errors.sort(key=lambda one: (one[0], not one[1][0].startswith("masked")))
    scale = max(value, 0.01)
    rounded = max(1e-6, torch.finfo(loss.dtype).eps) * scale
    near = [one for one in errors if errors[0][0] >= 0.5 * one[0] - rounded]
    found = tuple(rule for _, rules in near for rule in rules)
    if known:
        return found or tuple(known)
    is_near = bool(near) and near[0][0] < 0.01 * scale
    differ = len(near) < 2 or near[-1][0] - near[0][0] > rounded  # they don't where all logits are 0
    return found if is_near and differ and _are_of_one_shift(found) else ()


def _are_of_one_shift(rules: Sequence[str]) -> bool:
    return len({rule.endswith("shift") for rule in rules}) == 1


def _mean(logits: Tensor, labels: Tensor, rule: str) -> float | None:
    """Return the mean of the usual loss over the labels that are not -100; None if the logits have no such loss."""
    kept, shifts = labels != IGNORED, rule.endswith("shift")
    if logits.shape == labels.shape:
        return None if shifts else float(F.binary_cross_entropy_with_logits(logits[kept], labels[kept].float()))
    axes = (-1,) if shifts else (-1, 1) if logits.ndim > 1 else ()
    axis = next((axis for axis in axes if logits.movedim(axis, -1).shape[:-1] == labels.shape), None)
    if axis is None or (shifts and labels.ndim == 1):
        return None
    classes = labels[kept]
    if len(classes) and (int(classes.max()) >= logits.shape[axis] or int(classes.min()) < 0):
        return None
    return float(F.cross_entropy(logits.movedim(axis, -1).flatten(0, -2), labels.long().flatten()))


_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_DECODER = re.compile(r"decoder|inputs_embeds")
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")


class ModelLoss(Task):
    """Takes the loss from the model's output: an object with `loss`, a dict with "loss", a tuple that begins with it.

    A dict batch is given by keywords, a tuple by position. Where a dict batch has `labels`, the loss is a mean over
    those that are not -100, else over the samples.

    Args:
        without: keys of the batch that the model is not given when it predicts, such as its labels. A model that makes
            the inputs of its decoder of `labels` is given these.
        shift: the model predicts labels[:, 1:], as causal language models do whose labels are their inputs; False: it
            predicts all labels; None: found from its class or, where that doesn't tell, from loss and logits of the
            batches, until one has told: on a GPU, they are waited for.
        names: of the classes of a classifier.
    """

    def __init__(
        self,
        without: str | Sequence[str] = ("labels", "label"),
        shift: bool | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.without, self.shift, self.names = tuple(listed(without)), shift, names
        self.rules: tuple[str, ...] = ()  # which the batches so far have left; () before the first

    def step(self, model: Any, batch: Any) -> Step:
        """Take the loss from the output, and count the labels that it is a mean of."""
        output = called(model, batch)
        loss = found(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"{type(model).__name__} returned a {type(output).__name__} without a loss"
            raise ConfigError(f"{what}: it must have `loss`, a scalar. Does the batch hold the labels?")
        logits = found(output, "logits")
        with torch.no_grad():
            n, labels, summed = self._counted(bare(model), batch, loss.detach().reshape(()), output)
        prediction = logits if isinstance(logits, Tensor) and labels is not None else None
        return Step(loss.reshape(()) if loss.ndim else loss, n, {}, prediction, labels, summed)

    def _counted(self, model: Any, batch: Any, loss: Tensor, output: Any) -> tuple[Any, Tensor | None, bool]:
        """Return what a loss is a mean over: the number of things, None for samples; the labels that count, and -100;
        and whether it is a sum. The logits at a place predict its label."""
        if not isinstance(batch, Mapping):
            return None, None, False
        config, name, labels = getattr(model, "config", None), type(model).__name__, batch.get("labels")
        if not isinstance(labels, Tensor):
            return _answers(batch, found(output, "start_logits")), None, False
        if name.endswith("ForCTC"):
            return len(labels), None, getattr(config, "ctc_loss_reduction", "mean") == "sum"
        n_all = labels.numel()
        if labels.is_floating_point():
            return n_all, labels, False
        if name.endswith("ForSemanticSegmentation"):
            ignore = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", IGNORED))
            labels = labels.where(labels != ignore, IGNORED)
            # With one class, it divides by all pixels.
            return n_all if getattr(config, "num_labels", None) == 1 else (labels != IGNORED).sum(), labels, False
        logits = found(output, "logits")
        mask = batch.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.shape == labels.shape else None
        rule = self._rule(model, batch, loss, logits if isinstance(logits, Tensor) else None, labels, mask)
        labels = counting(rule, labels, mask)
        return (labels != IGNORED).sum(), labels, False

    def _rule(
        self,
        model: Any,
        batch: Mapping[str, Any],
        loss: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        mask: Tensor | None,
    ) -> str:
        """Return the rule of a batch, one of RULES. It is right in each batch, so ranks and a resume need not agree."""
        if self.shift is not None:
            return "shift" if self.shift else "all"
        others = [name for name in batch if name != "labels" and name.endswith(("_label", "_labels"))]
        if not others:
            self.rules = self.rules or tuple(filter(None, [_by_name(model)]))
            if len(self.rules) != 1 and logits is not None:
                found = rules_of(loss, logits, labels, mask, self.rules)
                if found and not _are_of_one_shift(found):  # the loss is not finite
                    return found[0]
                self.rules = found
        if self.rules or not bool((labels != IGNORED).any()):
            return self.rules[0] if self.rules else "all"
        name, why = type(model).__name__, "loss and logits of the first batch are no plain cross-entropy of the labels"
        if others:
            why = f"the batch has {', '.join(others)} and labels"
        if labels.ndim > 1:
            raise ConfigError(
                f"what the loss of {name} is a mean over can't be told: {why}. Give task.shift=false for all labels "
                "but -100, task.shift=true for all but the first of a row, else a task of your own with Step(loss, n)"
            )
        warnings.warn(
            f"what the loss of {name} is a mean over can't be told: {why}. It is weighed by the labels that are not "
            "-100; give a task of your own with Step(loss, n) where it is a mean over something else",
            stacklevel=2,
        )
        self.rules = ("all",)
        return "all"

    def state_dict(self) -> dict[str, Any]:
        """Return the rules that the batches have left: the first batch of a resumed run need not tell."""
        return {"rules": list(self.rules)} if self.rules else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the rules of a checkpoint; without any, the batches tell."""
        self.rules = tuple(state.get("rules", ()))

    def update_metric(self, metric: Any, step: Step) -> None:
        """Give a metric the logits and the labels that count: (answers, classes) and (answers,) for class numbers."""
        scores, labels = step.prediction, step.target
        if scores is None or labels is None:
            raise ConfigError(
                f"{type(metric).__name__}: metrics of task=model_loss need `labels` in the batch, a dict, and `logits` "
                "in the model's output: give metrics=none, or a task of your own"
            )
        scores = scores.float()
        if labels.is_floating_point() or scores.shape[:-1] != labels.shape:
            metric.update(scores.reshape(labels.shape) if scores.numel() == labels.numel() else scores, labels)
        else:
            update_counted(metric, scores, labels, IGNORED)

    def predict(self, model: Any, batch: Any) -> Any:
        """Return what a row is to the user, for classes of transformers; else the output's logits.

        A language model gives the mean loss of the labels that are not -100, and their number as `tokens`. A classifier
        gives the likeliest class, its probability, and its name if the classes have names; of tokens: a class of each.
        """
        labels, plain = batch.get("labels") if isinstance(batch, Mapping) else None, bare(model)
        if isinstance(batch, Mapping):
            kept = ("labels",) if _decodes_labels(plain, batch) else ()
            given = {name: part for name, part in batch.items() if name in kept or name not in self.without}
            has_labels = any(name in given for name in ("labels", "label"))
            left_out = [part for name, part in batch.items() if name not in given and isinstance(part, Tensor)]
            is_one = any(part.shape[:1] == (1,) for part in left_out)
        else:  # the model is called as it trains
            given, has_labels, is_one = batch, isinstance(batch, (tuple, list)) and len(batch) > 1, False
        output = called(model, given)
        # A model without labels may squeeze what it predicts of one sample, or compute its loss nevertheless.
        logits = found(output, "logits", has_labels or (False if is_one else None))
        if logits is None:
            return output[0] if isinstance(output, (tuple, list)) and len(output) == 1 else output
        if not isinstance(logits, Tensor) or not _is_of_transformers(plain):
            return logits
        if type(plain).__name__.endswith("Classification"):
            return self._classes(plain.config, logits.float(), given)
        rule = _by_name(plain) if self.shift is None else "shift" if self.shift else "all"
        if not rule or not isinstance(labels, Tensor) or labels.ndim != 2 or logits.shape[:-1] != labels.shape:
            return logits
        if rule == "shift":
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        tokens = (labels != IGNORED).sum(1)
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1)
        return {"loss": losses / tokens, "tokens": tokens}

    def _classes(self, config: Any, logits: Tensor, batch: Any) -> Any:
        kind = getattr(config, "problem_type", None)
        if logits.shape[-1] == 1 or kind == "regression":
            return logits
        if kind == "multi_label_classification":
            return {"probability": logits.sigmoid()}
        probability, best = logits.softmax(-1).max(-1)
        if best.ndim > 1:
            mask = batch.get("attention_mask", torch.ones_like(best))
            return {"classes": [row[own != 0].tolist() for row, own in zip(best, mask, strict=True)]}
        known = {number: name for number, name in config.id2label.items() if name != f"LABEL_{number}"}
        names = self.names or known
        named = {"name": [names[one] for one in best.tolist()]} if names else {}
        return {"class": best, **named, "probability": probability}


def bare(model: Any) -> Any:
    """Return a model without what torch wraps around it."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model) if type(model).__module__.startswith("torch.") else model
    return model


def _makes_decoder_inputs(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether a model has to make the inputs of its decoder itself."""
    has_none = all(batch.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    return has_none and _has_decoder(model)


def _decodes_labels(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether a model makes the decoder's inputs of its labels, which are sequences."""
    labels, is_classifier = batch.get("labels"), type(model).__name__.endswith("Classification")
    is_sequence = isinstance(labels, Tensor) and labels.ndim > 1 and not is_classifier
    return is_sequence and _makes_decoder_inputs(model, batch)


def called(model: Any, batch: Any) -> Any:
    """Call a model with a batch: by keywords, by position, or with the batch itself."""
    if isinstance(batch, Mapping):
        try:
            return model(**batch)
        except (TypeError, AttributeError, ValueError, IndexError) as error:
            plain = bare(model)
            reason = refused_column(str(error), type(plain).__name__, batch)
            lacks_labels = "labels" not in batch and _makes_decoder_inputs(plain, batch)
            if not reason and lacks_labels and _DECODER.search(str(error)):
                reason = (
                    f"{type(plain).__name__} makes the inputs of its decoder of labels, and the batch has "
                    f"{', '.join(batch)}: give data with labels or decoder_input_ids; to write new sequences, give a "
                    "task of your own whose predict calls model.generate"
                )
            if reason:
                raise ConfigError(f"{reason} ({type(error).__name__}: {error})") from error
            raise
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def refused_column(error: str, model: str, batch: Mapping[str, Any]) -> str:
    """Return which column of a batch a model can't take, and what to type; "" if its error doesn't tell."""
    name = unknown[1] if (unknown := _UNKNOWN.search(error)) else ""
    if name in batch:
        return (
            f"{model} takes no {name}, and the batch has {', '.join(batch)}: leave it out or rename it in the data "
            "set's __getitem__ or collate, or let forward take **kwargs; data=huggingface has data.columns=[...] and "
            f"data.rename='{{{name}: ...}}'"
        )
    text = [name for name, part in batch.items() if isinstance(part, (list, tuple)) and part and type(part[0]) is str]
    if text and not _TARGET.search(error):
        return (
            f"the column {text[0]} holds text, and {model} takes tensors: make numbers of it (by a tokenizer; the "
            "number of a class), or leave it out, in the data set's __getitem__ or collate; data=huggingface has "
            "data.transform and data.columns=[...]"
        )
    if target := _TARGET.search(error):
        for name in sorted(batch, key=lambda name: name not in ("labels", "label")):
            part = batch[name]
            if isinstance(part, Tensor) and len(places := (part == int(target[1])).nonzero()):
                return (
                    f"the column {name} holds {target[1]} in sample {int(places[0, 0])} of a batch, which is no class "
                    f"of {model}: leave the sample out, write {IGNORED} in its place, or give the model more classes"
                )
    return ""


def found(output: Any, name: str, has_loss: bool | None = True) -> Any:
    """Return a part of a model's output; None if it has none.

    Args:
        has_loss: a tuple that begins with one number begins with the loss; None: only if this is a scalar.
    """
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    if isinstance(output, (tuple, list)) and output and name in ("loss", "logits"):
        first = output[0]
        is_number = isinstance(first, Tensor) and first.numel() == 1
        is_loss = is_number and (first.ndim == 0 if has_loss is None else has_loss)
        parts = output[1:] if name == "logits" and is_loss else output
        return parts[0] if parts else None
    return output if name == "loss" else None
