from __future__ import annotations

import yaml
from omegaconf import OmegaConf

from ddp_hydra.config.references import saved_text, with_full_names


def test_a_saved_config_can_be_resolved_without_our_resolver():
    """As a user does who reads .hydra/config.yaml in a notebook; later overrides of the keys still count."""
    transform = {"_target_": "a", "size": "${of_set:size}", "names": ["x${of_set: flip}", "${seed}"]}
    listed = [{"size": 5, "train": {"transform": transform}}]
    photos = {"size": 7, "train": {"_target_": "b", "transform": transform}}
    data = {
        "size": 3,
        "flip": 0.5,
        "sets": {"photos": photos},
        "listed": listed,
        "train": {"dataset": {"transform": transform}},
    }
    cfg = OmegaConf.create({"data": data, "seed": 1, "password": "hidden"})
    text = saved_text(cfg)
    assert "of_set" not in text
    assert "hidden" not in text
    saved = OmegaConf.create(yaml.safe_load(text))
    assert OmegaConf.to_container(saved.data, resolve=True) == OmegaConf.to_container(cfg.data, resolve=True)
    saved.data.size = cfg.data.size = 9
    assert saved.data.train.dataset.transform.size == cfg.data.train.dataset.transform.size == 9
    assert saved.data.sets.photos.train.transform.size == 7


def test_only_dots_of_interpolations_are_names_of_keys():
    config = {"a": {"b": "/tmp/.cache/*.jpg ${seed} v.1 .5", "c": "${.b}/.x/${oc.select:..seed}"}, "seed": 1}
    assert dict(with_full_names(config)) == {
        "a.b": "/tmp/.cache/*.jpg ${seed} v.1 .5",
        "a.c": "${a.b}/.x/${oc.select:seed}",
        "seed": 1,
    }
