"""The models of the examples: shapes, what their tasks compute, and that a few steps teach them something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_hydra.tasks.losses import CrossEntropy
from models.distillation import Distillation
from models.gan import GAN, Adversarial, ShowSamples
from models.token_classifier import TokenClassifier
from models.unet import UNet


class TestGAN:
    def test_makes_images_of_noise(self):
        images = GAN(size=6, noise=3, width=8)(torch.randn(5, 3))
        assert images.shape == (5, 1, 6, 6)
        assert (images.min() >= 0, images.max() <= 1) == (True, True)

    def test_a_step_updates_the_discriminator_and_then_the_generator(self):
        assert Adversarial().updates(0) == ("discriminator", "generator")

    def test_each_loss_has_the_gradients_of_its_own_part(self):
        model, task, batch = GAN(6, 3, 8), Adversarial(), (torch.rand(4, 1, 6, 6),)
        task.step(model, batch, "discriminator").loss.backward()
        assert all(part.grad is None for part in model.generator.parameters())
        assert all(part.grad is not None for part in model.discriminator.parameters())
        task.step(model, batch, "generator").loss.backward()
        assert all(part.grad is not None for part in model.generator.parameters())

    @pytest.mark.medium
    def test_the_discriminator_learns_to_tell_images_from_made_ones(self):
        torch.manual_seed(0)
        model, task, batch = GAN(6, 3, 16), Adversarial(), (torch.ones(32, 1, 6, 6),)
        optimizer = torch.optim.Adam(model.discriminator.parameters(), 0.01)
        for _ in range(60):
            step = task.step(model, batch, "discriminator")
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
        assert step.loss < 0.2
        assert step.sums["accuracy"] == 32
        assert task.step(model, batch, "generator").loss > 2

    @pytest.mark.parametrize("has_average", [False, True])
    def test_samples_are_shown_as_a_grid_of_the_same_noise(self, has_average):
        shown: list[tuple[str, torch.Tensor]] = []
        model, average = GAN(4, 3, 8), GAN(4, 3, 8)
        run: Any = SimpleNamespace(
            model=model,
            average=average if has_average else None,
            device=torch.device("cpu"),
            image=lambda *image: shown.append(image),
        )
        callback = ShowSamples(side=2)
        callback.on_validation(run)
        callback.on_validation(run)
        (name, grid), (_, again) = shown
        assert (name, grid.shape, grid.dtype) == ("samples", (8, 8), torch.uint8)
        assert torch.equal(grid, again)
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        second = (average if has_average else model).eval()(noise)[1, 0]
        assert torch.equal(grid[:4, 4:], (second * 255).byte())


class TestUNet:
    def test_scores_each_pixel(self):
        with torch.device("meta"):
            assert UNet(11, 3, width=4)(torch.zeros(2, 3, 16, 24)).shape == (2, 11, 16, 24)

    @pytest.mark.medium
    def test_learns_where_it_is_bright(self):
        torch.manual_seed(0)
        images = torch.rand(4, 1, 8, 8)
        masks = (images[:, 0] > 0.5).long()
        model = UNet(2, width=4)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(images), masks).backward()
            optimizer.step()
        assert (model(images).argmax(1) == masks).float().mean() > 0.9


class TestTokenClassifier:
    def test_returns_its_own_loss_where_there_are_labels(self):
        torch.manual_seed(0)
        model, tokens, labels = TokenClassifier(3, length=8), torch.randint(17, (5, 8)), torch.tensor([0, 1, 2, 1, 0])
        found = model(tokens, labels=labels)
        assert found["logits"].shape == (5, 3)
        assert torch.equal(found["loss"], F.cross_entropy(found["logits"], labels))
        assert set(model(input_ids=tokens)) == {"logits"}

    def test_tokens_without_attention_do_not_matter(self):
        torch.manual_seed(0)
        model = TokenClassifier(3, length=8).eval()
        tokens, mask = torch.randint(1, 17, (2, 8)), torch.ones(2, 8, dtype=torch.long)
        mask[:, 5:] = 0
        others = torch.where(mask > 0, tokens, 0)
        assert torch.allclose(model(tokens, mask)["logits"], model(others, mask)["logits"], atol=1e-6)
        assert not torch.allclose(model(tokens)["logits"], model(others)["logits"], atol=1e-3)


class TestDistillation:
    @pytest.fixture
    def teacher(self, monkeypatch):
        teacher = nn.Linear(4, 3)
        monkeypatch.setattr("models.distillation.load_run.load", lambda run: SimpleNamespace(model=teacher))
        return teacher

    def test_the_loss_is_that_of_the_labels_and_the_distance_to_the_teacher(self, teacher):
        torch.manual_seed(0)
        student, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        task = Distillation("outputs/teacher", temperature=2.0, share=0.25, criterion=CrossEntropy())
        step = task.step(student, (x, y))
        with torch.no_grad():
            p, q = (teacher(x) / 2).softmax(-1), (student(x) / 2).softmax(-1)
            distance = (p * (p / q).log()).sum(-1).mean() * 4
            expected = 0.25 * distance + 0.75 * F.cross_entropy(student(x), y)
        assert step.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        step.loss.backward()
        assert all(parameter.grad is None for parameter in teacher.parameters())

    def test_the_classes_of_each_place_are_on_the_axis_of_the_loss(self, monkeypatch):
        teacher, student = nn.Conv2d(1, 3, 1), nn.Conv2d(1, 3, 1)
        monkeypatch.setattr("models.distillation.load_run.load", lambda run: SimpleNamespace(model=teacher))
        x, y = torch.randn(2, 1, 4, 4), torch.randint(3, (2, 4, 4))
        step = Distillation("teacher", 1.0, 1.0, criterion=nn.CrossEntropyLoss()).step(student, (x, y))
        p, q = teacher(x).softmax(1), student(x).log_softmax(1)
        assert step.loss.item() == pytest.approx((p * (p.log() - q)).sum(1).mean().item(), rel=1e-4)

    def test_a_student_that_answers_as_its_teacher_has_only_the_labels_to_learn(self, teacher):
        x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        task = Distillation("outputs/teacher", share=1.0, criterion=CrossEntropy())
        assert task.step(teacher, (x, y)).loss.item() == pytest.approx(0.0, abs=1e-5)
