"""Whether transformers or vLLM would load a checkpoint: its names and shapes against a model without bytes.

`check` asks a process of its own, `in_transformers` and `in_vllm` are what runs there, `report` is the answer.
"""

from halfbyte.load_check.check import check_client, check_load
from halfbyte.load_check.report import CLIENTS, Client, LoadReport, Mismatch

__all__ = ["CLIENTS", "Client", "LoadReport", "Mismatch", "check_client", "check_load"]
