"""The format of a record. This file defines it; it imports nothing of the package.

[Note: record format 1] A record is a folder. Every start of the run adds a folder `attempt-0000`, `attempt-0001`, ...
In it each rank writes three files of lines, `rank-00000.notes`, `.table` and `.timeline`. A line is the CRC-32 of the
rest as eight hexadecimal digits, a space, JSON in UTF-8, a newline. Readers leave out lines with a wrong checksum and
report them.

`notes`: objects. The first has `"note": "head"`: `schema`, `rank`, `world_size`, `attempt`, `host`, `pid`, `began`
(Unix seconds) and the writer's `facts`. Every other note is an event with `note` (its kind), `at` (Unix seconds) and
facts of its own. The last note of a rank that closed its record is `"note": "closed"`. `checkpoint` has `path`,
`of_step`, `bytes` or null, `seconds` until it was on disk, and `blocked_s`. `failure`, `warning`, `error` and
`degraded` (something slower runs instead of something faster) have `text`; a `failure` with `follows` is a consequence
of another rank's failure. `plan` has `bytes`, the planned peak of one rank's device. `peak`, a link's peak rate, has
`link` (one of the page's links, or `drive in`, `drive out` for all drives), `bytes_per_second` of one rank, and
`source`.

`table`: arrays of numbers or null. The first line has the names of the columns (see `COLUMNS`). Every other line is a
row, which covers `steps` steps from step `first` on. When a table is full, neighbouring rows are merged, and from then
on a row covers twice as many steps. The last row may still grow; it is rewritten in place.

`timeline`: one object per step: `step`, `began` (Unix seconds), `us` (microseconds of the step), `names`, `spans` (six
integers for each span: kind, index into names, begin, duration and waited microseconds, bytes; times from `began`),
`left_out` (number of spans beyond `SPANS_PER_STEP`), `memory` (pairs of microseconds and bytes by owner). When the file
is full, steps that are not multiples of a power of two are dropped, except the last `RECENT_STEPS`. A block with
`"open": true` is a step that had not ended. Its last `under_way` spans had begun and not ended either; they are written
as if they ended with the block. The name of a tier's span is `link: thing`, as in `drive, shards in: layers.3`.

`failure.json`, beside the attempts, is a launcher's report of how the last attempt ended: `at` (Unix seconds); `text`,
one line with the first cause; `detail`, lines about all ranks; `interrupted`, true if a signal to the launcher ended
it; and `flight`, one object per rank with `rank`, `waits` (the collective in which it waited, or null) and `last` (its
last collectives, as lines).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

SCHEMA_VERSION = 1
FAILURE_FILE = "failure.json"
SPANS_PER_STEP = 2000
RECENT_STEPS = 16
MAX_BYTES = 256 << 20
"""Default bound on the bytes of a record, all ranks together."""


class SpanKind(IntEnum):
    """Kinds of spans. The `waited` time of a span is the part at its end in which the rank did nothing but wait."""

    DATA = 0  # from the end of a step's work to the next forward: the data loader, and the script's own code
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    GATHER = 4
    REDUCE = 5
    PUBLISH = 6
    BROADCAST = 7
    CONTROL = 8
    CHECKPOINT = 9  # collectives of checkpointing
    TIER_READ = 10
    TIER_WRITE = 11
    COMPUTE = 12  # one unit in a forward pass, a backward pass or an update
    SAVE = 13  # a checkpoint blocked training
    EXCHANGE = 14  # of sequence shards for attention heads, and of batches


PHASES = (SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.UPDATE, SpanKind.SAVE)
COLLECTIVES = (
    SpanKind.GATHER,
    SpanKind.REDUCE,
    SpanKind.PUBLISH,
    SpanKind.BROADCAST,
    SpanKind.CONTROL,
    SpanKind.CHECKPOINT,
    SpanKind.EXCHANGE,
)
TIERS = (SpanKind.TIER_READ, SpanKind.TIER_WRITE)

OWNERS = ("gathered", "parameters", "masters", "gradients", "states", "activations", "buffers", "other")
"""Owners of memory; `other` is the memory of the process that has no other owner."""


@dataclass(frozen=True)
class Column:
    """One column of the table. ``merge``: how the values of merged rows combine, without nulls; a mean is weighted by
    the rows' steps.
    """

    name: str
    merge: Literal["first", "last", "sum", "mean", "min", "max"]
    meaning: str


COLUMNS = (
    Column("first", "first", "number of the row's first step, from 1"),
    Column("steps", "sum", "steps in the row"),
    Column("began", "first", "Unix seconds at which the first step began"),
    Column("seconds", "sum", "from the start of each step to the start of the next"),
    Column("data_s", "sum", "seconds between steps: data loader and script"),
    Column("forward_s", "sum", "seconds in forward passes"),
    Column("backward_s", "sum", "seconds in backward passes"),
    Column("update_s", "sum", "seconds in the optimizer's step"),
    Column("save_s", "sum", "seconds in which checkpoints blocked the run"),
    Column("gather_wait_s", "sum", "seconds waited for gathers, publishing, broadcasts and exchanges"),
    Column("reduce_wait_s", "sum", "seconds waited for reductions"),
    Column("control_wait_s", "sum", "seconds waited for control messages"),
    Column("tier_wait_s", "sum", "seconds waited for host or NVMe transfers"),
    Column("loss", "mean", "mean loss of this rank's micro-batches"),
    Column("loss_min", "min", "lowest loss of a step in the row"),
    Column("loss_max", "max", "highest loss of a step in the row"),
    Column("lr", "last", "learning rate of the first param group"),
    Column("grad_norm", "mean", "global gradient norm before clipping"),
    Column("loss_scale", "last", "loss scale"),
    Column("skipped", "sum", "steps skipped because a gradient was not finite"),
    Column("samples", "sum", "samples of all ranks"),
    Column("tokens", "sum", "tokens of all ranks, if each had as many as this one; exact as a mean over ranks"),
    Column("sent_bytes", "sum", "bytes that this rank sent to other ranks"),
    Column("across_bytes", "sum", "bytes that this rank sent to other nodes"),
    Column("collectives", "sum", "collectives of this rank that sent something"),
    Column("read_bytes", "sum", "bytes read from host or NVMe tiers"),
    Column("written_bytes", "sum", "bytes written to host or NVMe tiers"),
    Column("process_bytes", "max", "resident bytes of the process"),
    Column("device_bytes", "max", "bytes that the accelerator's allocator holds"),
    *(Column(f"{owner}_bytes", "max", f"bytes of {owner}") for owner in OWNERS),
)
COLUMN_NAMES = tuple(column.name for column in COLUMNS)


def rank_file(rank: int, part: Literal["notes", "table", "timeline"]) -> str:
    """Return the name of one of a rank's three files inside an attempt's folder, such as `rank-00003.table`."""
    return f"rank-{rank:05d}.{part}"


def attempt_folder(attempt: int) -> str:
    """Return the name of an attempt's folder inside the record, such as `attempt-0001`."""
    return f"attempt-{attempt:04d}"
