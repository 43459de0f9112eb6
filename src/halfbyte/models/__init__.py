"""What a model is, from its config and the names of its tensors. No model code runs.

`names` reads the name of a module, `partners` knows what servers fuse, `experts` how stacks lie, `families` what stays
unquantized. `Model` is all of it for one model.
"""

from halfbyte.models.model import Model, model_of

__all__ = ["Model", "model_of"]
