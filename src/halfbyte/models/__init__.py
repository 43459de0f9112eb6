"""What a model is, from its config and the names of its tensors. No model code runs.

`architectures` is a table of what transformers' classes consist of; `roles` goes by names where the table has nothing.
`names` reads the name of a module, `partners` knows what servers fuse, `experts` how stacks lie, `families` which
linear layers stay unquantized, `limits` and `transformers_limits` what readers cannot load. `Model` is all of it for
one model. `describe_model` asks a model itself and needs torch; `from_model` does so in a process of its own.
"""

from halfbyte.models.model import Model, model_of

__all__ = ["Model", "model_of"]
