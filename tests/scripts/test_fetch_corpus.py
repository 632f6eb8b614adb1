"""scripts/fetch_corpus.py, on small files laid out as those in the packages."""

import io
import random
import struct
import tarfile
import zlib

import fetch_corpus


def serialised(lines, version):
    """A character vector as R's serialize() writes it in binary; a missing value for None."""
    header = b"X\n" + struct.pack(">iii", version, 0x40300, 0x20300)
    header += struct.pack(">i", 5) + b"UTF-8" if version == 3 else b""
    body = struct.pack(">ii", 16, len(lines))
    for line in lines:
        text = (line or "").encode()
        body += struct.pack(">ii", 0x40009, -1 if line is None else len(text)) + text
    return header + body


def record(content):
    return struct.pack(">I", len(content)) + zlib.compress(content)


def test_novels_are_read_from_rs_database():
    number = b"X\n" + struct.pack(">iiiii", 2, 0x40300, 0x20300, 14, 1) + struct.pack(">d", 1.5)
    first, second = ["Chapter 1", "", "It is “a” truth"], ["x" * 5000, None]
    database = record(serialised(first, 3)) + record(number) + record(serialised(second, 2))
    assert list(fetch_corpus.character_vectors(database)) == [first, ["x" * 5000, ""]]


def test_only_c_of_the_chosen_parts(tmp_path):
    inside = {"kernel/fork.c": "int a;", "mm/deep/page.h": "int b;", "drivers/x.c": "no", "mm/Makefile": "no", "README.c": "no"}
    with tarfile.open(tmp_path / "l.tar.xz", "w:xz") as archive:
        for name, text in inside.items():
            info = tarfile.TarInfo(f"linux-source-6.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    fetch_corpus.write_kernel(tmp_path / "l.tar.xz", tmp_path / "linux")
    written = {str(p.relative_to(tmp_path / "linux")): p.read_text() for p in (tmp_path / "linux").rglob("*") if p.is_file()}
    assert written == {"kernel/fork.c": "int a;", "mm/deep/page.h": "int b;"}


def test_pieces_are_all_of_the_text_and_end_between_entries(tmp_path, seed):
    draw = random.Random(seed)
    entries = ["w" * draw.randrange(1, 3000) + "\n  meaning\n\n" for _ in range(400)]
    fetch_corpus.write_pieces("".join(entries) + "end", tmp_path, "d")
    pieces = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert "".join(pieces) == "".join(entries) + "end" and len(pieces) > 2
    assert all(piece.endswith("\n\n") and len(piece) < fetch_corpus.PIECE + 4000 for piece in pieces[:-1])
