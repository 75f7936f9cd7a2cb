"""Images named by a table: what is read, from where, and what every mistake says."""

from __future__ import annotations

import gzip
import pickle

import pytest

from ddp_hydra.data.image_table import ImageTable

ROWS = "path,label\ncat/1.png,cat\ndog/1.png,dog\ncat/2.png,cat\n"


@pytest.fixture
def table(tmp_path, png):
    """Write a table beside its images, and open it."""
    opened = []
    for number, path in enumerate(("cat/1.png", "dog/1.png", "cat/2.png"), start=1):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(png(red=number))

    def open_(content=ROWS, name="images.csv", **arguments):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        opened.append(ImageTable(str(tmp_path / name), **arguments))
        return opened[-1]

    yield open_
    for dataset in opened:
        dataset.close()


def reds(dataset, indices=None):
    return [image[0, 0, 0].item() for image, _ in dataset.__getitems__(indices or range(len(dataset)))]


def test_samples_come_in_the_order_of_the_rows(table):
    data = table()
    assert reds(data) == [1, 2, 3]
    assert [target for _, target in data] == [0, 1, 0]
    assert data.classes == ["cat", "dog"]
    assert data.bad == {}
    again = pickle.loads(pickle.dumps(data))
    assert reds(again) == [1, 2, 3]
    again.close()
    assert reds(table(gzip.compress(b"\xef\xbb\xbf" + ROWS.encode()), "images.csv.gz")) == [1, 2, 3]


def test_columns_may_have_other_names_and_quotes(table):
    text = 'id,"what, it is",file\n7,"a ""cat""",cat/1.png\n8,dog,dog/1.png\n'
    data = table(text, path_column="file", label_column="what, it is")
    assert data.classes == ['a "cat"', "dog"]
    assert reds(data) == [1, 2]


def test_a_validation_set_has_the_numbers_of_the_training_set(table, tmp_path):
    table()
    val = table("path,label\ndog/1.png,dog\n", "val.csv", classes_from=str(tmp_path / "images.csv"))
    assert (val.classes, val[0][1]) == (["cat", "dog"], 1)
    with pytest.raises(ValueError, match=r"labels that .*images\.csv lacks: cow; check data\.table="):
        table("path,label\ndog/1.png,cow\n", "val.csv", classes_from=str(tmp_path / "images.csv"))


def test_paths_start_at_the_root_that_is_given(table, tmp_path):
    assert reds(table("path,label\n1.png,a\n2.png,b\n", root=str(tmp_path / "cat"))) == [1, 3]


def test_absolute_paths_are_read_from_this_machine(table, tmp_path):
    text = f"path,label\n{tmp_path}/cat/1.png,a\nfile://{tmp_path}/dog/1.png,b\ncat/2.png,a\n"
    assert reds(table(text)) == [1, 2, 3]
    by_url = ImageTable(f"file://{tmp_path}/images.csv")
    assert reds(by_url) == [1, 2, 3]
    by_url.close()
    assert reds(table(text.replace("cat/2.png", "2.png"), root=f"{tmp_path}/cat/")) == [1, 2, 3]
    assert reds(table(f"path,label\n{tmp_path}/cat/1.png,a\n{str(tmp_path)[1:]}/dog/1.png,b\n", root="/")) == [1, 2]
    assert reds(table("path,label\n/1.png,a\n/2.png,b\n", root=f"{tmp_path}/cat")) == [1, 3], "a slash by habit"


def test_paths_may_go_up_as_the_system_reads_them(table, tmp_path, monkeypatch):
    (tmp_path / "csv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dog")
    text = "path,label\n../cat/1.png,a\nsub/../../dog/1.png,b\n../link/../cat/2.png,a\n"
    (tmp_path / "csv" / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for data in (table(text, "csv/images.csv"), table(text, root="csv")):
        monkeypatch.chdir("/")
        assert reds(data) == [1, 2, 3]
        monkeypatch.chdir(tmp_path)
    data = table(f"path,label\n../{tmp_path.name}/cat/1.png,a\n", root="cat/..")
    assert reds(data) == [1]


def test_in_a_store_paths_stay_in_it(table, tmp_path, monkeypatch):
    data = table("path,label\n../a/./1.png,a\n", root="s3://photos/t")
    assert data._find(data._paths[0])[1] == "a/1.png"
    for root in ("s3://photos/t", "https://host/t"):
        with pytest.raises(
            ValueError, match=rf"row 2 names \.\./\.\./1\.png, and paths begin at {root}: .*not lead out"
        ):
            table("path,label\n1.png,a\n../../1.png,b\n", root=root)
    monkeypatch.setattr("ddp_hydra.data.image_table.is_remote", lambda url: str(url).endswith(".csv"))
    with pytest.raises(ValueError, match=r"row 1 names \.\./dog/1\.png"):
        table("path,label\n../dog/1.png,a\n", root=str(tmp_path / "cat"))


def test_a_table_from_a_store_names_no_files_of_this_machine_by_accident(table, tmp_path, monkeypatch):
    for root in ("s3://photos/t", "https://host"):
        with pytest.raises(ValueError, match=rf"row 2 names .*1\.png, a file of this machine.*at {root}: write"):
            table(f"path,label\n1.png,a\nfile://{tmp_path}/dog/1.png,b\n", root=root)
    monkeypatch.setattr("ddp_hydra.data.image_table.is_remote", lambda url: str(url).endswith(".csv"))
    data = table(f"path,label\n/1.png,a\n{tmp_path}/dog/1.png,b\n", root=str(tmp_path / "cat"))
    places = [data._find(path)[1] for path in data._paths]
    assert places == ["1.png", f"{tmp_path}/dog/1.png".lstrip("/")], "below the root"


@pytest.mark.medium
def test_parquet_is_read(table, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    rows = pyarrow.table({"path": ["dog/1.png", "cat/1.png"], "label": [11, 9], "more": [1.0, 2.0]})
    pyarrow.parquet.write_table(rows, tmp_path / "images.parquet")
    content = (tmp_path / "images.parquet").read_bytes()
    data = table(content, "images.parquet")
    assert (reds(data), data.classes) == ([2, 1], ["9", "11"])
    with pytest.raises(ValueError, match=r"no column 'file', only path, label, more.*data\.path_column="):
        table(content, "images.parquet", path_column="file")
    with pytest.raises(ValueError, match=r"images\.parquet: .*no column 'class'.*data\.label_column="):
        table(content, "images.parquet", label_column="class")
    with pytest.raises(ValueError, match="not a Parquet file"):
        table(content[:100], "images.parquet")
    with pytest.raises(ValueError, match="not a Parquet file"):  # a damaged page
        table(content[:4] + bytes(50) + content[54:], "images.parquet")


def test_long_numbers_are_labels_of_their_own(table):
    data = table("path,label\ncat/1.png,1234567890123456789\ndog/1.png,1234567890123456788\ncat/2.png,42\n")
    assert data.classes == ["42", "1234567890123456788", "1234567890123456789"]


@pytest.mark.parametrize(
    "labels", [("1_2", "12"), ("nan1", "sNaN"), ("inf", "Infinity"), ("NaN", "nan"), ("1e400", "10e399")]
)
def test_a_word_that_python_reads_as_a_number_is_a_word(table, labels):
    data = table("path,label\ncat/1.png,{}\ndog/1.png,{}\n".format(*labels))
    assert data.classes == (["12", "1_2"] if "12" in labels else sorted(labels))


def test_another_column_may_hold_long_texts(table):
    assert table(f"path,label,outline\ncat/1.png,cat,{'1' * 200_000}\n").classes == ["cat"]


def test_a_table_without_labels_has_images_only(table):
    data = table("path\ncat/1.png\n\ndog/1.png\n", label_column=None)  # with a line that is empty
    assert (data.labelled, data.classes, data.targets.tolist()) == (False, [], [-1, -1])
    assert reds(data) == [1, 2]


def test_parquet_asks_for_its_package(table, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ddp-hydra\[parquet\]'"):
        table(name="images.parquet")


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (ROWS, {"path_column": "file"}, r"no column 'file', only path, label.*data\.path_column="),
        (ROWS, {"label_column": "class"}, r"no column 'class', only path, label.*data\.label_column="),
        ("path,label\n", {}, r"no rows: check data\.table="),
        ("", {}, r"no column 'path', only none"),
        ("path,label\na,b,c\n", {}, "line 2 has 3 fields, and the names of the columns 2"),
        (b"\xff\xfe\x00", {}, "not a CSV file"),
        ('path,label\n"a,b\n', {}, "not a CSV file"),
        ("path,label\na.png,1\nb.png,1.0\n", {}, r"the column label has 1 and 1\.0, which are one number"),
        ("path,label\na.png,12345678901234567890\nb.png,12345678901234567890.0\n", {}, "which are one number: write"),
        ("path,label\na.png,a\ncat\\1.png,dog\n", {}, "row 2 has a path of Windows, .*: write paths with slashes"),
        ("path,label\nC:\\a\\1.png,dog\n", {}, "row 1 has a path of Windows"),
        ("# a comment\npath;label\na.png;cat\nb.png,dog\n", {}, "line 4 has 1 fields, and the names of the columns 2"),
        ("path,label,label\na.png,cat,dog\n", {}, r"there are several columns 'label'"),
        ("path,label\na.png,cat\nb.png,\n", {}, "the column label has 1 empty cells, the first in row 2 below"),
        ("path,label\n,cat\n", {}, "the column path has 1 empty cells, the first in row 1 below"),
    ],
)
def test_what_is_no_such_table_is_told(table, content, arguments, words):
    with pytest.raises(ValueError, match=words):
        table(content, **arguments)
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        ImageTable("none.csv")


@pytest.mark.integration
@pytest.mark.usefixtures("credentials")
def test_table_and_images_come_from_buckets(s3, png):
    images = s3.fill({"photos/a.png": png(red=5)})
    bucket = s3.fill(
        {"t/b.png": png(red=6), "t/images.csv": f"path,label\nb.png,x\ns3://{images}/photos/a.png,y".encode()}
    )
    data = ImageTable(f"s3://{bucket}/t/images.csv", endpoint_url=s3.endpoint_url)
    assert reds(data) == [6, 5]
    data.close()


@pytest.mark.medium
def test_no_secret_of_a_url_is_said(table):
    url, secret = "https://host/1.png", "https://me:secret@host/1.png?token=secret"
    data = table(f"path,label\n{secret},a\n", root="sftp://me:secret@host/photos")
    assert (data.name(0), data.sample_id(0)) == (url, secret)
    assert "sftp://me@host/photos" in data.advice_on_missing()


def test_a_file_that_is_missing_asks_where_the_paths_begin(table, tmp_path):
    data = table("path,label\nelsewhere/1.png,cat\ncat/1.png,dog\n")
    said = r"1 of 2 samples of .* is bad.*Relative paths of the table begin at .*: give .* with data\.root=<folder>"
    with pytest.raises(ValueError, match=said):
        data[0]


def test_the_order_of_classes_is_one(table):
    data = table("path,label\n1.png,cat\n2.png,10\n3.png,inf\n4.png,9\n5.png,None\n6.png,-1.5\n7.png,nan\n8.png,NA\n")
    # NA is the code of Namibia. pandas itself leaves the cell of a missing label empty, which is refused.
    assert data.classes == ["-1.5", "9", "10", "NA", "None", "cat", "inf", "nan"]


def test_empty_cells_of_parquet_are_refused_with_their_row(table, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for labels in (["cat", None], [1.0, float("nan")]):
        pyarrow.parquet.write_table(pyarrow.table({"path": ["a", "b"], "label": labels}), tmp_path / "t.parquet")
        with pytest.raises(ValueError, match=r"the column label has 1 empty cells, the first in row 2"):
            table((tmp_path / "t.parquet").read_bytes(), "t.parquet")


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffpath,label\r\ncat/1.png,cat\r\ndog/1.png,dog\r\n",  # Excel, CSV UTF-8
        "path,label\rcat/1.png,cat\rdog/1.png,dog\r",  # Excel for Macintosh
        ",path,label\n0,cat/1.png,cat\n1,dog/1.png,dog\n",  # to_csv of pandas with its index
        '"","path","label"\n"1","cat/1.png","cat"\n"2","dog/1.png","dog"\n',  # write.csv of R with row names
        "\ufeffsep=;\r\npath;label\r\ncat/1.png;cat\r\ndog/1.png;dog\r\n",  # Excel in many countries
        "path\tlabel\ncat/1.png\tcat\ndog/1.png\tdog\n",
        "# made by R\n# on Monday\npath,label\ncat/1.png,cat\ndog/1.png,dog\n",
    ],
)
def test_tables_of_other_programs(table, text):
    data = table(text)
    assert (reds(data), data.classes) == ([1, 2], ["cat", "dog"])
