"""Operations of torch whose bits depend on the number of rows, made independent of it, for any model's own code.

On the CPU three kinds of operation depend on it. float32 products are given to kernels that sum in another order for
another number of rows: here they run on prepacked weights (`linear`). Functions such as sigmoid are computed in whole
vectors, with another approximation for the numbers left over where a thread's share ends: here the numbers are padded
until nothing is left over. Rounded elementwise functions of bfloat16 are padded likewise. Exact arithmetic, exp, sin,
tanh and reductions along a row need nothing; `invariance.self_test` has the last word.

A model's code is not changed. A first pass notes which modules call such operations themselves; those modules then run
inside a torch function mode, which belongs to the running thread and to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workers.engine.models.layers.linear import Linear, can_pack, pack

Operation = Callable[..., Any]

GRAIN = 32768
"""Numbers below which torch gives an elementwise operation to one thread, and the least that a thread gets."""
GELU_GRAIN = 16384
"""Numbers above which torch shares a gelu among all threads."""
STRIDE = 128
"""Bytes that torch's elementwise loops take at a time, two of the widest vectors; what is left over goes one by one."""
EXACT_POWERS = {-2, -1, -0.5, 0, 0.5, 1, 2, 3}
"""Exponents which torch gives to exactly rounded arithmetic in float32."""

PRODUCTS: dict[Operation, str] = {
    functional.linear: "linear",
    torch.addmm: "addmm",
    **dict.fromkeys((torch.mm, torch.Tensor.mm, torch.matmul, torch.Tensor.matmul), "matmul"),
    **dict.fromkeys((torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm), "matmul"),
}
POWERS = {torch.pow, torch.Tensor.pow, torch.Tensor.__pow__}
INVERSE_ROOTS = {torch.rsqrt, torch.Tensor.rsqrt}
APPROXIMATED: set[Operation] = {
    torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, functional.sigmoid,
    functional.silu, functional.gelu, functional.softplus, functional.mish,
    torch.exp2, torch.Tensor.exp2, torch.special.exp2, torch.sinh, torch.Tensor.sinh, torch.cosh, torch.Tensor.cosh,
    torch.logit, torch.Tensor.logit, torch.special.logit, torch.logaddexp, torch.Tensor.logaddexp,
}  # fmt: skip
IN_PLACE: dict[Operation, Operation] = {
    torch.Tensor.sigmoid_: torch.sigmoid,
    torch.sigmoid_: torch.sigmoid,
    torch.Tensor.pow_: torch.pow,
    torch.Tensor.exp2_: torch.exp2,
}


def make_rowwise(model: nn.Module, run: Callable[[], Any]) -> None:
    """Let a row's bits not depend on the other rows wherever a module's own code could make them.

    `run` passes a few tokens through the model, as it will be used.
    """
    seen = _Observed()
    with seen.watching(model), seen:
        run()
    mode = Rowwise(model)
    for module in model.modules():
        # By class: an expert that no token of the first pass went to runs the same code as its neighbours.
        if type(module) in seen.classes:
            setattr(module, "forward", _inside(mode, module.forward))  # noqa: B010 (mypy knows forward as a method)


class Rowwise(TorchFunctionMode):
    """While it is entered, the operations of the tables above are computed row by row. For one thread at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.entered = False
        self._constants = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
        self._packed: dict[tuple[Any, ...], Linear] = {}

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not _depends_on_rows(func, args):
            return func(*args, **options)
        if func in PRODUCTS:
            return self._product(PRODUCTS[func], func, args, options)
        return _elementwise(func, args, options)

    def _product(self, kind: str, func: Operation, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if kind == "linear":
            weight, bias = _argument(args, options, 1, "weight"), _argument(args, options, 2, "bias")
            return self._multiply(args[0], weight, bias)
        if options:
            return func(*args, **options)
        if kind == "addmm":
            return self._multiply(args[1], args[2].t(), None).add_(args[0])
        x, weight = args
        if weight.dim() == 2:
            return self._multiply(x, weight.t(), None)
        return torch.stack([self._multiply(x[i], weight[i].t(), None) for i in range(len(weight))])

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] W^T + b for a weight of [N, K]."""
        key = (weight.data_ptr(), weight.shape, weight.stride())
        linear = self._packed.get(key)
        if linear is None:
            linear = pack([weight])
            if weight.untyped_storage().data_ptr() in self._constants:
                self._packed[key] = linear
        if not x.numel():
            return x.new_empty(*x.shape[:-1], len(weight))
        out = linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return out if bias is None else out.add_(bias)


def _inside(mode: Rowwise, forward: Operation) -> Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        if mode.entered:
            return forward(*args, **kwargs)
        mode.entered = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            mode.entered = False

    return run


class _Observed(TorchFunctionMode):
    """Notes the classes of modules whose own code calls an operation that depends on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: set[type] = set()
        self._running: list[nn.Module] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        hooks = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(module)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and _depends_on_rows(func, args):
            self.classes.add(type(self._running[-1]))
        return func(*args, **(kwargs or {}))


def _depends_on_rows(func: Operation, args: tuple[Any, ...]) -> bool:
    if not any(isinstance(arg, torch.Tensor) for arg in args):
        return False
    if func in PRODUCTS:
        return _is_product_of_weights(PRODUCTS[func], args)
    if func in POWERS:
        exponent = args[1]
        exact = isinstance(exponent, int | float) and exponent in EXACT_POWERS
        return not exact or (exponent == -0.5 and args[0].dtype is torch.bfloat16)
    if func in INVERSE_ROOTS:
        return args[0].dtype is torch.bfloat16
    return func in APPROXIMATED or func in IN_PLACE


def _is_product_of_weights(kind: str, args: tuple[Any, ...]) -> bool:
    """Whether the second factor can be packed: one matrix, or one for each of a batch of matrices."""
    factors = args[1:3] if kind == "addmm" else args[:2]
    if len(factors) < 2 or not all(isinstance(factor, torch.Tensor) for factor in factors):
        return False
    x, weight = factors
    if kind == "matmul" and weight.dim() == 3:
        # An outer product sums nothing (rotary angles).
        return x.dim() == 3 and len(x) == len(weight) and weight.shape[1] > 1 and can_pack(weight)
    return x.dim() > 1 and weight.dim() == 2 and x.dtype is weight.dtype and can_pack(weight)


def _argument(args: tuple[Any, ...], options: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else options.get(name)


def _elementwise(func: Operation, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """An elementwise operation such that each number is computed in a whole vector, wherever it lies."""
    if func in IN_PLACE:
        return args[0].copy_(_elementwise(IN_PLACE[func], args, options))
    if options.get("inplace"):
        return args[0].copy_(_elementwise(func, args, {**options, "inplace": False}))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if len(tensors) == 1 and _is_whole(func, tensors[0]):
        return func(*args, **options)
    spread = iter(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    flat = [_padded(func, next(spread)) if isinstance(arg, torch.Tensor) else arg for arg in args]
    shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return func(*flat, **options)[: shape.numel()].view(shape)


def _padded(func: Operation, x: torch.Tensor) -> torch.Tensor:
    """The numbers of x in one row, followed by ones until no thread has any left over."""
    unit, count = STRIDE // x.element_size(), x.numel()
    room = -(-count // unit) * unit
    while not _divides(func, room, unit):
        room += unit
    flat = x.new_empty(room)
    flat[:count] = x.reshape(-1)
    flat[count:] = 1
    return flat


def _is_whole(func: Operation, x: torch.Tensor) -> bool:
    """Whether torch's loops over x leave no number over already."""
    unit = STRIDE // x.element_size()
    rows_are_whole = x.dim() > 0 and x.stride(-1) == 1 and x.shape[-1] % unit == 0
    return (rows_are_whole or x.is_contiguous()) and _divides(func, x.numel(), unit)


def _divides(func: Operation, count: int, unit: int) -> bool:
    """Whether every thread's share of `count` numbers is made of whole units."""
    threads = torch.get_num_threads()
    shares = min(threads, -(-count // GRAIN))
    if func is functional.gelu:
        shares = threads if count > GELU_GRAIN else 1
    return count % unit == 0 and (shares < 2 or -(-count // shares) % unit == 0)
