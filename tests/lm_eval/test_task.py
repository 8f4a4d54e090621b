"""The task in its short form: lm-eval's own requests to the tiny model; ``make lm-eval-test`` has lm-eval
score the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests.http.cache.tiny_server import tiny_server
from tests.http.live_server import LiveServer
from tests.lm_eval.client import LmEvalClient
from tests.lm_eval.comparison import TOLERANCE, compare
from tests.lm_eval.reference import BLOCK_SIZE, Reference, cache_plan
from tests.lm_eval.task import FOLDER, TASK, questions
from tests.server.text.small_tokenizer import build_library_tokenizer
from tests.tiny import tiny_config, tiny_runner, write_tiny_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    before = torch.get_num_threads()
    with tiny_server(write_tiny_folder(tmp_path_factory.mktemp("tiny")), max_num_batched_tokens=256) as live:
        yield live
    torch.set_num_threads(before)


@pytest.fixture
def client(tiny: LiveServer) -> LmEvalClient:
    return LmEvalClient(tiny.client, tiny.client.get("/v1/models").json()["data"][0]["id"])


def test_the_files_of_the_task_say_the_same() -> None:
    definition = yaml.safe_load((FOLDER / "facts.yaml").read_text(encoding="utf-8"))
    assert definition["task"] == TASK
    assert (definition["doc_to_text"], definition["target_delimiter"]) == ("<bos>{{question}}", " ")
    assert Path(definition["dataset_kwargs"]["data_files"]["test"]) == Path("facts.jsonl")
    assert len(questions()) == len({question.context for question in questions()}) == 100
    for question in questions():
        assert len(set(question.continuations)) == 4
        assert question.right in range(4)


def test_the_remote_tokenizer_is_the_tokenizer(client: LmEvalClient) -> None:
    library = build_library_tokenizer()
    assert client.encode(client.info["eos_token"]) == [library.token_to_id("<eos>")]
    for question in questions()[::10]:
        tokens = client.encode(question.context)
        assert tokens == library.encode(question.context, add_special_tokens=False).ids
        assert tokens[0] == library.token_to_id(client.info["bos_token"])
        assert client.decode(tokens) == question.context


def test_every_score_is_that_of_the_model_in_this_process(client: LmEvalClient) -> None:
    some = questions()[::4]
    pairs = [(question.context, continuation) for question in some for continuation in question.continuations]
    scores = client.loglikelihood(pairs, batch_size=16)
    reference = Reference(
        tiny_runner(cache_plan(tiny_config().kv_cache_spec(BLOCK_SIZE, 4))), build_library_tokenizer()
    )
    comparison = compare(reference, some, [scores[first : first + 4] for first in range(0, len(scores), 4)])
    print(comparison.line())
    assert comparison.num_continuations == 100
    assert comparison.largest_difference < TOLERANCE, comparison.line()
    assert comparison.accuracy == comparison.reference_accuracy
    assert not comparison.wrong_flags
