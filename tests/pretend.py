"""A pretend GPU: values live on the CPU, the rules are those of a GPU, and everything is counted.

    with pretend('cuda'):              # torch.device('cuda') exists in here
        stream = make_stream(…, device='cuda')
        with watched() as log: learner.observe(block)
    log.launches, log.syncs            # operators, and (where, what) of every wait for the device

A tensor is on the device if its storage is marked. A torch function mode answers what would ask the GPU's
runtime (`.device`, factories, `.to`, `.cpu`, `.numpy`); a dispatch mode sees every operator, asks torch's own
fake tensors whether these devices may be mixed and where the result is, and counts. `pretend('mps')` also
refuses double precision, which Apple's GPUs do not have. `launches` counts what a sample costs a method;
`python tests/pretend.py` prints it for five of them.
"""
import os, sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor as fake
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

PACKAGE = f'{Path(__file__).resolve().parent.parent/"bicl"}{os.sep}'
FREE = set('view _unsafe_view as_strided expand transpose t permute select slice unsqueeze squeeze detach alias split '
           'split_with_sizes unbind unfold diagonal _reshape_alias lift_fresh empty empty_like empty_strided new_empty '
           'new_empty_strided is_same_size set_ resize_ view_as_real chunk unsafe_split _local_scalar_dense'.split())
WAITS = set('_local_scalar_dense nonzero equal is_nonzero masked_select _unique _unique2 unique_dim '
            'unique_consecutive repeat_interleave'.split()) # their result, or its shape, is a number on the host


class Mixed(RuntimeError): "Tensors of different devices where torch does not allow it."


@dataclass
class Log:
    "What happened on the device."
    launches: int = 0  # operators that start work there; a fused list of tensors counts as one
    syncs: Counter = field(default_factory=Counter)  # (function of the package, operator): waits of the host


def where():
    "The innermost function of the package that is running, such as `baselines.sgd_torch`, whatever it has defined within."
    f = sys._getframe(1)
    while f and not f.f_code.co_filename.startswith(PACKAGE): f = f.f_back
    return f'{Path(f.f_code.co_filename).stem}.{f.f_code.co_qualname.split(".<locals>")[0]}' if f else 'elsewhere'


def flat(values):
    "All tensors among the arguments or results of an operator: they, or lists of them."
    for v in values:
        if isinstance(v, torch.Tensor): yield v
        elif isinstance(v, (list, tuple)): yield from flat(v)


class Device:
    "The marks of all tensors on the device, and the logs that are open."
    def __init__(self, kind):
        self.kind, self.marked, self.logs, self.rules, self.graph = torch.device(kind, 0), {}, [], {}, None

    def has(self, t):
        if torch._C._functorch.is_functorch_wrapped_tensor(t): return self.has(torch._C._functorch.get_unwrapped(t))
        return t.untyped_storage()._cdata in self.marked

    def mark(self, t):
        if not self.double and t.dtype == torch.float64: raise TypeError(f'{where()}: no float64 on this device')
        s = t.untyped_storage()
        self.marked[s._cdata] = StorageWeakRef(s)  # held, so that its address is not used again
        return t

    def launch(self):
        for log in self.logs: log.launches += 1

    def sync(self, what):
        if self.graph: raise RuntimeError(f'{what} in {where()}: not permitted while a graph is recorded')
        for log in self.logs: log.syncs[where(), what] += 1

    def move(self, t, target, what):
        "A copy of `t` on the other side, if it is not there already."
        if self.has(t) == (target.type == self.kind.type): return t
        self.sync(what)
        copy = t.clone()
        if target.type == self.kind.type: return self.mark(copy)
        del self.marked[copy.untyped_storage()._cdata]
        return copy


class Questions(TorchFunctionMode):
    "What Python code asks about devices, or wants to be made on one or moved to one."
    def __init__(self, device): super().__init__(); self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, d = dict(kwargs or {}), getattr(func, '__name__', ''), self.device
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == '__get__':
            asked = func.__self__.__name__
            if asked in ('device', 'is_cuda', 'is_cpu', 'is_mps') and d.has(first):
                return d.kind if asked == 'device' else asked == f'is_{d.kind.type}'
        elif first is not None and name in ('to', 'cpu', 'cuda'): return self.moved(func, name, args, kwargs)
        elif first is not None and name in ('numpy', '__array__') and d.has(first):
            raise TypeError(f"can't convert {d.kind} device type tensor to numpy. Use Tensor.cpu() first")
        elif first is not None and name == 'tolist' and d.has(first): d.sync(name)
        elif kwargs.get('device') is not None and name != '_parse_to' and torch.device(kwargs['device']).type == d.kind.type:
            if name == 'as_tensor' and first is not None: return self.moved(torch.Tensor.to, 'to', args, kwargs)
            out = func(*args, **kwargs | dict(device='cpu'))
            d.sync(name) if name in ('tensor', 'as_tensor') else d.launch()
            return d.mark(out)
        return func(*args, **kwargs)

    def moved(self, func, name, args, kwargs):
        t, rest, target = args[0], [], dict(cpu='cpu', cuda='cuda').get(name)
        for a in args[1:]:
            if isinstance(a, (str, torch.device)): target = a
            elif isinstance(a, torch.Tensor):
                target = self.device.kind if self.device.has(a) else a.device
                rest.append(a.dtype)
            elif a is not None and not isinstance(a, bool): rest.append(a)  # no flags such as non_blocking
        if kwargs.get('device') is not None: target = kwargs['device']
        kwargs.pop('device', None)
        if target is not None: t = self.device.move(t, torch.device(target), name)
        if name in ('cpu', 'cuda'): return t
        return func(t, *rest, **kwargs) if name != 'to' or rest or kwargs else t


class Operators(TorchDispatchMode):
    "Every operator: may these devices be mixed, is it a wait, and where is the result?"
    def __init__(self, device): super().__init__(); self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, d, name = kwargs or {}, self.device, func.overloadpacket.__name__
        if torch.is_inference_mode_enabled() and func._can_decompose(): # else autograd has done it
            with self: return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            tensors = [*flat(args), *flat(kwargs.values())]
            here = [d.has(t) for t in tensors]
            if not any(here): return func(*args, **kwargs)
            key = func, *((h, t.dim() == 0) for h, t in zip(here, tensors))
            if key not in d.rules: d.rules[key] = allowed(func, args, kwargs, d.has)
            self.count(name, args, tensors, here)
            if d.graph: d.graph.save(func, args, kwargs)
            out = func(*args, **kwargs)
            if d.graph: d.graph.tape.append((func, args, kwargs, out))
            if name == 'copy_' or not d.rules[key]: return out
            inputs = {t.untyped_storage()._cdata for t in tensors}
            for o in flat([out]):
                if o.untyped_storage()._cdata not in inputs: d.mark(o)
            return out

    def count(self, name, args, tensors, here):
        index = list(flat(args[1:2])) if name in ('index', 'index_put', 'index_put_', '_index_put_impl_') else []
        if index and not here[0]: raise Mixed(f'{name}: a tensor of the host with an index on the device')
        masked = masks(index)
        if name in WAITS or masked: self.device.sync('mask' if masked else name)
        if index and here[0] and not all(map(self.device.has, index)): self.device.sync('index from the host')
        if name == 'copy_' and here[0] != here[1]: self.device.sync(name)
        if name not in FREE: self.device.launch()


def masks(index):
    "Are there masks among some indices?"
    return any(i.dtype in (torch.bool, torch.uint8) for i in index)


def allowed(func, args, kwargs, has):
    "Ask torch's own rules: is the result on the device? `Mixed` if the inputs may not meet."
    if func.overloadpacket.__name__ == 'index' and masks(flat(args[1:2])): return has(args[0])  # a fake would ask a real device
    with fake.FakeTensorMode():
        copy = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device='cuda' if has(t) else 'cpu')
        args, kwargs = tree_map(lambda a: copy(a) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        try: out = func(*args, **kwargs)
        except fake.FakeTensorDeviceMismatchError as e: raise Mixed(f'{func}: {e}') from None
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException): return True
        except RuntimeError as e:
            if 'device' in str(e): raise Mixed(f'{func}: {e}') from None
            raise
    return any(o.device.type == 'cuda' for o in flat([out]))


class Graph:
    "What `torch.cuda.CUDAGraph` does: a list of operators on fixed tensors, done again as they were recorded."
    def __init__(self): self.tape, self.before, self.device = [], {}, ACTIVE[-1]

    def save(self, func, args, kwargs):
        "Remember what this operator will overwrite: to record it is not to do it."
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is None or not a.alias_info.is_write: continue
            for t in flat([args[i] if i < len(args) else kwargs[a.name]]):
                s = t.untyped_storage()
                if s._cdata not in self.before: self.before[s._cdata] = s, s.clone()

    def replay(self):
        self.device.launch()
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for func, args, kwargs, out in self.tape:
                old = {t.untyped_storage()._cdata for t in (*flat(args), *flat(kwargs.values()))}
                for o, n in zip(flat([out]), flat([func(*args, **kwargs)])):
                    if o.untyped_storage()._cdata not in old: o.copy_(n)


@contextmanager
def graph(g):
    "What `torch.cuda.graph` does: record into `g`."
    g.device.graph = g
    try: yield
    finally:
        g.device.graph = None
        with _disable_current_modes():
            for s, was in g.before.values(): s.copy_(was)


@contextmanager
def pretend(kind='cuda', double=True):
    "Within this block there is a GPU, `cuda` or `mps`; whether it knows double precision can be said."
    device = DEVICES.setdefault(kind, Device(kind))  # the same as before: caches may hold tensors of it
    device.double = double and kind != 'mps'
    module = dict(cuda=torch.cuda, mps=torch.backends.mps)[kind]
    with patch.object(module, 'is_available', wraps(module.is_available)(lambda: True)), \
            patch.object(torch.cuda, 'CUDAGraph', Graph), patch.object(torch.cuda, 'graph', graph), \
            Questions(device), Operators(device):
        ACTIVE.append(device)
        try: yield device
        finally:
            ACTIVE.pop()
            device.marked = {k: s for k, s in device.marked.items() if not s.expired()}


DEVICES, ACTIVE = {}, []


@contextmanager
def watched():
    "What happens on the device within this block, as a `Log`."
    log = Log()
    ACTIVE[-1].logs.append(log)
    try: yield log
    finally: ACTIVE[-1].logs.remove(log)


def launches(method, sizes=(10, 20), benchmark='mnist-permutations', **settings):
    """What one more arriving sample costs: operators started on the GPU, and waits of the host.

    From blocks of two sizes in a second task, each met before, so that memories hold something and what can be
    recorded has been. A sample is one round of BiCL, one step of ER, GEM and Online, and many steps of MER."""
    from bicl.learner import make_learner
    from bicl.streams import make_stream
    with pretend():
        stream = make_stream(benchmark, (0, 1), tasks=2, per_task=2*sum(sizes), device='cuda')
        learner, found = make_learner(method, stream, **settings), []
        learner.observe(next(iter(stream.blocks(0, size=sizes[1]))))
        learner.end_task()
        for size in sizes:
            for block in islice(stream.blocks(1, size=size), 2):
                with watched() as log: learner.observe(block)
            found.append((log.launches, sum(log.syncs.values())))
    return tuple((b - a)/(sizes[1] - sizes[0]) for a, b in zip(*found))


if __name__ == '__main__':
    from bicl import baselines, bilevel, compiled, gem, replay  # noqa: F401  (they register)
    print('per sample  operators  waits')
    for m in ('BiCL', 'ER', 'GEM', 'MER', 'Online'):
        print('{:10} {:10.1f} {:6.1f}'.format(m, *launches(m, (1, 2) if m == 'MER' else (10, 20))))
