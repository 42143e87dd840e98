"""Traffic: when requests arrive, how long they are, and whose recorded drafts they meet."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dcut.errors import InputError
from dcut.policies import parse_spec
from traces.schema import Trace
from traces.workloads import Workload, read_workload

DEFAULT_REQUESTS = 2000
"""Requests of a process where nothing says how many."""


class Process(Protocol):
    """How the gaps between arrivals are drawn."""

    def gaps(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """The next gaps in seconds, float64 [num]; drawn in pieces, they are the same as drawn at once."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, `rate` a second on average."""

    rate: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def gaps(self, rng: np.random.Generator, num: int) -> np.ndarray:
        return rng.standard_exponential(num) / self.rate


@dataclass(frozen=True, slots=True)
class Bursty:
    """Arrivals in bursts: gaps from a gamma distribution, `cv` their standard deviation over their mean."""

    rate: float
    cv: float = 3.0

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("cv", self.cv)

    def gaps(self, rng: np.random.Generator, num: int) -> np.ndarray:
        shape = self.cv**-2
        return rng.standard_gamma(shape, num) / (shape * self.rate)


@dataclass(frozen=True, slots=True)
class Constant:
    """An arrival every 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def gaps(self, rng: np.random.Generator, num: int) -> np.ndarray:
        return np.full(num, 1 / self.rate)


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: each user sends a request, reads its answer, thinks, sends the next.

    Users think before their first request too; `think_s` is the mean of an exponential distribution.
    """

    users: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise InputError(f"users {self.users}: a closed loop has at least one")
        if not 0 <= self.think_s < np.inf:
            raise InputError(f"think_s {self.think_s:g}: a time to think is 0 s or more")

    def gaps(self, rng: np.random.Generator, num: int) -> np.ndarray:
        return rng.standard_exponential(num) * self.think_s


PROCESSES: dict[str, type[Process]] = {
    "poisson": Poisson,
    "bursty": Bursty,
    "constant": Constant,
    "closed": Closed,
}


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Consecutive requests of a run, as arrays.

    Position p of a request meets the anchor in row first_row + p % num_rows of the trace's arrays.
    """

    arrival_s: np.ndarray  # float64 [n]; nan in a closed loop, for all but the first request of each user
    think_s: np.ndarray  # float64 [n], from a finish to the arrival, for those; 0 in an open loop
    prompt_tokens: np.ndarray  # int64 [n]
    output_tokens: np.ndarray  # int64 [n]
    source: np.ndarray  # int64 [n], index of the trace's request whose anchors it meets
    first_row: np.ndarray  # int64 [n]
    num_rows: np.ndarray  # int64 [n]
    blocks: np.ndarray | None  # int32 [blocks], as in Workload
    block_starts: np.ndarray | None  # int64 [n + 1]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def reuses(self) -> np.ndarray:
        """Which requests are longer than what was recorded, so that they meet anchors again, bool [n]."""
        return self.output_tokens - 1 > self.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """The requests of a run, drawn again from the seed whenever they are asked for.

    The seed decides gaps, lengths and anchors by streams of their own: two rates, or two processes, serve
    the same requests, and two policies meet the same drafts.
    """

    trace: Trace
    num_requests: int
    seed: int = 0
    process: Process | None = None  # None: the workload's own arrivals
    workload: Workload | None = None  # None: the trace's requests, whole passes in a seeded random order
    rate_scale: float = 1.0  # arrivals come this many times as fast

    def __len__(self) -> int:
        return self.num_requests

    @property
    def users(self) -> int:
        """Users of a closed loop; 0 where it is open."""
        return self.process.users if isinstance(self.process, Closed) else 0

    def chunks(self, size: int = 65_536) -> Iterator[Requests]:
        """The requests in order of arrival, some `size` at a time; the same ones for any size."""
        gaps_rng, rows_rng, anchors_rng = (
            np.random.default_rng(stream) for stream in np.random.SeedSequence(self.seed).spawn(3)
        )
        order = request_order(self.trace, self.num_requests, self.seed)
        recorded = _Recorded(self.trace)
        clock = 0.0
        size = max(size, self.users)  # the first request of each user is in the first piece
        for start in range(0, self.num_requests, size):
            place = np.arange(start, min(start + size, self.num_requests))
            arrival_s, think_s = self._times(place, gaps_rng, clock)
            clock = arrival_s[-1]
            source = order[place]
            if self.workload is None:
                lengths = recorded.prompt_tokens[source], recorded.output_tokens[source]
                blocks = None, None
            else:
                row = (
                    place if self.process is None else rows_rng.integers(len(self.workload), size=len(place))
                )
                lengths = self.workload.prompt_tokens[row], self.workload.output_tokens[row]
                blocks = _blocks(self.workload, row)
                domain = recorded.domain[source]
                if self.workload.domain is not None:
                    domain = recorded.known(self.workload)[row]
                source = recorded.draw(domain, lengths[1] - 1, anchors_rng.random(len(place)))
            rows = recorded.first_row[source], recorded.num_rows[source]
            yield Requests(arrival_s, think_s, *lengths, source, *rows, *blocks)

    def _times(
        self, place: np.ndarray, rng: np.random.Generator, clock: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """arrival_s and think_s of the requests at these places of the run, the first after `clock`."""
        none = np.zeros(len(place))
        if self.process is None:
            assert self.workload is not None
            return self.workload.arrival_s[place] / self.rate_scale, none
        gaps = self.process.gaps(rng, len(place)) / self.rate_scale
        if not self.users:
            return np.cumsum(np.append(clock, gaps))[1:], none
        arrival_s = np.where(place < self.users, gaps, np.nan)
        return np.sort(arrival_s), gaps  # nan sorts last


class _Recorded:
    """What a trace holds for requests to meet: its requests by domain, the shortest first."""

    def __init__(self, trace: Trace) -> None:
        arrays = trace.arrays
        self.prompt_tokens, self.output_tokens = arrays.prompt_tokens, arrays.output_tokens
        self.first_row, self.num_rows = arrays.first_row, arrays.num_rows
        self.names, self.domain = np.unique(
            trace.requests["domain"].fill_null("").to_numpy(), return_inverse=True
        )
        self.by_domain = [np.flatnonzero(self.domain == code) for code in range(len(self.names))]
        self.by_domain = [some[np.argsort(self.num_rows[some], kind="stable")] for some in self.by_domain]

    def known(self, workload: Workload) -> np.ndarray:
        """A workload's domains as numbers of the trace's, int64 [requests]; InputError on one it lacks."""
        assert workload.domain is not None
        names = workload.domain.to_numpy()
        code = np.minimum(np.searchsorted(self.names, names), len(self.names) - 1)
        lost = self.names[code] != names
        if lost.any():
            at = int(np.argmax(lost))
            raise InputError(
                f"{workload.where(at)}: the trace has no domain {names[at]!r}; it has "
                f"{', '.join(map(str, self.names))}"
            )
        return code

    def draw(self, domain: np.ndarray, needed: np.ndarray, chance: np.ndarray) -> np.ndarray:
        """A request of the trace for each domain and number of anchors needed, int64 [n].

        Of those recorded in the domain with that many anchors, each is as likely as the other; where there
        is none, each of those at least half as long as the longest. chance: float64 [n] in [0, 1).
        """
        source = np.zeros(len(domain), np.int64)
        for code, some in enumerate(self.by_domain):
            here = domain == code
            rows = self.num_rows[some]
            if rows[-1] == 0:
                raise InputError(f"the trace holds no anchors of domain {str(self.names[code])!r}")
            enough = np.where(needed[here] > rows[-1], -(-rows[-1] // 2), needed[here])
            first = np.searchsorted(rows, enough)
            source[here] = some[first + (chance[here] * (len(some) - first)).astype(np.int64)]
        return source


def _blocks(workload: Workload, row: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """blocks and block_starts of some requests of a workload."""
    if workload.blocks is None or workload.block_starts is None:
        return None, None
    first, num = workload.block_starts[row], workload.block_starts[row + 1] - workload.block_starts[row]
    starts = np.append(0, np.cumsum(num))
    return workload.blocks[np.arange(starts[-1]) + np.repeat(first - starts[:-1], num)], starts


def open_traffic(
    trace: Trace,
    arrivals: str,
    rate: float | None = None,
    rate_scale: float = 1.0,
    lengths: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Traffic:
    """The traffic that a command line asks for; see `add_arguments`.

    Raises InputError on what cannot be, such as a rate beside a workload, and as `read_workload` does.
    """
    _check_positive("--rate-scale", rate_scale)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: a run has at least one request")
    name = arrivals.partition(":")[0]
    if name in PROCESSES or not (Path(arrivals).suffix or Path(arrivals).exists()):
        if rate is not None and name == "closed":
            raise InputError(f"--rate {rate:g}: a closed loop has no rate; its users and think_s decide")
        given = {} if rate is None else {"rate": rate}
        process = parse_spec(arrivals, PROCESSES, "arrivals", given)
        workload = None if lengths is None else read_workload(lengths, timed=False)
        return Traffic(trace, limit or DEFAULT_REQUESTS, seed, process, workload, rate_scale)
    for option, value in (("--rate", rate), ("--lengths", lengths)):
        if value is not None:
            raise InputError(
                f"{option} {value}: {arrivals} has its own arrivals and lengths; --rate-scale 2 makes it "
                f"twice as fast, --arrivals poisson --lengths {arrivals} takes its lengths alone"
            )
    workload = read_workload(arrivals)
    return Traffic(trace, min(limit or len(workload), len(workload)), seed, None, workload, rate_scale)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `open_traffic`, but for the seed."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--arrivals",
        metavar="FILE|PROCESS",
        help="a workload (.csv, .jsonl, .parquet: Azure, Mooncake, Vidur, or arrival_s,prompt_tokens,"
        "output_tokens), or poisson, bursty:cv=3, constant, closed:users=64,think_s=1",
    )
    group.add_argument("--rate", type=float, metavar="X", help="arrivals a second of a process")
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="times as fast (%(default)s)"
    )
    group.add_argument(
        "--lengths", metavar="FILE", help="a workload to draw lengths from (the trace's requests)"
    )
    group.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"requests (all of a workload, {DEFAULT_REQUESTS} of a process)",
    )


def request_order(trace: Trace, num_requests: int, seed: int) -> np.ndarray:
    """The requests of a run as indices into the trace's, int64 [num_requests], in a seeded random order.

    The trace is gone through as often as needed, each pass in an order of its own in which any stretch
    holds the domains in the same shares as the trace. The same seed gives the same order to every policy.
    """
    rng = np.random.default_rng(seed)
    _, domain, size = np.unique(
        trace.requests["domain"].fill_null("").to_numpy(), return_inverse=True, return_counts=True
    )
    passes = []
    for _ in range(-(-num_requests // len(domain))):
        shuffled = np.lexsort((rng.random(len(domain)), domain))  # domain after domain, random inside
        rank = np.concatenate([np.arange(n) for n in size])
        place = (rank + rng.random(len(domain))) / np.repeat(size, size)
        passes.append(shuffled[np.argsort(place)])
    return np.concatenate(passes)[:num_requests]


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise InputError(f"{name} {value:g} is not a number above 0")


def whole_number(name: str, text: str, least: int) -> int:
    """The value of an option that is a whole number; InputError where it is not, or below `least` or huge."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(f"{name} {text!r} is not a whole number of at least {least}")
    if value >= 2**63:
        raise InputError(f"{name} {text[:9]}... is too large: {len(text)} digits")
    return value
