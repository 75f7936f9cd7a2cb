"""Indexes of tar files: as tarfile reads them, and as wids groups them."""

from __future__ import annotations

import io
import random
import tarfile

import numpy as np
import pytest

from ddp_hydra.data.shards.tar_index import TarMembers, load_members, read_members
from tests.support.tar_server import tar_of

FORMATS = [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]
LONG = "/".join(["a very long folder name"] * 12)


@pytest.fixture
def read(tmp_path):
    """Write a tar file and read its members: {key: {extension: content}}."""

    def read(content: bytes) -> dict[str, dict[str, bytes]]:
        path = tmp_path / "a.tar"
        path.write_bytes(content)
        return as_dict(read_members(path), content)

    return read


def as_dict(members: TarMembers, content: bytes) -> dict[str, dict[str, bytes]]:
    view = memoryview(content)
    return {
        members.key(index): {extension: bytes(field) for extension, field in members.fields(index, view).items()}
        for index in range(len(members))
    }


@pytest.mark.parametrize("tar_format", FORMATS)
def test_members_are_found_in_every_format(read, tar_format):
    files = [(f"file{number}.txt", f"content{number}".encode()) for number in range(5)]
    expected = {f"file{number}": {".txt": f"content{number}".encode()} for number in range(5)}
    assert read(tar_of(files, format=tar_format)) == expected


def test_a_key_goes_up_to_the_first_dot_after_the_last_slash(read):
    files = [
        ("a/b.c/x.jpg", b"1"), ("a/b.c/x.seg.png", b"2"), ("a/b.c/y.txt.gz", b"3"), ("x.jpg", b"4"),
        ("README", b"no sample"), ("x.cls", b"5"), ("folder.d/README", b"no sample"), (".hidden", b"no sample"),
    ]  # fmt: skip
    tar = tar_of(files)
    assert read(tar) == {
        "a/b.c/x": {".jpg": b"1", ".seg.png": b"2"},
        "a/b.c/y": {".txt.gz": b"3"},
        "x": {".jpg": b"4", ".cls": b"5"},
    }
    assert read(tar + b"rubbish") == read(tar[: tar.rindex(b"no sample") + 512]) == read(tar)


@pytest.mark.parametrize("tar_format", FORMATS[1:])
@pytest.mark.parametrize("name", [LONG + "/x.jpg", "ünïcode/名.jpg", "x" * 200 + ".jpg", "x" * 99 + ".jpg"])
def test_long_and_foreign_names_are_right(read, tar_format, name):
    files = [("before.jpg", b"b"), (name, b"long"), ("after.jpg", b"a")]
    key = name.removesuffix(".jpg")
    expected = {"before": {".jpg": b"b"}, key: {".jpg": b"long"}, "after": {".jpg": b"a"}}
    assert read(tar_of(files, format=tar_format)) == expected


def test_a_name_may_be_split_into_a_prefix(read):
    name = "p" * 100 + "/" + "n" * 90 + ".jpg"
    assert read(tar_of([(name, b"1")], format=tarfile.USTAR_FORMAT)) == {name.removesuffix(".jpg"): {".jpg": b"1"}}


def test_a_time_with_fractions_as_webdataset_writes_it_does_no_harm(read):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size, member.mtime = 1, 1700000000.25
            tar.addfile(member, io.BytesIO(b"7"))
    assert read(content.getvalue()) == {str(number): {".cls": b"7"} for number in range(3)}


def linking(name: str, target: str, kind: bytes) -> bytes:
    """A tar file with a link, or something else without content."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member)
    return content.getvalue()


def test_folders_and_devices_are_no_fields(read):
    empty = b"".join(linking(f"a.{kind.decode()}", "", kind)[:512] for kind in (tarfile.DIRTYPE, tarfile.FIFOTYPE))
    assert read(empty + tar_of([("a.jpg", b"jpg")])) == {"a": {".jpg": b"jpg"}}


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_a_field_with_the_content_of_what_it_names(read, kind):
    targets = ["../n/1.cls", "1.cls2"] if kind == tarfile.SYMTYPE else ["n/1.cls", "m/1.cls2"]
    links = linking("m/1.cls2", targets[0], kind)[:512] + linking("./m/2.cls", targets[1], kind)[:512]
    files = tar_of([("n/1.cls", b"7"), ("n/2.cls", b"8")])
    for content in (links + files, files[:2048] + links):
        found = read(content)
        assert (found["m/1"], found["./m/2"], found["n/2"]) == ({".cls2": b"7"}, {".cls": b"7"}, {".cls": b"8"})
    with pytest.raises(ValueError, match=r"holds m/1\.cls2 as a link to .*, which is not in it.*--dereference"):
        read(links + tar_of([("n/3.cls", b"8")]))
    assert read(linking("README", "nowhere", kind)[:512] + files).keys() == {"n/1", "n/2"}


def test_a_size_in_base_256_and_a_global_header_are_left_to_tarfile(read):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", pax_headers={"comment": "of all"}) as tar:
        member = tarfile.TarInfo("a.x")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"12345"))
    assert read(content.getvalue()) == {"a": {".x": b"12345"}}
    plain = bytearray(tar_of([("a.x", b"12345")]))
    plain[124:136] = b"\x80" + (5).to_bytes(11, "big")
    plain[148:156] = b" " * 8
    plain[148:156] = b"%06o\0 " % sum(plain[:512])
    assert read(bytes(plain)) == {"a": {".x": b"12345"}}


def test_a_sparse_file_is_refused_where_it_would_be_a_field(read):
    for name in ("a.x", "README"):
        plain = bytearray(tar_of([(name, b"12345"), ("b.y", b"6")]))
        plain[156:157] = b"S"
        plain[148:156] = b" " * 8
        plain[148:156] = b"%06o\0 " % sum(plain[:512])
        if name == "README":
            assert read(bytes(plain)) == {"b": {".y": b"6"}}
        else:
            with pytest.raises(ValueError, match=r"holds a\.x as a sparse file: write it anew without tar --sparse"):
                read(bytes(plain))


WHOLE = tar_of([(f"{number}.txt", b"x" * 700) for number in range(4)])
END = 4 * (512 + 1024)


@pytest.mark.parametrize("size", [1, 100, 511, 512, 700, 1024, 1535, 2047, END - 512, END - 1, END + 100])
def test_a_truncated_tar_file_is_refused(read, size):
    with pytest.raises(ValueError, match="a damaged"):
        read(WHOLE[:size])


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"<html>404 not found</html>", b"x" * 5000, random.Random(0).randbytes(4096)]
)
def test_what_is_no_tar_file_is_refused(read, content):
    with pytest.raises(ValueError, match=r"a\.tar is (empty|not a tar file|a damaged)"):
        read(content)


@pytest.mark.parametrize("place", [1536 + 10, 1536 + 130, 1536 + 156, 3 * 1536 + 400])
def test_a_damaged_header_is_noticed(read, place):
    damaged = bytearray(WHOLE)
    damaged[place] ^= 1
    with pytest.raises(ValueError, match="a damaged tar file"):
        read(bytes(damaged))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
@pytest.mark.parametrize("size", [b"-0001000\0", b"\xff" * 10 + b"\xfc\0"])
def test_a_negative_size_is_damage(read, kind, size):
    odd = tarfile.TarInfo("b.jpg")
    odd.type = kind
    header = bytearray(odd.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    content = tar_of([("a.jpg", b"a")])
    with pytest.raises(ValueError, match="damaged"):
        read(content[:1024] + header + content[1024:])


def test_without_blocks_of_zeros_links_are_found_too(read):
    linked = tar_of([("a.x", b"1")])[:1024] + linking("a.y", "a.x", tarfile.LNKTYPE)[:512]
    assert read(linked) == {"a": {".x": b"1", ".y": b"1"}}


def test_an_open_file_is_read_though_its_name_is_gone(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(WHOLE)
    with path.open("rb") as file:
        path.unlink()
        assert len(read_members(path, file.fileno())) == 4


def test_an_index_is_saved_and_loaded_for_the_same_file_only(tmp_path):
    path, saved = tmp_path / "a.tar", tmp_path / "a.npz"
    content = tar_of([(f"ü{number}.{kind}", b"x" * number) for number in range(20) for kind in ("jpg", "seg.png")])
    path.write_bytes(content)
    members = read_members(path)
    members.save(saved)
    again = load_members(saved, len(content))
    assert again is not None
    assert as_dict(again, content) == as_dict(members, content)
    assert load_members(saved, len(content) + 512) is None
    assert load_members(tmp_path / "other.npz", len(content)) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npz", "a.tar"]


def test_a_damaged_saved_index_counts_as_none(tmp_path):
    path, saved = tmp_path / "a.tar", tmp_path / "a.npz"
    path.write_bytes(WHOLE)
    read_members(path).save(saved)
    whole = saved.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:size])
        assert load_members(saved, len(WHOLE)) is None
    saved.write_bytes(whole.replace(b"0.txt", b"1.txt").replace(b".txt", b".csv"))
    assert load_members(saved, len(WHOLE)) is None
    np.savez(tmp_path / "a.npz", head=np.array([1, 2], object), keys=np.array([{}]), names=np.array([{}]))
    assert load_members(tmp_path / "a.npz", 2) is None  # no pickle is read
