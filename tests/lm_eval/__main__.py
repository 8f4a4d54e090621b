"""``python -m tests.lm_eval``: lm-eval scores the task over HTTP, with the server's own tokenizer, and every
log-probability must be that of the same weights in this process. Prints one line; exit code 1 when one is
not."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.lm_eval.comparison import TOLERANCE, compare
from tests.lm_eval.reference import Reference
from tests.lm_eval.task import FOLDER, TASK, Question, questions
from tests.served import served

Result = tuple[float, bool]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lm_eval", description=__doc__)
    parser.add_argument("--program", default="lm_eval", help="lm-eval's command")
    parser.add_argument("--model", help="model to serve; default: the demo model")
    parser.add_argument(
        "--serve-arguments",
        default="--dtype float32 --quantization none",
        metavar="TEXT",
        help="more arguments for 'gemserve serve'; default: weights and arithmetic of the reference",
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="of a continuation's log-probability"
    )
    arguments = parser.parse_args()
    program = shutil.which(arguments.program)
    if program is None:
        parser.error(f"--program {arguments.program} is not there; 'make lm-eval-test' installs it")
    with (
        served(arguments.model, arguments.serve_arguments) as url,
        tempfile.TemporaryDirectory(prefix="gemserve-lm-eval-") as folder,
    ):
        results = _run(os.path.abspath(program), url, Path(folder))
    comparison = compare(Reference.load(arguments.model), questions(), results)
    print(comparison.line(), flush=True)
    for text in comparison.wrong_flags:
        print(f"lm-eval: wrong greedy flag: {text!r}", file=sys.stderr)
    return 1 if comparison.largest_difference > arguments.tolerance or comparison.wrong_flags else 0


def _run(program: str, url: str, folder: Path) -> list[list[Result]]:
    """What lm-eval found for each question. It needs no network but the server."""
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    options = {
        "model": name,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
    }
    command = [program, "run", "--model", "local-completions"]
    command += [
        "--model_args",
        ",".join(f"{key}={value}" for key, value in options.items()),
        "--batch_size",
        "16",
    ]
    command += ["--tasks", TASK, "--include_path", ".", "--log_samples", "--output_path", str(folder / "out")]
    print("lm-eval:", " ".join(command), flush=True)
    environ = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, cwd=FOLDER, env=environ, check=True)
    files = list((folder / "out").rglob("samples_*.jsonl"))
    assert len(files) == 1, files
    samples = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    return [_results(question, sample) for question, sample in zip(questions(), samples, strict=True)]


def _results(question: Question, sample: dict[str, object]) -> list[Result]:
    requests = sample["arguments"]
    assert isinstance(requests, dict)
    texts = [(request["arg_0"], request["arg_1"]) for request in requests.values()]
    assert texts == [(question.context, continuation) for continuation in question.continuations], texts
    responses = sample["filtered_resps"]
    assert isinstance(responses, list)
    return [(float(logprob), str(is_greedy) == "True") for logprob, is_greedy in responses]


if __name__ == "__main__":
    sys.exit(main())
