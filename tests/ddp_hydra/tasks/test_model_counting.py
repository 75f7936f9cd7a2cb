"""What the losses of models of transformers are means over: the losses of transformers 5.24, without its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import ModelLoss
from ddp_hydra.tasks.model_loss import counting, found, rules_of
from tests.properties.test_losses import CLASSES, SAMPLES, check, cut, labels, numbers

TIME = 4
SPLITS = [(1, 3, 1), (2, 1, 2), (3, 2, 2)]  # ranks, micro-batches, steps


def every(logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def without_loss(logits: Tensor, labels: Tensor | None, **_: Any) -> dict[str, Tensor]:
    return {"logits": logits}


def shifted(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    return every(logits[..., :-1, :], labels[..., 1:], label_smoothing=label_smoothing)


class Model(nn.Module):
    """Gives each token, or each pixel, scores; `loss_of` takes these."""

    def __init__(self, loss_of: Any, config: dict[str, Any], outputs: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss_of, self.config = loss_of, SimpleNamespace(**config)
        self.scores = nn.Embedding(CLASSES, outputs).double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **batch: Any) -> Any:
        scores = self.scores(input_ids)
        return self.loss_of(scores, labels, **batch) if batch else self.loss_of(scores, labels)


def model(name: str, loss_of: Any, transformers: bool = True, outputs: int = CLASSES, **config: Any) -> Model:
    module = "transformers.models.some" if transformers else "mine"
    kind: Any = type(name, (Model,), {"__module__": module})
    made: Model = kind(lambda *args, **batch: outcome(loss_of, *args, **batch), config, outputs)
    return made


def outcome(loss_of: Any, logits: Tensor, labels: Tensor | None, **batch: Any) -> dict[str, Tensor]:
    value = loss_of(logits, labels, **batch) if batch else loss_of(logits, labels)
    return value if isinstance(value, dict) else {"loss": value, "logits": logits}


def pixels(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=255)


def one_class(logits: Tensor, labels: Tensor) -> Tensor:
    valid = (labels != 255).double()
    return (F.binary_cross_entropy_with_logits(logits[..., 0], labels.double(), reduction="none") * valid).mean()


def replaced(logits: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
    logits, kept = logits[..., 0], slice(None) if attention_mask is None else attention_mask == 1
    return {"loss": F.binary_cross_entropy_with_logits(logits[kept], labels[kept].double()), "logits": logits}


def bits(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    logits, kept = logits[..., 0], labels != -100
    return {"loss": F.binary_cross_entropy_with_logits(logits[kept], labels[kept].double()), "logits": logits}


def unpadded(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
    return every(logits, labels.where(attention_mask == 1, -100))


def padded(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
    return every(logits, labels)


def unpadded_shifted(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
    return shifted(logits, labels.where(attention_mask == 1, -100))


def padded_shifted(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
    return shifted(logits, labels)


def without_nan(logits: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
    return unpadded(logits, labels, attention_mask).nan_to_num()


def answers(logits: Tensor, labels: None, start_positions: Tensor, end_positions: Tensor) -> dict[str, Tensor]:
    start, end = logits[..., 0], logits[..., 1]
    loss = sum(
        F.cross_entropy(scores, where.clamp(0, TIME), ignore_index=TIME)
        for scores, where in ((start, start_positions), (end, end_positions))
    )
    return {"loss": loss / 2, "start_logits": start, "end_logits": end}


def masked(logits: Tensor, labels: None, bool_masked_pos: Tensor) -> Tensor:
    return (logits.abs().mean(-1) * bool_masked_pos).sum() / bool_masked_pos.sum()


def cut_off(where: Tensor) -> Tensor:
    return where.where(labels() >= 0, TIME)


IDS = labels(TIME).clamp(min=0)
BITS = (IDS > 1).long()
MASK = (labels(TIME) >= 0).long()
PIXELS = labels(3, 3, ignored=255)
ENCODER = {"is_encoder_decoder": True}
MODELS: dict[str, tuple[Model, dict[str, Tensor]]] = {
    "GPT-2, Llama": (model("LlamaForCausalLM", shifted), {"labels": labels(TIME)}),
    "a head of GPT-2": (model("GPT2LMHeadModel", shifted), {"labels": labels(TIME)}),
    "GPT-2 with choices": (model("GPT2DoubleHeadsModel", shifted), {"labels": labels(2, TIME)}),
    "BERT": (model("BertForMaskedLM", every), {"labels": labels(TIME)}),
    "tokens": (model("BertForTokenClassification", every), {"labels": labels(TIME)}),
    "Bart's decoder": (model("BartForCausalLM", every), {"labels": labels(TIME)}),
    "T5": (model("T5ForConditionalGeneration", every, **ENCODER), {"labels": labels(TIME)}),
    "smoothed T5": (
        model("T5ForConditionalGeneration", lambda *args: every(*args, label_smoothing=0.1), **ENCODER),
        {"labels": labels(TIME)},
    ),
    "Llava": (model("LlavaForConditionalGeneration", shifted), {"labels": labels(TIME)}),
    "Blip": (
        model("BlipForConditionalGeneration", lambda *args: shifted(*args, label_smoothing=0.1)),
        {"labels": labels(TIME)},
    ),
    "XLM": (model("XLMWithLMHeadModel", every), {"labels": labels(TIME)}),
    "Electra": (model("ElectraForPreTraining", replaced, outputs=1), {"labels": BITS, "attention_mask": MASK}),
    "Electra without a mask": (model("ElectraForPreTraining", replaced, outputs=1), {"labels": BITS}),
    "answers": (
        model("BertForQuestionAnswering", answers, outputs=2),
        {"start_positions": cut_off(IDS[:, 0]), "end_positions": cut_off(IDS[:, 1])},
    ),
    "hidden patches": (model("ViTForMaskedImageModeling", masked), {"bool_masked_pos": MASK == 1}),
    "Segformer": (
        model("SegformerForSemanticSegmentation", pixels, semantic_loss_ignore_index=255),
        {"input_ids": numbers(3, 3).long().clamp(0, 2), "labels": PIXELS},
    ),
    "UperNet": (
        model("UperNetForSemanticSegmentation", pixels, loss_ignore_index=255),
        {"input_ids": numbers(3, 3).long().clamp(0, 2), "labels": PIXELS},
    ),
    "Segformer of one class": (
        model("SegformerForSemanticSegmentation", one_class, outputs=1, semantic_loss_ignore_index=255, num_labels=1),
        {"input_ids": numbers(3, 3).long().clamp(0, 2), "labels": PIXELS.clamp(max=1).where(PIXELS != 255, 255)},
    ),
    "one of mine that shifts": (model("MyLlamaForCausalLM", shifted, transformers=False), {"labels": labels(TIME)}),
    "one of mine that does not": (model("MyForCausalLM", every, transformers=False), {"labels": labels(TIME)}),
}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_split_has_the_gradient_and_the_loss_of_the_whole(name, split):
    made, batch = MODELS[name]
    ids = IDS if batch.get("labels") is None or batch["labels"].ndim < 3 else labels(2, TIME).clamp(min=0)
    batch = {"input_ids": ids, **batch}
    task = ModelLoss()
    task.step(made, cut(batch, 0, 18))  # the first batch tells
    check(task, made, batch, made(**batch)["loss"], split)


FULL = (torch.arange(SAMPLES) < SAMPLES // 2)[:, None]
LATE_MASK = MASK.where(~FULL, 1)
LATE: dict[str, tuple[Model, Tensor]] = {
    "Electra": (model("ElectraForPreTraining", replaced, outputs=1), BITS),
    "tokens of BioGpt": (model("BioGptForTokenClassification", unpadded), IDS),
    "Granite": (model("GraniteSpeechForConditionalGeneration", unpadded_shifted), IDS),
    "bits": (model("Mine", replaced, transformers=False, outputs=1), BITS),
    "bits that are not -100": (
        model("Mine", bits, transformers=False, outputs=1),
        BITS.where((LATE_MASK == 1) | (IDS == 1), -100),
    ),
    "classes": (model("Mine", unpadded, transformers=False), IDS),
    "classes, 0 where none counts": (model("Mine", without_nan, transformers=False), IDS),
    "classes, with padding": (model("Mine", padded, transformers=False), IDS),
    "next tokens": (model("Mine", unpadded_shifted, transformers=False), IDS),
    "next tokens, with padding": (model("Mine", padded_shifted, transformers=False), IDS),
}


@pytest.mark.parametrize("split", [*SPLITS, (3, 1, 4)], ids=str)
@pytest.mark.parametrize("name", LATE)
def test_a_batch_without_padding_does_not_tell_whether_padding_counts(name, split):
    made, targets = LATE[name]
    batch = {"input_ids": IDS, "labels": targets, "attention_mask": LATE_MASK}
    check(ModelLoss(), made, batch, made(**batch)["loss"], split)


def test_ranks_and_a_resume_weigh_a_batch_alike_whatever_they_have_seen():
    made, targets = LATE["classes"]
    batch = {"input_ids": IDS, "labels": targets, "attention_mask": LATE_MASK}
    full, late = cut(batch, 0, SAMPLES // 2), cut(batch, SAMPLES // 2, SAMPLES)
    has_seen = ModelLoss()
    assert has_seen.step(made, full).n == full["labels"].numel()
    assert has_seen.step(made, late).n == ModelLoss().step(made, late).n == late["attention_mask"].sum()
    assert has_seen.step(made, full).n == full["labels"].numel()


def test_what_padding_counts_is_asked_for_where_all_logits_are_alike():
    made, targets = model("Mine", replaced, transformers=False, outputs=1), BITS
    torch.nn.init.zeros_(made.scores.weight)
    task, batch = ModelLoss(), {"input_ids": IDS, "labels": targets, "attention_mask": MASK}
    with pytest.raises(ConfigError, match="the loss of Mine is a mean over can't be told"):
        task.step(made, batch)


def test_a_loss_that_is_not_finite_tells_nothing():
    made, task = model("Mine", shifted, transformers=False), ModelLoss()
    batch, weight = {"input_ids": IDS[:4], "labels": IDS[:4]}, made.scores.weight.detach().clone()
    torch.nn.init.constant_(made.scores.weight, float("nan"))
    task.step(made, batch)
    made.scores.weight.data.copy_(weight)
    assert task.step(made, batch).n == 4 * (TIME - 1)


@pytest.mark.parametrize("is_shifted", [False, True])
def test_a_loss_of_low_precision_does_not_decide_what_it_is_too_coarse_for(is_shifted):
    mask = torch.ones(8, 64, dtype=torch.long)
    mask[-1, 60:] = 0
    right, known = ("masked shift", ("shift", "masked shift")) if is_shifted else ("masked all", ("all", "masked all"))
    firsts: list[tuple[str, ...]] = []
    for seed in range(100):
        draws = torch.Generator().manual_seed(seed)
        logits = 0.3 * torch.randn(8, 64, 50, generator=draws)
        targets = torch.randint(0, 50, (8, 64), generator=draws)
        of_mask = every(logits, counting(right, targets, mask)).bfloat16()
        assert right in rules_of(of_mask, logits, targets, mask, known)
        of_all = every(logits, counting(known[0], targets, None)).bfloat16()
        firsts.append(rules_of(of_all, logits, targets))
    assert set(firsts) <= {(), known}
    exact = every(logits, counting(right, targets, mask))
    assert rules_of(exact, logits, targets, mask, known) == (right,)


def test_starts_that_count_without_their_ends_are_refused():
    batch = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([1, TIME])}
    with pytest.raises(ConfigError, match=r"2 of the start_positions .* but 1 of the end_positions.*set both to 0"):
        ModelLoss().step(model("BertForQuestionAnswering", answers, outputs=2), {"input_ids": IDS[:2], **batch})


def test_a_batch_without_an_answer_inside_counts_nothing():
    where = torch.full((2,), TIME)
    batch = {"input_ids": IDS[:2], "start_positions": where, "end_positions": where}
    assert ModelLoss().step(model("BertForQuestionAnswering", answers, outputs=2), batch).n == 0


def smooth(logits: Tensor, labels: Tensor) -> Tensor:
    return every(logits, labels, label_smoothing=0.5)


def test_a_loss_that_does_not_tell_is_asked_for_once_it_has_labels():
    made, task = model("Mine", smooth, transformers=False), ModelLoss()
    batch = {"input_ids": IDS[:4], "labels": IDS[:4]}
    task.step(made, {**batch, "labels": torch.full_like(IDS[:4], -100)})
    with pytest.raises(ConfigError, match=r"the loss of Mine is a mean over can't be told.*Give task.shift=false"):
        task.step(made, batch)
    for shift, n in ((False, 4 * TIME), (True, 4 * (TIME - 1))):
        assert ModelLoss(shift=shift).step(made, batch).n == n


def test_labels_beside_the_labels_are_asked_for():
    def two(logits: Tensor, labels: Tensor, next_sentence_label: Tensor) -> Tensor:
        return every(logits, labels) + F.cross_entropy(logits[:, 0], next_sentence_label)

    batch = {"input_ids": IDS[:4], "labels": IDS[:4], "next_sentence_label": IDS[:4, 0]}
    with pytest.raises(ConfigError, match="the batch has next_sentence_label and labels"):
        ModelLoss().step(model("BertForPreTraining", two), batch)
    assert ModelLoss(shift=False).step(model("BertForPreTraining", two), batch).n == 4 * TIME


def test_a_loss_of_classes_that_does_not_tell_is_weighed_by_labels_with_a_warning():
    def weighted(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(logits.mean(1), labels, torch.tensor([1.0, 20.0, 300.0]).double())
        return {"loss": loss, "logits": logits.mean(1)}

    task, made = ModelLoss(), model("Mine", weighted, transformers=False)
    batch = {"input_ids": IDS, "labels": IDS[:, 0]}
    with pytest.warns(UserWarning, match="the loss of Mine is a mean over can't be told.*task of your own"):
        assert task.step(made, batch).n == SAMPLES
    task.step(made, batch)  # once


def test_labels_that_do_not_count_are_ignored_by_metrics():
    made, batch = MODELS["Segformer"]
    step = ModelLoss().step(made, {"input_ids": IDS, **batch})
    assert step.target.shape == PIXELS.shape
    assert torch.equal(step.target == -100, PIXELS == 255)


@pytest.mark.parametrize("loss", [torch.tensor(0.5), torch.tensor([0.5])])
def test_the_logits_of_a_tuple_follow_the_loss(loss):
    logits, hidden = torch.zeros(2, 3), torch.zeros(2, 8)
    assert found((loss, logits, hidden), "logits") is logits
    assert found((logits, hidden), "logits") is logits
    assert found((loss,), "logits") is None
    number = logits[:1, :1]
    assert found((number, hidden), "logits", has_loss=False) is number


def test_a_language_model_predicts_the_loss_of_each_row():
    """Rows are padded to the longest of their batch, so logits of two batches would differ in shape."""
    made, targets = model("LlamaForCausalLM", without_loss), IDS.clone()
    targets[0, 2:] = targets[1] = -100
    found = ModelLoss().predict(made, {"input_ids": IDS, "labels": targets})
    assert found["tokens"].tolist() == [1, 0, *[TIME - 1] * (len(IDS) - 2)]
    for row in (0, 2):
        wanted = shifted(made(IDS[row : row + 1])["logits"], targets[row : row + 1])
        torch.testing.assert_close(found["loss"][row], wanted.float())
    assert found["loss"][1].isnan()
    masked = ModelLoss().predict(model("BertForMaskedLM", without_loss), {"input_ids": IDS, "labels": targets})
    assert masked["tokens"].tolist()[:2] == [2, 0]
    assert ModelLoss().predict(made, {"input_ids": IDS}).shape == (*IDS.shape, CLASSES)


def test_a_decoder_whose_inputs_are_made_of_labels_gets_them_when_it_predicts():
    given: list[list[str]] = []

    def decoded(logits: Tensor, labels: Tensor | None, **batch: Any) -> Any:
        given.append([*batch, *(["labels"] if labels is not None else [])])
        if labels is None and "decoder_input_ids" not in batch:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        scores = logits[:, :2]
        return (scores,) if labels is None else (every(scores, labels), scores)

    made = model("T5ForConditionalGeneration", lambda *args, **batch: None, **ENCODER)
    made.loss_of = decoded
    targets = IDS[:, :2].clone()
    targets[0, 1] = -100
    for more in ({}, {"decoder_input_ids": targets}):
        for rows in (1, len(IDS)):
            batch = {"input_ids": IDS, "labels": targets, **more}
            found = ModelLoss().predict(made, cut(batch, 0, rows))
            assert found["tokens"].tolist() == [1, *[2] * (rows - 1)]
            wanted = F.cross_entropy(made.scores(IDS[:1, :1]).flatten(0, 1).float(), targets[0, :1])
            torch.testing.assert_close(found["loss"][0], wanted)
    assert given == [["labels"]] * 2 + [["decoder_input_ids"]] * 2
    with pytest.raises(
        ConfigError, match="decoder of labels, and the batch has input_ids: give data with labels or dec"
    ):
        ModelLoss().predict(made, {"input_ids": IDS})


def test_a_classifier_predicts_classes_by_their_names():
    def rows(logits: Tensor, labels: Tensor | None) -> Any:
        return {"logits": logits[:, 0]}

    made = model("BertForSequenceClassification", rows, id2label=dict(enumerate(["LABEL_0", "LABEL_1", "LABEL_2"])))
    batch = {"input_ids": IDS, "labels": IDS[:, 0]}
    found = ModelLoss().predict(made, batch)
    shares = made(IDS)["logits"].float().softmax(-1)
    assert found.keys() == {"class", "probability"}
    assert found["class"].tolist() == shares.argmax(-1).tolist()
    assert torch.equal(found["probability"], shares.max(-1).values)
    names = [f"class {number}" for number in range(CLASSES)]
    assert ModelLoss(names=names).predict(made, batch)["name"] == [names[one] for one in found["class"]]
    made.config.problem_type = "multi_label_classification"
    assert ModelLoss().predict(made, batch)["probability"].shape == (len(IDS), CLASSES)
    made.config.problem_type = "regression"
    assert torch.equal(ModelLoss().predict(made, batch), made(IDS)["logits"].float())


def test_a_classifier_of_tokens_predicts_a_class_of_each():
    made, mask = model("BertForTokenClassification", without_loss, id2label={}), torch.ones_like(IDS)
    mask[0, 2:] = 0
    found = ModelLoss().predict(made, {"input_ids": IDS, "attention_mask": mask, "labels": IDS})["classes"]
    assert [len(row) for row in found] == [2, *[TIME] * (len(IDS) - 1)]
