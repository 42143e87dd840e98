"""Text to tokens and back: a model's tokenizer and chat template, and text that appears token by token."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dcut.errors import InputError

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are not (yet) a character


class Codec:
    """Tokenizer and chat template of a Hugging Face directory."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, names: Mapping[str, Any]):
        """names: what the template may name beside the messages, such as bos_token."""
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self._names = dict(names)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = None if template is None else environment.from_string(template)
        except TemplateError as error:
            raise InputError(f"the model's chat template is malformed: {error}") from error

    @classmethod
    def load(cls, directory: Path) -> "Codec":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; only the first must exist."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"{file} is missing: not the directory of a model with its tokenizer")
        config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        template = (
            template_file.read_text("utf-8") if template_file.is_file() else config.get("chat_template")
        )
        names = {  # a token is a string, or a dict that holds one
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        return cls(Tokenizer.from_file(str(file)), template, names)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with whatever the tokenizer itself puts around it."""
        return self.tokenizer.encode(text).ids

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks.

        messages: {"role": ..., "content": str} each. Raises InputError where the model has no chat template
        or its template refuses the messages.
        """
        if self._template is None:
            raise InputError("this model has no chat template: use /v1/completions")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise InputError(f"the model's chat template refuses the messages: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def read_texts(file: str | Path) -> list[tuple[str, str | None]]:
    """Prompt and domain of each of the JSON lines {"prompt": text, "domain": optional text}.

    Raises InputError naming the line, and where there are none.
    """
    texts = []
    for number, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        try:
            entry = json.loads(line)
            text, domain = entry["prompt"], entry.get("domain")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f'{file} line {number} is not a JSON object with a "prompt"') from error
        if not isinstance(text, str) or not text or text.encode("utf-8", "ignore").decode() != text:
            raise InputError(f"{file} line {number}: the prompt is not text")
        if not isinstance(domain, str | None):
            raise InputError(f"{file} line {number}: the domain is not text")
        texts.append((text, domain))
    if not texts:
        raise InputError(f"{file} holds no prompts")
    return texts


class TextStream:
    """Tokens in, text out as soon as it is certain: whole characters, and nothing of a stop string.

    `push` and `finish` return the text that became certain; all of it together is the decoded output up to
    the first stop string. `stopped` tells that one was found; later tokens are then ignored.
    """

    def __init__(self, codec: Codec, stops: Sequence[str] = ()):
        self.stopped = False
        self.num_tokens = 0  # up to the one that completed a stop string
        self._codec = codec
        self._stops = tuple(stops)
        # Tokens are decoded in a window, whose first part is context only: some tokenizers write a token
        # differently where it opens a text.
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window whose text was returned before it opened
        self._num_shown = 0  # characters of the window's text that were returned
        self._held = ""  # the end of the text that may be the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens and return the text that they make certain."""
        if not self._stops:
            self.num_tokens += len(tokens)
            return self._decode(tokens)
        text = ""
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            text += self._search(self._decode([token]))
        return text

    def finish(self) -> str:
        """Return what was held back, now that no more tokens come."""
        if self.stopped:
            return ""
        rest = self._codec.decode(self._window)[self._num_shown :]
        self._num_shown += len(rest)
        text = self._search(rest) + self._held
        self._held = ""
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        """The whole characters that the tokens complete."""
        self._window.extend(tokens)
        text = self._codec.decode(self._window)
        whole = text.removesuffix(UNFINISHED)
        fresh = whole[self._num_shown :]
        self._num_shown = max(self._num_shown, len(whole))
        if fresh and whole == text:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._codec.decode(self._window))
        return fresh

    def _search(self, text: str) -> str:
        """What of the text, after what is held, can be part of no stop string."""
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                self._held = text[at:]
                return text[:at]
        self._held = ""
        return text
