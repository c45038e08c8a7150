"""A GPU that this machine does not have: tensors stay on the CPU, and a mark says which of them
would lie on the GPU.

What CUDA refuses raises `WrongDevice` with the operation and the lines of branchgrpo that led to
it. Copies between CPU and GPU, and reads that make the CPU wait for the GPU, are listed in
`transfers`.
"""

import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import branchgrpo

PACKAGE = f"{Path(branchgrpo.__file__).parent}/"
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# operations whose tensor arguments may lie on two devices
COPIES = {
    "copy_",
    "copy",
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh",
    "set_",
    "_local_scalar_dense",
}
INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
# a CPU tensor of no dimension may join GPU tensors, but not here
STRICT = ("cat", "stack", "gather", "scatter", "index_select", "index_add", "embedding")
# the CPU must know a value, or how many there are
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "repeat_interleave",
}


class WrongDevice(RuntimeError):
    "An operation that CUDA would refuse."


@dataclass(frozen=True)
class Transfer:
    "A copy between CPU and GPU, or a wait for the GPU."

    kind: str  # upload, download or wait
    operation: str
    where: tuple[str, ...]  # lines of branchgrpo, innermost first

    def within(self, function: str) -> bool:
        "Whether it happened in a call of a function of branchgrpo."
        return any(line.endswith(f" {function}") for line in self.where)


class Marks:
    """Which storages would lie on the GPU.

    Marks outlive a `VirtualDevice`, so that its tensors stay where they are.
    """

    def __init__(self):
        self.storages: dict[int, StorageWeakRef] = {}

    def on_gpu(self, tensor: Tensor) -> bool:
        mark = self.storages.get(tensor.untyped_storage()._cdata)
        return mark is not None and not mark.expired()

    def device(self, tensor: Tensor) -> torch.device:
        return GPU if tensor.device == CPU and self.on_gpu(tensor) else tensor.device

    def put(self, tensor: Tensor, device: torch.device) -> None:
        storage = tensor.untyped_storage()
        if device.type == "cuda":
            self.storages[storage._cdata] = StorageWeakRef(storage)
        else:
            self.storages.pop(storage._cdata, None)
        if len(self.storages) % 10_000 == 9_999:
            self.storages = {key: mark for key, mark in self.storages.items() if not mark.expired()}


MARKS = Marks()


def tensors_of(values) -> list[Tensor]:
    "The tensors of nested arguments or results; without those that have no storage."
    if isinstance(values, Tensor):
        return [values] if values.device.type == "cpu" else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def lines_of_branchgrpo() -> tuple[str, ...]:
    "The lines of the package that led to the current operation, innermost first."
    frames = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
    inside = [(code, line) for code, line in frames if code.co_filename.startswith(PACKAGE)]
    return tuple(
        f"{code.co_filename.removeprefix(PACKAGE)}:{line} {code.co_name}" for code, line in inside
    )


def named_device(value) -> torch.device | None:
    "The device that an argument names, if it is one of the two."
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        value = torch.device(value)
    return value if isinstance(value, torch.device) and value.type in ("cpu", "cuda") else None


class VirtualDevice:
    "A context in which `GPU` can be used; `transfers` lists what it moves between the devices."

    def __init__(self):
        self.transfers: list[Transfer] = []
        self.within = CPU  # where a tensor lies that an operation makes out of nothing

    def __enter__(self) -> "VirtualDevice":
        self.modes = ExitStack()
        self.modes.enter_context(PythonCalls(self))
        self.modes.enter_context(Operations(self))
        return self

    def __exit__(self, *error) -> None:
        self.modes.close()

    def refuse(self, operation: str, values) -> None:
        found = ", ".join(f"{tuple(t.shape)} on {MARKS.device(t).type}" for t in tensors_of(values))
        raise WrongDevice(f"{operation}: {found}; at {' < '.join(lines_of_branchgrpo()[:4])}")

    def count(self, kind: str, operation: str) -> None:
        self.transfers.append(Transfer(kind, operation, lines_of_branchgrpo()))


class Operations(TorchDispatchMode):
    "Below autograd: checks the arguments of every operation and marks its results."

    def __init__(self, device: VirtualDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # here a tensor's device is the real one
            return self.run(func, args, kwargs or {})

    def run(self, func, args: tuple, kwargs: dict):
        "Carry out an operation, and mark what it makes."
        name = func._schema.name.removeprefix("aten::")
        given = tensors_of((args, kwargs))
        self.check(name, args, given)
        result = func(*args, **kwargs)
        if self.place(name, args, given).type == "cuda":
            for tensor in tensors_of(result):
                MARKS.put(tensor, GPU)
        return result

    def check(self, name: str, args: tuple, given: list[Tensor]) -> None:
        "Refuse what CUDA refuses, and count transfers."
        on_gpu = [MARKS.on_gpu(t) for t in given]
        if name in WAITS and any(on_gpu):
            self.device.count("wait", name)
        if name in INDEXING:
            self.check_index(name, args)
        elif name == "copy_" and on_gpu[0] != on_gpu[1]:
            self.device.count("upload" if on_gpu[0] else "download", name)
        elif name not in COPIES and any(on_gpu):
            strict = name.startswith(STRICT)
            if any(not gpu and (t.ndim or strict) for t, gpu in zip(given, on_gpu)):
                self.device.refuse(name, given)

    def check_index(self, name: str, args: tuple) -> None:
        """An index on the CPU is copied to the GPU; one on the GPU cannot reach into the CPU's
        memory."""
        values, indices = args[0], tensors_of(args[1])
        for index in indices:
            if MARKS.on_gpu(index) and not MARKS.on_gpu(values):
                self.device.refuse(name, args)
            if MARKS.on_gpu(values) and not MARKS.on_gpu(index):
                self.device.count("upload", name)
            if MARKS.on_gpu(values) and index.dtype in (torch.bool, torch.uint8):
                self.device.count("wait", name)
        new = args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None
        if new is not None and new.ndim and MARKS.on_gpu(new) != MARKS.on_gpu(values):
            self.device.refuse(name, args)

    def place(self, name: str, args: tuple, given: list[Tensor]) -> torch.device:
        "Where the results of an operation lie."
        if not given:
            return self.device.within
        if name in INDEXING or name in COPIES:
            return MARKS.device(given[0])
        return GPU if any(MARKS.on_gpu(t) for t in given) else CPU


class PythonCalls(TorchFunctionMode):
    "Above autograd: answers which device a tensor is on, and moves tensors from one to the other."

    def __init__(self, device: VirtualDevice):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in ANSWERS:
            return ANSWERS[func](args[0])
        if func is Tensor.backward:
            return self.run(self.backward, args, kwargs)
        if func in (Tensor.cpu, Tensor.cuda):
            return self.move(args[0], CPU if func is Tensor.cpu else GPU)
        if func is Tensor.to:
            return self.to(args[0], args[1:], kwargs)
        if func is Tensor.__deepcopy__:  # copies the storage without an operation
            return self.copied(args[0], self.run(func, args, kwargs))
        if func in (Tensor.numpy, Tensor.__array__) and MARKS.on_gpu(args[0]):
            self.device.refuse("numpy", args[0])
        if func is Tensor.tolist and MARKS.on_gpu(args[0]):
            self.device.count("wait", "tolist")
        if named_device(kwargs.get("device")) is not None:
            return self.make(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func, args: tuple, kwargs: dict):
        "Call `func`; what it makes out of nothing lies where its tensors do."
        outer = self.device.within
        self.device.within = (
            GPU if any(MARKS.on_gpu(t) for t in tensors_of((args, kwargs))) else CPU
        )
        try:
            return func(*args, **kwargs)
        finally:
            self.device.within = outer

    def backward(self, loss: Tensor, gradient=None, **options) -> None:
        """Go backward under this mode, so that activations which are computed again are watched,
        too."""
        with self:
            torch.autograd.backward(loss, gradient, **options)

    def copied(self, tensor: Tensor, copy: Tensor) -> Tensor:
        "Return the copy, on the device of what it is a copy of."
        MARKS.put(copy, MARKS.device(tensor))
        return copy

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        "Return the tensor on a device: itself if it lies there."
        if (
            not isinstance(tensor, Tensor)
            or tensor.device.type != "cpu"
            or MARKS.device(tensor).type == device.type
        ):
            return tensor
        self.device.count("upload" if device.type == "cuda" else "download", "to")
        moved = tensor.clone()
        MARKS.put(moved, device)
        return moved

    def to(self, tensor: Tensor, args: tuple, kwargs: dict) -> Tensor:
        "Return `tensor.to(…)`: a device, a dtype, or both, or those of another tensor."
        like = [t for t in (*args, kwargs.pop("other", None)) if isinstance(t, Tensor)]
        places = [*map(MARKS.device, like), *map(named_device, (*args, kwargs.pop("device", None)))]
        dtypes = [t.dtype for t in like] + [
            a for a in (*args, kwargs.pop("dtype", None)) if isinstance(a, torch.dtype)
        ]
        kwargs = {key: value for key, value in kwargs.items() if key in ("copy", "memory_format")}
        result = tensor.to(*dtypes[:1], **kwargs) if dtypes or kwargs else tensor
        places = [place for place in places if place is not None]
        return self.move(result, places[0]) if places else result

    def make(self, func, args: tuple, kwargs: dict):
        "Call a function that names the device of its result."
        device = named_device(kwargs.pop("device"))
        if device.type == "cuda" and kwargs.get("generator") is not None:
            self.device.refuse(f"{func.__name__} with a generator of the CPU", args)
        result = func(*args, device=CPU, **kwargs)
        given = tensors_of((args, kwargs))
        if func in (torch.tensor, torch.as_tensor):
            if given:
                return self.move(result, device)
            self.device.count("upload", func.__name__) if device.type == "cuda" else None
        for tensor in tensors_of(result):
            MARKS.put(tensor, device)
        return result


ANSWERS = {
    Tensor.device.__get__: MARKS.device,
    Tensor.is_cuda.__get__: lambda tensor: MARKS.device(tensor) == GPU,
    Tensor.is_cpu.__get__: lambda tensor: MARKS.device(tensor) == CPU,
}
