"""The text of a conversation, its tokens, and which of them are learned: what the tokenizer's chat template says.

Scope: loading tokenizer and template, the spans of the answers, cutting a conversation that is too long.
Not here: what a conversation is (`conversation.py`), where samples are kept (`sample_file.py`).

An answer's span goes from where the model would have to begin writing to the end of its turn, end-of-turn token
included. A template with generation markers says so itself. Of any other one prefixes are rendered turn by turn: the
text up to the answer with the generation prompt, and the text with the answer. Both must be prefixes of the whole text.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatrain.data.conversation import ASSISTANT, Conversation, Message, RowFaultError
from megatrain.errors import UserError

TrainOn = Literal["assistant", "all"]
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = Conversation(
    messages=tuple(
        Message(role=role, content=text)
        for role, text in (("user", "one?"), (ASSISTANT, "1."), ("user", "two?"), (ASSISTANT, "2."))
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids [n] and which of them are learned [n]. whole: nothing was shortened or cut to fit."""

    ids: NDArray[np.int64]
    supervised: NDArray[np.bool_]
    change: Literal["whole", "shortened", "cut"] = "whole"

    @property
    def targets(self) -> int:
        """Tokens that the loss counts: the first one has nothing before it to be predicted from."""
        return int(self.supervised[1:].sum())


class ChatTemplate:
    """A tokenizer with a chat template. name: how messages call the template."""

    def __init__(self, tokenizer: Any, template: str, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.has_markers = _MARKER.search(template) is not None
        self._template = template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def checksum(self) -> str:
        """Equal for two templates exactly when they give the same tokens."""
        parts = (self._backend.to_str(), self._template, repr(sorted(self.tokenizer.special_tokens_map.items())))
        return f"sha256:{hashlib.sha256(chr(0).join(parts).encode('utf-8', 'surrogatepass')).hexdigest()}"

    def padding_id(self, vocab_size: int) -> int:
        """An id to fill rows with: the pad token, else the end-of-sequence token, else 0. It is never learned."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None and token < vocab_size), 0)

    def check(self) -> None:
        """Raises UserError for a template of which the answers cannot be told from the rest."""
        try:
            found = self.encode(_PROBE, "assistant").targets
        except RowFaultError as fault:
            raise self._refusal(str(fault)) from None
        if found == 0:
            raise self._refusal("it marks no token of an answer")

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"data.train_on: assistant does not work with {self.name}: {reason}. Fix: data.chat_template: a file with "
            "a template that has {% generation %} markers, or data.train_on: all"
        )

    def encode(self, conversation: Conversation, train_on: TrainOn) -> Encoded:
        """Tokens of the whole conversation. Raises RowFaultError when the template does not take it."""
        messages = [message.for_template() for message in conversation.messages]
        text, spans = self._render(messages, conversation.tools, marked=self.has_markers)
        if train_on == "assistant":
            answers = [n for n, message in enumerate(conversation.messages) if message.role == ASSISTANT]
            if not self.has_markers:
                spans = [self._span(text, messages, conversation.tools, n) for n in answers]
            elif len(spans) != len(answers):
                raise RowFaultError(f"{self.name} marks other turns than the answers", f"{len(spans)}, {len(answers)}")
            kept = zip(spans, answers, strict=True)
            spans = [self._closed(text, span) for span, n in kept if conversation.messages[n].trained]
        else:
            spans = [(0, len(text))]
        try:
            found = self._backend.encode(text, add_special_tokens=False)
        except TypeError:  # half of a surrogate pair, which JSON can write, is no text
            raise RowFaultError("not text: it holds half of a surrogate pair") from None
        begins = np.fromiter((begin for begin, _ in found.offsets), dtype=np.int64, count=len(found.offsets))
        supervised = np.zeros(len(begins), dtype=np.bool_)
        for begin, end in spans:
            supervised |= (begins >= begin) & (begins < end)
        return Encoded(ids=np.asarray(found.ids, dtype=np.int64), supervised=supervised)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], *, marked: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RowFaultError(f"{self.name} refuses the row", " ".join(str(error).split())) from None
        texts, spans = rendered
        return texts[0], list(spans[0]) if marked else []

    def _span(self, text: str, messages: list[dict[str, Any]], tools: Sequence[Any], number: int) -> tuple[int, int]:
        """Where the answer `number` lies in `text`."""
        before, _ = self._render(messages[:number], tools, prompt=True)
        through, _ = self._render(messages[: number + 1], tools)
        if text.startswith(through) and through.startswith(before) and len(through) > len(before):
            return len(before), len(through)
        # Some templates treat the last turn unlike earlier ones; the answer may still follow its prompt as it stands.
        content, ending = messages[number]["content"].strip(), self.tokenizer.eos_token or ""
        if ending and text.startswith(before + content + ending):
            return len(before), len(before) + len(content) + len(ending)
        raise RowFaultError(
            f"{self.name} has no generation markers, and its answers cannot be told from the rest",
            f"turn {number + 1} is not where the text of the turns before it ends",
        )

    def _closed(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """The span with the end-of-turn token that follows, without the white space after one."""
        begin, end = span
        ending = self.tokenizer.eos_token
        body = text[begin:end].rstrip()
        if any(body.endswith(token) for token in self._special):
            return begin, begin + len(body)
        if ending and text.startswith(ending, end):
            return begin, end + len(ending)
        return begin, end


def encode_within(template: ChatTemplate, conversation: Conversation, room: int, train_on: TrainOn) -> Encoded:
    """At most `room` tokens of the conversation, one to be learned at least; `conversation` itself is left alone.

    What is too long loses the end of its system turn; what is too long without a system turn loses its own end.
    Raises RowFaultError when nothing to be learned is left.
    """
    encoded = template.encode(conversation, train_on)
    whole = len(encoded.ids)
    if whole > room:
        encoded = _shortened(template, conversation, room, train_on) or encoded
    if len(encoded.ids) > room:
        encoded = Encoded(ids=encoded.ids[:room], supervised=encoded.supervised[:room], change="cut")
    if encoded.targets == 0:
        if encoded.change == "cut":
            raise RowFaultError("longer than data.seq_len before the first answer", f"{whole} tokens, room for {room}")
        raise RowFaultError("nothing to learn", f"no supervised token among {whole}")
    return encoded


def _shortened(template: ChatTemplate, conversation: Conversation, room: int, train_on: TrainOn) -> Encoded | None:
    """With as many words of the system turn as fit; without any of them if none do. None without a system turn."""
    system, *others = conversation.messages
    if system.role != "system":
        return None
    ends = [0, *(word.end() for word in re.finditer(r"\S+", system.content))]

    def with_words(count: int) -> Encoded:
        kept = replace(system, content=system.content[: ends[count]])
        return template.encode(replace(conversation, messages=(kept, *others)), train_on)

    best, low, high = with_words(0), 0, len(ends) - 1
    if len(best.ids) > room:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        tried = with_words(middle)
        if len(tried.ids) <= room:
            best, low = tried, middle
        else:
            high = middle
    return replace(best, change="shortened")


def load_template(tokenizer: Path, template_file: Path | None) -> ChatTemplate:
    """The tokenizer of a folder or a tokenizer.json, with its own chat template or that of `template_file`."""
    loaded = load_tokenizer(tokenizer)
    if template_file is not None:
        try:
            return ChatTemplate(loaded, template_file.read_text(encoding="utf-8"), f"the template {template_file}")
        except (OSError, ValueError) as error:
            raise UserError(f"data.chat_template: {template_file} cannot be read: {error}") from None
    own = loaded.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not isinstance(own, str):
        raise UserError(
            f"data.tokenizer: {tokenizer} has no chat template. Fix: data.chat_template: a file with one, or the "
            "tokenizer of a model that was trained for chat"
        )
    return ChatTemplate(loaded, own, f"the chat template of {tokenizer}")


def load_tokenizer(path: Path) -> Any:
    """A tokenizer of transformers. Raises UserError when `path` holds none, or none that knows where tokens lie."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        else:
            file = path / "tokenizer.json" if path.is_dir() else path
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # transformers and tokenizers raise classes of many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"data.tokenizer: {path} cannot be loaded: {reason}") from None
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise UserError(
            f"data.tokenizer: {path} has no tokenizer.json, and without one answers cannot be found in tokens"
        )
    return loaded
