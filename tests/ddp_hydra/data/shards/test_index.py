"""Indexes of shards: what they say, what they lead to, and what they may not do."""

from __future__ import annotations

import json

import pytest

from ddp_hydra.data.shards.index import DEEPEST, Shard, read_index
from ddp_hydra.storage import Access
from tests.support.tar_server import index_of

MD5 = "0123456789abcdef" * 2


@pytest.fixture
def write(tmp_path):
    """Write an index as a file, and return its path."""

    def write(content, name: str = "index.json") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


class Web:
    """Stands for all stores but local ones: a dict of whole URLs."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.local = files, Access()

    def open(self, url):
        return (self, url) if "://" in url else self.local.open(url)

    def get(self, url):
        if url not in self.files:
            raise FileNotFoundError(f"there is no {url} (404): check the URL")
        return self.files[url]


def shard(url: str = "a.tar", **more) -> dict:
    return {"url": url, "nsamples": 1, **more}


def urls(index) -> list[str]:
    return [shard.url for shard in index.shards]


def test_an_index_says_where_its_shards_are_and_what_they_hold(write, tmp_path):
    described = {"url": "a-0.tar", "nsamples": 10, "filesize": 20480, "md5sum": MD5.upper(), "extra": [1]}
    path = write(index_of(described, {"url": "sub/a-1.tar", "nsamples": 7}, name="train", info={"classes": ["cat"]}))
    index = read_index(path)
    assert index.shards == (
        Shard(f"{tmp_path}/a-0.tar", 10, 20480, MD5, "train"),
        Shard(f"{tmp_path}/sub/a-1.tar", 7, None, None, "train"),
    )
    assert (index.name, index.info) == ("train", {"classes": ["cat"]})


@pytest.mark.parametrize("form", ["path", "relative", "url"])
def test_a_local_index_may_be_given_in_many_ways(write, tmp_path, monkeypatch, form):
    path = write(index_of(shard()), "a folder/index.json")
    monkeypatch.chdir(tmp_path)
    given = {"path": path, "relative": "a folder/index.json", "url": f"file://{path.replace(' ', '%20')}"}[form]
    assert urls(read_index(given)) == [f"{tmp_path}/a folder/a.tar"]


@pytest.mark.parametrize("source", ["s3://bucket/some/index.json", "https://host:81/some/index.json"])
def test_relative_urls_start_where_the_index_is(source):
    root = source.partition("/some")[0]
    named = ["a.tar", "./deep/a.tar", "../up.tar", "../../../../top.tar", "https://other/x.tar", "s3://b/y.tar"]
    index = read_index(source, access=Web({source: index_of(*map(shard, named))}))
    assert urls(index) == [
        f"{root}/some/a.tar", f"{root}/some/deep/a.tar", f"{root}/up.tar", f"{root}/top.tar", *named[4:],
    ]  # fmt: skip
    source = f"{root}/index.json?token=a/b" if root.startswith("https") else f"{root}/index.json"
    index = read_index(source, access=Web({source: index_of(shard("a.tar"), shard("b.tar?x=1"))}))
    assert urls(index) == [f"{root}/a.tar", f"{root}/b.tar?x=1"]  # a query belongs to its own URL only


@pytest.mark.parametrize(
    ("own", "argument", "expected"),
    [
        ("s3://b/data/", None, "s3://b/data/a.tar"),
        ("data", None, "{here}/data/a.tar"),
        ("/other", None, "/other/a.tar"),
        ("s3://b/data", "https://h/d", "https://h/d/a.tar"),
        (None, "s3://b", "s3://b/a.tar"),
        (None, "{here}/x/", "{here}/x/a.tar"),
    ],
)
def test_a_base_is_the_users_else_the_indexs_own(write, tmp_path, own, argument, expected):
    path = write(index_of(shard(), **({"base": own} if own else {})))
    base = argument and argument.format(here=tmp_path)
    assert urls(read_index(path, base=base)) == [expected.format(here=tmp_path)]


def with_datasets(*datasets: dict, **more) -> bytes:
    return json.dumps({"wids_version": 1, "datasets": datasets, **more}).encode()


def test_sub_datasets_have_their_own_bases_and_names(write, tmp_path):
    path = write(
        with_datasets(
            {"name": "train", "shardlist": [shard("a.tar"), shard("b.tar")], "base": "first"},
            {"name": "val", "shardlist": [shard("a.tar")], "base": "s3://bucket/second"},
            {"shardlist": [shard("c.tar")], "weight": 3},
        )
    )
    index = read_index(path)
    assert urls(index) == [
        f"{tmp_path}/first/a.tar", f"{tmp_path}/first/b.tar", "s3://bucket/second/a.tar", f"{tmp_path}/c.tar",
    ]  # fmt: skip
    assert [shard.dataset for shard in index.shards] == ["train", "train", "val", None]
    assert urls(read_index(path, dataset="val")) == ["s3://bucket/second/a.tar"]
    with pytest.raises(ValueError, match=r"no data set 'test'; it has: train, val. Check data.dataset="):
        read_index(path, dataset="test")


def test_an_index_may_name_others_which_name_their_shards_from_where_they_are(write, tmp_path):
    write(index_of(shard("x.tar"), name="pets"), "far/pets.json")
    write(with_datasets({"source_url": "pets.json", "name": "renamed"}), "far/both.json")
    path = write(
        with_datasets(
            {"source_url": "far/pets.json"},
            {"source_url": "far/both.json", "name": "all"},
            {"source_url": "far/pets.json", "name": "moved", "base": "s3://bucket/there"},
            shardlist=[shard("own.tar")],
        )
    )
    index = read_index(path, base=str(tmp_path / "near"))
    assert urls(index) == [f"{tmp_path}/near/own.tar", *2 * [f"{tmp_path}/far/x.tar"], "s3://bucket/there/x.tar"]
    assert [shard.dataset for shard in index.shards] == [None, "pets", "renamed", "moved"]
    assert urls(read_index(path, dataset="all")) == [f"{tmp_path}/far/x.tar"]


def test_an_index_that_leads_back_to_itself_is_refused(write):
    write(with_datasets({"source_url": "a.json"}), "b.json")
    path = write(with_datasets({"source_url": "b.json"}), "a.json")
    with pytest.raises(ValueError, match=rf"[ab]\.json leads back, or too deep, to .*[ab]\.json .*deepest: {DEEPEST}"):
        read_index(path)


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "file:/etc/passwd", "//etc/passwd"])
@pytest.mark.parametrize("place", ["shard", "base", "source_url", "inner base"])
def test_an_index_from_the_network_names_no_file_of_this_machine(write, url, place):
    content = {
        "shard": index_of(shard(url)),
        "base": index_of(shard(), base=url),
        "source_url": with_datasets({"source_url": url}),
        "inner base": with_datasets({"shardlist": [shard()], "base": url}),
    }[place]
    source = "https://host/index.json"
    by_a_local_one = write(with_datasets({"source_url": source}))
    for index in (source, by_a_local_one):
        with pytest.raises(ValueError, match="a file of this machine, and is named by an index from the network"):
            read_index(index, access=Web({source: content}))


def test_an_index_from_the_network_stays_below_the_local_folder_that_the_user_gives(tmp_path):
    source = "https://host/index.json"
    index = read_index(source, base=str(tmp_path), access=Web({source: index_of(shard("a/../b.tar"))}))
    assert urls(index) == [f"{tmp_path}/b.tar"]
    with pytest.raises(ValueError, match="leads out of"):
        read_index(source, base=str(tmp_path), access=Web({source: index_of(shard("a/../../b.tar"))}))


def test_a_local_index_may_lead_out_of_its_folder(write, tmp_path):
    path = write(index_of(shard("../a.tar"), shard("/data/b.tar"), shard("file:///data/c%20d.tar")), "deep/index.json")
    assert urls(read_index(path)) == [f"{tmp_path}/a.tar", "/data/b.tar", "/data/c d.tar"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        ({"wids_version": 1, "__kind__": "other"}, r"Invalid enum value 'other' - at `\$.__kind__`"),
        ({"shardlist": [shard()]}, "missing required field `wids_version`"),
        ({"wids_version": 2, "shardlist": [shard()]}, r"Invalid enum value 2 - at `\$.wids_version`"),
        ({"wids_version": True, "shardlist": [shard()]}, r"got `bool` - at `\$.wids_version`"),
        ({"wids_version": 1}, "names no shards"),
        ({"wids_version": 1, "shardlist": []}, "names no shards"),
        ({"wids_version": 1, "shardlist": {}}, r"got `object` - at `\$.shardlist`"),
        ({"wids_version": 1, "shardlist": ["a.tar"]}, r"Expected `object`, got `str` - at `\$.shardlist\[0\]`"),
        ({"wids_version": 1, "shardlist": [{"nsamples": 1}]}, r"missing required field `url` - at `\$.shardlist\[0\]`"),
        ({"wids_version": 1, "shardlist": [{"url": "a.tar"}]}, "missing required field `nsamples`"),
        (
            {"wids_version": 1, "shardlist": [shard(nsamples=-1)]},
            r"`int` >= 0 - at `\$.shardlist\[0\].nsamples`",
        ),
        ({"wids_version": 1, "shardlist": [shard(nsamples="9")]}, "Expected `int`, got `str`"),
        ({"wids_version": 1, "shardlist": [shard(filesize=1.5)]}, "got `float`"),
        (
            {"wids_version": 1, "shardlist": [shard(md5sum="abc")]},
            r"regex .* at `\$.shardlist\[0\].md5sum`",
        ),
        (
            {"wids_version": 1, "shardlist": [shard("gopher://b/a.tar")]},
            "'gopher://b/a.tar' can't be read: .* s3://, http",
        ),
        ({"wids_version": 1, "shardlist": [shard("FILE:///a.tar")]}, "'FILE:///a.tar' can't be read: .* s3://, http"),
        ({"wids_version": 1, "shardlist": [shard("pipe:cat a.tar")]}, "'pipe:cat a.tar' can't be read"),
        ({"wids_version": 1, "shardlist": [shard("file://host/a.tar")]}, "'file://host/a.tar' is no URL of a file"),
        ({"wids_version": 1, "base": 3, "shardlist": [shard()]}, r"at `\$.base`"),
        ({"wids_version": 1, "name": [], "shardlist": [shard()]}, r"at `\$.name`"),
        ({"wids_version": 1, "datasets": ["x"]}, r"at `\$.datasets\[0\]`"),
        ({"wids_version": 1, "datasets": [{"name": "x"}]}, "data set 0 .* has neither a shardlist nor a source_url"),
    ],
)
def test_what_is_no_index_is_refused_with_a_sentence(write, content, said):
    with pytest.raises(ValueError, match=said):
        read_index(write(content))


def test_a_missing_index_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no file {tmp_path}/index.json; check data.index="):
        read_index(f"{tmp_path}/index.json")
    with pytest.raises(FileNotFoundError, match=r"s3://b/i.json \(404\).*check data.index="):
        read_index("s3://b/i.json", access=Web({}))
    with pytest.raises(FileNotFoundError, match=r"check data\.index="):
        read_index(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"'gopher://b/i\.json' can't be read: give a path, or a URL that starts with s3://"
    ):
        read_index("gopher://b/i.json")


def test_no_secret_of_a_url_is_said():
    source = "https://me:secret@host/index.json?token=secret"
    with pytest.raises(ValueError, match=r"https://host/index\.json names no shards") as caught:
        read_index(source, access=Web({source: index_of()}))
    assert "secret" not in str(caught.value)
