from __future__ import annotations

import io
from pathlib import Path

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import Bucket, Store, urls


@pytest.fixture
def disk(tmp_path) -> Store:
    return urls.open_folder(f"file://{tmp_path}/runs/a")


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file/runs", "/proc/runs"):
        with pytest.raises(ConfigError, match=r"is the disk mounted there, and may its user write it\?"):
            urls.open_folder(path).put("x", b"")
        with pytest.raises(ConfigError, match=r"is the disk mounted there, and may its user write it\?"):
            urls.open_folder(path).put_if("x", b"", None)


def test_a_full_disk_may_pass(disk):
    class Full(io.BytesIO):
        def read(self, *_):
            raise OSError(28, "No space left on device")

    with pytest.raises(ConnectionError, match="No space left"):
        disk.put("x", Full())
    assert disk.size_or_none("x") is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, "a bucket is given as s3://bucket/folder, .*without password") for url in (
            "", "runs", "s3://", "s3://key:top-secret@bucket/a", "s3://bucket/a?token=top-secret", "s3://bucket/../a",
            "http://bucket/a", "sftp://me:top-secret@host/runs", "sftp://host/runs?key=top-secret", "sftp://host/../runs",
        )),
        *((f"{scheme}://{name}/runs", rf"^{scheme}://{name}/runs: '{name}' is not the name of a bucket \(3 to 63 ")
          for scheme, name in (("s3", "b"), ("gs", "_b"), ("az", "b" * 64))),
        ("memory://runs", "memory of one process"),
        ("local:///runs", "local:// is not known"),
        ("ipfs2://runs", "ipfs2:// is not known"),
    ],
)  # fmt: skip
def test_anything_else_is_none(url, said):
    with pytest.raises(ConfigError, match=said) as caught:
        urls.open_folder(url)
    assert "top-secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket/runs", "az://container/runs"])
def test_a_bucket_is_one(url):
    assert isinstance(urls.open_folder(url), Bucket)
    assert urls.is_url(url)


def test_another_hosts_files_are_refused():
    with pytest.raises(ConfigError, match="with three slashes"):
        urls.plain_path("file://shared/runs")
    assert urls.plain_path("file:///a%20b/c") == "/a b/c"


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert urls.plain_path("~/runs/") == "/home/me/runs/"
    assert urls.address("~/runs/", Path("a").absolute()) == "/home/me/runs/a"
    for other in ("~no user/runs", "a/~/b", "s3://bucket/~/runs"):
        assert urls.plain_path(other) == other


@pytest.mark.parametrize(
    ("run_dir", "name"),
    [
        ("outputs/2026-11-21/10-22-33-123456", "2026-11-21/10-22-33-123456"),
        ("multirun/2026-11-21/10-22-33-123456/3", "2026-11-21/10-22-33-123456/3"),
        ("mine", "mine"),
        ("runs/of/mine", "runs/of/mine"),
        ("/elsewhere/sweeps/a/7", "a/7"),
    ],
)
def test_each_run_has_its_own_folder_below_the_root(run_dir, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert urls.address("s3://bucket/runs/", Path(run_dir).absolute()) == f"s3://bucket/runs/{name}"
    assert urls.address("file:///shared", Path(run_dir).absolute()) == f"/shared/{name}"


def test_the_working_folder_may_be_a_run_directory(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert urls.address("/shared", Path()) == "/shared/a/b"


def test_a_root_below_which_the_run_directory_lies_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run_dir, root in (("outputs/a/b", "outputs"), ("mine", "."), ("linked/c", "there")):
        Path(run_dir).mkdir(parents=True)
        if root == "there":
            Path(root).symlink_to(tmp_path)
        with pytest.raises(ConfigError, match=r"is the command's own run directory: give another folder"):
            urls.address(str(Path(root).absolute()), Path(run_dir).absolute())
    assert urls.address(str(tmp_path), Path("outputs/a/b")) == f"{tmp_path}/a/b"


def test_a_root_that_means_another_folder_on_each_host_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"results.root=shared/runs: give s3://bucket/folder, or the whole path"):
        urls.address("shared/runs", tmp_path)
