"""Text for the built-in pair: real code and prose found beside Python, and generated exchanges.

Every sample is a user's prompt and an answer, so that one chat template serves training, recording and
serving. Real text comes from the Python standard library, from docstrings and, where it lies at hand, from
the reST sources of the Python documentation (Debian's python3-doc). One file in sixteen is held out.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from runtime.pair.generated import CHAT, CODE, DATA, MATH

DOMAINS = {"code": 0.20, "prose": 0.12, "chat": 0.18, "math": 0.22, "data": 0.28}  # share of the samples
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "site-packages", "turtledemo"}
PACKAGES = ("numpy", "torch", "pip", "jinja2", "tqdm")  # docstrings of these, where installed


@dataclass(frozen=True, slots=True)
class Sample:
    """One exchange: what the user asks and what the assistant answers."""

    domain: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Pools:
    """Real text by kind: functions are (name, source), texts are (subject, text)."""

    functions: list[tuple[str, str]]
    docstrings: list[tuple[str, str]]
    texts: list[tuple[str, str]]


def is_held_out(name: str) -> bool:
    """One file in sixteen, told by its name, so that nothing in a held-out file is ever trained on."""
    return zlib.crc32(name.encode()) % 16 == 0


def read_pools(held_out: bool, documentation: Path | None = None) -> Pools:
    """Collect real text from the running Python and, when given, a folder of reST sources."""
    pools = Pools([], [], [])
    for name, path in _python_files():
        if is_held_out(name) == held_out:
            _read_python(name, path, pools)
    for topic, text in _topics():
        if is_held_out(topic) == held_out:
            pools.texts.extend((topic, part) for part in _passages(text))
    if documentation is not None:
        for path in sorted(documentation.rglob("*.rst*")):
            subject = path.name.split(".")[0]
            if is_held_out(subject) == held_out:
                pools.texts.extend((subject, part) for part in _passages(path.read_text()))
    return pools


def _python_files() -> Iterator[tuple[str, Path]]:
    """The standard library, then the packages, as (dotted-like name, path), sorted."""
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / package for package in PACKAGES)]
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if not SKIPPED & set(parts) and not any(part.startswith("test_") for part in parts):
                library = root == roots[0]
                yield ".".join(parts if library else (root.name, *parts)).removesuffix(".py"), path


def _read_python(name: str, path: Path, pools: Pools) -> None:
    """Add the functions (of the standard library only) and docstrings of one module."""
    source = path.read_text(errors="ignore")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    library = name.split(".")[0] not in PACKAGES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring.split(">>>")[0]) >= 80:
                text = docstring.split(">>>")[0].rstrip()  # transcripts teach little but to repeat
                pools.docstrings.append((getattr(node, "name", name), _clip(text, 700)))
        if library and isinstance(node, ast.FunctionDef) and node.end_lineno:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(text) >= 160 and text.count(">>>") < 3:
                pools.functions.append((node.name, _clip(text, 900)))


def _topics() -> Iterator[tuple[str, str]]:
    """The language reference that ships with every Python as the texts behind `help()`."""
    from pydoc_data.topics import topics

    yield from topics.items()


def _passages(text: str) -> Iterator[str]:
    """Plain paragraphs, joined to some 300-700 characters, without markup, examples and directives."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        marked = (
            paragraph.startswith((" ", "\t", "..", ":", "*", "-", "|", "+", "#")) and "   " in paragraph[:4]
        )
        if len(flat) < 80 or marked or ".. " in flat or ">>>" in flat or re.search(r"[=\-~^*]{4}", flat):
            continue
        flat = re.sub(r":[\w:+-]+:`[~!]?([^`<]+?)(\s*<[^`]*>)?`", r"\1", flat)
        flat = re.sub(r"`{1,2}([^`<]+?)(\s*<[^`]*>)?`{1,2}_*", r"\1", flat).replace("*", "")
        passage = f"{passage}\n\n{flat}" if passage else flat
        if len(passage) >= 300:
            yield _clip(passage, 700)
            passage = ""


def _clip(text: str, limit: int) -> str:
    """The text up to `limit` characters, cut at the end of a line or sentence."""
    if len(text) <= limit:
        return text
    cut = text[:limit]
    ends = [cut.rfind(end) for end in ("\n", ". ")]
    return cut[: max(*ends, limit // 2) + 1].rstrip()


def sample(domain: str, pools: Pools, rng: Random) -> Sample:
    """Draw one exchange of a domain; a third of the code, and all of chat, math and data, is generated."""
    generators = {"code": CODE, "chat": CHAT, "math": MATH, "data": DATA}
    if domain == "code" and rng.random() < 0.66:
        prompt, answer = _completion(pools, rng)
    elif domain == "prose":
        prompt, answer = (_continuation if rng.random() < 0.7 else _explanation)(pools, rng)
    else:
        prompt, answer = rng.choice(generators[domain])(rng)
    return Sample(domain, prompt, answer)


def _completion(pools: Pools, rng: Random) -> tuple[str, str]:
    name, source = rng.choice(pools.functions)
    lines = source.splitlines(keepends=True)
    cut = max(1, min(len(lines) - 1, round(len(lines) * rng.uniform(0.1, 0.5))))
    ask = rng.choice(("Complete this function.", "Finish the function {name}.", "Complete the code:"))
    return f"{ask.format(name=name)}\n\n{''.join(lines[:cut])}", "".join(lines[cut:]).rstrip()


def _continuation(pools: Pools, rng: Random) -> tuple[str, str]:
    subject, text = rng.choice(pools.texts)
    words = text.split(" ")
    cut = round(len(words) * rng.uniform(0.15, 0.45))
    ask = rng.choice(("Continue this text about {s}.", "Continue the text.", "What comes next?"))
    return f"{ask.format(s=subject)}\n\n{' '.join(words[:cut])}", " " + " ".join(words[cut:])


def _explanation(pools: Pools, rng: Random) -> tuple[str, str]:
    name, text = rng.choice(pools.docstrings)
    return rng.choice(("What is {n}?", "Explain {n}.", "Write the documentation of {n}.")).format(
        n=name
    ), text


def samples(pools: Pools, count: int, seed: int) -> Iterator[Sample]:
    """`count` samples with the domains mixed as in DOMAINS."""
    rng = Random(seed)
    for domain in rng.choices(list(DOMAINS), list(DOMAINS.values()), k=count):
        yield sample(domain, pools, rng)


def held_out_samples(pools: Pools, count: int, seed: int, exclude: set[str]) -> Iterator[Sample]:
    """`count` samples of each domain with different prompts, none of them in `exclude`."""
    rng, seen = Random(seed), set(exclude)
    for domain in DOMAINS:
        found = 0
        while found < count:
            drawn = sample(domain, pools, rng)
            if drawn.prompt not in seen:
                seen.add(drawn.prompt)
                found += 1
                yield drawn
