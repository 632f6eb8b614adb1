"""Fetches some 220 MB of real text from Debian and writes it as text files, to train on.

    python scripts/fetch_corpus.py corpus
    dcformer study scaling --data corpus --out results/scaling

Needs a Debian system (`apt-get`, `dpkg-deb`), no rights of root. `corpus/` gets

| folder | what | package | licence |
|---|---|---|---|
| linux/ | C of nine parts of the kernel, 147 MB, a file each | linux-source-6.1 | GPL-2 |
| dictionaries/ | GCIDE and WordNet, 71 MB, cut between entries into files of 200 kB | dict-gcide, dict-wn | GPL-2+, WordNet |
| novels/ | six novels of Jane Austen, 4 MB | r-cran-janeaustenr | public domain |

Training holds out whole files; the dictionaries are cut so that some of each can be.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from fetching import new_folder_named, unpack_debian

from dcformer.training.files import new_folder

KERNEL = "linux-source-6.1"
KERNEL_PARTS = ("kernel", "mm", "fs", "net", "include", "lib", "block", "crypto", "security")
DICTIONARIES = {"dict-gcide": "gcide", "dict-wn": "wn"}
NOVELS = "r-cran-janeaustenr"
PIECE = 200_000


def main() -> None:
    """Downloads the packages and writes the folder."""
    out = new_folder_named(__doc__)
    with tempfile.TemporaryDirectory() as folder, new_folder(out, "the corpus", 200_000_000) as partial:
        write_kernel(unpack_debian(KERNEL, folder) / "usr/src" / f"{KERNEL}.tar.xz", partial / "linux")
        (partial / "dictionaries").mkdir()
        for package, name in DICTIONARIES.items():
            with gzip.open(unpack_debian(package, folder) / "usr/share/dictd" / f"{name}.dict.dz") as file:
                write_pieces(file.read().decode(errors="ignore"), partial / "dictionaries", name)
        (partial / "novels").mkdir()
        database = unpack_debian(NOVELS, folder) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
        for number, lines in enumerate(character_vectors(database.read_bytes())):
            (partial / "novels" / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [path for path in out.rglob("*") if path.is_file()]
    print(f"{out}: {len(files):,} files, {sum(path.stat().st_size for path in files):,} bytes")


def write_kernel(archive: Path, folder: Path) -> None:
    """C sources and headers of the chosen parts, by their names in the kernel."""
    with tarfile.open(archive, "r|xz") as files:
        for file in files:
            path = Path(*Path(file.name).parts[1:])
            content = files.extractfile(file) if file.isfile() else None
            if content is not None and path.parts[0] in KERNEL_PARTS and path.suffix in (".c", ".h"):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


def write_pieces(text: str, folder: Path, name: str) -> None:
    """A long text as files of about PIECE characters, cut after an empty line."""
    start = number = 0
    while start < len(text):
        end = text.find("\n\n", start + PIECE)
        end = len(text) if end < 0 else end + 2
        (folder / f"{name}-{number:03}.txt").write_text(text[start:end], encoding="utf-8")
        start, number = end, number + 1


def character_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database: records of [length unpacked, zlib stream], each a serialised value."""
    while database:
        stream = zlib.decompressobj()
        content = stream.decompress(database[4:])
        database = stream.unused_data
        lines = _character_vector(io.BytesIO(content))
        if lines:
            yield lines


def _character_vector(file: io.BytesIO) -> list[str]:
    """A value in R's serialisation (XDR); empty where it is no character vector."""

    def number() -> int:
        return struct.unpack(">i", file.read(4))[0]

    file.read(2)  # "X\n"
    version, _, _ = number(), number(), number()
    if version == 3:
        file.read(number())  # name of the encoding
    if number() & 0xFF != 16:
        return []
    lines = []
    for _ in range(number()):
        number()
        lines.append(file.read(max(0, number())).decode())  # a missing value has length -1
    return lines


if __name__ == "__main__":
    main()
