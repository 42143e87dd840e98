"""Command: join recordings of the same requests with drafters of different width into one trace."""

import sys
from dataclasses import replace

import numpy as np
import polars as pl

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from traces.schema import Trace
from traces.store import open_trace, save


def merge(wide: Trace, narrow: Trace) -> Trace:
    """`wide`, with the drafts of `narrow` at the same positions beside its own.

    At temperature 0 the output does not depend on the drafter, so both hold the same positions. Step times
    are those of `wide`; the narrower drafter's is its own table's share of the wider one's, averaged over
    the batch sizes that both measured.
    Raises InputError where the two are not recordings of the same output, where the widths are not of two
    drafters, or where one has no step times and the other has.
    """
    width, widest = narrow.draft_length, wide.draft_length
    if not width < widest or width in wide.narrower or narrow.narrower:
        raise InputError(
            f"drafters of {widest}{''.join(f', {w}' for w in wide.narrower)} and "
            f"{'several widths' if narrow.narrower else f'{width} drafts'}: give the widest first, then "
            "recordings of one narrower drafter each, every width once"
        )
    for trace, drafts in ((wide, widest), (narrow, width)):
        if "accept_probs" in trace.anchors.columns:
            raise InputError(
                f"the recording with {drafts} drafts was sampled: only at temperature 0 do two drafters meet "
                "the same positions; record both with --temperature 0"
            )
    told = ["request_id", "prompt_tokens", "output_tokens"]  # in the order in which they finished
    if (
        not wide.requests.select(told)
        .sort("request_id")
        .equals(narrow.requests.select(told).sort("request_id"))
    ):
        raise InputError(
            "the two recordings are not of the same requests: record both with the same --prompts, "
            "--requests, --max-tokens and --seed"
        )
    own = wide.anchors.select("request_id", "position").join(
        narrow.anchors.select(
            "request_id",
            "position",
            "token_id",
            pl.col("num_accepted").alias(f"num_accepted_{width}"),
            pl.col("confidences").alias(f"confidences_{width}"),
        ),
        on=["request_id", "position"],
        how="left",
        maintain_order="left",
    )
    same = (own["token_id"] == wide.anchors["token_id"]).fill_null(False)
    if not same.all():
        row = own.row(int(np.argmin(same.to_numpy())), named=True)
        raise InputError(
            f"the two recordings part at position {row['position']} of request {row['request_id']}: the same "
            "target in float32 says the same, whoever drafts"
        )
    narrower = sorted((*wide.narrower, width))
    return replace(
        wide,
        meta={**wide.meta, "narrower": narrower, f"drafter_{width}": narrow.meta.get("drafter")},
        anchors=wide.anchors.hstack(own.select(f"num_accepted_{width}", f"confidences_{width}")),
        cost=_costs(wide.cost, narrow.cost, width),
    )


def _costs(wide: CostTable | None, narrow: CostTable | None, width: int) -> CostTable | None:
    """The wider drafter's table, which also knows what the narrower one takes."""
    if wide is None and narrow is None:
        return None
    if wide is None or narrow is None or not len(wide.draft) or not len(narrow.draft):
        raise InputError("one of the recordings has no times of its drafter: profile both")
    both = np.intersect1d(wide.draft[:, 0], narrow.draft[:, 0])
    if not len(both):
        raise InputError("the recordings have no batch size in common at which both drafters were timed")
    share = float(np.mean([narrow.draft_seconds(int(b)) / wide.draft_seconds(int(b)) for b in both]))
    return replace(wide, draft_lengths=tuple(sorted((*wide.draft_lengths, (width, share)))))


def main() -> None:
    """Parse the command line, join, write."""
    parser = Parser(
        prog="python -m traces.merge",
        description="Join recordings of the same requests with drafters of different width, so that a replay "
        "can choose the width: each is recorded as usual (python -m dcut.record), at temperature 0.",
    )
    parser.add_argument("wide", help="the recording with the widest drafter")
    parser.add_argument("narrow", nargs="+", help="recordings with narrower ones")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the new trace")
    args = parser.parse_args()
    trace = open_trace(args.wide)
    for name in args.narrow:
        trace = merge(trace, open_trace(name))
    save(trace, args.out)
    drafts = ", ".join(str(width) for width in (*trace.narrower, trace.draft_length))
    print(f"wrote {args.out}: {len(trace.anchors)} positions, with {drafts} drafts at each")


if __name__ == "__main__":
    sys.exit(guard(main))
