from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ddp_hydra.config import project
from ddp_hydra.config.project import Project, find, layers, make_importable, pack, starter
from ddp_hydra.errors import ConfigError


def make(root, **files):
    for name, text in {"conf/config.yaml": "seed: 0\n", "models/net.py": "WIDTH = 3\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(packed):
    return sorted(zipfile.ZipFile(io.BytesIO(packed.archive)).namelist())


def test_equal_content_packs_equally_wherever_and_whenever(tmp_path):
    here, there = pack(make(tmp_path / "here")), make(tmp_path / "there")
    for path in there.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert pack(there) == here


def test_another_content_has_another_hash(tmp_path):
    packed = [pack(make(tmp_path))]
    for change in (
        lambda: (tmp_path / "models/net.py").write_text("WIDTH = 4\n"),
        lambda: (tmp_path / "models/net.py").rename(tmp_path / "models/nets.py"),
        lambda: (tmp_path / "data").mkdir() or (tmp_path / "data/a.txt").write_text("xdata/b.txty"),
        lambda: [(tmp_path / f"data/{name}.txt").write_text(text) for name, text in (("a", "x"), ("b", "y"))],
        lambda: (tmp_path / "conf/config.yaml").unlink(),
    ):
        change()
        project._pack.cache_clear()  # for a kernel whose stamps of files are the same for some milliseconds
        packed.append(pack(tmp_path))
    assert len({one.sha256 for one in packed}) == 6


def test_code_and_configuration_are_packed_and_nothing_else(tmp_path):
    make(
        tmp_path,
        **{
            "data/names.json": "[]",
            "data/deep/er/er.toml": "",
            "data/photo.jpg": "x",
            "models/__pycache__/net.py": "x",
            "models/net.pyc": "x",
            "outputs/run/config.yaml": "x",
            "secret.py": "x",
        },
    )
    code = ["conf/config.yaml", "data/deep/er/er.toml", "data/names.json", "models/net.py"]
    assert names(pack(tmp_path)) == sorted([*code, "data/__init__.py", "models/__init__.py"])


def test_code_behind_a_link_travels_and_data_does_not(tmp_path):
    for name in ("shared/blocks.py", "shared/deep/more.py", "photos/labels.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    root = tmp_path / "project"
    (root / "models").mkdir(parents=True)
    (root / "models" / "own.py").touch()
    for link, target in (("common", "shared"), ("photos", "photos"), ("again", "project/models")):
        (root / "models" / link).symlink_to(tmp_path / target)
    (tmp_path / "shared" / "loop").symlink_to(tmp_path / "shared")
    found = {"models/own.py", "models/common/blocks.py", "models/common/deep/more.py"}
    assert set(names(pack(root))) == found | {"models/__init__.py", "data/__init__.py"}
    (root / "data").mkdir()
    (tmp_path / "photos/prepare.py").touch()
    (tmp_path / "shared/mutual").symlink_to(tmp_path / "photos")
    (tmp_path / "photos/mutual").symlink_to(tmp_path / "shared")
    (tmp_path / "setup.py").touch()
    for link, target in (("data/common", "shared"), ("models/repo", ".")):
        (root / link).symlink_to(tmp_path / target)
    found |= {"data/common/blocks.py", "data/common/deep/more.py", "models/photos/prepare.py"}
    found |= {f"{link}/mutual/prepare.py" for link in ("models/common", "data/common")}
    found |= {f"models/photos/mutual/{name}.py" for name in ("blocks", "deep/more")}
    assert set(names(pack(root))) == found | {"models/__init__.py", "data/__init__.py"}, "no link to a folder around"


def test_a_package_without_init_is_shipped_as_a_regular_one(tmp_path):
    make(tmp_path, **{"models/net.py": "x = 1", "data/__init__.py": "y = 2"})
    folder = pack(tmp_path).unpack(tmp_path / "there")
    assert (folder / "models" / "__init__.py").read_text() == ""
    assert (folder / "data" / "__init__.py").read_text() == "y = 2"


def test_an_archive_tells_its_hash_and_another_is_none(tmp_path):
    packed = pack(make(tmp_path))
    assert project.packed(packed.archive) == packed
    for damaged in (b"", b"no zip", packed.archive[:-30], packed.archive[:40]):
        with pytest.raises(ValueError, match="it is not an archive of a project space"):
            project.packed(damaged)


def test_an_archive_that_grows_beyond_code_is_refused(tmp_path):
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("models/large.py", bytes(2 * project.MAX_BYTES + 1))
    with pytest.raises(ValueError, match="it is too large"):
        project.packed(path.read_bytes())


def test_too_much_to_be_code_is_refused_with_the_largest_file(tmp_path, monkeypatch):
    make(tmp_path, **{"data/small.txt": "x", "data/huge.json": "x" * 3 * 2**20})
    pack(tmp_path)
    monkeypatch.setattr(project, "MAX_BYTES", 2 * 2**20)
    with pytest.raises(ConfigError, match=r"3 MiB of .* and 2 MiB can be shipped .* largest is data/huge\.json"):
        pack(tmp_path)


def test_unpacking_gives_the_files_and_again_the_same_folder(tmp_path):
    packed = pack(make(tmp_path / "space"))
    target = packed.unpack(tmp_path / "worker" / "spool")
    assert (target / "models/net.py").read_text() == "WIDTH = 3\n"
    assert pack(target) == packed
    (target / "kept").touch()
    assert packed.unpack(tmp_path / "worker" / "spool") == target
    assert (target / "kept").exists()
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o700  # other users of the host may not read the code


def test_many_ranks_unpack_at_once(tmp_path):
    packed = pack(make(tmp_path / "space", **{f"data/{n}.json": "[]" for n in range(50)}))
    together, found = threading.Barrier(8), []

    def unpack():
        together.wait()
        target = packed.unpack(tmp_path / "worker")
        found.append((target, pack(target).sha256))

    threads = [threading.Thread(target=unpack) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {(found[0][0], packed.sha256)}
    assert len(found) == 8
    assert list((tmp_path / "worker").iterdir()) == [found[0][0]]


@pytest.mark.parametrize(
    "name", ["../evil.py", "/evil.py", "models/../../../evil.py", "../../outer/worker-evil/evil.py"]
)
def test_names_that_climb_stay_inside(name, tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "x")
    worker = tmp_path / "outer" / "worker"
    target = Project("0" * 64, file.getvalue()).unpack(worker)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written] == ["evil.py"]
    assert target in written[0].parents
    assert not Path("/evil.py").exists()


def test_the_project_is_here_or_where_the_variable_says(tmp_path, monkeypatch):
    here, there = make(tmp_path / "here"), make(tmp_path / "there")
    monkeypatch.delenv("DDP_HYDRA_PROJECT", raising=False)
    monkeypatch.chdir(there)
    assert find() == there
    monkeypatch.setenv("DDP_HYDRA_PROJECT", "../here")
    assert find().samefile(here)


@pytest.mark.parametrize("own", ["conf/model/mine.yaml", "models/mine.py", "data/mine.py"])
def test_any_file_of_its_own_makes_a_project_and_the_starter_stays_behind_it(own, tmp_path, monkeypatch):
    monkeypatch.delenv("DDP_HYDRA_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "photo.jpg").touch()
    assert (find(), layers()) == (starter(), (starter(),))
    (tmp_path / own).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / own).touch()
    assert (find(), layers()) == (tmp_path, (tmp_path, starter()))


def test_a_name_without_a_project_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^DDP_HYDRA_PROJECT={tmp_path}: .* holds no project, .*unset"):
        find()


def test_a_projects_file_wins_over_the_starters_and_the_rest_is_there(tmp_path):
    own = make(tmp_path / "own", **{"models/net.py": "WIDTH = 4\n", "data/mine.py": "x = 1\n"})
    shipped = make(tmp_path / "shipped", **{"models/other.py": "y = 2\n", "conf/model/other.yaml": "z: 3\n"})
    folder = pack(own, shipped).unpack(tmp_path / "there")
    assert (folder / "models/net.py").read_text() == "WIDTH = 4\n"
    assert (folder / "models/other.py").read_text() == "y = 2\n"
    assert (folder / "conf/model/other.yaml").is_file()
    assert pack(folder) == pack(own, shipped)


IMPORTS = """
import json, multiprocessing, sys
from pathlib import Path
from ddp_hydra.config.project import make_importable

def found(name):
    module = __import__(name, fromlist=["x"])
    return [module.__file__, getattr(module, "WIDTH", None)]

if __name__ == "__main__":
    make_importable([Path(folder) for folder in sys.argv[1:]])
    names = ["models", "models.net", "models.other", "data.mine"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([[found(name) for name in names], pool.map(found, names)]))
"""


@pytest.mark.medium
def test_modules_are_imported_from_where_they_are_also_in_spawned_processes(tmp_path):
    own = make(
        tmp_path / "own", **{"models/net.py": "WIDTH = 4\n", "data/mine.py": "", "models/__init__.py": "WIDTH = 9"}
    )
    shipped = make(tmp_path / "shipped", **{"models/other.py": "", "models/__init__.py": "WIDTH = 1"})
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS)
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(__file__).parents[3])}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, str(script), str(own), str(shipped)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    here, spawned = json.loads(done.stdout)
    assert here == spawned
    assert here == [
        [str(own / "models/__init__.py"), 9],
        [str(own / "models/net.py"), 4],
        [str(shipped / "models/other.py"), None],
        [str(own / "data/mine.py"), None],
    ]
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.medium
def test_a_signal_amid_the_composing_leaves_no_folder(tmp_path):
    roots = [make(tmp_path / name, **{"models/net.py": ""}) for name in ("own", "shipped")]
    program = (
        "import os, signal, sys; from pathlib import Path; from ddp_hydra.config.project import make_importable\n"
        "from ddp_hydra.console import signals\n"
        f"signals.leave_at_once(make_importable([Path(root) for root in {list(map(str, roots))}]))\n"
        "assert Path(sys.path[0], 'models').is_dir()\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not list((tmp_path / "tmp").iterdir())


def test_one_layer_is_imported_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    make_importable([tmp_path])
    assert sys.path == [str(tmp_path)]


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    make(tmp_path, **{"conf/slow.yaml": "a: 1\n"})
    read = Path.read_bytes

    def refuse(path):
        if path.name == "slow.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/conf/slow\.yaml: Permission denied: .* travel with each job"):
        pack(tmp_path)


def test_a_folder_of_configs_that_may_not_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
    make(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError, match=f"{tmp_path}/conf"):
        project.find()
    (tmp_path / "elsewhere" / "conf").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match=f"{tmp_path}/elsewhere/conf"):
        project.find()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert project.find() == project.starter(), "a folder conf of another user, without code, is no project"
