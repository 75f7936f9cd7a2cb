"""Pet names: windows, sources, the cache on disk, and made-up names."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from data.pet_names import ALPHABET, PAD, STOP, PetNames, make_windows
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import Access

REAL = Path(__file__).parents[3] / "shared" / "data" / "seattle_pet_names.json"
real = pytest.mark.skipif(not REAL.exists(), reason="the real names are not on this machine")


def text(window) -> str:
    return "".join(ALPHABET[index] for index in window)


@pytest.fixture
def names_file(tmp_path):
    def write(names) -> str:
        path = tmp_path / "names.json"
        path.write_text(json.dumps(names))
        return str(path)

    return write


@pytest.fixture
def web():
    """A web server: `web.content` is what it serves, `web.url` where, `web.requests` how often."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            time.sleep(server.delay_s)
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.content) + server.missing_bytes))
            self.end_headers()
            self.wfile.write(server.content)

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            pass  # a client that went away is part of some tests

    server = Server(("127.0.0.1", 0), Handler)
    server.requests, server.status, server.delay_s, server.missing_bytes = 0, 200, 0.0, 0
    server.content = b'["rex", "fido"]'
    server.url = f"http://127.0.0.1:{server.server_port}/names.json"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_windows_equal_those_of_the_plain_loop():
    assert len(ALPHABET) == len(set(ALPHABET)) == PetNames.num_classes == 31
    names = ["bo", "a", "mr. fluffy-paws the 3rd".replace("3", "x"), "a b", "ninechars", "zz"]
    expected = []
    for name in names:
        whole = name + "+"
        for end in range(1, len(whole) + 1):
            expected.append(whole[:end][-9:].rjust(9, "*"))
    assert [text(window) for window in make_windows(names, 8).tolist()] == expected


def test_a_batch_becomes_one_hot_input_and_the_next_characters(names_file):
    data = PetNames(Path(names_file(["bo"])))
    x, y = data.prepare(data.collate(data.__getitems__([1, 2])))
    assert x.shape == (2, 8, 31)
    assert x.dtype == torch.float32
    assert torch.all(x.sum(-1) == 1)
    assert y.dtype == torch.long
    assert [text(row) for row in x.argmax(-1).tolist()] == ["*******b", "******bo"]
    assert [text(row) for row in y.tolist()] == ["******bo", "*****bo+"]
    x, y = data[1]
    assert text([*x.tolist(), y[-1].item()]) == "*******bo"


@real
@pytest.mark.medium
def test_the_real_names_make_a_third_of_a_million_windows():
    data = PetNames(str(REAL))
    windows = make_windows(data.names, 8)
    assert len(data.names) == 51686
    assert windows.shape == (sum(len(name) + 1 for name in data.names), 9)
    assert int((windows[:, -1] == STOP).sum()) == len(data.names)
    assert not torch.any(windows[:, -1] == PAD)


def test_holdout_parts_the_distinct_names_and_loses_none(names_file):
    names = [f"{a}{b}" for a in ALPHABET[2:28] for b in ALPHABET[2:28]] * 2
    source = names_file(names)
    train, val = PetNames(source, holdout=0.2), PetNames(source, holdout=0.2, split="val")
    assert not set(train.names) & set(val.names)
    assert sorted(train.names + val.names) == sorted(names)
    assert 0.15 < len(val.names) / len(names) < 0.25
    few = PetNames(names_file(names[:300]), holdout=0.2, split="val")  # a name stays on its side where the file grows
    assert set(few.names) == set(val.names) & set(names[:300])
    with pytest.raises(ValueError, match=r"no names are left for val.*data\.holdout=0\.1"):
        PetNames(names_file(["rex"]), split="val")


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        ({"window": 0}, r"data\.window=8"),
        ({"holdout": 1.0}, r"data\.holdout=0\.1"),
        ({"split": "test"}, "train or val"),
    ],
)
def test_a_value_out_of_range_is_refused(arguments, typed, names_file):
    with pytest.raises(ValueError, match=typed):
        PetNames(names_file(["rex"]), **arguments)


@pytest.mark.parametrize("folder", [None, "cache"])
def test_a_url_is_downloaded_once_and_then_read_from_the_cache(web, tmp_path, monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_dir = folder and str(tmp_path / folder)
    assert [PetNames(web.url, cache_dir=cache_dir).names for _ in range(2)] == [["rex", "fido"]] * 2
    assert web.requests == 1
    (kept,) = (tmp_path / (folder or "ddp_hydra")).iterdir()
    kept.write_bytes(b'["re')  # a damaged file is downloaded again
    assert PetNames(web.url, cache_dir=cache_dir).names == ["rex", "fido"]
    assert kept.read_bytes() == web.content


def test_two_stores_with_one_url_do_not_share_a_cache(tmp_path, monkeypatch):
    found = {"http://one": b'["rex"]', "http://two": b'["fido"]'}
    monkeypatch.setattr(Access, "open", lambda access, url: ({"key": found[access.endpoint(url)]}, "key"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    for _ in range(2):
        for endpoint, name in (("http://one", "rex"), (None, "fido"), ("http://two", "fido")):
            data = PetNames("s3://pets/names.json", cache_dir=str(tmp_path), endpoint_url=endpoint)
            assert data.names == [name]
    assert len(list(tmp_path.iterdir())) == 2


def test_kept_names_need_no_store_and_no_package(tmp_path, monkeypatch):
    endpoint = "no endpoint"
    with monkeypatch.context() as patched:
        patched.setattr(Access, "open", lambda *_: ({"key": b'["rex"]'}, "key"))
        PetNames("s3://pets/names.json", cache_dir=str(tmp_path), endpoint_url=endpoint)
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert PetNames("s3://pets/names.json", cache_dir=str(tmp_path), endpoint_url=endpoint).names == ["rex"]


def test_a_cache_that_cannot_be_written_is_a_warning_and_no_more(web, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"can't be kept.*data\.cache_dir="):
        data = PetNames(web.url, cache_dir=str(tmp_path / "file" / "cache"))
    assert data.names == ["rex", "fido"]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ({"status": 404}, FileNotFoundError, "404"), ({"status": 403}, PermissionError, "403"),
        ({"status": 500}, ConfigError, "500"), ({"delay_s": 0.5}, ConfigError, "timed out"),
        ({"missing_bytes": 10}, ConfigError, ""), ({"url": "http://127.0.0.1:9/x"}, ConfigError, "refused"),
        ({"url": "http://no-such-host.invalid/names.json"}, ConfigError, ""),
        ({"url": "nowhere.json"}, FileNotFoundError, r"'nowhere\.json'.*/.*nowhere\.json"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_read_says_why_and_what_to_give(web, tmp_path, fault, kind, said):
    vars(web).update(fault)
    with pytest.raises(kind, match=rf"{said}.*data\.source="):
        PetNames(web.url, cache_dir=str(tmp_path), timeout_s=0.1 if "delay_s" in fault else 60)
    assert list(tmp_path.iterdir()) == []


def test_no_secret_of_a_source_is_said(web, tmp_path):
    for content in (b"no", b"{}", b'["A"]'):
        web.content = content
        with pytest.raises(ValueError, match=r"/names\.json") as raised:
            PetNames(f"{web.url}?token=secret", cache_dir=str(tmp_path))
        assert "secret" not in str(raised.value)


@pytest.mark.integration
@pytest.mark.usefixtures("credentials")
def test_names_in_a_bucket_are_read_once_and_then_from_the_cache(s3, tmp_path):
    bucket = s3.fill({"lists/names.json": b'["rex", "fido"]'})
    source = {"source": f"s3://{bucket}/lists/names.json", "cache_dir": str(tmp_path)}
    assert PetNames(**source, endpoint_url=s3.endpoint_url).names == ["rex", "fido"]
    s3.add(bucket, {"lists/names.json": b'["bo"]'})
    other = s3.endpoint_url.replace("127.0.0.1", "localhost")  # another store may have such a bucket, too
    assert other != s3.endpoint_url
    assert PetNames(**source, endpoint_url=other).names == ["bo"]
    with pytest.raises(FileNotFoundError, match=r"no object s3://bucket-0/other\.json.*data\.source="):
        PetNames(f"s3://{bucket}/other.json", cache_dir=str(tmp_path), endpoint_url=s3.endpoint_url)
    s3.delete(bucket, "lists/names.json")
    assert PetNames(**source, endpoint_url=s3.endpoint_url).names == ["rex", "fido"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (["rex", "Fido", "bello", "Zoe"], r"2 of the 4 names.*'Fido' \(number 1\), 'Zoe' \(number 3\)"),
        (["rex", ""], r"'' \(number 1\)"),
        (["rex", 7], r"7 \(number 1\)"),
        (["re+x"], r"'re\+x'"),
        ({"names": []}, "must be a list"),
        ([], "must be a list"),
    ],
)
def test_bad_names_are_named(names_file, web, tmp_path, content, said):
    with pytest.raises(ValueError, match=said):
        PetNames(names_file(content))
    web.content = b"<html>log in first</html>"
    with pytest.raises(ValueError, match=r"not JSON.*data\.source="):
        PetNames(web.url, cache_dir=str(tmp_path / "cache"))
    assert not list(tmp_path.glob("cache/*"))  # nor is it kept


class Speller(nn.Module):
    """Says the given names over and over, whatever it sees: each row of the batch its own."""

    def __init__(self, names):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))
        self.names = [[ALPHABET.index(character) for character in name + "+"] for name in names]
        self.step = 0

    def forward(self, x):
        assert not self.training
        self.step = 0 if bool((x.argmax(-1) == PAD).all()) else self.step + 1
        logits = torch.zeros(len(x), x.shape[1], x.shape[2])
        for row in range(len(x)):
            name = self.names[row % len(self.names)]
            logits[row, -1, name[min(self.step, len(name) - 1)]] = self.scale
        return logits


def test_made_up_names_are_new_whole_and_each_once(names_file):
    data = PetNames(names_file(["rex", "fidolino", "bello"]))
    model = Speller(["rex", "fifi", "", "momo", "fifi", "bello", " lu "])
    assert data.sample(model, n=3) == ["fifi", "momo", "lu"]
    names = [f"{a}{b}" for a in ALPHABET[2:28] for b in ALPHABET[2:28]]
    data = PetNames(names_file([*names, "longer"]), holdout=0.5)  # nor are the names that are held out new
    assert data.sample(Speller([*names[:20], "momo"]), n=1) == ["momo"]
    assert data.sample(Speller(["fifi", "momo"]), n=5) == ["fifi", "momo"]  # it only repeats itself


class Uniform(nn.Module):
    """Finds every character as likely as any other, the padding too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(31))

    def forward(self, x):
        return self.bias.expand(*x.shape)


def test_as_many_names_come_as_were_asked_for_and_the_same_for_the_same_seed(names_file):
    data = PetNames(names_file(["rex", "a very long name of a pet"]))
    first = data.sample(Uniform(), n=40, seed=1)
    assert len(set(first)) == 40
    assert first == data.sample(Uniform(), n=40, seed=1)
    assert first != data.sample(Uniform(), n=40, seed=2)
    assert all(0 < len(name) <= 25 for name in first)
    assert not any(character in name for name in first for character in "*+")


def test_a_low_temperature_keeps_to_what_is_likely(names_file):
    model = Uniform()
    with torch.no_grad():
        model.bias[ALPHABET.index("a")] = 2.0
        model.bias[STOP] = 1.9
    data = PetNames(names_file(["a very long name of a pet"]))
    assert set("".join(data.sample(model, n=5, temperature=0.05))) == {"a"}
    assert len(set("".join(data.sample(model, n=5, temperature=2.0)))) > 1
    assert model.train().training
    data.sample(model, n=1)
    assert model.training


@pytest.mark.parametrize("arguments", [{"n": 0}, {"n": 1, "temperature": 0.0}])
def test_sampling_refuses_what_is_not_positive(names_file, arguments):
    with pytest.raises(ValueError, match="must be above 0"):
        PetNames(names_file(["rex"])).sample(Uniform(), **arguments)
