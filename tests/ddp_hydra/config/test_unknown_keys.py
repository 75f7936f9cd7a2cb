from __future__ import annotations

import logging
import re
from contextlib import nullcontext

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from ddp_hydra.config import targets, unknown_keys
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import ConfigError
from tests.ddp_hydra.config.configs import CONF, changed, composed


@pytest.mark.medium
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.clipnorm", 3, r"trainer\.clipnorm: there is no such key: did you mean trainer\.clip_norm\?"),
        ("dispatch.rank", 3, r"dispatch\.rank: .*dispatch\.ranks\?"),
        ("trainer.seed", 3, r"trainer\.seed: there is no such key; the keys of trainer are"),  # ${seed} is another key
        ("objective.epochs", 3, r"objective\.epochs: there is no such key"),
        ("metrics.f1", 3, r"metrics\.f1=3: a _target_ is missing: give \+metrics\.f1\._target_=<module>\.<class>"),
        ("callbacks.x", "models.a.B", r"callbacks\.x=models\.a\.B: .*give \+callbacks\.x\._target_=models\.a\.B"),
        (
            "callbacks._target_",
            "models.a.B",
            r"^callbacks\._target_=models\.a\.B: a callback needs a name: put it below",
        ),
        ("metrics._target_", "models.a.B", r"a metric needs a name: .*, `score: \{_target_: models\.a\.B\}`$"),
        ("data.val", "data.a.B", r"data\.val=data\.a\.B: a _target_ is missing: give data\.val\._target_=data\.a\.B"),
    ],
)
def test_a_key_that_no_schema_has_is_refused(key, value, said):
    with pytest.raises(ConfigError, match=said):
        unknown_keys.check(changed({key: value}))


@pytest.mark.medium
def test_a_node_that_is_refused_is_shown_without_its_secrets():
    with pytest.raises(ConfigError, match=r"^callbacks\.x=\{'token': \*\*\*, 'n': 3\}: a _target_ is missing"):
        unknown_keys.check(changed({"callbacks.x": {"token": "hunter2", "n": 3}}))


@pytest.mark.medium
def test_a_metric_or_callback_is_left_out_as_null():
    unknown_keys.check(changed({"metrics.f1": None, "callbacks.x": None}))


@pytest.mark.medium
def test_a_data_set_may_be_the_interpolation_of_another_one():
    unknown_keys.check(changed({"data.val": "${data.train}"}))
    OmegaConf.update(cfg := changed({"data.val": "${data.train}"}), "data.val.n", 3, force_add=True)
    with pytest.raises(ConfigError, match=r"^data\.val=\{'n': 3\}: a _target_ is missing: give data\.val\._target_="):
        unknown_keys.check(cfg)
    with pytest.raises(ConfigError, match=r"^data\.val=\$\{name\}: a _target_ is missing"):
        unknown_keys.check(changed({"name": "data.a.B", "data.val": "${name}"}))


@pytest.mark.medium
@pytest.mark.parametrize("key", ["data.val", "data.batch_size", "cluster.n_workers", "objective", "trainer.max_steps"])
def test_an_interpolation_without_a_value_is_explained_wherever_it_is_read_first(key):
    cfg = changed({key: "${nowhere}"})
    with pytest.raises(InterpolationResolutionError) as raised:
        OmegaConf.select(cfg, key)
    said = f"{key}=${{nowhere}}: Interpolation key 'nowhere' not found: give the full name of a key"
    assert str(unknown_keys.explain(raised.value)).startswith(said)


@pytest.mark.medium
@pytest.mark.parametrize(
    "reader",
    [
        "${trainer.mine}",
        "${trainer}",
        "${trainer.mine.part}",
        "${trainer.${objective.metric}}",
        "${oc.select:trainer.mine,3}",
    ],
)
def test_a_new_key_that_another_value_refers_to_is_taken(reader):
    unknown_keys.check(changed({"trainer.mine": 3, "objective.metric": "mine", "model.num_classes": reader}))


@pytest.mark.medium
@pytest.mark.parametrize("reader", ["${data.num_workers}", "${..num_workers}", "${of_set:num_workers}"])
def test_an_argument_of_a_data_loader_that_the_data_set_reads_is_taken(reader):
    unknown_keys.check(changed({"data.num_workers": 3, "data.train.readers": reader}))
    with pytest.raises(ConfigError, match=r"^data\.num_workers=3: no DataLoader gets it: "):
        unknown_keys.check(changed({"data.num_workers": 3, "data.train.num_workers": 4, "data.val.readers": "num"}))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "shuffle",
            False,
            r"data\.shuffle=false: no DataLoader gets it: give sampler\.shuffle=false, and leave data\.sh",
        ),
        ("drop_last", False, r"give sampler\.drop_last=false, and"),
        ("num_workers", 4, r"give data\.workers=4, and"),
        (
            "collate_fn",
            {"_target_": "models.a.b"},
            r"write a method collate\(self, samples\) .* data\.train\.collate_fn$",
        ),
        ("batch_sampler", "a.B", r"choose a sampler=<option>"),
    ],
)
def test_an_argument_of_a_data_loader_has_another_place(key, value, said):
    with pytest.raises(ConfigError, match=said):
        unknown_keys.check(changed({f"data.{key}": value}))
    unknown_keys.check(changed({f"data.{key}": value, f"data.train.{key}": f"${{data.{key}}}"}))
    unknown_keys.check(changed({f"data.{key}": None, f"data.train.{key}": value}))  # of the data set, as a DataLoader


@pytest.mark.medium
def test_an_argument_of_a_data_loader_that_changes_no_batch_may_stay():
    as_it_is = {"shuffle": True, "drop_last": True, "num_workers": 0, "pin_memory": True, "prefetch_factor": 4}
    unknown_keys.check(changed({f"data.{key}": value for key, value in as_it_is.items()}))


def hydra_part(words, choices):
    """Hydra's part of a config that was composed of these words."""
    overrides = {"task": list(words), "hydra": []}
    return OmegaConf.create({"overrides": overrides, "runtime": {"choices": choices}, "job": {"config_name": "config"}})


@pytest.mark.medium
@pytest.mark.parametrize(
    ("new", "others", "said"),
    [
        ("data.bachsize", {}, ["data.bachsize: nothing reads it: did you mean data.batch_size?"]),
        ("mix.alpha", {}, ["mix.alpha: nothing reads it"]),
        ("data.interleave", {"sampler.interleave": "${data.interleave}"}, []),
        ("width", {"data.threads": "${width}"}, []),
        ("data.seed", {}, ["data.seed: nothing reads it"]),
        ("data.seed", {"data.threads": "${.seed}"}, []),
        ("data.seed", {"data.train.threads": "${..seed}"}, []),
        ("data.seed", {"data.train.threads": "${.seed}"}, ["data.seed: nothing reads it"]),
        ("data.many.a", {"data.threads": "${data[many].a}"}, []),
        ("data.train.colour", {}, []),  # its target will say
        ("model.width", {}, []),
        ("data.prefetch", {"data.val": None}, []),
        ("data.n_samples", {}, []),
        ("data.shard_by", {}, []),
    ],
    ids=str,
)
def test_a_key_that_nothing_reads_is_warned_of(new, others, said, caplog):
    with caplog.at_level(logging.WARNING):
        unknown_keys.check_typed(changed({new: 3, **others}), hydra_part([f"+{new}=3"], {}), None)
    assert caplog.messages == said


@pytest.mark.parametrize("key", ["callbacks.mine", "metrics.mine"])
def test_a_node_of_a_run_that_its_resume_leaves_out_is_not_warned_of(key, caplog):
    words = [f"+{key}={{_target_: models.mine.Mine}}", f"{key}=null"]
    with caplog.at_level(logging.WARNING):
        unknown_keys.check_typed(changed({key: None}), hydra_part(words, {}), None)
    assert caplog.messages == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate: there is no such key: did you mean optimizer.lr?"),
        ("optimizer.wd=1", "optimizer.wd: there is no such key: did you mean optimizer.weight_decay?"),
        ("optimizer.learning_rate=1", "another argument of torch.optim.SGD is given with +optimizer.learning_rate=<"),
        ("trainer.epoch=1", "trainer.epoch: there is no such key: did you mean trainer.epochs? The keys of trainer"),
        ("data.train.prefx=a", "data.train.prefx: there is no such key: did you mean data.train.prefix?"),
        ("data.colour=a", "data.colour: there is no such key; the keys of data are "),
        ("hydra.sweeper.n_trial=3", "hydra.sweeper.n_trial: there is no such key"),
        (
            "hydra.job.env_set.X=1",
            "no such key; hydra.job.env_set has none; a new variable is given with +hydra.job.env_se",
        ),
        ("+hydra.job.env_set.X=[1,2]", "+hydra.job.env_set.X=[1,2]: give a text, in quotes"),
        ("hydra/launcher.stop=asha", "give hydra.launcher.stop=asha"),
        ("tags=a,b", "tags=a,b: these are several values: type tags=[a,b] for a list, \"tags='a,b'\" for a text"),
    ],
)
def test_an_unknown_key_is_told_with_the_one_that_may_be_meant(word, said):
    with pytest.raises(HydraException) as caught:
        composed(word)
    assert said in unknown_keys.explain(caught.value)
    assert unknown_keys.explain(ValueError("something else")) is None


@pytest.fixture(scope="module")
def loader():
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return GlobalHydra.instance().config_loader()  # of use, too, when Hydra's own state is free again for others


CHOICES = {"optimizer": "sgd", "data": "s3_images", "scheduler": "cosine", "model": "resnet18"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("values", "choices", "said"),
    [
        ({"optimizer.lr": "abc"}, {}, r"optimizer\.lr=abc: give a number; optimizer=sgd has 0\.05"),
        ({"optimizer.lr": [0.1, 0.2]}, {}, r"optimizer\.lr=\[0\.1, 0\.2\]: give a number; optimizer=sgd has 0\.05"),
        (
            {"optimizer.fused": "x"},
            {"optimizer": "adamw"},
            r"optimizer\.fused=x: give true or false; optimizer=adamw has true",
        ),
        # of a base of a base
        ({"data.retry_timeout_s": "x"}, {}, r"data\.retry_timeout_s=x: give a number; data=s3_images has 60"),
        (
            {"data.batch_size": 8, "data.global_batch": 64},
            {},
            r"data\.batch_size=8: data\.global_batch=64 wins over it: give one",
        ),
        ({"data.batch_size": 8, "data.global_batch": None}, {}, None),
        ({"model.norm_momentum": "same"}, {}, None),
        ({"data.batch_size": None, "data.global_batch": 64}, {}, None),
        ({"data.bucket": "photos", "scheduler.by": "epoch", "cluster.memory_limit": "4GB", "seed": 3}, {}, None),
    ],
    ids=str,
)
def test_a_word_where_a_number_is_usual_is_refused_before_anything_starts(loader, values, choices, said):
    given = [f"{key}={value}" for key, value in values.items()]
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        unknown_keys.check_typed(changed(values), hydra_part(given, {**CHOICES, **choices}), loader)


@pytest.mark.medium
def test_no_file_is_named_for_what_is_typed(loader):
    given = hydra_part(["+callbacks._target_=a.B"], CHOICES)
    with pytest.raises(ConfigError, match=r"^callbacks\._target_="):
        unknown_keys.check_new(changed({"callbacks._target_": "a.B"}), given, loader)


@pytest.mark.medium
@pytest.mark.parametrize("word", ["hydra.launcher.n_jobs=2", "hydra.sweeper.n_trials=2"])
def test_an_option_of_a_launcher_or_sweeper_that_it_lacks_is_not_to_be_added(word):
    with pytest.raises(HydraException) as caught:
        composed("hydra/sweeper=pbt", word)
    assert re.match(
        r"hydra\.\w+\.n_\w+: there is no such key.* [kK]eys of hydra", said := unknown_keys.explain(caught.value)
    )
    assert "+" not in said


def test_keys_of_another_optimizer_are_named_with_what_to_type():
    cfg = OmegaConf.create(
        {"optimizer": {"_target_": "torch.optim.RMSprop", "lr": 0.1, "nesterov": True, "momentun": 1}}
    )
    with pytest.raises(
        ConfigError,
        match=r"torch\.optim\.RMSprop: it takes no nesterov, momentun: did you mean momentum\? It takes lr, .*"
        r"type '~optimizer\.nesterov' '~optimizer\.momentun'",
    ):
        targets.make(cfg.optimizer, [])


def test_an_option_of_the_project_around_this_folder_is_told(tmp_path, monkeypatch):
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").touch()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    error = MissingConfigException("", "model/mine", ["mlp"])
    said = f"model=mine is an option of the project in {tmp_path}: type the command there, or DDP_HYDRA_PROJECT="
    assert unknown_keys.explain(error).startswith(said)
