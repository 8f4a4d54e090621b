"""The labels of options are tokens of Gemma's real vocabulary."""

from server.api.decisions.questions import Labels
from server.api.decisions.request import MAX_OPTIONS
from server.text.tokenizer import Tokenizer


def test_there_is_a_label_of_one_token_for_every_option(gemma: Tokenizer) -> None:
    labels = Labels(gemma)
    found = labels.take(MAX_OPTIONS)
    assert found is not None
    assert [text for text, _ in found[:3]] == ["A", "B", "C"]
    assert len({token_id for _, token_id in found}) == len({text for text, _ in found}) == MAX_OPTIONS
    for text, token_id in found:
        assert gemma.decode([token_id], skip_special_tokens=False) == text
    assert labels.take(3) == found[:3]
    assert None not in (labels.token_of("Yes"), labels.token_of("No"))
