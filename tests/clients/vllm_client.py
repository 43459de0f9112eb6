"""Load checkpoints with vLLM and write the log-probabilities that it computes. Runs in vLLM's own environment.

    python vllm_client.py JOBS.json

JOBS.json: [{"checkpoint": DIR, "output": FILE.npy, "activations": true}, …]. vLLM is imported once; each job is a
forked process, so that one that fails leaves the others alone. Beside each output lies FILE.log with what vLLM said.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPTS, LENGTH = 4, 24


def log_probabilities(checkpoint: str, activations: bool) -> Any:
    """Of every next token at every place of fixed random prompts: [prompts · (length - 1), vocabulary]."""
    numpy, vllm = import_module("numpy"), import_module("vllm")
    import_module("vllm_kernels").install(activations)
    model = vllm.LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2 * LENGTH,
        max_num_seqs=PROMPTS,
        max_logprobs=-1,
    )
    words = model.llm_engine.model_config.get_vocab_size()
    prompts = numpy.random.default_rng(5).integers(2, words, (PROMPTS, LENGTH)).tolist()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    places = [place for answer in answers for place in answer.prompt_logprobs[1:]]
    return numpy.array([[place[word].logprob for word in range(words)] for place in places], numpy.float32)


def run_job(job: dict[str, Any]) -> int:
    """One job in a process of its own; its output goes to the log."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        log = os.open(Path(job["output"]).with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import_module("numpy").save(job["output"], log_probabilities(job["checkpoint"], job["activations"]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    os.environ.update(SETTINGS)
    import_module("vllm.model_executor.models.registry")
    import_module("vllm_kernels")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(job["checkpoint"], "failed" if run_job(job) else "done", flush=True)


if __name__ == "__main__":
    main()
