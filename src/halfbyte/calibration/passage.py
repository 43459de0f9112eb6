"""A batch on its way through a layer, which waits before linear layers until their weights are decided."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from halfbyte.calibration.layered import Layer
from halfbyte.calibration.watch import StopForwardError, Watch

Waits = Callable[[str], bool]
"""Whether a batch waits before a linear layer. Asked whenever a batch comes to one."""


class Passage:
    """One batch in one layer. The layer's own code runs in a thread that stands still while others work.

    `to` goes on to a linear layer and gives its input, `finish` gives the layer's output. `forget` lets go of what the
    thread holds; the next call then starts at the layer's input again.
    """

    def __init__(self, layer: Layer, states: Callable[[], torch.Tensor], waits: Waits) -> None:
        self.layer, self.states, self.waits = layer, states, waits
        self._thread: threading.Thread | None = None
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._given_up = False
        self._at: tuple[str, torch.Tensor] | None = None
        self._output: torch.Tensor | None = None
        self._error: BaseException | None = None

    def to(self, module: str) -> torch.Tensor | None:
        """The inputs (tokens, K) of a linear layer; None if the batch waits elsewhere or goes by."""
        self._advance()
        return self._at[1] if self._at is not None and self._at[0] == module else None

    def finish(self) -> torch.Tensor:
        """The layer's output. No linear layer may wait any more."""
        self._advance()
        if self._output is None:
            raise RuntimeError(f"the batch still waits before {self._at[0] if self._at else 'the layer'}")
        return self._output

    def forget(self) -> None:
        """End the thread."""
        if self._thread is not None and self._thread.is_alive():
            self._given_up = True
            self._go.release()
            self._thread.join()
        self._thread, self._at, self._output, self._given_up = None, None, None, False

    def _advance(self) -> None:
        """Go on to the next linear layer that waits, or to the end."""
        if self._output is not None or (self._at is not None and self.waits(self._at[0])):
            return
        self._at = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="halfbyte-passage", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stands.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            self.forget()
            raise error

    def _run(self) -> None:
        try:
            with Watch(self.layer.places, self._visit):
                self._output = self.layer(self.states())
        except StopForwardError:
            return
        except BaseException as error:
            self._error = error
        self._stands.release()

    def _visit(self, module: str, x: torch.Tensor, again: bool) -> None:
        if self.waits(module):
            self._at = (module, x)
            self._stands.release()
            self._go.acquire()
            if self._given_up:
                raise StopForwardError
