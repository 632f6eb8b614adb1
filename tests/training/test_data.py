import json
import math
import os
import random
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest
import tiny_run
from datasets import Dataset
from transformers import AutoTokenizer

import dcformer.training.data as data_module
import dcformer.training.sources as sources_module
from dcformer.training import DataSettings, prepare_data


@pytest.fixture
def prepare(tmp_path):
    def run(*data, **settings):
        settings = {"vocab_size": 300, "block_size": 16, "cache_dir": str(tmp_path / "cache"), **settings}
        return prepare_data(DataSettings(data=tuple(str(entry) for entry in data), **settings))

    return run


@pytest.fixture
def folder(tmp_path, texts):
    path = tmp_path / "corpus"
    path.mkdir()
    for number in range(10):
        (path / f"{number}.txt").write_text(texts(20))
    return path


def tokens(split):
    return [token for row in split for token in row["input_ids"]]


def test_blocks_hold_the_text_with_an_end_after_each_document(prepare, folder):
    prepared = prepare(folder)
    end = prepared.tokenizer.eos_token
    for name, split in (("train", prepared.train), ("validation", prepared.validation)):
        counts = prepared.summary[name]
        assert all(len(row["input_ids"]) == 16 for row in split)
        assert counts["rows"] == len(split) == counts["tokens"] // 16
        documents = prepared.tokenizer.decode(tokens(split)).split(end)
        originals = {path.read_text() for path in folder.iterdir()}
        assert originals.issuperset(documents[:-1])  # the last one lost its tail
        assert len(documents) in (counts["files"], counts["files"] + 1)
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert prepared.summary["train"]["bytes"] + prepared.summary["validation"]["bytes"] == total
    held_out = prepared.summary["validation"]
    assert prepared.bytes_per_token == held_out["bytes"] / held_out["tokens"]


def test_no_file_is_in_both_splits(prepare, folder):
    prepared = prepare(folder, validation_fraction=0.3)
    end = prepared.tokenizer.eos_token
    train, validation = (set(prepared.tokenizer.decode(tokens(s)).split(end)) for s in (prepared.train, prepared.validation))
    assert prepared.summary["split"] == "files"
    assert not train & validation
    assert prepared.summary["validation"]["files"] in (3, 4)


def test_a_file_larger_than_the_fraction_is_not_held_out(prepare, tmp_path, texts):
    (tmp_path / "large.txt").write_text(texts(400))
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(texts(10))
    assert prepare(tmp_path / "*.txt").summary["validation"]["bytes"] < 5000


def test_the_same_content_elsewhere_hits_the_cache(prepare, folder, tmp_path, monkeypatch):
    first = prepare(folder)
    assert not first.summary["cached"]
    other = tmp_path / "other" / "place"
    other.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir(), reverse=True)):
        (other / f"renamed{number}.md").write_bytes(path.read_bytes())
    monkeypatch.setattr(data_module, "_build", lambda *args: pytest.fail("packed again"))
    second = prepare(other)
    assert second.summary["cached"]
    assert second.summary["fingerprint"] == first.summary["fingerprint"]
    assert second.train[:] == first.train[:]
    assert second.validation[:] == first.validation[:]
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: {"block_size": 8},
        lambda folder: {"vocab_size": 280},
        lambda folder: {"validation_fraction": 0.4},
        lambda folder: (folder / "3.txt").write_text((folder / "3.txt").read_text()[:-1] + "!") and {},
        lambda folder: (folder / "3.txt").unlink() or {},
    ],
)
def test_a_change_misses_the_cache(prepare, folder, change):
    first = prepare(folder)
    second = prepare(folder, **change(folder))
    assert not second.summary["cached"]
    assert second.summary["fingerprint"] != first.summary["fingerprint"]


def test_packing_again_gives_the_same_blocks(prepare, folder, tmp_path):
    first, second = prepare(folder), prepare(folder, cache_dir=str(tmp_path / "another"))
    assert not second.summary["cached"]
    assert first.train[:] == second.train[:]


def test_a_build_killed_halfway_is_never_used(prepare, folder, tmp_path, processes):
    cache = tmp_path / "cache"
    settings = DataSettings(data=(str(folder),), vocab_size=300, block_size=16, cache_dir=str(cache))
    dying = partial(tiny_run.die, "dcformer.training.data._pack", 2, "after")
    process = processes.Process(target=tiny_run.prepare, args=(settings, dying))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (abandoned,) = cache.iterdir()
    assert abandoned.name.startswith(".partial-")
    day_ago = time.time() - 2 * 24 * 3600
    os.utime(abandoned, (day_ago, day_ago))
    prepared = prepare(folder)
    assert not prepared.summary["cached"]
    assert len(prepared.train) == prepared.summary["train"]["rows"]
    assert [path.name for path in cache.iterdir()] == [prepared.summary["fingerprint"]]


def test_a_full_disk_is_named_and_leaves_nothing(folder, tmp_path, processes):
    cache = tmp_path / "cache"
    settings = DataSettings(data=(str(folder),), vocab_size=300, block_size=16, cache_dir=str(cache))
    full = partial(tiny_run.fill_disk, "dcformer.training.data._pack", 1)
    with (
        ProcessPoolExecutor(1, processes) as pool,
        pytest.raises(OSError, match=f"could not write tokenized text in {cache}: "),
    ):
        pool.submit(tiny_run.prepare, settings, full).result()
    assert not list(cache.iterdir())


def test_a_single_file_is_cut_at_the_end_of_a_line(prepare, tmp_path, texts):
    path = tmp_path / "book.txt"
    path.write_text(texts(100))
    prepared = prepare(path, validation_fraction=0.2)
    assert prepared.summary["split"] == "lines"
    sizes = [prepared.summary[name]["bytes"] for name in ("train", "validation")]
    assert sum(sizes) == path.stat().st_size
    assert path.read_bytes()[sizes[0] - 1 : sizes[0]] == b"\n"
    assert 0.2 <= sizes[1] / sum(sizes) < 0.22
    held_out = prepared.tokenizer.decode(tokens(prepared.validation), skip_special_tokens=True)
    assert path.read_text()[sizes[0] :].startswith(held_out)


def test_a_single_line_is_cut_somewhere(prepare, tmp_path, seed):
    path = tmp_path / "line.txt"
    path.write_text("".join(random.Random(seed).choices("0123456789", k=1000)))
    assert prepare(path, validation_fraction=0.2).summary["validation"]["bytes"] == 200


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_tables_are_documents(prepare, tmp_path, texts, kind):
    rows = [texts(3) for _ in range(20)] + [""]
    path = tmp_path / f"table.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"body": row, "id": 1}) for row in rows) + "\n\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(rows)), "body": rows}), path)
    prepared = prepare(path, text_field="body", validation_fraction=0.25)
    assert prepared.summary["split"] == "rows"
    train, validation = (prepared.summary[name] for name in ("train", "validation"))
    assert (train["documents"] + validation["documents"], validation["documents"] in (5, 6)) == (20, True)
    end = prepared.tokenizer.eos_token
    assert prepared.tokenizer.decode(tokens(prepared.train)).split(end)[:10] == rows[:10]


def test_hub_data_sets_are_read_by_name(prepare, texts, monkeypatch):
    rows = Dataset.from_dict({"text": [texts(3) for _ in range(20)], "label": [0] * 20})
    asked = []
    monkeypatch.setattr(sources_module, "load_dataset", lambda name, split: asked.append((name, split)) or rows)
    prepared = prepare("someone/some-data")
    assert asked == [("someone/some-data", "train")]
    assert prepared.summary["train"]["documents"] + prepared.summary["validation"]["documents"] == 20
    with pytest.raises(ValueError, match=r"no column text_field='body', but text, label"):
        prepare("someone/some-data", text_field="body")


def test_a_name_that_is_nothing_says_so(prepare, monkeypatch):
    def fail(name, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(sources_module, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"'someone/typo' is no file or folder here and cannot be read .*no network"):
        prepare("someone/typo")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("zeros.txt", b"text\0more", "binary"),
        ("latin.txt", "Müller".encode("latin-1") * 9, "no UTF-8 text"),
        ("cut.txt", "ü".encode()[:1], "no UTF-8 text"),
        ("nothing.txt", b"", "empty"),
        ("broken.parquet", b"PAR1 or not", "no Parquet file"),
    ],
)
def test_a_bad_file_is_an_error_by_name_and_skipped_in_a_folder(prepare, folder, name, content, reason):
    bad = folder / name
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is {reason}"):
        prepare(bad)
    for prepared in (prepare(folder), prepare(folder / "*")):
        assert sum(prepared.summary["skipped"].values()) == 1
        assert next(iter(prepared.summary["skipped"])).startswith(reason)


def test_missing_files_are_named(prepare, folder):
    with pytest.raises(ValueError, match=r"absent\.txt does not exist"):
        prepare(folder / "absent.txt")
    with pytest.raises(ValueError, match=r"no file matches '.*\*\.rst'"):
        prepare(folder / "*.rst")


def test_bad_rows_are_named(prepare, tmp_path):
    path = tmp_path / "table.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"table\.jsonl, line 2, has no text under text_field='text'"):
        prepare(path)
    path.write_text('{"text": "fine"}\n\n{"text"')
    with pytest.raises(ValueError, match=r"table\.jsonl, line 3, is no JSON"):
        prepare(path)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["text"]}), tmp_path / "table.parquet")
    with pytest.raises(ValueError, match=r"without a column text_field='text' \(it has body\)"):
        prepare(tmp_path / "table.parquet")


def test_no_text_and_too_little_text_give_the_numbers(prepare, tmp_path, texts):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        prepare(tmp_path / "empty")
    (tmp_path / "short.txt").write_text(texts(10))
    numbers = r"the validation split has \d+ tokens \(\d+ bytes in 1 files\), fewer than block_size=64"
    with pytest.raises(ValueError, match=numbers):
        prepare(tmp_path / "short.txt", block_size=64)
    assert not list((tmp_path / "cache").iterdir())


def test_duplicates_count_once(prepare, folder):
    total = prepare(folder).summary["train"]["files"] + 1
    (folder / "again.txt").write_bytes((folder / "0.txt").read_bytes())
    summary = prepare(folder).summary
    assert summary["train"]["files"] + summary["validation"]["files"] == total
    assert summary["skipped"] == {"the same content as another file": 1}


def test_max_bytes_takes_whole_files(prepare, folder):
    summary = prepare(folder, max_bytes=4000).summary
    taken = summary["train"]["bytes"] + summary["validation"]["bytes"]
    assert 2000 < taken <= 4000
    assert sum(summary["skipped"].values()) == 10 - summary["train"]["files"] - summary["validation"]["files"]


def test_hidden_files_are_left_out(prepare, folder, texts):
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text(texts(5))
    assert prepare(folder).summary["train"]["files"] + prepare(folder).summary["validation"]["files"] == 10


def test_long_documents_are_tokenized_in_pieces(prepare, tmp_path, texts, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text(texts(200).replace("\n", "\r\n"), newline="")
    whole = prepare(path)
    monkeypatch.setattr(data_module, "_PIECE", 500)
    pieces = prepare(path, cache_dir=str(tmp_path / "another"))
    assert whole.tokenizer.decode(tokens(pieces.train))[:5000] == path.read_bytes().decode()[:5000]
    assert tokens(pieces.train).count(pieces.tokenizer.eos_token_id) <= 1
    assert pieces.summary["train"]["bytes"] == whole.summary["train"]["bytes"]


def test_text_that_spells_the_end_token_does_not_end_a_document(prepare, tmp_path, texts):
    path = tmp_path / "tricky.txt"
    path.write_text("".join(texts(2) + "<|endoftext|>" for _ in range(30)))
    prepared = prepare(path)
    assert prepared.tokenizer.eos_token_id not in tokens(prepared.train)[:-1]


def test_a_named_tokenizer_is_used(prepare, folder, tmp_path):
    trained = prepare(folder).tokenizer
    trained.save_pretrained(tmp_path / "saved")
    by_folder = prepare(folder, tokenizer=str(tmp_path / "saved"))
    by_file = prepare(folder, tokenizer=str(tmp_path / "saved" / "tokenizer.json"))
    assert by_file.tokenizer.eos_token == "<|endoftext|>"
    assert by_folder.train[:] == by_file.train[:]
    with pytest.raises(ValueError, match="absent"):
        prepare(folder, tokenizer=str(tmp_path / "absent.json"))


def test_the_tokenizer_writes_back_any_text(prepare, folder):
    tokenizer = prepare(folder).tokenizer
    text = "Grüße, 世界 \t\0\x7f  🙂\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"vocab_size": 256}, "vocab_size=256 must be at least 257"),
        ({"validation_fraction": 0.0}, "validation_fraction=0.0"),
        ({"validation_fraction": math.nan}, "validation_fraction=nan"),
        ({"max_bytes": 1}, r"holds no text; skipped: .*max_bytes=1"),
    ],
)
def test_settings_out_of_range(prepare, folder, settings, message):
    with pytest.raises(ValueError, match=message):
        prepare(folder, **settings)


def test_the_default_is_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepared = prepare_data(DataSettings(max_bytes=300_000, vocab_size=512))
    assert prepared.summary["train"]["bytes"] > 200_000
    assert "import " in prepared.tokenizer.decode(tokens(prepared.train))
    (folder,) = (tmp_path / "dcformer").iterdir()
    assert AutoTokenizer.from_pretrained(folder / "tokenizer").eos_token == prepared.tokenizer.eos_token
    names = [str(path) for path in sources_module._standard_library()]
    assert any(name.endswith("argparse.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
