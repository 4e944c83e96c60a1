"""The grouped kernels in Triton's interpreter, on the host.

The interpreter's switch is read when a kernel is defined: this runs in a process started with TRITON_INTERPRET=1.
"""

import builtins
import importlib
import pickle
from typing import Any

import numpy as np
import torch


def _range(*bounds: Any) -> range:
    """Accept the interpreter's scalars, which are arrays of one element: numpy 2.4 makes no index of those."""
    return builtins.range(*(int(bound.handle.data.item()) if hasattr(bound, "handle") else bound for bound in bounds))


def _widened(operand: Any) -> Any:
    """Turn an array of bfloat16 bits, which the interpreter would multiply as integers, into float32."""
    if operand.dtype.scalar.name == "bf16":
        operand.data = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand


def _interpreter() -> None:
    """Mend what Triton's interpreter cannot do."""
    kernels: Any = importlib.import_module("lucid_optim.kernels")
    kernels.range = _range
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    if not hasattr(builder, "create_integer_dot"):
        builder.create_integer_dot = builder.create_dot
        builder.create_dot = lambda self, a, b, *rest: self.create_integer_dot(_widened(a), _widened(b), *rest)


def orthogonalized_in_groups(request: bytes) -> bytes:
    """Run `grouped.orthogonalize` on pickled arguments and return the pickled results and the arguments afterwards."""
    torch.set_num_threads(1)
    _interpreter()
    grouped = importlib.import_module("lucid_optim.grouped")
    matrices, scheme, options = pickle.loads(request)
    results = grouped.orthogonalize(matrices, scheme, **options)
    allocations = {result.untyped_storage().data_ptr() for result in results}
    shared = any(matrix.untyped_storage().data_ptr() in allocations for matrix in matrices)
    # Tensors that share storage are pickled as such; what is compared is their values.
    return pickle.dumps(([result.clone() for result in results], matrices, len(allocations), shared))
