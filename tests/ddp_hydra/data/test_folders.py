"""Image folders as systems, programs and people leave them, beside torchvision's ImageFolder over the same files."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.names import is_leftover
from ddp_hydra.storage.urls import root_of

PLAIN = ["cats/1.png", "cats/2.png", "dogs/1.png"]
TREES = {
    "plain": PLAIN,
    "folders of one name below two classes": [*PLAIN, "cats/indoor/1.png", "dogs/indoor/1.png"],
    "images only in folders below a class": ["cats/indoor/1.png", "cats/outdoor/1.png", "dogs/a/b/c/1.png"],
    "upper and mixed case": ["Cats/1.PNG", "cats/1.Png", "Dogs/1.png"],
    "names that sort before a slash": ["a/1.png", "a-b/1.png", "a b/1.png", "a.b/1.png", "a+/2.png", "aa/1.png"],
    "files between folders": ["cats/b.png", "cats/a/1.png", "cats/c/1.png", "cats/a.png", "cats/a-b.png", "dogs/1.png"],
    "images directly under the prefix": [*PLAIN, "top.png", "readme.txt"],
    "other files": [*PLAIN, "cats/labels.csv", "dogs/notes.txt", "dogs/noextension"],
    "letters of several languages": ["Übel/1.png", "名/ä b.png", "🐈/1.png", "café/1.png", "e\u0301te/1.png"],
    "digits sort as text": [f"{number}/1.png" for number in range(12)],
    "odd characters": ["a b/1 %20+&=#?.png", "c'd\"e/[1]{2}.png", "[x]/*.png"],
    "one class": ["cats/1.png", "cats/2.png"],
    "one class with a folder": ["cats/1.png", "cats/indoor/2.png"],
}  # fmt: skip
LEFT = {
    "macOS": [".DS_Store", "cats/.DS_Store", "cats/._1.png", "._cats", "__MACOSX/cats/._1.png", "__MACOSX/cats/1.png"],
    "Windows": ["Thumbs.db", "cats/Thumbs.db", "dogs/desktop.ini", "$RECYCLE.BIN/x/1.png"],
    "Jupyter": [".ipynb_checkpoints/1-checkpoint.png", "cats/.ipynb_checkpoints/1-checkpoint.png"],
    "git": [".git/objects/1.png", ".gitignore", "cats/.gitkeep", "dogs/.gitattributes"],
    "a NAS": ["cats/@eaDir/1.png/SYNOPHOTO_THUMB_M.png", "lost+found/1.png", ".Trash-1000/files/1.png"],
}


@pytest.fixture
def tree(png, tmp_path):
    """Write images, and return the folder that holds the prefix "t"."""

    def write(paths: list[str]) -> Path:
        for number, path in enumerate(paths):
            file = tmp_path / "t" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(red=number))
        return tmp_path

    return write


def opened(root: Path, prefix: str = "t", **arguments) -> S3ImageFolder:
    return S3ImageFolder(str(root), prefix, **arguments)


def theirs(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    found = ImageFolder(str(root / "t"))
    return found.classes, [(str(Path(path).relative_to(root)), target) for path, target in found.samples]


@pytest.mark.parametrize("name", TREES)
def test_classes_samples_and_their_order_are_those_of_torchvision(tree, name):
    root = tree(TREES[name])
    data = opened(root)
    assert (data.classes, data.samples) == theirs(root)
    assert [data[index][0][0, 0, 0].item() for index in range(len(data))] == [
        TREES[name].index(key.removeprefix("t/")) for key, _ in data.samples
    ]
    data.close()


@pytest.mark.parametrize("system", LEFT)
def test_what_systems_leave_is_no_sample_and_no_class(tree, system):
    root = tree(PLAIN)
    right = theirs(root)
    tree([*PLAIN, *LEFT[system]])
    data = opened(root)
    assert (data.classes, data.samples) == right
    assert data.skipped == {"hidden": len(LEFT[system])}
    assert opened(root, labelled=False).samples == [(key, -1) for key, _ in right[1]]
    assert opened(root, classes_from="t").classes == ["cats", "dogs"]


def test_links_are_followed_as_torchvision_does(tree, tmp_path):
    tree(PLAIN)
    (tmp_path / "pool").mkdir()
    (tmp_path / "t" / "cats" / "2.png").rename(tmp_path / "pool" / "2.png")
    for name in ("birds", "bats"):
        (tmp_path / "t" / name).symlink_to(tmp_path / "pool")
    (tmp_path / "t" / "cats" / "3.png").symlink_to(tmp_path / "pool" / "2.png")
    data = opened(tmp_path)
    assert (data.classes, data.samples) == theirs(tmp_path)
    assert data.classes == ["bats", "birds", "cats", "dogs"]


@pytest.mark.parametrize(("target", "said"), [("gone.png", "No such file"), ("2.png", "Too many levels")])
def test_a_link_that_leads_nowhere_is_a_bad_sample_and_a_loop_ends(tree, tmp_path, target, said):
    tree(PLAIN)
    (tmp_path / "t" / "dogs" / "2.png").symlink_to(target)
    (tmp_path / "t" / "dogs" / "loop").symlink_to("..")
    data = opened(tmp_path)
    assert [key for key, _ in data.samples] == ["t/cats/1.png", "t/cats/2.png", "t/dogs/1.png", "t/dogs/2.png"]
    with pytest.raises(ValueError, match=rf"1 of 4 samples .* bad.*t/dogs/2\.png .*{said}.*data\.max_bad_fraction"):
        data[3]
    (tmp_path / "t" / "dogs" / "3.png").symlink_to("3.png")
    assert len(opened(tmp_path)) == 5


def test_a_folder_of_the_file_system_that_may_not_be_read_is_left_out(tree, tmp_path, monkeypatch):
    tree([*PLAIN, "lost+found/1.png"])
    scan, closed = os.scandir, ["lost+found"]

    def refuse(path):
        if Path(path).name in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert opened(tmp_path).classes == ["cats", "dogs"]
    closed.append("dogs")
    with pytest.raises(PermissionError):
        opened(tmp_path)


def test_a_prefix_one_folder_too_high_is_refused(tree):
    root = tree([f"photos/{path}" for path in PLAIN])
    with pytest.raises(
        ValueError, match=r"only folder in .*/t is photos, .*folders cats, dogs: .*train_prefix=t/photos"
    ):
        opened(root)
    assert opened(root, labelled=False).classes == []


def test_what_is_no_folder_of_images_is_told(tree, tmp_path):
    root = tree(["cats/1.png", "Dogs/1.png"])
    (root / "val" / "dogs").mkdir(parents=True)
    (root / "t" / "cats" / "1.png").rename(root / "val" / "dogs" / "1.png")
    with pytest.raises(
        ValueError, match=r"classes that 't' does not have: dogs\. It has: Dogs; check data\.train_prefix"
    ):
        opened(root, "val", classes_from="t")
    (root / "t" / "Dogs" / "1.png").rename(root / "photos.zip")
    with pytest.raises(FileNotFoundError, match=r"photos\.zip is a file, and must be a folder: unpack an archive, or"):
        opened(root / "photos.zip")
    (root / "photos.zip").rename(root / "t" / "photos.zip")
    with pytest.raises(FileNotFoundError, match=r"only: 1 \.zip.*/t/<class>/<file>\.jpg.*: unpack archives, and check"):
        opened(root)
    for path in (root / "val" / "dogs").iterdir():
        path.rename(root / "t" / ".1.png")
    with pytest.raises(FileNotFoundError, match=r"only: 1 \.zip, 1 hidden"):
        opened(root)


def test_a_folder_without_images_is_no_class_and_is_named(tree, tmp_path, caplog):
    tree([*PLAIN, "bats/notes.txt"])
    (tmp_path / "t" / "apes").mkdir()
    (tmp_path / "t" / ".git").mkdir()
    assert opened(tmp_path).classes == ["cats", "dogs"]
    assert caplog.messages == [f"file://{tmp_path}/t has folders without images, which are no classes: apes, bats"]


def test_a_folder_without_images_in_the_training_has_no_number_in_the_validation(tree, tmp_path):
    tree([*PLAIN, "bats/notes.txt", "bats/.1.png"])
    (tmp_path / "t").rename(tmp_path / "val")
    assert opened(tmp_path, "val", classes_from="val").class_to_idx == {"cats": 0, "dogs": 1}
    for path in ("t/bats", "t/cats", "t/dogs"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("bats/notes.txt", "bats/.1.png", "cats/1.png", "dogs/1.png"):
        (tmp_path / "t" / path).write_bytes((tmp_path / "val" / path).read_bytes())
    (tmp_path / "val" / "bats" / ".1.png").rename(tmp_path / "val" / "bats" / "1.png")
    with pytest.raises(ValueError, match=r"classes that 't' does not have: bats\. It has: cats, dogs"):
        opened(tmp_path, "val", classes_from="t")


def test_a_name_of_macos_is_the_same_class_on_other_systems(tree, png):
    root = tree([unicodedata.normalize("NFD", "café/1.png"), "b/1.png"])
    for folder in ("café", "b"):
        (root / "val" / folder).mkdir(parents=True)
        (root / "val" / folder / "1.png").write_bytes(png())
    assert [target for _, target in opened(root, "val", classes_from="t").samples] == [0, 1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.png", False), ("a/.b.png", True), (".a/b.png", True), ("./a.png", False), ("../a.png", False),
        ("THUMBS.DB", True), ("__MACOSX/a", True), ("a__MACOSX/b", False), ("a/.../b", False),
    ],
)  # fmt: skip
def test_leftovers(path, expected):
    assert is_leftover(path) == expected


def test_a_bucket_may_be_a_local_folder(tree, tmp_path, monkeypatch):
    tree(PLAIN)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for bucket in ("..", "../", "../here/..", str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}", "~", "~/"):
        assert S3ImageFolder(bucket, "t").classes == ["cats", "dogs"], bucket
    for prefix in ("/t/", "./t", "t//"):
        assert opened(tmp_path, prefix).classes == ["cats", "dogs"]
    monkeypatch.chdir(tmp_path.parent)
    assert S3ImageFolder(f"{tmp_path.name}/t").classes == ["cats", "dogs"]
    (tmp_path / "t").rename(tmp_path / ".t")  # a folder that the user names may be hidden
    assert opened(tmp_path, ".t").classes == S3ImageFolder(str(tmp_path / ".t")).classes == ["cats", "dogs"]


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("photos", "s3://photos"), ("s3://photos", "s3://photos"), ("s3://photos/", "s3://photos"), ("gs://photos", "gs://photos"),
        ("sftp://me@host/photos/", "sftp://me@host/photos"), ("/a/b/", "file:///a/b"), ("./a", f"file://{Path.cwd()}/a"),
        ("file:///a%20b", "file:///a b"), ("file://localhost/a", "file:///a"),
        ("~no-such-user/a", f"file://{Path.cwd()}/~no-such-user/a"),
    ],
)  # fmt: skip
def test_the_store_of_each_way_to_write_a_bucket(name, root):
    assert root_of(name) == root
    with pytest.raises(ValueError, match=r"has backslashes: write the path of a folder with slashes, data\.bucket="):
        root_of("..\\photos")


def test_a_bucket_that_was_meant_as_a_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        ConnectionError, match=r"not reachable.*For the folder photos of this machine, type data\.bucket=\./photos"
    ):
        S3ImageFolder("photos", "t", anon=True, retry_timeout_s=0.1)
    with pytest.raises(
        FileNotFoundError,
        match=r"no folder .*For a folder in the bucket pets, type data\.bucket=pets data\.train_prefix=a/b",
    ):
        S3ImageFolder("pets/a/b", "t")
