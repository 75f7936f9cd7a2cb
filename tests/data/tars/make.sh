#!/bin/bash
# Writes the tar files in this folder: one small data set, by the tools that people use. The versions are those of the last time.
#   bash make.sh PYTHON [PYTHON_WITH_IMG2DATASET]
# GNU tar 1.34, bsdtar 3.6.2 (libarchive-tools), Python 3.11.7, webdataset 1.0.2, img2dataset 1.47.0
set -e
here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; cd "$work"
"$1" - <<'P'
import os, pathlib
from PIL import Image

long = "a-long-name-" * 9
for folder, names in {"short": ["001", "002"], "long": ["001", long + "é"]}.items():
    for number, name in enumerate(names):
        path = pathlib.Path(folder, "train", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number + 1, 0, 0)).save(f"{path}.png")
        pathlib.Path(f"{path}.cls").write_text(str(number))
for path in ("short/train/._001.png", "short/train/.DS_Store", "short/.git/a.png", "short/__MACOSX/train/._001.png"):
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
os.link("short/train/001.png", "short/train/003.png")
pathlib.Path("short/train/003.cls").symlink_to("001.cls")
with open("long/train/002.bin", "wb") as file:  # a file with a hole
    file.seek(1 << 20)
    file.write(b"end")
P
plain="train/001.cls train/001.png train/002.cls train/002.png"
for format in v7 oldgnu ustar gnu posix; do
    tar -b1 -C short --format=$format -cf "$here/gnu-$format.tar" $plain
done
for format in gnu posix; do tar -b1 -C long --format=$format --sort=name --exclude='*.bin' -cf "$here/gnu-$format-long.tar" train; done
tar -b1 -C short --sort=name -cf "$here/gnu-folder.tar" .                       # with what macOS and git leave, a hard and a soft link
tar -b1 -C long --format=gnu --sparse --sort=name -cf "$here/gnu-sparse-gnu.tar" train
tar -b1 -C long --format=posix --sparse --sort=name -cf "$here/gnu-sparse-posix.tar" train
tar -C short -czf "$here/gnu.tar.gz" $plain
tar -C short -cJf "$here/gnu.tar.xz" $plain
tar -b1 -C short -cf "$here/gnu-unsorted.tar" train/001.png train/002.png train/001.cls train/002.cls
for format in ustar pax gnutar v7; do bsdtar -b1 -C short --format $format -cf "$here/bsd-$format.tar" $plain; done
bsdtar -b1 -C long --format pax -cf "$here/bsd-pax-long.tar" $(cd long; echo train/001.* train/a*)
"$1" - "$here" <<'P'
import sys, tarfile
from pathlib import Path
import webdataset

here = Path(sys.argv[1])
files = sorted(path for path in Path("short/train").iterdir() if path.name[:3] in ("001", "002"))
for name in ("USTAR", "GNU", "PAX"):
    with tarfile.open(here / f"python-{name.lower()}.tar", "w", format=getattr(tarfile, f"{name}_FORMAT")) as tar:
        for path in files:
            tar.add(path, path.relative_to("short"))
with webdataset.TarWriter(str(here / "webdataset.tar")) as writer:
    for key in ("001", "002"):
        writer.write({"__key__": key, "png": Path(f"short/train/{key}.png").read_bytes(), "cls": int(key) - 1})
P
if [ "$2" ]; then
    "$1" -m http.server -d short/train 8765 >/dev/null 2>&1 & server=$!
    printf 'url,caption\nhttp://127.0.0.1:8765/001.png,a cat\nhttp://127.0.0.1:8765/002.png,a dog\nhttp://127.0.0.1:8765/none.png,gone\n' > list.csv
    sleep 1; NO_ALBUMENTATIONS_UPDATE=1 "$2" -m img2dataset.main --url_list list.csv --input_format csv --url_col url --caption_col caption --output_format webdataset \
        --output_folder out --image_size 4 --processes_count 1 --thread_count 1 --enable_wandb False; kill $server
    mkdir -p "$here/img2dataset"; cp out/* "$here/img2dataset"
fi
rm -f "$here"/*.part; ls -l "$here"
