"""How much memory tensors take."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Memory(TorchDispatchMode):
    """The bytes of what operations of torch have made and somebody holds, and the most of them."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        fresh = not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
        strided = isinstance(out, torch.Tensor) and out.layout is torch.strided and not out.is_meta
        if fresh and strided and "from_file" not in func.name():
            self._note(out.untyped_storage())
        return out

    def _note(self, storage):
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, nbytes):
        self.now -= nbytes
