"""A Ray cluster: connected to, asked what its nodes see, and given tasks. The one module that imports Ray.

Ray schedules the tasks, and runs those again whose worker or node died. Here is what Ray does not know: that only so
many tasks may be handed in at once, and which nodes have the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import halfbyte
from halfbyte.errors import CheckpointError, HalfbyteError, InputError, UnsupportedError
from halfbyte.scale.in_flight import Lost

RETRIES = 4
"""How often Ray runs a task again whose worker died, or that raised what it should not."""
PROBE_SECONDS = 120.0
"""How long nodes may take to start a process that answers."""
POLL = 0.5
"""Seconds after which the driver looks up from waiting."""

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Which cluster, and what each task takes of it."""

    address: str = "auto"
    """auto: the one that runs here, or RAY_ADDRESS. local: started for this command, on this machine alone."""
    cpus: int = 1
    gpus: float = 0
    """Of each task; a fraction shares a GPU."""
    memory: int = 0
    max_tasks: int | None = None
    """Tasks that are handed in at once. None: twice as many as can run."""

    def __post_init__(self) -> None:
        if self.gpus < 0 or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise InputError(f"--num-gpus-per-task {self.gpus:g}: a fraction of one GPU, or a whole number of them")
        if self.max_tasks is not None and self.max_tasks < 1:
            raise InputError(f"--max-tasks {self.max_tasks}: at least one task must be allowed")

    @property
    def wanted(self) -> dict[str, float]:
        """What a task asks a node for."""
        asked = {"CPU": float(self.cpus), "GPU": self.gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in asked.items() if amount}


@dataclass(frozen=True)
class Node:
    """A node and what it sees of the files."""

    id: str
    host: str
    resources: Mapping[str, float]
    seen: Any = None
    """What the question to all nodes gave."""


@dataclass
class Cluster:
    """A connection. Tasks are functions of this package with arguments that can be pickled."""

    ray: Any
    settings: Settings
    _functions: dict[Any, Any] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """The nodes that are alive and could run a task at some time."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        found = [Node(node["NodeID"], node["NodeManagerHostname"], node["Resources"]) for node in alive]
        return [node for node in found if self._places(node)]

    def _places(self, node: Node) -> int:
        """Tasks that a node can run at the same time."""
        wanted = self.settings.wanted
        return min((int(node.resources.get(name, 0) / amount + 1e-9) for name, amount in wanted.items()), default=1)

    def places(self) -> int:
        """Tasks that all nodes can run at the same time. Raises if there is none."""
        count = sum(map(self._places, self.nodes()))
        if not count:
            wanted = ", ".join(f"{name} {amount:g}" for name, amount in self.settings.wanted.items())
            largest = self.ray.cluster_resources()
            there = ", ".join(f"{name} {largest.get(name, 0):g}" for name in self.settings.wanted)
            raise CheckpointError(
                f"no node of the Ray cluster can run a task: each asks for {wanted}; all nodes together have {there}. "
                "Lower --workers, --max-memory or --num-gpus-per-task"
            )
        return count

    def limit(self) -> int:
        """Tasks that may be handed in at once."""
        return self.settings.max_tasks or 2 * self.places()

    def ask_all(self, question: Callable[..., T], *arguments: Any) -> list[Node]:
        """Ask every node, and give each with its answer. Raises if halfbyte is missing or another one there."""
        nodes = self.nodes()
        function = self.ray.remote(num_cpus=0, max_retries=1)(_answer)
        refs = [function.options(scheduling_strategy=self._on(node.id)).remote(question, arguments) for node in nodes]
        done, _ = self.ray.wait(refs, num_returns=len(refs), timeout=PROBE_SECONDS)
        answered = []
        for node, ref in zip(nodes, refs, strict=True):
            if ref not in done:
                continue  # a node that starts no process is not counted on
            try:
                version, answer = self.ray.get(ref)
            except Exception as error:
                if self._is_lost(error):
                    continue
                raise CheckpointError(
                    f"{node.host} cannot run tasks: {_last_line(error)}. Install halfbyte {halfbyte.__version__} for "
                    "the Python of the cluster"
                ) from error
            if version != halfbyte.__version__:
                raise CheckpointError(
                    f"{node.host} has halfbyte {version}, and this process {halfbyte.__version__}; install the same one"
                )
            answered.append(Node(node.id, node.host, node.resources, answer))
        if not answered:
            raise CheckpointError("no node of the Ray cluster answered; see `ray status`")
        return answered

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def submit(self, function: Callable[..., Any], *arguments: Any, node: str | None = None) -> Any:
        """Hand in a task, for that node or for any."""
        if function not in self._functions:
            self._functions[function] = self.ray.remote(
                num_cpus=self.settings.cpus,
                num_gpus=self.settings.gpus,
                memory=self.settings.memory or None,
                max_retries=RETRIES,
                retry_exceptions=True,
                scheduling_strategy="SPREAD",
            )(function)
        remote = self._functions[function]
        if node is not None:
            remote = remote.options(scheduling_strategy=self._on(node))
        return remote.remote(*arguments)

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Those that are done; none if that takes longer than a moment."""
        done, _ = self.ray.wait(list(handles), num_returns=1, timeout=POLL)
        return list(done)

    def result(self, handle: Any) -> Any:
        """What a task gave. Lost: its node went away. CheckpointError: it failed, again and again."""
        try:
            return self.ray.get(handle)
        except HalfbyteError:
            raise
        except Exception as error:
            if self._is_lost(error):
                raise Lost(_last_line(error)) from error
            raise CheckpointError(
                f"a task failed {RETRIES + 1} times: {_last_line(error)}. What is finished is kept; the same command "
                "continues from there"
            ) from error

    def cancel(self, handles: Sequence[Any]) -> None:
        """Stop tasks, running or not."""
        for handle in handles:
            with contextlib.suppress(Exception):
                self.ray.cancel(handle, force=True)

    def share(self, value: Any) -> Any:
        """Put a value where every node can get it; tasks that are given the handle get the value."""
        return self.ray.put(value)

    def _is_lost(self, error: Exception) -> bool:
        """Whether a task never ran to its end because its node is gone."""
        from ray import exceptions

        kinds = ("TaskUnschedulableError", "NodeDiedError")
        return isinstance(error, tuple(getattr(exceptions, kind) for kind in kinds if hasattr(exceptions, kind)))


@contextlib.contextmanager
def connect(settings: Settings) -> Iterator[Cluster]:
    """Connect to a cluster, as long as the block lasts. Raises if Ray is not installed or no cluster is found."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    # Ray will stop changing this variable; asked for now, it is quiet about it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("--engine ray needs Ray; install halfbyte[ray]") from error
    mine = not ray.is_initialized()
    if mine:
        try:
            ray.init(
                address=settings.address,
                include_dashboard=False if settings.address == "local" else None,
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise CheckpointError(
                f"no Ray cluster at --address {settings.address}: {_last_line(error)}. Start one (`ray start --head`), "
                "give its HOST:PORT, or --address local for one on this machine alone"
            ) from error
    try:
        with _quiet(ray):
            yield Cluster(ray, settings)
    finally:
        if mine:
            ray.shutdown()


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep Ray from printing on standard output, which is for our own lines: its logs have what it says of retries."""
    worker, name = ray._private.worker, "print_to_stdstream"
    printed = getattr(worker, name, None)
    if printed is not None:
        setattr(worker, name, lambda *arguments, **named: None)
    try:
        yield
    finally:
        if printed is not None:
            setattr(worker, name, printed)


def _answer(question: Callable[..., T], arguments: Sequence[Any]) -> tuple[str, T]:
    return halfbyte.__version__, question(*arguments)


def _last_line(error: BaseException) -> str:
    """The last line of an error that says something, without its colours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
