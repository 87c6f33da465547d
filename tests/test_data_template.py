"""Which tokens of a conversation are learned, and what becomes of one that is too long.

Scope: the chat template (`megatrain/data/template.py`).
Not here: rows and formats (`test_data_formats.py`), files of samples (`test_data_chat.py`).
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.conversation import AUTO, Conversation, RowFaultError, conversation_of
from megatrain.data.template import ChatTemplate, encode_within, load_template
from megatrain.errors import UserError
from tests.chat_tokenizer import (
    CHATML,
    COUNTED,
    END,
    MARKED,
    MARKED_SHORT,
    START,
    THINKING,
    learned,
    save_tokenizer,
    turns,
)


def conversation(*texts: str, system: str | None = None) -> Conversation:
    return conversation_of({"messages": turns(*texts, system=system)}, AUTO)


def template_of(folder: Path, text: str = CHATML, **options: Any) -> ChatTemplate:
    return load_template(save_tokenizer(folder / "tokenizer", text, **options), None)


def taught(template: ChatTemplate, folder: Path, talk: Conversation) -> str:
    encoded = template.encode(talk, "assistant")
    return learned(folder / "tokenizer", encoded.ids, encoded.supervised)


@pytest.mark.parametrize("text", [CHATML, MARKED, MARKED_SHORT])
def test_every_answer_is_learned_with_its_end_of_turn_and_nothing_else(tmp_path: Path, text: str) -> None:
    """DP-06: "yes" also stands in the questions; several turns all count; three kinds of template agree."""
    template = template_of(tmp_path, text)
    template.check()
    found = taught(template, tmp_path, conversation("say yes", "yes", "yes yes?", "yes, yes", system="yes"))
    assert found == f"yes{END}|yes, yes{END}"


def test_tokens_are_those_of_the_text_that_transformers_renders(tmp_path: Path) -> None:
    """The template decides the text: ids equal apply_chat_template's, the mask equals its mask of generated tokens."""
    template = template_of(tmp_path, MARKED)
    messages = turns("one?", "Ünö 1", "two?", "2", system="be brief")
    wanted = template.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    found = template.encode(conversation_of({"messages": messages}, AUTO), "assistant")
    assert found.ids.tolist() == list(wanted["input_ids"])
    assert found.supervised.astype(int).tolist() == list(wanted["assistant_masks"])


def test_template_whose_answers_cannot_be_told_apart_is_refused_by_name(tmp_path: Path) -> None:
    """DP-03: no markers and no prefixes: refused before any row, with the template's name, not an all-zero mask."""
    template = template_of(tmp_path, COUNTED)
    with pytest.raises(UserError) as caught:
        template.check()
    message = str(caught.value)
    assert f"the chat template of {tmp_path / 'tokenizer'}" in message and "no generation markers" in message, message
    assert template.encode(conversation("a", "b"), "all").supervised.all()


def test_template_that_marks_other_turns_is_refused(tmp_path: Path) -> None:
    """DP-03: markers that are there but do not stand for the answers."""
    wrong = CHATML.replace("{{ '<|im_start|>' + message", "{% generation %}{{ 'x' }}{% endgeneration %}{{ '' + message")
    with pytest.raises(UserError, match="marks other turns than the answers"):
        template_of(tmp_path, wrong).check()


def test_last_turn_that_is_written_unlike_earlier_ones_is_still_found(tmp_path: Path) -> None:
    """Templates that add thoughts to the last answer alone: earlier answers follow their prompt as they stand."""
    found = taught(template_of(tmp_path, THINKING), tmp_path, conversation("a", "first", "b", "second"))
    assert found == f"first{END}|<think>second{END}"


def test_answers_that_the_data_exempts_are_not_learned(tmp_path: Path) -> None:
    """OpenAI's `weight: 0` on an assistant turn."""
    messages = turns("a", "first", "b", "second")
    messages[1]["weight"] = 0
    for text in (CHATML, MARKED):
        template = template_of(tmp_path, text)
        assert taught(template, tmp_path, conversation_of({"messages": messages}, AUTO)) == f"second{END}"


def test_row_that_the_template_refuses_says_why(tmp_path: Path) -> None:
    """A template's own complaint becomes the reason of the row."""
    strict = "{% if messages | length > 2 %}{{ raise_exception('two turns only') }}{% endif %}" + CHATML
    template = template_of(tmp_path, strict)
    with pytest.raises(RowFaultError, match="refuses the row: two turns only"):
        template.encode(conversation("a", "b", "c", "d"), "assistant")


def test_long_system_turn_is_shortened_and_nothing_else(tmp_path: Path) -> None:
    """DP-04: 400 words of system turn, room for 128 tokens: question and answer stay whole, the row is not changed."""
    template = template_of(tmp_path)
    words = " ".join(f"word{n}" for n in range(400))
    row = {"messages": turns("short?", "yes", system=words)}
    before = copy.deepcopy(row)
    encoded = encode_within(template, conversation_of(row, AUTO), 128, "assistant")
    assert row == before
    assert encoded.change == "shortened" and len(encoded.ids) <= 128 < len(encoded.ids) + len(" word99"), encoded
    assert learned(tmp_path / "tokenizer", encoded.ids, encoded.supervised) == f"yes{END}"
    text = template.tokenizer.decode(encoded.ids)
    assert text.startswith(f"{START}system\nword0 word1 ") and text.endswith(
        f"short?{END}\n{START}assistant\nyes{END}\n"
    )


def test_sample_that_fits_is_the_same_whatever_the_room(tmp_path: Path) -> None:
    """DP-04: exact fit and one token more are untouched; one less is not."""
    template, talk = template_of(tmp_path), conversation("q", "a", system="some words")
    whole = template.encode(talk, "assistant")
    for room in (len(whole.ids), len(whole.ids) + 1):
        found = encode_within(template, talk, room, "assistant")
        assert found.change == "whole" and np.array_equal(found.ids, whole.ids), room
    assert encode_within(template, talk, len(whole.ids) - 1, "assistant").change == "shortened"


def test_sample_too_long_without_its_system_turn_loses_its_end(tmp_path: Path) -> None:
    """The rule for the rest: the end is cut, and a row with nothing left to learn is refused with both lengths."""
    template, talk = template_of(tmp_path), conversation("q", "answer" * 20)
    cut = encode_within(template, talk, 64, "assistant")
    assert cut.change == "cut" and len(cut.ids) == 64 and cut.targets > 0
    with pytest.raises(RowFaultError, match=r"before the first answer: \d+ tokens, room for 10"):
        encode_within(template, talk, 10, "assistant")


def test_tokenizer_without_pad_and_end_tokens_works_and_does_not_grow(tmp_path: Path) -> None:
    """DP-08: padding falls back to the end token, then to 0; the template alone decides what ends a text."""
    fallbacks = {(True, True): 258, (False, True): 257, (False, False): 0}
    for (pad, end), wanted in fallbacks.items():
        folder = tmp_path / f"{pad}-{end}"
        template = template_of(folder, pad=pad, end=end)
        size = len(template.tokenizer)
        assert template.padding_id(259) == wanted, (pad, end)
        assert taught(template, folder, conversation("q", "a")) == f"a{END}"
        assert template.tokenizer.decode(template.encode(conversation("q", "a"), "all").ids).endswith(f"a{END}\n")
        assert len(template.tokenizer) == size
    assert template_of(tmp_path / "small").padding_id(256) == 0, "an id that the model does not have is no padding"


def test_template_file_wins_and_a_missing_template_is_refused(tmp_path: Path) -> None:
    """data.chat_template; a base model's tokenizer has none of its own."""
    folder = save_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(UserError, match="has no chat template. Fix: data.chat_template"):
        load_template(folder, None)
    file = tmp_path / "chat.jinja"
    file.write_text(MARKED)
    template = load_template(folder / "tokenizer.json", file)
    assert template.has_markers and str(file) in template.name
    with pytest.raises(UserError, match="cannot be loaded"):
        load_template(tmp_path / "nowhere", file)
