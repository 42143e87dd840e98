"""Command that measures the built-in drafters on held-out prompts and writes the model card's tables.

    python -m runtime.pair.evaluate

Greedy, float32, one request at a time: the target's text is fixed, every position is drafted from once, and
the steps of a request are walked through these drafts. The tables between the markers of README.md, and
figures.json with the same numbers, are replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from dcut.errors import Parser, guard
from runtime.models import CausalLM, DFlash, Drafter, causal, load_drafter, load_target
from runtime.pair import weights
from runtime.pair.dense import block_logits, distinct_4grams, generate, pad, rollout_logits
from runtime.pair.train import END, encode_prompts

FIGURES = weights.HERE / "figures.json"
CARD = weights.HERE / "README.md"
DRAFTERS = weights.NAMES[1:]
START, STOP = "<!-- figures: python -m runtime.pair.evaluate -->", "<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's greedy answer to one held-out prompt."""

    domain: str
    prompt_tokens: int
    ids: list[int]  # prompt and answer

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts from every output position but the last of one answer: [positions, draft_length] each.

    `hits` tells where a draft is the target's token; drafts past the end of the answer are misses.
    """

    domain: str
    confidences: NDArray[np.float32]
    hits: NDArray[np.bool_]

    @property
    def num_accepted(self) -> NDArray[np.int64]:
        """Accepted drafts per position [positions]."""
        return np.cumprod(self.hits, axis=1).sum(axis=1)

    @property
    def num_output(self) -> int:
        return len(self.hits) + 1

    @property
    def num_steps(self) -> int:
        """Decoding steps after the prefill, which yields the first token."""
        position, steps = 0, 0
        while position < len(self.hits):
            position += int(self.num_accepted[position]) + 1
            steps += 1
        return steps


def read_prompts(path: Path, limit: int | None = None) -> list[dict[str, str]]:
    """Prompts of a JSON-lines file with `prompt` and `domain`, at most `limit` of each domain."""
    prompts, seen = [], dict[str, int]()
    for line in path.read_text().splitlines():
        prompt = json.loads(line)
        seen[prompt["domain"]] = seen.get(prompt["domain"], 0) + 1
        if limit is None or seen[prompt["domain"]] <= limit:
            prompts.append(prompt)
    return prompts


def answer(
    target: CausalLM, tokenizer: Tokenizer, prompts: list[dict[str, str]], max_tokens: int, batch: int = 64
) -> list[Answer]:
    """Greedy answers to the prompts, in their order."""
    encoded = encode_prompts(tokenizer, [prompt["prompt"] for prompt in prompts])
    out = []
    for start in tqdm(range(0, len(encoded), batch), "greedy answers"):
        asked = encoded[start : start + batch]
        for prompt, ids, text in zip(
            prompts[start : start + batch], asked, generate(target, asked, max_tokens, END), strict=True
        ):
            out.append(Answer(prompt["domain"], len(ids), ids + text))
    return out


@torch.no_grad()
def draft(drafter: Drafter, target: CausalLM, answers: list[Answer], draft_length: int) -> list[Drafted]:
    """Draft from every output position of every answer."""
    out = []
    for one in tqdm(answers, "drafting", mininterval=2):
        ids = pad([one.ids])
        taps = () if isinstance(drafter, CausalLM) else drafter.taps
        hidden, features = target(ids, torch.arange(ids.shape[1])[None], causal, taps)
        anchors = torch.arange(one.prompt_tokens, len(one.ids) - 1)
        if isinstance(drafter, DFlash):
            assert features is not None
            logits = block_logits(drafter, target, ids, features, anchors[None])[0, :, :draft_length]
        else:
            steps = rollout_logits(drafter, target, ids, hidden, features, draft_length, follow=False)
            logits = torch.stack([step[0, anchors - 1] for step in steps], dim=1)
        confidences, tokens = logits.softmax(-1).max(-1)
        places = anchors[:, None] + torch.arange(1, draft_length + 1)
        truth = pad([one.ids + [-1] * draft_length])[0][places]
        out.append(Drafted(one.domain, confidences.numpy(), (tokens == truth).numpy()))
    return out


def weighted_auc(
    scores: NDArray[np.floating], hits: NDArray[np.bool_], weight: NDArray[np.floating]
) -> float:
    """Chance that a hit outscores a miss, ties counting half, each pair weighing the product of weights."""
    _, inverse = np.unique(scores, return_inverse=True)
    won = np.bincount(inverse, weight * hits)
    lost = np.bincount(inverse, weight * ~hits)
    below = np.cumsum(lost) - lost / 2
    return float((won * below).sum() / (won.sum() * lost.sum()))


def by_domain(drafted: list[Drafted], figure: Callable[[list[Drafted]], float]) -> dict[str, float]:
    """A figure for each domain and for all."""
    domains = list(dict.fromkeys(one.domain for one in drafted))
    parts = {domain: [one for one in drafted if one.domain == domain] for domain in domains}
    return {domain: round(figure(part), 3) for domain, part in (parts | {"all": drafted}).items()}


def auc(drafted: list[Drafted]) -> float:
    """AUC of the prefix product for "this draft is accepted", every sequence weighing the same."""
    scores = [np.cumprod(one.confidences, axis=1).ravel() for one in drafted]
    hits = [np.cumprod(one.hits, axis=1).astype(bool).ravel() for one in drafted]
    weight = [np.full(len(score), 1 / len(score)) for score in scores]
    return weighted_auc(np.concatenate(scores), np.concatenate(hits), np.concatenate(weight))


def measure(drafted: list[Drafted]) -> dict[str, object]:
    """All figures of one drafter; `answers` of a single token take no step and are left out."""
    drafted = [one for one in drafted if one.num_steps]
    per_answer = [(one.num_output - 1) / one.num_steps for one in drafted]
    survived = [np.cumprod(one.hits, axis=1).mean(axis=0) for one in drafted]
    products = [np.cumprod(one.confidences, axis=1).mean(axis=0) for one in drafted]
    return {
        "draft_length": drafted[0].hits.shape[1],
        "tokens_per_step": by_domain(
            drafted, lambda part: float(np.mean([(one.num_output - 1) / one.num_steps for one in part]))
        ),
        "tokens_per_step_by_answer": [round(value, 3) for value in per_answer],
        "tokens_per_step_weighted_by_steps": by_domain(
            drafted,
            lambda part: sum(one.num_output - 1 for one in part) / sum(one.num_steps for one in part),
        ),
        "auc": by_domain(drafted, auc),
        "survival_observed": np.mean(survived, axis=0).round(3).tolist(),
        "survival_predicted": np.mean(products, axis=0).round(3).tolist(),
    }


def describe_target(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Per domain: mean output tokens, share that ends by itself, distinct 4-grams, share of loops (< 0.3)."""
    out = {}
    for domain in dict.fromkeys(one.domain for one in answers):
        part = [one for one in answers if one.domain == domain]
        distinct = [distinct_4grams(one.ids[one.prompt_tokens :]) for one in part]
        out[domain] = {
            "answers": len(part),
            "output_tokens": round(float(np.mean([one.num_output for one in part])), 1),
            "ended": round(float(np.mean([one.ids[-1] == END for one in part])), 3),
            "distinct_4grams": round(float(np.mean(distinct)), 3),
            "loops": round(float(np.mean([value < 0.3 for value in distinct])), 3),
        }
    return out


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *([f"{cell}" for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def tables(figures: dict[str, dict]) -> str:
    """The figures as Markdown."""
    target, drafters = figures["target"], figures["drafters"]
    domains = [*target, "all"]
    parts = ["**The target's greedy text** (at most {max_tokens} tokens):".format(**figures)]
    parts.append(
        table(
            [
                "domain",
                "answers",
                "output tokens",
                "ended by itself",
                "distinct 4-grams",
                "loops (under 0.3)",
            ],
            [[domain, *target[domain].values()] for domain in target],
        )
    )
    for key, title in (
        ("tokens_per_step", "**Tokens per step, every sequence weighing the same**"),
        ("tokens_per_step_weighted_by_steps", "**Tokens per step, weighted by steps** (what a server sees)"),
        ("auc", "**AUC of the prefix product**, every sequence weighing the same"),
    ):
        rows = [[name, of["draft_length"], *(of[key][d] for d in domains)] for name, of in drafters.items()]
        parts += [title + ":", table(["drafter", "drafts", *domains], rows)]
    parts.append("**Reliability**: mean prefix product -> share accepted, by draft position:")
    positions = (1, 2, 3, 4, 6, 7, 8, 10, 12, 15)
    rows = [
        [
            name,
            *(
                f"{of['survival_predicted'][p - 1]:.2f} -> {of['survival_observed'][p - 1]:.2f}"
                if p <= of["draft_length"]
                else ""
                for p in positions
            ),
        ]
        for name, of in drafters.items()
    ]
    parts.append(table(["drafter", *map(str, positions)], rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=weights.HERE / "weights", help="folder of the models")
    parser.add_argument("--prompts", type=Path, default=weights.PROMPTS)
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS, help="the others keep their figures")
    parser.add_argument("--limit", type=int, help="prompts per domain (default: all)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print the tables, change no file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(args.weights / "target")
    tokenizer = Tokenizer.from_file(str(args.weights / "target" / "tokenizer.json"))
    answers = answer(target, tokenizer, read_prompts(args.prompts, args.limit), args.max_tokens)
    figures = {"max_tokens": args.max_tokens, "target": describe_target(answers), "drafters": {}}
    if not args.dry_run and FIGURES.exists():
        figures["drafters"] = json.loads(FIGURES.read_text())["drafters"]
    for name in args.drafters:
        drafter = load_drafter(args.weights / name, target)
        draft_length = drafter.config.draft_length if isinstance(drafter, DFlash) else 7
        figures["drafters"][name] = measure(draft(drafter, target, answers, draft_length))
    figures["drafters"] = {name: of for name in DRAFTERS if (of := figures["drafters"].get(name))}
    print(tables(figures))
    if not args.dry_run:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        before, _, rest = CARD.read_text().partition(START)
        CARD.write_text(f"{before}{START}\n\n{tables(figures)}\n\n{STOP}{rest.partition(STOP)[2]}")


if __name__ == "__main__":
    sys.exit(guard(main))
