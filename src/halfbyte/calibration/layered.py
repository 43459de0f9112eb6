"""A transformers model that is in memory one layer at a time.

The model is built without weights. Each layer of its stack stands as a stub; the model's own forward, run with stubs,
gives the inputs of the first layer, what every layer gets besides them (positions, masks), and in the end the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from halfbyte.calibration.watch import StopForwardError
from halfbyte.calibration.weights import Part, Weights, fill
from halfbyte.errors import ModelCodeError, UnsupportedError

Places = dict[tuple[int, int], tuple[str, ...]]
Besides = tuple[tuple[Any, ...], dict[str, Any]]


class Stub(torch.nn.Module):
    """Stands for a layer: remembers what it gets and passes the hidden states on, or puts others in their place."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its parameters have no memory
        self.got: dict[int, Besides] = {}
        """Windows in a batch → what the layer got besides the states."""
        self.put: torch.Tensor | None = None
        self.states: torch.Tensor | None = None
        self.last = False
        """Whether the model stops here unless there are states to put: nothing behind it is wanted."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.states, self.got[len(hidden)] = hidden, (args, kwargs)
        if self.last and self.put is None:
            raise StopForwardError
        return hidden if self.put is None else self.put


class LayeredModel:
    """A decoder of transformers with the weights of a checkpoint."""

    def __init__(self, weights: Weights, device: str = "cpu") -> None:
        self.weights = weights
        self.device = torch.device(device)
        self.model = _empty(weights)
        self.prefix, self.layers = _stack(self.model, weights)
        self._inner = self._names_of_layers()
        self._stubs = [Stub(layer) for layer in self.layers]
        self._stubs[-1].last = True
        holder, _, last = self.prefix.rpartition(".")
        setattr(self.model.get_submodule(holder), last, torch.nn.ModuleList(self._stubs))
        self._fill_rest()
        self.model.to(self.device).eval()

    def _names_of_layers(self) -> list[dict[str, str]]:
        """Per layer: parameter within the layer → its name in the model."""
        return [
            {name: f"{self.prefix}.{number}.{name}" for name, _ in layer.named_parameters()}
            for number, layer in enumerate(self.layers)
        ]

    def _fill_rest(self) -> None:
        """Give memory to what is in no layer: embeddings, norms, the head."""
        with torch.no_grad():
            tied: dict[int, torch.nn.Parameter] = {}
            for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
                made = tied.get(id(parameter))
                if made is None:
                    made = torch.nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
                    parts = self.weights.parts.get(name)
                    if parts is None:
                        raise UnsupportedError(f"{self.weights.checkpoint.path} has no tensor for {name}")
                    fill(made, parts, {}, name)
                    tied[id(parameter)] = made
                holder, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(holder), last, made)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def linears(self, number: int) -> list[str]:
        """The linear layers of a layer, by their names on disk."""
        names = self._inner[number].values()
        return [part.module for name in names for part in self.weights.parts.get(name, ()) if part.module]

    @contextmanager
    def layer(self, number: int, replace: Mapping[str, torch.Tensor] | None = None) -> Iterator[Layer]:
        """A layer with its weights, as long as the block lasts. replace: linear layer → other values of its weight."""
        module, names = copy.deepcopy(self.layers[number]), self._inner[number]
        parameters: dict[str, torch.Tensor] = {}
        places: Places = {}
        for inner, name in names.items():
            shape = module.get_parameter(inner).shape
            parts = self.weights.parts.get(name)
            if parts is None:
                raise UnsupportedError(f"{self.weights.checkpoint.path} has no tensor for {name}")
            values = torch.empty(shape, device=self.device)
            fill(values, parts, replace or {}, name)
            parameters[inner] = values
            places |= _places(values, parts)
        _buffers_to(module, self.device)
        linears = {part.module: part for name in names.values() for part in self.weights.parts[name] if part.module}
        yield Layer(module, parameters, places, self._stubs[number].got, linears)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The inputs of the first layer for windows, (windows, length, width). Also what layers get besides."""
        with suppress(StopForwardError):
            self._forward(tokens)
        states = self._stubs[0].states
        assert states is not None
        return states

    def logits(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the model makes of the outputs of its last layer, (windows, length, vocabulary), float32."""
        self._stubs[-1].put = states
        try:
            logits: torch.Tensor = self._forward(tokens).logits.float()
            return logits
        finally:
            self._stubs[-1].put = None

    def _forward(self, tokens: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(tokens.to(self.device), use_cache=False)


class Layer:
    """One layer with its weights."""

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: dict[str, torch.Tensor],
        places: Places,
        besides: Mapping[int, Besides],
        parts: Mapping[str, Part],
    ) -> None:
        self.module, self.parameters, self.places, self.besides = module, parameters, places, besides
        self.parts = parts
        """Linear layer on disk → where its weight is."""
        for name, values in parameters.items():
            holder, _, last = name.rpartition(".")
            module.get_submodule(holder)._parameters[last] = torch.nn.Parameter(values, requires_grad=False)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The outputs for a batch (windows, length, width). Safe to call from several threads."""
        args, kwargs = self.besides[len(states)]
        with torch.no_grad():
            out = self.module(states, *args, **kwargs)
        states_out: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return states_out

    def copy(self) -> Layer:
        """The same layer with memory of its own."""
        parameters = {name: values.clone() for name, values in self.parameters.items()}
        storages = {
            values.untyped_storage().data_ptr(): parameters[name].untyped_storage().data_ptr()
            for name, values in self.parameters.items()
        }
        places = {(storages[storage], start): names for (storage, start), names in self.places.items()}
        return Layer(copy.deepcopy(self.module), parameters, places, self.besides, self.parts)

    def weight(self, module: str) -> torch.Tensor:
        """The place of a linear layer's weight, (outputs, inputs): a view into its parameter."""
        part = self.parts[module]
        for values in self.parameters.values():
            for key in _places(values, [part]):
                if module in self.places.get(key, ()):
                    return _view(values, part)
        raise KeyError(module)


def _view(values: torch.Tensor, part: Part) -> torch.Tensor:
    place = values if part.expert is None else values[part.expert]
    place = place.T if part.transposed else place
    return place[part.rows]


def _places(values: torch.Tensor, parts: Sequence[Part]) -> Places:
    """Where products see the weights of a parameter: its start, or that of each expert."""
    found: Places = {}
    storage = values.untyped_storage().data_ptr()
    for part in parts:
        if part.module:
            start = int(values.storage_offset() if part.expert is None else values[part.expert].storage_offset())
            found[storage, start] = (*found.get((storage, start), ()), part.module)
    return found


def _buffers_to(module: torch.nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for name, buffer in list(child.named_buffers(recurse=False)):
            if buffer.device != device:
                child._buffers[name] = buffer.to(device)


def _empty(weights: Weights) -> Any:
    """The model without memory for its parameters; buffers are real, because they are computed and not loaded."""
    try:
        import transformers
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise UnsupportedError("this needs transformers 5 and torch; install halfbyte[calibrate]") from error
    transformers.logging.set_verbosity_error()
    path = weights.checkpoint.path
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._experts_implementation = "eager"
        register = torch.nn.Module.register_parameter

        def on_meta(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:  # one that is tied stays one
                parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            register(self, name, parameter)

        torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            with no_init_weights():
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                model.tie_weights()
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise ModelCodeError(f"{path}: transformers cannot build this model: {error}") from error
    return model.eval()


def _stack(model: Any, weights: Weights) -> tuple[str, list[torch.nn.Module]]:
    """The list of layers: that of the decoder, with as many as the config says."""
    count = weights.model.layers
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == count
            and not name.startswith(("vision", "audio"))
        ):
            return name, list(module)
    raise UnsupportedError(f"{weights.checkpoint.path}: {type(model).__name__} has no list of {count} layers")
