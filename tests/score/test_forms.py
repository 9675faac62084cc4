"""Files of rows, well-made and not: what is read of them, and what is written."""

from __future__ import annotations

import csv
import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neper.errors import ConfigError, InvalidRequestError, StartupError
from neper.score import form
from neper.score.formats import open_reader, open_writer
from neper.score.mode import Field
from neper.score.row import Row, ScoredRow

FIELDS = {"logprob": Field("float64"), "ids": Field("int32", 1), "top": Field("float32", 2)}
SCORES = {
    "logprob": -1.5,
    "ids": np.array([3, 4], np.int32),
    "top": np.array([[-0.1, -0.2], [-0.3, -math.inf]], np.float32),
}


def made(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read(path: Path, after: int = 0) -> list[tuple[int, Any]]:
    """The number of each row with its values, or the beginning of its error."""
    return [(row.number, row.error or dict(row.values)) for row in open_reader(path).rows(after)]


def written(source: Path, target: Path, rows: list[Row] | None = None, parts: int = 1) -> Path:
    """The rows of a file with SCORES, written in that many parts, each by a writer that goes on."""
    reader = open_reader(source)
    scored = [ScoredRow(row, SCORES) for row in (reader.rows() if rows is None else rows)]
    pieces = target.with_name("pieces")
    pieces.write_bytes(open_writer(target, reader, FIELDS).begin(scored))
    for part in range(parts):
        writer = open_writer(target, reader, FIELDS)
        writer.resume(pieces)
        with pieces.open("ab") as file:
            file.write(b"".join(writer.encode(scored[part::parts])))
    writer.finish(pieces, target)
    assert not pieces.exists()
    return target


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_json_lines_with_all_that_may_be_wrong(tmp_path: Path, end: bytes) -> None:
    lines = [b'\xef\xbb\xbf{"text": "a"}', b"", b"{", b"[1]", b'{"text": "\xff"}', b"  ", b'{"text": NaN}', b'{"b": 1}']
    rows = read(made(tmp_path / "a.jsonl", end.join(lines)))  # the last line has no end
    assert [number for number, _ in rows] == [1, 3, 4, 5, 7, 8]
    assert [values for _, values in rows if isinstance(values, dict)] == [{"text": "a"}, {"b": 1}]
    assert [values for _, values in rows[1:-1] if "JSON" not in values] == []
    assert read(tmp_path / "a.jsonl", after=4) == rows[3:]


def test_a_huge_line_is_a_failed_row_of_which_little_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_ROW_BYTES", 64)
    data = b'{"a": 1}\n' + b"x" * 5000 + b'\n{"a": 2}\n' + b"x" * 5000
    for name in ("a.jsonl", "a.csv"):
        rows = read(made(tmp_path / name, (b"a\n" if name == "a.csv" else b"") + data))
        assert [number for number, _ in rows] == [1, 2, 3, 4]
        assert "the line has more than" in rows[1][1]
        assert "the line has more than" in rows[3][1]
        assert isinstance(rows[2][1], dict)


def test_the_part_that_is_done_ends_with_1(tmp_path: Path) -> None:
    made(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 4)
    made(tmp_path / "a.csv", b"text\na\nb\nc\n")
    pq.write_table(pa.table({"text": ["a"] * 4}), tmp_path / "a.parquet")
    for name, want in (
        ("a.jsonl", [0.25, 0.5, 0.75, 1]),
        ("a.csv", [7 / 11, 9 / 11, 1]),
        ("a.parquet", [0.25, 0.5, 0.75, 1]),
    ):
        assert [row.done for row in open_reader(tmp_path / name).rows()] == pytest.approx(want)


def test_csv_with_a_bom_and_odd_quoting(tmp_path: Path) -> None:
    data = (
        '\ufeffid,text\r\n1,"a ""quoted"", \n text"\r\n\r\n2,plain\r\n3,"a"b\r\n4,too,many\r\n5\r\n6,日本\r\n'.encode()
        + b'7,\xff\n8,a\x00b\n9,"open\n10,in it'
    )
    rows = read(made(tmp_path / "a.csv", data))
    assert [number for number, _ in rows] == list(range(1, 10))
    assert rows[0][1] == {"id": "1", "text": 'a "quoted", \n text'}
    assert rows[1][1] == {"id": "2", "text": "plain"}
    assert rows[5][1] == {"id": "6", "text": "日本"}
    for place, words in (
        (2, "expected after"),
        (3, "3 fields, the header 2"),
        (4, "1 fields"),
        (6, "not UTF-8"),
        (8, "unexpected end"),
    ):
        assert words in rows[place][1]
    assert read(tmp_path / "a.csv", after=5) == rows[5:]


@pytest.mark.parametrize(("data", "words"), [(b"", "empty"), (b"a,a\n", "same name"), (b"\xff\n", "UTF-8")])
def test_csv_without_a_usable_header_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_reader(made(tmp_path / "a.csv", data))


def test_files_that_cannot_be_opened_are_one_line(tmp_path: Path) -> None:
    for name, error, words in (
        ("no.jsonl", StartupError, "there is no"),
        ("a.txt", ConfigError, "must end in .jsonl"),
        ("a.parquet", StartupError, "cannot read"),
        ("folder.csv", StartupError, "is no file"),
    ):
        made(tmp_path / "a.parquet", b"PAR1 and no more")
        (tmp_path / "folder.csv").mkdir(exist_ok=True)
        with pytest.raises(error, match=words):
            open_reader(tmp_path / name)


def nested_table() -> pa.Table:
    """Columns of many types, in two row groups' worth of rows."""
    return pa.table(
        {
            "text": pa.array(["a", None, "c"] * 200),
            "meta": pa.array([{"tags": ["x", "y"], "n": 1}, None, {"tags": [], "n": None}] * 200),
            "kind": pa.array(["u", "v", "u"] * 200).dictionary_encode(),
            "when": pa.array([datetime.datetime(2026, 1, 1), None, None] * 200, pa.timestamp("ns")),
            "price": pa.array([Decimal("1.50"), None, None] * 200),
            "raw": pa.array([b"\xff", b"", None] * 200),
            "map": pa.array([[("k", 1)], None, []] * 200, pa.map_(pa.string(), pa.int32())),
        },
    ).replace_schema_metadata({"made": "by a test"})


@pytest.mark.parametrize("parts", [1, 3])
def test_parquet_keeps_columns_of_all_types(tmp_path: Path, parts: int) -> None:
    table = nested_table()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    rows = list(open_reader(tmp_path / "a.parquet").rows(needed={"text"}))
    assert [row.values for row in rows[:3]] == [{"text": "a"}, {"text": None}, {"text": "c"}]
    order = [row for part in range(parts) for row in rows[part::parts]]
    found = pq.read_table(written(tmp_path / "a.parquet", tmp_path / "b.parquet", rows, parts))
    want = table.take([row.number - 1 for row in order])
    assert found.schema.metadata[b"made"] == b"by a test"
    for name in table.schema.names:
        assert found[name].to_pylist() == want[name].to_pylist()
        assert found[name].type == table[name].type
    assert found["ids"].type == pa.list_(pa.int32())
    assert found["top"].type == pa.list_(pa.list_(pa.float32()))
    assert found["top"][0].as_py() == SCORES["top"].tolist()
    assert set(found["logprob"].to_pylist()) == {-1.5}


def test_parquet_is_read_from_a_row_on_as_from_the_beginning(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [str(n) for n in range(2000)]}), tmp_path / "a.parquet", row_group_size=700)
    rows = list(open_reader(tmp_path / "a.parquet").rows())
    assert [(row.number, row.values["text"]) for row in rows] == [(n + 1, str(n)) for n in range(2000)]
    for after in (1, 699, 700, 1111, 2000):
        rest = list(open_reader(tmp_path / "a.parquet").rows(after))
        assert [(row.number, row.values, row.size, row.done) for row in rest] == [
            (row.number, row.values, row.size, row.done) for row in rows[after:]
        ]


def test_json_lines_are_copied_as_they_are(tmp_path: Path) -> None:
    data = '{"a": 1.10, "big": 123456789012345678901, "a": 2, "u": "\\u00e9 é"} \r\n{}\n'
    out = written(made(tmp_path / "a.jsonl", data.encode()), tmp_path / "b.jsonl").read_text()
    scores = '"logprob":-1.5,"ids":[3,4],"top":[[-0.1,-0.2],[-0.3,null]]}\n'
    assert out == f"{data[: data.index('}')]},{scores}{{{scores}"


def test_every_form_becomes_every_other(tmp_path: Path) -> None:
    values = [{"id": "1", "text": 'a, "b"\nc'}, {"id": "2", "text": "日本"}]
    made(tmp_path / "a.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in values))
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "text"])
        table.writeheader()
        table.writerows(values)
    for source in ("a.jsonl", "a.csv", "a.parquet"):
        for target in ("b.jsonl", "b.csv", "b.parquet"):
            out = written(tmp_path / source, tmp_path / target, parts=2)
            found = [row.values for row in open_reader(out).rows()]
            assert [{name: row[name] for name in ("id", "text")} for row in found] == values
            assert list(found[0]) == ["id", "text", *FIELDS]
            assert [float(row["logprob"]) for row in found] == [-1.5, -1.5]
            ids = found[0]["ids"]
            assert (json.loads(ids) if target == "b.csv" else ids) == [3, 4]


@pytest.mark.parametrize("target", ["b.csv", "b.parquet"])
def test_rows_that_do_not_fit_the_first_ones_are_refused(tmp_path: Path, target: str) -> None:
    reader = open_reader(made(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": null}\n'))
    writer = open_writer(tmp_path / target, reader, FIELDS)
    writer.begin([ScoredRow(row, SCORES) for row in reader.rows()])
    with pytest.raises(InvalidRequestError, match="'new'"):
        writer.encode([ScoredRow(Row(3, {"new": 1}), SCORES)])
    if target == "b.parquet":
        with pytest.raises(InvalidRequestError, match="types of the columns"):
            writer.encode([ScoredRow(Row(3, {"a": "text"}), SCORES)])


def test_bytes_are_no_json(tmp_path: Path) -> None:
    pq.write_table(nested_table(), tmp_path / "a.parquet")
    with pytest.raises(InvalidRequestError, match="JSON cannot hold"):
        written(tmp_path / "a.parquet", tmp_path / "b.jsonl")
