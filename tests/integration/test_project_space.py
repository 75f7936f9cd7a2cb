"""Jobs on one living cluster, each with the code that its project space had when it was started."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributed import Client
from omegaconf import OmegaConf

import ddp_hydra
from ddp_hydra import dispatch
from ddp_hydra.config.project import layers, pack
from ddp_hydra.errors import ConfigError, RankFailed
from ddp_hydra.job.job_config import rank_log_config
from ddp_hydra.job.run import run_job
from tests.integration.support.training import configured

pytestmark = pytest.mark.integration
TINY = ("data=tiny", "model=tiny", "trainer.threads=1", "trainer.epochs=1")


@pytest.fixture
def own_project(client2, project, tmp_path, monkeypatch) -> Path:
    """A project space whose jobs run on a living cluster."""
    own = Path(shutil.copytree(project, tmp_path / "own"))
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(own))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", lambda *_, **__: contextlib.nullcontext(client2))
    return own


def test_an_edited_model_takes_effect_in_the_next_job_and_the_run_record_tells(own_project, tmp_path):
    model = own_project / "models" / "tiny.py"

    def train(name: str) -> tuple[str, str]:
        """Returns the hash, and what the model has said."""
        run_job(configured(own_project, *TINY, "dispatch.max_restarts=0"), tmp_path / name)
        project = json.loads((tmp_path / name / "summary.json").read_text())["project"]
        log = (tmp_path / name / "logs" / "rank-1.log").read_text()
        assert f"project {project[:16]}\n" in log
        return project, "".join(re.findall("I am .*", log))

    first = train("one")
    assert first == (pack(*layers()).sha256, "")
    model.write_text(model.read_text().replace("self.tell = tell", "self.tell = tell; print('I am new')"))
    second = train("two")
    assert second == (pack(*layers()).sha256, "I am new")
    assert second[0] != first[0]


def test_ranks_on_a_living_cluster_have_the_variables_that_hydra_sets(own_project, tmp_path, monkeypatch):
    model = own_project / "models" / "tiny.py"
    told = "print('I have', os.environ.get('MY_SCALE'), os.environ.get('MY_HOME'))"
    source = model.read_text().replace("self.tell = tell", f"self.tell = tell; {told}")
    model.write_text(source.replace("import torch\n", "import os\n\nimport torch\n", 1))
    monkeypatch.chdir(own_project)
    monkeypatch.setenv("MY_SCALE", "1")

    def told_by(*words: str) -> list[str]:
        run = ddp_hydra.run([*TINY, f"hydra.run.dir={tmp_path / str(len(words))}", *words])
        return re.findall("I have (.*)", (run.dir / "logs" / "rank-1.log").read_text())

    assert told_by() == ["None None"], "the workers were there before"
    given = [
        "+hydra.job.env_set.MY_SCALE=100",
        "+hydra.job.env_set.MY_HOME='${oc.env:HOME}'",
        "trainer.log_every_steps=9",
    ]
    assert told_by(*given) == [f"100 {Path.home()}"]
    own = "+hydra.job.env_set.MY_HOME='${hydra:runtime.output_dir}'"
    assert told_by(own) == [f"None {tmp_path / '1'}"]
    assert os.environ["MY_SCALE"] == "1"
    folder = f"hydra.run.dir={tmp_path / 'later'}"
    run = ddp_hydra.run([*TINY, folder, "+hydra.job.env_set.MY_SCALE=7"], wait=False).wait()
    assert re.findall("I have (.*)", (run.dir / "logs" / "rank-1.log").read_text()) == ["7 None"]
    assert os.environ["MY_SCALE"] == "1"
    seed = "seed='${oc.decode:${oc.env:MY_SCALE}}'"
    with pytest.raises(
        ConfigError, match=r"set os\.environ\['MY_SCALE'\] to its value before, or leave out wait=False"
    ):
        ddp_hydra.run([*TINY, f"{folder}-2", "+hydra.job.env_set.MY_SCALE=7", seed], wait=False)
    with pytest.raises(ConfigError, match=r"^hydra\.job\.env_set\.A=\$\{oc\.env:NOWHERE\}: Environment variable"):
        ddp_hydra.run([*TINY, f"{folder}-2", "+hydra.job.env_set.A='${oc.env:NOWHERE}'"])


def test_what_a_model_logs_is_in_the_logs_of_its_own_job_alone(own_project, client2, tmp_path):
    """Ranks are forks of one server, which keeps nothing of a job; a function sets up its own logging."""
    model = own_project / "models" / "tiny.py"
    told = "; ".join(f"log.{level}('{level} of %s', 'mine')" for level in ("debug", "info"))
    source = model.read_text().replace("self.tell = tell", f"self.tell = tell; {told}")
    first, rest = source.split("import torch\n", 1)
    model.write_text(f"{first}import logging\n\nimport torch\n\nlog = logging.getLogger(__name__)\n{rest}")

    def logged(**hydra_cfg: object) -> list[tuple[str, ...]]:
        folder = tmp_path / "-".join(["run", *map(str, hydra_cfg.values())])
        given = {"log_config": rank_log_config(OmegaConf.create(hydra_cfg))} if hydra_cfg else None
        run_job(configured(own_project, *TINY), folder, rank_settings=given)
        return re.findall(r"^\[.*,\d\d\d\]\[(.*)\]\[(.*)\] - (.*)$", (folder / "logs" / "rank-1.log").read_text(), re.M)

    debug, info = (("models.tiny", level.upper(), f"{level} of mine") for level in ("debug", "info"))
    found = logged(verbose="models.tiny")
    assert found == [debug, info]
    assert logged() == [info]
    assert dispatch.run(client2, lambda: (len(logging.root.handlers), logging.root.level)) == [(0, logging.WARNING)] * 2


def test_an_error_in_a_model_names_the_users_file_once(own_project, tmp_path, monkeypatch):
    """Known before a cluster is there where the file is not Python; else raised by a rank, and not tried again."""
    model = own_project / "models" / "tiny.py"
    source = model.read_text()
    cfg = configured(own_project, *TINY, "dispatch.max_restarts=3")
    model.write_text(source.replace("return self.layers(x)", "return self.layers(x[:, 1:])"))
    line = model.read_text().splitlines().index("        return self.layers(x[:, 1:])") + 1
    with pytest.raises(RankFailed) as caught:
        run_job(cfg, tmp_path / "run")
    where = f"models/tiny.py, line {line}, in forward"
    assert re.match(rf"rank \d on \S+: RuntimeError: .*mat1 and mat2.* \(in step 1; {where}\)\n", str(caught.value))
    told = str(caught.value)
    assert told.count('File "') == 2  # the user's, and the one in torch that raised
    assert "project-" not in told
    assert "raised this before the first step was done: it was not tried again" in told
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (len(summary["attempts"]), summary["failure"]["place"]) == (1, where)
    log = tmp_path / "run" / "logs" / f"rank-{summary['failure']['rank']}.log"
    assert "torch/nn/modules/container.py" in log.read_text()

    model.write_text(source.replace("def forward(", "def forward(("))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", None)
    with pytest.raises(
        ConfigError, match=r"^model\._target_=models\.tiny\.Tiny: models/tiny\.py, line \d+: SyntaxError"
    ):
        run_job(cfg, tmp_path / "other")


def test_two_jobs_with_different_code_run_at_once_on_one_cluster(client4, gang, tmp_path, wait_for):
    packed = {}
    for name in ("a", "b"):
        module = tmp_path / name / "models" / "twin.py"
        module.parent.mkdir(parents=True)
        module.write_text(
            "import pathlib, time\n"
            "import torch.distributed as dist\n"
            "def meet(folder):\n"
            f"    pathlib.Path(folder, f'{name}-{{dist.get_rank()}}').touch()\n"
            "    while len(list(pathlib.Path(folder).glob('?-?'))) < 4:\n"
            "        time.sleep(0.01)\n"
            f"    return {name!r}\n"
        )
        packed[name] = pack(tmp_path / name)
    with ThreadPoolExecutor(2) as pool, Client(client4.scheduler.address, set_as_default=False) as other:
        jobs = [
            pool.submit(gang(client, ranks=2, project=packed[name]).run, "models.twin:meet", str(tmp_path))
            for name, client in (("a", client4), ("b", other))
        ]
        assert [job.result() for job in jobs] == [["a", "a"], ["b", "b"]]
