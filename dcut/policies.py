"""The budget policies: which drafts of a batch are worth verifying, given confidences and measured costs."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.plus import Oracle, OracleSurvival, Plus
from dcut.protocol import BudgetPolicy, UniformPolicy
from dcut.rivals import (
    Dsd,
    DSpark,
    Ema,
    SmartSpec,
    Tetris,
    Threshold,
    VllmAdaptive,
    check_share,
    keep_best,
    pays,
)
from dcut.selector import Selection, select

Form = Literal["paper", "served"]
Kind = typing.TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Off(UniformPolicy):
    """Plain decoding: no drafter, one token a request."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("off",)

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        return 0

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Full(UniformPolicy):
    """Verify every draft."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("full",)

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return drafts


@dataclass(frozen=True, slots=True)
class Fixed(UniformPolicy):
    """Verify the first drafts of every request, `first` of them."""

    first: int

    def __post_init__(self) -> None:
        if self.first < 0:
            raise InputError(f"fixed:{self.first}: a depth counts drafts, 0 or more")

    @property
    def labels(self) -> tuple[str, ...]:
        return (f"first {self.first}",)

    def check_drafts(self, longest: int) -> None:
        if self.first > longest:
            raise InputError(
                f"fixed:{self.first} is more than the {longest} drafts of the drafter: give {longest} at most"
            )

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return min(self.first, drafts)


@dataclass(frozen=True, slots=True)
class Ratio(BudgetPolicy):
    """Verify the best drafts of the whole batch, always at one keep ratio (the write-up's "Fixed-R75")."""

    ratio: float
    form: Form = "served"

    def __post_init__(self) -> None:
        _check_ratios("ratio", (self.ratio,))

    @property
    def labels(self) -> tuple[str, ...]:
        return (f"{self.ratio:g}",)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        budgets = _budgets((self.ratio,), self.form, *confidences.shape)
        return select(confidences, budgets, np.ones(1))


@dataclass(frozen=True, slots=True)
class DCut(BudgetPolicy):
    """D-Cut: of a few keep ratios, the one with the most expected tokens per second of measured step time.

    form "served" (the variant released for serving): a ratio rho of the batch * D positions, anchors
    included, K = max(0, ceil(rho * batch * D) - batch), priced at the target step plus a full drafter
    step, and 0.75 where nothing was profiled.
    form "paper" (the write-up's formula): K = ceil(rho * batch * (D - 1)), priced at C_graph(batch, rho),
    the target's step at rho * batch * D tokens.
    bonus: count the bonus tokens in the utility; neither form does.
    min_gain: verify nothing unless the step beats plain decoding by this share; neither form asks.
    """

    buckets: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    bonus: bool = False
    form: Form = "served"
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        _check_ratios("dcut:buckets", self.buckets)
        check_share("dcut:min_gain", self.min_gain, 10.0)

    @property
    def labels(self) -> tuple[str, ...]:
        return (*(f"{ratio:g}" for ratio in self.buckets), *(("0",) if self.min_gain else ()))

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        if cost is None:
            return Ratio(0.75, self.form).select(confidences, cost)
        budgets, tokens, seconds = _priced(self.buckets, self.form, *confidences.shape, cost)
        if context_tokens is not None:
            seconds = seconds + cost.context_seconds(len(confidences), context_tokens, tokens)
            if self.form == "served":
                seconds += cost.draft_context_seconds(len(confidences), context_tokens)
        chosen = select(confidences, budgets, seconds, self.bonus)
        if pays(
            chosen.expected_tokens,
            seconds[chosen.bucket],
            cost,
            len(confidences),
            context_tokens,
            self.min_gain,
        ):
            return chosen
        return keep_best(confidences, 0)._replace(bucket=len(self.buckets))


POLICIES: dict[str, type[BudgetPolicy]] = {
    "off": Off,
    "full": Full,
    "fixed": Fixed,
    "ratio": Ratio,
    "dcut": DCut,
    "threshold": Threshold,
    "tetris": Tetris,
    "smartspec": SmartSpec,
    "dsd": Dsd,
    "ema": Ema,
    "dspark": DSpark,
    "vllm-adaptive": VllmAdaptive,
    "dcut-plus": Plus,
    "oracle": Oracle,
    "oracle-survival": OracleSurvival,
}


def parse_policies(text: str) -> dict[str, BudgetPolicy]:
    """Policies by their spelling, from a list such as "off,fixed:3,dcut:bonus=true,form=paper".

    A piece `key=value` belongs to the policy before it. Raises InputError on an unknown name or option,
    naming what exists and the nearest, and on a policy named twice.
    """
    specs: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if specs and "=" in piece and ":" not in piece.split("=")[0]:
            specs[-1] += ("," if ":" in specs[-1] else ":") + piece
        else:
            specs.append(piece)
    if not specs:
        raise InputError(f"no policy named; choose from {', '.join(POLICIES)}")
    policies: dict[str, BudgetPolicy] = {}
    for spec in specs:
        policy = parse_policy(spec)
        twin = next((other for other, known in policies.items() if known == policy), None)
        if twin is not None:
            raise InputError(f"{spec} and {twin} are the same policy: name it once")
        policies[spec] = policy
    return policies


def parse_policy(spec: str) -> BudgetPolicy:
    """One policy from "name", "name:value" or "name:key=value,key=value"."""
    return parse_spec(spec, POLICIES, "policy", {})


def parse_spec(spec: str, kinds: Mapping[str, type[Kind]], noun: str, given: Mapping[str, Any]) -> Kind:
    """An object of one of `kinds`, dataclasses by name, from "name", "name:value" or "name:key=value,...".

    noun: what to call them in a message. given: fields that come from elsewhere; ignored where the kind has
    no such field. Raises InputError on an unknown name or option, naming what exists and the nearest.
    """
    name, _, rest = spec.partition(":")
    if name not in kinds:
        raise InputError(f"unknown {noun} {name!r}{_nearest(name, kinds)}; there are {', '.join(kinds)}")
    kind = kinds[name]
    types_of = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    options = {key: value for key, value in given.items() if key in known}
    fields = {key: field for key, field in known.items() if key not in options}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        if not equals:
            if not fields:
                raise InputError(f"{noun} {name} takes no options, got {piece!r}")
            key, value = next(iter(fields)), piece
        if key not in fields:
            has = f"there are {', '.join(fields)}" if fields else "it takes none"
            raise InputError(f"{noun} {name} has no option {key!r}{_nearest(key, fields)}; {has}")
        options[key] = _value(f"{name}:{key}", types_of[key], value)
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in options]
    if missing:
        example = "3" if types_of[missing[0]] is int else "0.5"
        raise InputError(f"{noun} {name} needs a {missing[0]}, such as {name}:{example}")
    return kind(**options)


def _value(where: str, kind: Any, text: str) -> Any:
    """Text as a value of a field's type; raises InputError naming what is allowed."""
    try:
        if typing.get_origin(kind) is Literal:
            if text not in typing.get_args(kind):
                raise ValueError
            return text
        if typing.get_origin(kind) is tuple:
            return tuple(typing.get_args(kind)[0](part) for part in text.split("/"))
        if kind is bool:
            return {"true": True, "false": False}[text]
        return kind(text)
    except (ValueError, KeyError) as error:
        raise InputError(f"{where}={text!r} is not {_allowed(kind)}") from error


def _allowed(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if typing.get_origin(kind) is tuple:
        return "a list such as 0.25/0.5/1"
    return {bool: "true or false", int: "a whole number"}.get(kind, "a number")


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else ""


def _check_ratios(name: str, ratios: tuple[float, ...]) -> None:
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise InputError(f"{name}: keep ratio {ratio:g} is outside (0, 1]")
    if list(ratios) != sorted(set(ratios)):
        raise InputError(f"{name}: keep ratios must rise, got {'/'.join(f'{r:g}' for r in ratios)}")


@lru_cache(maxsize=4096)
def _budgets(ratios: tuple[float, ...], form: Form, batch: int, draft_length: int) -> np.ndarray:
    """Drafts kept at each ratio, int64 [num_ratios]; 1e-9 keeps ceil from rounding float noise up."""
    if form == "paper":
        return np.array([math.ceil(r * batch * draft_length - 1e-9) for r in ratios])
    width = draft_length + 1
    return np.array([max(0, math.ceil(r * batch * width - 1e-9) - batch) for r in ratios])


@lru_cache(maxsize=4096)
def _priced(
    ratios: tuple[float, ...], form: Form, batch: int, draft_length: int, cost: CostTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Budgets, the verified tokens that they are priced at, and their step times at the measured context."""
    budgets = _budgets(ratios, form, batch, draft_length)
    tokens, draft_s = batch + budgets, 0.0
    if form == "paper":
        tokens = np.maximum(batch, np.array(ratios) * (batch * (draft_length + 1)))
    else:
        draft_s = cost.draft_seconds(batch, extrapolate=True)
    return budgets, tokens, np.array([cost.seconds(batch, n, extrapolate=True) + draft_s for n in tokens])
