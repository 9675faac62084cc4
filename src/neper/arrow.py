"""Token scores as Arrow: packed rows become columns by numpy, without an object per token.

pyarrow is an extra, whose libraries have 170 MB. So this file is imported where it is first used.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from neper.candidates import Comparison
from neper.types import Float32Array, Int32Array, PackedRows

try:
    import pyarrow as pa
    from pyarrow import ipc
except ImportError:
    raise ImportError("Arrow needs the package pyarrow: pip install 'neper[arrow]'") from None

PIECE_PLACES = 2**16
"""Most places of the lists of a record batch, but for one row; so many ids and values are 512 KiB."""

_PIECE_ROWS = 2**14
_PIECE_CANDIDATES = 128

TOKENS = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("choice", pa.int32()),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("logprob", pa.float32()),
        pa.field("rank", pa.int32()),
        pa.field("top_ids", pa.list_(pa.int32())),
        pa.field("top_logprobs", pa.list_(pa.float32())),
    ]
)
"""A row per token.

- prompt: the place of the prompt in the request.
- choice: the index of the choice that the token was generated for; null for a token of the prompt.
- position: the place of the token in its sequence, from 0: the prompt, then what was generated.
- logprob: natural log. rank: 1 + the number of ids with a strictly greater logit. top_ids: the listed ids, best first.
  top_logprobs: theirs. All four are null where the token was not scored.
"""


CANDIDATES = pa.schema(
    [
        pa.field("candidate", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("logprob", pa.float64(), nullable=False),
        pa.field("mean_logprob", pa.float64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("probability", pa.float64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)
"""A row per candidate: its place in the request, what `neper.candidates.Comparison` says, and its tokens' logprobs."""


def prompt_batches(prompt: int, token_ids: Sequence[int], rows: PackedRows | None) -> Iterator[pa.RecordBatch]:
    """Batches of TOKENS of a prompt. `rows` are the scores of its last tokens; those before them have none."""
    begin = len(token_ids) - (0 if rows is None else len(rows))
    yield from token_batches(prompt, None, 0, PackedRows.pack(token_ids[:begin]))
    if rows is not None:
        yield from token_batches(prompt, None, begin, rows)


def token_batches(prompt: int, choice: int | None, position: int, rows: PackedRows) -> Iterator[pa.RecordBatch]:
    """Batches of TOKENS of consecutive tokens of one sequence, the first of which is at `position`."""
    each = max(1, min(_PIECE_ROWS, PIECE_PLACES // max(1, rows.top_k or 0)))
    for begin in range(0, len(rows), each):
        yield _token_batch(prompt, choice, position + begin, rows[begin : begin + each])


def _token_batch(prompt: int, choice: int | None, position: int, rows: PackedRows) -> pa.RecordBatch:
    count = len(rows)
    columns = [
        np.full(count, prompt, np.int32),
        pa.nulls(count) if choice is None else np.full(count, choice, np.int32),
        np.arange(position, position + count, dtype=np.int32),
        rows.token_ids,
    ]
    if rows.top_k is None:
        columns += [pa.nulls(count)] * 4
    else:
        columns += [rows.logprob, rows.rank, *lists(rows.top_ids, rows.top_logprobs)]
    arrays = [
        column.cast(field.type) if isinstance(column, pa.Array) else pa.array(column)
        for field, column in zip(TOKENS, columns, strict=True)
    ]
    return pa.record_batch(arrays, TOKENS)


def candidate_batches(
    texts: Sequence[str],
    compared: Sequence[Comparison],
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Float32Array],
) -> Iterator[pa.RecordBatch]:
    """Batches of CANDIDATES; `token_ids` and `logprobs` are as long as each other for each."""
    for begin in range(0, len(texts), _PIECE_CANDIDATES):
        part = slice(begin, begin + _PIECE_CANDIDATES)
        offsets = pa.array(np.cumsum([0, *map(len, logprobs[part])]), pa.int32())
        lists = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values[part]), kind))
            for values, kind in ((token_ids, pa.int32()), (logprobs, pa.float32()))
        ]
        totals = zip(*compared[part], strict=True)
        columns = [range(begin, begin + len(texts[part])), texts[part], *totals]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, CANDIDATES, strict=False)]
        yield pa.record_batch([*arrays, *lists], CANDIDATES)


def table(*batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """A table of TOKENS."""
    return pa.Table.from_batches(chain(*batches), TOKENS)


def lists(ids: Int32Array, values: Float32Array) -> tuple[pa.Array, pa.Array]:
    """Ids and values [n, k] as columns of lists, without the places where ids are -1."""
    used = ids >= 0
    offsets = np.concatenate([[0], np.cumsum(used.sum(1))]).astype(np.int32)

    def column(array: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(array.ravel() if used.all() else array[used]))

    return column(ids), column(values)


def stream(schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: Mapping[str, bytes]) -> Iterator[bytes]:
    """The bytes of an Arrow IPC stream, a piece for each batch. `metadata` is the schema's.

    Buffers are compressed with zstd: the two upper bytes of most ids are zero, and the logits of a bfloat16 model have
    few values.
    """
    sink = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False)
    with ipc.new_stream(sink, schema.with_metadata(metadata), options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield _taken(sink)
    yield _taken(sink)


def _taken(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
