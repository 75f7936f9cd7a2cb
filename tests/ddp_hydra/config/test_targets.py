from __future__ import annotations

import errno
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import redact, targets
from ddp_hydra.errors import ConfigError
from tests.integration.conftest import ROOT

FILES = {
    "good.py": "import torch\n\nclass Net:\n    pass\n\nSmall = Net\n",
    "syntax.py": "import torch\n\ndef net(:\n    pass\n",
    "lacking.py": "import no_such_package\n\nclass Net:\n    pass\n",
    "optional.py": "try:\n    import no_such_package\nexcept ImportError:\n    pass\n\nclass Net: ...\n",
    "uses.py": "from models.syntax import net\n\nclass Net:\n    pass\n",
    "wrong.py": "from .good import Nett\n\nclass Net:\n    pass\n",
    "stars.py": "from models.good import *\n",
    "lazy.py": "def __getattr__(name):\n    return object\n",
    "raises.py": "x = {}\ny = x['missing']\n",
    "blocks/__init__.py": "from .deep import Deep\n",
    "blocks/deep.py": "class Deep:\n    def make(): ...\n",
}


@pytest.fixture
def root(tmp_path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def check(target: str, root: Path, installed_here: bool = True) -> None:
    targets.check({"model": {"_target_": target}, "data": {"train": None}}, [root], installed_here)


@pytest.mark.parametrize(
    "target",
    [
        "models.good.Net", "models.good.Small", "models.optional.Net", "models.stars.Net", "models.lazy.Anything",
        "models.blocks.Deep", "models.blocks.deep.Deep.make", "torch.nn.Linear",
        "ddp_hydra.tasks.losses.CrossEntropy",
    ],
)  # fmt: skip
def test_what_is_there_is_found(root, target):
    check(target, root)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("models.syntax.net", r"models/syntax\.py, line 3: SyntaxError: invalid syntax\n    def net\(:"),
        ("models.uses.Net", r"models/syntax\.py, line 3: SyntaxError"),
        ("models.lacking.Net", r"models/lacking\.py, line 1: there is no package no_such_package: install it"),
        ("models.wrong.Net", r"models/wrong\.py, line 1: models/good\.py has no Nett: did you mean Net\?"),
        ("models.good.Nett", r"models/good\.py has no Nett: did you mean Net\?"),
        ("models.good.Transformer", r"models/good\.py has no Transformer; it has Net, Small, torch"),
        ("models.god.Net", r"no models/god\.py: did you mean models\.good\?"),
        ("models.blocks.Depe", r"models/blocks/__init__\.py has no Depe: did you mean Deep\?"),
        ("models.good", r"it is a module: give a class or function of it, models\.good\.<name>"),
        ("optional.Net", r"did you mean models\.optional\.Net\?"),
        ("Deep", r"there is no package Deep: install it"),
        ("Net", r"did you mean models\.good\.Net\?"),
        ("models/good.Net", r"a class is named with dots: give models\.good\.Net"),
        ("modelz.good.Net", r"there is no package modelz: did you mean models\?"),
    ],
)
def test_what_is_not_is_named_with_its_file_and_line(root, target, said):
    with pytest.raises(ConfigError, match=rf"(?s)^model\._target_={target}: .*{said}"):
        check(target, root)


def test_a_node_of_ones_own_that_no_part_of_the_job_refers_to_is_not_built(root):
    targets.check({"export": {"_target_": "not_installed.Writer"}}, [root], True)


@pytest.mark.parametrize("target", ["models.lacking.Net", "elsewhere.Net"])
def test_what_only_the_workers_may_have_is_left_to_them(root, target):
    check(target, root, installed_here=False)


@pytest.mark.medium
def test_all_targets_that_ship_are_found():
    """Also those that name another in a file they import."""
    found = {}
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path))
        found[path.relative_to(ROOT).as_posix()] = content if isinstance(content, dict) else {}
    assert sum(key.endswith("_target_") for key, _ in redact.values_of(found)) > 20
    targets.check({"model": found}, [ROOT], installed_here=False)


def test_a_projects_own_files_are_looked_at_before_the_starters(root, tmp_path):
    own = tmp_path / "own" / "models"
    own.mkdir(parents=True)
    (own / "good.py").write_text("from models import blocks\n\n\ndef other(): ...\n")
    layers = [own.parent, root]
    targets.check({"a": {"_target_": "models.good.other"}, "b": {"_target_": "models.blocks.Deep"}}, layers, True)
    with pytest.raises(ConfigError, match=r"models/good\.py has no Net; it has blocks, other"):
        targets.check({"model": {"_target_": "models.good.Net"}}, layers, True)
    with pytest.raises(ConfigError, match=r"no models/optionals\.py: did you mean models\.optional\?"):
        targets.check({"model": {"_target_": "models.optionals.Net"}}, layers, True)


@pytest.mark.integration
def test_nothing_is_imported(root):
    code = (
        "import sys; from pathlib import Path; from ddp_hydra.config import targets; "
        f"targets.check({{'model': {{'_target_': 'models.good.Net'}}}}, [Path({str(root)!r})], True); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.optim.SDG", r"torch\.optim has no SDG: did you mean SGD\?"),
        ("broken_here.raises", r"broken_here\.py, line 2, in <module>: KeyError: 'missing'"),
        ("syntax_here.net", r"syntax_here\.py, line 3: SyntaxError: invalid syntax"),
        ("no_such_package.Net", r"No module named 'no_such_package'"),
    ],
)
def test_a_rank_says_what_its_import_raised(root, monkeypatch, target, said):
    (root / "broken_here.py").write_text(FILES["raises.py"])
    (root / "syntax_here.py").write_text(FILES["syntax.py"])
    monkeypatch.syspath_prepend(str(root))
    with pytest.raises(ConfigError, match=rf"^{target}: .*{said}"):
        targets.make(OmegaConf.create({"_target_": target}))


def refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}")


def stale() -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


def missing() -> None:
    Path("/no/such/file").read_bytes()


def read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def not_cached() -> None:
    try:
        raise ConnectionError("refused")
    except ConnectionError:
        raise OSError("it is not in the cache") from None


@pytest.mark.parametrize("name", ["refused", "stale"])
def test_a_fault_of_a_network_or_a_disk_is_no_mistake(name):
    with pytest.raises(OSError, match=r"refused|Stale") as caught:
        targets.make(OmegaConf.create({"_target_": f"{__name__}.{name}"}))
    assert caught.value.__notes__ == [f"raised while {__name__}.{name} was made"]


@pytest.mark.parametrize("name", ["read_only", "not_cached"])
def test_a_fault_that_stays_is_a_mistake(name):
    with pytest.raises(ConfigError, match=rf"{name}: .*(Read-only|not in the cache)"):
        targets.make(OmegaConf.create({"_target_": f"{__name__}.{name}"}))


def test_a_file_that_is_not_there_is_a_mistake():
    with pytest.raises(ConfigError, match=r"missing: .*No such file"):
        targets.make(OmegaConf.create({"_target_": f"{__name__}.missing"}))


def test_a_text_that_reads_like_a_number_is_told():
    node = OmegaConf.create({"_target_": "torch.nn.Linear", "in_features": "4", "out_features": 2})
    with pytest.raises(ConfigError, match=r"in_features='4' is a text: give a number, or \"\$\{oc\.decode:"):
        targets.make(node)
    secret = OmegaConf.create({"_target_": "builtins.dict", "api_key": "123456"})
    assert targets.reason_of(TypeError("not a str"), secret) == "not a str"
