"""Compiled loops on torch's own OpenMP threads.

After a matrix product torch's OpenMP workers spin for a while, waiting for the next one. A second pool (numba's, or
plain threads) has to fight them for the cores; a team of the same pool starts within a microsecond or two. So a kernel
here is one C function which every thread of a team runs, and the threads share its tasks through an atomic counter.

numba knows a cached kernel by its own file's time stamp, though code of other files is inlined into it. So the cache
lies in a folder named after the contents of every kernel file.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from workers.engine.api.cache_directory import cache_directory, make_cache
from workers.engine.api.phases import ONCE, phase
from workers.engine.state import drawn

F = TypeVar("F", bound=Callable[..., Any])
Launch = Callable[[int, Any, int], None]

CLAIMED, TASKS, ARGUMENTS = 0, 1, 2
"""Where a kernel's block keeps the number of claimed tasks, the number of tasks, and its first own argument."""

GRAIN = 16384
"""Numbers per thread: for less, starting a second thread costs more than it saves, much more on a busy machine."""

log = logging.getLogger(__name__)
_compiling = threading.Lock()


@dataclass(slots=True)
class _Compiled:
    """What compiling took in this process so far."""

    seconds: float = 0.0
    kernels: int = 0
    """Those that no cache had."""


_compiled = _Compiled()


def working_clock() -> float:
    """Seconds by a clock that stands still while kernels compile: what is timed with it is the work itself."""
    return time.perf_counter() - _compiled.seconds


def inlined(function: F) -> F:
    """Compile `function` for use inside a kernel, always inlined: constants fold and vectors stay in registers.

    Strict IEEE arithmetic (no fastmath): the bits of a result must not depend on what the optimiser sees around it.
    """
    return cast(F, numba.njit(forceinline=True, error_model="numpy")(function))


def spliced(function: F) -> F:
    """`inlined` for large functions called in one place: pasted before the optimiser runs, it is compiled only once."""
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make `emit(builder, *values)`, which writes LLVM code, callable from kernels as `result(*parameters)`."""

    def define(emit: Callable[..., Any]) -> Any:
        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typed(typing_context: Any, *arguments: Any) -> Any:
            return result(*parameters), lower

        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        typed.__name__ = emit.__name__
        return intrinsic(typed)

    return define


_BLOCK: Any = types.CPointer(types.int64)


@operation(types.int64, _BLOCK)
def claim(builder: Any, block: Any) -> Any:
    """Take the next task: atomically `block[CLAIMED]++`. From `block[TASKS]` on there is nothing left to do."""
    return builder.atomic_rmw("add", block, ir.Constant(ir.IntType(64), 1), "monotonic")


class Kernel:
    """A parallel loop: `body(block)` runs once per thread and claims tasks until none is left.

    `block` is an int64 pointer: claimed tasks, number of tasks, then the call's arguments (integers and addresses).
    Compiled on first use and cached on disk; holds no lock and no GIL while it runs, so any Python threads may call it
    at the same time (each is the master of its own OpenMP team).
    """

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self._compiled: Any = None

    def __call__(self, tasks: int, *arguments: int, numbers: int = GRAIN) -> None:
        """Run `tasks` tasks on up to `torch.get_num_threads()` threads and wait for them.

        `numbers` says how many numbers the call reads in all: under GRAIN one thread does the work.
        """
        block = (ctypes.c_int64 * (ARGUMENTS + len(arguments)))(0, tasks, *arguments)
        threads = min(torch.get_num_threads(), tasks) if numbers >= GRAIN else min(1, tasks)
        if threads > 1:
            _launcher()(self.compile(), block, threads)
        elif threads == 1:
            _entry(self.compile())(block)

    def compile(self) -> int:
        """Address of the machine code, compiled or loaded from the cache on first use."""
        if self._compiled is None:
            with _compiling:
                # The object owns the code: a second one must never replace it while a thread runs the first.
                if self._compiled is None:
                    self._compiled = self._compile()
        return self._compiled.address  # type: ignore[no-any-return]

    def _compile(self) -> Any:
        started = time.perf_counter()
        try:
            if self._is_cached:
                return self._build()
            with phase(f"compiling kernels ({ONCE})") as compiling:
                compiling.progress = f"{_compiled.kernels} done" if _compiled.kernels else ""
                kernel = self._build()
                _compiled.kernels += 1
                return kernel
        finally:
            _compiled.seconds += time.perf_counter() - started

    @property
    def _is_cached(self) -> bool:
        """By the names that numba gives to its index files."""
        folder = _cache_folder()
        return folder is not None and any(folder.rglob(f"*.{self._body.__qualname__}-*.nbi"))

    def _build(self) -> Any:
        folder = _cache_folder()
        # Nothing but the decoration reads the setting; _compiling keeps other kernels out meanwhile.
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder or "")
        try:
            return numba.cfunc(types.void(_BLOCK), cache=folder is not None, error_model="numpy")(self._body)
        finally:
            numba.config.CACHE_DIR = before


def run_rows(kernel: Kernel, rows: int, width: int, *arguments: int) -> None:
    """Run a kernel whose tasks are some of `rows` rows of `width` numbers each.

    Its arguments are the number of rows, rows per task, the width, then `arguments`.
    """
    each = max(1, GRAIN // width)
    kernel(-(-rows // each), rows, each, width, *arguments)


@cache
def _cache_folder() -> Path | None:
    """Where kernels of exactly this source are cached; None when nothing can be written there."""
    digest = blake2b(digest_size=8)
    # Kernels have the constants of `drawn` compiled into them.
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(drawn.__file__)):
        digest.update(source.read_bytes())
    folder = cache_directory() / "kernels" / digest.hexdigest()
    try:
        make_cache(folder)
    except OSError as error:
        log.warning("kernels are compiled at every start: cannot write %s (%s); set NIGHTDRAFT_CACHE", folder, error)
        return None
    return folder


@cache
def _entry(address: int) -> Callable[[Any], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _launcher() -> Launch:
    """`GOMP_parallel` as libtorch_cpu itself resolves it: from libgomp, or from a libomp, which offers it too."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return lambda address, block, threads: parallel(address, block, threads, 0)
    log.warning("torch's OpenMP runtime was not found: kernels run on Python threads, which start more slowly")
    return _on_python_threads


def _on_python_threads(address: int, block: Any, threads: int) -> None:
    helpers = [_python_threads().submit(_entry(address), block) for _ in range(threads - 1)]
    _entry(address)(block)
    for helper in helpers:
        # A helper which is still queued would find no task left, so only those under way are worth waiting for.
        if not helper.cancel():
            helper.result()


@cache
def _python_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1), thread_name_prefix="kernel")
