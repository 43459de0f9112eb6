"""Ask vLLM whether checkpoints load, as `halfbyte verify --load vllm` does. Runs in vLLM's own environment.

    python vllm_load_client.py OUTPUT.json DIRECTORY…

vLLM is imported once; each directory is a forked process, so that what one leaves behind does not meet the next.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def asked(directory: str) -> Any:
    """The answer of one process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "answer.json")
        child = os.fork()
        if not child:
            try:
                found = import_module("halfbyte.load_check.in_vllm").load(directory, "known")
                output.write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return json.loads(output.read_text()) if output.exists() else None


def main() -> None:
    output, *directories = sys.argv[1:]
    import_module("vllm.model_executor.models.registry")
    import_module("halfbyte.load_check.in_vllm")
    Path(output).write_text(json.dumps({directory: asked(directory) for directory in directories}))


if __name__ == "__main__":
    main()
